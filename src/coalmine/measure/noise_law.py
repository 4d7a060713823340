"""Measurements of one round's noise vector that distinguish independent Gaussian noise from anything else.

The noise vector is the release of a round without all other updates and without the canaries. Each measurement is a few
numbers that go into the round's record; the gauges test them over the whole run. Cheap measurements are taken in every
round, the others in those that `ExpensiveRounds` draws. A large model on a GPU is measured in those rounds only.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import fft

from coalmine.argument_checks import Floats
from coalmine.measure.arrays import arrays_of, host_array, is_on_device, numpy_vector
from coalmine.measure.round import LARGEST_SQUARE, SMALLEST_SQUARE
from coalmine.measure.settings import Settings

CELL = 0.125  # width of a histogram's cell, in standard deviations
CELLS = 96  # between -6 and 6 standard deviations; one more on each side for values beyond
SMALLEST_GROUP = 256  # coordinates; smaller layers are standardised together with their neighbours
SMALLEST_LAYER = 16  # fewest coordinates of a layer that is compared with another
TAIL = 512  # number of largest values that are kept to look for repeated ones
PEAKS = 256  # number of largest values whose indices and signs are kept, to find them in another round
GRID_BINS, GRID_PER_STD = 4096, 256  # for the characteristic function: bins over ±8 standard deviations
GRID_FFT = 8192
COARSEST, FINEST = 1.0, 50.0  # frequencies searched for a grid, in cycles per standard deviation
TINIEST, HUGEST = 1e-30, 1e30  # standard deviations of noise whose values single precision distinguishes
# A model with more coordinates is measured in full in few rounds.
MANY_COORDINATES = 1 << 17
COARSE = 2.0**-13  # relative step from which on rounding is larger than that of single precision
BARE = 1e-4  # standard deviations below which a coordinate has no noise, if canaries were subtracted exactly


@dataclass(frozen=True)
class NoiseParts:
    """The slices of the layers in the vector: `groups` to standardise by, `pairs` that might share random numbers."""

    groups: tuple[slice, ...]
    pairs: tuple[tuple[slice, slice], ...]

    @classmethod
    def of(cls, layers: Sequence[tuple[str, int]], dim: int) -> "NoiseParts":
        """The parts of a vector in one block."""
        edges = np.cumsum([size for _, size in layers]).tolist() or [dim]
        places = [slice(int(one), int(two)) for one, two in itertools.pairwise([0, *edges])]
        return cls(tuple(_merged(places)), tuple(_pairs(places)))

    @classmethod
    def of_all(cls, settings: Settings) -> "NoiseParts":
        """The parts of all measured coordinates, blocks one after another."""
        if settings.replicated:
            return cls.of(settings.gauged_layers, settings.law_dim)
        sizes = [_size(place) for place in settings.law_stretches]
        by_start = list(zip(np.cumsum([0, *sizes]).tolist(), cls.of_blocks(settings), strict=False))
        return cls(
            tuple(_moved(place, start) for start, part in by_start for place in part.groups),
            tuple((_moved(one, start), _moved(two, start)) for start, part in by_start for one, two in part.pairs),
        )

    @classmethod
    def of_blocks(cls, settings: Settings) -> "tuple[NoiseParts, ...]":
        """The parts of the measured coordinates of each block: a layer ends where the block does."""
        edges = np.cumsum([size for _, size in settings.segments] if settings.layers else [], dtype=np.int64)
        parts, first = [], 0
        for size, place in zip(settings.block_sizes, settings.law_stretches, strict=True):
            start, stop = first + place.start, first + place.stop
            between = slice(np.searchsorted(edges, start, side="right"), np.searchsorted(edges, stop))
            inside = (edges[between] - start).tolist()
            pieces = [("", two - one) for one, two in itertools.pairwise([0, *inside, stop - start])]
            parts.append(cls.of(pieces, stop - start))
            first += size
        return tuple(parts)


def _moved(place: slice, start: int) -> slice:
    return slice(place.start + start, place.stop + start)


def _merged(places: list[slice]) -> list[slice]:
    """Neighbouring layers merged until each group is large enough; the last one joins the group before it."""
    groups: list[slice] = []
    for place in places:
        if groups and _size(groups[-1]) < SMALLEST_GROUP:
            groups[-1] = slice(groups[-1].start, place.stop)
        else:
            groups.append(place)
    if len(groups) > 1 and _size(groups[-1]) < SMALLEST_GROUP:
        last = groups.pop()
        groups[-1] = slice(groups[-1].start, last.stop)
    return groups


def _pairs(places: list[slice]) -> list[tuple[slice, slice]]:
    """Each layer with the next one, and with the next one of its size: both start alike if a random key is reused."""
    pairs = {}
    last_of_size: dict[int, slice] = {}
    for before, place in zip([None, *places], places, strict=False):
        size = _size(place)
        for other in (before, last_of_size.get(size)):
            if other is not None and min(_size(other), size) >= SMALLEST_LAYER:
                shared = min(_size(other), size)
                key = (other.start, place.start, shared)
                pairs[key] = (slice(other.start, other.start + shared), slice(place.start, place.start + shared))
        last_of_size[size] = place
    return list(pairs.values())


def _size(place: slice) -> int:
    return int(place.stop - place.start)


def measure_law(
    noise: Any, release: Any, parts: NoiseParts, *, full: bool, exact: bool, sizes: Sequence[Any] = ()
) -> dict[str, Any]:
    """The measurements of a noise vector, as the fields of a round's record.

    `exact` means that the canaries were subtracted at their declared norm: only then can repeated values be detected.
    `sizes` are vectors whose size the noise must not follow: the sum of all other updates, and the canaries.
    """
    sums = law_sums(noise, release, parts, full=full, exact=exact, sizes=sizes, width=zero_width(len(noise)))
    return law_record([sums], sums, parts, full=full, exact=exact)


def law_sums(
    noise: Any,
    release: Any,
    parts: NoiseParts,
    *,
    full: bool,
    exact: bool,
    sizes: Sequence[Any],
    width: float,
    blocks: int = 1,
) -> dict[str, Floats]:
    """The measurements of the noise in one of `blocks` blocks, by name; `law_record` makes the record from them."""
    vector: Any = noise if is_on_device(noise) else host_array(noise, double=False)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = arrays_of(vector).law_sums(vector, parts.groups, parts.pairs)
    first = 3 * len(parts.groups)
    measured = {"moments": numbers[:first], "lags": numbers[first : first + 2], "dots": numbers[first + 2 :]}
    if full and _is_sound(measured["moments"], numbers):
        measured |= _full(vector, release, parts, measured["moments"].reshape(-1, 3), exact, sizes, width, blocks)
    return measured


def _is_sound(moments: Floats, numbers: Floats) -> bool:
    """Whether there is noise in every group, and its fourth powers neither underflow nor overflow."""
    squares = moments[1::3]
    return bool(
        (squares > 0).all()
        and np.isfinite(numbers).all()
        and SMALLEST_SQUARE < squares.min() <= squares.max() < LARGEST_SQUARE
    )


def summed_sizes(*, full: bool, sizes: int) -> dict[str, int]:
    """The size of each measurement that is summed over blocks; `sizes` is the number of those in `measure_law`."""
    if not full:
        return {"lags": 2}
    return {"lags": 2, "counts": CELLS + 2, "zeros": 2, "follows": 2 * sizes, "cells": GRID_BINS}


def block_sizes(parts: NoiseParts, *, dim: int, number: int, blocks: int, full: bool) -> dict[str, int]:
    """The size of each measurement that is kept for every block: for block `number`, of size `dim`."""
    numbers = {"moments": 3 * len(parts.groups), "dots": 3 * len(parts.pairs)}
    if not full:
        return numbers
    sample = len(range(0, dim, _sample_step(dim, blocks)))
    numbers |= {"spectrum": 2, "release": sample, "noise": sample, "tail": _tail_size(dim, blocks)}
    return numbers | ({"peaks": _peaks_size(dim)} if number == 0 else {})


@dataclass(frozen=True)
class LawSizes:
    """The sizes of the sums that describe the noise: of those over all blocks, and of those kept for each block."""

    shared: dict[str, int]
    by_block: list[dict[str, int]]

    @classmethod
    def of(cls, settings: Settings, parts: Sequence[NoiseParts], *, full: bool, sizes: int) -> "LawSizes":
        """For a model in blocks, with the noise's parts in each; `sizes` is the number of those in `measure_law`."""
        places = settings.law_stretches
        by_block = [
            block_sizes(part, dim=_size(place), number=number, blocks=len(places), full=full)
            for number, (part, place) in enumerate(zip(parts, places, strict=True))
        ]
        return cls(summed_sizes(full=full, sizes=sizes), by_block)

    @property
    def total(self) -> int:
        """How many numbers there are, after two for the rounding."""
        return 2 + sum(self.shared.values()) + sum(sum(sizes.values()) for sizes in self.by_block)

    def zeros(self) -> tuple[dict[str, Floats], list[dict[str, Floats]]]:
        """Arrays for the sums."""
        return self.unpack(np.zeros(self.total - 2))

    def unpack(self, numbers: Floats) -> tuple[dict[str, Floats], list[dict[str, Floats]]]:
        """The sums by name, in arrays of their own."""
        arrays, place = [], 0
        for sizes in (self.shared, *self.by_block):
            edges = np.cumsum([place, *sizes.values()])
            arrays.append({name: numbers[i:j] for name, i, j in zip(sizes, edges, edges[1:], strict=False)})
            place = int(edges[-1])
        return arrays[0], arrays[1:]


