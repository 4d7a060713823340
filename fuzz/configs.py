"""TOML files for `coalmine run` and `coalmine sweep`, and directories for `resume`: everything up to the training itself."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from coalmine.simulation import training_run
from coalmine.simulation.config import RunConfig
from fuzz.cases import Case, check_command
from fuzz.values import damaged, edited, number_text, safe_text

BASE = RunConfig(rounds=4).to_dict()
SHORT = {
    "rounds": 2,
    "task": {"name": "digits"},
    "canaries": {"count": 12},
    "engine": {"device": "cpu", "threads": 1, "workers": 1},
}


class ReadyError(ValueError):
    """The settings were accepted: training would begin."""


def make_case(rng: random.Random, folder: Path) -> Case:
    """A config with one to three edits, or a file that is not a config at all."""
    values: Any = BASE if rng.random() < 0.5 else SHORT
    for _ in range(rng.choice((1, 1, 2, 3))):
        values = edited(values, rng)
    values = values if isinstance(values, dict) else {}
    sweep = rng.random() < 0.2
    if sweep:
        values = values | {"sweep": _sweep(rng)}
    content = _toml(values, rng)
    if rng.random() < 0.15:
        content = damaged(content, rng)
    path = folder / "run.toml"
    path.write_bytes(content)
    if sweep:
        arguments = ["sweep", str(path), "--out", str(folder / "out")]
    elif rng.random() < 0.15:
        (folder / "out").mkdir()
        (folder / "out" / "config.toml").write_bytes(b"schema_version = 1\n" + content)
        arguments = ["run", "--resume", str(folder / "out")]
    else:
        arguments = ["run", "--config", str(path), "--out", str(folder / "out"), "--no-page"]
        if rng.random() < 0.2:
            arguments += ["--set", f"canaries.presentations=[{number_text(rng)}, {number_text(rng)}]"]
    return Case(f"{' '.join(arguments)}: {content[:600]!r}", lambda: _check(arguments))


def _check(arguments: list[str]) -> None:
    with stop_before_training():
        check_command(*arguments)


@contextmanager
def stop_before_training() -> Iterator[None]:
    """Raise an error before the first round: only the settings are tested here."""
    before = training_run._train_in_directory

    def stop(*_: Any) -> Any:
        raise ReadyError("the settings were accepted")

    training_run._train_in_directory = stop
    try:
        yield
    finally:
        training_run._train_in_directory = before


def _sweep(rng: random.Random) -> Any:
    if rng.random() < 0.2:
        return rng.choice(([], 3, {}, {"privacy.noise_multiplier": 3}, {"rounds": []}, {"x": {"y": {"z": [1, 2]}}}))
    name = rng.choice(
        ("privacy.noise_multiplier", "rounds", "canaries.count", "seed", "task.name", "canaries", safe_text(rng))
    )
    return {name: [rng.choice((1, 2, 0.5, 1e308, -1, "x", True, safe_text(rng))) for _ in range(rng.randint(1, 3))]}


def _toml(values: dict[str, Any], rng: random.Random) -> bytes:
    try:
        return tomli_w.dumps(_without_none(values)).encode("utf-8", "replace")
    except (TypeError, ValueError, RecursionError):
        depth = rng.choice((50, 500, 5_000))
        return b"rounds = " + b"[" * depth + b"]" * depth


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value if item is not None] if isinstance(value, list) else value
