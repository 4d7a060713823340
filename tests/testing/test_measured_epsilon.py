"""A check measures the epsilon of the mechanism for the claimed adjacency."""

import numpy as np
import pytest
from aggregators import DELTA, multiplier, noised_sum
from scipy.stats import binom

from coalmine import mechanism_epsilon
from coalmine.testing import check_private


@pytest.mark.full
@pytest.mark.parametrize(("adjacency", "moves"), [("zero-out", 1), ("replace-one", 2)])
def test_the_measured_epsilon_follows_the_adjacency(adjacency, moves):
    """Over 30 seeds of a Gaussian mechanism with noise z and sensitivity a, it is unbiased and its interval covers."""
    runs, std = 30, moves * multiplier()
    truth = float(mechanism_epsilon(std / moves, delta=DELTA))
    releases = [noised_sum(seed, factor=moves) for seed in range(runs)]
    settings = {"dim": 400, "clients": 40, "scale": 1.0, "most_calls": 12}
    found = [
        check_private(release, epsilon=3.0, delta=DELTA, adjacency=adjacency, seed=seed, **settings)
        for seed, release in enumerate(releases)
    ]
    errors = np.array([result.epsilon - truth for result in found])
    assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(runs)
    covered = sum(result.interval[0] <= truth <= result.interval[1] for result in found)
    assert covered >= binom.ppf(1e-4, runs, 0.95)
    assert sum(result.verdict.outcome == "PASS" for result in found) >= runs - 1
