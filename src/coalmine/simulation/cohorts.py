"""The participants of each round: real clients and canaries."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.audit.cohort_sampling import cohort_sampling, cohort_size
from coalmine.estimators.sampling import Sampling
from coalmine.simulation.config import RunConfig
from coalmine.simulation.participation import (
    FixedSize,
    LimitedCheckIns,
    Participation,
    Poisson,
    ShuffledEpochs,
    read_rounds,
)
from coalmine.simulation.population import Indices
from coalmine.simulation.randomness import numpy_stream


@dataclass(frozen=True)
class Cohort:
    """The real clients and the canaries of one round."""

    clients: Indices
    canaries: Indices

    def __len__(self) -> int:
        return len(self.clients) + len(self.canaries)


@dataclass(frozen=True)
class Cohorts:
    """The cohort of every round, its expected size, and its expected number of canaries."""

    of_round: Callable[[int], Cohort]
    expected_size: float
    expected_canaries: float


def sampling_of(config: RunConfig, population: int) -> Sampling | None:
    """The scheme by which everybody takes part, as an accountant names it; None for those that have no name.

    Canaries that are sampled beside the clients count: the scheme is that of the audited pipeline.
    """
    settings = config.participation
    return cohort_sampling(
        settings.kind,
        clients_per_round=settings.clients_per_round,
        population=population,
        extra=config.canaries.count if config.canaries.pattern == "clients" else 0,
        rounds=config.rounds,
    )


def plan_cohorts(config: RunConfig, population: int, spread: Callable[[int], npt.NDArray[np.integer[Any]]]) -> Cohorts:
    """The cohorts of a run. `spread` gives the canaries of a round where they do not follow the clients' pattern."""
    canaries = config.canaries
    if canaries.pattern == "spread":
        return _spread(config, population, spread)
    if canaries.pattern == "clients":
        return _as_participants(config, population, population + np.arange(canaries.count))
    if canaries.count >= population:
        raise ValueError(
            f"canaries.count must be below the {population} clients whose place they take, got {canaries.count}"
        )
    chosen = numpy_stream(config.seed, "replaced clients").choice(population, canaries.count, replace=False)
    return _as_participants(config, population, chosen)


def _spread(config: RunConfig, population: int, spread: Callable[[int], npt.NDArray[np.integer[Any]]]) -> Cohorts:
    clients = _participation(config, population, extra=0)
    shown = np.mean(config.canaries.presentations) * config.canaries.count / config.rounds

    def of_round(round_number: int) -> Cohort:
        return Cohort(clients.participants(round_number), np.asarray(spread(round_number), dtype=np.int64))

    return Cohorts(of_round, clients.expected_size + float(shown), float(shown))


def _as_participants(config: RunConfig, population: int, canary_ids: Indices) -> Cohorts:
    """Cohorts in which canaries are sampled like clients: participant canary_ids[i] is canary i."""
    everybody = _participation(config, population, extra=max(0, int(canary_ids.max()) + 1 - population))
    order = np.argsort(canary_ids)
    sorted_ids = canary_ids[order]

    def of_round(round_number: int) -> Cohort:
        present = everybody.participants(round_number)
        place = np.searchsorted(sorted_ids, present).clip(max=len(sorted_ids) - 1)
        is_canary = sorted_ids[place] == present
        return Cohort(present[~is_canary], np.sort(order[place[is_canary]]))

    share = len(canary_ids) / max(population, int(canary_ids.max()) + 1)
    return Cohorts(of_round, everybody.expected_size, everybody.expected_size * share)


def _participation(config: RunConfig, population: int, *, extra: int) -> Participation:
    """Participation of `population` clients and `extra` others; rounds grow so that the rate per participant stays."""
    settings, everybody = config.participation, population + extra
    if settings.kind != "file" and settings.clients_per_round > population:
        raise ValueError(
            f"participation.clients_per_round must be at most the {population} there are, got {settings.clients_per_round}"
        )
    size = cohort_size(settings.clients_per_round, population=population, extra=extra)
    if settings.kind == "poisson":
        return Poisson(everybody, settings.clients_per_round / population, config.seed)
    if settings.kind == "fixed":
        return FixedSize(everybody, size, config.seed)
    if settings.kind == "limited":
        return LimitedCheckIns(everybody, size, settings.separation, config.seed)
    if settings.kind == "shuffled":
        return ShuffledEpochs(everybody, size, config.seed)
    assert settings.rounds_file is not None  # ParticipationSettings checks it
    rounds = read_rounds(Path(settings.rounds_file), clients=population, canaries=extra)
    if len(rounds.rounds) < config.rounds:
        raise ValueError(f"{settings.rounds_file} has {len(rounds.rounds)} rounds, the run {config.rounds}")
    return rounds
