"""A lower bound on epsilon for two samples that are nearly normal: Student's t of any degrees of freedom, shifted.

Epsilon at a small delta depends on tails that no sample of this size shows: at delta 1e-5 and a shift of one std it is 4.38
for normal scores and 3.31 for t with 50 degrees of freedom, which no test tells apart from normal below some 20,000 scores.
So the bound is the smallest epsilon over all degrees of freedom and shifts that the scores' likelihood does not reject.
"""

import math

import numpy as np
from scipy.special import gammaln, ndtri, stdtr

from coalmine.argument_checks import Floats

TAILS = np.geomspace(1e-4, 0.5, 32)  # 1 / degrees of freedom that are fitted
STEPS, FINE, HALVINGS = 15, 400, 50
SHARE = 0.02  # of the level, for the likelihood ratio
LARGEST_EPSILON, HOPELESS = 200.0, 20.0  # a fit this much below the best log likelihood is far outside of the region


def student_lower_bound(observed: Floats, unobserved: Floats, *, delta: float, confidence: float) -> float:
    """The smallest epsilon of a shifted Student's t, at least 2 degrees of freedom, that the scores do not reject.

    Both samples have one scale. The likelihood ratio rejects at a fiftieth of the level, as other laws whose body
    looks as normal have a smaller epsilon still: docs/evidence/bounds.md has the coverage for the worst that was found.

    >>> rng = np.random.default_rng(1)
    >>> scores = rng.standard_normal(1000)
    >>> round(student_lower_bound(scores + 1, rng.standard_normal(1000), delta=1e-5, confidence=0.95), 1)
    1.9
    """
    shifts, fits = _fits(observed, unobserved)
    fitted = np.log(TAILS[: shifts.size])
    tails = np.linspace(fitted[0], fitted[-1], FINE)
    shift, deviance = np.interp(tails, fitted, shifts), np.interp(tails, fitted, 2 * (fits.max() - fits))
    left, dof = float(ndtri(1 - SHARE * (1 - confidence))) ** 2 - deviance, np.exp(-tails)
    kept, sizes = left >= 0, (observed.size, unobserved.size)
    variance = (dof + 3) / (dof + 1) * sum(1 / size for size in sizes) + shift**2 * (dof + 3) / (2 * dof * sum(sizes))
    least = shift[kept] - np.sqrt(left[kept] * variance[kept])
    return float(student_epsilon(np.maximum(least, 0.0), dof[kept], delta=delta).min())


def student_epsilon(shift: Floats, dof: Floats, *, delta: float) -> Floats:
    """The epsilon of Student's t against itself shifted, in units of its scale; elementwise."""
    low, high = np.zeros_like(shift), np.full_like(shift, LARGEST_EPSILON)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = _delta(middle, shift, dof) > delta
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(_delta(np.zeros_like(shift), shift, dof) > delta, low, 0.0)


def _delta(epsilon: Floats, shift: Floats, dof: Floats) -> Floats:
    """Delta at this epsilon: the likelihood ratio exceeds exp(epsilon) between the roots of a quadratic."""
    excess = np.expm1(2 * epsilon / (dof + 1))
    inside = (1 + excess) * shift**2 - excess**2 * dof
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(np.maximum(inside, 0.0))
        first, last = (
            np.where(excess > 0, ((1 + excess) * shift + sign * root) / excess, limit)
            for sign, limit in ((-1.0, shift / 2), (1.0, np.inf))
        )
    present, absent = (stdtr(dof, move - first) - stdtr(dof, move - last) for move in (shift, 0.0))
    return np.where((inside > 0) & (shift > 0), present - np.exp(epsilon) * absent, 0.0)


def _fits(observed: Floats, unobserved: Floats) -> tuple[Floats, Floats]:
    """The best shift, in units of the scale, and its log likelihood for the `TAILS` that are not hopeless (EM)."""
    samples, count = (observed, unobserved), observed.size + unobserved.size
    centers = [float(np.median(sample)) for sample in samples]
    square = sum(float(np.var(sample)) * sample.size for sample in samples) / count
    found: list[tuple[float, float]] = []
    for tail in TAILS:
        dof = 1 / float(tail)
        for _ in range(STEPS):
            weights = [
                (dof + 1) / (dof + (x - center) ** 2 / square) for x, center in zip(samples, centers, strict=True)
            ]
            centers = [float(weight @ x / weight.sum()) for weight, x in zip(weights, samples, strict=True)]
            parts = zip(weights, samples, centers, strict=True)
            square = sum(float(weight @ (x - center) ** 2) for weight, x, center in parts) / count
        logs = sum(
            float(np.log1p((x - center) ** 2 / (dof * square)).sum())
            for x, center in zip(samples, centers, strict=True)
        )
        constant = float(gammaln((dof + 1) / 2) - gammaln(dof / 2)) - math.log(math.pi * dof * square) / 2
        found.append(((centers[0] - centers[1]) / math.sqrt(square), count * constant - (dof + 1) / 2 * logs))
        if found[-1][1] < max(fit for _, fit in found) - HOPELESS:
            break
    shifts, fits = np.array(found).T
    return shifts, fits
