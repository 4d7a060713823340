"""Agrawal et al. 2026 (arXiv 2606.12733): a pair of Gaussians fitted to the scores.

"Let's Ask Gauss: Improved One-Run Privacy Auditing"; the authors' code is titled "Privacy Auditing in One Run Using
Normality". Observed and unobserved scores are each assumed normal. The two means get a Student's t interval each, the two
stds a chi-square interval each, with Bonferroni's correction for four intervals. The bound is the smallest epsilon of any
pair of Gaussians in that box. The authors also use a bootstrap ellipsoid in place of the box; it has no row here.
"""

import math

import numpy as np
import numpy.typing as npt
from scipy.special import chdtri, stdtrit

from coalmine.argument_checks import Floats, unit_interval
from coalmine.estimators.bounds import score_array
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.intervals import Interval
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.variance import in_safe_units

REFERENCE = "Agrawal et al. 2026, arXiv 2606.12733"
PARAMETERS = 4  # two means and two stds
GRID, GRIDS = 33, 4  # ratios of the stds on each grid, and number of grids; each narrows the search 16 times


def agrawal_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """The smallest epsilon of a Gaussian pair in the Bonferroni box: a bound if the scores are normal.

    Equal scores have no value: no Gaussian fits them.
    """
    present, absent = score_array("observed", observed), score_array("unobserved", unobserved)
    delta, failing = unit_interval("delta", delta), 1 - unit_interval("confidence", confidence)
    units, _ = in_safe_units(np.concatenate([present, absent]))
    sides = {"observed": units[: present.size], "unobserved": units[present.size :]}
    equal = [name for name, scores in sides.items() if scores.min() == scores.max() or np.std(scores) == 0]
    value: float | None = None
    needs: str | None = None
    if equal:
        needs = f"needs scores that differ: all {' and all '.join(equal)} scores are equal, so no Gaussian fits them"
    else:
        boxes = [normal_box(scores, failing / PARAMETERS) for scores in sides.values()]
        value = smallest_epsilon(*boxes, delta=delta)
    return LiteratureRow(
        name="Agrawal 2026, Bonferroni box",
        reference=REFERENCE,
        value=value,
        kind="valid bound",
        confidence=confidence,
        controls="sample gradients",
        receives="intermediate models",
        assumptions="independent normal scores, observed and unobserved: otherwise not a bound",
        threshold="none",
        needs=needs,
    )


def normal_box(scores: Floats, failing: float) -> tuple[Interval, Interval]:
    """Intervals of the mean and of the std of normal scores; each fails with probability `failing`.

    >>> mean, std = normal_box(np.array([-1.0, 0.0, 1.0]), 0.05)
    >>> [f"{end:.3f}" for end in (*mean, *std)]
    ['-2.484', '2.484', '0.521', '6.285']
    """
    dof = scores.size - 1
    mean, std = float(np.mean(scores)), float(np.std(scores, ddof=1))
    reach = -float(stdtrit(dof, failing / 2)) * std / math.sqrt(scores.size)
    low, high = (std * math.sqrt(dof / chdtri(dof, tail)) for tail in (failing / 2, 1 - failing / 2))
    return Interval(mean - reach, mean + reach), Interval(low, high)


def smallest_epsilon(
    observed: tuple[Interval, Interval], unobserved: tuple[Interval, Interval], *, delta: float
) -> float:
    """The smallest epsilon of a pair of Gaussians whose means and stds lie in these intervals.

    At given stds epsilon grows with the distance between the means, so the means are as close as possible. At a given ratio
    of the stds it falls as both grow, so one of them is the largest in its interval. A search over the ratio remains.
    Corners of the box are not enough: if the stds can be equal, the smallest epsilon is usually there, at a kink.
    """
    (mean, std), (null_mean, null_std) = observed, unobserved
    distance = max(mean.low - null_mean.high, null_mean.low - mean.high, 0.0)
    lowest, highest = math.log(std.low / null_std.high), math.log(std.high / null_std.low)
    corner = math.log(std.high / null_std.high)
    kinks = np.clip([0.0, corner], lowest, highest)
    log_ratios = np.sort(np.concatenate([np.linspace(lowest, highest, GRID), kinks]))
    smallest = math.inf
    for _ in range(GRIDS):
        null_stds = null_std.high * np.exp(np.minimum(corner - log_ratios, 0))
        stds = std.high * np.exp(np.minimum(log_ratios - corner, 0))
        stds = np.where(log_ratios == 0, null_stds, stds)  # the kink, to the last digit
        epsilons = gaussian_epsilon(Gaussian(0.0, null_stds), Gaussian(distance, stds), delta=delta)
        best = int(epsilons.argmin())
        smallest = min(smallest, float(epsilons[best]))
        below, above = log_ratios[max(best - 1, 0)], log_ratios[min(best + 1, log_ratios.size - 1)]
        log_ratios = np.linspace(below, above, GRID)
    return smallest
