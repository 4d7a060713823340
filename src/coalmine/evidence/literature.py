"""The published estimators on an audit's scores.

Most of them take the scores of one rung. Jagielski 2023 uses every checkpoint during training, and the log of an audit has
them: the product of a round's release with a canary is the increase of its score from one checkpoint to the next.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.estimators.bounds import FEWEST
from coalmine.estimators.literature.all_estimators import literature_rows
from coalmine.estimators.literature.jagielski2023 import (
    Rises,
    jagielski2023_missing,
    jagielski2023_rises,
    rises_of,
)
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.evidence.ladder import RUNGS, Scores, presented_times
from coalmine.log.recorded import RecordedRounds
from coalmine.measure.settings import Settings

SUMMED = "a checkpoint is the sum of what the rounds released so far, and a score the canary's product with it"
OWN = "checkpoints are the rounds after which the attack gave scores"


def published_rows(
    scores: Scores,
    *,
    delta: float,
    confidence: float = 0.95,
    log: RecordedRounds | None = None,
    settings: Settings | None = None,
) -> tuple[LiteratureRow, ...]:
    """Every published estimator on one rung's scores; none if there are too few scores.

    With the `log` of the rounds and the audit's `settings`, also those that use every round, on the same canaries.
    """
    if min(scores.observed.size, scores.unobserved.size) < FEWEST:
        return ()
    rows = literature_rows(scores.observed, scores.unobserved, delta=delta, confidence=confidence)
    if log is None or settings is None:
        return rows
    by_name = {row.name: row for row in _over_checkpoints(scores, log, settings, delta=delta, confidence=confidence)}
    rows = tuple(by_name.get(row.name, row) for row in rows)
    needs = canife_needs(log, settings)
    return tuple(replace(row, needs=needs) if row.name.startswith("CANIFE") else row for row in rows)


def checkpoint_scores(log: RecordedRounds, settings: Settings, rung: str) -> Iterator[Floats]:
    """Scores of all canaries, observed ones first, at one checkpoint after another.

    For the ladder's rungs they are products with the sum of the releases, which starts at 0: the initial model adds the
    same to each at every checkpoint. For a user's own attack they are its scores after each round.
    """
    if rung not in RUNGS:
        for item in log.rounds():
            if rung in item.scores:
                yield np.asarray(item.scores[rung], dtype=np.float64)
        return
    total, skipped = np.zeros(settings.total), len(log.numbers)
    yield total
    for item in log.rounds():
        total, skipped = total + item.norm * np.asarray(item.cosines, dtype=np.float64), skipped - 1
        yield total
    if skipped:  # a round of zeros increases no score, whenever it was
        yield total


def canife_needs(log: RecordedRounds, settings: Settings) -> str:
    """The input of CANIFE's composition that a log of rounds lacks.

    With ten canaries in a round, that round's epsilon could be computed. But rounds are composed as Poisson samples, and a
    log does not contain the probability that a client is in one: a schedule, for example, has none.
    """
    most = max((entry.present.size for entry in log.observed), default=0)
    needs = []
    if most < FEWEST:
        needs.append(
            f"{FEWEST} or more scores with the canary in each audited round (here at most {most} canaries are in one)"
        )
    if settings.noise is not None:
        needs.append("noise that is fresh in every round (here it is correlated)")
    needs.append(
        "the probability with which Poisson sampling puts a client into a round (the log says which canaries were in one, "
        "not with what probability clients are; sampling_probability=)"
    )
    return "needs " + "; ".join(needs)


def _over_checkpoints(
    scores: Scores, log: RecordedRounds, settings: Settings, *, delta: float, confidence: float
) -> tuple[LiteratureRow, ...]:
    """Jagielski 2023's rows on the canaries of the rung's scores, against all unobserved ones."""
    missing = max(log.numbers, default=0) - len(log.numbers)
    if missing and scores.rung in RUNGS:
        return jagielski2023_missing(
            f"needs what every round released: {missing} of rounds 1 to {max(log.numbers)} were not observed",
            confidence=confidence,
        )
    rises = rises_of(checkpoint_scores(log, settings, scores.rung))
    if rises is None:
        return jagielski2023_missing("needs scores at two or more checkpoints", confidence=confidence)
    members = np.arange(settings.canaries)
    if scores.presentations is not None:
        members = np.flatnonzero(presented_times(log, settings) == scores.presentations)
    if members.size < FEWEST:
        return jagielski2023_missing(
            f"needs {FEWEST} or more canaries that were presented equally often, got {members.size}",
            confidence=confidence,
        )
    observed = Rises(rises.delta[members], rises.back_front[members])
    unobserved = Rises(rises.delta[settings.canaries :], rises.back_front[settings.canaries :])
    rows = jagielski2023_rises(observed, unobserved, delta=delta, confidence=confidence)
    how = SUMMED if scores.rung in RUNGS else OWN
    return tuple(replace(row, assumptions=f"{row.assumptions}; {how}") for row in rows)
