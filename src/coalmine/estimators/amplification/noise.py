"""The noise of a run whose clients are sampled, from its epsilon."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

from coalmine.argument_checks import delta_array, names_neighbours, one_number
from coalmine.estimators.amplification.allocation import allocation_accountable, allocation_upper_end
from coalmine.estimators.amplification.amplified import unamplified_epsilon
from coalmine.estimators.amplification.epsilon import epsilon_of
from coalmine.estimators.amplification.fixed_cohorts import fixed_size_upper_end
from coalmine.estimators.amplification.noise_schedule import composed_epsilon, merged_strengths
from coalmine.estimators.amplification.poisson import poisson_accountable, poisson_pld
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.estimators.sampling import (
    FixedSize,
    Poisson,
    RandomAllocation,
    Sampling,
    Shuffled,
    checked_sampling,
    largest_exposure,
)

COARSER = 5  # factor by which the grids are coarser in the first search for the noise


@names_neighbours
def amplified_noise(epsilon: float, sampling: Sampling, delta: float) -> float:
    """The smallest noise multiplier whose amplified epsilon (upper end) is at most `epsilon`: amplified_epsilon's inverse.

    The epsilon at that noise is within 0.01 % of `epsilon`, for random allocation within 0.1 %. Epsilon inf gives 0. For
    shuffling, this is the noise without amplification.

    >>> round(amplified_noise(7.047, Poisson(0.1, rounds=100), 1e-5), 3)
    1.0
    """
    wanted = math.inf if epsilon == math.inf else one_number("epsilon", epsilon)
    if wanted <= 0:
        raise ValueError(f"epsilon must be above 0, got {wanted:g}")
    delta = float(delta_array(one_number("delta", delta)))
    return _noise(wanted, checked_sampling(sampling), delta)


@lru_cache(maxsize=4096)
def _noise(epsilon: float, sampling: Sampling, delta: float) -> float:
    if math.isinf(epsilon):
        return 0.0
    times = sampling.rounds if isinstance(sampling, Poisson | FixedSize) else sampling.epochs
    enough = float(mechanism_noise(epsilon, delta=delta, participations=times))
    enough = 2 * enough if isinstance(sampling, FixedSize) else enough
    if sampling.strengths:
        enough *= math.sqrt(largest_exposure(sampling, times) / times)
    if isinstance(sampling, Shuffled) or sampling.rate == 1:
        return enough
    start, slope = math.log(enough) + 0.5 * math.log(sampling.rate), -1.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # a bound for random allocation jumps a little as its grid moves with the noise
        fine = 1e-3 if isinstance(sampling, RandomAllocation) else 1e-4
        for coarser, tolerance in ((COARSER, 1e-2), (1, fine)):
            upper_end = partial(_upper_end, sampling=sampling, delta=delta, coarser=coarser)
            start, slope = _search(upper_end, epsilon, enough, start, slope, tolerance)
    return math.exp(start)


def _upper_end(noise: float, sampling: Sampling, delta: float, coarser: int) -> float:
    """`epsilon_of` without its lower end, on coarser grids."""
    unamplified = unamplified_epsilon(noise, sampling, delta)
    if unamplified == 0:
        return 0.0
    match sampling:
        case Poisson() if poisson_accountable(noise, sampling) and sampling.strengths:
            parts, error = merged_strengths(sampling.strengths)
            value = composed_epsilon(noise, replace(sampling, strengths=parts), delta, coarser) * (1 + error)
        case Poisson() if poisson_accountable(noise, sampling):
            value = poisson_pld(noise, sampling, delta, coarser)
        case RandomAllocation() if not sampling.strengths and allocation_accountable(noise, sampling, delta):
            value = allocation_upper_end(noise, sampling, delta, coarser)
        case FixedSize() if not sampling.strengths:
            value = fixed_size_upper_end(noise, sampling, delta)
        case _:
            value = epsilon_of(noise, sampling, delta)
    return min(unamplified, float(value))


def _search(
    upper_end: Callable[[float], float], epsilon: float, enough: float, start: float, slope: float, tolerance: float
) -> tuple[float, float]:
    """The log noise at which `upper_end` lies within `tolerance` below `epsilon`, and its slope there, by secants on logs.

    A bracket guards the secants. Where `upper_end` jumps over `epsilon`, the answer is the first noise after the jump.
    """
    low, high = -math.inf, math.log(enough)
    x, before = min(start, high), None
    while True:
        excess = math.log(max(upper_end(math.exp(x)), 1e-300) / epsilon)
        if -tolerance <= excess <= 0 or (excess <= 0 and x - low < 1e-5):
            return x, slope
        if before is not None and before[0] != x:
            slope = min(-0.1, max(-20.0, (excess - before[1]) / (x - before[0])))
        before = (x, excess)
        low, high = (x, high) if excess > 0 else (low, x)
        if high - low < 1e-5:
            return high, slope
        step = (-tolerance / 2 - excess) / slope
        following = x + max(-2.0, min(2.0, step))
        inside = low < following < high
        x = following if inside else (x - 1.0 if math.isinf(low) else (low + high) / 2)
