"""`coalmine reproduce`: the paper's tables and figures, ours beside theirs, and what goes beyond them."""

import importlib
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from coalmine.cli.gaussian import as_dict
from coalmine.cli.output import (
    Commands,
    FiniteRange,
    print_json,
    print_table,
    progress_bar,
    shown_number,
    shown_spread,
    write_json,
)
from coalmine.cli.run import training_extra
from coalmine.reproduction import gaussian as table_2
from coalmine.version import __version__

if TYPE_CHECKING:
    from coalmine.reproduction.experiment import Experiment, Found
    from coalmine.reproduction.runs import PlannedRun
    from coalmine.reproduction.setting import Setting
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


@click.group(cls=Commands)
def reproduce() -> None:
    """Reproduce the paper's tables and figures, ours beside theirs.

    Every experiment but gaussian trains in --out, goes on where it was stopped, and ends with NAME-SCALE.json, a picture,
    and whether its claims hold. Small runs are a quick look on two cores; docs/reproduction.md has those of paper size.
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
    @click.option("--minutes", type=FiniteRange(0, min_open=True), help="Stop at a checkpoint after so long.")
    @click.option("--plan", is_flag=True, help="List the runs and how far they are; train nothing.")
    @click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
    @click.pass_obj
    def command(settings: dict[str, bool], /, plan: bool, as_json: bool, minutes: float | None, **options: Any) -> None:
        with training_extra():
            module = importlib.import_module(f"coalmine.reproduction.{name}")
            from coalmine.reproduction.setting import Setting
        data_dir = options.pop("data_dir")
        setting = Setting(
            **options
            | {"only": _noises(options["only"]), "data_dir": None if data_dir is None else str(data_dir.absolute())}
        )
        experiment: Experiment = module.EXPERIMENT
        _check_only(experiment, setting)
        if plan:
            _print_plan(experiment, setting, as_json=as_json)
            return
        found = _carried_out(experiment, setting, minutes, quiet=settings["quiet"])
        _report(experiment, setting, found, as_json=as_json)

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


def _check_only(experiment: "Experiment", setting: "Setting") -> None:
    """Refuse noise multipliers that the experiment does not have."""
    if not setting.only:
        return
    noises = sorted({run.config.privacy.noise_multiplier for run in experiment.plan(replace(setting, only=()))})
    if not noises:
        raise click.UsageError(f"{experiment.name} keeps no runs by their noise: leave out --only")
    unknown = [noise for noise in setting.only if noise not in noises]
    if unknown:
        raise click.BadParameter(
            f"must be among {', '.join(map('{:g}'.format, noises))}, got {unknown[0]:g}", param_hint="--only"
        )


def _carried_out(experiment: "Experiment", setting: "Setting", minutes: float | None, *, quiet: bool) -> "Found":
    """The experiment's numbers, and what they were made with."""
    from coalmine.reproduction.runs import OutOfTimeError, stop_after

    started = time.monotonic()
    stopped = None
    with _following(experiment.plan(setting), quiet=quiet) as follow:
        try:
            found = experiment.gather(setting, follow if minutes is None else stop_after(60 * minutes, follow))
        except OutOfTimeError as error:
            stopped = str(error)
    if stopped is not None:
        click.echo(f"{stopped}; the same command goes on from there", err=True)
        found = experiment.gather(_nothing_more(setting), lambda *_: None)
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


def _nothing_more(setting: "Setting") -> "Setting":
    """The same with nothing left to train: no run has a noise multiplier below zero."""
    from dataclasses import replace

    return replace(setting, only=(-1.0,))


@contextmanager
def _following(plan: "list[PlannedRun]", *, quiet: bool) -> "Iterator[Callable[[PlannedRun, Progress], None]]":
    """A line on stderr that follows all runs in a terminal; elsewhere a line for each that ends."""
    console = Console(stderr=True)
    names = {planned.name: number for number, planned in enumerate(plan, start=1)}
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=10))
    shown = console.is_terminal and not quiet
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


def _print_plan(experiment: "Experiment", setting: "Setting", *, as_json: bool) -> None:
    from coalmine.reproduction.runs import distinct

    runs = distinct(experiment.plan(setting))
    rows: list[dict[str, Any]] = []
    for planned in runs:
        done = planned.rounds_done(setting.out)
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
                "done": "finished" if planned.finished(setting.out) else done,
                "asked": setting.wanted(planned.noise_multiplier),
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


def _report(experiment: "Experiment", setting: "Setting", found: "Found", *, as_json: bool) -> None:
    """Write the numbers and the picture; print the tables and what holds."""
    from coalmine.reproduction.figures import save_figure

    write_json(setting.file(experiment.name, "json"), found)
    written = [setting.file(experiment.name, "json")]
    if experiment.draw is not None:
        written.append(setting.file(experiment.name, "png"))
        save_figure(written[-1], experiment, found)
    if as_json:
        print_json(found)
        return
    for table in experiment.tables(found):
        if table.rows:
            print_table(table.columns, table.rows, title=table.title, left=range(table.left))
    for check in experiment.checks(found):
        click.echo(f"{check.outcome}: {check.claim} ({check.detail})")
    click.echo(experiment.words(found))
    if found.get("missing"):
        click.echo(f"not finished: {len(found['missing'])} of the runs; see --plan")
    click.echo(f"written to {', '.join(map(str, written))}")


@reproduce.command()
@click.option("--runs", type=click.IntRange(1), default=50, show_default=True, help="Simulations a cell.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON to this file too.")
@click.pass_obj
def gaussian(settings: dict[str, bool], runs: int, seed: int, as_json: bool, out: Path | None) -> None:
    """Table 2: the Gaussian mechanism, d = 10^4 to 10^7, both variances; and epsilon against the norm of the data."""
    with progress_bar("Table 2", total=len(table_2.PAPER), hidden=settings["quiet"]) as advance:
        cells = table_2.table(runs=runs, seed=seed, progress=advance)
    signals = table_2.signal_study(runs=runs, seed=seed)
    found = {
        "table_2": [
            {"paper": list(cell.paper), "sphere": as_dict(cell.sphere), "rotated": as_dict(cell.rotated)}
            for cell in cells
        ],
        "signal": [{"ratio": s.ratio, "predicted": s.predicted, "audit": as_dict(s.audit)} for s in signals],
    }
    if out:
        write_json(out, found)
    if as_json:
        print_json(found)
        return
    print_table(
        [
            "noise",
            "d",
            "k",
            "true ε",
            "paper",
            "its canaries, null std",
            "its canaries, fitted std",
            "rotated, null std",
        ],
        [
            [
                f"{cell.sphere.noise_multiplier:g}",
                f"{cell.sphere.dim:.0e}",
                str(cell.sphere.canaries),
                shown_number(cell.sphere.analytical, 3),
                f"{cell.paper[0]:.2f} ± {cell.paper[1]:.2f}",
                shown_spread(cell.sphere.null),
                shown_spread(cell.sphere.fitted),
                shown_spread(cell.rotated.null),
            ]
            for cell in cells
        ],
        title=f"Table 2, {runs} runs a cell, delta 1e-6: the printed figures are those of the null's std",
    )
    print_table(
        ["‖X‖/√d", "dilution alone", "read"],
        [[f"{s.ratio:g}", shown_number(s.predicted, 3), shown_spread(s.audit.null)] for s in signals],
        title="Epsilon against the norm of the data (Theorem 3.3 needs ‖X‖ = o(√d)), true ε 10, d = 1e6, 1,000 canaries",
    )
