"""The report as one HTML file: no network, light and dark, for a phone, a printer and a screen reader alike."""

import base64
import hashlib
import importlib.metadata
import math
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape, unescape
from importlib import resources
from pathlib import PurePath
from typing import Any

from coalmine.report import plots
from coalmine.report.advice import next_steps
from coalmine.report.findings import Finding, Findings, GaugeReading
from coalmine.report.html import Markup, element, foreign, together
from coalmine.report.pictures import Picture, comparison_pictures, run_pictures
from coalmine.report.run import Run
from coalmine.report.summary import NAMED, folded_line, key_figures, note_lines, tensor_names
from coalmine.report.words import (
    ATTACKERS,
    GLOSSARY,
    QUESTIONS,
    interval_text,
    meaning,
    percent,
    scope_sentence,
    shortened,
    shown,
    suspicion,
    verdict_sentence,
)
from coalmine.version import __version__

PACKAGES = ("numpy", "scipy", "matplotlib")
OWN_ENTRIES = {  # of result.json, shown elsewhere on the page
    "adversaries", "gauges", "notes", "verdict", "reason", "reason_code", "schema_version", "if_analytical_were_claimed",
    "headline", "audited", "trainer_notes", "warnings", "accounted_epsilon", "if_accounted_were_claimed",
}  # fmt: skip
PRIORS = (0.01, 0.1, 0.5)
OWN_THRESHOLDS = {
    "lower bound": "chosen on the same data, corrected",
    "paper's ε_lo": "chosen on the same data, not corrected",
}


def run_page(run: Run) -> str:
    """The page of one run."""
    pictures = {picture.name: picture for picture in run_pictures(run)}
    body = [
        _problems(run.problems),
        _audited(run.findings),
        _meaning(run.findings),
        _steps(run),
        _notes(run.findings),
        _section(
            "What each attacker finds", _figures(pictures, "ladder"), _rungs(run.findings), _warnings(run.findings)
        ),
        _section(
            "Can the canaries be told apart?",
            _figures(pictures, "densities", "roc", "quantiles"),
            _recognised(run) if run.scores else None,
        ),
        _section("Over the rounds", _figures(pictures, "rounds", "training", "accuracy", "gauges")),
        _gauges(run.findings),
        _estimators(run.findings),
        _published(run),
        _settings(run),
        _reproduce(run),
    ]
    return _document(run.name, [_heading(run), *body])


def comparison_page(runs: Sequence[Run], refused: Sequence[str] = ()) -> str:
    """The page of several runs beside each other."""
    pictures = {picture.name: picture for picture in comparison_pictures(runs)}
    problems = [*refused, *(f"{run.name}: {problem}" for run in runs for problem in run.problems)]
    heading = element("h1", "coalmine report: ", element("strong", f"{len(runs)} runs"))
    body = [
        heading,
        _problems(problems),
        _section("Runs", _runs_table(runs)),
        _section("Side by side", _figures(pictures, "noise", "presentations", "overlay")) if pictures else None,
        _section("Each run", [_summary(run) for run in runs]),
    ]
    return _document(f"{len(runs)} runs", body)


# The frame


