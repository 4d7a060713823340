"""The bound of `coalmine estimate` if all scores are nearly normal: its level, and what withholds it."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

from coalmine.estimators.gaussian_fit import epsilon_estimate
from coalmine.evidence.gaussian_bound import NOT_NORMAL, UNLIKE, scores_bound

DELTA = 1e-6


def bound_of(observed, absent):
    estimate = epsilon_estimate(observed, null=absent, delta=DELTA)
    return scores_bound(estimate, observed, absent, math.inf, delta=DELTA, confidence=0.95)


def true_epsilon(mean, std):
    """The larger of both directions' epsilons, by the hockey-stick divergence on a grid."""
    x = np.linspace(-12, 14, 200_001)
    first, second = norm.pdf(x, mean, std), norm.pdf(x)

    def gap(epsilon, a, b):
        return np.sum(np.maximum(a - math.exp(epsilon) * b, 0)) * (x[1] - x[0]) - DELTA

    return max(brentq(gap, 0, 40, args=pair) for pair in ((first, second), (second, first)))


@pytest.mark.full
@pytest.mark.parametrize("std", [0.95, 1.0, 1.05])
def test_the_bound_holds_and_the_interval_covers_whether_or_not_spreads_are_equal(std):
    rng, runs, truth = np.random.default_rng(8), 150, true_epsilon(1.2, std)
    found = [bound_of(rng.normal(1.2, std, 300), rng.normal(size=600)) for _ in range(runs)]
    most = binom.isf(1e-4, runs, 0.05)
    offered = [each for each in found if not each.withheld]
    assert len(offered) > 0.9 * runs
    assert sum(each.lower_bound > truth for each in offered) <= most
    assert sum(not each.interval[0] <= truth <= each.interval[1] for each in offered) <= most


def test_scores_of_a_mixture_withhold_it():
    rng = np.random.default_rng(2)
    halves = rng.normal(size=1_000) + 2 * (rng.random(1_000) < 0.5)
    assert bound_of(halves, rng.normal(size=1_000)).withheld.startswith(UNLIKE)


def test_heavy_tails_of_either_sample_withhold_it():
    rng = np.random.default_rng(3)
    normal, heavy = rng.normal(size=1_000), rng.standard_t(4, 1_000)
    for observed, absent in ((heavy + 1, normal), (normal + 1, heavy)):
        assert bound_of(observed, absent).withheld.startswith(NOT_NORMAL)


@pytest.mark.full
def test_slightly_heavy_tails_withhold_it_or_it_holds():
    """No test tells these apart from normal scores, and epsilon is 3.6 where normal scores have 5.1."""
    rng, shift = np.random.default_rng(4), 1.04
    scores = [bound_of(rng.standard_t(50, 1_000) * 0.98 + shift, rng.standard_t(50, 1_000) * 0.98) for _ in range(30)]
    assert sum((each.lower_bound or 0) > 3.615 for each in scores) <= 3
    assert sum(not each.withheld for each in scores) > 15
