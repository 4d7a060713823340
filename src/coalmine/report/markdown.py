"""The report as Markdown and as JSON: the same text and numbers, without pictures."""

import re
from collections.abc import Sequence
from typing import Any

from coalmine.argument_checks import one_line
from coalmine.report.advice import next_steps
from coalmine.report.brief import answers, item_status
from coalmine.report.details import claim_basis, client_exposure, figure_text, figures, folded_line, tensor_names
from coalmine.report.sentences import ATTACKERS, LEGS, assumptions, meaning, run_sentence, scope_sentence, shorten
from coalmine.report.stored_run import Run
from coalmine.report.table_rows import (
    ANY_LAW_HEAD,
    GAUSSIAN_HEAD,
    bound_notes,
    published_row,
    row_warnings,
    rung_verdict,
    table_rows,
    top_row,
)
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import Words, format_bound, format_interval, format_number
from coalmine.version import __version__


def markdown(runs: Sequence[Run], refused: Sequence[str] = ()) -> str:
    """The runs as Markdown, one after another. Several runs have a table of all of them first."""
    parts = [f"> not read: {escape_markdown(line)}" for line in refused]
    if len(runs) > 1:
        parts.append(_overview_table(runs))
    parts += [_run_markdown(run, published=len(runs) == 1) for run in runs]
    return "\n\n".join(parts) + "\n"


