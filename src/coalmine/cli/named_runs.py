"""The runs named by a command's paths: finished runs, unfinished runs, and paths without a run."""

import logging
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coalmine.cli.output import print_error
from coalmine.log.run_directory import RunDirectory, is_run, runs_in
from coalmine.result.audit_result import AuditResult


@dataclass(frozen=True)
class NamedRuns:
    """Run directories in the order given, and one line for each path without a run.

    `ignored` are ordinary files next to the runs, which a shell's `runs/*` also matches. `problems` are paths that do
    not exist or contain no run.
    """

    runs: list[Path] = field(default_factory=list)
    ignored: dict[Path, str] = field(default_factory=dict)
    problems: dict[Path, str] = field(default_factory=dict)


def find_runs(paths: Sequence[Path]) -> NamedRuns:
    """The runs in `paths`; a directory of runs means all its runs. Files are problems if no run is named."""
    found = NamedRuns()
    for path in paths:
        try:
            _add(path, found)
        except OSError as error:
            found.problems[path] = f"{path} cannot be read: {error.strerror}"
    if not found.runs:
        found.problems.update(found.ignored)
        found.ignored.clear()
    return found


def _add(path: Path, found: NamedRuns) -> None:
    if path.is_dir():
        inside = [run for run in runs_in(path) if is_run(run)]
        found.runs.extend(inside)
        if not inside:
            found.problems[path] = (
                f"{path} holds no run: config.toml, result.json and audit/record.json are all missing; "
                "name the directory of a run, or a directory of runs"
            )
    elif not path.exists():
        found.problems[path] = f"{path} does not exist: name the directory of a run"
    elif is_run(path.parent):
        found.problems[path] = f"{path} is one file of a run: name the directory, {path.parent}"
    else:
        found.ignored[path] = f"{path} is a file, not the directory of a run"


def is_finished(run: Path) -> bool:
    """Whether a result was written, readable or not."""
    return (run / "result.json").exists()


def read_result(run: Path) -> AuditResult:
    """The result in a run directory; ValueError with one line where it cannot be read."""
    path = run / "result.json"
    try:
        values = RunDirectory(run).read_result()
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a result; restore it from a copy") from None
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}" if error.strerror else str(error)) from None
    try:
        return AuditResult.from_dict(values)
    except ValueError:
        raise ValueError(f"{path} is not a result as an audit writes it; restore it from a copy") from None


def how_to_finish(run: Path) -> str:
    """What to do about a run without a result."""
    try:
        resumable = "task" in RunDirectory(run).read_config()
    except (OSError, ValueError):
        resumable = False
    if resumable:
        return f"wait for it, or continue it with `coalmine run --resume {shlex.quote(str(run))}`"
    return "wait for it, or run its training script to the end"


def print_problems(lines: Iterable[str]) -> None:
    """Print each line on stderr."""
    for line in lines:
        print_error(line)


def print_notes(lines: Iterable[str]) -> None:
    """Each as one line on stderr, unless -q was given."""
    if logging.getLogger("coalmine").isEnabledFor(logging.WARNING):
        print_problems(lines)
