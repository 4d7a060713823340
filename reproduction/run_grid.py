"""Grids of training runs in one folder: finished runs are read back, and interrupted runs are resumed.

A run's directory is named after its config, so that experiments which ask for the same run share it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.log.run_directory import RunDirectory
from coalmine.simulation.cohorts import plan_cohorts
from coalmine.simulation.config import ClaimSettings, RunConfig
from coalmine.simulation.participation import write_rounds
from coalmine.simulation.tasks import load_task
from coalmine.simulation.training_run import Progress, start
from reproduction.experiment_options import Options

ROUNDS_FILE = "rounds.txt"


class OutOfTimeError(Exception):
    """The time limit is over; the stopped run can be resumed from its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A planned training run. `without_canaries`: the audit knows its canaries, but none ever takes part.

    `asked_as` is the noise multiplier that selects it, if that is not its own.
    """

    config: RunConfig
    without_canaries: bool = False
    asked_as: float | None = None

    @property
    def noise_multiplier(self) -> float:
        return self.config.privacy.noise_multiplier

    @property
    def asked_noise(self) -> float:
        """The noise multiplier that selects this run."""
        return self.noise_multiplier if self.asked_as is None else self.asked_as

    @property
    def name(self) -> str:
        """The name of its directory, which is the same on every machine."""
        config = self.config
        times = ".".join(str(number) for number in config.canaries.presentations)
        noise = "" if config.privacy.noise == "gaussian" else f"-{config.privacy.noise}"
        canaries = "none" if self.without_canaries else f"{config.canaries.count}x{times}"
        known = json.dumps([_comparable(config.to_dict()), self.without_canaries], sort_keys=True)
        digest = hashlib.sha256(known.encode()).hexdigest()[:8]
        return f"{config.task.name}-{self.noise_multiplier:g}{noise}-{canaries}-{digest}"

    def directory(self, out: Path) -> Path:
        return out / "runs" / self.name

    def rounds_done(self, out: Path) -> int:
        """The number of finished rounds according to its metrics."""
        lines = RunDirectory(self.directory(out)).read_metrics()
        return int(lines[-1]["round"]) if lines else 0

    def finished(self, out: Path) -> bool:
        return (self.directory(out) / "result.json").is_file()


Follow = Callable[[PlannedRun, Progress], None]


def carry_out(runs: Iterable[PlannedRun], options: Options, *, follow: Follow = lambda *_: None) -> dict[str, Path]:
    """Train the requested unfinished runs and return the directories of all finished runs, by name."""
    runs = distinct(runs)
    waiting = [run for run in runs if options.wanted(run.asked_noise) and not run.finished(options.out)]
    for place, planned in enumerate(waiting):
        if place and options.over:  # the first always starts, so that every call makes progress
            raise OutOfTimeError(f"{planned.name} was not started")
        _train(planned, options.out, _stopping(follow, options))
    return {planned.name: planned.directory(options.out) for planned in runs if planned.finished(options.out)}


def distinct(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Each run once."""
    return list({planned.name: planned for planned in runs}.values())


def _stopping(follow: Follow, options: Options) -> Follow:
    """`follow`, with a stop at the first checkpoint after the time limit, so that nothing is trained twice."""

    def watch(planned: PlannedRun, progress: Progress) -> None:
        follow(planned, progress)
        number = progress.report.round_number
        saved = number % planned.config.checkpoint_every == 0 and number < planned.config.rounds
        if saved and options.over:
            raise OutOfTimeError(f"{planned.name} was stopped after round {number}")

    return watch


def _train(planned: PlannedRun, out: Path, follow: Follow) -> None:
    directory = planned.directory(out)
    home = RunDirectory(directory)
    config = planned.config
    if planned.without_canaries:
        config = _unmixed(config, directory)
    if (directory / "config.toml").is_file():  # resumed on the same device with the same number of threads
        config = RunConfig.from_dict(home.read_config())
    else:
        config = replace(config, engine=config.engine.resolved())
    start(config, directory, progress=lambda progress: follow(planned, progress))


def _unmixed(config: RunConfig, directory: Path) -> RunConfig:
    """The same run without any canary taking part: the clients' rounds come from a file without canaries."""
    path = directory / ROUNDS_FILE
    if not path.is_file():
        data_dir = None if config.task.data_dir is None else Path(config.task.data_dir)
        population = len(load_task(config.task.name, clients=config.task.clients, data_dir=data_dir).population)
        nobody = np.zeros(0, dtype=np.int32)
        cohorts = plan_cohorts(config, population, lambda _: nobody)
        clients = [cohorts.of_round(number).clients for number in range(1, config.rounds + 1)]
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        write_rounds(unfinished, clients, clients=population)
        unfinished.replace(path)
    return replace(
        config,
        participation=replace(config.participation, kind="file", rounds_file=str(path.absolute())),
        canaries=replace(config.canaries, pattern="clients", presentations=(1,)),
        claim=ClaimSettings(),
    )


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that identify a run: neither the machine nor the data folder."""
    kept = {name: value for name, value in values.items() if name not in ("engine", "claim")}
    kept["task"] = {name: value for name, value in kept["task"].items() if name != "data_dir"}
    return kept
