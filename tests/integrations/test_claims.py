"""How pfl and NVFlare read a number for which nobody states the sampling."""

import numpy as np
import pytest

from coalmine import Audit
from coalmine.integrations.claims import seen_accounting


def observed(rounds, share):
    """An audit of 100 canaries, each of which is in a round with this probability."""
    rng = np.random.default_rng(0)
    audit = Audit(1_000, canaries=100, seed=b"tests only", delta=1e-5)
    for number in range(1, rounds + 1):
        present = np.flatnonzero(rng.random(100) < share)
        release = audit.updates(present, 1.0) + rng.normal(size=1_000)
        audit.observe_round(number, release, present=present, noise_std=1.0, clip_norm=1.0)
    return audit


def test_a_unit_in_every_round_has_the_composed_mechanism():
    claim = seen_accounting(observed(6, 1.0), unit="site")
    assert (claim.participations, claim.sampling, claim.unit) == (6, None, "site")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_sampled_units_are_read_with_a_rate_that_is_not_above_the_true_one(share):
    """The picks are 100 T coin tosses, and the rate is the end of their one-sided interval at 1e-5: 4.3 deviations."""
    claim = seen_accounting(observed(10, share))
    assert (claim.participations, claim.sampler_observed) == (None, False)
    assert claim.sampling.rounds == 10
    deviation = np.sqrt(share * (1 - share) / 1_000)
    assert share - 9 * deviation < claim.sampling.probability < share
