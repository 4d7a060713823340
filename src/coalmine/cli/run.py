"""`coalmine run`: train with canaries, and say what the audit found."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from coalmine.cli.output import print_columns, print_json, print_table, print_title, shown_number, shows_bars

if TYPE_CHECKING:
    from coalmine.simulation.run import Progress, RunOutcome

logger = logging.getLogger("coalmine")
EXIT_CODES = {"PASS": 0, "VIOLATION": 1, "UNDERPOWERED": 3}
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--task",
    help="digits (the default), mnist-by-writer, fashion-mnist, emnist, emnist-digits, stackoverflow, stackexchange or "
    "shakespeare.",
)
@click.option("--level", help="client (DP-FedAvg, the default) or example (DP-SGD).")
@click.option("--config", "config_file", type=FILE, help="A TOML file; options given here come before it.")
@click.option("--rounds", type=int)
@click.option("--clients", type=int, help="How many clients; more than the task has of its own are virtual.")
@click.option("--clients-per-round", type=int)
@click.option("--participation", help="shuffled (the default), poisson, fixed, limited or file.")
@click.option("--separation", type=int, metavar="B", help="With limited: rounds between two check-ins of a client.")
@click.option("--rounds-file", type=FILE, help="With file: who takes part, a line for each round.")
@click.option("--noise-multiplier", type=float, metavar="Z", help="Noise std over clip norm; 0 only clips.")
@click.option("--noise", help="gaussian (the default), tree (DP-FTRL) or banded (matrix factorisation).")
@click.option("--bands", type=int, metavar="B", help="With noise banded: how many rounds hang together.")
@click.option("--restart", type=int, metavar="B", help="With noise tree: rounds of one tree; default: all.")
@click.option("--clipping", help="fixed (the default) or adaptive.")
@click.option("--clip-norm", type=float, metavar="S")
@click.option("--delta", type=float, help="The delta of (epsilon, delta).")
@click.option("--canaries", type=int, metavar="K", help="How many canaries take part.")
@click.option("--presentations", metavar="R[,R…]", help="How often each is shown; several numbers make groups.")
@click.option("--pattern", help="spread (the default), clients (as clients come) or replace (in their place).")
@click.option(
    "--replace-fraction",
    type=float,
    metavar="F",
    help="With replace, which it implies: this share of the clients are canaries; default, without --canaries: 0.1.",
)
@click.option("--client-learning-rate", type=float)
@click.option("--client-epochs", type=int)
@click.option("--server-optimizer", help="sgd (the default) or adam.")
@click.option("--server-learning-rate", type=float)
@click.option("--server-momentum", type=float)
@click.option("--claim", metavar="E", help="Judge the run against this epsilon, or against the `analytical` one.")
@click.option("--claim-accounting", help="mechanism (the default) or amplified, by sampling.")
@click.option("--seed", type=int, help="Seed of the training; not a secret.")
@click.option("--seed-file", type=FILE, help="The secret seed of the canaries; without it they are for show.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where the data sets are; else COALMINE_DATA_DIR.")
@click.option("--device", help="auto (the default), cpu or cuda.")
@click.option("--engine", help="auto (the default), together or one-by-one.")
@click.option("--workers", type=int, help="Processes that train one by one; default: one for each core.")
@click.option("--out", type=click.Path(path_type=Path), help="The run's directory; default: a new one in runs/.")
@click.option("--page/--no-page", default=True, help="Write report.html into the directory, or not.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON instead of a table.")
@click.pass_obj
def run(
    settings: dict[str, bool],
    /,
    config_file: Path | None,
    out: Path | None,
    page: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Train a model with DP-FedAvg, with canaries among the clients, and tell what they give away.

    Without options: handwritten digits that come with scikit-learn, in under two minutes. Killed, it goes on with
    `coalmine resume DIR`. With a claim the exit code is the verdict: 0 PASS, 1 VIOLATION, 3 UNDERPOWERED.
    """
    with training_extra():
        from coalmine.simulation.config import RunConfig, merged, read_config, task_defaults
        from coalmine.simulation.run import start

    asked = _changes(options)
    changes = merged(_giving_way(read_config(config_file) if config_file else {}, asked), asked)
    task = changes.get("task", {})
    task = task if isinstance(task, dict) else {}
    defaults = task_defaults(task.get("name", "digits"), task.get("level", "client"))
    config = RunConfig.from_dict(merged(_giving_way(defaults, changes), changes))
    if options["separation"] is not None and config.participation.kind != "limited":
        raise click.UsageError("--separation is for limited check-ins: give --participation limited")
    if options["claim_accounting"] is not None and config.claim.epsilon is None and not config.claim.analytical:
        raise click.UsageError("--claim-accounting is for a claim: give --claim")
    directory = out or _new_directory(config.task.name)
    with live_progress(config.rounds, hidden=settings["quiet"]) as progress:
        outcome = start(config, directory, progress=progress)
    return report(outcome, directory, page=page, as_json=as_json, quiet=settings["quiet"])