def as_dict(runs: Sequence[Run], refused: Sequence[str] = ()) -> dict[str, Any]:
    """The runs for a program: each stored result, with the report's sentences beside it."""
    return {
        "schema_version": 1,
        "coalmine": __version__,
        "refused": list(refused),
        "runs": [
            {
                "path": str(run.path),
                "finished": run.finished,
                "sentence": run_sentence(run),
                "answers": dict(answers(run.result)),
                "scope": scope_sentence(run.result),
                "figures": [
                    {"label": name, "value": value, "detail": detail} for name, value, detail in figures(run.result)
                ],
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
    result, top, words = run.result, top_row(run.result), Words.of(run.result)
    reason = "" if result.verdict is None else words.say(result.verdict.reason)
    parts = [f"## {escape_markdown(run.name)}", f"**{escape_markdown(run_sentence(run))}**"]
    parts.append(_table(["", "answer"], [[label, words.say(text)] for label, text in answers(result)]))
    parts += [escape_markdown(text) for text in (shorten(reason), scope_sentence(result)) if text]
    numbers = [[name, figure_text(name, value), words.say(detail)] for name, value, detail in figures(result)]
    if numbers:
        parts.append(_table(["number", "ε", "details"], numbers))
    if result.legs:
        parts.append("The three parts of the claim (a PASS needs all three):")
        legs = [[name, str(leg.outcome), LEGS[name], words.say(leg.reason)] for name, leg in result.legs.items()]
        parts.append(_table(["part", "outcome", "question", "reason"], legs))
        parts.append(escape_markdown(f"The claim: {claim_basis(result)}."))
    fit = result.adversaries["unknown-round"].headline.fit if "unknown-round" in result.adversaries else None
    if fit is not None:
        parts.append(
            "Test of the canaries' scores against the accountant's law of the privacy loss: Kolmogorov–Smirnov p = "
            f"{format_number(fit.p_value)}."
        )
    if result.audited:
        parts.append("What was audited:")
        cells = [[item.name, item_status(result, item), words.say(item.detail)] for item in result.audited]
        parts.append(_table(["item", "status", "reason"], cells))
    if top is not None:
        parts.append(meaning(top.epsilon, result.settings.delta))
    parts += _attackers_section(result)
    parts += _gauges_section(result)
    if published and run.published:
        row = published_row(result)
        parts.append(f"Every published estimator on the scores of {escape_markdown(row.name) if row else ''}:")
        parts.append(_published_table(run))
    steps = next_steps(run)
    if steps:
        parts.append("What to do next:\n\n" + "\n".join(f"- {_escape_outside_code(step)}" for step in steps))
    if result.notes:
        parts.append("Notes:\n\n" + "\n".join(f"- {_escape_outside_code(words.say(note))}" for note in result.notes))
    if run.commitment is not None:
        parts.append(
            f"Commitment, published before round 1: {escape_markdown(run.commitment.statement_sha256)} (salt "
            f"{escape_markdown(run.commitment.salt)})"
        )
    if result.log_digest is not None:
        parts.append(f"Digest of the log when the run ended: {escape_markdown(result.log_digest)}")
    parts += [f"> not read: {escape_markdown(problem)}" for problem in run.problems]
    return "\n\n".join(parts)


def _attackers_section(result: AuditResult) -> list[str]:
    """A table with one row for each attacker, the number of omitted rows, and the warnings of the rows in the table."""
    heads = [
        "adversary",
        "sees",
        "ε",
        "95 % interval",
        GAUSSIAN_HEAD,
        ANY_LAW_HEAD,
        "floor",
        "paper's ε",
        "paper's ε_lo (heuristic)",
        "verdict",
    ]
    rows = [
        [
            f"{row.name}, pooled" if row.pooled else row.name,
            ATTACKERS.get(row.rung, "an attack of your own"),
            f"{format_number(row.epsilon)} (std fitted)" if row.std_fitted else format_number(row.epsilon),
            format_interval(row.interval),
            format_bound(row.lower_bound_gaussian),
            format_bound(row.lower_bound),
            format_number(row.floor),
            format_number(row.paper_epsilon),
            format_number(row.paper_lower_bound),
            rung_verdict(result, row.rung),
        ]
        for row in table_rows(result)
    ]
    parts = [_table(heads, rows)]
    folded = folded_line(result)
    if folded:
        parts.append(f"{folded}: `coalmine report --format json` and result.json have them.")
    warnings = [*bound_notes(result), *row_warnings(result)]
    if warnings:
        parts.append("\n".join(f"- {_escape_outside_code(line)}" for line in warnings))
    return parts


def _gauges_section(result: AuditResult) -> list[str]:
    """A table of all gauges; tensors within their limits are only listed by name."""
    if not result.gauges:
        return []
    tensors_ok = [gauge for gauge in result.gauges if gauge.part and gauge.status == "ok"]
    cells = [
        [
            gauge.gauge.name,
            gauge.name,
            format_number(gauge.smallest),
            format_number(gauge.largest),
            " … ".join(map(format_number, gauge.limits)),
            gauge.status,
        ]
        for gauge in result.gauges
        if gauge not in tensors_ok
    ]
    parts = [_table(["gauge", "statistic", "smallest", "largest", "limits", "status"], cells)] if cells else []
    if tensors_ok:
        names = ", ".join(gauge.part for gauge in tensors_ok)
        parts.append(
            escape_markdown(
                f"{len(tensors_ok)} of {len(tensor_names(result))} tensors are within their limits: {names}"
            )
        )
    return parts


def _published_table(run: Run) -> str:
    cells = [[row.name, format_number(row.value), row.kind, row.threshold, assumptions(row)] for row in run.published]
    return _table(["method", "ε", "kind", "threshold", "assumes"], cells)


def _overview_table(runs: Sequence[Run]) -> str:
    heads = [
        "run",
        "verdict",
        "noise multiplier",
        "accuracy",
        "analytical ε",
        "client's ε",
        "measured by",
        "measured ε",
        GAUSSIAN_HEAD,
        ANY_LAW_HEAD,
    ]
    rows = []
    for run in runs:
        top, client, verdict = top_row(run.result), client_exposure(run.result), run.result.verdict
        accuracy = "–" if run.accuracy is None else f"{run.accuracy:.1%}"
        figures = ["–"] * 4
        if top is not None:
            figures = [
                top.name,
                format_number(top.epsilon),
                *map(format_bound, (top.lower_bound_gaussian, top.lower_bound)),
            ]
        rows.append(
            [
                run.name,
                "–" if verdict is None else str(verdict.outcome),
                format_number(run.noise_multiplier),
                accuracy,
                format_number(run.result.analytical_epsilon),
                "–" if client is None else f"{format_number(client.epsilon)} ({client.rounds}×)",
                *figures,
            ]
        )
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([escape_markdown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape_markdown(text: str) -> str:
    r"""Text escaped for Markdown, on one line.

    >>> print(escape_markdown("a|b <script> `x`"))
    a\|b &lt;script&gt; \`x\`
    """
    escaped = re.sub(r"([\\`*_|\[\]#])", r"\\\1", one_line(text))
    return escaped.replace("<", "&lt;").replace(">", "&gt;")


def _escape_outside_code(text: str) -> str:
    parts = text.split("`")
    return "".join(f"`{part}`" if place % 2 else _escape_keeping_spaces(part) for place, part in enumerate(parts))


def _escape_keeping_spaces(text: str) -> str:
    """Text escaped for Markdown, with its leading and trailing spaces."""
    return f"{' ' * text.startswith(' ')}{escape_markdown(text)}{' ' * (text.endswith(' ') and bool(text.strip()))}"
