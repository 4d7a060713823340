"""Zanella-Béguelin et al. 2023 (arXiv 2206.05199): epsilon's posterior from the joint posterior of the two error rates.

With Jeffreys' prior, the posterior rates of one threshold test are independent Beta variables. A test with rates
(FNR, FPR) has the epsilon of the smallest (epsilon, delta) region that contains it, on either side of FNR + FPR = 1. The
posterior mass of that region is a smooth integral, computed by Gauss-Legendre quadrature without random numbers.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import betainc, betaln, xlog1py, xlogy

from coalmine.argument_checks import Floats, unit_interval, whole_number
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.literature.thresholds import Counts, error_counts, sorted_scores
from coalmine.estimators.rates import epsilon_from_rates

FINE, COARSE = 96, 24  # numbers of nodes if both sides have equally many scores
COARSE_ERROR = 5e-3  # largest error of a probability with COARSE nodes
REACH = 5.5  # times 1/√n: the posterior mass beyond this distance from the mode is below e^-30
BLOCK = 16_384  # thresholds at a time: memory does not grow with their number
CLOSE = 1e-9  # tolerance of the solved epsilon
Rule = tuple[Floats, Floats]


def zanella_beguelin_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """The lower end of epsilon's one-sided credible interval, at the threshold where it is largest: not a bound.

    Tests below chance count as leaks too, so the interval never contains 0, not even when nothing leaks.
    """
    present, absent = sorted_scores(observed, unobserved)
    failing = 1 - unit_interval("confidence", confidence)
    false_negatives, false_positives = error_counts(present, absent)
    return LiteratureRow(
        name="Zanella-Béguelin 2023, best threshold",
        reference="Zanella-Béguelin et al. 2023, arXiv 2206.05199",
        value=_largest_quantile(
            false_negatives, present.size, false_positives, absent.size, unit_interval("delta", delta), failing
        ),
        kind="heuristic",
        confidence=confidence,
        assumptions="independent scores; a credible interval under Jeffreys' prior, never 0; the best threshold is taken",
        threshold="chosen on the same data, not corrected",
    )


def posterior_epsilon(
    false_negatives: int, count: int, false_positives: int, unobserved: int, *, delta: float, quantile: float
) -> float:
    """A quantile of epsilon's posterior at one threshold, from the numbers of errors and of scores."""
    failing, delta = unit_interval("quantile", quantile), unit_interval("delta", delta)
    counts = [
        whole_number("count", count, minimum=1),
        whole_number("unobserved", unobserved, minimum=1),
    ]
    errors = [
        whole_number("false_negatives", false_negatives, minimum=0),
        whole_number("false_positives", false_positives, minimum=0),
    ]
    for wrong, number in zip(errors, counts, strict=True):
        if wrong > number:
            raise ValueError(f"errors must be at most the number of scores, got {wrong} of {number}")
    return _quantile(errors[0], counts[0], errors[1], counts[1], delta, failing)


def region_mass(
    epsilon: float,
    false_negatives: Any,
    count: int,
    false_positives: Any,
    unobserved: int,
    *,
    delta: float,
    nodes: int = FINE,
) -> Floats:
    """The posterior probability that the test is (epsilon, delta)-private, at each of several thresholds."""
    fn, fp = np.atleast_1d(false_negatives).astype(np.float64), np.atleast_1d(false_positives).astype(np.float64)
    rule = _rule(nodes, count, unobserved)
    mass = np.empty(fn.size)
    for start in range(0, fn.size, BLOCK):
        part = slice(start, start + BLOCK)
        a, b, c, d = fn[part], count - fn[part], fp[part], unobserved - fp[part]
        mass[part] = 1 - _mass_below(epsilon, a, b, c, d, delta, rule) - _mass_below(epsilon, b, a, d, c, delta, rule)
    return np.clip(mass, 0.0, 1.0)


