"""Epsilon from fitted Gaussians, with its interval, noise floor and ceiling."""

import dataclasses
import math
import time

import numpy as np
import pytest
from scipy.stats import f, norm

from coalmine.estimators.gaussian_fit import epsilon_estimate, fitted_epsilon
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.intervals import epsilon_interval
from coalmine.estimators.null import CosineNull, conditional_null
from coalmine.estimators.variance import Sample

QUANTILES = norm.ppf((np.arange(1000) + 0.5) / 1000)


@pytest.mark.parametrize("variance", ["auto", "null", "fitted"])
def test_units_do_not_matter(variance):
    scores = QUANTILES + 1
    plain = epsilon_estimate(scores, null=Gaussian(0, 1), delta=1e-6, variance=variance)
    moved = epsilon_estimate(5 - 2 * scores, null=Gaussian(5, 2), delta=1e-6, variance=variance)
    assert moved.epsilon == pytest.approx(plain.epsilon, rel=1e-9)
    assert moved.interval == pytest.approx(plain.interval, rel=1e-6)
    assert moved.floor == pytest.approx(plain.floor, rel=1e-6)


def test_variance_null_recovers_the_gaussian_mechanism():
    """The null's std reproduces Table 2."""
    estimate = epsilon_estimate(1.05 * QUANTILES + 1 / 0.541, null=Gaussian(0, 1), delta=1e-6, variance="null")
    assert estimate.epsilon == pytest.approx(10.0, rel=2e-3)


@pytest.mark.parametrize("ratio", [0.9, 0.954, 0.956, 1.0, 1.043, 1.046, 1.1])
@pytest.mark.parametrize("null_dof", [math.inf, 500.0])
def test_auto_takes_the_nulls_std_unless_the_f_test_rejects_it(ratio, null_dof):
    scores = ratio * QUANTILES / QUANTILES.std() + 1
    estimate = epsilon_estimate(scores, null=Gaussian(0, 1), delta=1e-6, null_dof=null_dof)
    statistic = ratio**2 * 1000 / 999
    law = f(999, null_dof if math.isfinite(null_dof) else 1e9)
    p_value = 2 * min(law.cdf(statistic), law.sf(statistic))
    assert estimate.variance.used == ("fitted" if p_value < 0.05 else "null")
    assert f"p = {p_value:.2g}" in estimate.variance.reason


def test_a_null_that_knows_its_degrees_of_freedom_widens_the_interval():
    rng = np.random.default_rng(3)
    cosines = rng.normal(0.05, 0.02, 200)
    null = conditional_null(cosines, 1000)
    wide = epsilon_estimate(cosines, null=null, delta=1e-6).interval
    same = epsilon_estimate(cosines, null=Gaussian(0, null.std), delta=1e-6, null_dof=800).interval
    known = epsilon_estimate(cosines, null=Gaussian(0, null.std), delta=1e-6).interval
    assert wide == pytest.approx(same, rel=1e-9)
    assert wide.low < known.low < known.high < wide.high


def test_two_sample_interval_covers():
    """With unobserved scores, the null's mean and std are estimated too; all scores are normal."""
    rng, runs = np.random.default_rng(4), 2_000
    truth = gaussian_epsilon(Gaussian(0, 1), Gaussian(1, 1), delta=1e-6)
    observed, unobserved = rng.normal(1, 1, (runs, 200)), rng.normal(0, 1, (runs, 150))
    null_mean, null_std = unobserved.mean(axis=1), unobserved.std(axis=1)
    means, stds = (observed.mean(axis=1) - null_mean) / null_std, observed.std(axis=1) / null_std
    low, high = epsilon_interval(means, stds, sample=Sample(200, null_dof=149, null_count=150), delta=1e-6)
    assert np.mean((low <= truth) & (truth <= high)) > 0.95 - 4 * math.sqrt(0.05 * 0.95 / runs)
    first = epsilon_estimate(observed[0], null=unobserved[0], delta=1e-6).interval
    assert first == pytest.approx((low[0], high[0]), rel=1e-9)


