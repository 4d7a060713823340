"""A run in progress as one screen of text."""

from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coalmine.argument_checks import one_line
from coalmine.evidence.ladder import RUNGS
from coalmine.report.brief import brief
from coalmine.report.live_view import Frame, plottable
from coalmine.report.sentences import ATTACKERS, shorten
from coalmine.result.audit_result import interval_ends
from coalmine.result.words import format_interval, format_number

BLOCKS = "▁▂▃▄▅▆▇█"


def screen(frame: Frame) -> Group:
    """A frame as a rich renderable."""
    parts: list[Any] = [_text(f"{frame.path}", style="bold"), _progress(frame)]
    metrics = Table.grid(padding=(0, 2))
    for name in ("accuracy", "clip_norm", "clients", "canaries"):
        values = [line[name] for line in frame.metrics if plottable(line.get(name))]
        if values:
            last = f"{values[-1]:.1%}" if name == "accuracy" else format_number(float(values[-1]))
            metrics.add_row(name.replace("_", " "), last, sparkline(values) if len(set(values)) > 1 else "")
    if metrics.row_count:
        parts.append(metrics)
    if frame.estimates:
        table = Table("adversary", "sees", title="ε so far", title_justify="left")
        for head in ("ε", "95 % interval", "floor"):
            table.add_column(head, justify="right")
        for rung in [
            *(rung for rung in RUNGS if rung in frame.estimates),
            *(r for r in frame.estimates if r not in RUNGS),
        ]:
            estimate = frame.estimates[rung]
            interval = format_interval(interval_ends(estimate.interval))
            floor = format_number(estimate.floor.q95)
            table.add_row(_text(rung), ATTACKERS.get(rung, ""), format_number(estimate.epsilon), interval, floor)
        parts.append(table)
    if frame.alarm_state is not None:
        style = "bold red" if frame.alarm_state.alarm else ""
        parts.append(_text(shorten(frame.alarm_state.sentence), style=style))
    if frame.flagged:
        parts.append(
            _text("gauges (their limits hold for a single look): " + "; ".join(frame.flagged), style="bold red")
        )
    if frame.problem:
        parts.append(_text(frame.problem, style="yellow"))
    if frame.result is not None:
        parts += [_text(line) for line in brief(frame.result).splitlines()]
    if frame.finished:
        parts.append(_text(f"finished: coalmine report {frame.path}", style="green"))
    return Group(*parts)


def _text(text: str, style: str = "") -> Text:
    """Text from a file or a name, without interpreting its markup or control characters."""
    return Text(one_line(text), style=style)


def _progress(frame: Frame) -> Any:
    done = f"round {frame.rounds:,}" + (f" of {frame.planned:,}" if frame.planned else "")
    if not frame.planned:
        return Text(done)
    grid = Table.grid(padding=(0, 1))
    grid.add_row(done, ProgressBar(total=frame.planned, completed=frame.rounds, width=32), _time_left(frame))
    return grid


def _time_left(frame: Frame) -> str:
    times = [line["seconds"] for line in frame.metrics if plottable(line.get("seconds"))]
    if frame.finished or not times or not frame.planned or not frame.rounds:
        return ""
    return f"about {times[-1] / frame.rounds * (frame.planned - frame.rounds):,.0f} s left"


def sparkline(values: list[float], width: int = 40) -> str:
    """The numbers as a line of small bars.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    kept = [values[place * len(values) // width] for place in range(width)] if len(values) > width else values
    low, high = min(kept), max(kept)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in kept)
