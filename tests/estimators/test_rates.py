import math

import numpy as np
import pytest
from scipy import stats

from coalmine import epsilon_from_rates, mechanism_epsilon


def test_the_best_threshold_recovers_the_gaussian_mechanism():
    """Eq. 1 maximised over thresholds is the exact epsilon of equal-variance Gaussians."""
    t = np.linspace(-20, 20, 200_001)
    epsilon = epsilon_from_rates(stats.norm.logsf(t), stats.norm.logcdf(t - 1), delta=1e-6)
    assert epsilon.max() == pytest.approx(mechanism_epsilon(1.0, delta=1e-6), rel=1e-6)


def test_epsilon_matches_the_printed_formula():
    fpr, fnr, delta = 0.02, 0.3, 1e-3
    expected = max(math.log((1 - delta - fpr) / fnr), math.log((1 - delta - fnr) / fpr))
    assert epsilon_from_rates(math.log(fpr), math.log(fnr), delta=delta) == pytest.approx(expected)


def test_edge_cases():
    assert epsilon_from_rates(0.0, 0.0, delta=0.1) == 0  # always wrong: no information
    assert epsilon_from_rates(math.log(0.5), math.log(0.5), delta=0.1) == 0
    assert epsilon_from_rates(-math.inf, math.log(0.5), delta=0.1) == math.inf
    assert epsilon_from_rates(-1e6, -0.1, delta=1e-6) == pytest.approx(1e6, rel=1e-5)
    assert epsilon_from_rates([-1.0, -2.0], [[-1.0], [-3.0]], delta=0.1).shape == (2, 2)


@pytest.mark.parametrize("bad", [0.1, math.nan, "x"])
def test_bad_rates_are_rejected(bad):
    with pytest.raises(ValueError, match="log_fpr must be"):
        epsilon_from_rates(bad, -1.0, delta=0.1)
