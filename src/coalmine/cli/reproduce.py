"""`coalmine reproduce`: the paper's tables and figures, ours beside theirs, and what goes beyond them."""

import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from coalmine.cli.output import (
    Commands,
    FiniteRange,
    print_json,
    print_table,
    progress_bar,
    shows_bars,
    write_json,
)
from coalmine.cli.run import training_extra
from coalmine.reproduction import table_2_gaussian as table_2
from coalmine.reproduction.experiment import Experiment, Found, load_experiment, save_figure
from coalmine.reproduction.options import PAPER_ONLY, Options
from coalmine.version import __version__

if TYPE_CHECKING:
    from coalmine.reproduction.run_grid import PlannedRun
    from coalmine.simulation.run import Progress

EXPERIMENTS = {  # each a module of coalmine.reproduction
    "accuracy": "Table 3: accuracy with and without canaries.",
    "cost": "The same of handwriting, over seeds.",
    "stackoverflow": "Epsilon against noise, next words, LSTM.",
    "emnist": "Epsilon against noise, handwriting, CNN.",
    "presentations": "Figures 1 to 3: canaries shown 1, 2, 4 and 8 times.",
    "normality": "Appendix C: Anderson-Darling of the cosines.",
    "multirun": "Appendix D: 1 × 1,000 canaries against 10 × 100.",
    "canife": "Section 5.3: the comparison with CANIFE.",
    "beyond": "Beyond the paper: other noises, check-ins, rungs.",
    "oddities": "What in the paper does not follow from its text.",
}
_SIMULATIONS = " or ".join(f"{runs} at scale {scale}" for scale, runs in table_2.RUNS.items())
OPTIONS = ("device", "data_dir", "only", "rounds", "seeds", "max_examples", "originals", "processes", "minutes")


@click.group(cls=Commands)
def reproduce() -> None:
    """Reproduce the paper's tables and figures, ours beside theirs.

    Every experiment ends with NAME-SCALE.json, a picture, and whether its claims hold; files of other rounds, examples or
    data than the scale's are named after them. Those that train do so in --out and go on where they were stopped. Small
    runs are a quick look on two cores; docs/reproduction.md has those of paper size.
    """


def _experiment(name: str, text: str) -> click.Command:
    """The command of one experiment."""

    @reproduce.command(name, help=text)
    @click.option("--scale", type=click.Choice(["small", "paper"]), default="small", show_default=True)
    @click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
    @click.option(
        "--data-dir", type=click.Path(path_type=Path), help="Where the data sets are; else COALMINE_DATA_DIR."
    )
    @click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/reproduction"), show_default=True
    )
    @click.option("--only", metavar="Z[,Z…]", help="Train with these noise multipliers only; what is finished is read.")
    @click.option("--rounds", type=click.IntRange(1), help="Another number of rounds than the scale's.")
    @click.option("--seeds", type=click.IntRange(1), help="How many pairs or repeats, where there are any.")
    @click.option("--max-examples", type=click.IntRange(1), help="The most a client trains on in a round.")
    @click.option("--originals", is_flag=True, help="Stack Overflow and EMNIST instead of what stands in for them.")
    @click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Of multirun.")
    @click.option(
        "--minutes", type=FiniteRange(0, min_open=True), help="After so long stop at a checkpoint, or between runs."
    )
    @click.option("--plan", is_flag=True, help="List the runs and how far they are; train nothing.")
    @click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
    @click.pass_context
    def command(
        context: click.Context,
        /,
        plan: bool,
        as_json: bool,
        minutes: float | None,
        data_dir: Path | None,
        **given: Any,
    ) -> None:
        with training_extra():
            experiment = load_experiment(name)
        _check_options(experiment, context)
        options = Options(
            **given
            | {
                "only": _noises(given["only"]),
                "data_dir": None if data_dir is None else str(data_dir.absolute()),
                "ends": math.inf if minutes is None else time.monotonic() + 60 * minutes,
            }
        )
        _check_only(experiment, options)
        if plan:
            _print_plan(experiment, options, as_json=as_json)
            return
        found = _carried_out(experiment, options, quiet=context.obj["quiet"])
        _report(experiment, found, options.file(experiment.name, "json"), as_json=as_json)

    return command


