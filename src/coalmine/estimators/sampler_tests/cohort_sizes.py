"""Tests of the cohort sizes, which show fixed sizes where the canaries alone do not."""

from math import sqrt

import numpy as np

from coalmine.estimators.sampler_tests.count_laws import grouped_dispersion, lattice_tails, pair_moments, pairs_within
from coalmine.estimators.sampler_tests.picks import Ints, Picks, scipy_stats
from coalmine.estimators.sampler_tests.sampler_test import SamplerTest
from coalmine.estimators.sampling import FixedSize, Shuffled


def poisson_cohort_tests(picks: Picks) -> list[SamplerTest]:
    """Tests that cohort sizes are binomial: neither more even nor more varied, and no size repeats too often."""
    if picks.cohorts is None:
        return []
    sizes = picks.cohorts
    low, high = picks.rate_interval(1e-3)
    statistic, total = float(pairs_within(sizes)), int(sizes.sum())
    mean, p_value, tie = statistic, 1.0, 1.0
    most = int(np.unique(sizes, return_counts=True)[1].max())
    if len(sizes) > 1 and total:
        share = total / len(sizes)

        def tails(rate: float) -> tuple[float, tuple[float, float]]:
            population = max(round(share / rate), int(sizes.max()), 1)
            mean, variance, third = pair_moments(total, len(sizes), population)
            return mean, lattice_tails(statistic, mean, variance, third)

        lower = tails(high)[1][0] if high < 1 else 1.0
        mean, (_, upper) = tails(max(low, 1e-9))
        p_value = min(1.0, 2 * min(lower, upper))
        if high < 1:
            wide = 10 * sqrt(share) + 10
            around = np.arange(max(int(share - wide), 0), int(share + wide) + 1)
            masses = scipy_stats().binom.pmf(around, max(round(share / high), 1), high)
            tie = min(1.0, float(scipy_stats().binom.sf(most - 1, len(sizes), masses).sum()))
    return [
        SamplerTest(
            name="cohort sizes",
            title="pairs within the cohorts: sizes more even, or more varied, than Poisson sampling makes them",
            statistic=statistic,
            expected=mean,
            p_value=p_value,
        ),
        SamplerTest(
            name="same size",
            title="rounds with the most common cohort size",
            statistic=float(most),
            expected=float(_expected_ties(sizes, picks.rate)),
            p_value=tie,
        ),
    ]


def _expected_ties(sizes: Ints, rate: float) -> float:
    """The expected number of rounds with the most probable size."""
    deviation = sqrt(max(float(sizes.mean()) * (1 - rate), 1e-9))
    return len(sizes) * min(1.0, 1 / (deviation * sqrt(2 * np.pi)))


def equal_sizes(sizes: Ints) -> bool:
    """Whether cohort sizes differ by at most 1, or the largest is the most common (dropouts make cohorts smaller)."""
    values, times = np.unique(sizes, return_counts=True)
    return bool(sizes.max() - sizes.min() <= 1 or (values[np.argmax(times)] == values[-1] and times.max() > 1))


def constant_cohort_tests(picks: Picks, sampling: FixedSize | Shuffled) -> list[SamplerTest]:
    """Tests that cohorts have the same size; smaller ones are dropouts, or the last cohort of an epoch."""
    if picks.cohorts is None:
        return []
    even = equal_sizes(picks.cohorts)
    if isinstance(sampling, FixedSize):
        even = even or int(picks.cohorts.max()) <= sampling.size
    return [
        SamplerTest(
            name="cohort sizes",
            title="the variance of cohort sizes: they must be equal",
            statistic=float(picks.cohorts.var()),
            expected=0.0,
            p_value=float(even),
        )
    ]


def allocated_cohort_tests(picks: Picks, length: int) -> list[SamplerTest]:
    """Tests that cohorts fill up as in balls and bins: one ball per client and epoch."""
    if picks.cohorts is None:
        return []
    return [
        SamplerTest.two_sided(
            "cohort sizes",
            "pairs within the cohorts: sizes more even, or more varied, than independent draws make them",
            grouped_dispersion(picks.cohorts, (picks.cohort_numbers - 1) // length),
        )
    ]
