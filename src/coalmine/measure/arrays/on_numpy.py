"""The operations of measuring on numpy arrays. `on_torch` and `on_jax` have the same functions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import fft

from coalmine.argument_checks import Floats
from coalmine.canaries.array_types import euclidean_norm, is_tensor
from coalmine.measure.arrays import many_parts
from coalmine.measure.arrays.host import host_array, number_kind, numpy_vector

SHORTEST, LONGEST = 1e-100, 1e100  # norms of a vector; products of norms neither underflow nor overflow
CHUNK = 1 << 15  # coordinates that are added at a time, so that they stay in the cache


def unreadable(array: Any) -> str | None:
    """Why the array's numbers cannot be read; None if they can."""
    masked = isinstance(array, np.ma.MaskedArray)
    return "a masked array: fill its masked entries first" if masked else None


def norm(vector: Any) -> float:
    """The norm in float64; the vector is divided by its largest entry if squares would underflow or overflow."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        length = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
        if SHORTEST < length < LONGEST:
            return length
        largest = float(np.abs(vector).max(initial=0.0))
        if largest == 0 or not np.isfinite(largest):
            return largest
        return float(largest * np.sqrt(np.square(vector / largest, dtype=np.float64).sum()))


def norms(vector: Any, sizes: Sequence[int]) -> Floats:
    """The norms of consecutive parts of a vector."""
    if many_parts.are_many(sizes, len(vector)):
        return np.sqrt(many_parts.squares(vector, sizes))
    return np.array([norm(part) for part in np.split(vector, np.cumsum(sizes)[:-1])])


def square(vector: Any) -> Any:
    """The squared length in float64, for vectors of the usual lengths; numpy sums float16 in float16, so it is widened."""
    return euclidean_norm(vector if vector.dtype.itemsize > 2 else np.asarray(vector, np.float32)) ** 2


def squares(parts: Sequence[Any]) -> list[Any]:
    """`square` of several vectors."""
    return [square(part) for part in parts]


def group_squares(vector: Any, groups: Sequence[slice]) -> Floats:
    """The squared lengths of parts of a vector that follow each other."""
    if many_parts.are_many(groups, len(vector)):
        return many_parts.squares(vector, many_parts.sizes_of(groups))
    with np.errstate(over="ignore"):
        return np.array([float(vector[place] @ vector[place]) for place in groups])


def difference(first: Any, second: Any) -> Any:
    """first - second on the device and in the precision of `first`."""
    with np.errstate(invalid="ignore", over="ignore"):  # the length of the difference is checked
        return first - (numpy_vector(second) if is_tensor(second) else second)


def stacked(rows: Sequence[Any]) -> Any:
    """Vectors as the rows of a matrix."""
    return np.stack(rows)


def copied(vector: Any) -> Any:
    """A copy that does not change with the original."""
    return np.array(vector)


def is_contiguous(row: Any) -> bool:
    """Whether the numbers of a row follow each other in memory."""
    return bool(row.flags.c_contiguous)


def joined(pieces: Sequence[Any], places: Sequence[slice], like: Any, into: Any = None) -> Any:
    """Pieces in their places of one vector of the kind of `like`; `into` may be a buffer for it."""
    del into  # a buffer is of use on a GPU only
    vector = np.empty(places[-1].stop, like.dtype)
    for place, piece in zip(places, pieces, strict=True):
        put(vector, place, piece)
    return vector


def put(row: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """Write `factor` times a piece into the row at `place`, whatever types both have, and return the row."""
    if factor != 1.0 and type(row) is type(piece) is np.ndarray and row.dtype == piece.dtype:
        np.multiply(piece, factor, out=row[place])  # one pass over memory
        return row
    scaled = piece if factor == 1.0 else piece * factor
    row[place] = numpy_vector(scaled) if is_tensor(scaled) else scaled
    return row


def subtract(vector: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """Subtract `factor` times a piece from the vector at `place`, in the vector's precision, and return the vector."""
    array = numpy_vector(piece) if is_tensor(piece) else compatible(piece)
    part = vector[place]
    with np.errstate(over="ignore", invalid="ignore"):  # the measurements of the vector check for infinities
        np.subtract(part, array if factor == 1.0 else array * factor, out=part, casting="same_kind")
    return vector


def compatible(piece: Any) -> Any:
    """A row in single or double precision, in the byte order and layout that torch accepts."""
    return np.ascontiguousarray(piece, dtype=np.float64 if is_wide(piece) else np.float32)


def is_wide(piece: Any) -> bool:
    """Whether single precision does not hold a piece's numbers."""
    return bool(piece.dtype.itemsize > (4 if number_kind(piece) == "f" else 2))


def empty(like: Any, *, double: bool) -> Any:
    """An array without entries, of the kind and on the device of `like`, in single or double precision."""
    del like
    return np.empty(0, np.float64 if double else np.float32)


def device(vector: Any) -> Any:
    """The device of a vector; None for the host of numpy."""
    del vector


def added(total: Any, values: Any, factor: float) -> Any:
    """A total plus `factor` times values, in the total's own memory where that is possible."""
    total += values * factor
    return total


