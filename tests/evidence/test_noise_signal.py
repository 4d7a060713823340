"""The noise implied by the canaries' scores, and its interval."""

import math

import pytest
from scipy.stats import norm

from coalmine.evidence.noise_signal import NoiseSignal


@pytest.mark.parametrize("beta", [0.3, 0.9612781405271471, 3.0])
@pytest.mark.parametrize("weight", [60.0, 1150.0, 40_000.0])
def test_the_interval_is_normal_with_many_degrees_of_freedom(beta, weight):
    """With 10⁵ degrees of freedom the scale is almost known: β ± 1.96·√(1/weight + β²/(2·dof)).

    In a round with 1,800 degrees of freedom the scores spread √(1800/1798) times as much.
    """
    signal = NoiseSignal(beta=beta, weight=weight, dof=102_475.0, round_dof=1_800.0, mean_square=beta**2)
    error = math.sqrt(1_800 / 1_798 / weight + beta**2 / (2 * 102_475))
    ends = [beta * (1 - 0.75 / 1_800) + sign * norm.isf(0.025) * error for sign in (-1, 1)]
    assert signal.interval(0.95) == pytest.approx(ends, abs=0.01 * error + 1e-5)