def law_record(
    blocks: Sequence[dict[str, Floats]], summed: dict[str, Floats], parts: NoiseParts, *, full: bool, exact: bool
) -> dict[str, Any]:
    """The fields of a round's record from the measurements of each block, and those summed over blocks.

    Empty if a layer has no noise at all, which its own gauge reports.
    """
    moments = np.concatenate([sums["moments"] for sums in blocks])
    dots = np.concatenate([sums["dots"] for sums in blocks]).reshape(-1, 3)
    if not _is_sound(moments, np.concatenate([moments, summed["lags"], dots.ravel()])):
        return {}
    moments = moments.reshape(-1, 3)
    cosines = dots[:, 0] / np.sqrt(np.maximum(dots[:, 1] * dots[:, 2], np.finfo(np.float64).tiny))
    fields: dict[str, Any] = {
        "law_moments": moments.ravel(),
        "law_lags": np.concatenate([summed["lags"] / moments[:, 1].sum(), cosines]),
    }
    if not full:
        return fields
    dim = sum(_size(place) for place in parts.groups)
    stds = np.sqrt(moments[:, 1] / np.array([_size(place) for place in parts.groups]))
    release, noise = (np.concatenate([sums[name] for sums in blocks]) for name in ("release", "noise"))
    std = float(np.sqrt(moments[:, 1].sum() / dim))
    fields |= {
        "law_counts": summed["counts"].astype(np.int64),
        "law_zeros": summed["zeros"].astype(np.int64)[: 2 if exact else 1],
        "law_follows": _followed(summed["follows"]),
        "law_spectrum": max((sums["spectrum"] for sums in blocks), key=lambda reading: float(reading[0])),
        "law_grid": np.array(_grid(summed["cells"], release, noise, dim, std)),
        "law_peaks": blocks[0]["peaks"].astype(np.int32),
    }
    if exact and stds.min() > TINIEST and stds.max() < HUGEST:
        fields["law_tail"] = np.sort(np.concatenate([sums["tail"] for sums in blocks])).astype(np.float32)
    return fields


