"""The report as one HTML file: no network, light and dark, for a phone, a printer and a screen reader alike.

The templates hold the page's structure, and escape every value. This module holds what they show.
"""

import base64
import functools
import hashlib
import importlib.metadata
import math
import platform
import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from coalmine.argument_checks import printable
from coalmine.audit.gauge import LAYER
from coalmine.audit.result import AuditResult
from coalmine.report import plots
from coalmine.report.advice import next_steps
from coalmine.report.figures import comparison_pictures, run_pictures
from coalmine.report.sentences import (
    ATTACKERS,
    GLOSSARY,
    QUESTIONS,
    assumptions,
    interval_text,
    meaning,
    percent,
    scope_sentence,
    shortened,
    shown,
    suspicion,
    verdict_sentence,
)
from coalmine.report.statement import privacy_statement
from coalmine.report.statement_page import statement_context
from coalmine.report.stored_run import Run
from coalmine.report.summary import NAMED, claim_words, folded_line, key_figures, legs_of, tensor_names
from coalmine.report.table_rows import (
    all_rows,
    folded_rows,
    main_rows,
    published_row,
    row_warnings,
    rung_verdict,
    shown_rows,
    top_row,
    without,
)
from coalmine.report.trainer_entries import accounted_epsilon, client_exposure, note_lines
from coalmine.version import __version__

PACKAGES = ("numpy", "scipy", "matplotlib")
SHOWN_ELSEWHERE = {  # of what a trainer wrote
    "if_analytical_were_claimed", "trainer_notes", "warnings", "accounted_epsilon", "if_accounted_were_claimed",
    "if_mechanism_were_claimed",
}  # fmt: skip
CLAIM = (
    "analytical_epsilon",
    "claimed_epsilon",
    "claim_accounting",
    "claim_participations",
    "claim_sensitivity",
    "claim_sampling",
    "claim_noise_multiplier",
    "claim_sampler_observed",
    "clients",
)
OWN_THRESHOLDS = {
    "lower bound": "chosen on the same data, corrected",
    "paper's ε_lo": "chosen on the same data, not corrected",
}


@dataclass(frozen=True)
class LivePage:
    """What the page of a run that goes on shows beside the report: how the rounds stand to the claim.

    The page is loaded again every `seconds`, never where they are None.
    """

    sentence: str
    alarmed: bool
    seconds: int | None


def run_page(run: Run, live: "LivePage | None" = None) -> str:
    """The page of one run; a `live` one has the alarm on top, and reloads itself."""
    result, reason = run.result, _reason(run.result)
    tensors, meanings = tensor_names(result), _meanings(result)
    quiet = [gauge for gauge in result.gauges if gauge.name.startswith(LAYER) and gauge.status == "ok"]
    main = main_rows(result)
    return _render(
        "run.html",
        title=run.name,
        live=live,
        view=_view(run),
        unread=run.problems,
        below_verdict=[text for text in (shortened(reason), scope_sentence(result)) if text],
        key_figures=key_figures(result),
        legs=legs_of(result),
        claim_words=claim_words(result),
        audited=result.audited,
        many_tensors=tensors if len(tensors) > NAMED else [],  # beyond what the sentence beside them can name
        meaning=meaning(next(iter(meanings.values())), result.settings.delta) if meanings else "",
        meanings=meanings,
        notes=note_lines(result),
        pictures=run_pictures(run),
        warnings=row_warnings(result),
        recognised={
            plots.group_name(scores): [plots.true_positive_rate(scores, rate) for rate in (0.01, 0.001)]
            for scores in run.shown_scores
        },
        gauges=sorted((gauge for gauge in result.gauges if gauge not in quiet), key=lambda each: each.status == "ok"),
        quiet_tensors=quiet,
        estimator_rows=main,
        more_estimator_rows=without(all_rows(result), main),
        published_row=published_row(result),
        published=_published(run),
        settings=_settings(run),
        commitment=run.commitment,
        demonstration=run.demonstration,
        log_digest=str(result.extra.get("log_digest", "not written yet")),
        **_statement(run),
    )


def _statement(run: Run) -> dict[str, Any]:
    """What the section on the privacy statement shows; nothing of a run that is not finished."""
    if not run.finished:
        return {"statement": None}
    return statement_context(privacy_statement(run.result, commitment=run.commitment, demonstration=run.demonstration))


def waiting_page(name: str, reason: str, live: LivePage) -> str:
    """The page of a run of which there is nothing to show yet."""
    return _render("waiting.html", title=name, reason=reason, live=live)


def comparison_page(runs: Sequence[Run], refused: Sequence[str] = ()) -> str:
    """The page of several runs beside each other."""
    return _render(
        "comparison.html",
        title=f"{len(runs)} runs",
        live=None,
        views=[_view(run) for run in runs],
        unread=[*refused, *(f"{run.name}: {problem}" for run in runs for problem in run.problems)],
        with_client=any(client_exposure(run.result) for run in runs),
        rungs=list(dict.fromkeys(row.rung for run in runs for row in shown_rows(run.result))),
        pictures=comparison_pictures(runs),
    )


