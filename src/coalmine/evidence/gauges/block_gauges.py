"""Gauges of a model in blocks: is the noise equally strong in every part, and do two blocks share their noise?

The norm of the whole, or of a layer that lies in several processes, can be right even if one part has no noise.
"""

import math
from collections.abc import Iterator

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.estimators.null import CosineNull
from coalmine.evidence.gauges.gauge import LEVEL, Gauge, deciding_reading, ratio_quantile
from coalmine.evidence.views import RoundViews
from coalmine.measure.settings import Settings

COMPARED = 256  # most blocks that are compared with each other
TOO_LONG = 1.02  # ratio to the stated noise from which on a part holds more than noise


class BlockReader:
    """Takes one round after another, and computes the gauges of blocks at the end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._numbers: list[int] = []
        self._ratios: list[Floats] = []
        self._allowed = 1.0
        self._correlations = _Correlations(min(len(settings.block_sizes), COMPARED))

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        item, settings = look.item, self._settings
        if item.chunk_rests is not None and item.noise_std:
            sizes = np.repeat([size // settings.chunks for size in settings.block_sizes], settings.chunks)
            self._numbers.append(item.number)
            self._ratios.append(item.chunk_rests / (np.sqrt(sizes) * item.noise_std))
            self._allowed = max(self._allowed, math.sqrt(1 + (item.rounding or 0.0) / item.noise_std**2))
        if item.block_sketches is not None:
            sketches = np.asarray(item.block_sketches, np.float64).reshape(-1, settings.sketch)
            self._correlations.add(item.number, sketches[:COMPARED])

    def gauges(self, level: float = LEVEL) -> Iterator[Gauge]:
        """Every gauge that has its inputs; a correct run fails one with probability `level`."""
        if self._ratios:
            yield self._lengths(level)
        yield from self._correlations.gauges(self._settings.sketch, level)

    def _lengths(self, level: float) -> Gauge:
        """The gauge of the noise's norm in parts of blocks, round by round and over all rounds."""
        settings, ratios = self._settings, np.array(self._ratios)
        sizes = np.repeat([size // settings.chunks for size in settings.block_sizes], settings.chunks)
        low, high, pooled_low, pooled_high = np.ones((4, len(sizes)))
        share, pooled_share = level / (4 * ratios.size), level / (4 * len(sizes))
        rounds = len(ratios) if settings.noise is None else 1  # correlated rounds do not add degrees of freedom
        for size in np.unique(sizes):
            here, dof = sizes == size, float(size)
            low[here], high[here] = ratio_quantile(share, dof), ratio_quantile(1 - share, dof)
            pooled_low[here] = ratio_quantile(pooled_share, dof * rounds)
            pooled_high[here] = ratio_quantile(1 - pooled_share, dof * rounds)
        pooled = np.sqrt(np.mean(ratios**2, axis=0))
        worst = min(float((ratios / low).min()), float((pooled / pooled_low).min()))
        limit, pooled_limit = (np.maximum(each, TOO_LONG) * self._allowed for each in (high, pooled_high))
        outside = (ratios < low) | (ratios > limit)
        long = bool(outside.any() or (pooled > pooled_limit).any())
        smallest, largest, limits = float(ratios.min()), float(ratios.max()), (float(low.min()), float(limit.max()))
        each, all_low, all_high = ratios, low, limit
        if (long and not outside.any()) or (worst < 1 and not (ratios < low).any()):
            each, all_low, all_high = pooled[None], pooled_low, pooled_limit
        if worst < 1 or long:  # smaller parts have wider limits
            part = _worst_part(each, all_low, all_high, short=worst < 1)
            smallest, largest = float(each.min()), float(each.max())
            limits = (float(all_low[part]), float(all_high[part]))
        return Gauge(
            name="parts of blocks",
            smallest=smallest,
            largest=largest,
            limits=limits,
            flagged=tuple(self._numbers[index] for index in np.flatnonzero(outside.any(axis=1))),
            status="low" if worst < 1 else "warning" if long else "ok",
            noise_left=worst if worst < 1 else None,
            values=ratios.min(axis=1),
        )


def _worst_part(ratios: Floats, low: Floats, high: Floats, *, short: bool) -> int:
    """The part of a block that is furthest outside its limits, in any round."""
    by_part = (ratios / low).min(axis=0) if short else -(ratios / high).max(axis=0)
    return int(np.argmin(by_part))


class _Correlations:
    """Correlations of the noise between two blocks, within a round or between a round and the previous one."""

    def __init__(self, blocks: int) -> None:
        self._numbers: list[int] = []
        self._largest: list[float] = []
        self._sums = np.zeros((2, blocks, blocks))  # sums over rounds: within a round, and with the previous one
        self._rounds = [0, 0]
        self._before: Floats | None = None

    def add(self, number: int, sketches: Floats) -> None:
        """Take the next round."""
        lengths = np.linalg.norm(sketches, axis=1, keepdims=True)
        if not (lengths > 0).all():
            self._before = None
            return
        now = sketches / lengths
        largest = 0.0
        for index, other in enumerate((now, self._before)):
            if other is not None:
                correlations = now @ other.T
                np.fill_diagonal(correlations, 0.0)
                self._sums[index] += correlations
                self._rounds[index] += 1
                largest = max(largest, float(np.abs(correlations).max()))
        self._before = now
        self._numbers.append(number)
        self._largest.append(largest)

    def gauges(self, size: int, level: float) -> Iterator[Gauge]:
        blocks = self._sums.shape[1]
        if not self._numbers or blocks < 2:
            return
        values = np.array(self._largest)
        pairs = blocks * (blocks - 1) * sum(self._rounds)
        limit = float(-CosineNull(max(size, 2)).ppf(level / (4 * pairs)))
        outside = values > limit
        every = -float(CosineNull(max(size * max(self._rounds), 2)).ppf(level / (8 * blocks * (blocks - 1))))
        pooled = [
            float(np.abs(total).max()) / rounds
            for total, rounds in zip(self._sums, self._rounds, strict=True)
            if rounds
        ]
        largest_mean = max(pooled)
        fewest = min(rounds for rounds in self._rounds if rounds)
        every *= math.sqrt(max(self._rounds) / fewest)
        certain = max(float(values.max()) - limit, largest_mean - every, 0.0)
        failed = bool(outside.any()) or largest_mean > every
        smallest, largest, limits = deciding_reading(values, (0.0, limit), largest_mean, (0.0, every))
        yield Gauge(
            name="shared blocks",
            smallest=smallest,
            largest=largest,
            limits=limits,
            flagged=tuple(self._numbers[index] for index in np.flatnonzero(outside)),
            status="low" if failed else "ok",
            noise_left=math.sqrt(max(1 - certain, 0.0)) if failed else None,
            values=values,
        )
