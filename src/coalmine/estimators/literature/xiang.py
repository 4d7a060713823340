"""Xiang et al. 2025 (arXiv 2509.08704): one-run auditing by order statistics.

The game of Steinke et al. 2023, in which the auditor makes the most confident guesses of all canaries. Under a known
trade-off function the privacy loss of each canary has a known law. Its absolute value ℓ is the confidence, and given ℓ
the guess is mistaken with probability 1 / (1 + e^ℓ). So the number of mistakes among the r most confident of n guesses
has a known law as well. Here the trade-off function is the Gaussian one, and the law is evaluated exactly.

This assumes that canaries leak independently. It is not a bound for every mechanism with that trade-off function: if all
canaries share one draw of ℓ, each has the same privacy as before, but the value is too large in a quarter of the runs or
more.
"""

import math
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import betaincc, betainccinv, betaincinv, log_ndtr, ndtr, xlog1py

from coalmine.argument_checks import Floats, unit_interval
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.literature.guesses import FIXED_HALVES, checked_counts, fair_halves, mistakes_by_confidence
from coalmine.estimators.literature.literature_row import LiteratureRow

REFERENCE = "Xiang et al. 2025, arXiv 2509.08704"
NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)
CUT_TAIL = 1e-17  # probability cut from either tail of the law of the largest confidence left out


def xiang_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """The more confident half of the guesses, or all of them, Bonferroni over the two.

    Half of the guesses work best if little leaks, all of them if much does. A bound if the mechanism is Gaussian and the
    canaries leak independently.
    """
    delta, failing = unit_interval("delta", delta), (1 - unit_interval("confidence", confidence)) / 2
    present, absent = fair_halves(observed, unobserved)
    mistakes, total = mistakes_by_confidence(present, absent), 2 * present.size
    value = max(
        order_statistics_epsilon(guesses, mistakes[guesses], delta=delta, total=total, confidence=1 - failing)
        for guesses in (total // 2, total)
    )
    return LiteratureRow(
        name="Xiang 2025",
        reference=REFERENCE,
        value=value,
        kind="valid bound",
        confidence=confidence,
        assumptions=(f"{FIXED_HALVES}; a Gaussian mechanism (otherwise not a bound); canaries that leak independently"),
        threshold="chosen on the same data, corrected",
    )


def order_statistics_epsilon(
    guesses: SupportsIndex, mistakes: SupportsIndex, *, delta: float, total: SupportsIndex, confidence: float = 0.95
) -> float:
    """A lower bound on epsilon of a Gaussian mechanism: `mistakes` in the `guesses` most confident of `total`.

    Holds if the number of guesses was fixed before the coins were seen and the canaries leak independently.

    >>> round(order_statistics_epsilon(100, 10, delta=1e-5, total=1000), 4)
    3.1645
    """
    made, wrong, canaries = checked_counts(guesses, mistakes, total)
    delta, failing = unit_interval("delta", delta), 1 - unit_interval("confidence", confidence)
    mu = _largest_refuted(made, wrong, canaries, failing)
    return float(gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(mu, 1.0), delta=delta))


def _largest_refuted(guesses: int, mistakes: int, total: int, failing: float) -> float:
    def excess(mu: float) -> float:
        return few_mistakes(mu, guesses, mistakes, total=total) - failing

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-12))


def few_mistakes(mu: float, guesses: int, mistakes: int, *, total: int) -> float:
    """The probability of at most `mistakes` in the `guesses` most confident of `total` under the Gaussian trade-off.

    With the scores' midpoint at 0 and their std at 1, the confidence is the distance from it. Given y, the largest
    distance left out, the guesses made are independent, each mistaken with probability Pr(mistaken | farther than y).
    The share of the law beyond y is Beta(guesses + 1, total - guesses).
    """
    if mistakes >= guesses:
        return 1.0
    if guesses == total:
        return float(betaincc(mistakes + 1, guesses - mistakes, ndtr(-mu / 2)))
    a, b = guesses + 1, total - guesses
    near, far = (_distance(share, mu) for share in (betainccinv(a, b, CUT_TAIL), betaincinv(a, b, CUT_TAIL)))
    y = near + (far - near) * (NODES + 1) / 2
    log_beyond = _log_beyond(y, mu)
    log_law = (a - 1) * log_beyond + xlog1py(b - 1, -np.exp(log_beyond)) + np.logaddexp(*_log_densities(y, mu))
    law = WEIGHTS * np.exp(log_law - log_law.max())
    mistaken = np.exp(log_ndtr(-mu / 2 - y) - log_beyond)
    return float(law @ betaincc(mistakes + 1, guesses - mistakes, np.minimum(mistaken, 0.5)) / law.sum())


def _log_beyond(y: Floats, mu: float) -> Floats:
    """log Pr(farther than y from the midpoint)."""
    tails: Floats = np.logaddexp(log_ndtr(mu / 2 - y), log_ndtr(-mu / 2 - y))
    return np.minimum(tails, 0.0)


def _log_densities(y: Floats, mu: float) -> tuple[Floats, Floats]:
    """log densities at y of correct and of mistaken guesses, up to one constant."""
    return -((y - mu / 2) ** 2) / 2, -((y + mu / 2) ** 2) / 2


def _distance(share: float, mu: float) -> float:
    """The distance beyond which lies `share` of the law, to six digits, as a limit of integration."""

    def excess(y: float) -> float:
        return math.erfc((y - mu / 2) / math.sqrt(2)) + math.erfc((y + mu / 2) / math.sqrt(2)) - 2 * share

    return float(brentq(excess, 0.0, mu / 2 + 40.0, xtol=1e-6)) if share < 1 else 0.0