def test_fields_of_an_estimate_are_consistent():
    estimate = epsilon_estimate(QUANTILES + 1, null=Gaussian(0, 1), delta=1e-6)
    assert estimate.interval.low < estimate.epsilon < estimate.interval.high
    assert 0 < estimate.floor.median < estimate.floor.q95 < estimate.epsilon
    assert estimate.ceiling == math.inf
    assert estimate.anderson_darling.p_value > 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimate.epsilon = 0.0


def test_the_fitted_estimate_is_about_0_4_when_nothing_leaks():
    """k = 1,000, delta = 341000^-1.1: 0.41 on average with a std of 0.26, hence a median near 0.36."""
    floor = epsilon_estimate(QUANTILES, null=Gaussian(0, 1), delta=341000**-1.1, variance="fitted").floor
    assert 0.3 < floor.median < 0.41 < floor.q95 < 1.1


def test_10_000_scores_take_less_than_a_second():
    rng = np.random.default_rng(0)
    observed = rng.normal(1, 1, 10_000)
    for null in (Gaussian(0, 1), rng.normal(0, 1, 10_000)):
        started = time.process_time()
        epsilon_estimate(observed, null=null, delta=1e-6)
        assert time.process_time() - started < 1


@pytest.mark.parametrize(("observed", "message"), [
    ([], "at least 10 observed scores, got 0"), (np.zeros(100), "all 100 observed scores are equal"),
    ([1.0, math.nan] * 10, "finite"), (range(9), "at least 10 observed scores, got 9"), (np.zeros((20, 2)), "one row"),
])  # fmt: skip
def test_bad_scores_are_rejected(observed, message):
    with pytest.raises(ValueError, match=message) as error:
        epsilon_estimate(observed, null=CosineNull(1000), delta=1e-6)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("options", "message"), [
    ({"delta": 1.0}, "delta must lie in"), ({"variance": "best"}, "variance must be one of"),
    ({"confidence": 0.0}, "confidence must lie in"), ({"null_dof": 1.0}, "null_dof must be"),
    ({"null": np.ones(50)}, "all 50 unobserved scores are equal"),
    ({"null": np.ones(5)}, "at least 10 unobserved scores"),
])  # fmt: skip
def test_bad_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        epsilon_estimate(QUANTILES, **{"null": Gaussian(0, 1), "delta": 1e-6} | options)


@pytest.mark.parametrize("unit", [1e-300, 1e-200, 1e200, 1e300])
def test_the_units_of_the_scores_make_no_difference(unit):
    """Epsilon has no unit, even where the squares of scores overflow or underflow."""
    scores = np.random.default_rng(3).normal(1.0, 1.0, 200)
    here = epsilon_estimate(scores, null=Gaussian(0.0, 1.0), delta=1e-6)
    there = epsilon_estimate(scores * unit, null=Gaussian(0.0, unit), delta=1e-6)
    assert there.epsilon == pytest.approx(here.epsilon, rel=1e-9)
    assert tuple(there.interval) == pytest.approx(tuple(here.interval), rel=1e-9)
    assert there.anderson_darling.p_value == pytest.approx(here.anderson_darling.p_value, rel=1e-6)


@pytest.mark.parametrize("unit", [1e-300, 1e-61, 1e61, 1e300])
def test_scores_and_null_in_different_units_are_rejected(unit):
    scores = np.random.default_rng(3).normal(1.0, 1.0, 200) * unit
    with pytest.raises(ValueError, match=r"of the null's size, .* in the same units"):
        epsilon_estimate(scores, null=Gaussian(0.0, 1.0), delta=1e-6)


def test_the_papers_number_alone_is_that_of_the_whole_estimate():
    scores = 1.1 * QUANTILES / 30 + 0.02
    for null in (CosineNull(1_000), Gaussian(0.0, 0.03), QUANTILES / 31):
        whole = epsilon_estimate(scores, null=null, delta=1e-5, variance="fitted")
        assert fitted_epsilon(scores, null=null, delta=1e-5) == whole.epsilon
    with pytest.raises(ValueError, match="of the null's size"):
        fitted_epsilon(scores * 1e70, null=CosineNull(1_000), delta=1e-5)
