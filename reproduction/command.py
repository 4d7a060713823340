"""`python -m reproduction`: the paper's tables and figures next to our numbers, and experiments beyond the paper."""

import json
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
from rich.progress import BarColumn
from rich.progress import Progress as Bar

from coalmine.cli.options import DATA_DIR, JSON, Commands, FiniteRange, Verbosity
from coalmine.cli.output import (
    PlainColumn,
    print_error,
    print_json,
    print_line,
    print_table,
    progress_bar,
    shows_bars,
)
from coalmine.cli.program import SETTINGS, start_log
from coalmine.cli.run import training_extra
from coalmine.log.files import json_ready, write_atomically
from coalmine.version import __version__
from reproduction import table_2
from reproduction.experiment import Experiment, Found, load_experiment, save_figure
from reproduction.experiment_options import PAPER_ONLY, Options
from reproduction.gaussian_mechanism_command import audit_gaussian_mechanism

if TYPE_CHECKING:
    from coalmine.simulation.training_run import Progress
    from reproduction.run_grid import PlannedRun

EXPERIMENTS = {
    "accuracy": "Table 3: accuracy with and without canaries.",
    "cost": "Accuracy with and without canaries on handwriting, over several seeds.",
    "stackoverflow": "Epsilon against noise for next-word prediction with an LSTM.",
    "emnist": "Epsilon against noise for handwriting recognition with a CNN.",
    "presentations": "Figures 1 to 3: canaries presented 1, 2, 4 and 8 times.",
    "normality": "Appendix C: Anderson-Darling test of the cosines.",
    "multirun": "Appendix D: one run with 1,000 canaries against ten runs with 100.",
    "canife": "Section 5.3: comparison with CANIFE.",
    "beyond": "Beyond the paper: other noise, participation and adversaries.",
    "amplification": "Epsilon of an accountant, amplified by sampling, compared with the measurement of one run.",
    "errata": "Numbers in the paper that do not follow from its text.",
}
_SIMULATIONS = " or ".join(f"{runs} at scale {scale}" for scale, runs in table_2.RUNS.items())
DEVICES = ("auto", "cpu", "cuda")
SCALES = ("small", "paper")
OPTIONS = ("device", "data_dir", "only", "rounds", "seeds", "max_examples", "originals", "jobs", "minutes")


@click.group(cls=Commands, context_settings=SETTINGS)
@click.pass_context
def reproduce(context: click.Context) -> None:
    """Reproduce the paper's tables and figures.

    Every experiment prints our numbers next to the paper's and whether the paper's claims hold. It writes
    NAME-SCALE.json and a figure into --out, together with its training runs. After an interruption, the same
    command continues. Scale small is a quick look on two cores; docs/evidence/reproduction.md has the results
    at scale paper.
    """
    start_log(context)


reproduce.add_command(audit_gaussian_mechanism)


