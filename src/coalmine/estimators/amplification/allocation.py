"""Random allocation: PLD_accounting's bounds (Feldman and Shenfeld 2026, arXiv 2602.17284)."""

import math
from typing import Any

from scipy.special import ndtri

from coalmine.estimators.amplification.amplified import (
    ALLOCATION,
    LARGEST_GRID,
    SMALLEST_PLD_DELTA,
    AmplifiedEpsilon,
    not_amplified,
)
from coalmine.estimators.amplification.attacks import attack_by_maximum, attack_by_sum
from coalmine.estimators.amplification.poisson import LONGEST_LOSS
from coalmine.estimators.sampling import RandomAllocation

MOST_ALLOCATED = 100_000  # most rounds of random allocation that are composed
GEOMETRIC_POINTS = 3_000  # the run time grows with their square
LINEAR_POINTS, LINEAR_POINTS_PER_ROUND = 30_000_000, 200_000
TAIL = 1e-2  # probability outside the grids, as a fraction of delta


def allocation_epsilon(noise: float, sampling: RandomAllocation, delta: float, unamplified: float) -> AmplifiedEpsilon:
    """Epsilon by privacy loss distribution, with its lower bound."""
    low = max(attack_by_maximum(noise, sampling, delta), attack_by_sum(noise, sampling, delta))
    if not allocation_accountable(noise, sampling, delta):
        return not_amplified(unamplified, low, sampling)
    low = max(low, _allocation_geometric(noise, sampling, delta, upper=False))
    value = min(unamplified, allocation_upper_end(noise, sampling, delta))
    return AmplifiedEpsilon(value, low=low, accountant=ALLOCATION, adjacency=sampling.adjacency, kind="upper bound")


def allocation_upper_end(noise: float, sampling: RandomAllocation, delta: float, coarser: int = 1) -> float:
    """PLD_accounting's upper bound on the grid with the smaller rounding error; the better of both if they are similar."""
    length = _log_length(noise, sampling, delta)
    geometric = length * _stages(sampling) * coarser / GEOMETRIC_POINTS
    linear = math.exp(min(length / 2, 700.0)) * sampling.rounds * coarser / _linear_points(sampling)
    values = []
    if linear < 4 * geometric:
        values.append(_allocation_linear(noise, sampling, delta, coarser))
    if geometric < 4 * linear:
        values.append(_allocation_geometric(noise, sampling, delta, upper=True, coarser=coarser))
    return min(values)


def allocation_accountable(noise: float, sampling: RandomAllocation, delta: float) -> bool:
    """Whether the accountant can handle this noise and these rounds; decided by the settings, not by run time."""
    possible = sampling.total_rounds <= MOST_ALLOCATED and delta >= SMALLEST_PLD_DELTA
    return possible and _log_length(noise, sampling, delta) < LONGEST_LOSS


def _log_length(noise: float, sampling: RandomAllocation, delta: float) -> float:
    """The width of the range of one round's log likelihood ratio, without its negligible tails."""
    return noise**-2 - 2 / noise * float(ndtri(TAIL * delta / (18 * sampling.total_rounds)))


def _stages(sampling: RandomAllocation) -> int:
    """The number of convolutions on a geometric grid: the powers of two, and their sums."""
    last = sampling.rounds - 1
    return 1 + last.bit_length() + last.bit_count()


def _allocation_geometric(
    noise: float, sampling: RandomAllocation, delta: float, *, upper: bool, coarser: int = 1
) -> float:
    """A bound on a geometric grid of likelihood ratios, with equally many points at any noise, so about equally fast."""
    step = _log_length(noise, sampling, delta) * _stages(sampling) * coarser / GEOMETRIC_POINTS
    return _from_library(noise, sampling, delta, upper=upper, loss_discretization=step)


def _allocation_linear(noise: float, sampling: RandomAllocation, delta: float, coarser: int = 1) -> float:
    """An upper bound on a linear grid of likelihood ratios, summed by FFT.

    Better at large noise: the range of the ratios is exponential in 1/noise.
    """
    from PLD_accounting import ConvolutionMethod

    points = _linear_points(sampling)
    length = _log_length(noise, sampling, delta)
    step = max(min(5e-5, 2 * math.exp(length / 2) / points), length / LARGEST_GRID)
    return _from_library(
        noise,
        sampling,
        delta,
        upper=True,
        loss_discretization=min(1e-4, step * math.sqrt(sampling.epochs)) * coarser,
        max_grid_fft=points // coarser,
        convolution_method=ConvolutionMethod.FFT,
    )


def _linear_points(sampling: RandomAllocation) -> int:
    return min(LINEAR_POINTS, LINEAR_POINTS_PER_ROUND * sampling.rounds)


def _from_library(
    noise: float, sampling: RandomAllocation, delta: float, *, upper: bool, loss_discretization: float, **grid: Any
) -> float:
    from PLD_accounting import (
        AllocationSchemeConfig,
        BoundType,
        PrivacyParams,
        gaussian_allocation_epsilon_configurable,
    )

    rounds, epochs = sampling.rounds, sampling.epochs
    return float(
        gaussian_allocation_epsilon_configurable(
            params=PrivacyParams(sigma=noise, num_steps=rounds, num_epochs=epochs, delta=delta),
            config=AllocationSchemeConfig(
                loss_discretization=loss_discretization * epochs, tail_truncation=TAIL * delta, **grid
            ),
            bound_type=BoundType.DOMINATES if upper else BoundType.IS_DOMINATED,
        )
    )
