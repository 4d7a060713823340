import warnings

import numpy as np
import pytest
from scipy import stats

from coalmine import Gaussian, anderson_darling


def scipy_statistic(values):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # scipy is changing other return values of `anderson`
        return stats.anderson(values, "norm").statistic


@pytest.mark.parametrize("n", [8, 100, 5000])
def test_statistic_equals_scipys(n):
    values = np.random.default_rng(n).standard_t(4, size=n)
    assert anderson_darling(values).statistic == pytest.approx(scipy_statistic(values), rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("normal", [None, Gaussian(2.0, 3.0)])
@pytest.mark.parametrize(("n", "slack"), [(10, 0.015), (100, 0.005), (1000, 0.005)])
def test_p_values_are_uniform_under_normality(normal, n, slack):
    """8,000 normal samples: the share below each level is right within four standard errors plus the formulas' error."""
    rng = np.random.default_rng(n)
    p_values = [anderson_darling(rng.normal(2, 3, size=n), normal=normal).p_value for _ in range(8000)]
    for level in (0.01, 0.05, 0.15, 0.5):
        error = 4 * np.sqrt(level * (1 - level) / 8000)
        assert np.mean(np.array(p_values) < level) == pytest.approx(level, abs=error + slack * min(1, 4 * level))


def test_critical_values_differ_from_the_papers():
    """Appendix C's 0.574 (15 %) and 1.088 (1 %) come from an older table; 200,000 simulations give 0.561 and 1.034."""
    from coalmine.estimators.normality import _fitted_p_value

    assert _fitted_p_value(0.561) == pytest.approx(0.15, abs=0.004)
    assert _fitted_p_value(1.034) == pytest.approx(0.01, abs=0.0003)
    assert _fitted_p_value(0.574) < 0.14
    assert _fitted_p_value(1.088) < 0.008


def test_limiting_law_agrees_with_published_points():
    """Anderson and Darling (1954): 1.933, 2.492, 3.857 are the 10, 5 and 1 % points."""
    from coalmine.estimators.normality import _given_p_value

    for statistic, level in ((1.933, 0.10), (2.492, 0.05), (3.857, 0.01)):
        assert _given_p_value(statistic) == pytest.approx(level, rel=0.03)
    tail = [_given_p_value(a) for a in (0.01, 0.3, 1, 5, 10, 20, 29, 31)]
    assert tail == sorted(tail, reverse=True)


def test_non_normal_samples_are_rejected():
    rng = np.random.default_rng(0)
    assert anderson_darling(rng.exponential(size=200)).p_value < 1e-4
    assert anderson_darling(rng.normal(0.5, 1, size=200), normal=Gaussian(0, 1)).p_value < 1e-4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0] * 7, "at least 8 values, got 7"),
        ([1.0] * 20, "all 20 values are equal"),
        ([np.nan] * 9, "must be finite"),
    ],
)
def test_bad_values_are_rejected(values, message):
    with pytest.raises(ValueError, match=message):
        anderson_darling(values)
