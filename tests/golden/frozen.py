"""The frozen runs: reads them, derives them again and renders them, through coalmine's public names and commands only."""

import contextlib
import hashlib
import io
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from recipes import CLAIMS, SEED

from coalmine import Audit, AuditResult, RunDirectory, __version__
from coalmine.cli.main import main

HERE = Path(__file__).parent

RUNS = HERE / "reference"
PAGES = ("plain", "half-noise", "blocks", "sampled", "simulated-clients", "opacus-loader")  # HTML takes long
TOLERANCE = 1e-9  # other versions of numpy and scipy, and other processors, differ in the last digits by 1e-11
OWN = ("result.json", "printed.json")  # what a run is compared with


def names() -> list[str]:
    """The names of all frozen runs."""
    return sorted(path.name for path in RUNS.iterdir() if path.is_dir())


def command(*arguments: str, where: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a coalmine command, called in this process and that directory."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.chdir(where), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as stop:
            code = int(str(stop.code))
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def reopened(name: str) -> Iterator[Audit]:
    """The audit of a frozen run, resumed from a copy of its directory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        shutil.copytree(RUNS / name, path)
        settings, _ = RunDirectory(path).read_record()
        common: dict[str, Any] = {
            field: getattr(settings, field)
            for field in ("canaries", "unobserved", "delta", "momentum", "noise", "sampling")
        }
        common |= {"seed": SEED, "directory": path}
        if settings.rounds is not None and settings.sampling is None:
            common |= {"rounds": settings.rounds, "presentations": settings.presentations}
        if settings.blocks:
            model = {layer: np.zeros(size, np.float32) for layer, size in settings.layers}
            audit = Audit.for_model(model, blocks=settings.blocks, **common)
        else:
            audit = Audit(settings.dim, kind=settings.kind, layers=settings.layers or None, **common)
        try:
            yield audit
        finally:
            audit.close()


def stored(name: str) -> AuditResult:
    """The stored result of a run."""
    return AuditResult.from_dict(json.loads((RUNS / name / "result.json").read_text()))


def derived(audit: Audit, result: AuditResult) -> AuditResult:
    """The result that follows from the log for the claim and the facts of a stored result."""
    return audit.result(
        claim=result.claim,
        analytical_epsilon=result.analytical_epsilon,
        clients=result.clients,
        audited=[item for item in result.audited if item.source == "pipeline"],
        watched=result.watched,
    )


def judged(audit: Audit, name: str) -> dict[str, Any]:
    """Verdict, notes and printout of the run for each further claim."""
    return {label: summary(audit.result(**told)) for label, told in CLAIMS.get(name, {}).items()}


def summary(result: AuditResult) -> dict[str, Any]:
    """What a result says in words: its verdicts, its printout, and the details that depend on the claim."""
    verdict = None if result.verdict is None else result.verdict.to_dict()
    rungs = {rung: each.verdict.reason for rung, each in result.adversaries.items() if each.verdict is not None}
    lines = [line for line in result.details().splitlines() if not line.startswith(("gauge", "audit of"))]
    return {"verdict": verdict, "rungs": rungs, "printout": str(result).splitlines(), "details": lines}


def printed(name: str) -> dict[str, Any]:
    """What the commands print about a run, line by line, and a digest of its page."""
    result = stored(name)
    texts: dict[str, Any] = {"printout": str(result).splitlines(), "details": result.details().splitlines()}
    commands = {
        "verdict": ("verdict", name),
        "report": ("report", name, "--format", "md"),
        "statement": ("statement", name),
    }
    for label in commands if name in PAGES else ("verdict",):
        code, out, err = command(*commands[label], where=RUNS)
        texts[label] = [f"exit code {code}", *_steady(out + err).splitlines()]
    return texts | ({"page": page_text(name)} if name in PAGES else {})


def page_text(name: str) -> list[str]:
    """The visible text of the HTML report, and the number of its plots."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.html"
        code, _, err = command("report", name, "--out", str(out), where=RUNS)
        if code:
            raise RuntimeError(err)
        page = out.read_text()
    text = Visible()
    text.feed(page)
    digest = hashlib.sha256(_steady(" ".join(text.words)).encode()).hexdigest()
    return [f"{page.count('<svg')} plots", f"text {digest}"]


class Visible(HTMLParser):
    """The words of a page outside of its plots, styles and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in ("svg", "script", "style"):
            self.hidden.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.hidden and self.hidden[-1] == tag:
            self.hidden.pop()

    def handle_data(self, data: str) -> None:
        if not self.hidden and data.strip():
            self.words.append(" ".join(data.split()))


def _steady(text: str) -> str:
    """A text without what changes from day to day, and from one environment to another: versions and dates."""
    text = text.replace(__version__, "VERSION")
    text = re.sub(r"\b(Python|numpy|scipy|matplotlib) \d[\w.+]*", r"\1 VERSION", text)
    return re.sub(r"\d{4}-\d\d-\d\d(T[\d:.+Z]+)?", "DATE", text)


def ready(value: Any) -> Any:
    """A value as JSON would give it back, with infinite numbers."""
    if isinstance(value, Mapping):
        return {str(name): ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [ready(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, str) else value


def differences(expected: Any, found: Any, where: str = "", scale: float = 0.0) -> list[str]:
    """A line for each place in which two values differ: numbers by more than 1e-9 of their size, texts at all.

    The size of a point of a curve, a list of numbers, is that of its largest point: a tail is a difference of large numbers.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        lines = [f"{where}.{name}: missing, was {expected[name]!r:.200}" for name in expected if name not in found]
        lines += [f"{where}.{name}: new, {found[name]!r:.200}" for name in found if name not in expected]
        for name in expected:
            if name in found:
                lines += differences(expected[name], found[name], f"{where}.{name}")
        return lines
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return [f"{where}: {len(expected)} entries, now {len(found)}", *_changed_lines(expected, found)]
        largest = max(
            (abs(value) for value in expected if isinstance(value, float) and math.isfinite(value)), default=0.0
        )
        return [
            line
            for index, (old, new) in enumerate(zip(expected, found, strict=True))
            for line in differences(old, new, f"{where}[{index}]", largest)
        ]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (expected, found))
    if numbers and (expected == found or math.isclose(expected, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE * scale)):
        return []
    if numbers and math.isnan(expected) and math.isnan(found):
        return []
    return [] if expected == found and type(expected) is type(found) else [f"{where}:\n  - {expected!r}\n  + {found!r}"]


def _changed_lines(expected: list[Any], found: list[Any]) -> list[str]:
    gone = [f"  - {line!r}" for line in expected if line not in found]
    return gone + [f"  + {line!r}" for line in found if line not in expected]


def changes(name: str) -> tuple[list[str], dict[str, Any]]:
    """How a run differs from its reference, line by line, and the new content of its files."""
    with reopened(name) as audit:
        again, further = derived(audit, stored(name)), judged(audit, name)
    reference = (
        json.loads((RUNS / name / "printed.json").read_text()) if (RUNS / name / "printed.json").exists() else {}
    )
    old, new = ready(stored(name).to_dict()), ready(again.to_dict())
    texts = ready({"claims": further} | printed(name))
    old = {field: value for field, value in old.items() if field in new}  # the trainer's own entries are not derived
    lines = differences(old, new, f"{name}: result") + differences(reference, texts, f"{name}: printed")
    return lines, {"result": new, "printed": texts}
