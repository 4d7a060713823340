"""Epsilon during training: the estimate from the rounds so far, at a few evenly spaced rounds."""

from collections.abc import Iterable, Sequence

import numpy as np

from coalmine.estimators.all_iterates import estimate_from_iterates
from coalmine.estimators.gaussian_fit import EpsilonEstimate, epsilon_estimate
from coalmine.estimators.variance import Variance
from coalmine.evidence.gaussian_bound import CONFIDENCE
from coalmine.evidence.ladder import RUNGS, LadderReader, Scores
from coalmine.evidence.views import RoundViews
from coalmine.result.audit_result import AuditResult

POINTS = 8


class EpsilonReader:
    """Reads the rounds in order, each after `ladder` has read it, and estimates ε at a few evenly spaced rounds.

    If canaries have had different numbers of presentations so far, the largest group is used. The standard deviation is the
    null's, or fitted, as in the result. The rungs of the final model are left out: that model exists only at the end.
    """

    def __init__(self, ladder: LadderReader, numbers: Sequence[int], result: AuditResult, points: int = POINTS) -> None:
        places = np.linspace(len(numbers) / points - 1, len(numbers) - 1, points).round().astype(int)
        self._stops = {numbers[place] for place in places if place >= 0}
        self._ladder, self._delta = ladder, result.settings.delta
        self._fitted = {
            name
            for name, adversary in result.adversaries.items()
            if adversary.headline.estimate.variance.used == "fitted"
        }
        self._lines: dict[str, list[tuple[int, EpsilonEstimate]]] = {}

    def add(self, look: RoundViews) -> None:
        """Read the next round."""
        if look.item.number not in self._stops:
            return
        for rung, scores in largest_groups(self._ladder.scores(largest_groups=True)).items():
            variance: Variance = "fitted" if rung in self._fitted else "null"
            estimate = estimate_scores(scores, self._delta, variance)
            if estimate is not None and rung in RUNGS:
                self._lines.setdefault(rung, []).append((look.item.number, estimate))

    @property
    def estimates(self) -> dict[str, list[tuple[int, EpsilonEstimate]]]:
        """For each rung with more than one estimate, pairs of a round and an estimate."""
        return {rung: line for rung, line in self._lines.items() if len(line) > 1}


def largest_groups(groups: Iterable[Scores]) -> dict[str, Scores]:
    """For each rung, the group of scores with the most canaries."""
    largest: dict[str, Scores] = {}
    for scores in groups:
        if scores.rung not in largest or scores.observed.size > largest[scores.rung].observed.size:
            largest[scores.rung] = scores
    return largest


def estimate_scores(scores: Scores, delta: float, variance: Variance = "auto") -> EpsilonEstimate | None:
    """The estimate as in the result, without a bound; None if there are too few scores."""
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
    except ValueError:  # too few scores, or all are equal
        return None