for _name, _text in EXPERIMENTS.items():
    _experiment(_name, _text)


def _noises(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise click.BadParameter(
            f"must be noise multipliers like 0.0496,0.2317, got {text!r}", param_hint="--only"
        ) from None


def _check_options(experiment: Experiment, context: click.Context) -> None:
    """Refuse options that the experiment has no use for, at any scale or at this one."""
    given = [name for name in OPTIONS if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    for name in given:
        option = f"--{name.replace('_', '-')}"
        if name == "device" and context.params[name] in ("auto", "cpu"):
            continue  # where everything computes
        if name not in experiment.takes:
            raise click.UsageError(f"{experiment.name} has no use for {option}: leave it out")
        if name in PAPER_ONLY and context.params["scale"] == "small":
            raise click.UsageError(f"{experiment.name} takes {option} at scale paper only, got scale small")


def _check_only(experiment: Experiment, options: Options) -> None:
    """Refuse noise multipliers that the experiment does not have."""
    if not options.only:
        return
    noises = sorted({planned.asked_noise for planned in experiment.plan(options)})
    unknown = [noise for noise in options.only if noise not in noises]
    if unknown:
        raise click.BadParameter(
            f"must be among {', '.join(map('{:g}'.format, noises))}, got {unknown[0]:g}", param_hint="--only"
        )


def _carried_out(experiment: Experiment, options: Options, *, quiet: bool) -> Found:
    """The experiment's numbers, and what they were made with."""
    from coalmine.reproduction.run_grid import OutOfTimeError

    started = time.monotonic()
    stopped = None
    assert experiment.gather is not None
    with _following(experiment.plan(options), quiet=quiet) as follow:
        try:
            found = experiment.gather(options, follow)
        except OutOfTimeError as error:
            stopped = str(error)
    if stopped is not None:
        click.echo(f"{stopped}; the same command goes on from there", err=True)
        found = experiment.gather(_nothing_more(options), lambda *_: None)
    return _signed(experiment, found, started)


def _signed(experiment: Experiment, found: Found, started: float) -> Found:
    """The numbers with the name of the experiment, what they were made with, and which claims hold."""
    return found | {
        "name": experiment.name,
        "version": __version__,
        "machine": _machine(found.get("device"), found.get("trained_on")),
        "wall_seconds": round(time.monotonic() - started, 1),
        "checks": [
            {"claim": check.claim, "outcome": check.outcome, "detail": check.detail}
            for check in experiment.checks(found)
        ],
    }


def _nothing_more(options: Options) -> Options:
    """The same with nothing left to train: no run has a noise multiplier below zero."""
    return replace(options, only=(-1.0,))


@contextmanager
def _following(plan: "list[PlannedRun]", *, quiet: bool) -> "Iterator[Callable[[PlannedRun, Progress], None]]":
    """A line on stderr that follows all runs in a terminal; elsewhere a line for each that ends."""
    console = Console(stderr=True)
    names = {planned.name: number for number, planned in enumerate(plan, start=1)}
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=10))
    shown = shows_bars(console) and not quiet
    with Bar(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("starting", total=1.0)

        def follow(planned: "PlannedRun", progress: "Progress") -> None:
            done, rounds = progress.report.round_number, progress.rounds
            place = f"run {names.get(planned.name, 0)} of {len(names)}"
            text = f"{place}, round {done}/{rounds}, {progress.seconds_left:.0f} s left  {planned.name}"
            bar.update(task, completed=done, total=rounds, description=text)
            if done == rounds and not shown and not quiet:
                click.echo(f"{place} is trained: {planned.name}", err=True)

        yield follow


def _machine(device: str | None, trained_on: str | None = None) -> str:
    """What it ran on, in words; `trained_on` where that was noted, perhaps on another machine."""
    if device and device.startswith("cuda"):
        import torch

        if trained_on:
            return trained_on
        return torch.cuda.get_device_name(0) if torch.cuda.is_available() else device
    return f"CPU, {platform.machine()}"


def _print_plan(experiment: Experiment, options: Options, *, as_json: bool) -> None:
    from coalmine.reproduction.run_grid import distinct

    if experiment.repeats is not None:
        _print_repeats(experiment, experiment.repeats(options), as_json=as_json)
        return
    runs = distinct(experiment.plan(options))
    rows: list[dict[str, Any]] = []
    for planned in runs:
        done = planned.rounds_done(options.out)
        config = planned.config
        rows.append(
            {
                "run": planned.name,
                "task": config.task.name,
                "noise": planned.noise_multiplier,
                "rounds": config.rounds,
                "clients": config.participation.clients_per_round,
                "canaries": 0 if planned.without_canaries else config.canaries.count,
                "presentations": list(config.canaries.presentations),
                "done": "finished" if planned.finished(options.out) else done,
                "asked": options.wanted(planned.asked_noise),
            }
        )
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo(f"{experiment.name} keeps no runs: it computes, or trains small models that it forgets")
        return
    cells = [
        [
            row["run"],
            f"{row['noise']:g}",
            f"{row['rounds']:,}",
            str(row["clients"]),
            f"{row['canaries']:,}",
            ",".join(map(str, row["presentations"])),
            str(row["done"]) if row["asked"] else f"{row['done']}, not asked for",
        ]
        for row in rows
    ]
    print_table(
        ["run", "noise", "rounds", "clients a round", "canaries", "shown", "done"],
        cells,
        title=f"{experiment.title}: {len(rows)} runs, {sum(row['rounds'] for row in rows):,} rounds",
        left=(0,),
    )


def _print_repeats(experiment: Experiment, repeats: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(repeats)
        return
    cells = [[f"{row['noise']:g}", str(row["repeat"]), "finished" if row["done"] else "-"] for row in repeats]
    print_table(["noise", "repeat", "done"], cells, title=f"{experiment.title}: {len(repeats)} repeats")


def _report(experiment: Experiment, found: Found, path: Path, *, as_json: bool) -> None:
    """Write the numbers to `path` and the picture beside them; print the tables and what holds."""
    written = _written(experiment, found, path)
    if as_json:
        print_json(found)
        return
    for table in experiment.tables(found):
        if table.rows:
            print_table(table.columns, table.rows, title=table.title, left=range(table.left))
    for check in experiment.checks(found):
        click.echo(f"{check.outcome}: {check.claim} ({check.detail})")
    click.echo(experiment.conclusion(found))
    if found.get("missing"):
        things = "runs" if experiment.repeats is None else "repeats"
        click.echo(f"not finished: {len(found['missing'])} of the {things}; see --plan")
    click.echo(f"written to {', '.join(map(str, written))}")


def _written(experiment: Experiment, found: Found, path: Path) -> list[Path]:
    """The files that hold the numbers and the picture; a pipe or a device has no picture beside it."""
    write_json(path, found)
    if experiment.draw is None or path.suffix != ".json":
        return [path]
    picture = path.with_suffix(".png")
    try:
        save_figure(picture, experiment, found)
    except ImportError as error:
        click.echo(f"no picture: {error}", err=True)
        return [path]
    return [path, picture]


@reproduce.command()
@click.option("--scale", type=click.Choice(["small", "paper"]), default="paper", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu"]), default="auto", show_default=True, expose_value=False)
@click.option("--runs", type=click.IntRange(1), help=f"Simulations a cell, instead of {_SIMULATIONS}.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/reproduction"),
    show_default=True,
    help="A folder, or a file that ends in .json.",
)
@click.pass_obj
def gaussian(settings: dict[str, bool], scale: str, runs: int | None, seed: int, as_json: bool, out: Path) -> None:
    """Table 2: the Gaussian mechanism, d = 10^4 to 10^7, both variances; and epsilon against the norm of the data."""
    started = time.monotonic()
    with progress_bar("Table 2", total=len(table_2.PAPER), hidden=settings["quiet"]) as advance:
        numbers = table_2.simulate(runs=runs or table_2.RUNS[scale], seed=seed, progress=advance)
    found = _signed(table_2.EXPERIMENT, {"scale": scale, "seed": seed} | numbers, started)
    if out.is_dir() or not (out.exists() or out.suffix == ".json"):
        out /= f"gaussian-{scale}.json"
    _report(table_2.EXPERIMENT, found, out, as_json=as_json)
