"""Gauge of the noise within a round: does one draw serve several coordinates?"""

import math
from collections.abc import Iterator

import numpy as np
from scipy.special import ndtri, pdtrc

from coalmine.argument_checks import Floats
from coalmine.estimators.null import CosineNull
from coalmine.evidence import faults
from coalmine.evidence.gauges.gauge import Gauge, GaugeResult, Statistic, Symptom, deciding_reading
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds, variance
from coalmine.evidence.views import RoundViews
from coalmine.measure.round import Round

COMPARED = 256  # most blocks that are compared with each other
REPEATED = 0.05  # share of the largest values that are repeated
SAME = 1e-6  # distance, in standard deviations, below which two values count as the same
ONE_DRAW = (
    "One draw is used for several coordinates. Look for a PRNG key or a seed that is used twice, for example "
    "one key for all layers, and for noise that is tiled or broadcast."
)


class SharedDraws(Gauge):
    """Is every coordinate drawn for itself?"""

    name = "shared draws"
    order = 80
    SPECTRUM = Statistic(
        name="spectrum",
        meaning="largest correlation of the noise with itself at any distance, in standard deviations",
        law="normal over √d",
        advice=ONE_DRAW,
        refutes=1.0,
        seen="correlation within a round",
    )
    NEIGHBOURS = Statistic(
        name="neighbours",
        meaning="correlation of the noise in neighbouring coordinates",
        law="a cosine, of coordinates one and two apart",
        advice=ONE_DRAW,
        refutes=1.0,
    )
    LAYERS = Statistic(
        name="shared draws",
        meaning="correlation of the noise between two layers",
        law="a cosine",
        advice=ONE_DRAW,
        refutes=1.0,
    )
    VALUES = Statistic(
        name="repeated values",
        meaning="share of the largest noise values that occur twice",
        law="Poisson, within 10⁻⁶ σ, in a round or in another; must exceed 5 %. Needs a declared `clip_norm`",
        advice=ONE_DRAW,
        refutes=1.0,
        seen="repeated values",
        unseen="repeated values (pass clip_norm in the units of model_delta, in single precision)",
        sees_grids=True,
    )
    BLOCKS = Statistic(
        name="shared blocks",
        meaning="correlation of the noise between two blocks, in one round or in two that follow each other",
        law="a cosine, in a round and over all rounds",
        advice="Two parts of the model get the same noise, or noise from the round before. Seed each rank's generator "
        "differently, and draw fresh noise for every shard.",
        refutes=1.0,
        seen="reuse between blocks",
    )
    TWICE = Symptom(
        name="repeated values",
        of=VALUES,
        always=(faults.NOISE_KEY_REUSED, faults.NOISE_IN_PAIRS, *faults.POOLED_NOISE),
        sometimes=(faults.NOISE_REUSED, faults.COIN_FLIPS, faults.COARSE_GRID, faults.FINE_GRID),
        precedence=30,
        cause="the same random number is used more than once. Draw one for each coordinate, anew in every call",
    )
    ANYWHERE = Symptom(
        name="spectrum",
        of=SPECTRUM,
        always=(faults.NOISE_PIECES_FROM_POOL,),
        sometimes=(
            *faults.MIXED_NOISE,
            faults.NOISE_REUSED,
            faults.NOISE_KEY_REUSED,
            faults.NOISE_IN_PAIRS,
            faults.NOISE_IN_SUBSPACE,
        ),
        never=(faults.NOISE_FROM_POOL,),
    )
    NEXT = Symptom(
        name="neighbours",
        of=NEIGHBOURS,
        always=(faults.NOISE_IN_PAIRS,),
        sometimes=(*faults.MIXED_NOISE, faults.NOISE_REUSED, *faults.POOLED_NOISE, faults.NOISE_IN_SUBSPACE),
        never=(faults.NOISE_KEY_REUSED,),
    )
    BETWEEN_LAYERS = Symptom(
        name="shared draws",
        of=LAYERS,
        always=(faults.NOISE_KEY_REUSED,),
        sometimes=(faults.NOISE_REUSED, faults.NOISE_FROM_POOL),
        never=(faults.NOISE_PIECES_FROM_POOL,),
    )

    def __init__(self, rounds: GaugedRounds) -> None:
        super().__init__(rounds)
        self._blocks = _Blocks(min(len(self.settings.block_sizes), COMPARED))

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        if look.item.block_sketches is not None:
            sketches = np.asarray(look.item.block_sketches, np.float64).reshape(-1, self.settings.sketch)
            self._blocks.add(look.item.number, sketches[:COMPARED])

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Every statistic that has its inputs; a correct run fails one with probability `level`."""
        law = self.rounds.law
        if law.counted:
            yield self._spectrum(law.counted, law.dim, level)
        if law.all:
            yield from self._neighbours(law.all, level)
        if tails := [item for item in law.smooth if item.law_tail is not None]:  # values on a grid repeat anyway
            yield from self._ties(tails, level)
        yield from self._blocks.results(self.settings.sketch, level)

    def _spectrum(self, rounds: list[Round], dim: int, level: float) -> GaugeResult:
        """The largest autocorrelation within a round at any lag, in standard deviations."""
        values = np.array([item.law_spectrum for item in rounds])[:, 0]
        limit = -float(ndtri(level / (dim * len(rounds))))
        outside = values > limit
        correlation = max(float((values - limit).max()) / math.sqrt(dim), 0.0)
        return self.SPECTRUM.result(
            float(values.min()),
            float(values.max()),
            limits=(0.0, limit),
            flagged=(rounds[index].number for index in np.flatnonzero(outside)),
            noise_left=math.sqrt(max(1 - correlation, 0.0)) if outside.any() else None,
            values=values,
        )

    def _neighbours(self, rounds: list[Round], level: float) -> Iterator[GaugeResult]:
        """Correlations of neighbouring coordinates, and of pairs of layers that would be equal if a key were reused."""
        law = self.rounds.law
        cosines, repeated = np.stack([item.law_lags for item in rounds if item.law_lags is not None]), law.repeated
        sizes = np.array([law.dim, law.dim, *(one.stop - one.start for one, _ in law.parts.pairs)], dtype=np.float64)
        kinds = [(self.NEIGHBOURS, cosines[:, :2], sizes[:2]), (self.LAYERS, cosines[:, 2:], sizes[2:])]
        for statistic, values, lengths in kinds:
            if not values.size:
                continue
            scores = values * np.sqrt(lengths)
            pooled = scores.sum(axis=0) / math.sqrt(len(rounds) * repeated)
            one = -CosineNull(int(lengths.min())).ppf(level / (4 * values.size)) * math.sqrt(lengths.min())
            every = -float(ndtri(level / (4 * values.shape[1])))
            outside = np.abs(scores) > float(one)
            certain = max(
                float(((np.abs(scores) - one) / np.sqrt(lengths)).max()),
                float(((np.abs(pooled) - every) * math.sqrt(repeated) / np.sqrt(lengths * len(rounds))).max()),
                0.0,
            )
            failed = bool(outside.any() or (np.abs(pooled) > every).any())
            # the pair that is furthest outside: longer ones have narrower limits
            place = int(np.abs(scores).max(axis=0).argmax() if outside.any() else np.abs(pooled).argmax())
            limit, root = (
                float(one) / math.sqrt(lengths[place] if outside.any() else lengths.min()),
                math.sqrt(repeated),
            )
            share = root / math.sqrt(lengths[place] * len(rounds))  # from a pooled score to a mean correlation
            smallest, largest, limits = deciding_reading(
                values, (-limit, limit), float(pooled[place]) * share, (-every * share, every * share)
            )
            yield statistic.result(
                smallest,
                largest,
                limits=limits,
                flagged=(rounds[index].number for index in np.flatnonzero(outside.any(axis=1))),
                noise_left=math.sqrt(max(1 - certain, 0.0)) if failed else None,
                values=np.abs(values).max(axis=1),
            )

    def _ties(self, rounds: list[Round], level: float) -> Iterator[GaugeResult]:
        """The share of a round's largest values that are repeated, in the same round or in another: noise used twice."""
        units = [item.noise_std or math.sqrt(variance(item)) for item in rounds]
        values = [np.asarray(item.law_tail, np.float64) / unit for item, unit in zip(rounds, units, strict=True)]
        shares = [repeated_share(tail, SAME) for tail in values]
        all_values = np.sort(np.concatenate(values))
        if _has_steps(all_values, SAME):
            return  # values on a floating-point grid repeat anyway
        everything = [*shares, repeated_share(all_values, SAME)]
        share = max(share for share, _ in everything)
        failed = any(share > REPEATED and p_value < level / (2 * len(everything)) for share, p_value in everything)
        yield self.VALUES.result(
            min(share for share, _ in everything),
            share,
            limits=(0.0, REPEATED),
            flagged=(
                item.number
                for item, (own, p_value) in zip(rounds, shares, strict=True)
                if own > REPEATED and p_value < level
            ),
            noise_left=math.sqrt(max(1 - share, 0.0)) if failed else None,
            values=np.array([own for own, _ in shares]),
        )


