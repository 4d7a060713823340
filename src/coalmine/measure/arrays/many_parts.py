"""Sums over the parts of a vector on the host, if they are many and small: a call for each would take longer than its work.

All sums are in double precision. Other vectors are summed part by part, as `on_numpy` does.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats

FEWEST, SMALL = 64, 512  # parts from which on they are summed together, and their mean size up to which that is faster
LONGEST = 1 << 22  # numbers of a vector up to which they are: longer ones would need long scratch
FRACTION, SIZE = np.uint32(0x7FFFFF), np.uint32(0x7FFFFFFF)  # bits of a number in single precision


def are_many(parts: Sequence[Any], length: int) -> bool:
    """Whether the parts of a vector of this length are summed together."""
    return len(parts) >= FEWEST and length <= min(LONGEST, SMALL * len(parts))


def sums(values: Any, sizes: npt.ArrayLike) -> Floats:
    """The sums of consecutive parts, which together are the vector."""
    counts = np.asarray(sizes, np.int64)
    found, full = np.zeros(counts.size), counts > 0
    starts = (np.cumsum(counts) - counts)[full]
    if starts.size:
        found[full] = np.add.reduceat(values, starts, dtype=np.float64)
    return found


def squares(vector: Any, sizes: npt.ArrayLike) -> Floats:
    """The squared lengths of consecutive parts, which together are the vector."""
    with np.errstate(over="ignore", invalid="ignore"):
        return sums(np.square(vector, dtype=np.float64), sizes)


def law_sums(vector: Any, groups: Sequence[slice], pairs: Sequence[tuple[slice, slice]]) -> Floats:
    """As `on_numpy.law_sums`: absolute values, squares and fourth powers by group, two lags, then products of pairs."""
    sizes = sizes_of(groups)
    square = np.square(vector, dtype=np.float64)
    by_group = np.stack([sums(np.abs(vector), sizes), sums(square, sizes), sums(np.square(square), sizes)], axis=1)
    lags = [float(vector[lag:] @ vector[:-lag]) for lag in (1, 2)]
    return np.concatenate([by_group.ravel(), lags, _pair_sums(np.asarray(vector, np.float64), pairs)])


def _pair_sums(vector: Floats, pairs: Sequence[tuple[slice, slice]]) -> Floats:
    """For each pair of parts of one size, their product and their squared lengths."""
    if not pairs:
        return np.zeros(0)
    sizes = np.array(sizes_of([one for one, _ in pairs]))
    offsets = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    first, second = (vector[np.repeat([pair[end].start for pair in pairs], sizes) + offsets] for end in (0, 1))
    return np.stack(
        [sums(first * second, sizes), sums(first * first, sizes), sums(second * second, sizes)], axis=1
    ).ravel()


def relative_steps(values: npt.NDArray[np.float32], sizes: npt.ArrayLike) -> Floats:
    """The relative steps of rounded values by part, as `noise_law.rounding_step` without a grid."""
    counts = np.asarray(sizes, np.int64)
    full = counts > 0
    starts = (np.cumsum(counts) - counts)[full]
    steps = np.zeros(counts.size)
    if starts.size:
        bits = np.bitwise_or.reduceat(np.ascontiguousarray(values).view(np.uint32), starts)
        used = (bits & FRACTION).astype(np.int64)
        lowest = np.where(used == 0, 1 << 23, used & -used)
        steps[full] = np.where(bits & SIZE, lowest * 2.0**-23, 0.0)
    return steps


def sizes_of(parts: Sequence[slice]) -> list[int]:
    """How many numbers each part has."""
    return [part.stop - part.start for part in parts]
