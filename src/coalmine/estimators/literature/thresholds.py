"""Threshold tests on two sets of scores, the basis of most published estimators."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import betainccinv

from coalmine.argument_checks import Floats, WrongTypeError, finite_array
from coalmine.estimators.bounds import score_array

Counts = npt.NDArray[np.int64]


def sorted_scores(observed: npt.ArrayLike, unobserved: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Both sets of scores in ascending order, rejected unless each has at least ten finite numbers."""
    return np.sort(score_array("observed", observed)), np.sort(score_array("unobserved", unobserved))


def score_tables(name: str, given: Sequence[npt.ArrayLike], *, fewest: int = 1) -> tuple[Floats, Floats]:
    """Scores with a row for each of several runs, checkpoints or rounds: equally many rows on both sides."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        received = f"{len(given)} things" if isinstance(given, (tuple, list)) else type(given).__name__
        raise WrongTypeError(f"{name} must be a pair of tables, observed and unobserved scores, got {received}")
    observed, unobserved = given
    tables = []
    for side, scores in (("observed", observed), ("unobserved", unobserved)):
        table = finite_array(f"{name}: {side} scores", scores)
        if table.ndim != 2 or table.shape[1] < fewest:
            raise ValueError(
                f"{name}: {side} scores must be a table with at least {fewest} scores per row, got shape {table.shape}"
            )
        tables.append(table)
    if tables[0].shape[0] != tables[1].shape[0]:
        raise ValueError(
            f"{name}: both tables must have the same number of rows, got {tables[0].shape[0]} observed and "
            f"{tables[1].shape[0]} unobserved"
        )
    return tables[0], tables[1]


def error_counts(observed: Floats, unobserved: Floats) -> tuple[Counts, Counts]:
    """False negatives and false positives of "observed if the score is at least t", t each observed score; both sorted.

    Only observed scores are tried as thresholds: moving another threshold up to the next score increases neither count.
    """
    false_negatives = np.searchsorted(observed, observed)
    false_positives = unobserved.size - np.searchsorted(unobserved, observed)
    return false_negatives, false_positives


def clopper_pearson(errors: npt.ArrayLike, count: int, failing: float) -> Floats:
    """Clopper and Pearson's one-sided upper bound on the rate of `errors` among `count`."""
    counts = np.asarray(errors, dtype=np.float64)
    bound = betainccinv(counts + 1, np.maximum(count - counts, 0.5), failing)
    return np.where(counts < count, bound, 1.0)
