"""Epsilon as training goes: the estimate from the first rounds of a log, at a few of them."""

from collections.abc import Iterable, Sequence

import numpy as np

from coalmine.audit.ladder import RUNGS, LadderReader, Scores
from coalmine.audit.result import CONFIDENCE, AuditResult
from coalmine.audit.views import Look
from coalmine.estimators.all_iterates import estimate_from_iterates
from coalmine.estimators.gaussian_fit import EpsilonEstimate, epsilon_estimate
from coalmine.estimators.variance import Variance

POINTS = 8


class EpsilonReader:
    """Takes one round after another, after `ladder` did, and estimates ε at a few, evenly spaced.

    Of canaries shown unequally often so far, the largest group speaks. The std is the null's or fitted as in the result.
    The final model is known at the end alone, so it is not here.
    """

    def __init__(self, ladder: LadderReader, numbers: Sequence[int], result: AuditResult, points: int = POINTS) -> None:
        places = np.linspace(len(numbers) / points - 1, len(numbers) - 1, points).round().astype(int)
        self._stops = {numbers[place] for place in places if place >= 0}
        self._ladder, self._delta = ladder, result.settings.delta
        self._fitted = {
            name for name, found in result.adversaries.items() if found.headline.estimate.variance.used == "fitted"
        }
        self._found: dict[str, list[tuple[int, EpsilonEstimate]]] = {}

    def add(self, look: Look) -> None:
        """Take the next round."""
        if look.item.number not in self._stops:
            return
        for rung, scores in largest_groups(self._ladder.scores(largest_groups=True)).items():
            variance: Variance = "fitted" if rung in self._fitted else "null"
            estimate = estimate_scores(scores, self._delta, variance)
            if estimate is not None and rung in RUNGS:
                self._found.setdefault(rung, []).append((look.item.number, estimate))

    @property
    def estimates(self) -> dict[str, list[tuple[int, EpsilonEstimate]]]:
        """Round and estimate for each rung that has more than one."""
        return {rung: line for rung, line in self._found.items() if len(line) > 1}


def largest_groups(found: Iterable[Scores]) -> dict[str, Scores]:
    """For each rung the scores of most canaries."""
    largest: dict[str, Scores] = {}
    for scores in found:
        if scores.rung not in largest or scores.observed.size > largest[scores.rung].observed.size:
            largest[scores.rung] = scores
    return largest


def estimate_scores(scores: Scores, delta: float, variance: Variance = "auto") -> EpsilonEstimate | None:
    """The estimate as the result has it, without a bound; None where there are too few scores to say anything."""
    try:
        if scores.null is None:
            return estimate_from_iterates(scores.observed, scores.unobserved, delta=delta)
        return epsilon_estimate(
            scores.observed,
            null=scores.null,
            delta=delta,
            variance=variance,
            confidence=None if scores.mixed else CONFIDENCE,
            null_dof=scores.null_dof,
        )
    except ValueError:  # too few, or all equal
        return None
