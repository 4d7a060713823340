"""`coalmine run`: train a model with canaries, and print what the audit found."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn
from rich.progress import Progress as Bar

from coalmine.cli.exit_codes import VERDICT_CODES
from coalmine.cli.interruption import resumable
from coalmine.cli.options import COUNT, DATA_DIR, JSON, Command, Verbosity, topic
from coalmine.cli.output import (
    PlainColumn,
    print_columns,
    print_error,
    print_json,
    print_line,
    print_table,
    print_title,
    shown_number,
    shows_bars,
)
from coalmine.log.run_directory import RunDirectory
from coalmine.report import write_report
from coalmine.report.summary import key_figures, summary_lines, verdict_lines
from coalmine.verdict.claim import MECHANISM
from coalmine.verdict.findings.missing import NothingClaimed

if TYPE_CHECKING:
    from coalmine.simulation.config import RunConfig
    from coalmine.simulation.distributed.rank_group import RankGroup
    from coalmine.simulation.run_outcome import RunOutcome
    from coalmine.simulation.training_run import Progress

logger = logging.getLogger("coalmine")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
# The same as in coalmine.simulation.config, which needs torch; a test compares them.
TASKS = (
    "digits",
    "mnist-by-writer",
    "fashion-mnist",
    "emnist",
    "emnist-digits",
    "stackoverflow",
    "stackexchange",
    "shakespeare",
)
LEVELS = ("client", "example")
PARTICIPATIONS = ("shuffled", "poisson", "fixed", "limited", "file")
NOISES = ("gaussian", "tree", "banded")
CLIPPINGS = ("fixed", "adaptive")
PATTERNS = ("spread", "clients", "replace")
OPTIMIZERS = ("sgd", "adam")
DEVICES = ("auto", "cpu", "cuda")
ENGINES = ("auto", "together", "one-by-one")
# Where a config has an option: under its own name, as the main key of the section that it names, or under its name without
# the section.
SECTIONS = {
    "task": ("level", "clients", "data_dir"),
    "participation": ("clients_per_round", "separation", "rounds_file"),
    "privacy": ("noise_multiplier", "noise", "bands", "restart", "clipping", "clip_norm", "delta"),
    "canaries": ("presentations", "pattern", "replace_fraction", "seed_file"),
    "claim": ("amplified", "stop_on_violation"),
    "engine": ("device", "jobs"),
}
MAIN_KEYS = {"task": "name", "participation": "kind", "canaries": "count", "engine": "name"}
PREFIXED = {"client": ("learning_rate", "epochs"), "server": ("optimizer", "learning_rate", "momentum")}
PAGE = click.option(
    "--page/--no-page", default=True, show_default=True, help="Write report.html into the run directory."
)


@click.command(cls=Command)
@topic(
    "Task and model",
    click.option(
        "--task",
        type=click.Choice(TASKS),
        metavar="NAME",
        help=f"Data set and model: {', '.join(TASKS[:-1])} or {TASKS[-1]}.  [default: digits]",
    ),
    DATA_DIR,
    click.option(
        "--level",
        type=click.Choice(LEVELS),
        help="Unit of privacy: client trains with DP-FedAvg, example with DP-SGD.  [default: client]",
    ),
    click.option("--config", "config_file", type=FILE, help="TOML file with settings; options override it."),
    click.option("--seed", type=int, help="Seed of the training; not a secret.  [default: 1]"),
)
@topic(
    "Participation",
    click.option("--rounds", type=COUNT, metavar="T", help="Number of training rounds.  [default: 100]"),
    click.option(
        "--clients",
        type=COUNT,
        metavar="N",
        help="Number of clients; beyond those of the task, clients are virtual.  [default: all clients of the task]",
    ),
    click.option(
        "--clients-per-round",
        type=COUNT,
        metavar="N",
        help="Number of clients in a round; with poisson, the average.  [default: 50]",
    ),
    click.option(
        "--participation",
        type=click.Choice(PARTICIPATIONS),
        help="How clients are chosen: shuffled takes each client once per epoch, fixed draws a new cohort for each round, "
        "limited keeps a client out for --separation rounds.  [default: shuffled]",
    ),
    click.option(
        "--separation",
        type=COUNT,
        metavar="B",
        help="Smallest number of rounds between two check-ins of a client; needs --participation limited.",
    ),
    click.option(
        "--rounds-file",
        type=FILE,
        help="File with the clients of each round, one line per round; needs --participation file.",
    ),
)
@topic(
    "Privacy",
    click.option(
        "--noise-multiplier",
        type=float,
        metavar="Z",
        help="Noise std divided by the clip norm; 0 clips without adding noise.  [default: 0.5]",
    ),
    click.option(
        "--noise",
        type=click.Choice(NOISES),
        help="Noise mechanism: independent in each round (gaussian), or correlated between rounds by tree aggregation "
        "(tree, DP-FTRL) or matrix factorisation (banded).  [default: gaussian]",
    ),
    click.option(
        "--bands", type=COUNT, metavar="B", help="Number of bands of the factorisation; needs --noise banded."
    ),
    click.option(
        "--restart",
        type=COUNT,
        metavar="B",
        help="Number of rounds after which a new tree begins; needs --noise tree.  [default: all rounds]",
    ),
    click.option(
        "--clipping",
        type=click.Choice(CLIPPINGS),
        help="Clip norm: the same in every round, or adapted to the updates.  [default: fixed]",
    ),
    click.option(
        "--clip-norm",
        type=float,
        metavar="S",
        help="Clip norm; with adaptive clipping, the initial one.  [default: 0.5]",
    ),
    click.option("--delta", type=float, metavar="D", help="The delta of (epsilon, delta).  [default: 1e-06]"),
)
@topic(
    "Canaries",
    click.option("--canaries", type=COUNT, metavar="K", help="Number of observed canaries.  [default: 1000]"),
    click.option(
        "--presentations",
        metavar="R[,R…]",
        help="Number of rounds in which each canary takes part; several numbers split the canaries into groups.  "
        "[default: 1]",
    ),
    click.option(
        "--pattern",
        type=click.Choice(PATTERNS),
        help="When canaries take part: spread evenly over the run, as often as clients, or in place of some of the "
        "clients.  [default: spread; with an amplified claim, as often as clients]",
    ),
    click.option(
        "--replace-fraction",
        type=float,
        metavar="F",
        help="Fraction of the clients that canaries replace; implies --pattern replace.  [default: 0.1]",
    ),
    click.option(
        "--seed-file",
        type=FILE,
        help="File with the secret seed of the canaries (`coalmine seed`).  [default: a public demo seed]",
    ),
)
@topic(
    "Claim",
    click.option(
        "--claim",
        metavar="E",
        help="Claimed epsilon to judge the run against: a number, `mechanism:E` (a number that counts no sampling), "
        "`analytical` (the mechanism's, for an attacker who knows a client's rounds) or `accountant` (the accountant's, "
        "amplified by sampling; it can pass with --pattern clients or replace).",
    ),
    click.option(
        "--amplified",
        is_flag=True,
        default=None,
        help="The claimed number is an accountant's: it assumes amplification by sampling.",
    ),
    click.option(
        "--stop-on-violation",
        is_flag=True,
        default=None,
        help="Stop in the round that refutes the claim; looking at every round raises a false alarm in 0.25 % of runs.",
    ),
)
@topic(
    "Optimisation",
    click.option("--client-learning-rate", type=float, metavar="R", help="Learning rate of clients.  [default: 0.3]"),
    click.option("--client-epochs", type=COUNT, metavar="N", help="Local epochs of a client per round.  [default: 2]"),
    click.option("--server-optimizer", type=click.Choice(OPTIMIZERS), help="Optimizer of the server.  [default: sgd]"),
    click.option("--server-learning-rate", type=float, metavar="R", help="Learning rate of the server.  [default: 1]"),
    click.option("--server-momentum", type=float, metavar="M", help="Momentum of the server's SGD.  [default: 0]"),
)
@topic(
    "Hardware",
    click.option("--device", type=click.Choice(DEVICES), help="Device to train on.  [default: auto]"),
    click.option(
        "--engine",
        type=click.Choice(ENGINES),
        help="Train the clients of a round together in batches, or one by one; auto picks the faster.  [default: auto]",
    ),
    click.option(
        "--workers",
        "--jobs",
        "jobs",
        type=click.IntRange(1),
        metavar="N",
        help="Number of processes that divide the clients of a round, one core or GPU each; under torchrun or srun, the "
        "number of ranks.  [default: one per core if clients train one by one on a CPU, else 1]",
    ),
)
@topic(
    "Output",
    click.option(
        "--out", type=click.Path(path_type=Path), help="Run directory to create.  [default: runs/TASK-NUMBER]"
    ),
    PAGE,
    JSON,
)
@click.pass_obj
def run(
    verbosity: Verbosity,
    /,
    config_file: Path | None,
    out: Path | None,
    page: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Train a model with canaries and audit it.

    The audit reports how much privacy the model gives away. Without options, it is a small built-in training run on
    handwritten digits from scikit-learn, and takes under two minutes. The defaults below are for the task digits;
    docs/how-to/training.md has those of the other tasks. After an interruption, `coalmine resume` continues the run.

    Exit codes with --claim: 0 PASS, 1 VIOLATION, 3 UNDERPOWERED. With --stop-on-violation the run ends with 1 as soon as
    a round refutes the claim; its directory is complete and can be reported.

    Under torchrun or srun, every rank runs this command; rank 0 writes the run directory and exits with the verdict's code.
    """
    with training_extra():
        from coalmine.simulation.config import config_with
        from coalmine.simulation.training_run import start

    if options["amplified"] and not config_file and options["claim"] in (None, "analytical", "accountant"):
        raise click.UsageError("--amplified needs a number as --claim")
    if options["stop_on_violation"] and not config_file and options["claim"] is None:
        raise click.UsageError("--stop-on-violation needs a --claim that a round can refute")
    changes = _changes(options)
    if not changes and config_file is None:  # the built-in run claims its accountant's epsilon before round 1
        changes = {"claim": {"analytical": True}}
    config = config_with(changes, config_file)
    if options["separation"] is not None and config.participation.kind != "limited":
        raise click.UsageError("--separation needs --participation limited")
    ranks = join_ranks(config)
    if ranks is not None and ranks.rank:
        return follow_rank_0(ranks)
    directory = out or _new_directory(config.task.name)
    with resumable("coalmine resume", directory), live_progress(config.rounds, hidden=verbosity.quiet) as progress:
        outcome = start(config, directory, progress=progress, ranks=ranks)
    return report(outcome, directory, page=page, as_json=as_json, quiet=verbosity.quiet)


