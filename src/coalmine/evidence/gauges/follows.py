"""Gauge of the noise's size against that of the updates."""

import math
from collections.abc import Iterator

import numpy as np
from scipy.special import ndtri

from coalmine.evidence import faults
from coalmine.evidence.gauges.gauge import Gauge, GaugeResult, Statistic, Symptom
from coalmine.evidence.gauges.gaussian import margin_of

SLOPE = 0.05  # smallest slope of the noise's variance against another vector's size that fails
ADVICE = (
    "The noise is larger where updates are larger, so it reveals them and protects small values less. Look for "
    "noise that is multiplied by the updates, or scaled coordinate by coordinate after it is drawn."
)
CAUSE = "the noise is larger where updates are larger. Add noise of the same std to every coordinate"


class Follows(Gauge):
    """Does the noise depend on the updates?"""

    name = "dependence on updates"
    order = 90
    in_alarm = False
    OTHERS = Statistic(
        name="noise follows others",
        meaning="slope of the noise's variance against the size of the others",
        law="normal; must exceed 0.05",
        advice=ADVICE,
    )
    CANARIES = Statistic(
        name="noise follows canaries",
        meaning="slope of the noise's variance against the size of the canaries",
        law="normal; must exceed 0.05",
        advice=ADVICE,
    )
    WITH_OTHERS = Symptom(
        name="noise follows others",
        of=OTHERS,
        always=faults.SIGNAL_IN_NOISE,
        sometimes=(*faults.WRONG_OTHERS, *faults.BARE_PARTS, faults.NOISE_AFTER_ADAM),
        never=(*faults.BOUNDED_NOISE, faults.LAPLACE_NOISE),
        precedence=10,
        cause=CAUSE,
    )
    WITH_CANARIES = Symptom(
        name="noise follows canaries",
        of=CANARIES,
        sometimes=(*faults.MIXED_NOISE, faults.NOISE_AFTER_ADAM, faults.LAPLACE_NOISE),
        never=faults.BOUNDED_NOISE,
        precedence=10,
        cause=CAUSE,
    )

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Whether the noise is larger where the sum of all other updates, or the canaries' sum, is larger."""
        law = self.rounds.law
        rounds, repeated = law.counted, law.repeated
        least = SLOPE + 5 * float(law.rounding(rounds).max(initial=0.0))
        for place, statistic in enumerate((self.OTHERS, self.CANARIES)):
            measured = [item for item in rounds if item.law_follows is not None and item.law_follows.size > 2 * place]
            readings = np.array(
                [item.law_follows[2 * place : 2 * place + 2] for item in measured if item.law_follows is not None]
            )
            if not measured or not readings.any():
                continue
            pooled = float(readings[:, 0].sum()) / math.sqrt(len(measured) * repeated)
            slope = float(readings[:, 1].mean())
            one, every = -float(ndtri(level / (8 * len(measured)))), -float(ndtri(level / 8))
            outside = (np.abs(readings[:, 0]) > one) & (np.abs(readings[:, 1]) > least)
            odd = abs(pooled) > every and abs(slope) > least
            reading, limit = slope, margin_of(slope, pooled, every, least)
            if outside.any() and not odd:  # only single rounds fail
                worst = np.flatnonzero(outside)[np.abs(readings[outside, 0]).argmax()]
                reading = float(readings[worst, 1])
                limit = margin_of(reading, float(readings[worst, 0]), one, least)
            yield statistic.result(
                reading,
                limits=(-limit, limit),
                flagged=(measured[index].number for index in np.flatnonzero(outside)),
                failed=odd or bool(outside.any()),
                values=readings[:, 1],
            )
