import math

import numpy as np
import pytest
from scipy import integrate, stats

from coalmine.estimators.literature.zanella_beguelin import (
    COARSE,
    COARSE_ERROR,
    posterior_epsilon,
    region_mass,
    zanella_beguelin_row,
)

COUNTS = [(3, 10, 2, 10), (0, 10, 1, 10), (7, 12, 9, 11), (60, 100, 5, 100), (40, 50, 3, 400)]


def implied_epsilon(fnr, fpr, delta):
    """The epsilon implied by a test, reversed if worse than chance; from the definition instead of Eq. 1."""
    worse = fnr + fpr > 1
    fnr, fpr = np.where(worse, 1 - fnr, fnr), np.where(worse, 1 - fpr, fpr)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.maximum((1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr)
        return np.log(np.maximum(ratios, 1.0))


@pytest.mark.parametrize("counts", COUNTS[:3])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0])
def test_the_mass_equals_the_integral_over_the_region(counts, epsilon):
    fn, count, fp, unobserved = counts
    delta = 0.01
    of_fnr = stats.beta(fn + 0.5, count - fn + 0.5)
    of_fpr = stats.beta(fp + 0.5, unobserved - fp + 0.5)

    def slice_of(fnr):
        growth = math.exp(epsilon)
        low = max(0.0, 1 - delta - growth * fnr, (1 - delta - fnr) / growth)
        high = min(1.0, delta + growth * (1 - fnr), 1 - (fnr - delta) / growth)
        return of_fnr.pdf(fnr) * (of_fpr.cdf(high) - of_fpr.cdf(low))

    kink = (1 - delta) / (1 + math.exp(epsilon))
    mass, _ = integrate.quad(slice_of, 0, 1, points=[kink, 1 - kink, delta, 1 - delta], limit=500, epsabs=1e-9)
    assert region_mass(epsilon, fn, count, fp, unobserved, delta=delta)[0] == pytest.approx(mass, abs=1e-6)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("quantile", [0.05, 0.5, 0.95])
def test_quantiles_agree_with_samples_from_the_posterior(counts, quantile):
    fn, count, fp, unobserved = counts
    rng = np.random.default_rng(7)
    draws = 400_000
    fnr = rng.beta(fn + 0.5, count - fn + 0.5, draws)
    fpr = rng.beta(fp + 0.5, unobserved - fp + 0.5, draws)
    found = posterior_epsilon(fn, count, fp, unobserved, delta=1e-5, quantile=quantile)
    share = np.mean(implied_epsilon(fnr, fpr, 1e-5) <= found)
    assert share == pytest.approx(quantile, abs=4 * math.sqrt(quantile * (1 - quantile) / draws))


@pytest.mark.parametrize(
    ("counts", "published"),
    [((3, 10, 2, 10), 0.35003391576), ((0, 10, 1, 10), 1.87161984283), ((60, 100, 5, 100), 1.39084648784)],
)
def test_values_agree_with_the_authors_package(counts, published):
    """privacy-estimates 0.1.0.post1, Beta(counts).eps_lo(delta=1e-5, alpha=0.05, xtol=1e-3)."""
    assert posterior_epsilon(*counts, delta=1e-5, quantile=0.05) == pytest.approx(published, abs=1e-3)


@pytest.mark.parametrize("shift", [0.0, 1.0, 6.0])
def test_the_row_is_the_largest_over_thresholds(shift):
    rng = np.random.default_rng(11)
    observed, unobserved = rng.normal(shift, 1, 40), rng.normal(0, 1, 70)
    each = [
        posterior_epsilon(int(np.sum(observed < t)), 40, int(np.sum(unobserved >= t)), 70, delta=1e-5, quantile=0.05)
        for t in observed
    ]
    row = zanella_beguelin_row(observed, unobserved, delta=1e-5)
    assert row.value == pytest.approx(max(each), abs=2e-9)
    assert (row.kind, row.threshold) == ("heuristic", "chosen on the same data, not corrected")


def test_the_coarse_rule_is_within_its_stated_error():
    rng = np.random.default_rng(3)
    for count, unobserved in [(10, 10), (1_000, 1_000), (10_000, 10_000), (1_000, 10_000), (50, 2_000)]:
        fn, fp = rng.integers(0, count + 1, 120), rng.integers(0, unobserved + 1, 120)
        fn[:40], fp[20:60] = rng.integers(0, 5, 40), rng.integers(0, 5, 40)
        for epsilon in (0.0, 0.1, 1.0, 8.0):
            coarse = region_mass(epsilon, fn, count, fp, unobserved, delta=1e-6, nodes=COARSE)
            assert np.abs(coarse - region_mass(epsilon, fn, count, fp, unobserved, delta=1e-6)).max() < COARSE_ERROR


def test_the_credible_interval_never_contains_zero():
    """At any threshold: the two rates of an uninformative test never add up to exactly 1."""
    assert posterior_epsilon(500, 1_000, 500, 1_000, delta=1e-6, quantile=0.05) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((11, 10, 2, 10), "at most the number of scores, got 11 of 10"),
        ((-1, 10, 2, 10), "false_negatives must be at least 0"),
        ((1.5, 10, 2, 10), "false_negatives must be a whole number"),
    ],
)
def test_impossible_counts_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        posterior_epsilon(*arguments, delta=1e-6, quantile=0.05)
