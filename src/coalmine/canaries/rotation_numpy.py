"""A rotation applied on the CPU.

A Walsh-Hadamard transform of 2^m numbers is m steps of sums and differences. Four steps at a time are one product with
the 16×16 Hadamard matrix, and sixteen steps stay within a chunk of 2^16 numbers, so a whole transform passes twice over
memory. The products are small enough that BLAS does not start its own threads. Instead one thread per core takes the next
chunk.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coalmine.canaries.array_types import Array, cores

if TYPE_CHECKING:
    from coalmine.canaries.rotation import Rotation, Stage

_CHUNK = 2**16  # numbers that one core works on at a time: a few such buffers fit its cache
INNER_STEPS = 4  # steps per product within a chunk
_OUTER_STEPS = 5  # steps per product across chunks, where every pass goes through memory
_COLUMNS = 4096
_STRIPE = 2**14  # part of a chunk that a thread sums over all chunks at a time
PRODUCT = 2**18  # OpenBLAS starts threads for products of more multiplications than this
_THREADED = 2**18  # below this dim a thread costs more than it saves

Bits = npt.NDArray[np.uint8]
Work = Callable[[Array, Any], None]  # takes a scratch of three chunks and an item
Each = Callable[[Iterable[Any], Work], None]


_here = local()


def stay_in_one_thread() -> None:
    """Run the transforms that this thread starts from now on in this thread alone.

    For work in parallel with training that keeps every core busy. Threads that wait for each other there take longer,
    and slow down training more, than one thread.
    """
    _here.single_threaded = True


def threads() -> int:
    """The number of threads for a transform that this thread starts."""
    return 1 if getattr(_here, "single_threaded", False) else cores()


def products(rotation: "Rotation", vector: Array, count: int) -> Array:
    """The products of `vector` with the first `count` columns.

    If those lie before the last 2^m, the last transform does not touch them. Of the one before it only the first outputs
    are needed: those of a sum of pieces. One stage of three then costs little more than its shuffle.
    """
    front = _front(rotation, count)
    if not front:
        return rotate_back(rotation, vector)[:count]
    size, stripe = rotation.size, min(front, _STRIPE)
    *stages, last = rotation.stages
    total, shuffled = np.zeros(front, vector.dtype), np.empty_like(vector)

    def add(scratch: Array, start: int) -> None:
        for piece in range(start, size, front):  # always in this order, so that the sum is the same bit for bit
            signs = drawn_signs(last.opening, piece, stripe, size**-0.5, scratch)
            total[start : start + stripe] += np.multiply(shuffled[piece : piece + stripe], signs, out=signs)

    with _workers(rotation.dim, vector.dtype) as each:
        _shuffle(rotation, last, _stages_back(rotation, stages, vector, each), shuffled, each)
        each(range(0, front, stripe), add)
        _unsigned_chunks(total, each)
        _across_chunks(total, each)
    return total[:count]


def combine(rotation: "Rotation", indices: list[int], dtype: npt.DTypeLike) -> Array:
    """The sum of the columns at `indices`; the first transforms skip values that are zero or repeated."""
    vector = np.zeros(rotation.dim, dtype)
    front = _front(rotation, max(indices, default=0) + 1)
    if not front:
        vector[indices] = 1.0
        return rotate(rotation, vector)
    size, chunk = rotation.size, min(_CHUNK, rotation.size)
    *stages, last = rotation.stages
    image, target = np.zeros(front, dtype), np.empty_like(vector)
    image[indices] = 1.0

    def spread(scratch: Array, start: int) -> None:
        signs = drawn_signs(last.opening, start, chunk, size**-0.5, scratch)
        np.multiply(image[start % front :][:chunk], signs, out=vector[start : start + chunk])

    with _workers(rotation.dim, vector.dtype) as each:
        _across_chunks(image, each)
        _unsigned_chunks(image, each)
        each(range(0, size, chunk), spread)
        _unshuffle(rotation, last, vector, target, each)
        return _stages_forward(rotation, stages, target, vector, each)


def rotate_back(rotation: "Rotation", vector: Array) -> Array:
    """The transposed rotation of `vector`, which is not changed: its products with all columns."""
    with _workers(rotation.dim, vector.dtype) as each:
        return _stages_back(rotation, rotation.stages, vector, each)


def rotate(rotation: "Rotation", vector: Array) -> Array:
    """The rotation of `vector`, which is overwritten: the sum of the columns, weighted by its entries."""
    with _workers(rotation.dim, vector.dtype) as each:
        return _stages_forward(rotation, rotation.stages, vector, np.empty_like(vector), each)


def _stages_back(rotation: "Rotation", stages: Sequence["Stage"], vector: Array, each: Each) -> Array:
    """These stages of a transposed rotation, the first one first; `vector` is not changed. No stages return it."""
    size, scale = rotation.size, rotation.size**-0.5
    source, target = vector, np.empty_like(vector)
    for stage in stages:
        _shuffle(rotation, stage, source, target, each)
        _flip(target[size:], stage.opening[size // 8 :], size % 8, each)
        _hadamard(target[:size], stage.opening, scale, each, signs_first=True)
        _hadamard(target[-size:], stage.closing, scale, each, signs_first=True)
        source, target = target, np.empty_like(vector) if source is vector else source
    return source


def _stages_forward(rotation: "Rotation", stages: Sequence["Stage"], source: Array, target: Array, each: Each) -> Array:
    """These stages of a rotation, the last one first; both arrays are overwritten."""
    size, scale = rotation.size, rotation.size**-0.5
    for stage in reversed(stages):
        _hadamard(source[-size:], stage.closing, scale, each, signs_first=False)
        _hadamard(source[:size], stage.opening, scale, each, signs_first=False)
        _flip(source[size:], stage.opening[size // 8 :], size % 8, each)
        _unshuffle(rotation, stage, source, target, each)
        source, target = target, source
    return source


def _front(rotation: "Rotation", count: int) -> int:
    """The length, 2^j and at least a chunk, of a prefix with the first `count` coordinates; 0 if they reach the last 2^m."""
    if count > rotation.dim - rotation.size:
        return 0
    return max(min(_CHUNK, rotation.size), 1 << (count - 1).bit_length())


@contextmanager
def _workers(dim: int, dtype: np.dtype[Any]) -> Iterator[Each]:
    """A function that applies `work` to every item, in one thread per core, each with its own scratch.

    The threads live as long as one transform, so that a forked process does not inherit dead ones.
    """
    count = threads() if dim >= _THREADED else 1
    scratches = [np.empty(3 * min(_CHUNK, dim) + 16, dtype) for _ in range(count)]

    with ThreadPoolExecutor(count) as pool:

        def each(items: Iterable[Any], work: Work) -> None:
            remaining = iter(list(items))

            def work_through(scratch: Array) -> None:
                for item in remaining:  # shared by the threads: a list's iterator gives every item once
                    work(scratch, item)

            if count == 1:
                work_through(scratches[0])
            else:
                list(pool.map(work_through, scratches))  # list() raises the errors of the threads

        yield each


def _shuffle(rotation: "Rotation", stage: "Stage", source: Array, target: Array, each: Each) -> None:
    """Copy the blocks of `source` to `target` in the stage's order, with the left-over coordinates between two of them."""
    blocks = source[: len(stage.order) * rotation.block].reshape(-1, rotation.block)

    def gather(_: Array, part: tuple[Bits, Array]) -> None:
        order, place = part
        np.take(blocks, order.astype(np.intp), axis=0, out=place, mode="clip")  # clip: "raise" would buffer

    each(_parts(rotation, stage, target), gather)
    _left_over(rotation, stage, target)[:] = source[blocks.size :]


