"""The levels of a check add up to at most 1 %, and a gauge proves missing noise only below its stated level."""

import numpy as np
import pytest
from aggregators import DELTA, clip, multiplier, noised_mean, noised_sum

from coalmine import Claim
from coalmine.evidence.gauges.gauge import LEVEL as GAUGE_LEVEL
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.evidence.gauges.length import Length
from coalmine.evidence.stated_noise import StatedNoise
from coalmine.testing import check_private
from coalmine.testing.call_plan import CERTAIN
from coalmine.testing.mechanism_check import _plan
from coalmine.testing.replayed_calls import DOUBT
from coalmine.testing.shaped_calls import LEVEL
from coalmine.testing.tested_mechanism import checked_mechanism
from coalmine.verdict.claim_context import BOUND_LEVEL, RunFacts, context_of
from coalmine.verdict.gauge_proofs import proves
from coalmine.verdict.rung_claim import SCAN_LEVEL, TEST_LEVEL

pytestmark = pytest.mark.full


def largest_plan():
    weights = [2.0] * 20 + [1.0] * 80
    mechanism = checked_mechanism(
        print, (3.0, DELTA, 1.0, "zero-out", None), (2_000, 100, weights), ("matrix", "numpy", None), None, 10.0, None
    )
    return _plan(mechanism)


def test_the_levels_of_a_check_add_up_to_at_most_1_percent():
    """A failure counts if it occurs twice, or with p <= CERTAIN. Tests of patterns that only refute share one level."""
    _, patterns, shaped = largest_plan()
    proving, tests, scans = 10, 2, 1  # gauges that can refute, tests of the mean, scans of the rounds
    in_full = sum(name in ("long", "weights") for name in (pattern.name for pattern, _ in patterns))
    others = len(patterns) - in_full
    scores = tests * TEST_LEVEL + scans * SCAN_LEVEL
    once = (in_full + 1) * scores  # the other patterns share the last one
    once += len(patterns) * (BOUND_LEVEL + proving * GAUGE_LEVEL)
    once += 2 * GAUGE_LEVEL + LEVEL * (1 + 3 * len(shaped))  # repeated noise, single clients, shaped updates
    certain = CERTAIN * (len(patterns) * (tests + 1) + 3 * len(shaped) + 1)
    certain += DOUBT  # of calls that are replayed
    assert others == 7
    assert once**2 + 2 * certain <= 0.01


HONEST = {
    "sum": (lambda seed: noised_sum(seed), {}),
    "mean, declared": (lambda seed: noised_mean(seed), {"aggregate": "mean"}),
    "replace-one": (lambda seed: noised_mean(seed, factor=2.0), {"adjacency": "replace-one"}),
    "layers": (lambda seed: noised_sum(seed, clipped=by_layer), {}),
    "single precision": (lambda seed: single(seed), {"like": np.zeros(1, np.float32)}),
    "weights": (lambda seed: weighted(seed), {"weights": [4.0] * 10 + [1.0] * 40}),
}


def by_layer(updates):
    """Each of two layers has its share of the clip norm."""
    return np.hstack([clip(updates[:, :400], np.sqrt(2 / 3)), clip(updates[:, 400:], np.sqrt(1 / 3))])


def single(seed):
    release = noised_sum(seed)
    return lambda updates: release(updates).astype(np.float32)


def weighted(seed):
    rng = np.random.default_rng(seed)

    def release(updates, weights):
        noise = 4 * multiplier() * rng.standard_normal(updates.shape[1])
        return ((clip(updates) * weights[:, None]).sum(axis=0) + noise) / weights.sum()

    return release


@pytest.mark.parametrize("name", HONEST)
def test_correct_functions_pass(name):
    """Five seeds each; `studies.mechanisms` has thousands."""
    make, settings = HONEST[name]
    for seed in range(5):
        result = check_private(make(seed), epsilon=3.0, delta=DELTA, dim=600, clients=50, seed=seed, **settings)
        assert result.verdict.outcome == "PASS"


@pytest.mark.parametrize(("left", "proved"), [(1.0046, False), (1.0, False), (0.9, True), (0.0, True)])
def test_a_gauge_proves_missing_noise_only_if_less_than_the_stated_noise_is_left(left, proved):
    """At a claim of 50 the limits of a correct function once gave 1.0046 of the stated noise, and a VIOLATION."""
    noise = 0.99 * multiplier(50.0)  # as measured; the claim needs a little more
    stated = StatedNoise(numbers=np.array([1]), multipliers=np.array([noise]), low=1.0, high=1.0)
    context = context_of(
        Claim(epsilon=50.0, sensitivity=1.0),
        [],
        [],
        RunFacts(delta=DELTA, planned=None, presentations=1, stated=stated),
        None,
    )
    gauge = GaugeResult(
        statistic=Length.RESIDUAL, smallest=0.9, largest=1.1, limits=(0.95, 1.05), status="low", noise_left=left
    )
    assert proves(gauge, context) == proved
