"""A lower bound on epsilon from two samples, by guessing which scores are of observed canaries (any law of the scores).

Sort all scores, and guess that the first r are observed, the last r unobserved, or both. Given the scores, the labels are
independent coins whose odds epsilon limits (Kairouz, Oh and Viswanath 2015; Steinke et al. 2023 count such guesses of one
model). So the number of right guesses refutes an epsilon by a binomial test. It uses both samples at once, where a bound on
each error rate spends half of the level on each.
"""

import math

import numpy as np
from scipy.special import bdtrc, bdtrik, betaincinv, expit, logit

from coalmine.argument_checks import Floats

FIRST = 16  # fewest guesses at one end; the next tests have twice as many each
SHARES = {"first": 0.25, "last": 0.25, "both": 0.5}  # of the level
EXCEPTIONS = 0.25  # most of the level for the canaries that delta exempts
HALVINGS = 50


def rank_lower_bound(observed: Floats, unobserved: Floats, *, delta: float, failing: float) -> float:
    """The largest epsilon that a count of right guesses refutes, at a failing probability of `failing` in all."""
    right, left = _right_guesses(observed, unobserved)
    sizes = guess_counts(observed.size, unobserved.size)
    exempt = [_exempt(size, delta, failing) for size in (observed.size, unobserved.size)]
    level = (failing - sum(spent for _, spent in exempt)) / len(sizes)
    free, odds = [number for number, _ in exempt], math.log(observed.size / unobserved.size)
    best = 0.0
    for count in sizes:
        first, last = max(int(right[count - 1]) - free[0], 0), max(int(left[count - 1]) - free[1], 0)
        best = max(
            best,
            float(logit(_share(first, count, level * SHARES["first"]))) - odds,
            float(logit(_share(last, count, level * SHARES["last"]))) + odds,
            _both(_share(first + last, 2 * count, level * SHARES["both"]), odds),
        )
    return best


def guess_counts(observed: int, unobserved: int) -> list[int]:
    """The numbers of guesses at one end: 16, 32, …, and as many as the smaller sample has."""
    most = min(observed, unobserved)
    return [*(FIRST << power for power in range(((most - 1) // FIRST).bit_length())), most]


def _right_guesses(observed: Floats, unobserved: Floats) -> tuple[Floats, Floats]:
    """How many of the first r are observed, and of the last r unobserved, for each r; ties count as wrong."""
    scores = np.concatenate([observed, unobserved])
    label = np.concatenate([np.ones(observed.size), np.zeros(unobserved.size)])
    return np.cumsum(label[np.lexsort((label, -scores))]), np.cumsum(1 - label[np.lexsort((-label, scores))])


def _exempt(size: int, delta: float, failing: float) -> tuple[int, float]:
    """How many canaries delta may exempt from epsilon, and the probability of more."""
    number = max(math.ceil(bdtrik(1 - failing * EXCEPTIONS, size, delta)) - 1, 0)
    while bdtrc(number, size, delta) > failing * EXCEPTIONS:
        number += 1
    return number, float(bdtrc(number, size, delta))


def _share(right: int, guesses: int, level: float) -> float:
    """Clopper and Pearson's lower limit of the probability that a guess is right."""
    return float(betaincinv(right, guesses - right + 1, level)) if right > 0 else 0.0


def _both(share: float, odds: float) -> float:
    """The epsilon at which guesses at both ends are right with this mean probability, 0 if it needs none.

    The tail of a sum of coins with this mean is at most that of a binomial (Hoeffding 1956).
    """
    low, high = 0.0, float(logit(share)) + abs(odds) if share > 0 else 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        short = expit(middle + odds) + expit(middle - odds) < 2 * share
        low, high = (middle, high) if short else (low, middle)
    return low
