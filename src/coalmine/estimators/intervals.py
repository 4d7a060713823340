"""The confidence interval of an estimate of epsilon, and its noise floor.

Means and stds are in units of the null, as in `variance`.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import chdtri, fdtri, ndtri, stdtrit

from coalmine.argument_checks import Floats
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.variance import Sample, chosen_std

COARSE_GRID, FINE_GRID, GRIDS = 24, 9, 3  # stds on the first grid and on each finer one, and number of grids
LATTICE = 10_946  # a Fibonacci number: the points (i/n, {i·previous/n}) cover the unit square evenly
LATTICE_STEP = 6_765  # the Fibonacci number before it
SURELY_KNOWN = 1e12  # number of directions from which on the null's std counts as known


class Interval(NamedTuple):
    """A confidence interval of epsilon."""

    low: Any
    high: Any


class Floor(NamedTuple):
    """The noise floor: when nothing leaks, half of the estimates fall below `median` and 95 % below `q95`."""

    median: float
    q95: float


def epsilon_interval(
    mean: npt.ArrayLike, std: npt.ArrayLike, *, sample: Sample, delta: float, confidence: float = 0.95
) -> Interval:
    """The smallest and the largest epsilon over the joint confidence region of the alternative's mean and std.

    The region is where the deviance is at most the chi-square quantile with two degrees of freedom. Epsilon has a V-shaped
    kink where the alternative's std equals the null's, as it does in a correct pipeline. There the usual profile
    likelihood (one degree of freedom) covers 86 to 95 %. Assumes normal scores. Means and stds may be arrays.
    """
    threshold = float(chdtri(2, 1 - confidence))
    means, stds = np.broadcast_arrays(np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64))
    low, high = region_image(means.ravel(), stds.ravel(), sample=sample, delta=delta, threshold=threshold)
    if means.ndim == 0:
        return Interval(float(low[0]), float(high[0]))
    return Interval(low.reshape(means.shape), high.reshape(means.shape))


def known_std_interval(mean: float, *, sample: Sample, delta: float, confidence: float = 0.95) -> Interval:
    """The smallest and the largest epsilon over the confidence interval of the mean, if the alternative has the null's std.

    The fitted mean over the null's estimated std is a noncentral t variable; its noncentrality has the interval of
    Abramowitz and Stegun 26.7.10, which for a std that is known exactly is the usual one of a normal mean.
    """
    spread = math.sqrt(1 / sample.count + 1 / sample.null_count)
    t, z = mean / spread, float(ndtri((1 + confidence) / 2))
    middle, reach = t * (1 - 1 / (4 * sample.null_dof)), z * math.sqrt(1 + t * t / (2 * sample.null_dof))
    low, high = spread * (middle - reach), spread * (middle + reach)
    means = np.array([max(low, -high, 0.0), max(-low, high)])
    ends = gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(means, 1.0), delta=delta)
    return Interval(float(ends[0]), float(ends[1]))


def region_image(
    means: Floats, stds: Floats, *, sample: Sample, delta: float, threshold: float, grids: int = GRIDS
) -> tuple[Floats, Floats]:
    """The range of epsilon where the deviance is at most `threshold`, for each fitted mean and std.

    At one std the region is an interval of means, and epsilon grows with the distance between the means. So each end of
    the range is a search over stds alone. The grid contains the kink and is refined around the best point.
    """
    narrowest, widest = _log_std_range(sample, threshold)
    angles = np.linspace(-np.pi / 2, np.pi / 2, COARSE_GRID)  # denser at the ends, where the range of means opens
    grid = (narrowest + widest) / 2 + (widest - narrowest) / 2 * np.sin(angles)
    kink = np.clip(-np.log(stds), narrowest, widest)
    log_ratios = np.sort(np.column_stack([np.tile(grid, (stds.size, 1)), kink]))

    def epsilons(log_ratios: Floats, farthest: bool) -> Floats:
        sigmas = stds[:, None] * np.exp(log_ratios)
        sigmas = np.where(np.abs(sigmas - 1) < 1e-12, 1.0, sigmas)  # the kink, to the last digit
        lowest, highest = _mean_range(means[:, None], stds[:, None], sigmas, sample, threshold)
        nearest = np.maximum(np.maximum(lowest, -highest), 0)
        distance = np.maximum(-lowest, highest) if farthest else nearest
        answer: Floats = gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(distance, sigmas), delta=delta)
        return answer

    ends = []
    for sign, farthest in ((-1, False), (1, True)):
        points = log_ratios
        for grid_number in range(grids):
            values = sign * epsilons(points, farthest)
            best = values.argmax(axis=1)
            if grid_number < grids - 1:
                points = _closer(points, best)
        ends.append(sign * values.max(axis=1))
    return ends[0], ends[1]


def deviance(mean: Floats, std: Floats, mu: Floats, sigma: Floats, sample: Sample) -> Floats:
    """Twice the drop of the log likelihood from the fitted (mean, std) to (mu, sigma), with the null's error profiled out.

    The null's std was estimated too, from `null_dof` directions, and every score shares that error. `u`, the ratio of the
    estimated null std to the true one, is set to its most likely value: the root of a quadratic. For large samples this is
    the quadratic form with Var(mean) = std²/k + mean²/(2·dof), Var(log std) = 1/(2k) + 1/(2·dof), Cov = mean/(2·dof).
    """
    loss, _ = _deviance_and_slope(mean, std, mu, sigma, sample)
    return loss


@lru_cache(maxsize=256)
def noise_floor(*, sample: Sample, delta: float, variance: str = "auto") -> Floor:
    """The distribution of the estimate when nothing leaks, by quadrature: no random numbers, the same answer every time.

    Under the null the fitted mean and std follow a t and an F law, independent once written this way; 10,946 lattice points
    of those laws give the quantiles of epsilon to about 1 %. With "auto" an estimate exceeds `q95` in 5.1 % of the runs: the
    F test rejects in 5 % of them, so the quantile at exactly 95 % is not well defined.
    """
    means, stds = null_lattice(sample)
    high = 0.949 if variance == "auto" else 0.95
    median, q95 = np.quantile(quick_epsilons(means, stds, sample=sample, delta=delta, variance=variance), [0.5, high])
    return Floor(float(median), float(q95))


@lru_cache(maxsize=32)
def null_lattice(sample: Sample, size: int = LATTICE, step: int = LATTICE_STEP) -> tuple[Floats, Floats]:
    """Fitted means and stds when nothing leaks: `size` equally likely points of their joint distribution.

    Cached, and therefore read-only: a search for the smallest detectable epsilon needs the same points thirty times.
    """
    means, stds = _null_points(sample, size, step)
    means.flags.writeable = stds.flags.writeable = False
    return means, stds


def _null_points(sample: Sample, size: int, step: int) -> tuple[Floats, Floats]:
    i = np.arange(size)
    first, second = (i + 0.5) / size, (i * step % size + 0.5) / size
    dof, null_dof = sample.count - 1, sample.null_dof
    mean_std = math.sqrt(1 / sample.count + 1 / sample.null_count)
    if null_dof >= SURELY_KNOWN:
        return mean_std * ndtri(first), np.sqrt(chdtri(dof, 1 - second) / dof / sample.variance_ratio_scale)
    # With s² and t² two independent chi-squares, s²/t² is independent of s² + t²: the mean over the null's estimated std is
    # a t variable with all the degrees of freedom, scaled by the std that the ratio implies.
    ratio = fdtri(dof, null_dof, second)
    stretch = np.sqrt((null_dof + dof * ratio) / (null_dof + dof))
    unbias = math.sqrt(sample.count / (sample.count - 1) / sample.variance_ratio_scale)
    means = mean_std * unbias * stretch * stdtrit(null_dof + dof, first)
    return means, np.sqrt(ratio / sample.variance_ratio_scale)


def quick_epsilons(means: Floats, stds: Floats, *, sample: Sample, delta: float, variance: str) -> Floats:
    """point_epsilon for many means and stds, to 1e-4: where the stds are equal, interpolated in a curve of 512 points."""
    stds = chosen_std(stds, sample, variance)
    equal, distances = stds == 1, np.abs(means)
    null = Gaussian(0.0, 1.0)
    curve = np.linspace(0, distances.max(), 512)
    epsilons: Floats = np.interp(distances, curve, gaussian_epsilon(null, Gaussian(curve, 1.0), delta=delta))
    epsilons[~equal] = gaussian_epsilon(null, Gaussian(means[~equal], stds[~equal]), delta=delta)
    return epsilons


def _closer(points: Floats, best: npt.NDArray[np.intp]) -> Floats:
    """A finer grid between the neighbours of the best point of each row, with that point in its middle."""
    rows = np.arange(points.shape[0])
    middle = points[rows, best]
    below, above = points[rows, np.maximum(best - 1, 0)], points[rows, np.minimum(best + 1, points.shape[1] - 1)]
    part = np.linspace(0, 1, FINE_GRID // 2 + 1)
    lower = middle[:, None] - (middle - below)[:, None] * part[:0:-1]
    upper = middle[:, None] + (above - middle)[:, None] * part[1:]
    return np.concatenate([lower, middle[:, None], upper], axis=1)


def _log_std_range(sample: Sample, threshold: float) -> tuple[float, float]:
    """log sigma/std at the two ends of the region: where the deviance at the best mean reaches `threshold`."""
    count = sample.count

    def excess(log_ratio: float) -> float:
        return float(_least_deviance(np.array(log_ratio), sample)) - threshold

    reach = 1.0
    while min(excess(-reach), excess(reach)) < 0:
        reach *= 2
        if reach > 700:
            raise ValueError(f"{count} scores and {sample.null_dof} directions of the null are too few for an interval")
    return brentq(excess, -reach, 0.0), brentq(excess, 0.0, reach)


def _least_deviance(log_ratio: Floats, sample: Sample) -> Floats:
    """The deviance at the best mean: a function of log sigma/std alone."""
    count, dof = sample.count, sample.null_dof
    growth = np.expm1(-2 * log_ratio)
    if dof >= SURELY_KNOWN:
        return count * (growth + 2 * log_ratio)
    return (count + dof) * np.log1p(count * growth / (count + dof)) + 2 * count * log_ratio


def _mean_range(mean: Floats, std: Floats, sigma: Floats, sample: Sample, threshold: float) -> tuple[Floats, Floats]:
    """The smallest and the largest mean in the region at each sigma: Newton's method on a convex function of the mean."""
    room = np.maximum(threshold - _least_deviance(np.log(sigma / std), sample), 0)
    spread = sigma**2 / sample.count + 1 / sample.null_count
    if sample.null_dof >= SURELY_KNOWN:
        return mean - np.sqrt(spread * room), mean + np.sqrt(spread * room)
    precision = sample.count * (std / sigma) ** 2 + sample.null_dof
    middle = mean * np.sqrt((sample.count + sample.null_dof) / precision)
    reach = np.sqrt((spread + mean**2 / (2 * precision)) * room)
    ends = []
    for start in (middle - reach, middle + reach):
        mu = start
        for _ in range(5):
            loss, slope = _deviance_and_slope(mean, std, mu, sigma, sample)
            with np.errstate(divide="ignore", invalid="ignore"):
                step = (loss - threshold) / slope
            mu = np.where((room > 1e-9) & np.isfinite(step), mu - step, middle)
        ends.append(mu)
    return ends[0], ends[1]


def _deviance_and_slope(mean: Floats, std: Floats, mu: Floats, sigma: Floats, sample: Sample) -> tuple[Floats, Floats]:
    count, dof = sample.count, sample.null_dof
    spread = sigma**2 / count + 1 / sample.null_count
    squares = count * (std / sigma) ** 2
    if dof >= SURELY_KNOWN:
        miss = mean - mu
        return squares - count + 2 * count * np.log(sigma / std) + miss**2 / spread, -2 * miss / spread
    curvature, pull = squares + dof + mean**2 / spread, mean * mu / spread
    u = (pull + np.sqrt(pull**2 + 4 * curvature * (count + dof))) / (2 * curvature)
    miss = mean * u - mu
    null_part = dof * ((u - 1) * (u + 1) - 2 * np.log(u))
    score_part = squares * u**2 - count + 2 * count * np.log(sigma / std / u) + miss**2 / spread
    return null_part + score_part, -2 * miss / spread