def _full(
    vector: Any,
    release: Any,
    parts: NoiseParts,
    moments: Floats,
    exact: bool,
    sizes: Sequence[Any],
    width: float,
    blocks: int,
) -> dict[str, Floats]:
    stds = [float(np.sqrt(moments[i, 1] / _size(place))) for i, place in enumerate(parts.groups)]
    arrays = arrays_of(vector)
    standard = arrays.scaled(vector, parts.groups, stds)
    cells = (standard * GRID_PER_STD + GRID_BINS // 2).clip(0, GRID_BINS - 1)
    measured = {
        "counts": arrays.counts((standard * (1 / CELL) + (CELLS // 2 + 1)).clip(0, CELLS + 1), number=CELLS + 2),
        "zeros": np.array([_near_zero(standard, width), _near_zero(standard, BARE) if exact else 0]),
        "follows": np.array([number for size in sizes for number in arrays.follows(standard, size)]),
        "spectrum": np.array(_spectrum(standard)),
        "cells": arrays.counts(cells, number=GRID_BINS),
        "release": _host_sample(release, blocks),
        "noise": _host_sample(vector, blocks),
        "peaks": _peaks(standard),
        "tail": _tail(vector, blocks) if exact else np.zeros(0),
    }
    return {name: np.asarray(value, dtype=np.float64) for name, value in measured.items()}


def zero_width(dim: int) -> float:
    """How close to 0 a coordinate counts as one without noise: the remainder of the canaries is no larger."""
    return max(0.002, 3.0 / float(np.sqrt(dim)))


def _near_zero(standard: Any, width: float) -> int:
    return int((abs(standard) < width).sum())


def _followed(sums: Floats) -> Floats:
    """A standard normal score and the slope of the noise's variance, for each vector that the noise may follow."""
    scores = [
        (product / float(np.sqrt(2 * square)), product / square) if square > 0 else (0.0, 0.0)
        for product, square in sums.reshape(-1, 2)
    ]
    return np.array(scores).ravel()


def _spectrum(standard: Any) -> tuple[float, float]:
    """The largest autocorrelation over all lags, in standard deviations of its null, and its lag."""
    dim = len(standard)
    score, lag, length = arrays_of(standard).strongest_lag(standard, fft.next_fast_len(dim, real=True))
    return score / (length / dim), lag


def _grid(cells: Floats, release: Floats, noise: Floats, dim: int, std: float) -> tuple[float, float, float, float]:
    """How well the values align with a grid at their best frequency (0 to 1), that frequency, and two references.

    Values on a grid of spacing Δ make the characteristic function 1 at frequency 1/Δ, and small around it. The first
    reference is the alignment of the release itself: if it lies on the grid, it was rounded after the noise was added, which
    costs no privacy. The second is the median around the peak: a law with sharp edges is large there too.
    """
    image = np.abs(fft.rfft(cells, n=GRID_FFT)) / dim
    frequencies = np.arange(image.size) * GRID_PER_STD / GRID_FFT
    image[(frequencies < COARSEST) | (frequencies > FINEST)] = 0.0
    best = int(np.argmax(image))
    strength, frequency = float(image[best]), float(frequencies[best])
    around = float(np.median(image[(frequencies >= COARSEST) & (np.abs(frequencies - frequency) < 1.0)]))
    own = 0.0
    if strength * strength * dim > 16:  # otherwise it is chance, and needs no reference
        own = _alignment(release, noise, frequency / std, GRID_PER_STD / GRID_FFT / std)
    return strength, frequency, own, around


def _alignment(release: Floats, noise: Floats, frequency: float, width: float) -> float:
    """How well a sample of a release aligns with a grid at any frequency close to the given one, 0 to 1.

    Only coordinates that hold more than noise are used: only there does its own grid differ from the noise's. Of those,
    the smaller half is used, since large ones need a finer search.
    """
    values = release[np.abs(release - noise) * frequency >= 0.5]
    values = values[np.abs(values) <= np.median(np.abs(values), keepdims=True)][:4096] if values.size else values
    if np.unique(values).size < 16:
        return 0.0
    span = float(np.ptp(values))
    tried = frequency + width * np.linspace(-1.5, 1.5, int(min(max(12 * width * span, 9), 2000)))
    best = 0.0
    for part in np.array_split(tried, max(len(tried) // 64, 1)):
        phase = (2 * np.pi * part[:, None]) * values
        best = max(best, float(np.hypot(np.cos(phase).mean(axis=1), np.sin(phase).mean(axis=1)).max()))
    return best


def _tail(vector: Any, blocks: int) -> Floats:
    """The largest absolute values of one of `blocks` blocks, sorted."""
    sizes, _, _ = arrays_of(vector).largest(vector, count=_tail_size(len(vector), blocks))
    return np.sort(sizes.astype(np.float64))


def _tail_size(dim: int, blocks: int) -> int:
    """The number of a block's largest values that are kept, so that those of all blocks are few."""
    return min(max(TAIL // blocks, 8), max(dim // 8, 1))


def _peaks(standard: Any) -> npt.NDArray[np.int32]:
    """Indices of the largest values, counted from 1, with the values' signs."""
    _, places, signs = arrays_of(standard).largest(standard, count=_peaks_size(len(standard)))
    order = np.argsort(places)
    return np.asarray((places + 1) * signs)[order].astype(np.int32)


def _peaks_size(dim: int) -> int:
    """The number of largest values whose indices are kept."""
    return min(PEAKS, max(dim // 8, 1))


def resolution_of(vector: Any) -> float | None:
    """The mean squared rounding error of a vector that lies on a grid or has fewer bits than single precision; otherwise 0.

    bf16 and fp16 round large coordinates coarsely, whatever type they are stored in later. None for a vector of zeros.
    """
    values = own_numbers(vector[:: _step_of(vector)])
    if not values.any():
        return None
    relative, step = rounding_step(values)
    if step:
        return step * step / 12
    if relative < COARSE:
        return 0.0
    values = values.astype(np.float64)
    steps = np.ldexp(relative, np.frexp(values[values != 0])[1] - 1)
    return float(np.sum(steps * steps) / 12 / values.size)


def own_numbers(vector: Any) -> npt.NDArray[np.floating[Any]]:
    """A vector on the host, in single precision if that holds its numbers, which saves `rounding_step` time."""
    return numpy_vector(vector) if is_on_device(vector) else host_array(vector)


def rounding_step(values: npt.NDArray[np.floating[Any]], *, grid: bool = True) -> tuple[float, float]:
    """The steps of rounded values: relative to the largest power of 2 below each, or, if they lie on a grid, absolute.

    One of the two is 0, or both for zeros. Without `grid` only the first is looked for.
    """
    if not values.any():
        return 0.0, 0.0
    step = _common_step(values[:1024].astype(np.float64)) if grid else 0.0
    if step:
        return 0.0, step
    if values.dtype != np.float32:
        with np.errstate(over="ignore"):  # a value beyond single precision does not equal its conversion either
            single = values.astype(np.float32)
        if not np.array_equal(single.astype(np.float64), values):
            return 2.0**-52, 0.0
        values = single
    used = int(np.bitwise_or.reduce(np.ascontiguousarray(values).view(np.uint32))) & 0x7FFFFF
    spare = 23 if used == 0 else (used & -used).bit_length() - 1
    return 2.0 ** (spare - 23), 0.0


def _common_step(values: Floats) -> float:
    """The step of a grid that all values lie on, as after quantisation; 0 if there is none coarse enough to matter."""
    levels = np.unique(values)
    if levels.size < 3:
        return 0.0
    gaps = np.diff(levels)
    step = float(gaps[gaps > 1e-6 * (levels[-1] - levels[0])].min(initial=np.inf))
    if not np.isfinite(step) or (levels.size < 16 and step > 0.2 * (levels[-1] - levels[0])):
        return 0.0
    places = (levels - levels[0]) / step
    return step if np.abs(places - np.round(places)).max() < 1e-3 else 0.0


def _host_sample(vector: Any, blocks: int = 1) -> Floats:
    """A sample of the coordinates of one of `blocks` blocks."""
    one = blocks == 1 and not is_on_device(vector)
    return numpy_vector(vector[:: _step_of(vector) if one else _sample_step(len(vector), blocks)])


def _step_of(vector: Any) -> int:
    """The step of a sample of one vector."""
    return _sample_step(len(vector), 1) if is_on_device(vector) else max(len(vector) // 16384, 1)


def _sample_step(dim: int, blocks: int) -> int:
    """The step of the sample of a block, so that the samples of all blocks are small."""
    return max(dim * blocks // 2048, 1)
