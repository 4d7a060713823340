"""Rounds without other clients, drawn from their exact law, which takes far less time than a vector for each."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from coalmine import AuditResult, Claim, mechanism_epsilon
from coalmine.log.rounds_file import RoundLog
from coalmine.measure.round import Round
from coalmine.measure.settings import Settings
from coalmine.result.derivation import derive_result

DELTA = 1e-5


def exact_round(
    number: int,
    present: Sequence[int] | np.ndarray,
    noise: float,
    stated: float | None,
    rng: np.random.Generator,
    participants: int | None = None,
    *,
    canaries: int,
    unobserved: int,
    dim: int,
) -> Round:
    """A round in units of the clip norm: its noise is `noise`, and the server states `stated`."""
    along = noise * rng.standard_normal(canaries + unobserved)
    off = noise**2 * rng.chisquare(dim - canaries - unobserved) + float(along[canaries:] @ along[canaries:])
    along[present] += 1
    norm, rest = math.sqrt(off + along[:canaries] @ along[:canaries]), math.sqrt(off)
    cosines = (along / norm).astype(np.float32)
    return Round(
        number=number,
        present=np.asarray(present, dtype=np.int32),
        clip_declared=True,
        noise_std=stated,
        participants=participants,
        norm=norm,
        rest=rest,
        cosines=cosines,
        residual_norm=norm,
        residual_rest=rest,
        residual_cosines=cosines,
    )


def audited_rounds(
    present: Sequence[np.ndarray],
    noises: Sequence[float],
    stated: Sequence[float],
    settings: Settings,
    rng: np.random.Generator,
    claim: Claim | None,
    cohorts: Sequence[int] | None = None,
    *,
    watched: bool = False,
) -> AuditResult:
    """The result of rounds with these canaries, true noises, stated noises and cohort sizes, in units of the clip norm."""
    drawn = {"canaries": settings.canaries, "unobserved": settings.unobserved, "dim": settings.dim}
    log = RoundLog()
    for number, (canaries, noise, said) in enumerate(zip(present, noises, stated, strict=True), start=1):
        size = None if cohorts is None else cohorts[number - 1]
        log.append(exact_round(number, canaries, noise, said, rng, size, **drawn))
    result = derive_result(log, settings, claim=claim, watched=watched)
    log.close()
    return result


def composed(stated: np.ndarray) -> float:
    """The mechanism's epsilon of a client in all of these rounds: μ² = Σ z⁻²."""
    return float(mechanism_epsilon(float(1 / np.sqrt(np.sum(stated**-2.0))), delta=DELTA))


@cache
def pld_epsilon(stated: tuple[float, ...], rate: float) -> float:
    """dp-accounting's epsilon of Poisson sampled rounds, each with its own noise."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for noise in sorted(set(stated)):
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), stated.count(noise))
    return float(accountant.get_epsilon(DELTA))