@contextmanager
def training_extra() -> Iterator[None]:
    """Say which extra is missing, if one is."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"training needs: pip install 'coalmine[simulation]' ({error})") from error


@contextmanager
def live_progress(rounds: int, *, hidden: bool) -> Iterator["Callable[[Progress], None]"]:
    """A line on stderr that follows the run, with the analytical epsilon so far; shown in a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=10))  # short: a terminal may have 80 columns
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
            click.echo(f"coalmine: {said}", err=True)
    if as_json:
        print_json(result.to_dict() | outcome.extra())
    else:
        _print_outcome(outcome, quiet=quiet)
        if not quiet:
            click.echo(f"written to {written}")
    return 0 if result.verdict is None else EXIT_CODES[result.verdict.outcome]


def _print_outcome(outcome: "RunOutcome", *, quiet: bool) -> None:
    """The numbers on top, one row for each adversary, the verdict, what it covers, and notes; quiet: table and verdict."""
    from coalmine.report.sentences import shortened
    from coalmine.report.summary import coverage_lines, folded_line, gauge_lines, key_figures
    from coalmine.report.table_rows import row_warnings
    from coalmine.report.trainer_entries import note_lines

    result = replace(outcome.result, extra=outcome.extra())
    verdict = [] if result.verdict is None else [f"{result.verdict.outcome}: {shortened(result.verdict.reason)}"]
    print_title(_title(outcome))
    if not quiet:
        figures = key_figures(result)
        print_columns([[figure.label, shown_number(figure.value, 3), figure.detail] for figure in figures])
    print_table(*result.table())
    if quiet:
        click.echo("\n".join(verdict), nl=bool(verdict))
        return
    lines = [f"{line}; the rows are in result.json" for line in [folded_line(result)] if line]
    lines += row_warnings(result)
    passed = result.verdict is not None and result.verdict.outcome == "PASS"
    lines += [*verdict, *(["this PASS covers only what was checked:"] if passed else []), *coverage_lines(result)]
    for line in [*lines, *gauge_lines(result), *_notes(outcome), *note_lines(result)]:
        click.echo(line)


def _page(directory: Path) -> Path:
    """The page of the run, where matplotlib is there to draw it; else the directory."""
    try:
        from coalmine.report import write_report

        return write_report([directory])
    except ImportError as error:
        logger.info("no report.html: %s", error)
        return directory


def _title(outcome: "RunOutcome") -> str:
    config = outcome.config
    groups = config.canaries.presentations if config.canaries.pattern == "spread" else ()
    times = groups if len(groups) > 1 else (outcome.presentations,)
    return (
        f"{outcome.title}: {config.rounds} rounds, noise multiplier {config.privacy.noise_multiplier:g}, delta "
        f"{config.privacy.delta:.3g}, {config.canaries.count:,} canaries shown {', '.join(f'{each}×' for each in times)}; "
        f"accuracy {outcome.accuracy:.1%}; engine: {outcome.engine}"
    )


