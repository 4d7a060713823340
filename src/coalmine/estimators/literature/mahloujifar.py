"""Mahloujifar, Melis and Chaudhuri 2024 (arXiv 2410.22235): auditing f-differential privacy in one run.

The same game as Steinke et al. 2023, tested against a whole trade-off function f at once, not one (epsilon, delta).
Here f is that of a Gaussian mechanism, so the test refutes values of μ, and μ gives epsilon at any delta. The result is
larger than Steinke's if the mechanism is Gaussian, and is not a bound otherwise.
"""

from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from coalmine.argument_checks import Floats, unit_interval
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.literature.guesses import HULL, Games, GuessingMethod
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.literature.thresholds import Counts

tiny = np.finfo(np.float64).tiny

FIXED = "a Gaussian mechanism (otherwise not a bound); leaks may be correlated between canaries"


def mahloujifar_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """The best number of "observed" guesses on the ROC hull, Bonferroni over its corners: not a proven bound."""
    levels = {"delta": delta, "confidence": confidence}
    return METHOD.hull_row(observed, unobserved, assumptions=f"a Gaussian mechanism; {HULL}", **levels)


def mahloujifar_fixed_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """The most confident half, quarter, ... of the guesses, Bonferroni over these: a bound for a Gaussian mechanism."""
    levels = {"delta": delta, "confidence": confidence}
    return METHOD.fixed_row(observed, unobserved, assumptions=FIXED, **levels)


def f_dp_epsilon(
    guesses: SupportsIndex, mistakes: SupportsIndex, *, delta: float, total: SupportsIndex, confidence: float = 0.95
) -> float:
    """A lower bound on epsilon of a Gaussian mechanism from `mistakes` in `guesses` for `total` canaries.

    Holds if the number of guesses was fixed before the coins were seen.

    >>> round(f_dp_epsilon(100, 10, delta=1e-5, total=1000), 4)
    2.4564
    """
    return METHOD.epsilon(guesses, mistakes, delta=delta, total=total, confidence=confidence)


def _best_epsilon(games: Games, *, delta: float, confidence: float) -> float:
    guesses, mistakes, total = games
    delta, failing = unit_interval("delta", delta), (1 - unit_interval("confidence", confidence)) / guesses.size
    mu = best_mu(guesses, mistakes, total=total, failing=failing)
    return float(gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(mu, 1.0), delta=delta))


def best_mu(guesses: Counts, mistakes: Counts, *, total: int, failing: float) -> float:
    """The largest μ that one of the games refutes, each at `failing`."""
    ceilings = _ceilings(guesses, mistakes, total, failing)
    best = 0.0
    for i in np.argsort(-ceilings):
        if ceilings[i] <= best:
            break
        best = _largest_refuted(int(guesses[i]), int(mistakes[i]), total, failing, best)
    return best


def _ceilings(guesses: Counts, mistakes: Counts, total: int, failing: float) -> Floats:
    """For each game, a μ that it cannot refute: its recursion would stop at the first step."""
    right, wrong = failing * (guesses - mistakes) / total, failing * mistakes / total
    ceilings: Floats = np.where(mistakes > 0, ndtri(np.maximum(right, tiny)) - ndtri(np.maximum(wrong, tiny)), np.inf)
    return np.where(mistakes < guesses, ceilings, 0.0)


def _largest_refuted(guesses: int, mistakes: int, total: int, failing: float, low: float) -> float:
    """The largest μ >= low that is refuted, to twelve digits; `low` if not even that is refuted."""
    if not refuted(low, guesses, mistakes, total=total, failing=failing):
        return low
    high = max(1.0, 2 * low)
    while refuted(high, guesses, mistakes, total=total, failing=failing):
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if refuted(middle, guesses, mistakes, total=total, failing=failing):
            low = middle
        else:
            high = middle
    return low


def refuted(mu: float, guesses: int, mistakes: int, *, total: int, failing: float) -> bool:
    """Whether no μ-GDP mechanism makes so few mistakes with probability `failing`.

    Let p_i be the probability of i correct guesses, and flip the coin of one canary drawn at random. If at least j
    guesses were correct and this one was, then at least j - 1 are correct now and this one is not. The first event has
    probability Σ_{i >= j} p_i i / total, the second Σ_{i >= j - 1} p_i (guesses - i) / total. The trade-off function
    bounds the second from below. Beginning with p = failing at the observed count, each j requires more p at j - 1. μ is
    refuted if more is required than there are guesses, and not refuted if nothing more is required.
    """
    correct = guesses - mistakes
    right, wrong, most = failing * correct / total, failing * mistakes / total, guesses / total
    for i in range(correct - 1, -1, -1):
        required = float(ndtr(ndtri(right) - mu))
        if required <= wrong:
            return False
        right += i / (guesses - i) * (required - wrong)
        wrong = required
        if right + wrong > most:
            return True
    return False


METHOD = GuessingMethod("Mahloujifar 2024", "Mahloujifar, Melis and Chaudhuri 2024, arXiv 2410.22235", _best_epsilon)