def block_parts(vector: Any, *, chunks: int, sketch: int) -> tuple[Any, Any]:
    """Squared lengths in equal parts, and sums of the numbers at regular intervals with alternating signs."""
    each, rows = len(vector) // chunks, len(vector) // (2 * sketch)
    parts, pairs = vector[: each * chunks].reshape(chunks, each), vector[: rows * 2 * sketch].reshape(rows, 2, sketch)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities, which the lengths report
        lengths = np.array([euclidean_norm(part) ** 2 for part in parts])
        sums = pairs.sum(axis=0, dtype=np.float64)
        return lengths, sums[0] - sums[1]


def numbers(values: list[Any]) -> Floats:
    """Numbers on the host, transferred at once."""
    return np.array(values, dtype=np.float64)


def law_sums(vector: Any, groups: Sequence[slice], pairs: Sequence[tuple[slice, slice]]) -> Floats:
    """Sums of absolute values, squares and fourth powers by group; then products of neighbours, and of pairs of parts."""
    if many_parts.are_many([*groups, *pairs], len(vector)):
        return many_parts.law_sums(vector, groups, pairs)
    return numbers(list_law_sums(vector, groups, pairs))


def list_law_sums(vector: Any, groups: Sequence[slice], pairs: Sequence[tuple[slice, slice]]) -> list[Any]:
    """`law_sums` one by one."""
    square = vector * vector
    sums = [value for g in groups for value in (abs(vector[g]).sum(), square[g].sum(), square[g] @ square[g])]
    sums += [vector[lag:] @ vector[:-lag] for lag in (1, 2)]
    for one, two in pairs:
        first, second = vector[one], vector[two]
        sums += [first @ second, first @ first, second @ second]
    return sums


def scaled(vector: Any, groups: Sequence[slice], stds: Sequence[float]) -> Any:
    """A vector over the standard deviation of each group."""
    if len(groups) == 1:
        return vector / stds[0]
    result = vector.copy()
    for place, std in zip(groups, stds, strict=True):
        result[place] /= std
    return result


def follows(standard: Any, other: Any) -> Floats:
    """The product of a vector's squares, less 1, with another one's sizes about their mean, and those squared.

    The sizes are clipped at three times their mean, so that no single coordinate decides.
    """
    moved = host_array(other)
    weights = abs(moved.astype(np.promote_types(moved.dtype, standard.dtype), copy=False))
    mean = weights.mean()  # cast after the division: 1e60 is infinite in float32
    weights = (weights / (mean + (mean == 0))).clip(0, 3).astype(standard.dtype, copy=False)
    weights = weights - weights.mean()
    return numbers([weights @ (standard * standard - 1), weights @ weights])


def strongest_lag(standard: Any, size: int) -> Floats:
    """The largest product of a padded vector with itself moved, over the root of its terms; its lag; and that at lag 0."""
    image = fft.rfft(standard, n=size)
    lagged = np.abs(fft.irfft(image.real**2 + image.imag**2, n=size)[: size // 2 + 1])
    scores = lagged / lag_terms(np.arange(size // 2 + 1, dtype=lagged.dtype), len(standard), size).clip(1) ** 0.5
    scores[0] = 0.0
    best = scores.argmax()
    return numbers([scores[best], best, lagged[0]])


def lag_terms(lag: Any, dim: int, size: int) -> Any:
    """How many products each sum of a cyclic autocorrelation has."""
    terms = (dim - lag).clip(0) + (dim - size + lag).clip(0)
    if 2 * (len(lag) - 1) == size:
        terms[-1] *= 2  # at half the length each product occurs twice
    return terms


def counts(cells: Any, *, number: int) -> npt.NDArray[np.int64]:
    """How many entries are in each of this many cells."""
    return np.bincount(cells.astype(np.int32), minlength=number).astype(np.int64)


def largest(vector: Any, *, count: int) -> tuple[Any, Any, Any]:
    """The largest sizes, where they are, and their signs; in any order."""
    places = np.argpartition(np.abs(vector), len(vector) - count)[-count:]
    return np.abs(vector[places]), places, np.sign(vector[places])


def squares_added(
    total: Any, noise: Any, release: Any, groups: Sequence[slice], scales: list[float], wide: Floats | None
) -> Any:
    """The total, None before the first, with the squares of a vector, scaled by group.

    With `wide`, each size grows by a share of the release's size, and by a step: two rows, by group.
    """
    total = np.zeros(len(noise), np.float32) if total is None else total
    rows = np.zeros((2, len(groups))) if wide is None else wide
    if wide is None and many_parts.are_many(groups, len(noise)):
        piece = noise * np.repeat(np.asarray(scales, noise.dtype), many_parts.sizes_of(groups))
        piece *= piece
        total += piece
        return total
    for place, scale, relative, absolute in zip(groups, scales, *rows.tolist(), strict=True):
        for start in range(place.start, place.stop, CHUNK):
            here = slice(start, min(start + CHUNK, place.stop))
            piece = noise[here] * scale
            if wide is not None:
                piece = np.abs(piece) * (1 + relative) + (np.abs(release[here]) * relative + absolute) * scale
            piece *= piece
            total[here] += piece
    return total


def below(total: Any, limit: float) -> tuple[npt.NDArray[np.int64], Floats]:
    """The places of the numbers below a limit, and these numbers."""
    values = np.asarray(total)
    chosen = np.flatnonzero(values < limit)
    return chosen, values[chosen].astype(np.float64)
