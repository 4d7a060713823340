"""Write the report of one or several run directories to one file: HTML, Markdown or JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from coalmine.log.files import json_ready, write_atomically
from coalmine.log.run_directory import runs_in
from coalmine.report.live_view import AlarmState
from coalmine.report.markdown import as_dict, markdown
from coalmine.report.stored_run import Run, read_run, read_runs

OWN_FILES = (
    "config.toml",
    "metrics.jsonl",
    "checkpoint.safetensors",
    "checkpoint.previous.safetensors",
    "model.npy",
    "result.json",
)
NO_CLAIM = "No claim is known, so there can be no alarm: pass --claim."
Format = Literal["html", "md", "json"]


def write_report(directories: Sequence[Path | str], out: Path | str | None = None, *, kind: Format = "html") -> Path:
    """Write the report of a run, or of several side by side, to one file, and return its path.

    `directories` are run directories; a directory of runs, such as a sweep's, stands for all of them. `out` is the file; by
    default it is `report.html` (`.md`, `.json`) in the run directory, or in the current one for several runs. `kind` is
    "html", which needs jinja2 and matplotlib (`pip install 'coalmine[report]'`), "md" or "json".

    Raises ValueError if no run can be read, or if `out` is a file of the run itself.
    """
    paths = [Path(directory) for directory in directories]
    if not paths:
        raise ValueError("a report needs at least one run directory")
    home = paths[0] if len(paths) == 1 else Path()  # the one directory may be a sweep's
    target = home / f"report.{kind}" if out is None else Path(out)
    if any(is_own_file(run, target) for path in paths for run in runs_in(path)):
        raise ValueError(f"{target} is a file of the run itself; name another file with --out")
    text = report_text(paths, kind=kind)
    try:
        write_atomically(target, text.encode("utf-8", "replace"))
    except OSError as error:
        raise OSError(f"writing {target} failed ({error.strerror or error}); name another file with --out") from error
    return target


def write_live_page(directory: Path, out: Path, state: AlarmState | None, *, seconds: int | None) -> None:
    """Write the page of a run in progress, with the alarm or the evidence for one on top.

    The file is replaced atomically, so a browser can reload it at any time. Before the first round the page has only the
    sentence about the alarm. It reloads itself every `seconds`, or never if that is None.
    """
    if is_own_file(directory, out):
        raise ValueError(f"{out} is a file of the run itself; name another file with --html")
    from coalmine.report.page import LivePage, run_page, waiting_page  # imported on use: jinja2 is an extra

    sentence = NO_CLAIM if state is None else state.sentence
    live = LivePage(sentence, state is not None and state.alarm is not None, seconds)
    try:
        text = run_page(read_run(directory), live)
    except ValueError as error:  # no round yet
        text = waiting_page(directory.name, str(error), live)
    try:
        write_atomically(out, text.encode("utf-8", "replace"))
    except OSError as error:
        raise OSError(f"writing {out} failed ({error.strerror or error}); name another file with --html") from error


def is_own_file(run: Path, target: Path) -> bool:
    """Whether `target` is one of the run's own files, which a report must not overwrite."""
    home, file = run.resolve(), target.resolve()
    return (file.parent == home and file.name in OWN_FILES) or home / "audit" in file.parents


def report_text(paths: Sequence[Path], *, kind: Format = "html") -> str:
    """The report as text. A directory of runs, such as a sweep's, stands for all of them."""
    paths = [run for path in paths for run in runs_in(path)]
    runs, refused = _read_all(paths)
    if kind == "md":
        return markdown(runs, refused)
    if kind == "json":
        return json.dumps(json_ready(as_dict(runs, refused)), indent=2, allow_nan=False, default=str) + "\n"
    from coalmine.report.page import comparison_page, run_page  # imported on use: jinja2 is an extra

    return run_page(runs[0]) if len(paths) == 1 else comparison_page(runs, refused)


def _read_all(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs, and a line for each directory that cannot be read. A single run must be readable."""
    if len(paths) == 1:
        return [read_run(paths[0])], []
    return read_runs(list(paths))
