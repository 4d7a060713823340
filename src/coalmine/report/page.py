"""The report as one HTML file that needs no network and suits a phone, a printer and a screen reader.

The templates hold the page's structure and escape every value. This module collects the values that they show.
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

from coalmine.argument_checks import printable
from coalmine.report import plots
from coalmine.report.advice import next_steps
from coalmine.report.brief import answers, item_status
from coalmine.report.details import (
    MOST_NAMED,
    claim_basis,
    client_exposure,
    figure_text,
    figures,
    folded_line,
    tensor_names,
)
from coalmine.report.figures import comparison_pictures, run_pictures
from coalmine.report.sentences import (
    ATTACKERS,
    GLOSSARY,
    LEGS,
    QUESTIONS,
    assumptions,
    meaning,
    percent,
    posterior,
    run_sentence,
    scope_sentence,
)
from coalmine.report.statement import privacy_statement
from coalmine.report.statement_page import statement_context
from coalmine.report.stored_run import Run
from coalmine.report.table_rows import (
    all_rows,
    main_rows,
    measured_cells,
    published_row,
    row_warnings,
    rung_verdict,
    secondary_rows,
    table_rows,
    top_row,
)
from coalmine.report.templating import Environment, new_environment
from coalmine.result.words import Words, format_bound, format_interval, format_number
from coalmine.version import __version__

PACKAGES = ("numpy", "scipy", "matplotlib")
SHOWN_ELSEWHERE = (
    "trainer_notes",
    "warnings",
    "accounted_epsilon",
    "nodes",
    "views",
)  # have a place of their own on the page
OWN_THRESHOLDS = {
    "lower bound": "chosen on the same data, corrected",
    "paper's ε_lo": "chosen on the same data, not corrected",
}


@dataclass(frozen=True)
class LivePage:
    """The extra content of the page of a run in progress: a sentence on the alarm.

    The page reloads itself every `seconds`, or never if that is None.
    """

    sentence: str
    alarmed: bool
    seconds: int | None


def run_page(run: Run, live: "LivePage | None" = None) -> str:
    """The page of one run. With `live`, the alarm is on top and the page reloads itself."""
    result, words, tensors = run.result, Words.of(run.result), tensor_names(run.result)
    meanings = {name: value for name, value, _ in figures(result) if not math.isnan(value)}
    tensors_ok = [gauge for gauge in result.gauges if gauge.part and gauge.status == "ok"]
    main = main_rows(result)
    return _render(
        "run.html",
        title=run.name,
        live=live,
        view=_view(run),
        unread=run.problems,
        say=words.say,
        glossary={name: words.say(text) for name, text in GLOSSARY.items()},
        answers=list(answers(result)),
        reason="" if result.verdict is None else result.verdict.reason,
        scope=scope_sentence(result),
        figure_details={name: detail for name, _, detail in figures(result)},
        leg_questions=LEGS,
        claim_basis=claim_basis(result),
        audited=[(item, item_status(result, item)) for item in result.audited],
        many_tensors=tensors if len(tensors) > MOST_NAMED else [],  # too many for the sentence beside them
        meaning=meaning(next(iter(meanings.values())), result.settings.delta) if meanings else "",
        meanings=meanings,
        notes=[words.say(note) for note in result.notes],
        nodes=result.trainer.nodes,
        views=result.trainer.views,
        pictures=run_pictures(run),
        warnings=row_warnings(result),
        recognised={
            plots.group_name(scores): [plots.true_positive_rate(scores, rate) for rate in (0.01, 0.001)]
            for scores in run.shown_scores
        },
        gauges=sorted(
            (gauge for gauge in result.gauges if gauge not in tensors_ok), key=lambda each: each.status == "ok"
        ),
        tensors_ok=tensors_ok,
        estimator_rows=main,
        more_estimator_rows=[row for row in all_rows(result) if row not in main],
        published_row=published_row(result),
        published=_published(run),
        settings=_settings(run),
        commitment=run.commitment,
        demonstration=run.demonstration,
        log_digest=result.log_digest or "not written yet",
        **_statement_section(run),
    )


def _statement_section(run: Run) -> dict[str, Any]:
    """The context of the section on the privacy statement; only a finished run has a statement."""
    if not run.finished:
        return {"statement": None}
    return statement_context(privacy_statement(run.result, commitment=run.commitment, demonstration=run.demonstration))


def waiting_page(name: str, reason: str, live: LivePage) -> str:
    """The page of a run that has no rounds yet."""
    return _render("waiting.html", title=name, reason=reason, live=live)


def comparison_page(runs: Sequence[Run], refused: Sequence[str] = ()) -> str:
    """The page that compares several runs."""
    return _render(
        "comparison.html",
        title=f"{len(runs)} runs",
        live=None,
        views=[_view(run) for run in runs],
        unread=[*refused, *(f"{run.name}: {problem}" for run in runs for problem in run.problems)],
        with_client=any(client_exposure(run.result) for run in runs),
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
    environment = new_environment()
    environment.globals |= {
        "glossary": GLOSSARY, "attacker_sees": ATTACKERS, "questions": QUESTIONS, "version": __version__,
    }  # fmt: skip
    environment.filters |= {
        "format_number": format_number, "format_value": _format_value, "interval": format_interval,
        "measured": measured_cells, "percent": percent, "posterior": posterior, "shorten_middle": _shorten_middle,
        "slug": slug, "format_bound": format_bound, "figure_text": figure_text, "sort_key": _sort_key, "visible": _visible,
    }  # fmt: skip
    return environment


def _view(run: Run) -> dict[str, Any]:
    """The values that both pages show of a run."""
    result, where = run.result, printable(shlex.quote(str(run.path)))
    top, client, rows = top_row(result), client_exposure(result), table_rows(result)
    presentations: Any = result.trainer.presentations
    if presentations is None:
        presentations = ", ".join(map(str, result.settings.presentations))
    rerun = [f"coalmine run --config {where}/config.toml --out AGAIN"] if "task" in run.config else []
    return {
        "name": run.name,
        "sentence": run_sentence(run),
        "verdict": "" if result.verdict is None else str(result.verdict.outcome),
        "measured": top.epsilon if top else None,
        "lower_bound": top.lower_bound if top else None,
        "lower_bound_gaussian": top.lower_bound_gaussian if top else None,
        "client_epsilon": client.epsilon if client else None,
        "analytical": result.analytical_epsilon,
        "noise_multiplier": run.noise_multiplier,
        "presentations": presentations,
        "canaries": result.settings.canaries,
        "rounds": result.rounds,
        "accuracy": run.accuracy,
        "table_rows": rows,
        "secondary_rows": secondary_rows(result),
        "folded_line": folded_line(result),
        "verdicts": {row.rung: rung_verdict(result, row.rung) for row in rows},
        "legs": result.legs,
        "steps": next_steps(run),
        "commands": [*rerun, f"coalmine verify {where} --seed-file SEED", f"coalmine report {where}"],
    }


def _published(run: Run) -> list[tuple[str, float | None, str, list[str]]]:
    """Every estimator on the scores behind the measured ε, coalmine's own first."""
    row_used = published_row(run.result)
    if row_used is None or not run.published:
        return []
    receives = "final model" if row_used.rung.startswith("final") else "intermediate models"
    own: list[tuple[str, float | None, str, list[str]]] = []
    for each in row_used.estimators:
        texts = ["client model update", receives, OWN_THRESHOLDS.get(each.name, "none"), each.note]
        own.append((each.name, each.value, each.kind, texts))
    return own + [
        (row.name, row.value, row.kind, [row.controls, row.receives, row.threshold, assumptions(row)])
        for row in run.published
    ]