def join_ranks(config: "RunConfig") -> "RankGroup | None":
    """The group of ranks that torchrun or srun started this process in; None if it was started alone."""
    from coalmine.simulation.distributed.rank_environment import join_group, place_from, use_own_gpu

    place = place_from(os.environ)
    if place is None:
        return None
    if config.engine.jobs not in (0, place.size):
        raise ValueError(
            f"--workers must be the number of ranks that were started, {place.size}, or be left out, got "
            f"{config.engine.jobs}"
        )
    if config.engine.device != "cpu":
        use_own_gpu(place)
    return join_group(place, device=config.engine.resolved().device)


def follow_rank_0(ranks: "RankGroup") -> int:
    """Train a share of each round until rank 0 ends; this rank prints nothing and writes nothing."""
    from coalmine.simulation.training_run import follow

    follow(ranks)
    return 0


@contextmanager
def training_extra() -> Iterator[None]:
    """Turn a missing package into an error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"training needs: pip install 'coalmine[simulation]' ({error})") from error


@contextmanager
def live_progress(rounds: int, *, hidden: bool) -> Iterator["Callable[[Progress], None]"]:
    """A progress line on stderr, with the analytical epsilon so far; shown in a terminal only."""
    console = Console(stderr=True)
    columns = (PlainColumn("{task.description}"), BarColumn(bar_width=10))  # short, for terminals with 80 columns
    with Bar(*columns, console=console, transient=True, disable=hidden or not shows_bars(console)) as bar:
        task = bar.add_task("starting", total=rounds)

        def follow(progress: "Progress") -> None:
            accuracy = "-" if progress.accuracy is None else f"{progress.accuracy:.1%}"
            text = (
                f"round {progress.report.round_number}/{rounds}  accuracy {accuracy}  clip {progress.report.clip_norm:.3g}  "
                f"ε {shown_number(progress.epsilon, 3)}  {progress.seconds_left:.0f} s left"
            )
            bar.update(task, completed=progress.report.round_number, description=text)

        yield follow


def report(outcome: "RunOutcome", directory: Path, *, page: bool, as_json: bool, quiet: bool) -> int:
    """Print the result of a run and write its page; returns the exit code of the verdict."""
    result = outcome.result
    written = directory
    if page:
        try:
            written = _page(directory)
        except (OSError, ValueError) as error:
            reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else " ".join(str(error).split())
            said = f"report.html could not be written ({reason}); `coalmine report {directory}` writes it later"
            print_error(said)
    if as_json:
        print_json(RunDirectory(directory).read_result())
    else:
        _print_outcome(outcome, quiet=quiet)
        if not quiet:
            print_line(f"written to {written}")
            home = RunDirectory(directory)
            commitment, digest = home.read_record()[1].statement_sha256, home.read_result()["log_digest"]
            print_line(f"record elsewhere, for `coalmine verify`: commitment {commitment}, log digest {digest}")
    if result.verdict is None or isinstance(result.verdict.finding, NothingClaimed):
        return 0
    return VERDICT_CODES[result.verdict.outcome]


def _print_outcome(outcome: "RunOutcome", *, quiet: bool) -> None:
    """Print the key figures, one row per adversary, the verdict, its coverage and notes; if quiet, table and verdict."""
    result = replace(outcome.result, extra=outcome.extra())
    print_title(outcome.heading())
    if not quiet:
        figures = key_figures(result)
        print_columns([[figure.label, shown_number(figure.value, 3), figure.detail] for figure in figures])
    print_table(*result.table())
    for line in verdict_lines(result) if quiet else summary_lines(result, outcome.notes()):
        print_line(line)


def _page(directory: Path) -> Path:
    """Write the run's HTML page and return its path; without matplotlib, return the run directory."""
    try:
        return write_report([directory])
    except ImportError as error:
        logger.info("no report.html: %s", error)
        return directory


