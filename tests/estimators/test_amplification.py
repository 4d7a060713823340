"""Epsilon amplified by sampling."""

import math

import numpy as np
import pytest

from coalmine import mechanism_epsilon, shuffled_epsilon, subsampled_epsilon

PAPER_DELTA = 341_000**-1.1


def test_poisson_sampling_gives_a_known_epsilon():
    """Noise 1, probability 0.01 and 1,000 rounds give 2.12 at delta 1e-6; probabilities 0 and 1 are exact."""
    assert subsampled_epsilon(1.0, sampling_probability=0.01, rounds=1000, delta=1e-6) == pytest.approx(2.12, abs=0.01)
    assert subsampled_epsilon(1.0, sampling_probability=1, rounds=4, delta=1e-6) == mechanism_epsilon(
        1.0, delta=1e-6, participations=4
    )
    assert subsampled_epsilon(1.0, sampling_probability=0, rounds=4, delta=1e-6) == 0
    assert subsampled_epsilon(0, sampling_probability=0.1, rounds=4, delta=1e-6) == math.inf


@pytest.mark.parametrize(("noise", "rounds"), [(0.5, 20), (1.0, 10), (1.0, 100), (2.0, 10), (0.3, 200)])
def test_shuffled_epsilon_is_a_tight_upper_bound(noise, rounds):
    """Monte Carlo of the dominating pair, both directions: delta at the bound is kept, and at 0.4 of it is not."""
    delta = 1e-3
    epsilon = shuffled_epsilon(noise, rounds=rounds, delta=delta)
    rng = np.random.default_rng(0)
    runs = 200_000
    log_ratio = {}
    for present in (0, 1):
        total = np.zeros(runs)
        for index in range(rounds):
            z = rng.normal(size=runs) * noise + (present and index == 0)
            total += np.exp((z - 0.5) / noise**2)
        log_ratio[present] = np.log(total / rounds)

    def sampled_delta(level):
        removing = np.maximum(-np.expm1(level - log_ratio[1]), 0)
        adding = np.maximum(-np.expm1(level + log_ratio[0]), 0)
        return max((w.mean(), w.std() / math.sqrt(runs)) for w in (removing, adding))

    mean, error = sampled_delta(epsilon)
    assert mean <= delta + 4 * error
    mean, error = sampled_delta(0.4 * epsilon)
    assert mean > delta - 4 * error


def test_at_little_noise_shuffling_saves_the_log_of_the_rounds():
    """Section 5's footnote: at little noise, knowing the round is worth log T."""
    plain = mechanism_epsilon(0.0496, delta=PAPER_DELTA)
    shuffled = shuffled_epsilon(0.0496, rounds=2048, delta=PAPER_DELTA)
    assert plain - shuffled == pytest.approx(math.log(2048), abs=0.05)
    assert shuffled_epsilon(1.0, rounds=1, delta=1e-6) == mechanism_epsilon(1.0, delta=1e-6)
    assert shuffled_epsilon(0.0, rounds=10, delta=1e-6) == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: subsampled_epsilon(1, sampling_probability=2, rounds=1, delta=0.1), r"must lie in \[0, 1\], got 2"),
        (lambda: subsampled_epsilon(1, sampling_probability=0.5, rounds=0, delta=0.1), "rounds must be at least 1"),
        (lambda: shuffled_epsilon(1, rounds=2.5, delta=0.1), "rounds must be a whole number, got 2.5"),
        (lambda: shuffled_epsilon([1, 2], rounds=2, delta=0.1), "noise_multiplier must be one number"),
    ],
)
def test_bad_input_is_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
