"""`coalmine sweep`: train and audit a grid of settings, one run directory each."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn

from coalmine.cli.compare import print_results, run_record
from coalmine.cli.exit_codes import BAD_INPUT, VERDICT_CODES
from coalmine.cli.interruption import resumable
from coalmine.cli.named_runs import read_result
from coalmine.cli.options import JSON, Command, Verbosity, argument
from coalmine.cli.output import PlainColumn, bar, print_error, print_json, print_line
from coalmine.cli.run import FILE, training_extra
from coalmine.log.run_directory import runs_in
from coalmine.result.audit_result import AuditResult

if TYPE_CHECKING:
    from coalmine.simulation.sweep import SweepProgress, SweepRun


@click.command(cls=Command)
@argument("file", type=FILE, help="TOML file with the settings of a run and a section [sweep].")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the run directories.  [default: runs/NAME-OF-FILE]",
)
@click.option(
    "--jobs",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Number of runs at the same time, one process each.",
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Train part I of N, while other processes train the others on a shared file system; I counts from 1.",
)
@JSON
@click.pass_obj
def sweep(verbosity: Verbosity, file: Path, out: Path | None, jobs: int, shard: str | None, as_json: bool) -> int:
    """Train and audit a grid of settings.

    The section [sweep] lists the values of each setting, and every combination is trained; the rest of FILE is a config
    as for `coalmine run --config`. After an interruption, the same command continues: finished runs are kept, and
    interrupted ones are resumed.

    With --shard, several processes train one grid, on one machine or on several with a shared file system. Each trains its
    own part, then takes over unclaimed runs. No run is trained twice, and a run whose process was killed is
    resumed by another. The table and the exit code are those of this shard's runs (docs/how-to/slurm.md).

    Exit codes: 2 if a run failed (the others are still trained), else that of the worst verdict: 1 VIOLATION,
    3 UNDERPOWERED, 0 PASS or no claim.
    """
    with training_extra():
        from coalmine.simulation.sweep import Shard, read_sweep, run_sweep

    part = None if shard is None else Shard.parse(shard)
    points = read_sweep(file)
    home = out or Path("runs") / file.stem
    chosen = "" if shard is None else f"--shard {shlex.quote(shard)} "
    again = f"coalmine sweep {shlex.quote(str(file))} {chosen}--out"
    with resumable(again, home), _bar(hidden=verbosity.quiet) as progress:
        runs = run_sweep(points, home, jobs=jobs, shard=part, plan=file.read_bytes(), progress=progress)
    results: dict[str, AuditResult] = {}
    runs = [_read_into(results, run) for run in runs]
    if as_json:
        about = {"directory": str(home)} if shard is None else {"directory": str(home), "shard": shard}
        print_json(about | {"runs": [_record(run, results) for run in runs]})
    else:
        if results:
            print_results(results)
        if shard is not None:
            print_line(_shard_line(shard, runs, home, len(points)))
        else:
            print_line(
                f"{len(results)} of {len(runs)} runs finished, in {home}; `coalmine report {home}` compares them"
            )
    for run in runs:
        if run.error is not None:
            print_error(f"{run.point.name} failed: {run.error}")
    return BAD_INPUT if any(run.error is not None for run in runs) else _worst_verdict(results)


def _shard_line(shard: str, runs: "Sequence[SweepRun]", home: Path, grid: int) -> str:
    """What this shard did, and what is left to others."""
    trained, held = (sum(getattr(run, name) for run in runs) for name in ("trained", "held"))
    finished = sum((path / "result.json").is_file() for path in runs_in(home))
    left = f", {held} of this shard's are being trained by others" if held else ""
    return (
        f"shard {shard}: {trained} runs trained here, {finished} of {grid} finished in {home}{left}; `coalmine compare "
        f"{home}` shows them all"
    )


def _read_into(results: dict[str, AuditResult], run: "SweepRun") -> "SweepRun":
    """The run, its result added to the others; or the run with what is wrong with its result."""
    try:
        if run.error is None and not run.held:
            results[run.point.name] = read_result(run.directory)
    except ValueError as error:
        return replace(run, error=str(error))
    return run


def _record(run: "SweepRun", results: dict[str, AuditResult]) -> dict[str, Any]:
    """A run as JSON: its settings, and its result or why it failed."""
    name = run.point.name
    found = run_record(name, results[name]) if name in results else {}
    about = {"run": run.point.name, "directory": str(run.directory), "settings": run.point.values}
    return found | about | {"error": run.error, "trained": run.trained, "held": run.held}


def _worst_verdict(results: dict[str, AuditResult]) -> int:
    verdicts = {str(result.verdict.outcome) for result in results.values() if result.verdict and result.claim}
    return next((VERDICT_CODES[name] for name in ("VIOLATION", "UNDERPOWERED") if name in verdicts), 0)


@contextmanager
def _bar(*, hidden: bool) -> Iterator["Callable[[SweepProgress], None]"]:
    """A progress line on stderr: finished runs, the latest round, time left; shown in a terminal only."""
    with bar(BarColumn(bar_width=10), PlainColumn("{task.description}"), hidden=hidden) as shown:
        task = shown.add_task("starting", total=None)

        def follow(seen: "SweepProgress") -> None:
            shown.update(task, total=seen.runs, completed=seen.done + seen.failed, description=_described(seen))

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
