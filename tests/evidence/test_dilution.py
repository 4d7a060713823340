"""The canaries' part of a residual must be in the release: absent, doubled and lost canaries, and honest training."""

import numpy as np
import pytest
from scipy.stats import kstest

from coalmine import Audit
from coalmine.evidence.dilution import DilutionReader
from coalmine.evidence.views import read_log

DIM, CANARIES, ROUNDS, RATE = 2_000, 200, 15, 0.5


def share(seed, joins, pull=0.0, rate=RATE):
    """Shares after a run in which `joins(canaries' sum, round)` joins the sum, and `others` is the sum less the canaries.

    A `pull` above 0 draws the model back, and canaries with it.
    """
    rng = np.random.default_rng(seed)
    audit = Audit(DIM, canaries=CANARIES, unobserved=400, seed=seed + 10**6, delta=1e-5)
    model, drift = np.zeros(DIM), rng.normal(size=DIM) / 2
    for number in range(1, ROUNDS + 1):
        present = np.flatnonzero(rng.random(CANARIES) < rate)
        canaries = np.asarray(audit.updates(present, 1.0), np.float64)
        real, noise = drift + 0.3 * rng.normal(size=DIM) - pull * model, rng.normal(size=DIM)
        total = real + joins(canaries, number) + noise
        model = model + total
        others = total - noise - canaries
        audit.observe_round(number, total, present=present, others=others, noise_std=1.0, clip_norm=1.0)
    reader = DilutionReader(audit.settings)
    read_log(audit.log, audit.settings, reader)
    return reader


def honest(canaries, _number):
    return canaries


@pytest.mark.full
@pytest.mark.parametrize(
    ("pull", "rate"),
    [(0.3, 0.5), *(pytest.param(*each, marks=pytest.mark.full) for each in ((0.0, 0.5), (0.3, 1.0), (0.9, 0.9)))],
)
def test_honest_shares_are_1_within_their_error_even_if_training_pulls_canaries_back(pull, rate):
    readers = [share(seed, honest, pull, rate) for seed in range(40)]
    first = [(reader.first.share - 1) / reader.first.error for reader in readers]
    assert kstest(first, "norm").pvalue > 1e-3
    assert not any(reader.first.is_off() for reader in readers)
    assert not any(reader.first.is_off() for reader in readers)
    if rate < 1:
        repeated = [(reader.repeated.share - 1) / reader.repeated.error for reader in readers]
        assert kstest(repeated, "norm").pvalue > 1e-3
        assert not any(reader.repeated.is_off() for reader in readers)


@pytest.mark.parametrize("pull", [0.0, 0.3])
@pytest.mark.parametrize(
    ("joins", "expected"),
    [
        (lambda canaries, _: 0 * canaries, 0.0),
        (lambda canaries, _: 2 * canaries, 2.0),
        (lambda canaries, _: 10 * canaries, 10.0),
    ],
    ids=["absent", "twice", "unclipped"],
)
def test_canaries_that_are_not_in_the_release_as_expected_are_seen(joins, expected, pull):
    for seed in range(5):
        reader = share(seed, joins, pull)
        for measured in (reader.first, reader.repeated):
            assert measured.is_off()
            assert abs(measured.share - expected) < 5 * measured.error * max(expected, 1)


def test_canaries_lost_after_their_first_presentations_are_seen_in_the_repeated_ones():
    reader = share(1, lambda canaries, number: canaries * (number < 10))
    assert not reader.first.is_off()
    assert reader.repeated.is_off()
    assert reader.repeated.share < 0.7


def test_without_others_or_canaries_nothing_is_said():
    audit = Audit(DIM, canaries=CANARIES, unobserved=400, seed=1, delta=1e-5)
    rng = np.random.default_rng(0)
    audit.observe_round(1, rng.normal(size=DIM), present=[1, 2], noise_std=1.0, clip_norm=1.0)
    audit.observe_round(2, rng.normal(size=DIM), present=[], others=rng.normal(size=DIM), noise_std=1.0, clip_norm=1.0)
    reader = DilutionReader(audit.settings)
    read_log(audit.log, audit.settings, reader)
    assert reader.first is None