def _unshuffle(rotation: "Rotation", stage: "Stage", source: Array, target: Array, each: Each) -> None:
    """The inverse of `_shuffle`; overwrites `source`. It gathers too, because numpy scatters four times as slowly."""
    end = len(stage.order) * rotation.block
    left_over = _left_over(rotation, stage, source).copy()
    start = stage.insert * rotation.block
    source[start:end] = source[start + len(left_over) :]
    blocks, places = source[:end].reshape(-1, rotation.block), target[:end].reshape(-1, rotation.block)
    step = max(1, _CHUNK // rotation.block)

    def gather(_: Array, first: int) -> None:
        order = stage.places[first : first + step].astype(np.intp)
        np.take(blocks, order, axis=0, out=places[first : first + step], mode="clip")

    each(range(0, len(places), step), gather)
    target[end:] = left_over


def _parts(rotation: "Rotation", stage: "Stage", shuffled: Array) -> Iterator[tuple[Any, Array]]:
    """Slices of the order of blocks, each with its part of a shuffled vector."""
    before = stage.insert * rotation.block
    after = before + rotation.dim % rotation.block
    step = max(1, _CHUNK // rotation.block)
    for order, piece in (
        (stage.order[: stage.insert], shuffled[:before]),
        (stage.order[stage.insert :], shuffled[after:]),
    ):
        places = piece.reshape(-1, rotation.block)
        for start in range(0, len(order), step):
            yield order[start : start + step], places[start : start + step]


def _left_over(rotation: "Rotation", stage: "Stage", shuffled: Array) -> Array:
    start = stage.insert * rotation.block
    return shuffled[start : start + rotation.dim % rotation.block]


def _flip(values: Array, bits: Bits, first: int, each: Each) -> None:
    """`values` times their signs, in place; the first sign is bit `first` of the first byte."""

    def flip(scratch: Array, start: int) -> None:
        piece = values[start : start + _CHUNK]
        piece *= drawn_signs(bits, start + first, len(piece), 1.0, scratch)

    each(range(0, len(values), _CHUNK), flip)


def drawn_signs(bits: Bits, start: int, count: int, scale: float, scratch: Array) -> Array:
    """Signs `start` to `start + count`, plus or minus `scale`, at the beginning of a scratch."""
    chosen = bits[start // 8 : -(-(start + count) // 8)]
    signs = scratch[: 8 * len(chosen)].reshape(-1, 8)
    np.take(_sign_table(scale, scratch.dtype), chosen, axis=0, out=signs, mode="clip")
    return signs.reshape(-1)[start % 8 : start % 8 + count]


@lru_cache(maxsize=8)
def _sign_table(scale: float, dtype: np.dtype[Any]) -> Array:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
    return (scale * (1.0 - 2.0 * bits)).astype(dtype)


@lru_cache(maxsize=16)
def hadamard_matrix(steps: int, dtype: np.dtype[Any]) -> Array:
    """The Hadamard matrix of 2^steps rows, unscaled."""
    matrix = np.ones((1, 1))
    for _ in range(steps):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix.astype(dtype)


def _hadamard(values: Array, bits: Bits, scale: float, each: Each, *, signs_first: bool) -> None:
    """The Walsh-Hadamard transform of 2^m values, in place, with signs of size `scale` before or after it."""
    if signs_first:
        _within_chunks(values, bits, scale, each, signs_first=True)
        _across_chunks(values, each)
    else:
        _across_chunks(values, each)
        _within_chunks(values, bits, scale, each, signs_first=False)


def _within_chunks(values: Array, bits: Bits, scale: float, each: Each, *, signs_first: bool) -> None:
    """The steps between values of one chunk, and the signs."""
    size = min(_CHUNK, len(values))
    groups = groups_of(size.bit_length() - 1, INNER_STEPS)

    def transform(scratch: Array, start: int) -> None:
        chunk = values[start : start + size]
        signs = drawn_signs(bits, start, size, scale, scratch)
        one, other = scratch[-2 * size : -size], scratch[-size:]
        source = np.multiply(chunk, signs, out=one) if signs_first else chunk
        stride = 1
        for steps in groups:
            last = stride << steps == size
            target = chunk if signs_first and last else other if source is one else one
            _products(steps, source, target, stride)
            source, stride = target, stride << steps
        if not signs_first:
            np.multiply(source, signs, out=chunk)

    each(range(0, len(values), size), transform)


def _unsigned_chunks(values: Array, each: Each) -> None:
    """The steps between values of one chunk, without signs or scale."""
    size = min(_CHUNK, len(values))

    def transform(scratch: Array, start: int) -> None:
        chunk, stride = values[start : start + size], 1
        source, one, other = chunk, scratch[:size], scratch[-size:]
        for steps in groups_of(size.bit_length() - 1, INNER_STEPS):
            target = other if source is one else one
            _products(steps, source, target, stride)
            source, stride = target, stride << steps
        chunk[:] = source

    each(range(0, len(values), size), transform)


def _across_chunks(values: Array, each: Each) -> None:
    """The steps between values of different chunks."""
    stride = _CHUNK
    for steps in groups_of((len(values) // _CHUNK).bit_length() - 1, _OUTER_STEPS):
        sets = values.reshape(-1, 1 << steps, stride)

        def transform(scratch: Array, columns: Array, steps: int = steps) -> None:
            result = scratch[: columns.size].reshape(columns.shape)
            np.matmul(hadamard_matrix(steps, values.dtype), tiles(columns, steps), out=tiles(result, steps))
            columns[:] = result

        each((rows[:, start : start + _COLUMNS] for rows in sets for start in range(0, stride, _COLUMNS)), transform)
        stride <<= steps


def _products(steps: int, source: Array, target: Array, stride: int) -> None:
    """`steps` steps, between values `stride` apart and more, from `source` into `target`."""
    matrix, size = hadamard_matrix(steps, source.dtype), 1 << steps
    if stride == 1:
        rows = min(len(source) >> steps, PRODUCT >> (2 * steps))
        np.matmul(source.reshape(-1, rows, size), matrix, out=target.reshape(-1, rows, size))
    else:
        shape = (-1, size, stride)
        np.matmul(matrix, tiles(source.reshape(shape), steps), out=tiles(target.reshape(shape), steps))


def tiles(rows: Array, steps: int) -> Array:
    """Matrices of 2^steps rows, cut into narrower ones that BLAS multiplies in the calling thread."""
    width = rows.shape[-1]
    columns = min(width, PRODUCT >> (2 * steps))
    return rows.reshape(*rows.shape[:-1], width // columns, columns).swapaxes(-3, -2)


def groups_of(steps: int, most: int) -> list[int]:
    """`steps` split into the fewest nearly equal groups of at most `most`."""
    count = -(-steps // most)
    return [steps // count + (number < steps % count) for number in range(count)]
