import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binomtest, norm

from coalmine.estimators.literature.nasr import gdp_mu, nasr_row, nasr_simultaneous_row


def gaussian_mechanism_epsilon(mu, delta):
    """The inverse of Balle and Wang's delta(epsilon) (2018, Theorem 8)."""

    def excess(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return brentq(excess, 0.0, 200.0) if excess(0.0) > 0 else 0.0


def brute_force(observed, unobserved, delta, confidence):
    one_sided = 2 * math.sqrt(confidence) - 1
    best = 0.0
    for t in [*observed, *unobserved]:
        errors = [(int(np.sum(observed < t)), len(observed)), (int(np.sum(unobserved >= t)), len(unobserved))]
        fnr, fpr = (binomtest(k, n).proportion_ci(one_sided, method="exact").high for k, n in errors)
        best = max(best, norm.isf(fpr) - norm.ppf(fnr))
    return gaussian_mechanism_epsilon(best, delta) if best > 0 else 0.0


@pytest.mark.parametrize("shift", [0.0, 1.0, 5.0])
def test_the_best_threshold_equals_brute_force(shift):
    rng = np.random.default_rng(1)
    observed, unobserved = rng.normal(shift, 1, 25).round(1), rng.normal(0, 1, 60).round(1)
    row = nasr_row(observed, unobserved, delta=1e-3, confidence=0.9)
    assert row.value == pytest.approx(brute_force(observed, unobserved, 1e-3, 0.9), abs=1e-8)


@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
def test_every_threshold_of_a_gaussian_mechanism_has_its_mu(mu):
    thresholds = np.linspace(-6, 6 + mu, 50)
    np.testing.assert_allclose(gdp_mu(norm.logsf(thresholds), norm.logcdf(thresholds - mu)), mu, rtol=1e-9)


def test_a_test_worse_than_chance_gives_zero():
    assert gdp_mu(math.log(0.6), math.log(0.7)) == 0
    assert gdp_mu(0.0, math.log(0.5)) == 0


@pytest.mark.full
def test_only_the_corrected_row_is_a_bound():
    """1,000 runs of a Gaussian mechanism with true epsilon 4.9."""
    rng, runs = np.random.default_rng(5), 1_000
    mu = brentq(lambda m: gaussian_mechanism_epsilon(m, 1e-6) - 4.9, 0.1, 2.0)
    rows = []
    for _ in range(runs):
        observed, unobserved = rng.normal(mu, 1, 1_000), rng.normal(size=1_000)
        rows.append([f(observed, unobserved, delta=1e-6).value for f in (nasr_row, nasr_simultaneous_row)])
    best, corrected = (np.array(rows) > 4.9).mean(axis=0)
    error = 4 * math.sqrt(0.05 * 0.95 / runs)
    assert corrected <= 0.05 + error
    assert best > 0.05 + error