def _settings(run: Run) -> dict[str, dict[str, str]]:
    """The settings of the run and of its trainer, by the title of each list."""
    settings = run.result.settings
    audit = {
        "dimensions": settings.dim, "canaries": settings.canaries, "unobserved canaries": settings.unobserved,
        "delta": settings.delta, "rounds observed": run.result.rounds, "rounds skipped": run.result.skipped,
        "kind of canaries": settings.kind, "presentations": ", ".join(map(str, settings.presentations)),
        "momentum": settings.momentum, "layers": len(settings.layers), "blocks": len(settings.block_sizes),
        "processes": settings.processes,
    }  # fmt: skip
    stored, trainer = run.result.to_dict(), run.result.trainer.to_dict()
    claims = {name: value for name, value in stored.items() if name.startswith("claim") and name not in trainer}
    claims |= {name: stored[name] for name in ("analytical_epsilon", "clients")}
    entries = {name: value for name, value in trainer.items() if name not in SHOWN_ELSEWHERE}
    config = dict(_flatten(run.config))
    for name, value in config.items():
        if name.endswith("seed_file") and value:
            config[name] = PurePath(str(value)).name  # the report must not reveal where the secret is stored
    versions = {"coalmine": __version__, "Python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)}
    lists = {"The audit": audit, "The result": dict(_flatten(claims | entries))}
    lists |= {"The trainer's config": config} if run.config else {}
    lists["Versions that made this report"] = versions
    return {
        title: {
            name: format_number(value) if isinstance(value, float) else str(value) for name, value in values.items()
        }
        for title, values in lists.items()
    }


def slug(name: str) -> str:
    """The HTML anchor of a term of the glossary.

    >>> slug("paper's ε_lo")
    'word-papers-epsilon-lo'
    """
    spelled = name.replace("ε", "epsilon").replace("δ", "delta").replace("–", " ").replace("'", "")
    return "word-" + re.sub(r"[^a-z]+", "-", spelled.lower()).strip("-")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as pairs of a dotted name and a value."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _visible(text: Any) -> str:
    """Text in which � replaces every character that no font can show: control characters and lone surrogates."""
    return "".join(
        "�" if letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cs") else letter for letter in str(text)
    )


def _format_value(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else format_number(value)


def _sort_key(value: float | None) -> float | str | None:
    """The number that a column is sorted by, in a form that JavaScript parses; None if there is none."""
    if value is None or math.isnan(value):
        return None
    return "Infinity" if value == math.inf else value


def _shorten_middle(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:50]}…{name[-25:]}"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
