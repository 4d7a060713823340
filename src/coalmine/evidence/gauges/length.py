"""Gauge of the noise's level in whole rounds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.evidence import faults
from coalmine.evidence.gauges.gauge import Gauge, GaugeResult, Results, Statistic, Symptom, ratio_quantile
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.views import RoundViews, View
from coalmine.measure.settings import Settings

TOO_LONG = 1.02  # ratio to the stated noise from which on the residual holds more than noise
LESS_NOISE = (
    "There is less noise than stated. Compare the standard deviation of the sampled noise with the noise multiplier "
    "times the clip norm, in the units of the released sum."
)
LONG_RESIDUAL = (
    "The residual is longer than the stated noise: `others` is incomplete, or there is more noise than stated, or a "
    "clip does not bound every update. Check that `others` holds every real client of the round, with the weights and "
    "the server learning rate of the round. A client missing from `others` could hide missing noise, so this rules "
    "out a PASS."
)


class Length(Gauge):
    """Is there as much noise as stated, in every round?

    All statistics need the stated noise. Without `others`, real updates lengthen what is measured: a long signal hides
    missing noise from `noise`. `difference` compares two rounds, so it still works where the signal hardly changes.
    """

    name = "length"
    order = 10
    item = "noise level"
    measures_length = True
    concerns_law = False
    NOISE = Statistic(
        name="noise",
        meaning="length off the canaries over that of the stated noise",
        law="at least √(χ²_ν/ν): real signal only adds to it",
        advice=LESS_NOISE,
        refutes=1.0,
        needs_others=False,
    )
    DILUTION = Statistic(
        name="dilution",
        meaning="length of the sum of all rounds over that of noise alone",
        law="no limit: it shows how much real signal hides the canaries",
        advice="The real updates are far longer than the noise and hide the canaries from known-round. Pass `others`.",
        needs_others=False,
    )
    DIFFERENCE = Statistic(
        name="difference",
        meaning="change from round to round over that of fresh noise",
        law="at least √(χ²_m/m), along m unobserved canaries",
        advice="Rounds differ less than they would with fresh noise. Look for noise that is too small, or for a "
        "generator that is seeded again in every round.",
        refutes=1.0,
        needs_others=False,
    )
    RESIDUAL = Statistic(
        name="residual",
        meaning="length of the residual over that of the stated noise",
        law="√(χ²_ν/ν), by round; up to 1.02 and the rounding of the release are allowed",
        advice=LESS_NOISE,
        advice_above=LONG_RESIDUAL,
        refutes=0.5,
    )
    POOLED = Statistic(
        name="pooled residual",
        meaning="length of the residuals of all rounds together over that of the stated noise",
        law="χ² with Tν degrees of freedom: noise that is 2 % short shows",
        advice=LESS_NOISE,
        advice_above=LONG_RESIDUAL,
        refutes=0.5,
    )
    LOW_DIFFERENCE = Symptom(
        name="low difference",
        of=DIFFERENCE,
        always=(faults.NOISE_REUSED, faults.OTHERS_INCOMPLETE),
        sometimes=(
            *faults.LITTLE_NOISE,
            *faults.BARE_PARTS,
            faults.NOISE_IN_LAST_ROUNDS,
            *faults.SIGNAL_IN_NOISE,
            faults.CANARIES_LOST,
        ),
        never=(faults.CLIP_AFTER_AVERAGING, faults.NOISE_IN_SUBSPACE, faults.OTHERS_WRONG),
    )
    LOW_RESIDUAL = Symptom(
        name="low residual",
        of=RESIDUAL,
        always=(*faults.LITTLE_NOISE, *faults.BARE_PARTS, faults.NOISE_IN_LAST_ROUNDS, faults.CANARIES_LOST),
        sometimes=(
            faults.LAPLACE_NOISE,
            *faults.SIGNAL_IN_NOISE,
            faults.NOISE_PIECES_FROM_POOL,
            faults.NOISE_IN_SUBSPACE,
        ),
        never=(*faults.SCALED_UPDATES, faults.CLIP_AFTER_AVERAGING, faults.SMALL_TENSOR_WITHOUT_NOISE),
    )
    HIGH_RESIDUAL = Symptom(
        name="high residual",
        of=RESIDUAL,
        always=(faults.CLIP_AFTER_AVERAGING, faults.NOISE_TIMES_N),
        sometimes=(
            *faults.WRONG_OTHERS,
            faults.NOISE_AFTER_ADAM,
            faults.LAPLACE_NOISE,
            *faults.SIGNAL_IN_NOISE,
            faults.NOISE_PIECES_FROM_POOL,
        ),
        never=faults.SCALED_UPDATES,
    )
    SOME_ROUNDS = Symptom(
        name="some rounds",
        of=RESIDUAL,
        always=(faults.NOISE_IN_LAST_ROUNDS,),
        sometimes=(faults.NOISE_ON_90_PERCENT, faults.LAPLACE_NOISE, *faults.SIGNAL_IN_NOISE, faults.NOISE_IN_SUBSPACE),
        never=(*faults.LITTLE_NOISE, faults.CANARIES_LOST),
    )

    def __init__(self, rounds: GaugedRounds) -> None:
        super().__init__(rounds)
        self._lengths: list[_Length] = []
        self._residuals: list[_Length] = []
        self._rounding: dict[int, float] = {}
        self._sums = _Sums(rounds.settings)

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        if look.plain is not None and look.plain.noise_std:
            self._lengths.append(_Length.of(look.plain))
        if look.white_residual is not None and look.white_residual.noise_std:
            self._residuals.append(_Length.of(look.white_residual))
        if look.white_plain is not None:
            self._sums.add(look.white_plain)
        if look.item.rounding is not None and self.settings.noise is None:
            self._rounding[look.item.number] = look.item.rounding

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Every statistic that has its inputs; a correct run fails one with probability `level`."""
        if self._lengths:  # real updates can only add to it, so too small a value proves too little noise
            yield _one_sided(self.NOISE, self._lengths, level)
        if self._sums.variance:
            yield self.DILUTION.result(self._sums.dilution, limits=(0.0, math.inf))
        if self._sums.differences:
            yield _one_sided(self.DIFFERENCE, self._sums.differences, level)
        if self._residuals:
            yield from self._two_sided(level)

    def _two_sided(self, level: float) -> Iterator[GaugeResult]:
        """Norms of the residuals, round by round and pooled: only noise is left, so the test is two-sided."""
        lengths = self._residuals
        ratios, dofs = _ratios(lengths), np.array([each.dof for each in lengths])
        known = {
            each.number: self._rounding[each.number] / each.noise_std**2
            for each in lengths
            if each.number in self._rounding
        }
        most = max(known.values(), default=0.0)
        extra = np.array([known.get(each.number, most) for each in lengths])
        share = level / (2 * len(lengths))
        low = np.array([ratio_quantile(share, dof) for dof in dofs])
        high = np.array([ratio_quantile(1 - share, dof) for dof in dofs]) * np.sqrt(1 + extra)
        yield _result(self.RESIDUAL, lengths, low, np.maximum(high, TOO_LONG))
        freedom = float(dofs.sum())
        pooled = math.sqrt(float(dofs @ ratios**2) / freedom)
        allowed = math.sqrt(1 + float(dofs @ extra) / freedom)
        floor, ceiling = ratio_quantile(level / 2, freedom), ratio_quantile(1 - level / 2, freedom)
        limits = (floor, max(ceiling, TOO_LONG) * allowed)
        left = pooled / floor if pooled < floor else None
        yield self.POOLED.result(pooled, limits=limits, failed=pooled > limits[1], noise_left=left)

    @classmethod
    def shown(cls, results: Results) -> Iterator[Symptom]:
        """A short or a long length shows by its side: its status does not tell if `others` is wrong."""
        if (difference := results.outside(cls.DIFFERENCE)) and difference.side == "low":
            yield cls.LOW_DIFFERENCE
        residual = results.outside(cls.RESIDUAL)
        sides = {each.side for each in (residual, results.outside(cls.POOLED)) if each is not None}
        yield from ([cls.LOW_RESIDUAL] if "low" in sides else [])
        yield from ([cls.HIGH_RESIDUAL] if "high" in sides else [])
        if residual is not None and residual.status == "low" and 0 < len(residual.flagged) < results.rounds:
            # Noise is missing in these rounds, and others have all of it.
            yield from ([cls.SOME_ROUNDS] if residual.largest > residual.limits[0] else [])


