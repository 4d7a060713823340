"""Gauge of the noise's level in parts of the model: tensors, and parts of blocks.

The norm of the whole, or of a layer that lies in several processes, can be right even if one part has no noise.
"""

import math
from collections.abc import Iterator

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.evidence import faults
from coalmine.evidence.gauges.gauge import (
    Gauge,
    GaugeResult,
    Results,
    Statistic,
    Symptom,
    deciding_reading,
    ratio_quantile,
)
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.gauges.length import TOO_LONG
from coalmine.evidence.views import RoundViews
from coalmine.measure.round import Round

NO_NOISE = "some coordinates have no noise. Add noise to every coordinate that is released"


class Layers(Gauge):
    """Is there as much noise as stated in every tensor, and in every part of a block?

    A small tensor without noise hardly changes the length of the whole. Rounds are tested one by one and all together.
    """

    name = "layers"
    order = 20
    item = "tensors"
    measures_length = True
    concerns_law = False
    LAYER = Statistic(
        name="layer",
        meaning="length of the residual in this layer over that of the stated noise",
        law="χ² with the layer's size, by round and over all rounds",
        by_tensor=True,
        advice="The noise is missing or too small there. Add noise to every released tensor, including buffers.",
        advice_above="The residual is longer than the stated noise there: `others` is incomplete in these tensors, or "
        "they get more noise than stated. A missing part of `others` could hide missing noise, so this "
        "rules out a PASS.",
        refutes=0.5,
    )
    PARTS = Statistic(
        name="parts of blocks",
        meaning="length of the residual in a part of a block over that of the stated noise",
        law="χ² with the part's size, by round and over all rounds",
        advice="The noise is not equally strong in all parts of the model. Look for a rank or a tensor that "
        "adds noise of another size, or none, and check that all ranks scale their noise in the same way.",
        refutes=0.5,
    )
    LOW = Symptom(
        name="low layer",
        of=LAYER,
        always=(*faults.BARE_PARTS, faults.SMALL_TENSOR_WITHOUT_NOISE),
        sometimes=(*faults.WRONG_OTHERS, faults.LAPLACE_NOISE, *faults.SIGNAL_IN_NOISE, faults.NOISE_PIECES_FROM_POOL),
        never=(faults.NOISE_IN_LAST_ROUNDS, faults.NOISE_IN_SUBSPACE, faults.CANARIES_LOST),
        precedence=40,
        cause=NO_NOISE,
    )
    LONE = Symptom(name="lone layer", of=LAYER, always=(faults.NOISE_ON_ONE_LAYER,), precedence=40, cause=NO_NOISE)
    HIGH = Symptom(
        name="high layer",
        of=LAYER,
        always=faults.SIGNAL_IN_NOISE,
        sometimes=(
            *faults.WRONG_OTHERS,
            faults.NOISE_TIMES_N,
            faults.NOISE_AFTER_ADAM,
            faults.LAPLACE_NOISE,
            faults.NOISE_PIECES_FROM_POOL,
        ),
    )

    def __init__(self, rounds: GaugedRounds) -> None:
        super().__init__(rounds)
        settings, self._compared = self.settings, False
        self._layers = _Ratios([size for _, size in settings.gauged_layers])
        self._parts = _Ratios(
            [size // settings.chunks for size in settings.block_sizes for _ in range(settings.chunks)]
        )

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        item = look.item
        self._compared |= look.white_residual is not None and bool(look.white_residual.noise_std)
        if item.layer_rests is not None and self.settings.layers:
            self._layers.add(item, item.layer_rests)
        if item.chunk_rests is not None:
            self._parts.add(item, item.chunk_rests)

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Every statistic that has its inputs; a correct run fails one with probability `level`."""
        fresh = self.settings.noise is None  # otherwise rounds are correlated, and do not add degrees of freedom
        if self._layers.numbers and self._compared:
            yield from self._by_layer(fresh, level)
        if self._parts.numbers:
            yield self._by_part(fresh, level)

    def _by_layer(self, fresh: bool, level: float) -> Iterator[GaugeResult]:
        taken = self._layers
        ratios, rounds = taken.values, len(taken.numbers)
        share, pooled_share = level / (2 * ratios.size), level / (2 * len(taken.sizes))
        for column, (name, size) in enumerate(self.settings.gauged_layers):
            low = ratio_quantile(share / 2, size)
            high = max(ratio_quantile(1 - share / 2, size), TOO_LONG) * taken.allowed
            values = ratios[:, column]
            outside = (values < low) | (values > high)
            pooled = math.sqrt(float(np.mean(values**2)))
            floor = ratio_quantile(pooled_share / 2, float(size * rounds) if fresh else float(size))
            worst = min(float(values.min()) / low, pooled / floor)
            smallest, largest, limits = deciding_reading(values, (low, high), pooled, (floor, math.inf))
            yield self.LAYER.result(
                smallest,
                largest,
                limits=limits,
                flagged=(taken.numbers[index] for index in np.flatnonzero(outside)),
                failed=bool(outside.any()),
                noise_left=worst if worst < 1 else None,
                values=values,
                left_by_round=np.minimum(values / low, 1)[outside].tolist(),
                part=name,
            )

    def _by_part(self, fresh: bool, level: float) -> GaugeResult:
        taken = self._parts
        ratios, sizes = taken.values, taken.sizes
        low, high, pooled_low, pooled_high = np.ones((4, len(sizes)))
        share, pooled_share = level / (4 * ratios.size), level / (4 * len(sizes))
        rounds = len(ratios) if fresh else 1
        for size in np.unique(sizes):
            here, dof = sizes == size, float(size)
            low[here], high[here] = ratio_quantile(share, dof), ratio_quantile(1 - share, dof)
            pooled_low[here] = ratio_quantile(pooled_share, dof * rounds)
            pooled_high[here] = ratio_quantile(1 - pooled_share, dof * rounds)
        pooled = np.sqrt(np.mean(ratios**2, axis=0))
        worst = min(float((ratios / low).min()), float((pooled / pooled_low).min()))
        limit, pooled_limit = (np.maximum(each, TOO_LONG) * taken.allowed for each in (high, pooled_high))
        outside = (ratios < low) | (ratios > limit)
        long = bool(outside.any() or (pooled > pooled_limit).any())
        smallest, largest, limits = float(ratios.min()), float(ratios.max()), (float(low.min()), float(limit.max()))
        each, all_low, all_high = ratios, low, limit
        if (long and not outside.any()) or (worst < 1 and not (ratios < low).any()):
            each, all_low, all_high = pooled[None], pooled_low, pooled_limit
        if worst < 1 or long:  # smaller parts have wider limits
            by_part = (each / all_low).min(axis=0) if worst < 1 else -(each / all_high).max(axis=0)
            furthest = int(np.argmin(by_part))
            smallest, largest = float(each.min()), float(each.max())
            limits = (float(all_low[furthest]), float(all_high[furthest]))
        return self.PARTS.result(
            smallest,
            largest,
            limits=limits,
            flagged=(taken.numbers[index] for index in np.flatnonzero(outside.any(axis=1))),
            failed=long,
            noise_left=worst if worst < 1 else None,
            values=ratios.min(axis=1),
            left_by_round=np.minimum(ratios / low, 1).min(axis=1)[outside.any(axis=1)].tolist(),
        )

    @classmethod
    def shown(cls, results: Results) -> Iterator[Symptom]:
        """By the readings of all tensors together."""
        layers = results.parts(cls.LAYER)
        low = {name: each.largest for name, each in layers.items() if each.status == "low"}
        fine = [each.smallest for each in layers.values() if each.status == "ok"]
        if low:  # some tensors have less noise than others, not all of them less than claimed
            apart = min(low.values()) < 0.8 * max(each.smallest for each in layers.values())
            yield from ([cls.LOW] if apart or (fine and max(fine) > max(low.values())) else [])
            noisy = {name: each.smallest for name, each in layers.items() if name not in low}
            owners = {name.rpartition(".")[0] or name for name in noisy}
            # One layer (its weight, its bias or both) has the claimed noise, and all others have practically none.
            if len(owners) == 1 and max(low.values()) < 0.2 * min(noisy.values()):
                yield cls.LONE
        yield from ([cls.HIGH] if any(each.status != "ok" and each.side == "high" for each in layers.values()) else [])


class _Ratios:
    """The norms of parts of residuals over those of the stated noise, round by round."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = np.array(sizes)
        self.numbers: list[int] = []
        self._values: list[Floats] = []
        self.allowed = 1.0  # factor by which the rounding of the release may lengthen a part

    @property
    def values(self) -> Floats:
        return np.array(self._values)

    def add(self, item: Round, rests: Floats) -> None:
        """Take the next round, if it states its noise."""
        if item.noise_std:
            self.numbers.append(item.number)
            self._values.append(rests / (np.sqrt(self.sizes) * item.noise_std))
            self.allowed = max(self.allowed, math.sqrt(1 + (item.rounding or 0.0) / item.noise_std**2))
