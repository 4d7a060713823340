"""Jagielski et al. 2023 (arXiv 2205.06369): attacks on several checkpoints, combined into one score per canary.

The change of a canary's score between checkpoints is more informative than its final value: "delta" is its largest
increase from one checkpoint to the next, "back-front" its increase from the first to the last. The authors publish
attacks, not epsilons; epsilon here is that of Jagielski 2020 on the combined scores.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats
from coalmine.estimators.bounds import FEWEST, epsilon_lower_bound
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.literature.thresholds import score_tables

Checkpoints = tuple[npt.ArrayLike, npt.ArrayLike]
NEEDS = "needs scores at several checkpoints (checkpoints=)"


class Rises(NamedTuple):
    """How the canaries' scores changed over the checkpoints: the input of both attacks."""

    delta: Floats  # the largest increase from one checkpoint to the next
    back_front: Floats  # the increase from the first to the last


def jagielski2023_rows(
    checkpoints: Checkpoints | None, *, delta: float, confidence: float = 0.95
) -> tuple[LiteratureRow, ...]:
    """Clopper-Pearson at the best threshold on the combined scores, one row per combination: not a bound.

    `checkpoints` holds two tables, observed and unobserved scores, with a row for each checkpoint in order.
    """
    if checkpoints is None:
        return jagielski2023_missing(NEEDS, confidence=confidence)
    tables = score_tables("checkpoints", checkpoints, fewest=FEWEST)
    observed, unobserved = (rises_of(table) for table in tables)
    if observed is None or unobserved is None:
        return jagielski2023_missing("needs scores at two or more checkpoints, got one", confidence=confidence)
    return jagielski2023_rises(observed, unobserved, delta=delta, confidence=confidence)


def jagielski2023_rises(
    observed: Rises, unobserved: Rises, *, delta: float, confidence: float = 0.95
) -> tuple[LiteratureRow, ...]:
    """As jagielski2023_rows, from increases that were computed one checkpoint at a time."""
    values = [
        epsilon_lower_bound(present, null=absent, delta=delta, confidence=confidence, method="clopper-pearson")
        for present, absent in zip(observed, unobserved, strict=True)
    ]
    return _rows((values[0], values[1]), None, confidence)


def jagielski2023_missing(needs: str, *, confidence: float = 0.95) -> tuple[LiteratureRow, ...]:
    """Both rows without a value; `needs` states the missing input."""
    return _rows((None, None), needs, confidence)


def rises_of(checkpoints: Iterable[Floats]) -> Rises | None:
    """The changes of scores over the checkpoints, given in order; None for fewer than two checkpoints."""
    first = last = largest = None
    for scores in checkpoints:
        if last is None:
            first = scores
        else:
            largest = scores - last if largest is None else np.maximum(largest, scores - last)
        last = scores
    return None if first is None or last is None or largest is None else Rises(largest, last - first)


def _rows(values: tuple[float | None, float | None], needs: str | None, confidence: float) -> tuple[LiteratureRow, ...]:
    return tuple(
        LiteratureRow(
            name=f"Jagielski 2023, {name}",
            reference="Jagielski et al. 2023, arXiv 2205.06369",
            value=value,
            kind="heuristic",
            confidence=confidence,
            receives="intermediate models",
            assumptions="independent scores; holds at one threshold, and the best of all is taken",
            threshold="chosen on the same data, not corrected",
            needs=needs,
        )
        for name, value in zip(("delta", "back-front"), values, strict=True)
    )
