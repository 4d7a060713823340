"""Mahloujifar et al. 2024: against linear programming, simulation, and the figures of jax-privacy 2.0.0."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import linprog

from coalmine import mechanism_epsilon, mechanism_noise
from coalmine.estimators.literature.mahloujifar import f_dp_epsilon, mahloujifar_fixed_row, mahloujifar_row
from coalmine.estimators.literature.steinke import one_run_epsilon

QUANTILES = stats.norm.ppf((np.arange(10_000) + 0.5) / 10_000)


@pytest.mark.parametrize(("shift", "epsilon"), [(1, 2.164749), (2, 4.7218075), (4, 9.133752)])
def test_values_agree_with_the_public_package(shift, epsilon):
    row = mahloujifar_row(QUANTILES + shift, QUANTILES, delta=1e-6)
    assert row.value == pytest.approx(epsilon, rel=1e-6)


def largest_chance(mu, guesses, mistakes, total):
    """The largest probability of at most this many mistakes under mu-GDP, over all laws p of the correct guesses, by LP.

    The trade-off function is given by its tangents. Let x be the probability that at least j guesses are correct and a
    random one is among them; then at least j - 1 are correct and it is not with probability at least Φ(Φ⁻¹(x) - mu).
    """
    correct = np.arange(guesses + 1)
    bounds = []
    for z in np.linspace(-6, 3, 300):  # tangent at x = Φ(z)
        slope = math.exp(z * mu - mu**2 / 2)
        for j in range(1, guesses + 1):
            right, wrong = (correct >= j) * correct / total, (correct >= j - 1) * (guesses - correct) / total
            bounds.append((slope * right - wrong, slope * stats.norm.cdf(z) - stats.norm.cdf(z - mu)))
    done = linprog(
        -(correct >= guesses - mistakes).astype(float),
        A_ub=[row for row, _ in bounds],
        b_ub=[limit for _, limit in bounds],
        A_eq=[np.ones(guesses + 1)],
        b_eq=[1],
        method="highs",
    )
    return -done.fun


@pytest.mark.parametrize(("guesses", "mistakes", "total"), [(12, 1, 20), (10, 0, 10), (16, 4, 40)])
def test_the_bound_is_the_largest_refuted_epsilon(guesses, mistakes, total):
    epsilon = f_dp_epsilon(guesses, mistakes, delta=1e-5, total=total, confidence=0.9)
    mu = 1 / mechanism_noise(epsilon, delta=1e-5)
    assert largest_chance(mu, guesses, mistakes, total) == pytest.approx(0.1, rel=1e-3)


def refuted_share(bound, *, shift, draws):
    """How often the bound exceeds the truth if all canaries share one |privacy loss|, that of shifted Gaussians.

    All 400 canaries are guessed. Given the loss l, each guess is wrong with probability 1 / (1 + e^l). For each canary
    alone the mechanism is exactly Gaussian.
    """
    rng = np.random.default_rng(5)
    losses = shift * np.abs(rng.normal(shift / 2, 1, draws))
    mistakes = rng.binomial(400, 1 / (1 + np.exp(losses)))
    truth = mechanism_epsilon(1 / shift, delta=1e-5)
    return np.mean([truth < bound(int(seen)) for seen in mistakes])


@pytest.mark.full
@pytest.mark.parametrize("shift", [0.5, 1.0, 2.0])
def test_the_bound_holds_if_canaries_leak_together(shift):
    cache = {u: f_dp_epsilon(400, u, delta=1e-5, total=400) for u in range(401)}
    assert refuted_share(cache.__getitem__, shift=shift, draws=5000) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 5000)
    cache = {u: one_run_epsilon(400, u, delta=1e-5, total=400) for u in range(401)}
    assert refuted_share(cache.__getitem__, shift=shift, draws=5000) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 5000)


def test_it_is_larger_than_a_bound_from_one_epsilon():
    """For a Gaussian mechanism, where the gap to Steinke's bound comes from using the whole trade-off function."""
    for guesses, mistakes, total in [(100, 10, 1000), (2500, 364, 10_000)]:
        steinke = one_run_epsilon(guesses, mistakes, delta=1e-5, total=total)
        assert f_dp_epsilon(guesses, mistakes, delta=1e-5, total=total) > 1.4 * steinke


def test_one_guess_matches_the_closed_form():
    """One guess about one canary is right with probability at most Φ(mu/2)."""
    mu = 2 * stats.norm.ppf(0.9)
    assert f_dp_epsilon(1, 0, delta=1e-5, total=1, confidence=0.1) == pytest.approx(
        mechanism_epsilon(1 / mu, delta=1e-5), rel=1e-9
    )


def test_edge_cases():
    assert f_dp_epsilon(10, 10, delta=1e-6, total=20) == 0
    assert f_dp_epsilon(10, 5, delta=1e-6, total=20) == 0
    assert f_dp_epsilon(4, 0, delta=1e-6, total=20) == 0
    assert math.isfinite(f_dp_epsilon(10**5, 0, delta=1e-6, total=10**5))


@pytest.mark.parametrize(("row", "tests"), [(mahloujifar_row, 3), (mahloujifar_fixed_row, 4)])
def test_edge_cases_of_the_rows(row, tests):
    assert row(np.ones(20), np.ones(20), delta=1e-6).value == 0
    assert row(QUANTILES, QUANTILES[::20], delta=1e-6).value == 0
    apart = row(np.arange(100) + 1000, np.arange(100), delta=1e-6).value
    assert apart == pytest.approx(f_dp_epsilon(100, 0, delta=1e-6, total=200, confidence=1 - 0.05 / tests))
    assert row(np.arange(100) + 1000, np.arange(100), delta=1e-6, confidence=0.99).value < apart
    assert row(np.arange(100), np.arange(100) + 1000, delta=1e-6).value == 0


def test_the_fields_of_the_rows():
    rows = [row(QUANTILES + 2, QUANTILES, delta=1e-6) for row in (mahloujifar_row, mahloujifar_fixed_row)]
    assert [row.kind for row in rows] == ["heuristic", "valid bound"]
    assert all("a Gaussian mechanism" in row.assumptions for row in rows)


def test_bad_input_is_rejected():
    with pytest.raises(ValueError, match="delta must lie in"):
        f_dp_epsilon(10, 1, delta=1.0, total=10)
    with pytest.raises(ValueError, match="at least 10 unobserved scores"):
        mahloujifar_row(QUANTILES, [1.0], delta=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.8, 2.3])
def test_the_fixed_row_is_a_bound_on_a_gaussian_mechanism(epsilon):
    """At most 5 % of 300 runs exceed the truth, plus three standard errors."""
    shift = 1 / mechanism_noise(epsilon, delta=1e-6) if epsilon else 0.0
    rng = np.random.default_rng(12)
    values = [
        mahloujifar_fixed_row(rng.normal(shift, 1, 200), rng.normal(0, 1, 200), delta=1e-6).value for _ in range(300)
    ]
    assert np.mean(np.array(values) > epsilon) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
