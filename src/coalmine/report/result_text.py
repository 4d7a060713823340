"""A result for people: ten lines, all details, a data frame, a plot, a notebook cell. `AuditResult` finds it by its name."""

import html
import importlib
import math
from collections.abc import Callable
from typing import Any

from coalmine.argument_checks import one_of
from coalmine.report import plots, svg
from coalmine.report.brief import answers, brief, headline
from coalmine.report.details import details
from coalmine.report.table_rows import all_rows, ladder_table, rung_verdict, table_rows
from coalmine.report.trade_off import curve, profile
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import Words

__all__ = ["brief", "details", "draw", "frame", "notebook"]
COLOURS = {"PASS": "#2e7d32", "VIOLATION": "#c62828", "UNDERPOWERED": "#b26a00"}
INCHES = (7.0, 3.2)


def frame(result: AuditResult) -> Any:
    """The ladder as numbers: a pandas DataFrame, or a dict of columns if pandas is not installed."""
    rows = all_rows(result)
    columns: dict[str, list[Any]] = {
        "adversary": [row.rung for row in rows],
        "presentations": [row.presentations for row in rows],
        "canaries": [row.canaries for row in rows],
        "epsilon": [row.epsilon for row in rows],
        "low": [math.nan if row.interval is None else row.interval[0] for row in rows],
        "high": [math.nan if row.interval is None else row.interval[1] for row in rows],
        "lower_bound": [row.lower_bound for row in rows],
        "lower_bound_gaussian": [_nan(row.lower_bound_gaussian) for row in rows],
        "low_gaussian": [math.nan if row.gaussian.interval is None else row.gaussian.interval[0] for row in rows],
        "high_gaussian": [math.nan if row.gaussian.interval is None else row.gaussian.interval[1] for row in rows],
        "floor": [row.floor for row in rows],
        "paper_epsilon": [row.paper_epsilon for row in rows],
        "paper_lower_bound": [row.paper_lower_bound for row in rows],
        "verdict": [rung_verdict(result, row.rung) for row in rows],
    }
    try:
        return importlib.import_module("pandas").DataFrame(columns)
    except ImportError:
        return columns


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def draw(result: AuditResult, kind: str = "ladder", ax: Any = None) -> Any:
    """Draw the result on matplotlib Axes, by default new ones, and return them."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError("plots need: pip install 'coalmine[report]'") from error
    kinds: dict[str, Callable[..., Any]] = {"ladder": plots.ladder, "curve": curve, "profile": profile}
    one_of("kind", kind, kinds)
    if ax is None:
        _, ax = pyplot.subplots(figsize=INCHES, layout="constrained")
    kinds[kind](ax, result).legend()
    return ax


def notebook(result: AuditResult) -> str:
    """The result as an HTML cell: a box with the verdict, the ladder, and the details folded away."""
    words, verdict = Words.of(result), result.verdict
    colour = COLOURS.get("" if verdict is None or result.claim is None else str(verdict.outcome), "#555555")
    lines = "".join(
        f"<tr><th style='text-align:left;vertical-align:top'>{html.escape(label)}</th>"
        f"<td style='text-align:left'>{html.escape(words.say(text))}</td></tr>"
        for label, text in answers(result)
        if label != "more"
    )
    heads, cells = ladder_table(result)
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in cells)
    return (
        f"<div style='border-left:6px solid {colour};padding:0 1em'>"
        f"<p><b>{html.escape(words.say(headline(result)))}</b></p><table>{lines}</table></div>"
        f"{_picture(result)}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<details><summary>Details</summary><pre>{html.escape(details(result))}</pre></details>"
    )


def _picture(result: AuditResult) -> str:
    """The ladder as an inline picture; empty without matplotlib, or without a row to draw."""
    rows = table_rows(result)
    if not rows:
        return ""
    try:
        picture = svg.draw(svg.one_axes(plots.ladder, result, legend=3), height=1.6 + 0.46 * len(rows))
    except ImportError:
        return ""
    return f"<div style='max-width:50em'>{picture[picture.index('<svg') :]}</div>"
