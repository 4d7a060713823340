"""Jagielski et al. 2023 (arXiv 2205.06369): attacks on several checkpoints, combined into one score of each canary.

What a canary's score does between two checkpoints tells more than where it ends: "delta" is its largest rise from one to
the next, "back-front" its rise from the first to the last. They publish attacks, not epsilons; epsilon here is that of
Jagielski 2020 on the combined scores.
"""

import numpy as np
import numpy.typing as npt

from coalmine.checks import Floats
from coalmine.estimators.bounds import FEWEST, epsilon_lower_bound
from coalmine.estimators.literature.row import LiteratureRow
from coalmine.estimators.literature.thresholds import score_tables

Checkpoints = tuple[npt.ArrayLike, npt.ArrayLike]


def jagielski2023_rows(
    checkpoints: Checkpoints | None, *, delta: float, confidence: float = 0.95
) -> tuple[LiteratureRow, ...]:
    """Clopper-Pearson at the best threshold on the combined scores, one row for each way to combine: no bound.

    `checkpoints` holds two tables, observed and unobserved scores, with a row for each checkpoint in order.
    """
    tables = None if checkpoints is None else score_tables("checkpoints", *checkpoints, fewest=FEWEST)
    rows = []
    for name, combine in (("delta", largest_rise), ("back-front", whole_rise)):
        value, needs = None, "needs scores at several checkpoints (checkpoints=)"
        if tables is not None and tables[0].shape[0] < 2:
            needs = "needs scores at two or more checkpoints, got one"
        elif tables is not None:
            observed, unobserved = (combine(table) for table in tables)
            value = epsilon_lower_bound(
                observed, null=unobserved, delta=delta, confidence=confidence, method="clopper-pearson"
            )
        rows.append(
            LiteratureRow(
                name=f"Jagielski 2023, {name}",
                reference="Jagielski et al. 2023, arXiv 2205.06369",
                value=value,
                kind="heuristic",
                confidence=confidence,
                controls="train data",
                receives="intermediate models",
                assumptions="independent scores; holds at one threshold, and the best of all is taken",
                threshold="chosen on the same data, not corrected",
                needs=None if value is not None else needs,
            )
        )
    return tuple(rows)


def largest_rise(scores: Floats) -> Floats:
    """Each canary's largest rise from one checkpoint to the next; a row for each checkpoint."""
    return np.asarray(np.diff(scores, axis=0).max(axis=0))


def whole_rise(scores: Floats) -> Floats:
    """Each canary's rise from the first checkpoint to the last."""
    return np.asarray(scores[-1] - scores[0])
