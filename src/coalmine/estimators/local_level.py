"""One local level for a band of order statistics, so that a lower bound holds at all thresholds simultaneously.

Let U_(1) < ... < U_(k) be k sorted uniforms. U_(i) is Beta(i, k - i + 1); let b_i be that law's quantile at 1 - local.
Each bound U_(i) <= b_i alone fails with probability `local`. At least one of them fails with probability `total`.
`total_level` computes the second probability from the first, and `local_level` the first from the second.
"""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.interpolate import BarycentricInterpolator
from scipy.optimize import brentq
from scipy.special import betainccinv, gammaln, log_ndtr, ndtr, ndtri, xlogy

from coalmine.argument_checks import Floats, unit_interval, whole_number

EXACT = 2_000  # up to this count the local level is computed; above it, interpolated
KEPT = 20_000  # up to this count a whole band is computed and cached: the groups of a result share it
FEWEST = 100  # count from which on the interpolated level is a good start
SECANTS, CLOSE = 12, 1e-9  # most steps, and the accuracy, in the log of the level
SLOPE = 0.88  # of the log of the total level over that of the local one: 0.82 to 0.94 where bounds are computed
REACH = 7.5  # standard deviations kept above the mean count: fewer than 1e-13 of the paths ever leave them

TABLE_COUNT = np.array([1_000, 1_603, 6_506, 52_800, 411_500, 1_000_000])
TABLE_LOCAL = ndtr(-3 - 3 * np.cos(np.pi * np.arange(12) / 11))  # Chebyshev points of the normal quantile, from 6 to 0
# total_level(count, local), a row for each count
# fmt: off
TABLE_TOTAL = np.array([
    [1.179031323753e-07, 2.40239020283e-07, 1.75919268906e-06, 3.118680397554e-05, 0.0007767775333152, 0.01547368383901,
     0.1533495913197, 0.5705977743669, 0.9071492815705, 0.9883796887184, 0.9980843873433, 0.9990602906695],
    [1.337222804469e-07, 2.721499694176e-07, 1.985887875585e-06, 3.500459441527e-05, 0.0008650301765988, 0.01704930311146,
     0.1660195391063, 0.598825943233, 0.9221111280803, 0.9915002710458, 0.9987503264084, 0.9994135971186],
    [1.819748220788e-07, 3.693998160128e-07, 2.674988337203e-06, 4.656409832088e-05, 0.001130881288611, 0.02175523754922,
     0.2026820072196, 0.6722790152833, 0.9537912477228, 0.9966427654739, 0.9996485729273, 0.9998554607831],
    [2.555452150906e-07, 5.17580852595e-07, 3.722931990635e-06, 6.408999091218e-05, 0.001532318718931, 0.02879178973804,
     0.254639321795, 0.7578514681267, 0.9788352141637, 0.9991628859827, 0.9999472619532, 0.9999821879251],
    [3.281098272029e-07, 6.636569761258e-07, 4.755566756675e-06, 8.134426945112e-05, 0.001926957136841, 0.03565442827252,
     0.3023334831324, 0.8200433632891, 0.9901594717374, 0.9997856100507, 0.9999917908942, 0.9999977152801],
    [3.59571847929e-07, 7.26949484248e-07, 5.202391283808e-06, 8.881011400287e-05, 0.002097640483193, 0.03860781307874,
     0.3220034728478, 0.8417231475035, 0.9929338053505, 0.9998810486085, 0.999996328491, 0.9999990600803],
])
# fmt: on


def local_level(count: int, total: float) -> float:
    """The local level at which `count` Beta upper bounds on sorted uniforms hold simultaneously with probability 1 - total.

    Exact up to a count of 2,000; above, interpolated in a table of exact values up to 10^6, where the probability of
    failing is off by less than 2e-4 of `total`. Beyond the ends of the table the level is too small, so bounds stay valid.

    >>> round(local_level(1000, 0.05), 6)
    0.001217
    """
    return _local_level(whole_number("count", count, minimum=1), unit_interval("total", total))


