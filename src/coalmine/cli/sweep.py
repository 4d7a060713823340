"""`coalmine sweep`: a grid of runs, each in its own directory, then all of them beside each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from coalmine.audit.result import AuditResult
from coalmine.cli.compare import print_results, read_result, run_record
from coalmine.cli.output import print_json, shows_bars
from coalmine.cli.run import EXIT_CODES, FILE, training_extra

if TYPE_CHECKING:
    from coalmine.simulation.sweep import SweepProgress, SweepRun

FAILED = 2


@click.command()
@click.argument("file", type=FILE)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Where the runs go; default: runs/NAME-OF-FILE."
)
@click.option("--jobs", type=int, default=1, show_default=True, metavar="N", help="Runs at a time, each in a process.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
@click.pass_obj
def sweep(settings: dict[str, bool], file: Path, out: Path | None, jobs: int, as_json: bool) -> int:
    """Run every combination of the values that the section [sweep] of a TOML file lists.

    The rest of FILE is a run's config, as for `coalmine run --config`. Killed at any instant, the same command goes on:
    finished runs are left alone, stopped ones are resumed. A run that fails does not stop the others; the exit code is then
    2, else that of the worst verdict: 1 VIOLATION, 3 UNDERPOWERED.
    """
    with training_extra():
        from coalmine.simulation.sweep import read_sweep, run_sweep

    points = read_sweep(file)
    home = out or Path("runs") / file.stem
    with _bar(hidden=settings["quiet"]) as progress:
        runs = run_sweep(points, home, jobs=jobs, plan=file.read_bytes(), progress=progress)
    results: dict[str, AuditResult] = {}
    runs = [_read_into(results, run) for run in runs]
    if as_json:
        print_json({"directory": str(home), "runs": [_record(run, results) for run in runs]})
    else:
        if results:
            print_results(results)
        click.echo(f"{len(results)} of {len(runs)} runs finished, in {home}; `coalmine report {home}` draws them")
    for run in runs:
        if run.error is not None:
            click.echo(f"coalmine: {run.point.name} failed: {run.error}", err=True)
    return FAILED if len(results) < len(runs) else _worst_verdict(results)


def _read_into(results: dict[str, AuditResult], run: "SweepRun") -> "SweepRun":
    """The run, its result added to the others; or the run with what is wrong with its result."""
    try:
        if run.error is None:
            results[run.point.name] = read_result(run.directory)
    except ValueError as error:
        return replace(run, error=str(error))
    return run


def _record(run: "SweepRun", results: dict[str, AuditResult]) -> dict[str, Any]:
    """A run for a program: what it is, and what was found or why it failed."""
    name = run.point.name
    found = run_record(name, results[name]) if name in results else {}
    about = {"run": run.point.name, "directory": str(run.directory), "settings": run.point.values}
    return found | about | {"error": run.error}


def _worst_verdict(results: dict[str, AuditResult]) -> int:
    verdicts = {str(result.verdict.outcome) for result in results.values() if result.verdict is not None}
    return next((EXIT_CODES[name] for name in ("VIOLATION", "UNDERPOWERED") if name in verdicts), 0)


@contextmanager
def _bar(*, hidden: bool) -> Iterator["Callable[[SweepProgress], None]"]:
    """A line on stderr: runs done, the round of the run that moved last, time left; shown in a terminal only."""
    console = Console(stderr=True)
    columns = (BarColumn(bar_width=10), TextColumn("{task.description}"))
    with Bar(*columns, console=console, transient=True, disable=hidden or not shows_bars(console)) as bar:
        task = bar.add_task("starting", total=None)

        def follow(seen: "SweepProgress") -> None:
            bar.update(task, total=seen.runs, completed=seen.done + seen.failed, description=_described(seen))

        yield follow


def _described(seen: "SweepProgress") -> str:
    parts = [f"{seen.done}/{seen.runs} runs"]
    if seen.failed:
        parts.append(f"{seen.failed} failed")
    if seen.current:
        others = f" and {seen.running - 1} more" if seen.running > 1 else ""
        parts.append(f"{seen.current} round {seen.round_number}/{seen.rounds}{others}")
    if seen.seconds_left is not None:
        minutes, seconds = divmod(round(seen.seconds_left), 60)
        parts.append(f"{minutes} min {seconds} s left" if minutes else f"{seconds} s left")
    return "  ".join(parts)
