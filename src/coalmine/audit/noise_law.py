"""Measurements of one round's noise vector that tell Gaussian noise, fresh in every coordinate, from anything else.

The noise vector is what a round released, less everybody else's part and less the canaries. Each measurement is a handful
of numbers that go into the round's record; `law_gauges` judges them over the whole run. Cheap measurements are taken in
every round, the others in the rounds that `is_full` names. A large model on a GPU is measured in those rounds only.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import fft

from coalmine.argument_checks import Floats
from coalmine.audit.vectors import is_tensor, numpy_vector
from coalmine.storage.round_schema import LARGEST_SQUARE, SMALLEST_SQUARE

CELL = 0.125  # width of a histogram's cell, in standard deviations
CELLS = 96  # between -6 and 6 standard deviations; one more on each side for what lies beyond
SMALLEST_GROUP = 256  # coordinates: smaller layers are standardised together with their neighbours
SMALLEST_LAYER = 16  # coordinates of a layer that is compared with another
TAIL = 512  # of the largest values that are kept to look for repeated ones
PEAKS = 256  # places of the largest values, with their signs, that are kept to find them again in another round
GRID_BINS, GRID_PER_STD = 4096, 256  # for the characteristic function: bins over ±8 standard deviations
GRID_FFT = 8192
COARSEST, FINEST = 1.0, 50.0  # frequencies searched for a grid, in cycles per standard deviation
TINIEST, HUGEST = 1e-30, 1e30  # standard deviations of noise whose values single precision can tell apart
MANY_COORDINATES = (
    1 << 17
)  # from here on the expensive measurements are taken in every twentieth round, later every fiftieth
BARE = 1e-4  # standard deviations within which a coordinate has no noise, where canaries were subtracted exactly
FIRST_ROUNDS = 20  # all of which are measured in full in smaller models


@dataclass(frozen=True)
class NoiseParts:
    """Where in the vector the layers lie: `groups` to standardise by, `pairs` of layers that might share one draw."""

    groups: tuple[slice, ...]
    pairs: tuple[tuple[slice, slice], ...]

    @classmethod
    def of(cls, layers: Sequence[tuple[str, int]], dim: int) -> "NoiseParts":
        edges = np.concatenate([[0], np.cumsum([size for _, size in layers])]) if layers else np.array([0, dim])
        places = [slice(int(start), int(stop)) for start, stop in itertools.pairwise(edges)]
        return cls(tuple(_merged(places)), tuple(_pairs(places)))


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
    """Each layer with the next one, and with the next one of its own size: a reused key gives both the same start."""
    found = {}
    last_of_size: dict[int, slice] = {}
    for before, place in zip([None, *places], places, strict=False):
        size = _size(place)
        for other in (before, last_of_size.get(size)):
            if other is not None and min(_size(other), size) >= SMALLEST_LAYER:
                shared = min(_size(other), size)
                key = (other.start, place.start, shared)
                found[key] = (slice(other.start, other.start + shared), slice(place.start, place.start + shared))
        last_of_size[size] = place
    return list(found.values())


def _size(place: slice) -> int:
    return int(place.stop - place.start)


def is_on_device(vector: Any) -> bool:
    """Whether a vector lies on a GPU, where many small measurements cost more than a few large ones."""
    return is_tensor(vector) and bool(vector.device.type != "cpu")


def is_full(order: int, dim: int) -> bool:
    """Whether the expensive measurements are taken in the first, second, ... observed round."""
    if dim > MANY_COORDINATES:
        return order % (20 if order <= 100 else 50) == 1
    return order <= FIRST_ROUNDS or order % 10 == 0


def measure_law(
    noise: Any, release: Any, parts: NoiseParts, *, full: bool, exact: bool, sizes: Sequence[Any] = ()
) -> dict[str, Any]:
    """The measurements of a noise vector, as the fields of a round's record.

    `exact` says that the canaries were subtracted at their declared length: only then can repeated values be seen. `sizes`
    are vectors whose size the noise must not follow: everybody else's part, and the canaries.
    """
    vector: Any = noise if is_on_device(noise) else _host_vector(noise)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = _numbers(_sums(vector, parts))
    moments, products = numbers[: 3 * len(parts.groups)].reshape(-1, 3), numbers[3 * len(parts.groups) + 2 :]
    if not (moments[:, 1] > 0).all() or not np.isfinite(numbers).all():
        return {}  # a layer without any noise: its own gauge says so
    if not SMALLEST_SQUARE < moments[:, 1].min() <= moments[:, 1].max() < LARGEST_SQUARE:
        return {}  # fourth powers vanish or overflow
    lags = numbers[3 * len(parts.groups) :][:2] / moments[:, 1].sum()
    dots = products.reshape(-1, 3)
    cosines = dots[:, 0] / np.sqrt(np.maximum(dots[:, 1] * dots[:, 2], np.finfo(np.float64).tiny))
    found: dict[str, Any] = {"law_moments": moments.ravel(), "law_lags": np.concatenate([lags, cosines])}
    if full:
        found |= _full(vector, release, parts, moments, exact, sizes)
    return found


def _sums(vector: Any, parts: NoiseParts) -> list[Any]:
    """Of each group of layers the sums of sizes, squares and fourth powers; then products of neighbours and of layers."""
    square = vector * vector
    sums = [value for g in parts.groups for value in (abs(vector[g]).sum(), square[g].sum(), square[g] @ square[g])]
    sums += [vector[lag:] @ vector[:-lag] for lag in (1, 2)]
    for one, two in parts.pairs:
        first, second = vector[one], vector[two]
        sums += [first @ second, first @ first, second @ second]
    return sums


def _full(
    vector: Any, release: Any, parts: NoiseParts, moments: Floats, exact: bool, sizes: Sequence[Any]
) -> dict[str, Any]:
    stds = [float(np.sqrt(moments[i, 1] / _size(place))) for i, place in enumerate(parts.groups)]
    standard = _scaled(vector, parts.groups, stds)
    found: dict[str, Any] = {
        "law_counts": _histogram(standard),
        "law_zeros": np.array([_near_zero(standard, zero_width(len(vector)))], dtype=np.int64),
        "law_follows": np.array([number for size in sizes for number in _follows(standard, size)]),
        "law_spectrum": np.array(_spectrum(standard)),
        "law_grid": np.array(_grid(standard, release, vector, float(np.sqrt(moments[:, 1].sum() / len(vector))))),
        "law_peaks": _peaks(standard),
    }
    if exact:
        if min(stds) > TINIEST and max(stds) < HUGEST:
            found["law_tail"] = _tail(vector)
        found["law_zeros"] = np.append(found["law_zeros"], _near_zero(standard, BARE))
    return found


def zero_width(dim: int) -> float:
    """How near to 0 a coordinate counts as one without noise: what is left of the canaries is no larger."""
    return max(0.002, 3.0 / float(np.sqrt(dim)))


def _near_zero(standard: Any, width: float) -> int:
    return int((abs(standard) < width).sum())


def _follows(standard: Any, size: Any) -> tuple[float, float]:
    """Whether the noise is larger where another vector is: a standard normal score, and the slope of its variance.

    The other vector's size is cut at three times its mean, so that no single coordinate decides.
    """
    weights = abs(_as_vector(size, standard))
    mean = weights.mean()
    weights = (weights / (mean + (mean == 0))).clip(0, 3)
    weights = weights - weights.mean()
    product, square = _numbers([weights @ (standard * standard - 1), weights @ weights])
    if square <= 0:
        return 0.0, 0.0
    return product / float(np.sqrt(2 * square)), product / square


def _as_vector(vector: Any, like: Any) -> Any:
    """A vector where another one is, in its precision."""
    if is_tensor(like):
        return sys.modules["torch"].as_tensor(vector, device=like.device).to(like.dtype)
    return np.asarray(_host_vector(vector), dtype=like.dtype)


def _histogram(standard: Any) -> npt.NDArray[np.int64]:
    cells = (standard * (1 / CELL) + (CELLS // 2 + 1)).clip(0, CELLS + 1)
    return _counts(cells, CELLS + 2)


def _spectrum(standard: Any) -> tuple[float, float]:
    """The largest autocorrelation over all lags, in standard deviations of its null, and its lag."""
    dim = len(standard)
    size = fft.next_fast_len(dim, real=True)
    half = size // 2
    if is_tensor(standard):
        torch = sys.modules["torch"]
        lagged = torch.fft.irfft(torch.fft.rfft(standard, n=size).abs() ** 2, n=size)[: half + 1].abs()
        lag = torch.arange(half + 1, device=lagged.device, dtype=lagged.dtype)
    else:
        image = fft.rfft(standard, n=size)
        lagged = np.abs(fft.irfft(image.real**2 + image.imag**2, n=size)[: half + 1])
        lag = np.arange(half + 1, dtype=lagged.dtype)
    terms = (dim - lag).clip(0) + (dim - size + lag).clip(
        0
    )  # products in each sum, around the end of the padded vector
    if 2 * half == size:
        terms[-1] *= 2  # at half the length each product comes twice
    scores = lagged / terms.clip(1) ** 0.5
    scores[0] = 0.0
    best = scores.argmax()
    largest, place, length = _numbers([scores[best], lag[best], lagged[0]])
    return largest / (length / dim), place


def _grid(standard: Any, release: Any, vector: Any, std: float) -> tuple[float, float, float, float]:
    """How well the values line up at their best frequency (0 to 1), that frequency, and what to compare it with.

    Values on a grid of spacing Δ make the characteristic function 1 at frequency 1/Δ, and small beside it. Third comes how
    well the release itself lines up: one that lies on the grid was rounded after the noise was added, which costs no
    privacy. Fourth the median beside the peak: a law with sharp edges is large there too.
    """
    cells = (standard * GRID_PER_STD + GRID_BINS // 2).clip(0, GRID_BINS - 1)
    image = np.abs(fft.rfft(_counts(cells, GRID_BINS).astype(np.float64), n=GRID_FFT)) / len(standard)
    frequencies = np.arange(image.size) * GRID_PER_STD / GRID_FFT
    image[(frequencies < COARSEST) | (frequencies > FINEST)] = 0.0
    best = int(np.argmax(image))
    strength, frequency = float(image[best]), float(frequencies[best])
    beside = float(np.median(image[(frequencies >= COARSEST) & (np.abs(frequencies - frequency) < 1.0)]))
    own = 0.0
    if strength * strength * len(standard) > 16:  # else it is chance, and there is nothing to excuse
        own = _alignment(release, vector, frequency / std, GRID_PER_STD / GRID_FFT / std)
    return strength, frequency, own, beside


def _alignment(release: Any, noise: Any, frequency: float, width: float) -> float:
    """How well a release lines up at any frequency this close to the given one, 0 to 1.

    Looked at are coordinates in which it holds more than noise: only there does its own grid differ from the noise's. Of
    those the smaller ones, as large ones need a finer search.
    """
    values = _host_sample(release)
    values = values[np.abs(values - _host_sample(noise)) * frequency >= 0.5]
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


def _tail(vector: Any) -> npt.NDArray[np.float32]:
    """The largest values, signs dropped, in order."""
    count = min(TAIL, max(len(vector) // 8, 1))
    if is_tensor(vector):
        largest = numpy_vector(vector.abs().topk(count).values)
    else:
        size = np.abs(vector)
        largest = np.partition(size, len(size) - count)[-count:]
    return np.sort(largest).astype(np.float32)


def _peaks(standard: Any) -> npt.NDArray[np.int32]:
    """Places of the largest values, counted from 1, with the values' signs."""
    count = min(PEAKS, max(len(standard) // 8, 1))
    if is_tensor(standard):
        places = standard.abs().topk(count).indices.sort().values
        signs = standard[places].sign().to(places.dtype)
        return np.asarray(((places + 1) * signs).cpu().numpy()).astype(np.int32)
    places = np.sort(np.argpartition(np.abs(standard), len(standard) - count)[-count:])
    return np.asarray((places + 1) * np.sign(standard[places])).astype(np.int32)


def resolution_of(vector: Any) -> float | None:
    """The mean squared rounding error of a vector that lies on a grid or has fewer bits than single precision; else 0.

    bf16 and fp16 round large coordinates coarsely, whatever type they are stored in when they come here. None for a vector
    of zeros, which says nothing.
    """
    values = _host_sample(vector)
    if not values.any():
        return None
    step = _common_step(values[:1024])
    if step:
        return step * step / 12
    with np.errstate(over="ignore"):  # what single precision cannot hold is not equal to it either
        single = values.astype(np.float32)
    if not np.array_equal(single.astype(np.float64), values):
        return 0.0
    used = int(np.bitwise_or.reduce(single.view(np.uint32) & np.uint32(0x7FFFFF)))
    spare = 23 if used == 0 else (used & -used).bit_length() - 1
    if spare < 10:
        return 0.0
    exponents = np.frexp(values[values != 0])[1]
    steps = np.ldexp(1.0, exponents - 24 + spare)
    return float(np.sum(steps * steps) / 12 / values.size)


def _common_step(values: Floats) -> float:
    """The step of a grid that all values lie on, as after quantisation; 0 where there is none coarse enough to matter."""
    levels = np.unique(values)
    if levels.size < 3:
        return 0.0
    gaps = np.diff(levels)
    step = float(gaps[gaps > 1e-6 * (levels[-1] - levels[0])].min(initial=np.inf))
    if not np.isfinite(step) or (levels.size < 16 and step > 0.2 * (levels[-1] - levels[0])):
        return 0.0
    places = (levels - levels[0]) / step
    return step if np.abs(places - np.round(places)).max() < 1e-3 else 0.0


def _host_sample(vector: Any) -> Floats:
    step = max(len(vector) // (2048 if is_on_device(vector) else 16384), 1)
    return numpy_vector(vector[::step])


def _host_vector(vector: Any) -> npt.NDArray[np.floating[Any]]:
    array = vector.detach().float().numpy() if is_tensor(vector) else np.asarray(vector)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def _scaled(vector: Any, groups: Sequence[slice], stds: Sequence[float]) -> Any:
    if len(groups) == 1:
        return vector / stds[0]
    scaled = vector.clone() if is_tensor(vector) else vector.copy()
    for place, std in zip(groups, stds, strict=True):
        scaled[place] /= std
    return scaled


def _counts(cells: Any, number: int) -> npt.NDArray[np.int64]:
    if is_tensor(cells):
        torch = sys.modules["torch"]
        return np.asarray(torch.bincount(cells.to(torch.int64), minlength=number).cpu().numpy(), dtype=np.int64)
    return np.bincount(cells.astype(np.int32), minlength=number).astype(np.int64)


def _numbers(values: list[Any]) -> Floats:
    """Numbers of the host, waited for together."""
    if is_tensor(values[0]):
        return numpy_vector(sys.modules["torch"].stack(values))
    return np.array(values, dtype=np.float64)
