"""Guesses about which canaries were observed, as used by one-run audits: guesses, abstentions and mistakes.

The one-run methods share one game. A fair coin decides for each of `total` canaries whether it is observed. An auditor
who has not seen the coins guesses some of them. More correct guesses than an epsilon allows refute that epsilon.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, whole_number
from coalmine.estimators.bounds import FEWEST
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.literature.thresholds import Counts, sorted_scores

HULL = "corrected for the number of corners of the ROC hull, not for their choice on the same scores"
THINNING_SEED = 20230  # seed of the random choice from the scores of the larger side
FIXED_HALVES = "a fair coin for each canary (here halves of fixed size, the larger side thinned at random)"


class Games(NamedTuple):
    """Games on the same `total` canaries: the number of guesses of each, and of mistakes among them."""

    guesses: Counts
    mistakes: Counts
    total: int


def hull_games(observed: npt.ArrayLike, unobserved: npt.ArrayLike) -> Games:
    """The "observed" guesses at each corner of the ROC hull."""
    present, absent = fair_halves(observed, unobserved)
    return Games(*hull_guesses(present, absent), total=2 * present.size)


def fixed_games(observed: npt.ArrayLike, unobserved: npt.ArrayLike) -> Games:
    """The most confident half, quarter, ... of the guesses."""
    present, absent = fair_halves(observed, unobserved)
    guesses = halvings(2 * present.size)
    return Games(guesses, mistakes_by_confidence(present, absent)[guesses], total=2 * present.size)


def coin_games(observed: npt.ArrayLike, unobserved: npt.ArrayLike) -> Games:
    """Guesses about canaries that a fair coin each left in or out: nearly all, the clearest half, a quarter, ...

    The guess is "observed" for the highest scores and "unobserved" for as many of the lowest. So neither the numbers nor
    the order of the guesses depend on the coins, and scores may depend on each other in any way. At ties, mistakes come
    first. Nearly all leaves out three times √total, as the coins rarely come out even.
    """
    present, absent = sorted_scores(observed, unobserved)
    total = present.size + absent.size
    scores, took_part = np.concatenate([present, absent]), np.repeat([True, False], [present.size, absent.size])
    from_above = np.append(0, np.cumsum(~took_part[np.lexsort((took_part, -scores))]))
    from_below = np.append(0, np.cumsum(took_part[np.lexsort((~took_part, scores))]))
    guesses = np.unique(np.append(total - 3 * math.isqrt(total), halvings(total)))[::-1]
    return Games(guesses, from_above[(guesses + 1) // 2] + from_below[guesses // 2], total=total)


@dataclass(frozen=True)
class GuessingMethod:
    """A published bound from guesses, each game with its share of the failing probability, and the rows that it gives.

    `best` is the largest bound over games.
    """

    name: str
    reference: str
    best: Callable[..., float]

    def hull_row(
        self, observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float, assumptions: str
    ) -> LiteratureRow:
        """The best number of "observed" guesses on the ROC hull, whose corners come from the same scores."""
        value = self.best(hull_games(observed, unobserved), delta=delta, confidence=confidence)
        return self._row("ROC hull", value, "heuristic", confidence, assumptions)

    def fixed_row(
        self, observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float, assumptions: str
    ) -> LiteratureRow:
        """The most confident half, quarter, ... of the guesses."""
        value = self.best(fixed_games(observed, unobserved), delta=delta, confidence=confidence)
        return self._row("fixed guesses", value, "valid bound", confidence, assumptions)

    def epsilon(
        self,
        guesses: SupportsIndex,
        mistakes: SupportsIndex,
        *,
        delta: float,
        total: SupportsIndex,
        confidence: float,
    ) -> float:
        """The bound from one game."""
        made, wrong, canaries = checked_counts(guesses, mistakes, total)
        return self.best(Games(np.array([made]), np.array([wrong]), canaries), delta=delta, confidence=confidence)

    def _row(self, which: str, value: float, kind: str, confidence: float, assumptions: str) -> LiteratureRow:
        return LiteratureRow(
            name=f"{self.name}, {which}",
            reference=self.reference,
            value=value,
            kind=kind,
            confidence=confidence,
            assumptions=f"{FIXED_HALVES}; {assumptions}",
            threshold="chosen on the same data, corrected",
        )


def fair_halves(observed: npt.ArrayLike, unobserved: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Equally many sorted scores of both sides: a seeded draw from the larger side, since the coins are fair.

    With ten unobserved canaries per observed one, always guessing "unobserved" is right in ten of eleven cases. An audit
    that assumes fair coins would take that for a leak.
    """
    present, absent = sorted_scores(observed, unobserved)
    size = min(present.size, absent.size)
    rng = np.random.default_rng(THINNING_SEED)
    first, second = (scores[np.sort(rng.permutation(scores.size)[:size])] for scores in (present, absent))
    return first, second


