"""Poisson sampling with noise that varies from round to round."""

import math
import warnings
from dataclasses import replace
from functools import lru_cache

import numpy as np

from coalmine.estimators.amplification.poisson import loss_interval
from coalmine.estimators.sampling import NO_SCHEDULE, Poisson, Strengths

MOST_STRENGTHS = 32  # most different strengths of rounds that are composed; more are rounded
VARIED_ERROR, LARGEST_STEP = 2e-4, 2e-3  # approximate error of epsilon of rounds with different noise; largest step


@lru_cache(maxsize=4096)
def composed_epsilon(noise: float, sampling: Poisson, delta: float, coarser: int = 1) -> float:
    """The PLD's epsilon of Poisson sampled rounds with different noise."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    plain = replace(sampling, strengths=NO_SCHEDULE)
    steps = [loss_interval(noise / strength, plain) for strength, _ in sampling.strengths]
    enough = min(LARGEST_STEP, math.sqrt(8 * VARIED_ERROR / sampling.rounds))
    accountant = PLDAccountant(value_discretization_interval=coarser * max(min(steps), enough))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for strength, count in sampling.strengths:
            event = PoissonSampledDpEvent(sampling.probability, GaussianDpEvent(noise / strength))
            accountant.compose(event, count)
        return float(accountant.get_epsilon(delta))


def merged_strengths(strengths: Strengths) -> tuple[Strengths, float]:
    """At most MOST_STRENGTHS different strengths, and the relative error of epsilon that this may cause.

    Neighbours on a logarithmic grid are replaced by their root mean square, to which epsilon is stationary: the error is
    of second order in the width of a cell.
    """
    if len(strengths) <= MOST_STRENGTHS:
        return strengths, 0.0
    values, counts = (np.array(column, dtype=np.float64) for column in zip(*strengths, strict=True))
    width = math.log(float(values.max() / values.min())) / (MOST_STRENGTHS - 1)
    place = np.rint(np.log(values / values.min()) / width).astype(np.int64)
    merged = []
    for each in np.unique(place):
        inside = place == each
        count = float(counts[inside].sum())
        merged.append((math.sqrt(float(counts[inside] @ values[inside] ** 2) / count), round(count)))
    return tuple(merged), 2 * width**2
