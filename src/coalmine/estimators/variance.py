"""Epsilon from the mean and std of observed scores, and the choice of the alternative's std.

Means and stds here are in units of the null: its mean is 0 and its std 1. Stds divide by the number of scores, as the
paper's do (Algorithm 1, line 9).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc, chdtri, fdtrc, fdtri

from coalmine.argument_checks import Floats
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon

LEVEL = 0.05  # level of the F test; 1 % and 10 % are both less accurate if the stds are nearly, but not quite, equal
Variance = Literal["auto", "fitted", "null"]
SAFE_EXPONENT = 400  # largest power of two whose sums and squares neither overflow nor underflow


@dataclass(frozen=True)
class Sample:
    """The size of the samples behind an estimate.

    `null_dof` is the number of directions, or of unobserved scores minus one, from which the null's std was estimated; inf
    if it is known. `null_count` is the number of unobserved scores behind the null's mean; inf if it is known.
    """

    count: int
    null_dof: float = math.inf
    null_count: float = math.inf

    @property
    def variance_ratio_scale(self) -> float:
        """The factor that removes the bias of dividing by the number of scores from the ratio of two variances."""
        null_bias = 1.0 if math.isinf(self.null_count) else 1 - 1 / self.null_count
        return self.count / (self.count - 1) * null_bias


def point_epsilon(mean: npt.ArrayLike, std: npt.ArrayLike, *, sample: Sample, delta: float, variance: str) -> Any:
    """Epsilon of N(0, 1) against the alternative that `variance` chooses, for one or many means and stds.

    "fitted" takes the alternative's std from the scores (Algorithm 2), "null" takes the null's, and "auto" takes the null's
    unless an F test at 5 % rejects that the stds are equal.
    """
    std = chosen_std(np.asarray(std, dtype=np.float64), sample, variance)
    return gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(mean, std), delta=delta)


def chosen_std(std: Floats, sample: Sample, variance: str) -> Floats:
    """The alternative's std: the fitted one, or that of the null, which is 1."""
    if variance == "fitted":
        return std
    if variance == "null":
        return np.ones_like(std)
    low, high = null_std_range(sample)
    return np.where((std >= low) & (std <= high), 1.0, std)


def null_std_range(sample: Sample) -> tuple[float, float]:
    """The fitted stds at which the F test does not reject that the alternative has the null's std."""
    dof, null_dof = sample.count - 1, sample.null_dof
    if math.isinf(null_dof):
        ratios = [chdtri(dof, 1 - LEVEL / 2) / dof, chdtri(dof, LEVEL / 2) / dof]
    else:
        ratios = [fdtri(dof, null_dof, LEVEL / 2), fdtri(dof, null_dof, 1 - LEVEL / 2)]
    low, high = (math.sqrt(ratio / sample.variance_ratio_scale) for ratio in ratios)
    return low, high


def equal_std_p_value(std: float, sample: Sample) -> float:
    """The two-sided p-value of the F test that the alternative has the null's std."""
    ratio, dof = std * std * sample.variance_ratio_scale, sample.count - 1
    above = chdtrc(dof, ratio * dof) if math.isinf(sample.null_dof) else fdtrc(dof, sample.null_dof, ratio)
    return float(2 * min(above, 1 - above))


def in_safe_units(scores: Floats) -> tuple[Floats, int]:
    """The scores over 2^exponent, and the exponent: 0 unless squares of the scores would overflow or underflow."""
    exponent = int(np.frexp(np.abs(scores).max())[1])
    if abs(exponent) <= SAFE_EXPONENT:
        return scores, 0
    return np.ldexp(scores, -exponent), exponent