class _Blocks:
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

    def results(self, size: int, level: float) -> Iterator[GaugeResult]:
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
        yield SharedDraws.BLOCKS.result(
            smallest,
            largest,
            limits=limits,
            flagged=(self._numbers[index] for index in np.flatnonzero(outside)),
            noise_left=math.sqrt(max(1 - certain, 0.0)) if failed else None,
            values=values,
        )


def repeated_share(ordered: Floats, same: float) -> tuple[float, float]:
    """The share of sorted values closer than `same` to the next, less the share expected by chance, and its p-value.

    The expected share follows from the local density. Values on a floating-point grid cannot be tested: 0 and 1.
    """
    count = len(ordered)
    if count < 64 or _has_steps(ordered, same):
        return 0.0, 1.0
    gaps, resolution = np.diff(ordered), _resolution(ordered, same)
    reach = 16
    centres = np.arange(count - 1)
    left, right = np.maximum(centres - reach, 0), np.minimum(centres + reach, count - 1)
    density = (right - left) / np.maximum(ordered[right] - ordered[left], resolution)
    tail = np.exp(-0.5 * ordered[:-1] ** 2) / math.sqrt(2 * math.pi)
    coarse = 2.0**-22 / np.maximum(tail, 1e-12)  # generators that invert a 23-bit uniform number
    expected = float(np.minimum(density * (resolution + np.minimum(coarse, 1e-3)), 1.0).sum())
    close = int((gaps < resolution).sum())
    return max(close - expected, 0.0) / count, float(pdtrc(close - 1, expected)) if close else 1.0


def _resolution(ordered: Floats, same: float) -> float:
    largest = np.clip(ordered[-1], -3e38, 3e38)  # the range of single precision
    return max(same, 4 * float(np.spacing(np.float32(largest))))


def _has_steps(ordered: Floats, same: float) -> bool:
    """Whether sorted values lie on a grid: the smallest gap between distinct ones is far larger than expected."""
    gaps = np.diff(ordered)
    distinct = gaps[gaps >= _resolution(ordered, same)]
    if distinct.size < 32:
        return True
    spread = float(ordered[-1] - ordered[0])
    return float(distinct.min()) > 12 * spread / distinct.size**2 + _resolution(ordered, same)
