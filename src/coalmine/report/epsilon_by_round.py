"""Epsilon as training goes: the estimate from the first rounds of a log, at a few of them."""

from collections.abc import Iterable

import numpy as np

from coalmine.audit.ladder import RUNGS, LadderReader, Scores
from coalmine.audit.result import CONFIDENCE
from coalmine.audit.views import looks
from coalmine.estimators.all_iterates import estimate_from_iterates
from coalmine.estimators.gaussian_fit import EpsilonEstimate, epsilon_estimate
from coalmine.estimators.variance import Variance
from coalmine.report.stored_run import Run

POINTS = 8
MOST = 8_000_000  # cosines that are read


def estimates_during(run: Run, points: int = POINTS) -> dict[str, list[tuple[int, EpsilonEstimate]]]:
    """Round and estimate for each rung at evenly spaced rounds; the final model is known at the end alone, so not here.

    Of canaries shown unequally often so far, the largest group speaks. The std is the null's or fitted as in the result.
    """
    if run.rounds is None or not run.rounds.kept:
        return {}
    rounds, settings = run.rounds.thinned(run.result.settings, most=MOST)
    numbers = [item.number for item in rounds.kept]
    used = {name: adversary.headline.estimate.variance.used for name, adversary in run.result.adversaries.items()}
    places = np.unique(np.linspace(len(numbers) / points - 1, len(numbers) - 1, points).round().astype(int))
    stops = {numbers[place] for place in places if place >= 0}
    reader, found = LadderReader(rounds.as_log, settings), dict[str, list[tuple[int, EpsilonEstimate]]]()
    for look in looks(rounds.as_log, settings):
        reader.add(look)
        if look.item.number not in stops:
            continue
        for rung, scores in largest_groups(reader.scores()).items():
            variance: Variance = "fitted" if used.get(rung) == "fitted" else "null"
            estimate = estimate_scores(scores, settings.delta, variance)
            if estimate is not None and rung in RUNGS:
                found.setdefault(rung, []).append((look.item.number, estimate))
    return {rung: line for rung, line in found.items() if len(line) > 1}


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
