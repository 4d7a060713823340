"""Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846): epsilon from the correct guesses in one training run.

Under (epsilon, 0) each guess is right with probability at most e^ε / (1 + e^ε), whatever the others were, so the
number of correct guesses is stochastically at most binomial. Delta adds F correct guesses, where F has mean at most 2 δ
times the number of canaries and any distribution: all canaries may be exposed at once.
"""

from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import betaincc, betainccinv, betaincinv, expit, gammaln, log_expit

from coalmine.argument_checks import Floats, unit_interval
from coalmine.estimators.literature.guesses import HULL, Games, GuessingMethod
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.literature.thresholds import Counts

FIXED = "leaks may be correlated between canaries"


def steinke_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """The best number of "observed" guesses on the ROC hull, Bonferroni over its corners: not a bound.

    The corners come from the same scores, so the correction does not cover all thresholds: with fair coins, a vanishing
    delta and no leak the value is above 0 in more than 5 % of runs.
    """
    levels = {"delta": delta, "confidence": confidence}
    return METHOD.hull_row(observed, unobserved, assumptions=HULL, **levels)


def steinke_fixed_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """The most confident half, quarter, ... of the guesses, Bonferroni over these: a bound, as published."""
    levels = {"delta": delta, "confidence": confidence}
    return METHOD.fixed_row(observed, unobserved, assumptions=FIXED, **levels)


def one_run_epsilon(
    guesses: SupportsIndex, mistakes: SupportsIndex, *, delta: float, total: SupportsIndex, confidence: float = 0.95
) -> float:
    """A lower bound on epsilon from one run: `mistakes` in `guesses` for `total` canaries, and no guess for the others.

    Holds if the number of guesses was fixed before the coins were seen.

    >>> round(one_run_epsilon(100, 10, delta=1e-5, total=1000), 4)
    1.6261
    """
    return METHOD.epsilon(guesses, mistakes, delta=delta, total=total, confidence=confidence)


def _best_epsilon(games: Games, *, delta: float, confidence: float) -> float:
    """The largest bound over the given games, each with its share of the failing probability."""
    guesses, mistakes, total = games
    delta, failing = unit_interval("delta", delta), (1 - unit_interval("confidence", confidence)) / guesses.size
    ceilings = pure_epsilon(guesses, mistakes, failing)  # a positive delta only lowers them
    best = 0.0
    for i in np.argsort(-ceilings):
        if ceilings[i] <= best:
            break
        best = _inverted(int(guesses[i]), int(mistakes[i]), 2 * total * delta, failing, best, float(ceilings[i]))
    return best


def pure_epsilon(guesses: Counts, mistakes: Counts, failing: float) -> Floats:
    """The bound at delta = 0: log odds of the Clopper-Pearson bound on the rate of correct guesses, at least 0."""
    correct = guesses - mistakes
    some = np.maximum(correct, 1)
    right, wrong = betaincinv(some, mistakes + 1, failing), betainccinv(mistakes + 1, some, failing)
    return np.where(correct > 0, np.maximum(np.log(right) - np.log(wrong), 0.0), 0.0)


def _inverted(guesses: int, mistakes: int, mean_exposed: float, failing: float, low: float, high: float) -> float:
    """The epsilon in [low, high] that is just not refuted; `low` if not even that is refuted."""
    wrong_guesses = np.arange(mistakes + 1, guesses + 1)
    log_ways = gammaln(guesses + 1) - gammaln(wrong_guesses + 1) - gammaln(guesses - wrong_guesses + 1)
    spread = np.arange(1, guesses - mistakes + 1)

    def excess(epsilon: float) -> float:
        """The largest probability of at most this many mistakes, minus `failing`.

        The worst F of mean `mean_exposed` has only the values 0 and some i, and adds Pr(i fewer mistakes suffice) / i.
        """
        log_pmf = log_ways + wrong_guesses * log_expit(-epsilon) + (guesses - wrong_guesses) * log_expit(epsilon)
        gain = (np.cumsum(np.exp(log_pmf)) / spread).max()
        return float(betaincc(mistakes + 1, guesses - mistakes, expit(-epsilon)) + mean_exposed * gain - failing)

    if excess(low) >= 0:
        return low
    return float(brentq(excess, low, high, xtol=1e-12)) if excess(high) > 0 else high


METHOD = GuessingMethod("Steinke 2023", "Steinke, Nasr and Jagielski 2023, arXiv 2305.08846", _best_epsilon)
