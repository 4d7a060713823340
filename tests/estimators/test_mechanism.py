import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from coalmine import last_iterate_epsilon, mechanism_epsilon, mechanism_noise, shuffled_epsilon, subsampled_epsilon

PAPER_DELTA = 341_000**-1.1


@pytest.mark.parametrize(("noise", "epsilon"), [(0.0496, 300), (0.0986, 100), (0.2317, 30)])
def test_the_papers_analytical_column(noise, epsilon):
    """Section 5: noise 0.0496, 0.0986, 0.2317 is epsilon 300, 100, 30 at delta = m^-1.1."""
    assert mechanism_epsilon(noise, delta=PAPER_DELTA) == pytest.approx(epsilon, rel=0.025)


@pytest.mark.parametrize(("epsilon", "noise"), [(10, 0.541), (3, 1.54), (1, 4.22)])
def test_the_papers_noise_levels(epsilon, noise):
    assert mechanism_noise(epsilon, delta=1e-6) == pytest.approx(noise, rel=0.003)


def test_against_the_accountant():
    """dp-accounting's own Gaussian mechanism, to its tolerance."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    for noise in (0.3, 1.0, 5.0):
        assert mechanism_epsilon(noise, delta=1e-5) == pytest.approx(get_epsilon_gaussian(noise, 1e-5), rel=1e-6)


@given(st.floats(0.01, 100), st.floats(1e-12, 0.3), st.integers(1, 1000))
def test_noise_inverts_epsilon(noise, delta, participations):
    epsilon = mechanism_epsilon(noise, delta=delta, participations=participations)
    if epsilon > 0:
        again = mechanism_noise(epsilon, delta=delta, participations=participations)
        assert mechanism_epsilon(again, delta=delta, participations=participations) == pytest.approx(epsilon, rel=1e-9)


def test_participations_compose():
    """T releases at noise z are one at z/√T."""
    assert mechanism_epsilon(2.0, delta=1e-6, participations=4) == pytest.approx(mechanism_epsilon(1.0, delta=1e-6))


def test_noise_zero_and_no_limit():
    assert mechanism_epsilon(0, delta=1e-5) == math.inf
    assert mechanism_noise(math.inf, delta=1e-5) == 0
    assert mechanism_epsilon([0, 1], delta=1e-5).tolist() == [math.inf, mechanism_epsilon(1, delta=1e-5)]
    assert mechanism_noise(0.0, delta=1e-5) == pytest.approx(1 / (2 * stats.norm.ppf(0.5 + 0.5e-5)), rel=1e-9)


def test_subsampling_meets_the_known_figure():
    """Poisson z = 1, q = 0.01, T = 1000 claims 2.12 at delta 1e-6; the edges are exact."""
    assert subsampled_epsilon(1.0, sampling_probability=0.01, rounds=1000, delta=1e-6) == pytest.approx(2.12, abs=0.01)
    assert subsampled_epsilon(1.0, sampling_probability=1, rounds=4, delta=1e-6) == mechanism_epsilon(
        1.0, delta=1e-6, participations=4
    )
    assert subsampled_epsilon(1.0, sampling_probability=0, rounds=4, delta=1e-6) == 0
    assert subsampled_epsilon(0, sampling_probability=0.1, rounds=4, delta=1e-6) == math.inf


@pytest.mark.parametrize(("noise", "q", "rounds"), [(1.0, 0.01, 1000), (0.5, 0.3, 20), (2.0, 0.5, 10)])
def test_last_iterate_heuristic_against_quadrature(noise, q, rounds):
    """The hockey-stick divergence of the Binomial mixture, integrated both ways, is delta at the epsilon returned."""
    delta = 1e-5
    epsilon = last_iterate_epsilon(noise, sampling_probability=q, rounds=rounds, delta=delta)
    std = noise * math.sqrt(rounds)
    x = np.linspace(-12 * std, rounds * q + 40 * std, 40_001)
    null = stats.norm.pdf(x, 0, std)
    mixture = sum(
        w * stats.norm.pdf(x, k, std) for k, w in enumerate(stats.binom.pmf(np.arange(rounds + 1), rounds, q))
    )
    ways = [
        integrate.simpson(np.maximum(a - np.exp(epsilon) * b, 0), x=x) for a, b in ((mixture, null), (null, mixture))
    ]
    assert max(ways) == pytest.approx(delta, rel=1e-4)


def test_last_iterate_without_sampling_is_the_mechanism():
    for rounds in (1, 5):
        epsilon = last_iterate_epsilon(1.0, sampling_probability=1.0, rounds=rounds, delta=1e-6)
        assert epsilon == pytest.approx(mechanism_epsilon(1.0, delta=1e-6, participations=rounds), rel=1e-9)


@pytest.mark.parametrize(("noise", "rounds"), [(0.5, 20), (1.0, 10), (1.0, 100), (2.0, 10), (0.3, 200)])
def test_shuffled_epsilon_is_a_bound_and_not_a_loose_one(noise, rounds):
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


def test_shuffling_helps_as_the_paper_hopes():
    """Section 5's footnote: at little noise, knowing the round is worth log T."""
    plain = mechanism_epsilon(0.0496, delta=PAPER_DELTA)
    shuffled = shuffled_epsilon(0.0496, rounds=2048, delta=PAPER_DELTA)
    assert plain - shuffled == pytest.approx(math.log(2048), abs=0.05)
    assert shuffled_epsilon(1.0, rounds=1, delta=1e-6) == mechanism_epsilon(1.0, delta=1e-6)
    assert shuffled_epsilon(0.0, rounds=10, delta=1e-6) == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mechanism_epsilon(-1, delta=0.1), "noise_multiplier must be at least 0, got -1"),
        (lambda: mechanism_epsilon(np.nan, delta=0.1), "noise_multiplier must be finite, got nan"),
        (lambda: mechanism_epsilon(1, delta=0.1, participations=0), "participations must be at least 1, got 0"),
        (lambda: mechanism_epsilon(1, delta=0.1, participations=1.5), "participations must be whole numbers, got 1.5"),
        (lambda: mechanism_noise(-1, delta=0.1), "epsilon must be at least 0, got -1"),
        (lambda: mechanism_noise(np.nan, delta=0.1), "epsilon must be finite, got nan"),
        (lambda: subsampled_epsilon(1, sampling_probability=2, rounds=1, delta=0.1), r"must lie in \[0, 1\], got 2"),
        (lambda: last_iterate_epsilon(1, sampling_probability=0.5, rounds=0, delta=0.1), "rounds must be at least 1"),
        (lambda: shuffled_epsilon(1, rounds=2.5, delta=0.1), "rounds must be a whole number, got 2.5"),
        (lambda: shuffled_epsilon([1, 2], rounds=2, delta=0.1), "noise_multiplier must be one number"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
