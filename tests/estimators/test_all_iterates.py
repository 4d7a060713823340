"""Algorithm 3: epsilon from all iterates."""

import numpy as np
import pytest

from coalmine.estimators.all_iterates import estimate_from_iterates
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon


def test_a_gaussian_is_fitted_to_each_side():
    rng = np.random.default_rng(0)
    observed, unobserved = rng.normal(3, 2, 500), rng.normal(1, 1.5, 800)
    estimate = estimate_from_iterates(observed, unobserved, delta=1e-6)
    null, alternative = (Gaussian(float(x.mean()), float(x.std())) for x in (unobserved, observed))
    assert estimate.epsilon == pytest.approx(gaussian_epsilon(null, alternative, delta=1e-6), rel=1e-9)
    assert estimate.interval is None
    assert 0 < estimate.ceiling < 7
