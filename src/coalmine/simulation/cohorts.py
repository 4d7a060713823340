"""The participants of each round: real clients and canaries."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.estimators.sampling import Sampling
from coalmine.evidence.cohort_sampling import cohort_sampling, cohort_size
from coalmine.simulation.config import RunConfig
from coalmine.simulation.participation import (
    FixedSizeCohorts,
    LimitedCheckIns,
    Participation,
    PoissonCohorts,
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
    """The sampling scheme of the run in the accountant's terms; None if accountants have no such scheme.

    Canaries that are sampled with the clients are part of the population, as in the audited pipeline.
    """
    settings = config.participation
    return cohort_sampling(
        settings.kind,
        clients_per_round=settings.clients_per_round,
        population=population,
        extra=config.canaries.count if config.canaries.pattern == "clients" else 0,
        rounds=config.rounds,
    )


def plan_cohorts(
    config: RunConfig, population: int, planned_canaries: Callable[[int], npt.NDArray[np.integer[Any]]]
) -> Cohorts:
    """The cohorts of a run. `planned_canaries` gives the canaries of a round under pattern "spread"."""
    canaries = config.canaries
    if canaries.pattern == "spread":
        return _spread_cohorts(config, population, planned_canaries)
    if canaries.pattern == "clients":
        return _sampled_cohorts(config, population, population + np.arange(canaries.count))
    if canaries.count >= population:
        raise ValueError(
            f"canaries.count must be below the number of clients, {population}, since canaries replace clients, "
            f"got {canaries.count}"
        )
    replaced = numpy_stream(config.seed, "replaced clients").choice(population, canaries.count, replace=False)
    return _sampled_cohorts(config, population, replaced)


def _spread_cohorts(
    config: RunConfig, population: int, planned_canaries: Callable[[int], npt.NDArray[np.integer[Any]]]
) -> Cohorts:
    clients = _participation(config, population, extra=0)
    per_round = np.mean(config.canaries.presentations) * config.canaries.count / config.rounds

    def of_round(round_number: int) -> Cohort:
        return Cohort(clients.participants(round_number), np.asarray(planned_canaries(round_number), dtype=np.int64))

    return Cohorts(of_round, clients.expected_size + float(per_round), float(per_round))


def _sampled_cohorts(config: RunConfig, population: int, canary_ids: Indices) -> Cohorts:
    """Cohorts in which canaries are sampled like clients: participant canary_ids[i] is canary i."""
    participation = _participation(config, population, extra=max(0, int(canary_ids.max()) + 1 - population))
    order = np.argsort(canary_ids)
    sorted_ids = canary_ids[order]

    def of_round(round_number: int) -> Cohort:
        present = participation.participants(round_number)
        position = np.searchsorted(sorted_ids, present).clip(max=len(sorted_ids) - 1)
        is_canary = sorted_ids[position] == present
        return Cohort(present[~is_canary], np.sort(order[position[is_canary]]))

    share = len(canary_ids) / max(population, int(canary_ids.max()) + 1)
    return Cohorts(of_round, participation.expected_size, participation.expected_size * share)


def _participation(config: RunConfig, population: int, *, extra: int) -> Participation:
    """Participation of `population` clients and `extra` canaries; rounds grow, so the sampling rate stays the same."""
    settings, total = config.participation, population + extra
    if settings.kind != "file" and settings.clients_per_round > population:
        raise ValueError(
            f"participation.clients_per_round must be at most the population, {population}, got {settings.clients_per_round}"
        )
    size = cohort_size(settings.clients_per_round, population=population, extra=extra)
    if settings.kind == "poisson":
        return PoissonCohorts(total, settings.clients_per_round / population, config.seed)
    if settings.kind == "fixed":
        return FixedSizeCohorts(total, size, config.seed)
    if settings.kind == "limited":
        return LimitedCheckIns(total, size, settings.separation, config.seed)
    if settings.kind == "shuffled":
        return ShuffledEpochs(total, size, config.seed)
    assert settings.rounds_file is not None  # ParticipationSettings checks it
    rounds = read_rounds(Path(settings.rounds_file), clients=population, canaries=extra)
    if len(rounds.rounds) < config.rounds:
        raise ValueError(f"{settings.rounds_file} has {len(rounds.rounds)} rounds, but the run needs {config.rounds}")
    return rounds
