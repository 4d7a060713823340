"""The report as Markdown and as JSON: the same words and figures, without pictures."""

import re
from collections.abc import Sequence
from typing import Any

from coalmine.argument_checks import one_line
from coalmine.audit.gauge import LAYER
from coalmine.audit.result import AuditResult
from coalmine.report.advice import next_steps
from coalmine.report.sentences import (
    ATTACKERS,
    assumptions,
    interval_text,
    meaning,
    scope_sentence,
    shortened,
    shown,
    verdict_sentence,
)
from coalmine.report.stored_run import Run
from coalmine.report.summary import claim_words, folded_line, key_figures, legs_of, tensor_names
from coalmine.report.table_rows import published_row, row_warnings, rung_verdict, shown_rows, top_row
from coalmine.report.trainer_entries import client_exposure, note_lines
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
                "scope": scope_sentence(run.result),
                "figures": [vars(figure) for figure in key_figures(run.result)],
                "legs": [vars(leg) for leg in legs_of(run.result)],
                "next_steps": next_steps(run),
                "problems": list(run.problems),
                "commitment": None if run.commitment is None else vars(run.commitment),
                "config": run.config,
                "result": run.result.to_dict(),
            }
            | ({"estimators": [vars(row) for row in run.published]} if len(runs) == 1 else {})
            for run in runs
        ],
    }


def _run_markdown(run: Run, *, published: bool) -> str:
    result, top = run.result, top_row(run.result)
    reason = "" if result.verdict is None else result.verdict.reason
    parts = [f"## {plain(run.name)}", f"**{plain(verdict_sentence(run))}**"]
    parts += [plain(text) for text in (shortened(reason), scope_sentence(result)) if text]
    figures = [[figure.label, shown(figure.value), figure.detail] for figure in key_figures(result)]
    if figures:
        parts.append(_table(["number", "ε", "whose it is"], figures))
    legs = legs_of(result)
    if legs:
        parts.append("The three legs of the claim, of which a PASS needs all:")
        parts.append(
            _table(["leg", "outcome", "asks", "why"], [[x.title, x.outcome, x.question, x.reason] for x in legs])
        )
        parts.append(plain(f"The claim is {claim_words(result)}."))
    fit = result.adversaries["unknown-round"].headline.fit if "unknown-round" in result.adversaries else None
    if fit is not None:
        parts.append(
            "The canaries' scores against the accountant's law of the privacy loss: Kolmogorov–Smirnov p = "
            f"{shown(fit.p_value)}."
        )
    if result.audited:
        parts.append("What was audited:")
        cells = [[item.name, item.status, item.detail] for item in result.audited]
        parts.append(_table(["item", "status", "why"], cells))
    if top is not None:
        parts.append(meaning(top.epsilon, result.settings.delta))
    parts += _attackers(result)
    parts += _gauges(result)
    if published and run.published:
        row = published_row(result)
        parts.append(f"Every published estimator on the scores of {plain(row.name) if row else ''}:")
        parts.append(_published(run))
    steps = next_steps(run)
    if steps:
        parts.append("What to do next:\n\n" + "\n".join(f"- {_keeping_code(step)}" for step in steps))
    notes = note_lines(result)
    if notes:
        parts.append("Notes:\n\n" + "\n".join(f"- {_keeping_code(note)}" for note in notes))
    if run.commitment is not None:
        parts.append(
            f"Commitment, published before round 1: {plain(run.commitment.statement_sha256)} (salt "
            f"{plain(run.commitment.salt)})"
        )
    if isinstance(digest := result.extra.get("log_digest"), str):
        parts.append(f"Digest of the log when the run ended: {plain(digest)}")
    parts += [f"> not read: {plain(problem)}" for problem in run.problems]
    return "\n\n".join(parts)


def _attackers(result: AuditResult) -> list[str]:
    """One row for each attacker, how many rows are left out, and the warnings of those that are shown."""
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
            f"{row.name}, pooled" if row.pooled else row.name,
            ATTACKERS.get(row.rung, "an attack of your own"),
            f"{shown(row.epsilon)} (std fitted)" if row.std_fitted else shown(row.epsilon),
            interval_text(row.interval),
            shown(row.lower_bound),
            shown(row.floor),
            shown(row.paper_epsilon),
            shown(row.paper_lower_bound),
            rung_verdict(result, row.rung),
        ]
        for row in shown_rows(result)
    ]
    parts = [_table(heads, rows)]
    folded = folded_line(result)
    if folded:
        parts.append(f"{folded}: `coalmine report --format json` and result.json have them.")
    warnings = row_warnings(result)
    if warnings:
        parts.append("\n".join(f"- {_keeping_code(line)}" for line in warnings))
    return parts


def _gauges(result: AuditResult) -> list[str]:
    """Every gauge, but of the tensors within their limits the names alone."""
    if not result.gauges:
        return []
    quiet = [gauge for gauge in result.gauges if gauge.name.startswith(LAYER) and gauge.status == "ok"]
    cells = [
        [
            gauge.name,
            shown(gauge.smallest),
            shown(gauge.largest),
            " … ".join(map(shown, gauge.limits)),
            gauge.status,
        ]
        for gauge in result.gauges
        if gauge not in quiet
    ]
    parts = [_table(["gauge", "smallest", "largest", "limits", "status"], cells)] if cells else []
    if quiet:
        names = ", ".join(gauge.name.removeprefix(LAYER) for gauge in quiet)
        parts.append(plain(f"{len(quiet)} of {len(tensor_names(result))} tensors are within their limits: {names}"))
    return parts


def _published(run: Run) -> str:
    cells = [[row.name, shown(row.value), row.kind, row.threshold, assumptions(row)] for row in run.published]
    return _table(["method", "ε", "kind", "threshold", "assumes"], cells)


def _overview(runs: Sequence[Run]) -> str:
    heads = [
        "run",
        "verdict",
        "noise multiplier",
        "accuracy",
        "analytical ε",
        "client's ε",
        "measured by",
        "measured ε",
        "lower bound",
    ]
    rows = []
    for run in runs:
        top, client, verdict = top_row(run.result), client_exposure(run.result), run.result.verdict
        accuracy = "–" if run.accuracy is None else f"{run.accuracy:.1%}"
        figures = ["–"] * 3 if top is None else [top.name, shown(top.epsilon), shown(top.lower_bound)]
        rows.append(
            [
                run.name,
                "–" if verdict is None else str(verdict.outcome),
                shown(run.noise_multiplier),
                accuracy,
                shown(run.result.analytical_epsilon),
                "–" if client is None else f"{shown(client.epsilon)} ({client.rounds}×)",
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
    escaped = re.sub(r"([\\`*_|\[\]#])", r"\\\1", one_line(text))
    return escaped.replace("<", "&lt;").replace(">", "&gt;")


def _keeping_code(text: str) -> str:
    parts = text.split("`")
    return "".join(f"`{part}`" if place % 2 else plain_inside(part) for place, part in enumerate(parts))


def plain_inside(text: str) -> str:
    """The same with the spaces at both ends kept."""
    return f"{' ' * text.startswith(' ')}{plain(text)}{' ' * (text.endswith(' ') and bool(text.strip()))}"
