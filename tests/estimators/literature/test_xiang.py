"""Xiang et al. 2025: against simulation and closed forms."""

import math

import numpy as np
import pytest
from scipy import stats

from coalmine import mechanism_epsilon, mechanism_noise
from coalmine.estimators.literature.steinke import one_run_epsilon
from coalmine.estimators.literature.xiang import few_mistakes, order_statistics_epsilon, xiang_row

QUANTILES = stats.norm.ppf((np.arange(10_000) + 0.5) / 10_000)


@pytest.mark.parametrize(
    ("total", "guesses", "mistakes", "epsilon"), [(1000, 100, 10, 3.1645), (10_000, 2500, 364, 4.1371)]
)
def test_values_are_much_larger_than_steinkes(total, guesses, mistakes, epsilon):
    ours = order_statistics_epsilon(guesses, mistakes, delta=1e-5, total=total)
    assert ours == pytest.approx(epsilon, abs=5e-5)
    assert ours > 1.9 * one_run_epsilon(guesses, mistakes, delta=1e-5, total=total)


@pytest.mark.parametrize(
    ("total", "guesses", "mistakes", "mu"),
    [(40, 15, 4, 0.8), (30, 29, 8, 0.5), (30, 30, 8, 0.5), (30, 10, 1, 1.5), (11, 10, 1, 1.0), (200, 20, 6, 0.1)],
)
def test_the_law_of_the_mistakes_agrees_with_simulation(total, guesses, mistakes, mu):
    rng = np.random.default_rng(4)
    scores = rng.normal(mu / 2, 1, (40_000, total))  # a mistake is a score below 0
    far = np.take_along_axis(scores, np.argsort(-np.abs(scores), axis=1)[:, :guesses], axis=1)
    few = np.sum(far < 0, axis=1) <= mistakes
    expected = few_mistakes(mu, guesses, mistakes, total=total)
    assert few.mean() == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / few.size))


def test_the_law_is_right_at_its_limits():
    assert few_mistakes(0.0, 50, 20, total=1000) == pytest.approx(stats.binom.cdf(20, 50, 0.5), rel=1e-12)
    assert few_mistakes(1.0, 50, 50, total=1000) == 1
    assert few_mistakes(60.0, 50, 0, total=1000) == pytest.approx(1, rel=1e-12)
    assert few_mistakes(1.0, 999, 300, total=1000) == pytest.approx(
        few_mistakes(1.0, 1000, 300, total=1000), rel=0.1
    )  # one guess more hardly matters


def test_without_abstention_it_is_clopper_pearson():
    """Without abstention each guess is wrong with probability Φ(-mu/2)."""
    rate = stats.binomtest(60, 400, alternative="less").proportion_ci(0.95, method="exact").high
    expected = mechanism_epsilon(-1 / (2 * stats.norm.ppf(rate)), delta=1e-5)
    assert order_statistics_epsilon(400, 60, delta=1e-5, total=400) == pytest.approx(expected, rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("epsilon", [0.0, 0.8, 2.3, 4.9])
def test_it_is_a_bound_if_canaries_leak_independently(epsilon):
    """At most 5 % of 200 runs exceed the truth, plus three standard errors, and the bound is not loose."""
    shift = 1 / mechanism_noise(epsilon, delta=1e-6) if epsilon else 0.0
    rng = np.random.default_rng(13)
    values = np.array(
        [xiang_row(rng.normal(shift, 1, 200), rng.normal(0, 1, 200), delta=1e-6).value for _ in range(200)]
    )
    assert np.mean(values > epsilon) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
    if epsilon:
        assert np.mean(values > epsilon) > 0.01


def test_it_is_not_a_bound_if_canaries_leak_together():
    """All canaries share one |privacy loss|: for each alone the mechanism is exactly Gaussian, and yet the bound fails."""
    rng, shift = np.random.default_rng(14), 1.0
    losses = shift * np.abs(rng.normal(shift / 2, 1, 5000))
    mistakes = rng.binomial(400, 1 / (1 + np.exp(losses)))
    truth = mechanism_epsilon(1 / shift, delta=1e-5)
    bounds = {u: order_statistics_epsilon(400, u, delta=1e-5, total=400) for u in np.unique(mistakes)}
    assert np.mean([bounds[u] > truth for u in mistakes]) > 0.25


def test_edge_cases():
    assert order_statistics_epsilon(10, 10, delta=1e-6, total=20) == 0
    assert order_statistics_epsilon(10, 5, delta=1e-6, total=20) == 0
    assert order_statistics_epsilon(4, 0, delta=1e-6, total=20) == 0
    assert math.isfinite(order_statistics_epsilon(10**5, 0, delta=1e-6, total=10**6))
    assert xiang_row(np.ones(20), np.ones(20), delta=1e-6).value == 0
    assert xiang_row(QUANTILES, QUANTILES[::20], delta=1e-6).value == 0
    assert xiang_row(np.arange(100), np.arange(100) + 1000, delta=1e-6).value == 0
    apart = xiang_row(np.arange(100) + 1000, np.arange(100), delta=1e-6).value
    assert apart == pytest.approx(order_statistics_epsilon(200, 0, delta=1e-6, total=200, confidence=0.975))
    assert xiang_row(np.arange(100) + 1000, np.arange(100), delta=1e-6, confidence=0.99).value < apart


def test_the_fields_of_the_row():
    row = xiang_row(QUANTILES + 2, QUANTILES, delta=1e-6)
    assert (row.kind, row.confidence) == ("valid bound", 0.95)
    assert "leak independently" in row.assumptions


def test_bad_input_is_rejected():
    with pytest.raises(ValueError, match="confidence must lie in"):
        xiang_row(QUANTILES, QUANTILES, delta=1e-6, confidence=0.0)
    with pytest.raises(ValueError, match="mistakes must be at most the guesses"):
        order_statistics_epsilon(10, 11, delta=1e-6, total=20)