def _experiment(name: str, text: str) -> click.Command:
    """The command of one experiment."""

    @reproduce.command(name, help=text)
    @click.option(
        "--scale",
        type=click.Choice(SCALES),
        default="small",
        show_default=True,
        help="Size of the experiment: a quick look, or the paper's.",
    )
    @click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True, help="Device to train on.")
    @DATA_DIR
    @click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("runs/reproduction"),
        show_default=True,
        help="Folder for results and training runs; experiments with the same folder share their runs.",
    )
    @click.option(
        "--only",
        metavar="Z[,Z…]",
        help="Noise multipliers to train with; finished results of other noise multipliers are included.",
    )
    @click.option(
        "--rounds", type=click.IntRange(1), metavar="T", help="Number of rounds per run.  [default: that of the scale]"
    )
    @click.option(
        "--seeds",
        type=click.IntRange(1),
        metavar="N",
        help="Number of repetitions with different seeds.  [default: that of the scale]",
    )
    @click.option(
        "--max-examples",
        type=click.IntRange(1),
        metavar="N",
        help="Largest number of examples a client trains on per round; needs --scale paper.",
    )
    @click.option(
        "--originals",
        is_flag=True,
        help="Train on the paper's data (Stack Overflow, EMNIST) instead of their substitutes; needs --scale paper.",
    )
    @click.option(
        "--jobs",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        metavar="N",
        help="Number of processes (multirun only).",
    )
    @click.option(
        "--minutes",
        type=FiniteRange(0, min_open=True),
        metavar="M",
        help="Time limit in minutes; training then stops at the next checkpoint, and the same command continues it.",
    )
    @click.option("--plan", is_flag=True, help="List the runs and their progress without training.")
    @JSON
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
        found = _carried_out(experiment, options, quiet=context.ensure_object(Verbosity).quiet)
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
    """Reject options that the experiment does not use, or not at this scale."""
    given = [name for name in OPTIONS if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    spelled = {param.name: param.opts[0] for param in context.command.params}
    for name in given:
        if name == "device" and context.params[name] in ("auto", "cpu"):
            continue  # every experiment accepts these
        if name not in experiment.takes:
            raise click.UsageError(f"{experiment.name} does not use {spelled[name]}: omit it")
        if name in PAPER_ONLY and context.params["scale"] == "small":
            raise click.UsageError(f"{spelled[name]} needs --scale paper, got scale small")


def _check_only(experiment: Experiment, options: Options) -> None:
    """Reject noise multipliers that the experiment does not have."""
    if not options.only:
        return
    noises = sorted({planned.asked_noise for planned in experiment.plan(options)})
    unknown = [noise for noise in options.only if noise not in noises]
    if unknown:
        raise click.BadParameter(
            f"must be among {', '.join(map('{:g}'.format, noises))}, got {unknown[0]:g}", param_hint="--only"
        )


def _carried_out(experiment: Experiment, options: Options, *, quiet: bool) -> Found:
    """The experiment's numbers, with version, machine and checked claims."""
    from reproduction.run_grid import OutOfTimeError

    started = time.monotonic()
    stopped = None
    assert experiment.gather is not None
    with _following(experiment.plan(options), quiet=quiet) as follow:
        try:
            found = experiment.gather(options, follow)
        except OutOfTimeError as error:
            stopped = str(error)
    if stopped is not None:
        print_error(f"{stopped}; the same command continues from there")
        found = experiment.gather(_nothing_more(options), lambda *_: None)
    return _signed(experiment, found, started)


def _signed(experiment: Experiment, found: Found, started: float) -> Found:
    """The numbers with the experiment's name, version, machine, and which claims hold."""
    return found | {
        "name": experiment.name,
        "version": __version__,
        "machine": _machine(found.get("device"), found.get("trained_on")),
        "wall_seconds": round(time.monotonic() - started, 1),
        "checks": [
            {"claim": check.claim, "outcome": check.outcome, "detail": check.detail}
            for check in experiment.account.checks(found)
        ],
    }


def _nothing_more(options: Options) -> Options:
    """The same options with nothing to train: no run has a negative noise multiplier."""
    return replace(options, only=(-1.0,))


@contextmanager
def _following(plan: "list[PlannedRun]", *, quiet: bool) -> "Iterator[Callable[[PlannedRun, Progress], None]]":
    """A progress line on stderr in a terminal; elsewhere a line for each finished run."""
    console = Console(stderr=True)
    names = {planned.name: number for number, planned in enumerate(plan, start=1)}
    columns = (PlainColumn("{task.description}"), BarColumn(bar_width=10))
    shown = shows_bars(console) and not quiet
    with Bar(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("starting", total=1.0)

        def follow(planned: "PlannedRun", progress: "Progress") -> None:
            done, rounds = progress.report.round_number, progress.rounds
            place = f"run {names.get(planned.name, 0)} of {len(names)}"
            text = f"{place}, round {done}/{rounds}, {progress.seconds_left:.0f} s left  {planned.name}"
            bar.update(task, completed=done, total=rounds, description=text)
            if done == rounds and not shown and not quiet:
                print_error(f"{place} is trained: {planned.name}")

        yield follow


def _machine(device: str | None, trained_on: str | None = None) -> str:
    """The machine in words; `trained_on` is the recorded device of the training, perhaps on another machine."""
    if device and device.startswith("cuda"):
        import torch

        if trained_on:
            return trained_on
        return torch.cuda.get_device_name(0) if torch.cuda.is_available() else device
    return f"CPU, {platform.machine()}"


def _print_plan(experiment: Experiment, options: Options, *, as_json: bool) -> None:
    from reproduction.run_grid import distinct

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
        print_line(f"{experiment.name} keeps no runs: it trains nothing, or small models that are not stored")
        return
    cells = [
        [
            row["run"],
            f"{row['noise']:g}",
            f"{row['rounds']:,}",
            str(row["clients"]),
            f"{row['canaries']:,}",
            ",".join(map(str, row["presentations"])),
            str(row["done"]) if row["asked"] else f"{row['done']}, not selected",
        ]
        for row in rows
    ]
    print_table(
        ["run", "noise", "rounds", "clients per round", "canaries", "presentations", "done"],
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
    """Write the numbers and the plot; print the tables and which claims hold."""
    written = _written(experiment, found, path)
    if as_json:
        print_json(found)
        return
    for table in experiment.account.tables(found):
        if table.rows:
            print_table(table.columns, table.rows, title=table.title, left=range(table.left))
    for check in experiment.account.checks(found):
        print_line(f"{check.outcome}: {check.claim} ({check.detail})")
    print_line(experiment.account.conclusion(found))
    if found.get("missing"):
        things = "runs" if experiment.repeats is None else "repeats"
        print_line(f"not finished: {len(found['missing'])} of the {things}; see --plan")
    print_line(f"written to {', '.join(map(str, written))}")


def _written(experiment: Experiment, found: Found, path: Path) -> list[Path]:
    """Write the numbers and the plot and return their paths; no plot if `path` is a pipe or device."""
    write_atomically(path, (json.dumps(json_ready(found), indent=2, allow_nan=False) + "\n").encode())
    if experiment.account.draw is None or path.suffix != ".json":
        return [path]
    picture = path.with_suffix(".png")
    try:
        save_figure(picture, experiment, found)
    except ImportError as error:
        print_error(f"no picture: {error}")
        return [path]
    return [path, picture]


@reproduce.command("table-2")
@click.option(
    "--scale",
    type=click.Choice(SCALES),
    default="paper",
    show_default=True,
    help="Size of the experiment: a quick look, or the paper's.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu"]),
    default="auto",
    show_default=True,
    expose_value=False,
    help="Device to compute on; always the CPU.",
)
@click.option(
    "--runs",
    type=click.IntRange(1),
    metavar="N",
    help=f"Number of simulated releases per table cell.  [default: {_SIMULATIONS}]",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the simulation; not a secret.")
@JSON
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/reproduction"),
    show_default=True,
    help="Folder for the results, or a .json file.",
)
@click.pass_obj
def reproduce_table_2(verbosity: Verbosity, scale: str, runs: int | None, seed: int, as_json: bool, out: Path) -> None:
    """Table 2: audits of the Gaussian mechanism (Algorithm 1)."""
    started = time.monotonic()
    with progress_bar("Table 2", total=len(table_2.PAPER), hidden=verbosity.quiet) as advance:
        numbers = table_2.simulate(runs=runs or table_2.RUNS[scale], seed=seed, progress=advance)
    found = _signed(table_2.EXPERIMENT, {"scale": scale, "seed": seed} | numbers, started)
    if out.is_dir() or not (out.exists() or out.suffix == ".json"):
        out /= f"table-2-{scale}.json"
    _report(table_2.EXPERIMENT, found, out, as_json=as_json)