def total_level(count: int, local: float) -> float:
    """The probability that at least one of the sorted uniforms U_(i) exceeds its Beta quantile at 1 - local: exact.

    Let N(t) be the number of uniforms up to t, a Poisson process of rate `count` given that N(1) = count. A bound fails
    first at i when N(b_i) = i - 1 and every earlier N(b_j) >= j. The law of N over the paths still alive is carried from
    one b_i to the next; each step is a convolution, and the mass that fails at i is recorded and removed. Only
    positive numbers are added, so even a total of 1e-9 is accurate. About count^1.5 operations: 10 ms at 1,000, a minute
    at 10^6.
    """
    band = order_statistic_band(count, local)
    expected = count * band
    steps = np.diff(expected, prepend=0.0)
    widths = (steps + 9 * np.sqrt(steps) + 14).astype(int)  # the rest of a step's law is less than 1e-16
    highest = np.ceil(expected + REACH * np.sqrt(expected * (1 - band)) + 30).astype(int)
    points = np.arange(widths.max())
    laws = np.exp(_log_poisson(points, steps[:, None]))[:, ::-1]  # backwards: a convolution is a correlation with that
    alive, failing = np.ones(1), np.empty(count)
    for i, (law, width, high) in enumerate(zip(laws, widths, highest, strict=True)):
        alive = np.correlate(alive, law[points.size - width :], "full")  # its first entry is N = i
        failing[i] = alive[0]
        alive = alive[1 : min(high, count) - i + 1]
    still_to_come = np.arange(count, 0, -1.0)
    log_rest = _log_poisson(still_to_come, count - expected) - _log_poisson(np.array(float(count)), float(count))
    return float(failing @ np.exp(log_rest))


def order_statistic_bounds(ranks: npt.NDArray[np.int64], count: int, local: float) -> Floats:
    """The entries of order_statistic_band for these ranks; above a count of 20,000 only those are computed."""
    if count <= KEPT:
        return order_statistic_band(count, local)[ranks - 1]
    bounds: Floats = betainccinv(ranks.astype(np.float64), count - ranks + 1.0, local)
    return bounds


@lru_cache(maxsize=32)
def order_statistic_band(count: int, local: float) -> Floats:
    """b_1 < ... < b_count: U_(i) <= b_i with probability 1 - local, for each i alone. Cached, and therefore read-only."""
    rank = np.arange(1.0, count + 1)
    band: Floats = betainccinv(rank, count - rank + 1, local)
    band.flags.writeable = False
    return band


@lru_cache(maxsize=1024)
def _local_level(count: int, total: float) -> float:
    return _exact_local_level(count, total) if count <= EXACT else _interpolated_local_level(count, total)


def _exact_local_level(count: int, total: float) -> float:
    """Between total/count (Bonferroni) and total (one bound alone) the failing probability crosses `total` once.

    Close to a straight line there, in logs: a few secants from the interpolated level find it.
    """
    low, high = math.log(total / count), math.log(total)
    if count == 1:
        return total

    def miss(log_local: float) -> float:
        return math.log(total_level(count, math.exp(log_local)) / total)

    here = min(max(math.log(_interpolated_local_level(max(count, FEWEST), total)), low), high)
    missed, slope = miss(here), SLOPE
    for _ in range(SECANTS):
        there = min(max(here - missed / slope, low), high)
        if abs(there - here) < CLOSE:
            return math.exp(there)
        before, missed, last, here = missed, miss(there), here, there
        slope = (missed - before) / (here - last)
        if not slope > 0:
            break
        correction = missed / slope  # what is then left is smaller than its product with the step before
        if abs(correction * (here - last)) < CLOSE and low < here - correction < high:
            return math.exp(here - correction)
    return math.exp(brentq(miss, low, high, xtol=CLOSE))


def _interpolated_local_level(count: int, total: float) -> float:
    """The table gives log(-log(1 - total)/local), smooth in the normal quantile of `local` and in log log count."""
    scores, rows = -ndtri(TABLE_LOCAL), np.log(-np.log1p(-TABLE_TOTAL) / TABLE_LOCAL)
    in_count = _interpolator(np.log(np.log(TABLE_COUNT)), rows)
    largest = float(TABLE_COUNT[-1])
    row = in_count(math.log(math.log(min(count, largest))))
    if count > largest:  # the log grows ever more slowly in log count, so a straight line lies above it
        nearby = in_count(math.log(math.log(largest) - 0.1))
        row = row + (row - nearby) / 0.1 * math.log(count / largest)
    in_score = _interpolator(scores, row)
    wanted = math.log(-math.log1p(-total))

    def miss(score: float) -> float:
        return float(log_ndtr(-score) + in_score(score)) - wanted

    if miss(scores.min()) < 0:
        return float(TABLE_LOCAL.max())
    if miss(scores.max()) > 0:
        return total / count
    return float(math.exp(log_ndtr(-brentq(miss, scores.min(), scores.max(), xtol=1e-12))))


def _interpolator(points: Floats, values: Floats) -> BarycentricInterpolator:
    """A barycentric interpolator with fixed weights: scipy's own depend on a random order, which changes the last digits."""
    gaps = points[:, None] - points
    np.fill_diagonal(gaps, 1.0)
    return BarycentricInterpolator(points, values, wi=1 / np.prod(gaps, axis=1))


def _log_poisson(count: Floats, rate: Floats | float) -> Floats:
    log_probability: Floats = xlogy(count, rate) - rate - gammaln(count + 1)
    return log_probability