@lru_cache
def _rule(nodes: int, count: int, unobserved: int) -> Rule:
    """A Gauss-Legendre rule, with more nodes if one posterior is much narrower than the other."""
    ratio = max(count, unobserved) / min(count, unobserved)
    return np.polynomial.legendre.leggauss(min(math.ceil(nodes * math.sqrt(ratio)), 1_000))


def _mass_below(epsilon: float, fn: Floats, tp: Floats, fp: Floats, tn: Floats, delta: float, rule: Rule) -> Floats:
    """The mass of rates that (epsilon, delta) rules out: under the line through (0, 1 - delta), or under its mirror image.

    The two lines meet where both rates equal `corner`. The region is the square up to it, and one line each beside and
    above the square.
    """
    corner = (1 - delta) / (1 + math.exp(epsilon))
    square = betainc(fn + 0.5, tp + 0.5, corner) * betainc(fp + 0.5, tn + 0.5, corner)
    return np.asarray(
        square
        + _under_line(epsilon, corner, fn, tp, fp, tn, delta, rule)
        + _under_line(epsilon, corner, fp, tn, fn, tp, delta, rule)
    )


def _under_line(
    epsilon: float, corner: float, a: Floats, b: Floats, c: Floats, d: Floats, delta: float, rule: Rule
) -> Floats:
    """Pr(X > corner, Y < e^-epsilon·(1 - delta - X)) for independent X ~ Beta(a+½, b+½) and Y ~ Beta(c+½, d+½).

    With X = sin²θ the density is sin^2a·cos^2b: smooth up to the ends, and about equally wide in θ wherever it lies. The
    second derivative of its log is at most -2(a + b), which bounds its tails.
    """
    nodes, weights = rule
    mode, reach = np.arcsin(np.sqrt(a / (a + b))), REACH / np.sqrt(a + b)
    start = np.maximum(mode - reach, math.asin(math.sqrt(corner)))
    end = np.minimum(mode + reach, math.asin(math.sqrt(1 - delta)))
    half = np.maximum(end - start, 0.0) / 2
    x = np.sin(start[:, None] + half[:, None] * (1 + nodes)) ** 2
    a, b, c, d = a[:, None], b[:, None], c[:, None], d[:, None]
    density = 2 * np.exp(xlogy(a, x) + xlog1py(b, -x) - betaln(a + 0.5, b + 0.5))
    inside = betainc(c + 0.5, d + 0.5, np.maximum(1 - delta - x, 0.0) * math.exp(-epsilon))
    return np.asarray(np.einsum("tn,n->t", density * inside, weights) * half)


def _quantile(fn: int, count: int, fp: int, unobserved: int, delta: float, level: float) -> float:
    def excess(epsilon: float) -> float:
        return float(region_mass(epsilon, fn, count, fp, unobserved, delta=delta)[0]) - level

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=CLOSE))


def _largest_quantile(fn: Counts, count: int, fp: Counts, unobserved: int, delta: float, level: float) -> float:
    """The largest quantile over thresholds: solve for the most promising one until no other lies above the best."""

    def left(nodes: int, margin: float) -> Floats:
        nonlocal fn, fp
        mass = region_mass(best + CLOSE, fn, count, fp, unobserved, delta=delta, nodes=nodes)
        above = mass < level + margin
        fn, fp = fn[above], fp[above]
        return mass[above]

    guess = epsilon_from_rates(np.log((fp + 1) / (unobserved + 1)), np.log((fn + 1) / (count + 1)), delta=delta)
    farthest, best = int(np.argmax(guess)), 0.0
    while fn.size:
        best = max(best, _quantile(int(fn[farthest]), count, int(fp[farthest]), unobserved, delta, level))
        fn, fp = np.delete(fn, farthest), np.delete(fp, farthest)
        mass = left(COARSE, COARSE_ERROR)
        if mass.min(initial=1.0) >= level - COARSE_ERROR:  # only thresholds near the level are left, if any
            mass = left(FINE, 0.0)
        farthest = int(np.argmin(mass)) if mass.size else 0
    return best
