"""Gauge of a grid on which the noise or the release lies."""

import math
from collections.abc import Iterator

import numpy as np

from coalmine.evidence import faults
from coalmine.evidence.gauges.gauge import Gauge, GaugeResult, Results, Statistic, Symptom
from coalmine.evidence.gauges.gauged_rounds import ALIGNED, COARSE_RELEASE, GRID_STRENGTH
from coalmine.evidence.gauges.gaussian import Gaussian
from coalmine.evidence.gauges.length import Length
from coalmine.measure.round import Round

GRID_PEAK = 3.0  # smallest ratio of the peak to its surroundings
MOST = 0.5  # reading, 0 to 1: values on a grid read nearly 1
FEW_VALUES = 0.8  # reading; with a wrong histogram as well, the noise takes a handful of values
TAKES_FEW_VALUES = "the noise takes few values, and the sum does not. Round both or neither"


class Grid(Gauge):
    """Does the noise lie on a grid of values, so that an attacker can subtract it?

    A release that lies on the same grid costs no privacy, but a coarse one hides the law of the noise.
    """

    name = "grid"
    order = 70
    GRID = Statistic(
        name="grid",
        meaning="how far the noise lies on a grid of values, 0 to 1",
        law="the largest |mean exp(2πi·f·r/σ̂)| over frequencies f from 1 to 50: d times its square is Exp(1)",
        advice="The noise takes few values, and the release lies on a finer grid, so an attacker can subtract the "
        "noise. Look for noise that is rounded, quantised or drawn as integers before it is added.",
        refutes=1.0,
        seen="a grid of values",
        sees_grids=True,
    )
    ROUNDING = Statistic(
        name="rounding",
        meaning="share of the residual's variance that comes from rounding the release",
        law="must stay below 10 %, where the release is rounded",
        advice="The release is rounded too coarsely to see the noise. Pass model_delta before it is rounded.",
        item="",
    )
    ON_GRID = Symptom(
        name="grid",
        of=GRID,
        always=(faults.FINE_GRID,),
        sometimes=(faults.COIN_FLIPS, faults.COARSE_GRID),
        precedence=60,
        cause=TAKES_FEW_VALUES,
    )
    FEW = Symptom(
        name="few values",
        of=GRID,
        always=(faults.COIN_FLIPS, faults.COARSE_GRID),
        sometimes=(faults.FINE_GRID,),
        never=(*faults.BOUNDED_NOISE, faults.LAPLACE_NOISE, *faults.SIGNAL_IN_NOISE),
        precedence=60,
        cause=TAKES_FEW_VALUES,
    )

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Every statistic that has its inputs; a correct run fails one with probability `level`."""
        law = self.rounds.law
        if smooth := law.smooth:
            yield self._grid(smooth, law.dim, level)
        if law.all and not self.rounds.proofs_only and law.rounding(law.all).max() > 0:
            shares = law.rounding(law.all)
            outside = shares > COARSE_RELEASE
            yield self.ROUNDING.result(
                float(shares.min()),
                float(shares.max()),
                limits=(0.0, COARSE_RELEASE),
                flagged=(law.all[index].number for index in np.flatnonzero(outside)),
                failed=bool(outside.any()),
                values=shares,
            )

    def _grid(self, rounds: list[Round], dim: int, level: float) -> GaugeResult:
        """Whether the noise lies on a grid and the release does not: then the noise hides nothing."""
        readings = np.array([item.law_grid for item in rounds])
        strengths, own, around = readings[:, 0], readings[:, 2], readings[:, 3]
        least = math.sqrt(math.log(2000 * len(rounds) / level) / dim)
        limit = max(least, GRID_STRENGTH)
        outside = (strengths > np.maximum(limit, GRID_PEAK * around)) & (own < ALIGNED)
        proof = bool((outside & (strengths > ALIGNED)).any())  # most values lie on it
        return self.GRID.result(
            float(strengths.min()),
            float(strengths.max()),
            limits=(0.0, limit),
            flagged=(rounds[index].number for index in np.flatnonzero(outside)),
            failed=bool(outside.any()),
            noise_left=0.0 if proof else None,
            values=strengths,
        )

    @classmethod
    def settled(cls, result: GaugeResult, results: Results) -> GaugeResult:
        """No proof if the residual contains more than noise: that part may be what lies on a grid."""
        pooled = results.of(Length.POOLED)
        return result.as_warning() if pooled is not None and pooled.status == "warning" else result

    @classmethod
    def shown(cls, results: Results) -> Iterator[Symptom]:
        """By how much of the noise lies on the grid."""
        grid, outside = results.of(cls.GRID), results.outside(cls.GRID)
        yield from ([cls.ON_GRID] if outside is not None and outside.largest > MOST else [])
        if grid is not None and grid.largest > FEW_VALUES and results.outside(Gaussian.DISTRIBUTION):
            yield cls.FEW