def _render(template: str, **context: Any) -> str:
    style, script = (
        resources.files("coalmine.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    style += resources.files("coalmine.report").joinpath("statement.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _environment().get_template(template).render(style=style, script=script, script_digest=digest, **context)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("coalmine.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.globals |= {
        "glossary": GLOSSARY, "attacker_sees": ATTACKERS, "questions": QUESTIONS, "version": __version__,
    }  # fmt: skip
    environment.filters |= {
        "figure": _figure, "interval": interval_text, "middle": _middle, "percent": percent, "printable": printable,
        "shown": shown, "slug": slug, "sort_key": _sort_key, "suspicion": suspicion, "visible": _visible,
    }  # fmt: skip
    return environment


def _view(run: Run) -> dict[str, Any]:
    """What both pages show of a run."""
    result, where = run.result, shlex.quote(str(run.path))
    top, client, rows = top_row(result), client_exposure(result), shown_rows(result)
    presentations = result.extra.get("presentations")
    if presentations is None:
        presentations = ", ".join(map(str, result.settings.presentations))
    again = [f"coalmine run --config {where}/config.toml --out AGAIN"] if "task" in run.config else []
    return {
        "name": run.name,
        "sentence": verdict_sentence(run),
        "verdict": "" if result.verdict is None else str(result.verdict.outcome),
        "reason": _reason(result),
        "measured": top.epsilon if top else None,
        "lower_bound": top.lower_bound if top else None,
        "client_epsilon": client.epsilon if client else None,
        "analytical": result.analytical_epsilon,
        "noise_multiplier": run.noise_multiplier,
        "presentations": presentations,
        "canaries": result.settings.canaries,
        "rounds": result.rounds,
        "accuracy": run.accuracy,
        "epsilons": {row.rung: row.epsilon for row in rows},
        "shown_rows": rows,
        "folded_rows": folded_rows(result),
        "folded_line": folded_line(result),
        "verdicts": {row.rung: rung_verdict(result, row.rung) for row in rows},
        "legs": [leg.line for leg in legs_of(result)],
        "steps": next_steps(run),
        "commands": [*again, f"coalmine verify {where} --seed-file SEED", f"coalmine report {where}"],
    }


def _reason(result: AuditResult) -> str:
    return "" if result.verdict is None else result.verdict.reason


def _meanings(result: AuditResult) -> dict[str, float]:
    """Every ε of the result, by its word in the glossary."""
    top, client, accounted = top_row(result), client_exposure(result), accounted_epsilon(result)
    named = {
        "measured ε": top.epsilon if top else None,
        "valid bound": top.lower_bound if top else None,
        "claimed ε": result.claim.epsilon if result.claim else None,
        "analytical ε": result.analytical_epsilon,
        "client's ε": client.epsilon if client else None,
        "accountant's ε": accounted.epsilon if accounted else None,
    }
    return {name: value for name, value in named.items() if value is not None and not math.isnan(value)}


def _published(run: Run) -> list[tuple[str, float | None, str, list[str]]]:
    """Every published estimator on the scores behind the number on top, coalmine's own first."""
    behind = published_row(run.result)
    if behind is None or not run.published:
        return []
    receives = "final model" if behind.rung.startswith("final") else "intermediate models"
    found: list[tuple[str, float | None, str, list[str]]] = []
    for each in behind.estimators:
        texts = ["client model update", receives, OWN_THRESHOLDS.get(each.name, "none"), each.note]
        found.append((each.name, each.value, each.kind, texts))
    return found + [
        (row.name, row.value, row.kind, [row.controls, row.receives, row.threshold, assumptions(row)])
        for row in run.published
    ]


def _settings(run: Run) -> dict[str, dict[str, str]]:
    """Everything that the run was made with, list by list."""
    settings = run.result.settings
    audit = {
        "dimensions": settings.dim, "canaries": settings.canaries, "unobserved canaries": settings.unobserved,
        "delta": settings.delta, "rounds observed": run.result.rounds, "rounds skipped": run.result.skipped,
        "kind of canaries": settings.kind, "presentations": ", ".join(map(str, settings.presentations)),
        "momentum": settings.momentum, "layers": len(settings.layers), "blocks": len(settings.block_sizes),
        "processes": settings.processes,
    }  # fmt: skip
    told = run.result.to_dict()
    claims = {name: told[name] for name in CLAIM if name in told}
    extra = {name: value for name, value in run.result.extra.items() if name not in SHOWN_ELSEWHERE}
    config = dict(flattened(run.config))
    for name, value in config.items():
        if name.endswith("seed_file") and value:
            config[name] = PurePath(str(value)).name  # a report need not tell where the secret lies
    versions = {"coalmine": __version__, "Python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)}
    lists = {"The audit": audit, "The result": dict(flattened(claims | extra))}
    lists |= {"The trainer's config": config} if run.config else {}
    lists["Versions that made this report"] = versions
    return {
        title: {name: shown(value) if isinstance(value, float) else str(value) for name, value in values.items()}
        for title, values in lists.items()
    }


def slug(name: str) -> str:
    """The anchor of a word.

    >>> slug("paper's ε_lo")
    'word-papers-epsilon-lo'
    """
    spelled = name.replace("ε", "epsilon").replace("δ", "delta").replace("–", " ").replace("'", "")
    return "word-" + re.sub(r"[^a-z]+", "-", spelled.lower()).strip("-")


def flattened(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as one row of dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _visible(text: Any) -> str:
    """Text with a sign for each letter that no font can show: a control character or half of a pair."""
    return "".join(
        "�" if letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cs") else letter for letter in str(text)
    )


def _figure(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else shown(value)


def _sort_key(value: float | None) -> float | str | None:
    """The number that a column is sorted by, as JavaScript reads it; None where there is none."""
    if value is None or math.isnan(value):
        return None
    return "Infinity" if value == math.inf else value


def _middle(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:50]}…{name[-25:]}"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