@dataclass(frozen=True)
class _Length:
    """The norm of one round's vector over that of the stated noise, and the directions from which it is measured."""

    number: int
    ratio: float
    dof: float
    noise_std: float

    @classmethod
    def of(cls, view: View) -> "_Length":
        assert view.noise_std
        return cls(view.number, view.scale / view.noise_std, view.dof, view.noise_std)


class _Sums:
    """Two statistics along the unobserved canaries, so that no array of the model's size is kept.

    `dilution`: the norm of the sum of all rounds over that of noise alone; far above 1, real updates hide the canaries.
    `differences`: ‖ρ_t/C_t - ρ_s/C_s‖ over its norm under independent noise, s the round before; near 0 if noise is reused.
    """

    def __init__(self, settings: Settings) -> None:
        self._dof = settings.unobserved_dof
        self._total, self.variance = np.zeros(settings.unobserved), 0.0
        self.differences: list[_Length] = []
        self._before: tuple[Floats, float] | None = None  # the round before and its noise, over its clip norm

    @property
    def dilution(self) -> float:
        return math.sqrt(float(np.mean(self._total * self._total)) / self.variance)

    def add(self, view: View) -> None:
        """Take the next round."""
        before, self._before = self._before, None
        if not view.noise_std:
            return
        along = view.unobserved * view.scale
        self._total += along
        self.variance += view.noise_std**2
        self._before = along / view.clip_norm, view.noise_std / view.clip_norm
        if before is not None:
            gap = self._before[0] - before[0]
            ratio = math.sqrt(float(np.mean(gap * gap))) / math.hypot(self._before[1], before[1])
            self.differences.append(_Length(view.number, ratio, self._dof, view.noise_std))


def _ratios(lengths: list[_Length]) -> Floats:
    return np.array([each.ratio for each in lengths])


def _one_sided(statistic: Statistic, lengths: list[_Length], level: float) -> GaugeResult:
    floors = np.array([ratio_quantile(level / len(lengths), each.dof) for each in lengths])
    return _result(statistic, lengths, floors, np.full(len(lengths), math.inf))


def _result(statistic: Statistic, lengths: list[_Length], low: Floats, high: Floats) -> GaugeResult:
    ratios = _ratios(lengths)
    outside = (ratios < low) | (ratios > high)
    worst = float((ratios / low).min())
    limits = (float(low.min()), float(high.max()))
    if outside.any():  # rounds with fewer directions have wider limits
        index = int(np.argmin(ratios / low) if worst < 1 else np.argmax(ratios / high))
        limits = (float(low[index]), float(high[index]))
    return statistic.result(
        float(ratios.min()),
        float(ratios.max()),
        limits=limits,
        flagged=(lengths[index].number for index in np.flatnonzero(outside)),
        failed=bool(outside.any()),
        noise_left=worst if worst < 1 else None,
        values=ratios,
        left_by_round=np.minimum(ratios / low, 1)[outside].tolist(),
    )