def hull_guesses(observed: Floats, unobserved: Floats) -> tuple[Counts, Counts]:
    """Guesses and mistakes of "observed if the score is at least t" at the corners of the ROC curve's convex hull.

    Only "observed" guesses (k+), none of "unobserved" (k-). Both ends are corners: no guesses, and guesses for all
    canaries. Scores must be sorted.
    """
    thresholds = np.append(np.inf, np.unique(np.concatenate([observed, unobserved]))[::-1])
    hits = observed.size - np.searchsorted(observed, thresholds)
    mistakes = unobserved.size - np.searchsorted(unobserved, thresholds)
    corners = _upper_hull(mistakes.tolist(), hits.tolist())
    return hits[corners] + mistakes[corners], mistakes[corners]


def mistakes_by_confidence(observed: Floats, unobserved: Floats) -> Counts:
    """Entry r: the mistakes among the r most confident guesses, k+ of "observed" and k- of "unobserved".

    A guess depends on which side of the median of all scores a canary lies; the farther it lies, the more confident the
    guess. So neither the guesses nor their order depend on who was observed. At ties, mistakes come first.
    """
    scores = np.concatenate([observed, unobserved])
    present = np.repeat([True, False], [observed.size, unobserved.size])
    distance = scores - np.median(scores)
    mistaken = np.where(present, distance <= 0, distance >= 0)
    order = np.lexsort((~mistaken, -np.abs(distance)))
    return np.append(0, np.cumsum(mistaken[order]))


def halvings(total: int) -> Counts:
    """Numbers of guesses fixed in advance: a half of the canaries, a quarter, and so on down to ten."""
    counts = [total // 2]
    while counts[-1] // 2 >= FEWEST:
        counts.append(counts[-1] // 2)
    return np.array(counts)


def checked_counts(guesses: SupportsIndex, mistakes: SupportsIndex, total: SupportsIndex) -> tuple[int, int, int]:
    """The counts of one game, rejected unless mistakes <= guesses <= total."""
    made = whole_number("guesses", guesses, minimum=1)
    wrong = whole_number("mistakes", mistakes, minimum=0)
    canaries = whole_number("total", total, minimum=1)
    if wrong > made:
        raise ValueError(f"mistakes must be at most the guesses, got {wrong} mistakes in {made} guesses")
    if made > canaries:
        raise ValueError(f"guesses must be at most the total of canaries, got {made} guesses for {canaries} canaries")
    return made, wrong, canaries


def _upper_hull(x: list[int], y: list[int]) -> list[int]:
    """Indices of the corners of the upper convex hull of the points, which are sorted by x, then by y."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1 and _not_above(x, y, hull[-2], hull[-1], i):
            hull.pop()
        hull.append(i)
    return hull


def _not_above(x: list[int], y: list[int], left: int, middle: int, right: int) -> bool:
    rise, run = y[middle] - y[left], x[middle] - x[left]
    return rise * (x[right] - x[middle]) <= (y[right] - y[middle]) * run
