"""Tests of a sampler against enumeration, Monte Carlo and samplers that are broken on purpose."""

import numpy as np
import pytest

from coalmine.estimators.sampler_tests import read_sampler
from coalmine.estimators.sampling import Poisson


def coins(rng, canaries, rounds, rate):
    return [np.flatnonzero(rng.random(canaries) < rate) for _ in range(rounds)]


def test_a_rate_three_times_the_claim_is_seen():
    present = coins(np.random.default_rng(1), 100, 100, 0.3)
    reading = read_sampler(present, np.arange(1, 101), 100, Poisson(0.1, rounds=100))
    assert not reading.passed
    assert reading.seen == "poisson"
    assert reading.seen_sampling.probability == pytest.approx(0.3, abs=0.02)