def _changes(options: dict[str, Any]) -> dict[str, Any]:
    """The options as a TOML file would hold them."""
    places = {name: (section, name) for section, names in SECTIONS.items() for name in names}
    places |= {section: (section, key) for section, key in MAIN_KEYS.items()}
    places |= {f"{section}_{key}": (section, key) for section, keys in PREFIXED.items() for key in keys}
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        plain = str(value.absolute()) if isinstance(value, Path) else value
        if name == "presentations":
            plain = _numbers(plain)
        if name == "claim":
            named = plain in ("analytical", "accountant")
            number = plain.removeprefix(MECHANISM)
            claim = {plain: True} if named else {"epsilon": _number("--claim", number)}
            claim |= {"mechanism": True} if number != plain else {}
            changes.setdefault("claim", {}).update(claim)
        elif name in places:
            section, key = places[name]
            changes.setdefault(section, {})[key] = plain
        else:
            changes[name] = plain
    if options.get("replace_fraction") is not None:
        changes["canaries"].setdefault("pattern", "replace")
    return changes


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"must be whole numbers like 1,2,4, got {text!r}", param_hint="--presentations"
        ) from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(
            f"must be a number, `mechanism:E`, `analytical` or `accountant`, got {text!r}", param_hint=name
        ) from None


def _new_directory(task: str) -> Path:
    """The first of runs/digits-1, runs/digits-2, … that does not exist."""
    number = 1
    while (directory := Path("runs") / f"{task}-{number}").exists():
        number += 1
    return directory
