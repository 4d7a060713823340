"""The report as Markdown and as JSON: the same words and figures, without pictures."""

import re
from collections.abc import Sequence
from typing import Any

from coalmine.report.run import Run
from coalmine.report.words import ATTACKERS, meaning, next_steps, shown, verdict_sentence
from coalmine.version import __version__


def markdown(runs: Sequence[Run], refused: Sequence[str] = ()) -> str:
    """The runs as Markdown, one after another, a table of all of them first where there are several."""
    parts = [f"> not read: {plain(line)}" for line in refused]
    if len(runs) > 1:
        parts.append(_overview(runs))
    parts += [_run_markdown(run, published=len(runs) == 1) for run in runs]
    return "\n\n".join(parts) + "\n"


def as_dict(runs: Sequence[Run], refused: Sequence[str] = ()) -> dict[str, Any]:
    """The runs for a program: each result as it is, with the report's words beside it."""
    return {
        "schema_version": 1,
        "coalmine": __version__,
        "refused": list(refused),
        "runs": [
            {
                "path": str(run.path),
                "finished": run.finished,
                "sentence": verdict_sentence(run),
                "next_steps": next_steps(run),
                "problems": list(run.problems),
                "commitment": None if run.commitment is None else vars(run.commitment),
                "config": run.config,
                "result": run.findings.raw,
            }
            | ({"estimators": [vars(row) for row in run.published]} if len(runs) == 1 else {})
            for run in runs
        ],
    }


def _run_markdown(run: Run, *, published: bool) -> str:
    findings, strongest = run.findings, run.findings.strongest
    parts = [f"## {plain(run.name)}", f"**{plain(verdict_sentence(run))}**"]
    if findings.reason:
        parts.append(plain(findings.reason))
    if strongest is not None:
        parts.append(meaning(strongest.epsilon, findings.delta))
    heads = [
        "adversary",
        "sees",
        "ε",
        "95 % interval",
        "lower bound (valid)",
        "floor",
        "paper's ε",
        "paper's ε_lo (heuristic)",
        "verdict",
    ]
    rows = [
        [
            row.name,
            ATTACKERS.get(row.rung, "an attack of your own"),
            shown(row.epsilon),
            "none" if row.interval is None else f"{shown(row.interval[0])} … {shown(row.interval[1])}",
            shown(row.lower_bound),
            shown(row.floor),
            shown(row.paper_epsilon),
            shown(row.paper_lower_bound),
            findings.verdicts.get(row.rung, ""),
        ]
        for row in findings.listed
    ]
    parts.append(_table(heads, rows))
    if findings.analytical is not None:
        parts.append(f"Analytical ε: {shown(findings.analytical)}")
    if findings.gauges:
        cells = [
            [
                gauge.name,
                shown(gauge.smallest),
                shown(gauge.largest),
                " … ".join(map(shown, gauge.limits)),
                gauge.status,
            ]
            for gauge in findings.gauges
        ]
        parts.append(_table(["gauge", "smallest", "largest", "limits", "status"], cells))
    if published and run.published:
        parts.append(f"Every published estimator on the scores of {plain(strongest.name) if strongest else ''}:")
        parts.append(_published(run))
    steps = next_steps(run)
    if steps:
        parts.append("What to do next:\n\n" + "\n".join(f"- {_keeping_code(step)}" for step in steps))
    if run.commitment is not None:
        parts.append(
            f"Commitment to the seed: sha256 {plain(run.commitment.sha256)}, salt {plain(run.commitment.salt)}"
        )
    parts += [f"> not read: {plain(problem)}" for problem in run.problems]
    return "\n\n".join(parts)


def _published(run: Run) -> str:
    cells = [
        [
            row.name,
            shown(row.value),
            row.kind,
            row.threshold,
            row.assumptions if row.needs is None else f"not applicable: {row.needs}",
        ]
        for row in run.published
    ]
    return _table(["method", "ε", "kind", "threshold", "assumes"], cells)


def _overview(runs: Sequence[Run]) -> str:
    heads = [
        "run",
        "verdict",
        "noise multiplier",
        "accuracy",
        "analytical ε",
        "strongest adversary",
        "ε",
        "lower bound",
    ]
    rows = []
    for run in runs:
        strongest = run.findings.strongest
        accuracy = "–" if run.accuracy is None else f"{run.accuracy:.1%}"
        figures = (
            ["–"] * 3 if strongest is None else [strongest.name, shown(strongest.epsilon), shown(strongest.lower_bound)]
        )
        rows.append(
            [
                run.name,
                run.findings.verdict or "–",
                shown(run.noise_multiplier),
                accuracy,
                shown(run.findings.analytical),
                *figures,
            ]
        )
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line.

    >>> print(plain("a|b <script> `x`"))
    a\|b &lt;script&gt; \`x\`
    """
    one_line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    escaped = re.sub(r"([\\`*_|\[\]#])", r"\\\1", one_line)
    return escaped.replace("<", "&lt;").replace(">", "&gt;")


def _keeping_code(text: str) -> str:
    parts = text.split("`")
    return "".join(f"`{part}`" if place % 2 else plain_inside(part) for place, part in enumerate(parts))


def plain_inside(text: str) -> str:
    """The same with the spaces at both ends kept."""
    return f"{' ' * text.startswith(' ')}{plain(text)}{' ' * (text.endswith(' ') and bool(text.strip()))}"