def _document(title: str, body: Sequence[Any]) -> str:
    style, script = _resource("page.css"), _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is fetched, and no script but this very one runs, whatever text a config holds.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = [
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="generator" content="coalmine">'),
        element("title", f"coalmine report: {_plain(title)}"),
        Markup(f"<style>{style}</style>"),
    ]
    content = together(
        element("a", "To the result", class_="skip", href="#result"),
        element("main", *body, _words(), id="result"),
        element("footer", f"Made by coalmine {__version__} from the run's own files."),
        element("div", id="tip", role="tooltip", hidden=True),
        Markup(f"<script>{script}</script>"),
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{together(*head)}</head>\n<body>{content}</body>\n</html>\n'


def _resource(name: str) -> str:
    return resources.files("coalmine.report").joinpath(name).read_text(encoding="utf-8")


def _section(title: str, *parts: Any) -> Markup | None:
    inside = [part for part in parts if part]
    return element("section", element("h2", title), *inside) if inside else None


def _figures(pictures: Mapping[str, Picture], *names: str) -> Markup | None:
    found = [pictures[name] for name in names if name in pictures]
    if not found:
        return None
    figures = [
        element(
            "figure",
            element("h3", picture.title),
            Markup(picture.svg),
            element("figcaption", picture.caption),
            id=f"picture-{picture.name}",
        )
        for picture in found
    ]
    return element("div", *figures, class_="pictures")


# What stands on the page of one run


def _heading(run: Run) -> Markup:
    return together(element("h1", "coalmine report: ", element("strong", foreign(run.name))), _verdict(run))


def _verdict(run: Run) -> Markup:
    sentence, findings = verdict_sentence(run), run.findings
    word, _, rest = sentence.partition(":")
    said = together(element("b", word), ":", rest) if findings.verdict else sentence
    below = [text for text in (shortened(findings.reason), scope_sentence(findings)) if text]
    whole = _folded("The whole reason", element("p", _with_code(findings.reason)))
    return element(
        "div",
        element("p", said),
        *(element("p", _with_code(text)) for text in below),
        whole if findings.reason not in below and findings.reason else None,
        _key_figures(findings),
        class_=f"verdict {_plain(findings.verdict or '')}",
    )


def _key_figures(findings: Findings) -> Markup | None:
    """The numbers on top, each with whose it is."""
    figures = [
        element(
            "div",
            element("dt", term(figure.label)),
            element("dd", element("b", shown(figure.value), class_="value"), " ", foreign(figure.detail)),
        )
        for figure in key_figures(findings)
    ]
    return element("dl", *figures, class_="figures") if figures else None


def _audited(findings: Findings) -> Markup | None:
    """What was audited, item by item, with the question that each one answers."""
    if not findings.audited:
        return None
    rows = [
        [
            together(element("b", foreign(item.name)), element("span", QUESTIONS.get(item.name, ""), class_="soft")),
            element("td", element("span", foreign(item.status), class_=f"status {_plain(item.status.split()[0])}")),
            element("td", _with_code(item.detail), _all_tensors(findings) if item.name == "tensors" else None),
        ]
        for item in findings.audited
    ]
    table = _table("What was audited", ["item", term("checked", "status"), "why"], rows)
    return _section("What was audited", element("div", table, class_="audited"))


def _all_tensors(findings: Findings) -> Markup | None:
    """Every tensor that has a gauge, where the sentence beside it cannot name them all."""
    names = tensor_names(findings)
    return _folded(f"All {len(names):,} tensors", foreign(", ".join(names))) if len(names) > NAMED else None


def _notes(findings: Findings) -> Markup | None:
    lines = note_lines(findings)
    return _section("Notes", element("ul", *(element("li", _with_code(line)) for line in lines))) if lines else None


def _problems(problems: Sequence[str]) -> Markup | None:
    if not problems:
        return None
    items = [element("li", foreign(problem)) for problem in problems]
    return element(
        "div", element("p", element("b", "Not everything could be read.", class_="warning")), element("ul", *items),
        class_="problems", role="note",
    )  # fmt: skip


def _meaning(findings: Findings) -> Markup | None:
    top, client, accounted = findings.top, findings.client, findings.accounted
    named = [
        ("measured ε", top.epsilon if top else None),
        ("valid bound", top.lower_bound if top else None),
        ("claimed ε", findings.claimed),
        ("analytical ε", findings.analytical),
        ("client's ε", client.epsilon if client else None),
        ("accountant's ε", accounted.epsilon if accounted else None),
    ]
    lines = [(name, value) for name, value in named if value is not None and not math.isnan(value)]
    if not lines:
        return None
    rows = [
        [
            term(name),
            _cell(value),
            *(element("td", percent(suspicion(prior, value)), class_="number") for prior in PRIORS),
        ]
        for name, value in lines
    ]
    heads = ["", term("ε"), *(f"{percent(prior)} becomes" for prior in PRIORS)]
    return _section(
        "What this means",
        element("p", meaning(lines[0][1], findings.delta)),
        _table("What a suspicion can become", heads, rows, narrow=True),
    )


def _steps(run: Run) -> Markup | None:
    steps = next_steps(run)
    return (
        _section("What to do next", element("ul", *(element("li", _with_code(step)) for step in steps)))
        if steps
        else None
    )


def _rungs(findings: Findings) -> Markup:
    """One row for each attacker; those for other numbers of presentations are folded away."""
    return together(_attackers("Every attacker", findings, findings.shown_rows), _folded_rungs(findings))


def _folded_rungs(findings: Findings) -> Markup | None:
    rows = findings.folded_rows
    return _folded(folded_line(findings), _attackers("Other presentations", findings, rows)) if rows else None


def _attackers(label: str, findings: Findings, shown_rows: Sequence[Finding]) -> Markup:
    heads = [
        term("adversary"), "sees", term("canary", "canaries"), term("estimate", "ε"), term("interval", "95 % interval"),
        term("lower bound"), term("floor"), term("ceiling"), "verdict",
    ]  # fmt: skip
    rows = []
    for row in shown_rows:
        verdict = findings.rung_verdict(row.rung)
        rows.append(
            [
                together(foreign(row.name), ", pooled" if row.pooled else None),
                element("td", ATTACKERS.get(row.rung, "an attack of your own")),
                _cell(row.canaries),
                _cell(row.epsilon, " (std fitted)" if row.std_fitted else ""),
                element("td", interval_text(row.interval), class_="number"),
                _cell(row.lower_bound),
                _cell(row.floor),
                _cell(row.ceiling),
                element("td", element("b", verdict, class_=_plain(verdict))),
            ]
        )
    return _table(label, heads, rows)


def _folded(title: str, *parts: Any) -> Markup:
    return element("details", element("summary", title), *parts)


def _warnings(findings: Findings) -> Markup | None:
    lines = [f"{', '.join(names)}: {warning}" for warning, names in findings.row_warnings.items()]
    return element("ul", *(element("li", foreign(line)) for line in lines)) if lines else None


def _recognised(run: Run) -> Markup:
    heads = [term("adversary"), "at 1 %", "at 0.1 %"]
    rows = [
        [
            foreign(plots.group_name(scores)),
            *(
                element("td", percent(plots.true_positive_rate(scores, rate)), class_="number")
                for rate in (0.01, 0.001)
            ),
        ]
        for scores in run.shown_scores
    ]
    said = element(
        "p", "The ", term("true positive rate"), " at a ", term("false positive rate"), " of 1 % and of 0.1 %:"
    )
    return together(said, _table("How many canaries an attacker recognises", heads, rows, narrow=True))


def _gauges(findings: Findings) -> Markup | None:
    """Gauges outside their limits first; those of tensors within their limits are folded away."""
    if not findings.gauges:
        return None
    quiet = [gauge for gauge in findings.gauges if gauge.layer is not None and gauge.status == "ok"]
    rest = sorted((gauge for gauge in findings.gauges if gauge not in quiet), key=lambda gauge: gauge.status == "ok")
    parts = [_gauge_table("Gauges", rest)] if rest else []
    if quiet:
        are = "1 tensor is within its limits" if len(quiet) == 1 else f"{len(quiet):,} tensors are within their limits"
        parts.append(_folded(are, _gauge_table("Gauges of tensors", quiet)))
    return _section("Gauges of the noise", *parts)


def _gauge_table(label: str, gauges: Sequence[GaugeReading]) -> Markup:
    lost = any(gauge.noise_left is not None for gauge in gauges)
    heads = [
        term("gauge"), "what it measures", "smallest", "largest", term("limits"), "rounds outside",
        *([term("noise left")] if lost else []), "status",
    ]  # fmt: skip
    rows = [
        [
            foreign(gauge.name),
            element("td", _with_code(gauge.meaning)),
            _cell(gauge.smallest),
            _cell(gauge.largest),
            element("td", interval_text(gauge.limits), class_="number"),
            _cell(len(gauge.flagged)),
            *([_cell(gauge.noise_left)] if lost else []),
            element("td", element("b", gauge.status, class_=_plain(gauge.status))),
        ]
        for gauge in gauges
    ]
    return _table(label, heads, rows)


def _estimators(findings: Findings) -> Markup | None:
    shown_rows = findings.headlines
    if not shown_rows:
        return None
    rest = [row for row in findings.rows if all(row is not other for other in shown_rows)]
    folded = (
        _folded(f"The same for {len(rest):,} more rows", _estimator_table("More estimators", rest)) if rest else None
    )
    return _section("Every number and what kind it is", _estimator_table("Estimators", shown_rows), folded)


def _estimator_table(label: str, findings_rows: Sequence[Finding]) -> Markup:
    heads = ["adversary", "method", "ε", "kind", "how"]
    terms = ["adversary", None, "ε", None, None]
    rows = []
    for row in findings_rows:
        for method in row.estimators:
            name = term(method.name) if method.name in GLOSSARY else foreign(method.name)
            kind = element("span", term(method.kind), class_=f"kind {method.kind.split()[-1]}")
            rows.append(
                [
                    foreign(row.name),
                    element("td", name),
                    _cell(method.value),
                    element("td", kind),
                    element("td", foreign(method.note)),
                ]
            )
    return _sortable(label, heads, terms, rows)


def _published(run: Run) -> Markup | None:
    """Every published estimator on the scores behind the number on top."""
    behind = run.findings.published_row
    if behind is None or not run.published:
        return None
    heads = ["method", "ε", "kind", "auditor controls", "auditor receives", "threshold", "assumes"]
    terms = [None, "ε", None, None, None, None, None]
    receives = "final model" if behind.rung.startswith("final") else "intermediate models"
    own = [
        (
            each.name,
            each.value,
            each.kind,
            "client model update",
            receives,
            OWN_THRESHOLDS.get(each.name, "none"),
            each.note,
        )
        for each in behind.estimators
    ]
    others = [
        (row.name, row.value, row.kind, row.controls, row.receives, row.threshold,
         row.assumptions if row.needs is None else f"not applicable: {row.needs}")
        for row in run.published
    ]  # fmt: skip
    rows = [
        [
            foreign(name),
            _cell(value),
            element("td", element("span", term(kind), class_=f"kind {kind.split()[-1]}")),
            *(element("td", foreign(text)) for text in texts),
        ]
        for name, value, kind, *texts in own + others
    ]
    return _section(
        "Every published estimator on the same scores",
        element(
            "p",
            f"What other methods make of the {behind.canaries:,} canaries that ",
            foreign(behind.name),
            " sees, below coalmine's own. Some bounds assume a Gaussian mechanism, or a fair coin for each canary: without "
            "these they bound nothing.",
        ),
        _sortable("Published estimators", heads, terms, rows),
    )


def _settings(run: Run) -> Markup:
    findings, settings = run.findings, run.settings
    audit: dict[str, Any] = {
        "dimensions": findings.dim, "canaries": findings.canaries, "unobserved canaries": findings.unobserved,
        "delta": findings.delta, "rounds observed": findings.rounds, "rounds skipped": findings.skipped,
    }  # fmt: skip
    if settings is not None:
        audit |= {"kind of canaries": settings.kind, "presentations": ", ".join(map(str, settings.presentations)),
                  "momentum": settings.momentum, "layers": len(settings.layers)}  # fmt: skip
    schema = {"dim", "delta", "canaries", "unobserved", "kind", "rounds", "skipped_rounds"}
    told = {name: value for name, value in findings.raw.items() if name not in OWN_ENTRIES | schema}
    parts = [_pairs("The audit", audit), _pairs("The result", dict(flattened(told)))]
    if run.config:
        parts.append(_pairs("The trainer's config", dict(flattened(run.config)) | _seed_file(run)))
    versions = {"coalmine": __version__, "Python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)}
    parts.append(_pairs("Versions that made this report", versions))
    return element("section", element("h2", "Settings"), element("div", *parts, class_="lists"))


def _seed_file(run: Run) -> dict[str, str]:
    """The name of the file with the secret alone: a report need not tell where it lies."""
    named = {key: value for key, value in flattened(run.config) if key.endswith("seed_file") and value}
    return {key: PurePath(str(value)).name for key, value in named.items()}


def _reproduce(run: Run) -> Markup:
    where = shlex.quote(str(run.path))
    lines = [f"coalmine verify {where} --seed-file SEED"]
    if "task" in run.config:
        lines.insert(0, f"coalmine run --config {where}/config.toml --out AGAIN")
    lines.append(f"coalmine report {where}")
    parts = [
        element("pre", element("code", foreign("\n".join(lines))), tabindex="0", role="region", aria_label="Commands")
    ]
    if run.commitment is not None:
        parts.append(
            element("p", "Before round 1 the audit published this ", term("commitment"), " to its seed and settings; "
                    "who has the seed can check both, and that the result follows from the stored rounds.")
        )  # fmt: skip
        parts.append(_pairs("Commitment", {"sha256": run.commitment.sha256, "salt": run.commitment.salt}))
    return element("section", element("h2", "How to reproduce and check"), *parts)


def _words() -> Markup:
    pairs = [
        part for name, text in GLOSSARY.items() for part in (element("dt", name), element("dd", text, id=slug(name)))
    ]
    return element("section", element("h2", "Words"), element("dl", *pairs, class_="words"))


# What stands on the page of several runs


def _runs_table(runs: Sequence[Run]) -> Markup:
    """One row for each run: verdict and the numbers on top first, then settings, then every attacker's estimate."""
    rungs = list(dict.fromkeys(row.rung for run in runs for row in run.findings.shown_rows))
    with_client = any(run.findings.client for run in runs)
    columns: list[tuple[str, str | None]] = [("run", None), ("verdict", None), ("measured ε", "measured ε")]
    columns += [("lower bound", "lower bound"), *([("client's ε", "client's ε")] if with_client else [])]
    columns += [("analytical ε", "analytical ε"), ("noise multiplier", "noise multiplier")]
    columns += [("presentations", "presentations"), ("canaries", "canary"), ("rounds", None), ("accuracy", "accuracy")]
    columns += [(rung, "estimate") for rung in rungs]
    rows = [_run_row(place, run, rungs, with_client=with_client) for place, run in enumerate(runs, start=1)]
    return _sortable("Runs", [head for head, _ in columns], [word for _, word in columns], rows)


def _run_row(place: int, run: Run, rungs: Sequence[str], *, with_client: bool) -> list[Markup]:
    findings, accuracy = run.findings, run.accuracy
    top, client = findings.top, findings.client
    epsilons = {row.rung: row.epsilon for row in findings.shown_rows}
    shows = findings.raw.get("presentations")
    if shows is None and run.settings is not None:
        shows = ", ".join(map(str, run.settings.presentations))
    return [
        together(f"{place} ", foreign(_middle(run.name))),
        element("td", element("b", findings.verdict or "–", class_=_plain(findings.verdict or ""))),
        _cell(top.epsilon if top else None),
        _cell(top.lower_bound if top else None),
        *([_cell(client.epsilon if client else None)] if with_client else []),
        _cell(findings.analytical),
        _cell(run.noise_multiplier),
        element("td", foreign(shows), class_="number", data_value=shows if isinstance(shows, int) else None),
        _cell(findings.canaries),
        _cell(findings.rounds),
        element("td", "–" if accuracy is None else f"{accuracy:.1%}", class_="number", data_value=accuracy),
        *(_cell(epsilons.get(rung)) for rung in rungs),
    ]


def _summary(run: Run) -> Markup:
    steps = [element("li", _with_code(step)) for step in next_steps(run)]
    command = element("code", f"coalmine report {shlex.quote(str(run.path))}")
    return element(
        "details",
        element("summary", foreign(run.name), ": ", verdict_sentence(run)),
        _rungs(run.findings),
        element("ul", *steps) if steps else None,
        element("p", "The whole report of this run: ", command),
    )


# Small parts


def term(name: str, text: str | None = None) -> Markup:
    """A word of the glossary, explained where it stands."""
    return element("a", text or name, class_="term", href=f"#{slug(name)}", data_term=slug(name))


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


def _pairs(title: str, values: Mapping[str, Any]) -> Markup:
    rows = [[foreign(_middle(name)), element("td", _value(value))] for name, value in values.items()]
    return element("div", element("h3", title), _rows(title, None, rows, None), class_="list")


def _value(value: Any) -> Markup:
    text = shown(value) if isinstance(value, float) else str(value)
    if len(text) > 200:
        return element("span", foreign(text), class_="long", tabindex="0", role="region", aria_label="a long value")
    return foreign(text)


def _cell(value: float | None, mark: str = "") -> Markup:
    known = value is not None and not math.isnan(value)
    number = ("Infinity" if value == math.inf else value) if known else None
    text = f"{value:,}" if isinstance(value, int) else shown(value)
    return element("td", f"{text}{mark}", class_="number", data_value=number)


def _table(label: str, heads: Sequence[Any], rows: Sequence[Sequence[Any]], *, narrow: bool = False) -> Markup:
    """A table whose first cell of each row is its head; on a phone every row of a wide one becomes a list of its own."""
    cells = [
        element("th", head, scope="col", class_="number" if right else None)
        for head, right in zip(heads, _numbers(rows, len(heads)), strict=True)
    ]
    top = element("thead", element("tr", *cells))
    return _rows(label, top, rows, None if narrow else heads)


def _sortable(label: str, heads: Sequence[str], terms: Sequence[str | None], rows: Sequence[Sequence[Any]]) -> Markup:
    """The same, its columns sorted by a click on their heads."""
    cells = [
        element(
            "th",
            element("button", head, type="button", data_term=slug(word) if word else None),
            scope="col",
            aria_sort="none",
            class_="number" if right else None,
        )
        for head, word, right in zip(heads, terms, _numbers(rows, len(heads)), strict=True)
    ]
    return _rows(label, element("thead", element("tr", *cells), class_="sorts"), rows, heads)


def _rows(label: str, top: Markup | None, rows: Sequence[Sequence[Any]], heads: Sequence[Any] | None) -> Markup:
    """`heads` name the cells where rows become lists."""
    body = []
    for first, *cells in rows:
        named = cells if heads is None else [_labelled(*pair) for pair in zip(cells, heads[1:], strict=True)]
        body.append(element("tr", element("th", first, scope="row"), *named))
    table = element("table", top, element("tbody", *body), class_="stacks" if heads else None)
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def _numbers(rows: Sequence[Sequence[Any]], width: int) -> list[bool]:
    """Which columns hold numbers."""
    return ['class="number"' in str(cell) for cell in rows[0]] if rows else [False] * width


def _labelled(cell: Markup, head: Any) -> Markup:
    """A cell that carries its column's name."""
    name = unescape(re.sub(r"<[^>]*>", "", head)) if isinstance(head, Markup) else str(head)
    return Markup(cell.replace("<td", f'<td data-label="{escape(name)}"', 1))


def _with_code(text: str) -> Markup:
    """Text in which `…` is code."""
    parts = text.split("`")
    return together(
        *(element("code", foreign(part)) if place % 2 else foreign(part) for place, part in enumerate(parts))
    )


def _middle(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:50]}…{name[-25:]}"


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
