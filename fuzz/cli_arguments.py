"""Every command with its own options and unexpected values."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import click

from coalmine.cli.main import app
from fuzz.cases import Case, check_command
from fuzz.configs import stop_before_training
from fuzz.run_directories import whole_runs
from fuzz.values import number_text, text

# Commands that train, download or open a browser with any options.
LEFT_OUT = {("selftest",), ("data")}
# -v prints tracebacks, and --on-violation would run random text in a shell.
SKIPPED = {"--open", "--all", "--mlflow", "--tensorboard", "--verbose", "--on-violation"}
READERS = ("report", "compare", "verdict", "verify", "watch")
FAST = {
    "--canaries": ("10", "100", "1000", "-1", "0", "abc", "1e3"),
    "--runs": ("1", "10", "-1", "0", "1e1", "1.5"),
    "--rounds": ("1", "5", "-1", "0", "10000000000000000000000"),
}


def make_case(rng: random.Random, folder: Path) -> Case:
    """A command with up to five options; values fit their kind half of the time."""
    path, command = rng.choice(list(_commands(app, ())))
    scores = folder / "scores.csv"
    scores.write_text("\n".join(str(rng.gauss(1, 1)) for _ in range(50)))
    (folder / "seed").write_text("7\n")
    shutil.copytree(rng.choice(whole_runs()), folder / "run")
    arguments = list(path)
    options = [each for each in command.params if isinstance(each, click.Option) and each.opts[-1] not in SKIPPED]
    chosen = [each for each in options if each.required and rng.random() < 0.9]
    chosen += rng.sample(options, min(len(options), rng.choice((0, 1, 2, 3, 5))))
    for option in chosen:
        arguments.append(rng.choice(option.opts) if rng.random() < 0.9 else rng.choice(option.opts)[:-1])
        if not option.is_flag and not option.count:
            arguments.append(_value(option, folder, rng))
    for each in command.params:
        if isinstance(each, click.Argument) and rng.random() < 0.95:
            arguments += [
                _argument(path, folder, rng) for _ in range(1 if each.nargs == 1 else rng.choice((1, 1, 2, 0)))
            ]
    if rng.random() < 0.1:
        arguments.append(text(rng))
    if path == ("report",) and rng.random() < 0.9:
        arguments += ["--format", "md"]  # pages are slow
    if path == ("watch",) or "run" in path or "sweep" in path:
        arguments.append("-q")
    return Case(ascii(arguments), lambda: _check(arguments), seconds=60.0)


def _check(arguments: list[str]) -> None:
    with stop_before_training():
        check_command(*arguments)


def _commands(group: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, each in group.commands.items():  # type: ignore[attr-defined]
        if isinstance(each, click.Group):
            yield from _commands(each, (*path, name))
        elif (*path, name) not in LEFT_OUT:
            yield (*path, name), each


def _value(option: click.Option, folder: Path, rng: random.Random) -> str:
    if option.opts[-1] in FAST and (
        rng.random() < 0.8 or option.opts[-1] == "--runs"
    ):  # thousands of runs take minutes
        return rng.choice(FAST[option.opts[-1]])
    if option.opts[-1] == "--out":
        return str(folder / "out" / (text(rng).replace("\0", "") if rng.random() < 0.3 else "x"))
    if isinstance(option.type, click.Choice):
        return rng.choice([*map(str, option.type.choices), text(rng)])
    if isinstance(option.type, click.Path) or "file" in option.opts[-1]:
        return str(
            rng.choice((folder / "seed", folder / "scores.csv", folder, folder / "none", folder / "run", "/dev/null"))
        )
    if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType) or rng.random() < 0.6:
        return number_text(rng)
    return text(rng)


def _argument(path: tuple[str, ...], folder: Path, rng: random.Random) -> str:
    fitting = {
        "estimate": folder / "scores.csv",
        "seed": folder / "new-seed",
        "sweep": folder / "run" / "config.toml",
    }
    if rng.random() < 0.7:
        if path[-1] in fitting:
            return str(fitting[path[-1]])
        return str(folder / "run") if path[-1] in READERS else number_text(rng)
    return rng.choice(
        (
            number_text(rng),
            str(folder / text(rng).replace("\0", "")),
            text(rng).replace("\0", ""),
            str(folder),
            "/dev/null",
        )
    )
