"""Algorithm 2: epsilon from the final model."""

import numpy as np
import pytest
from scipy.stats import norm

from coalmine.estimators.final_model import estimate_from_final

QUANTILES = norm.ppf((np.arange(1000) + 0.5) / 1000)


@pytest.mark.parametrize(("shift", "epsilon"), [(1, 4.393278), (2, 10.021311)])
def test_estimate_agrees_with_the_authors_code(shift, epsilon):
    """The authors' published code gives these for normal quantiles over √dim, dim 10^6, delta 1e-5."""
    estimate = estimate_from_final((QUANTILES + shift) / 1000, dim=10**6, delta=1e-5)
    assert estimate.epsilon == pytest.approx(epsilon, abs=1e-6)
    assert estimate.variance.used == "fitted"
    assert (estimate.mean, estimate.null_std) == (pytest.approx(shift / 1000), pytest.approx(1e-3))