def _notes(outcome: "RunOutcome") -> list[str]:
    config = outcome.config
    notes = []
    if config.canaries.pattern == "replace":
        notes.append(f"{config.canaries.count:,} of the {outcome.population:,} {config.task.level}s are canaries")
    if outcome.count_noise_multiplier and outcome.count_epsilon is not None:
        notes.append(
            f"the adaptive clip's count takes its share, noise multiplier {outcome.count_noise_multiplier:.4g} and ε "
            f"{shown_number(outcome.count_epsilon, 4)}, so the updates' noise multiplier is "
            f"{outcome.update_noise_multiplier:.4g} and known-others meets ε {shown_number(outcome.update_epsilon, 4)}"
        )
    if outcome.if_claimed is not None:
        notes.append(
            f"if ε {shown_number(outcome.analytical, 3)} were claimed (--claim analytical): {outcome.if_claimed.outcome}, "
            f"{outcome.if_claimed.reason}"
        )
    if config.canaries.seed_file is None:
        notes.append("the canaries' seed is the public demo seed: an audit that others are to trust needs --seed-file")
    return notes


# What gives way where a setting is asked for that goes without it: (section, key) of both.
RIVALS = {
    ("claim", "epsilon"): [("claim", "analytical")],
    ("claim", "analytical"): [("claim", "epsilon")],
    ("canaries", "count"): [("canaries", "fraction")],
    ("canaries", "fraction"): [("canaries", "count")],
    ("participation", "kind"): [("participation", "file"), ("participation", "separation")],
    ("server", "optimizer"): [("server", "momentum")],
    ("privacy", "noise"): [("privacy", "bands"), ("privacy", "restart")],
}


def _giving_way(values: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """`values` without those that what is asked for goes without; the same setting asked for again changes nothing."""
    kept = {name: dict(part) if isinstance(part, dict) else part for name, part in values.items()}

    def found(place: tuple[str, str], settings: dict[str, Any]) -> Any:
        section = settings.get(place[0])
        return section.get(place[1]) if isinstance(section, dict) else None

    for place, rivals in RIVALS.items():
        if found(place, asked) not in (None, found(place, values)):
            for section, key in rivals:
                if isinstance(kept.get(section), dict):
                    kept[section].pop(key, None)
    return kept


def _changes(options: dict[str, Any]) -> dict[str, Any]:
    """What the options say, as TOML would."""
    places = {
        "task": ("task", "name"),
        "level": ("task", "level"),
        "clients": ("task", "clients"),
        "data_dir": ("task", "data_dir"),
        "clients_per_round": ("participation", "clients_per_round"),
        "participation": ("participation", "kind"),
        "separation": ("participation", "separation"),
        "rounds_file": ("participation", "file"),
        "noise_multiplier": ("privacy", "noise_multiplier"),
        "noise": ("privacy", "noise"),
        "bands": ("privacy", "bands"),
        "restart": ("privacy", "restart"),
        "clipping": ("privacy", "clipping"),
        "clip_norm": ("privacy", "clip_norm"),
        "delta": ("privacy", "delta"),
        "canaries": ("canaries", "count"),
        "presentations": ("canaries", "presentations"),
        "pattern": ("canaries", "pattern"),
        "replace_fraction": ("canaries", "fraction"),
        "seed_file": ("canaries", "seed_file"),
        "client_learning_rate": ("client", "learning_rate"),
        "client_epochs": ("client", "epochs"),
        "server_optimizer": ("server", "optimizer"),
        "server_learning_rate": ("server", "learning_rate"),
        "server_momentum": ("server", "momentum"),
        "claim_accounting": ("claim", "accounting"),
        "device": ("engine", "device"),
        "engine": ("engine", "name"),
        "workers": ("engine", "workers"),
    }
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        plain = str(value.absolute()) if isinstance(value, Path) else value
        if name == "presentations":
            plain = _numbers(plain)
        if name == "claim":
            claim = {"analytical": True} if plain == "analytical" else {"epsilon": _number("--claim", plain)}
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
        raise click.BadParameter(f"must be a number or `analytical`, got {text!r}", param_hint=name) from None


def _new_directory(task: str) -> Path:
    """The first of runs/digits-1, runs/digits-2, … that is not there."""
    number = 1
    while (directory := Path("runs") / f"{task}-{number}").exists():
        number += 1
    return directory
