"""`coalmine run`: train a model with canaries, and print what the audit found."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.progress import BarColumn

from coalmine.argument_checks import short_repr
from coalmine.cli.exit_codes import VERDICT_CODES
from coalmine.cli.interruption import resumable
from coalmine.cli.options import COUNT, DETAILS, JSON, Command, Verbosity, topic
from coalmine.cli.output import PlainColumn, bar, print_error, print_result, shown_number
from coalmine.cli.run_settings import SET, changes_of, setting
from coalmine.log.run_directory import RunDirectory
from coalmine.report import write_report
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.findings.missing import NothingClaimed

if TYPE_CHECKING:
    from coalmine.simulation.config import RunConfig
    from coalmine.simulation.distributed.rank_group import RankGroup
    from coalmine.simulation.training_run import Progress

logger = logging.getLogger("coalmine")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
BUILT_IN = {  # the run without options: an accountant's ε of 7.93, for which 8 is claimed
    "rounds": 100,
    "participation": {"kind": "poisson", "clients_per_round": 20},
    "privacy": {"noise_multiplier": 0.94, "delta": 1e-5},
    "canaries": {"count": 300},
    "claim": {"epsilon": 8.0, "amplified": True},
    "baseline": True,
}
FAULTS = ("halved-noise", "forgotten-clip", "reused-noise")


@click.command(cls=Command)
@topic(
    "Task and model",
    setting("task.name", "--task", metavar="NAME", choices="TASKS", help="Data set and model."),
    setting(
        "task.data_dir",
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        unset="COALMINE_DATA_DIR, else the folder of `coalmine data`",
        help="Folder of the data sets.",
    ),
    setting(
        "task.level",
        "--level",
        metavar="UNIT",
        choices="LEVELS",
        help="Unit of privacy: client trains with DP-FedAvg, example with DP-SGD.",
    ),
    setting("seed", "--seed", type=int, help="Seed of the training; not a secret."),
    click.option("--config", "config_file", type=FILE, help="TOML file with settings; options override it."),
    SET,
)
@topic(
    "Participation",
    setting("rounds", "--rounds", type=COUNT, metavar="T", help="Number of training rounds."),
    setting(
        "participation.clients_per_round",
        "--clients-per-round",
        type=COUNT,
        metavar="N",
        help="Number of clients in a round; with poisson, the average.",
    ),
    setting(
        "participation.kind",
        "--participation",
        metavar="KIND",
        choices="PARTICIPATIONS",
        help="How clients are chosen: shuffled takes each client once per epoch, fixed draws a new cohort for each round, "
        "limited keeps a client out for participation.separation rounds.",
    ),
)
@topic(
    "Privacy",
    setting(
        "privacy.noise_multiplier",
        "--noise-multiplier",
        type=float,
        metavar="Z",
        help="Noise std divided by the clip norm; 0 clips without adding noise.",
    ),
    setting("privacy.delta", "--delta", type=float, metavar="D", help="The delta of (epsilon, delta)."),
)
@topic(
    "Canaries",
    setting("canaries.count", "--canaries", type=COUNT, metavar="K", help="Number of observed canaries."),
    setting(
        "canaries.pattern",
        "--pattern",
        metavar="NAME",
        choices="PATTERNS",
        unset="spread; with an amplified claim, clients",
        help="When canaries take part: spread evenly over the run, as often as clients, or in place of some of the clients.",
    ),
    setting(
        "canaries.seed_file",
        "--seed-file",
        type=FILE,
        unset="a public demo seed",
        help="File with the secret seed of the canaries (`coalmine seed`).",
    ),
)
@topic(
    "Claim",
    setting(
        "claim",
        "--claim",
        metavar="E",
        help="Claimed epsilon to judge the run against: a number, `mechanism:E` (a number that counts no sampling), "
        "`analytical` (the mechanism's, for an attacker who knows a client's rounds) or `accountant` (the accountant's, "
        "amplified by sampling; it can pass with --pattern clients or replace).",
    ),
    setting(
        "claim.stop_on_violation",
        "--stop-on-violation",
        is_flag=True,
        help="Stop in the round that refutes the claim; looking at every round raises a false alarm in 0.25 % of runs.",
    ),
)
@topic(
    "Demonstration",
    click.option(
        "--fault",
        type=click.Choice(FAULTS),
        metavar="NAME",
        help=f"Put a fault into the training: {', '.join(FAULTS)}.",
    ),
)
@topic(
    "Hardware",
    setting("engine.device", "--device", metavar="NAME", help="Device to train on: auto, cpu or cuda."),
    setting(
        "engine.jobs",
        "--workers",
        type=click.IntRange(1),
        metavar="N",
        unset="one per core if clients train one by one on a CPU, else 1",
        help="Number of processes that divide the clients of a round, one core or GPU each; under torchrun or srun, the "
        "number of ranks.",
    ),
)
@topic(
    "Output",
    click.option(
        "--out", type=click.Path(path_type=Path), help="Run directory to create.  [default: runs/TASK-NUMBER]"
    ),
    click.option(
        "--resume",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Run directory of an interrupted run to continue, with its own settings.",
    ),
    click.option("--page/--no-page", default=True, show_default=True, help="Write report.html into the run directory."),
    DETAILS,
    JSON,
)
@click.pass_context
def run(
    context: click.Context,
    /,
    config_file: Path | None,
    assignments: tuple[str, ...],
    out: Path | None,
    resume: Path | None,
    page: bool,
    details: bool,
    as_json: bool,
    fault: str | None,
    **options: Any,
) -> int:
    """Train a model with canaries and audit it.

    The audit reports how much privacy the model gives away. Without options, it trains on handwritten digits from
    scikit-learn for half a minute, with clients sampled in each round, and claims ε = 8 at δ = 1e-5 beforehand. With
    --fault it puts a fault into that training, which the audit finds. The defaults below are for the task digits;
    docs/reference/config.md has those of the other tasks, and every setting that --set or a config file takes. After an
    interruption, --resume continues the run. The result is the same as without the interruption.

    Exit codes with --claim: 0 PASS, 1 VIOLATION, 3 UNDERPOWERED. With --stop-on-violation the run ends with 1 as soon as
    a round refutes the claim; its directory is complete and can be reported.

    Under torchrun or srun, every rank runs this command; rank 0 writes the run directory and exits with the verdict's code.
    A resumed run needs as many ranks as before.
    """
    with training_extra():
        from coalmine.simulation import training_run
        from coalmine.simulation.faults import steps_with

    verbosity = context.ensure_object(Verbosity)
    if resume is None:
        config, directory = _new_config(context, config_file, assignments, options), out
    else:
        _check_alone(context)
        config, directory = _stored_config(resume), resume
    ranks = join_ranks(config)
    if ranks is not None and ranks.rank:
        return follow_rank_0(ranks)
    directory = directory or _new_directory(config.task.name)
    with (
        resumable("coalmine run --resume", directory),
        live_progress(config.rounds, hidden=verbosity.quiet) as progress,
    ):
        if resume is None:
            steps = None if fault is None else steps_with(fault)
            result = training_run.start(config, directory, progress=progress, steps=steps, ranks=ranks)
        else:
            result = training_run.resume(directory, progress=progress, ranks=ranks)
    return report(result, directory, page=page, details=details, as_json=as_json)


def _new_config(
    context: click.Context, config_file: Path | None, assignments: Sequence[str], options: dict[str, Any]
) -> "RunConfig":
    """The config of a new run; without options it is the built-in one."""
    from coalmine.simulation.config_sources import config_with

    changes = changes_of(options, context.command.params, assignments)
    if not changes and config_file is None:
        changes = BUILT_IN
    return config_with(changes, config_file)


def _check_alone(context: click.Context) -> None:
    """Reject settings beside --resume: a run keeps its own."""
    kept = ("resume", "page", "details", "as_json", "verbose", "quiet")
    for param in context.command.params:
        name = param.name or ""
        if name not in kept and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--resume continues a run with its own settings: omit {param.opts[0]}")


def _stored_config(directory: Path) -> "RunConfig":
    """The config of an interrupted run."""
    from coalmine.simulation.config import RunConfig

    if not (directory / "config.toml").is_file():
        problem = "holds no run: config.toml is missing" if directory.is_dir() else "is not a run directory"
        raise ValueError(f"{directory} {problem}; name the --out of a `coalmine run`")
    stored = RunDirectory(directory).read_config()
    if trainer := stored.get("trainer"):
        raise ValueError(
            f"{directory} was not made by `coalmine run` but by the integration of {short_repr(trainer)}: run your training "
            "script again, with this directory"
        )
    return RunConfig.from_dict(stored)


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
    columns = (PlainColumn("{task.description}"), BarColumn(bar_width=10))  # short, for terminals with 80 columns
    with bar(*columns, hidden=hidden) as shown:
        task = shown.add_task("starting", total=rounds)

        def follow(progress: "Progress") -> None:
            accuracy = "-" if progress.accuracy is None else f"{progress.accuracy:.1%}"
            text = (
                f"round {progress.report.round_number}/{rounds}  accuracy {accuracy}  clip {progress.report.clip_norm:.3g}  "
                f"ε {shown_number(progress.epsilon, 3)}  {progress.seconds_left:.0f} s left"
            )
            shown.update(task, completed=progress.report.round_number, description=text)

        yield follow


def report(result: AuditResult, directory: Path, *, page: bool, details: bool, as_json: bool) -> int:
    """Write the page of a run and print its result; returns the exit code of the verdict."""
    if page:
        try:
            _page(directory)
        except (OSError, ValueError) as error:
            reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else " ".join(str(error).split())
            said = f"report.html could not be written ({reason}); `coalmine report {directory}` writes it later"
            print_error(said)
    print_result(result, details=details, as_json=as_json)
    if result.verdict is None or isinstance(result.verdict.finding, NothingClaimed):
        return 0
    return VERDICT_CODES[result.verdict.outcome]


def _page(directory: Path) -> None:
    """Write the run's HTML page; without matplotlib, there is none."""
    try:
        write_report([directory])
    except ImportError as error:
        logger.info("no report.html: %s", error)


def _new_directory(task: str) -> Path:
    """The first of runs/digits-1, runs/digits-2, … that does not exist."""
    number = 1
    while (directory := Path("runs") / f"{task}-{number}").exists():
        number += 1
    return directory
