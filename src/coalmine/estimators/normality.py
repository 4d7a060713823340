"""Tests of normality, with p-values: Anderson and Darling's (Appendix C), and the kurtosis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import binom, log_ndtr, ndtr

from coalmine.argument_checks import Floats, finite_array
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.variance import in_safe_units

NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)
ANGLES, ANGLE_WEIGHTS = (NODES + 1) * math.pi / 4, WEIGHTS * math.pi / 4  # on (0, π/2)


@dataclass(frozen=True)
class AndersonDarling:
    """The test statistic and its p-value: the probability that a normal sample gives a statistic at least as large."""

    statistic: float
    p_value: float


def anderson_darling(values: npt.ArrayLike, *, normal: Gaussian | None = None) -> AndersonDarling:
    """Test of `values` against a normal law with their own mean and std, or against a given one (Appendix C).

    For a fitted normal the p-value is Stephens' (D'Agostino and Stephens 1986, Table 4.9): 15 % at 0.561 and 1 % at 1.034
    for large samples. The paper's 0.574 and 1.088 come from an older table. For a given normal it is that of the limiting
    law of Anderson and Darling (1954), accurate to about 0.003 for 8 values or more.

    >>> anderson_darling([-1.2, -0.7, -0.3, -0.1, 0.1, 0.2, 0.6, 1.3]).p_value > 0.5
    True
    """
    x = np.sort(finite_array("values", values).ravel())
    if x.size < 8:
        raise ValueError(f"Anderson-Darling needs at least 8 values, got {x.size}")
    if x[0] == x[-1]:
        raise ValueError(f"all {x.size} values are equal, so no normal law fits them")
    if normal is None:
        x, _ = in_safe_units(x)
        statistic = _statistic((x - x.mean()) / x.std(ddof=1))
        return AndersonDarling(statistic, _fitted_p_value(statistic * (1 + 0.75 / x.size + 2.25 / x.size**2)))
    statistic = _statistic((x - normal.mean) / normal.std)
    return AndersonDarling(statistic, _given_p_value(statistic))


def anscombe_glynn(kurtosis: Floats, size: Floats) -> Floats:
    """A kurtosis about a known mean of 0, made standard normal (Anscombe and Glynn 1983, with one more observation)."""
    n = size + 1.0
    mean = 3 * (n - 1) / (n + 1)
    variance = 24 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    x = (kurtosis - mean) / np.sqrt(variance)
    skew = 6 * (n * n - 5 * n + 2) / ((n + 7) * (n + 9)) * np.sqrt(6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3)))
    a = 6 + 8 / skew * (2 / skew + np.sqrt(1 + 4 / skew**2))
    inner = 1 + x * np.sqrt(2 / (a - 4))
    root = np.sign(inner) * np.cbrt((1 - 2 / a) / np.abs(inner))
    return np.asarray((1 - 2 / (9 * a) - root) / np.sqrt(2 / (9 * a)))


def heavy_tails_p_value(samples: Sequence[Floats]) -> float:
    """The probability that normal samples have a kurtosis at least as large, each about its mean and in its own units."""
    z = np.concatenate([(sample - sample.mean()) / sample.std() for sample in samples])
    return float(ndtr(-anscombe_glynn(np.asarray(np.mean(z**4)), np.asarray(z.size - 1.0))))


def _statistic(z: Floats) -> float:
    weight = (2 * np.arange(1, z.size + 1) - 1) / z.size
    return float(-z.size - weight @ (log_ndtr(z) + log_ndtr(-z[::-1])))


def _fitted_p_value(a: float) -> float:
    if a < 0.2:
        return -math.expm1(-13.436 + 101.14 * a - 223.73 * a * a)
    if a < 0.34:
        return -math.expm1(-8.318 + 42.796 * a - 59.938 * a * a)
    if a < 0.6:
        return math.exp(0.9177 - 4.279 * a - 1.38 * a * a)
    return math.exp(1.2937 - 5.709 * a + 0.0186 * a * a) if a < 13 else 0.0


def _given_p_value(a: float) -> float:
    """The limiting law's series; its integrals over (0, ∞) are taken over an angle, where they are smooth."""
    if a > 30:
        return 0.0
    if a < 0.05:
        return 1.0
    stretch = 1 / np.cos(ANGLES) ** 2
    total = 0.0
    for j in range(30):
        rate = (4 * j + 1) ** 2 * math.pi**2 / (8 * a)
        integral = float(ANGLE_WEIGHTS @ (np.exp(a / (8 * stretch) - rate * stretch) * stretch))
        total += float(binom(-0.5, j)) * (4 * j + 1) * integral
    return min(max(1 - math.sqrt(2 * math.pi) / a * total, 0.0), 1.0)
