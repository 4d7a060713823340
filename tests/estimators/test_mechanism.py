import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coalmine import mechanism_epsilon, mechanism_noise

PAPER_DELTA = 341_000**-1.1


@pytest.mark.parametrize(("noise", "epsilon"), [(0.0496, 300), (0.0986, 100), (0.2317, 30)])
def test_epsilon_agrees_with_the_papers_analytical_column(noise, epsilon):
    """Section 5: noise 0.0496, 0.0986, 0.2317 is epsilon 300, 100, 30 at delta = m^-1.1."""
    assert mechanism_epsilon(noise, delta=PAPER_DELTA) == pytest.approx(epsilon, rel=0.025)


@pytest.mark.parametrize(("epsilon", "noise"), [(10, 0.541), (3, 1.54), (1, 4.22)])
def test_noise_agrees_with_the_papers_levels(epsilon, noise):
    assert mechanism_noise(epsilon, delta=1e-6) == pytest.approx(noise, rel=0.003)


def test_epsilon_agrees_with_dp_accounting():
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
    """T releases with noise z compose to one with noise z/√T."""
    assert mechanism_epsilon(2.0, delta=1e-6, participations=4) == pytest.approx(mechanism_epsilon(1.0, delta=1e-6))


def test_zero_noise_has_infinite_epsilon():
    assert mechanism_epsilon(0, delta=1e-5) == math.inf
    assert mechanism_epsilon(5e-324, delta=1e-5) == math.inf
    assert mechanism_noise(math.inf, delta=1e-5) == 0
    assert mechanism_noise(math.inf, delta=5e-324) == 0
    assert mechanism_noise(0, delta=5e-324) == math.inf  # beyond the float range
    assert mechanism_epsilon([0, 1], delta=1e-5).tolist() == [math.inf, mechanism_epsilon(1, delta=1e-5)]
    assert mechanism_noise(0.0, delta=1e-5) == pytest.approx(1 / (2 * stats.norm.ppf(0.5 + 0.5e-5)), rel=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mechanism_epsilon(-1, delta=0.1), "noise_multiplier must be at least 0, got -1"),
        (lambda: mechanism_epsilon(np.nan, delta=0.1), "noise_multiplier must be finite, got nan"),
        (lambda: mechanism_epsilon(1, delta=0.1, participations=0), "participations must be at least 1, got 0"),
        (lambda: mechanism_epsilon(1, delta=0.1, participations=1.5), "participations must be whole numbers, got 1.5"),
        (lambda: mechanism_noise(-1, delta=0.1), "epsilon must be at least 0, got -1"),
        (lambda: mechanism_noise(np.nan, delta=0.1), "epsilon must be finite, got nan"),
    ],
)
def test_bad_input_is_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("delta", [0.3, 0.5, 0.9])
def test_noise_for_epsilon_zero_agrees_with_the_total_variation_distance(delta):
    """At epsilon 0 delta is the total variation distance, 2Φ(1/(2z)) - 1."""
    assert mechanism_noise(0.0, delta=delta) == pytest.approx(1 / (2 * stats.norm.ppf((1 + delta) / 2)), rel=1e-9)
