"""The lower bound that guesses labels from ranks: by an oracle, its level, and its order."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from coalmine.estimators.bounds import epsilon_lower_bound, lower_bound_ceiling
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.rank_bound import guess_counts


def ranks(observed, unobserved, delta=1e-12, confidence=0.95):
    return epsilon_lower_bound(observed, null=unobserved, delta=delta, confidence=confidence, method="ranks")


def refuted(observed, unobserved, epsilon, level):
    """Whether some count of right guesses is too large for this epsilon; both samples have one size, and no ties."""
    labels = [label for _, label in sorted([(x, 1) for x in observed] + [(y, 0) for y in unobserved], reverse=True)]
    sizes = guess_counts(len(observed), len(unobserved))
    fair = 1 / (1 + math.exp(-epsilon))
    for r in sizes:
        first, last = sum(labels[:r]), r - sum(labels[-r:])
        for right, guesses, share in ((first, r, 0.25), (last, r, 0.25), (first + last, 2 * r, 0.5)):
            if binom.sf(right - 1, guesses, fair) < level * share / len(sizes):
                return True
    return False


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_largest_refuted_epsilon(seed):
    rng = np.random.default_rng(seed)
    observed, unobserved = rng.standard_normal(90) + 1 + seed, rng.standard_normal(90)
    bound = ranks(observed, unobserved)
    assert bound > 0
    assert refuted(observed, unobserved, bound - 1e-6, 0.05)
    assert not refuted(observed, unobserved, bound + 1e-6, 0.05)


@pytest.mark.parametrize(("observed", "unobserved"), [(100, 100), (40, 400), (400, 40), (12, 11)])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_it_holds_for_randomized_response(observed, unobserved, epsilon):
    """No law of this epsilon allows more right guesses."""
    rng, right, runs = np.random.default_rng(7), 1 / (1 + math.exp(-epsilon)), 400
    above = 0
    for _ in range(runs):
        sides = rng.random(observed) < right, rng.random(unobserved) >= right
        scores = [side + 0.9 * rng.random(side.size) for side in sides]
        above += ranks(*scores) > epsilon
    assert above <= binom.isf(1e-4, runs, 0.05)


def test_it_holds_where_delta_reveals_a_canary():
    """One canary in fifty is revealed for certain: epsilon is 0 at that delta."""
    rng, runs, above = np.random.default_rng(8), 300, 0
    for _ in range(runs):
        observed, unobserved = rng.standard_normal(100), rng.standard_normal(100)
        observed[rng.random(100) < 0.02] += 100
        above += ranks(observed, unobserved, delta=0.02) > 0
    assert above <= binom.isf(1e-4, runs, 0.05)


def test_it_is_above_the_bound_from_two_error_rates():
    rng = np.random.default_rng(9)
    observed, unobserved = rng.standard_normal(1000) + 1, rng.standard_normal(1000)
    assert ranks(observed, unobserved) > epsilon_lower_bound(observed, null=unobserved, delta=1e-12) + 0.2


def test_ties_count_as_wrong_guesses():
    assert ranks(np.ones(50), np.ones(50)) == 0
    rng = np.random.default_rng(10)
    observed, unobserved = rng.normal(2, 1, 500).round(), rng.normal(0, 1, 500).round()
    assert ranks(observed, unobserved) <= ranks(observed + 1e-9, unobserved)


def test_the_ceiling_is_perfect_separation():
    ceiling = lower_bound_ceiling(1000, unobserved=1000, delta=1e-6, method="ranks")
    assert ceiling == ranks(np.arange(1000) + 1000.0, np.arange(1000.0), delta=1e-6)
    assert 5 < ceiling < 6


def test_it_needs_unobserved_scores():
    with pytest.raises(ValueError, match="needs unobserved scores"):
        epsilon_lower_bound(np.arange(20.0), null=Gaussian(0, 1), delta=1e-6, method="ranks")
