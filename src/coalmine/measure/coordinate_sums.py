"""Follow each coordinate over the rounds: the sum of its squared noise, over that of its layer.

One array of the model's size is kept, on the model's device; a round adds one pass over it. The sums are in memory only. The
log gets their extremes and a few counts (`Reading`), which the gauge of coordinates tests.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincinv

from coalmine.argument_checks import Floats
from coalmine.estimators.correlated import BandedNoise, CorrelatedNoise
from coalmine.measure.arrays import arrays_of, host_array, is_on_device, many_parts, numpy_vector
from coalmine.measure.noise_law import MANY_COORDINATES, NoiseParts, own_numbers, rounding_step
from coalmine.measure.settings import Settings

MOST = 1 << 24  # coordinates that are followed; of a larger model, the key chooses a stretch of each block
FEWEST = 1 << 16  # under correlated noise, coordinates that are followed whatever memory it takes
QUANTILES = (1e-3, 1e-2)  # of chi-squared: coordinates below each are counted
SAMPLE, FEWEST_SAMPLED = 16_384, 8  # numbers from which rounding is recognised: of a vector, and of a group of layers
GROWTH = 1.125  # a large model's sums are read once they hold this many times the rounds of the last reading
FINE = 1e-4  # rounding, in standard deviations, that is too small to matter
NOTHING = 1e300  # larger than any sum
SMALLEST_UNIT, LARGEST_UNIT = 1e-30, 1e30  # standard deviations whose reciprocals and squares single precision holds

Part = tuple[int, int, int]  # a layer's number, and the range in its block


@dataclass(frozen=True, kw_only=True)
class CoordinateReading:
    """The sums over a number of rounds, from `first` to `last`.

    `smallest` and `largest` are the extreme sums, in the layers `smallest_layer` and `largest_layer`; `counts` is the number
    below each of `QUANTILES`, and `by_layer` that below the last of them. `complete` means that the sums hold noise alone,
    so that large ones count too; otherwise real updates or rounding may have added to them. `spread` is the standard
    deviation of the noisiest layer over that of all coordinates.
    """

    first: int
    last: int
    rounds: int
    followed: int
    complete: bool
    smallest: float
    largest: float
    smallest_layer: int
    largest_layer: int
    spread: float
    counts: tuple[int, ...]
    by_layer: npt.NDArray[np.int64]

    def to_array(self) -> Floats:
        """All numbers in one row, as the log has them."""
        names = [part.name for part in fields(self)][:-2]
        return np.array([*(float(getattr(self, name)) for name in names), *self.counts, *self.by_layer], np.float64)

    @classmethod
    def of(cls, row: Floats) -> "CoordinateReading":
        """The inverse of `to_array`."""
        first, last, rounds, followed, complete, smallest, largest, low, high, spread = row[:10].tolist()
        below = 10 + len(QUANTILES)
        return cls(
            first=int(first),
            last=int(last),
            rounds=int(rounds),
            followed=int(followed),
            complete=bool(complete),
            smallest=smallest,
            largest=largest,
            smallest_layer=int(low),
            largest_layer=int(high),
            spread=spread,
            counts=tuple(row[10:below].astype(np.int64).tolist()),
            by_layer=row[below:].astype(np.int64),
        )


@lru_cache(maxsize=4096)
def chi_quantile(probability: float, rounds: int) -> float:
    """The quantile of chi-squared with one degree of freedom per round."""
    return 2 * float(gammaincinv(rounds / 2, probability))


@dataclass(frozen=True)
class _Block:
    """The followed stretch of a block, its parts by layer, and the groups of layers that are standardised together."""

    place: slice
    parts: tuple[Part, ...]  # ranges in the stretch
    groups: tuple[slice, ...]

    @classmethod
    def of(cls, parts: Sequence[Part], wanted: int, key: bytes, number: int) -> "_Block":
        """A stretch of `wanted` coordinates of a block. Where it begins is as secret as the key."""
        digest = hashlib.blake2b(
            number.to_bytes(8, "little"), key=key[:64], digest_size=16, person=b"followed"
        ).digest()
        rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        first = int(rng.integers(parts[-1][2] - wanted + 1))
        stop = first + wanted
        inside = [(layer, max(one, first), min(two, stop)) for layer, one, two in parts if one < stop and two > first]
        moved = tuple((layer, one - first, two - first) for layer, one, two in inside)
        groups = NoiseParts.of([("", two - one) for _, one, two in moved], wanted).groups
        return cls(slice(first, stop), moved, groups)

    def layers_at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number of the layer of each place in the stretch."""
        starts = np.array([one for _, one, _ in self.parts])
        layers = np.array([layer for layer, _, _ in self.parts])
        return np.asarray(layers[np.searchsorted(starts, places, side="right") - 1])


