"""Mahloujifar, Melis and Chaudhuri 2024 (arXiv 2410.22235): auditing f-differential privacy in one run.

The same game as Steinke et al. 2023, tested against a whole trade-off function f at once, not one (epsilon, delta).
Here f is that of a Gaussian mechanism, so the test refutes values of μ, and μ gives epsilon at any delta. The result is
larger than Steinke's if the mechanism is Gaussian, and is not a bound otherwise.
"""

import math
from collections.abc import Callable
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
    return _largest_refuted(gaussian_law, guesses, mistakes, total, failing, ceilings)


def _ceilings(guesses: Counts, mistakes: Counts, total: int, failing: float) -> Floats:
    """For each game, a μ that it cannot refute: its recursion would stop at the first step."""
    right, wrong = failing * (guesses - mistakes) / total, failing * mistakes / total
    ceilings: Floats = np.where(mistakes > 0, ndtri(np.maximum(right, tiny)) - ndtri(np.maximum(wrong, tiny)), np.inf)
    return np.where(mistakes < guesses, ceilings, 0.0)


def any_law_epsilon(games: Games, *, delta: float, confidence: float) -> float:
    """The largest epsilon that the games refute for every (epsilon, delta)-DP mechanism, each game with its share.

    It uses the trade-off function of (epsilon, delta) where the others use the Gaussian one. A delta costs less than in
    Steinke's bound: it is compared with the failing probability, not with this over the number of canaries.

    >>> game = Games(np.array([1000]), np.array([0]), 1000)
    >>> round(any_law_epsilon(game, delta=1e-5, confidence=0.999), 2)
    4.97
    """
    guesses, mistakes, total = games
    delta, failing = unit_interval("delta", delta), (1 - unit_interval("confidence", confidence)) / guesses.size
    right, wrong = failing * (guesses - mistakes) / total, failing * mistakes / total
    with np.errstate(divide="ignore", invalid="ignore"):
        ceilings = np.where(right > delta, np.log(np.maximum(right - delta, 0.0)) - np.log(wrong), 0.0)

    def law(epsilon: float) -> Callable[[float], float]:
        return lambda rate: math.exp(-epsilon) * (rate - delta)

    return _largest_refuted(law, guesses, mistakes, total, failing, ceilings)


def gaussian_law(mu: float) -> Callable[[float], float]:
    """The rate of wrong guesses that a rate of right ones needs under μ-GDP."""
    return lambda rate: float(ndtr(ndtri(rate) - mu))


def _largest_refuted(
    law: Callable[[float], Callable[[float], float]],
    guesses: Counts,
    mistakes: Counts,
    total: int,
    failing: float,
    ceilings: Floats,
) -> float:
    """The largest parameter of the law that one of the games refutes, to twelve digits; 0 if none is refuted."""
    best = 0.0
    for i in np.argsort(-ceilings):
        made, wrong = int(guesses[i]), int(mistakes[i])
        if ceilings[i] <= best or not refuted(law(best), made, wrong, total=total, failing=failing):
            continue
        low, high = best, max(1.0, 2 * best)
        while refuted(law(high), made, wrong, total=total, failing=failing):
            low, high = high, 2 * high
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            if refuted(law(middle), made, wrong, total=total, failing=failing):
                low = middle
            else:
                high = middle
        best = low
    return best


def refuted(needed: Callable[[float], float], guesses: int, mistakes: int, *, total: int, failing: float) -> bool:
    """Whether no mechanism with this trade-off makes so few mistakes with probability `failing`.

    `needed` is the least rate of an event under one neighbour, from its rate under the other. Let p_i be the probability
    of i correct guesses, and flip the coin of one canary drawn at random. If at least j guesses were correct and this one
    was, then at least j - 1 are correct now and this one is not. The first event has probability Σ_{i >= j} p_i i / total,
    the second Σ_{i >= j - 1} p_i (guesses - i) / total. The trade-off function bounds the second from below. Beginning
    with p = failing at the observed count, each j requires more p at j - 1. The law is refuted if more is required than
    there are guesses, and not refuted if nothing more is required.
    """
    correct = guesses - mistakes
    right, wrong, most = failing * correct / total, failing * mistakes / total, guesses / total
    for i in range(correct - 1, -1, -1):
        required = needed(right)
        if required <= wrong:
            return False
        right += i / (guesses - i) * (required - wrong)
        wrong = required
        if right + wrong > most:
            return True
    return False


METHOD = GuessingMethod("Mahloujifar 2024", "Mahloujifar, Melis and Chaudhuri 2024, arXiv 2410.22235", _best_epsilon)
