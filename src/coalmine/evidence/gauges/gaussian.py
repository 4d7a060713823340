"""Gauge of the noise's law in all coordinates together: is it Gaussian?"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from scipy.special import chdtrc, chdtri, ndtri, pdtr, pdtrc

from coalmine.argument_checks import Floats
from coalmine.estimators.normality import anscombe_glynn
from coalmine.estimators.null import CosineNull
from coalmine.evidence import faults
from coalmine.evidence.gauges.gauge import Gauge, GaugeResult, Results, Statistic, Symptom
from coalmine.measure.noise_law import CELL, CELLS
from coalmine.measure.round import Round

KURTOSIS_OFF = 0.02  # smaller departures from 3 come from rounding, and their privacy cost is negligible
DIVERGENCE = 2e-4  # chi-squared divergence from a Gaussian below which rounding explains it
EXPECTED = 20.0  # fewest expected counts in a cell of the histogram; smaller cells are merged
TAIL_RATIO = 0.75  # ratio to the expected number of large values, or its inverse; closer to 1, rounding explains it
FIRST_TAIL = 3.0  # standard deviations
NOT_GAUSSIAN = (
    "The noise is not Gaussian. Find out which sampler produces it. Look for uniform or Laplace noise, for "
    "truncated draws, and for sums of too few uniform numbers."
)


class Gaussian(Gauge):
    """Is the noise Gaussian?

    The accounting holds for no other law. Measured over all coordinates of all rounds, standardised by layer.
    """

    name = "Gaussian law"
    order = 50
    in_alarm = False
    KURTOSIS = Statistic(
        name="shape",
        meaning="fourth moment of the noise over its squared variance, 3 for a Gaussian",
        law="d·Σr⁴/(Σr²)² is normal after Anscombe and Glynn's transform (1983)",
        advice=NOT_GAUSSIAN,
    )
    DISTRIBUTION = Statistic(
        name="distribution",
        meaning="chi-squared distance of the noise's histogram from a Gaussian, per cell",
        law="Pearson's χ² over cells of 1/8 standard deviation",
        advice=NOT_GAUSSIAN,
        seen="distribution",
        unseen="distribution and grid (release and `others` are rounded too coarsely)",
    )
    TAILS = Statistic(
        name="tails",
        meaning="number of large noise values over that of a Gaussian",
        law="Poisson, beyond 3, 3.25, … standard deviations; must lie outside 3/4 … 4/3",
        advice=NOT_GAUSSIAN,
    )
    HEAVY = Symptom(
        name="heavy tails",
        of=KURTOSIS,
        always=(faults.LAPLACE_NOISE, *faults.SIGNAL_IN_NOISE),
        sometimes=(*faults.WRONG_OTHERS, *faults.BARE_PARTS, faults.SMALL_TENSOR_WITHOUT_NOISE, faults.COARSE_GRID),
        precedence=3,
        cause="the noise has heavier tails than a Gaussian, as Laplace noise has, or its std differs between "
        "coordinates. Draw it from one Gaussian: the accounting holds for no other law",
    )
    LIGHT = Symptom(
        name="light tails",
        of=KURTOSIS,
        always=(faults.COIN_FLIPS, *faults.BOUNDED_NOISE),
        precedence=2,
        cause="the noise has lighter tails than a Gaussian, as uniform or truncated noise has. Draw it from a "
        "Gaussian: the accounting holds for no other law",
    )
    HISTOGRAM = Symptom(
        name="distribution",
        of=DISTRIBUTION,
        always=(faults.COIN_FLIPS, faults.COARSE_GRID, faults.LAPLACE_NOISE),
        sometimes=(
            *faults.MIXED_NOISE,
            faults.NOISE_REUSED,
            faults.SMALL_TENSOR_WITHOUT_NOISE,
            *faults.BOUNDED_NOISE,
            faults.FINE_GRID,
            faults.NOISE_IN_PAIRS,
            *faults.POOLED_NOISE,
        ),
        precedence=1,
        cause="the noise is not Gaussian. Draw it from a Gaussian: the accounting holds for no other law",
    )

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Every statistic that has its inputs; a correct run fails one with probability `level`."""
        if self.rounds.law.all:
            yield self._kurtosis(self.rounds.law.all, level)
        if smooth := self.rounds.law.smooth:
            yield self._distribution(smooth, level)
            yield self._tails(smooth, level)

    @classmethod
    def shown(cls, results: Results) -> Iterator[Symptom]:
        """If moment and extremes disagree, the moment is more reliable."""
        shape, tails = results.outside(cls.KURTOSIS), results.outside(cls.TAILS)
        reading = shape.smallest / 3 if shape else tails.smallest if tails else 1.0
        if shape or tails:
            yield cls.LIGHT if reading < 1 else cls.HEAVY
        yield from ([cls.HISTOGRAM] if results.outside(cls.DISTRIBUTION) else [])

    def _kurtosis(self, rounds: list[Round], level: float) -> GaugeResult:
        """The fourth moment over the squared second, pooled over rounds and layers: 3 for a Gaussian."""
        law = self.rounds.law
        sizes, repeated = law.sizes, law.repeated
        moments = np.stack([item.law_moments.reshape(-1, 3) for item in rounds if item.law_moments is not None])
        values = sizes * moments[:, :, 2] / moments[:, :, 1] ** 2
        scores = np.asarray(anscombe_glynn(values, sizes))
        pooled = float((np.sqrt(sizes) * scores).sum() / math.sqrt(sizes.sum() * len(rounds) * repeated))
        by_round = (np.sqrt(sizes) * scores).sum(axis=1) / math.sqrt(sizes.sum())
        weighted = (sizes * values * (sizes + 2) / sizes).sum(axis=1) / sizes.sum()
        reading = float(weighted.mean())
        limit, one = -float(ndtri(level / 4)), -float(ndtri(level / (4 * len(rounds))))
        spread = math.sqrt(24 * repeated / (sizes.sum() * len(rounds)))
        off = KURTOSIS_OFF + 6 * float(law.rounding(rounds).max())
        odd = abs(pooled) > limit and abs(reading - 3) > off
        flagged = np.flatnonzero((np.abs(by_round) > one) & (np.abs(weighted - 3) > off))
        margin = max(limit * spread, off)
        if odd:
            margin = margin_of(reading - 3, float(pooled), limit, off)
        elif flagged.size:  # only single rounds fail
            worst = flagged[np.abs(by_round[flagged]).argmax()]
            reading = float(weighted[worst])
            margin = margin_of(reading - 3, float(by_round[worst]), one, off)
        return self.KURTOSIS.result(
            reading,
            limits=(3 - margin, 3 + margin),
            flagged=(rounds[index].number for index in flagged),
            failed=(odd or flagged.size > 0) and not law.is_coarse(rounds),
            values=weighted,
        )

    def _counts(self, rounds: list[Round]) -> tuple[Floats, Floats]:
        """The histogram of all coordinates of all rounds, and the expected one; fewer if rounds are correlated."""
        counts = np.sum([item.law_counts for item in rounds if item.law_counts is not None], axis=0).astype(np.float64)
        expected = np.asarray(
            len(rounds) * sum(size * _cell_probabilities(int(size)) for size in self.rounds.law.sizes)
        )
        return counts / self.rounds.law.repeated, expected / self.rounds.law.repeated

    def _distribution(self, rounds: list[Round], level: float) -> GaugeResult:
        """Pearson's test of the histogram against the law of standardised Gaussian noise."""
        observed, predicted = _merged_cells(*self._counts(rounds))
        statistic, freedom = float(np.sum((observed - predicted) ** 2 / predicted)), len(predicted) - 1
        divergence = (statistic - freedom) / float(predicted.sum())
        limit = max(float(chdtri(freedom, level)) / freedom, 1 + DIVERGENCE * float(predicted.sum()) / freedom)
        failed = chdtrc(freedom, statistic) < level and divergence > DIVERGENCE
        failed = failed and not self.rounds.law.is_coarse(rounds)
        return self.DISTRIBUTION.result(statistic / freedom, limits=(0.0, limit), failed=failed)

    def _tails(self, rounds: list[Round], level: float) -> GaugeResult:
        """The number of values beyond 3, 3.25, ... standard deviations over that of a Gaussian."""
        counts, expected = self._counts(rounds)
        first, step = round(FIRST_TAIL / CELL), round(0.25 / CELL)
        middle = CELLS // 2 + 1  # the first cell above 0
        tested = []
        for cells in range(first, CELLS // 2 + 1, step):
            observed, predicted = (
                float(x[middle + cells :].sum() + x[: middle - cells].sum()) for x in (counts, expected)
            )
            few, many = float(pdtr(observed, predicted)), float(pdtrc(observed - 1, predicted)) if observed else 1.0
            tested.append((observed / predicted if predicted else 1.0, min(few, many)))
        share = level / (2 * len(tested))
        odd = [ratio for ratio, p in tested if p < share and not TAIL_RATIO <= ratio <= 1 / TAIL_RATIO]
        return self.TAILS.result(
            odd[0] if odd else tested[0][0],
            limits=(TAIL_RATIO, 1 / TAIL_RATIO),
            failed=bool(odd) and not self.rounds.law.is_coarse(rounds),
            values=np.array([ratio for ratio, _ in tested]),
        )


def margin_of(departure: float, score: float, limit: float, least: float) -> float:
    """How far a reading may depart from its expected value, if its `score` may reach `limit`."""
    return max(abs(departure * limit / score) if score else 0.0, least)


@lru_cache(maxsize=4096)
def _cell_probabilities(size: int) -> Floats:
    """Probabilities of the cells, for a coordinate of a Gaussian vector of this size over its own standard deviation."""
    edges = (np.arange(CELLS + 1) - CELLS // 2) * CELL
    below = np.asarray(CosineNull(max(size, 2), scale=math.sqrt(size)).cdf(edges))
    return np.diff(np.concatenate([[0.0], below, [1.0]]))


def _merged_cells(counts: Floats, expected: Floats) -> tuple[Floats, Floats]:
    """The cells, merged from both ends inwards until each expects enough counts."""
    observed, predicted = list(counts), list(expected)
    for end in (0, -1):
        while len(predicted) > 2 and predicted[end] < EXPECTED:
            for cells in (observed, predicted):
                first = cells.pop(end)
                cells[end] += first
    while len(predicted) > 2 and min(predicted) < EXPECTED:  # with few coordinates the middle has small cells too
        joined = range(0, len(predicted) - 1, 2)
        odd = len(predicted) % 2
        observed = [observed[i] + observed[i + 1] for i in joined] + observed[len(observed) - odd :] * odd
        predicted = [predicted[i] + predicted[i + 1] for i in joined] + predicted[len(predicted) - odd :] * odd
    return np.array(observed), np.array(predicted)