class CoordinateSums:
    """The sums of the followed coordinates of this process, from one round on.

    `blocks` lists the parts of each block that this process has. Call `add` for each block of a round, then `end`.
    """

    EXTREMES = 5  # numbers of `extremes`

    def __init__(self, settings: Settings, key: bytes, blocks: Sequence[Sequence[Part]], layers: int) -> None:
        self._settings, self._layers = settings, max(layers, 1)
        dim = settings.law_dim if settings.replicated else settings.dim
        most = min(dim, MOST)
        if settings.noise is not None:
            most = min(most, max(dim // _rounds_kept(settings.noise), FEWEST))
        self._blocks = [
            _Block.of(parts, max(parts[-1][2] * most // dim, 1), key, number) for number, parts in enumerate(blocks)
        ]
        self._encoders = [settings.noise.encoder() if settings.noise is not None else None for _ in blocks]
        self._sums: list[Any] = [None] * len(blocks)
        self._units: list[Floats | None] = [None] * len(blocks)  # of this round, by group of layers
        self._spread_sums: Floats | None = None
        self._first = self._last = self._rounds = self._read = 0
        self._complete = True
        self._added = 0  # the last round of which a part was added
        self._lost: set[int] = set()  # blocks that could not be measured
        self._waiting = False

    @classmethod
    def of_vector(cls, settings: Settings, key: bytes) -> "CoordinateSums":
        """For a model that is one vector, or the measured sample of a replicated one."""
        layers = settings.gauged_layers or (("", settings.dim),)
        edges = np.cumsum([0, *(size for _, size in layers)]).tolist()
        parts = [(number, *ends) for number, ends in enumerate(itertools.pairwise(edges))]
        return cls(settings, key, [parts], len(layers))

    @property
    def places(self) -> list[slice]:
        """The followed stretch of each block."""
        return [block.place for block in self._blocks]

    def is_out_of_order(self, number: int) -> bool:
        """Whether the sums must begin anew: this round is observed again, or the last one was not added as a whole."""
        return number <= self._added or self._added != self._last

    def add(
        self,
        number: int,
        block: int,
        noise: Any,
        release: Any,
        *,
        others: Any = None,
        stated: float | None = None,
        factor: float = 1.0,
    ) -> bool | None:
        """Add a block's followed noise in a round; False if it cannot be measured, None if it needs the next rounds.

        With `others` the noise is standardised by its own size. Without, real updates are part of it, so it is standardised
        by its `stated` standard deviation. `factor` is how many releases were added up to make it.
        """
        own, encoder = self._blocks[block], self._encoders[block]
        steps = _Steps.of(release, others, own.groups, factor)
        if not is_on_device(noise):
            noise, release = host_array(noise), host_array(release)
        if encoder is not None:
            assert self._settings.noise is not None
            unit = (stated or 0.0) / self._settings.noise.std(number)
            if not unit or others is None or not steps.is_fine(np.full(len(own.groups), unit)):
                return False
            noise = encoder.add(number, numpy_vector(noise) / unit)
            if noise is None:
                return None
        counts = np.array([place.stop - place.start for place in own.groups])
        units = np.sqrt(arrays_of(noise).group_squares(noise, own.groups) / counts)
        if others is None:
            units = np.minimum(units, stated or 0.0)
        if not ((units > SMALLEST_UNIT) & (units < LARGEST_UNIT)).all():
            return False
        widened = encoder is None and not steps.is_fine(units)
        if widened:
            units = np.sqrt(np.maximum(units**2 - steps.variances, units**2 / 2))
        self._complete &= others is not None and not widened
        self._added, self._units[block] = number, units
        wide = np.array([steps.relative, steps.absolute]) if widened else None
        self._sums[block] = arrays_of(noise).squares_added(
            self._sums[block], noise, release, own.groups, (1 / units).tolist(), wide
        )
        return True

    def leave_out(self, block: int, *, waiting: bool) -> None:
        """Leave a block out that could not be measured, or the round if it needs the next ones."""
        if waiting:
            self._waiting = True
        else:
            self._lost.add(block)
            self._sums[block] = self._units[block] = None

    def end(self, number: int) -> bool:
        """Count a round of which every block was added; returns whether the sums are to be read now."""
        if self._waiting:
            self._waiting = False
            return False
        self._first = self._first or number
        self._last, self._added, self._rounds = number, number, self._rounds + 1
        self._add_spread()
        many = self._settings.dim > MANY_COORDINATES
        power_of_two = self._rounds & (self._rounds - 1) == 0
        planned = number == self._settings.rounds
        return not many or power_of_two or planned or self._rounds >= GROWTH * self._read

    def _add_spread(self) -> None:
        """Add the variance of each group of layers over that of all."""
        pairs = [(own, units) for own, units in zip(self._blocks, self._units, strict=True)]
        sizes = np.array(
            [place.stop - place.start for own, units in pairs if units is not None for place in own.groups]
        )
        if sizes.size:
            squares = np.concatenate([units for _, units in pairs if units is not None]) ** 2
            squares /= sizes @ squares / sizes.sum()
            same = self._spread_sums is not None and self._spread_sums.size == squares.size
            self._spread_sums = self._spread_sums + squares if same else squares * self._rounds

    @property
    def _spread(self) -> float:
        if self._spread_sums is None:
            return 1.0
        return float(np.sqrt(self._spread_sums.max() / self._rounds))

    @property
    def is_unread(self) -> bool:
        """Whether rounds were added since the last reading."""
        return self._rounds > self._read

    def extremes(self) -> Floats:
        """Smallest and largest sum of this process, their layers, and the spread."""
        found = [_extremes(total, own) for total, own in self._followed]
        low = min((entry[:2] for entry in found), default=(NOTHING, 0.0))
        high = max((entry[2:] for entry in found), default=(0.0, 0.0))
        return np.array([low[0], high[0], low[1], high[1], self._spread])

    @property
    def counts_size(self) -> int:
        """How many numbers `counts` has."""
        return 1 + len(QUANTILES) + self._layers

    def counts(self) -> Floats:
        """The number of followed coordinates of this process, of those below each quantile, and of the last by layer."""
        counts = np.zeros(self.counts_size)
        limits = [chi_quantile(probability, self._rounds) for probability in QUANTILES]
        for total, own in self._followed:
            places, values = arrays_of(total).below(total, limits[-1])
            counts[0] += len(total)
            counts[1 : 1 + len(limits)] += [(values < limit).sum() for limit in limits]
            counts[1 + len(limits) :] += np.bincount(own.layers_at(places), minlength=self._layers)
        return counts

    @property
    def _followed(self) -> list[tuple[Any, "_Block"]]:
        pairs = enumerate(zip(self._sums, self._blocks, strict=True))
        return [pair for number, pair in pairs if number not in self._lost and pair[0] is not None]

    def reading(self, extremes: Floats, counts: Floats) -> Floats:
        """The numbers for the log, from the extremes of every process and the sum of their counts."""
        self._read = self._rounds
        low, high = extremes[np.argmin(extremes[:, 0])], extremes[np.argmax(extremes[:, 1])]
        return CoordinateReading(
            first=self._first,
            last=self._last,
            rounds=self._rounds,
            followed=int(counts[0]),
            complete=self._complete,
            smallest=float(low[0]),
            largest=float(high[1]),
            smallest_layer=int(low[2]),
            largest_layer=int(high[3]),
            spread=float(extremes[:, 4].max()),
            counts=tuple(counts[1 : 1 + len(QUANTILES)].astype(np.int64).tolist()),
            by_layer=counts[1 + len(QUANTILES) :].astype(np.int64),
        ).to_array()

    def read(self) -> Floats:
        """The numbers for the log, of a model that is in one process."""
        return self.reading(self.extremes()[None], self.counts())


def _rounds_kept(noise: CorrelatedNoise) -> int:
    """The number of rounds that must be kept to undo the correlation of the noise."""
    return noise.bands if isinstance(noise, BandedNoise) else noise.span.bit_length()


@dataclass(frozen=True)
class _Steps:
    """How coarsely a round was rounded: by group of layers, `relative` to the release's size and in `absolute` steps."""

    relative: Floats
    absolute: Floats
    rms: Floats  # of the release

    @classmethod
    def of(cls, release: Any, others: Any, groups: Sequence[slice], factor: float) -> "_Steps":
        """From samples of the vectors; `factor` is how many rounds were added up."""
        relative, absolute, rms = _sampled_steps(release, groups)
        if others is not None:
            more = _sampled_steps(others, groups)
            relative, absolute = relative + more[0], absolute + more[1]
        return cls(factor * relative, factor * absolute, rms)

    def is_fine(self, units: Floats) -> bool:
        """Whether rounding is too small to matter to noise with these standard deviations."""
        return bool((self.relative * self.rms + self.absolute < FINE * units).all())

    @property
    def variances(self) -> Floats:
        return (self.relative * self.rms + self.absolute) ** 2 / 12


def _sampled_steps(vector: Any, groups: Sequence[slice]) -> tuple[Floats, Floats, Floats]:
    """Relative and absolute steps of a vector, and its root mean square, by group."""
    step = max(len(vector) // SAMPLE, 1)
    sample = own_numbers(vector[::step])
    edges = [-(-place.start // step) for place in groups]
    sizes, whole = np.diff([*edges, len(sample)]), rounding_step(sample)
    parts = np.split(sample, edges[1:])
    if len(groups) == 1 or whole[1]:
        relative = np.full(len(groups), whole[0])
    elif sample.dtype == np.float32:
        relative = many_parts.relative_steps(sample, sizes)
    else:
        relative = np.array([rounding_step(part, grid=False)[0] for part in parts])
    if many_parts.are_many(groups, len(sample)):
        rms = np.sqrt(many_parts.squares(sample, sizes) / np.maximum(sizes, 1))
    else:
        rms = np.array([math.sqrt(np.mean(np.square(part, dtype=np.float64))) if len(part) else 0.0 for part in parts])
    absent = sizes < FEWEST_SAMPLED
    relative[absent] = relative.max()  # nothing is known of a group that is hardly sampled
    rms[absent] = rms.max()
    return relative, np.full(len(groups), whole[1]), rms


def _extremes(total: Any, own: _Block) -> tuple[float, float, float, float]:
    """The smallest sum and its layer, then the largest."""
    ends = [int(total.argmin()), int(total.argmax())]
    low, high = own.layers_at(np.array(ends)).tolist()
    return float(total[ends[0]]), float(low), float(total[ends[1]]), float(high)
