"""The operations of measuring on vectors that jax holds on a device: the functions of `on_numpy`. Only numbers leave it.

A jax array never changes, so `put` and `subtract` return new ones. Sums are hierarchical, a few terms at a time, and
products are multiplied and summed, not contracted: GPUs and TPUs would round the factors of a contraction.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats
from coalmine.canaries.array_types import is_tensor
from coalmine.canaries.rotation_jax import squared_length, summed, working
from coalmine.measure.arrays import on_numpy
from coalmine.measure.arrays.host import numpy_vector

Places = tuple[tuple[int, int], ...]  # begin and end of parts of a vector


def unreadable(array: Any) -> str | None:
    """Why the array's numbers cannot be read; None if they can."""
    if isinstance(array, jax.core.Tracer):
        return "a value that jax traces: call the audit outside of jit"
    if array.is_deleted():
        return "a jax array that was deleted or donated"
    return None if array.is_fully_addressable else "a jax array on several hosts: pass this host's part"


@jax.jit
def _length(vector: Any) -> Any:
    """The Euclidean norm, of the vector over its largest entry: squares neither vanish nor overflow."""
    own = working(vector)
    largest = jnp.abs(own).max(initial=0.0)
    return jnp.sqrt(squared_length(own / jnp.where(largest > 0, largest, 1))) * largest


def norm(vector: Any) -> float:
    """The norm."""
    return float(_length(vector))


@partial(jax.jit, static_argnames="places")
def _lengths(vector: Any, *, places: Places) -> Any:
    return jnp.stack([_length(vector[start:stop]) for start, stop in places])


def _places(groups: Sequence[slice]) -> Places:
    return tuple((place.start, place.stop) for place in groups)


def norms(vector: Any, sizes: Sequence[int]) -> Floats:
    """The norms of consecutive parts of a vector."""
    return numpy_vector(_lengths(vector, places=tuple(itertools.pairwise(np.cumsum([0, *sizes]).tolist()))))


def square(vector: Any) -> Any:
    """The squared length, without waiting for the result."""
    return _length(vector) ** 2


def squares(parts: Sequence[Any]) -> list[Any]:
    """`square` of several vectors."""
    return [square(part) for part in parts]


def group_squares(vector: Any, groups: Sequence[slice]) -> Floats:
    """The squared lengths of parts of a vector that follow each other."""
    return np.square(numpy_vector(_lengths(vector, places=_places(groups))))


@partial(jax.jit, static_argnames=("groups", "pairs"))
def _law_sums(vector: Any, *, groups: Places, pairs: tuple[Places, ...]) -> Any:
    square = vector * vector
    found = []
    for start, stop in groups:
        own = square[start:stop]
        found += [summed(jnp.abs(vector[start:stop])), summed(own), summed(own * own)]
    found += [summed(vector[lag:] * vector[:-lag]) for lag in (1, 2)]
    for (one, end), (two, stop) in pairs:
        first, second = vector[one:end], vector[two:stop]
        found += [summed(first * second), summed(first * first), summed(second * second)]
    return jnp.stack(found)


def law_sums(vector: Any, groups: Sequence[slice], pairs: Sequence[tuple[slice, slice]]) -> Floats:
    """Sums of absolute values, squares and fourth powers by group; then products of neighbours, and of pairs of parts."""
    return numpy_vector(_law_sums(vector, groups=_places(groups), pairs=tuple(_places(pair) for pair in pairs)))


def scaled(vector: Any, groups: Sequence[slice], stds: Sequence[float]) -> Any:
    """A vector over the standard deviation of each group."""
    if len(groups) == 1:
        return vector / stds[0]
    return jnp.concatenate([vector[place] / std for place, std in zip(groups, stds, strict=True)])


def follows(standard: Any, other: Any) -> Floats:
    """The product of a vector's squares, less 1, with another one's sizes about their mean, and those squared."""
    return numpy_vector(_follows(standard, other))


@jax.jit
def _follows(standard: Any, weights: Any) -> Any:
    sizes = jnp.abs(working(weights))
    mean = summed(sizes) / sizes.size
    sizes = jnp.clip(sizes / jnp.where(mean > 0, mean, 1), 0, 3)
    sizes = sizes - summed(sizes) / sizes.size
    return jnp.stack([summed(sizes * (standard * standard - 1)), summed(sizes * sizes)])


def strongest_lag(standard: Any, size: int) -> Floats:
    """The largest product of a padded vector with itself moved, over the root of its terms; its lag; and that at lag 0."""
    return numbers(list(_strongest_lag(standard, size=size)))


@partial(jax.jit, static_argnames="size")
def _strongest_lag(standard: Any, *, size: int) -> tuple[Any, Any, Any]:
    dim, half = len(standard), size // 2
    image = jnp.fft.rfft(standard, n=size)
    lagged = jnp.abs(jnp.fft.irfft(image.real**2 + image.imag**2, n=size)[: half + 1])
    lag = jnp.arange(half + 1, dtype=lagged.dtype)
    terms = jnp.clip(dim - lag, 0) + jnp.clip(dim - size + lag, 0)  # around the end of the padded vector
    terms = terms * (1 + ((lag == half) & (2 * half == size)))  # at half the length each product comes twice
    scores = jnp.where(lag > 0, lagged / jnp.sqrt(jnp.clip(terms, 1)), 0.0)
    best = scores.argmax()
    return scores[best], lag[best], lagged[0]


def counts(cells: Any, *, number: int) -> npt.NDArray[np.int64]:
    """How many entries are in each of this many cells."""
    return np.asarray(_counts(cells, number=number), dtype=np.int64)


@partial(jax.jit, static_argnames="number")
def _counts(cells: Any, *, number: int) -> Any:
    return jnp.bincount(cells.astype(jnp.int32), length=number)


def squares_added(
    total: Any, noise: Any, release: Any, groups: Sequence[slice], scales: list[float], wide: Floats | None
) -> Any:
    """The total, None before the first, with the squares of a vector, scaled by group; `wide` as for numpy."""
    total = jnp.zeros_like(noise, dtype=jnp.float32) if total is None else total
    rows = np.zeros((2, len(groups))) if wide is None else wide
    return _squares_added(total, noise, release, np.array([scales, *rows], np.float32), groups=_places(groups))


@partial(jax.jit, static_argnames="groups", donate_argnames="total")
def _squares_added(total: Any, vector: Any, release: Any, numbers: Any, *, groups: Places) -> Any:
    sizes = np.array([stop - start for start, stop in groups])
    scale, relative, step = (jnp.repeat(row, sizes, total_repeat_length=len(vector)) for row in numbers)
    size = jnp.abs(working(vector)) * (1 + relative) + jnp.abs(working(release)) * relative + step
    return total + jnp.square(size * scale)


def largest(vector: Any, *, count: int) -> tuple[Any, Any, Any]:
    """The largest sizes, where they are, and their signs."""
    sizes, places, signs = (np.asarray(each) for each in _largest(vector, count=count))
    return sizes, places, signs


@partial(jax.jit, static_argnames="count")
def _largest(vector: Any, *, count: int) -> tuple[Any, Any, Any]:
    sizes, places = jax.lax.top_k(jnp.abs(vector), count)
    return sizes, places, jnp.sign(vector[places])


def below(total: Any, limit: float) -> tuple[npt.NDArray[np.int64], Floats]:
    """The places of the numbers below a limit, and these numbers."""
    return on_numpy.below(np.asarray(total), limit)


@partial(jax.jit, static_argnames=("chunks", "sketch"))
def block_parts(vector: Any, *, chunks: int, sketch: int) -> tuple[Any, Any]:
    """Squared lengths in equal parts, and sums of the numbers at regular intervals with alternating signs."""
    each, rows = len(vector) // chunks, len(vector) // (2 * sketch)
    lengths = _lengths(vector, places=tuple((part * each, (part + 1) * each) for part in range(chunks)))
    pairs = vector[: rows * 2 * sketch].reshape(rows, 2, sketch).sum(0)
    return lengths**2, pairs[0] - pairs[1]


def joined(pieces: Sequence[Any], places: Sequence[slice], like: Any, into: Any = None) -> Any:
    """Rows one after another, on the device of the first that is on one: always an array of its own."""
    del places, into
    device = next(piece.sharding for piece in pieces if isinstance(piece, jax.Array))
    own = [jnp.asarray(piece, like.dtype, device=device) for piece in pieces]
    return jnp.concatenate(own) if len(own) > 1 else jnp.array(own[0], copy=True)


def stacked(rows: Sequence[Any]) -> Any:
    """Vectors as the rows of a matrix."""
    return jnp.stack(rows)


def copied(vector: Any) -> Any:
    """A copy that does not change with the original."""
    return jnp.array(vector, copy=True)


def is_contiguous(row: Any) -> bool:
    """Whether the numbers of a row follow each other in memory."""
    del row
    return True


@jax.jit
def _minus(first: Any, second: Any) -> Any:
    """The difference of two vectors in the first one's working precision."""
    own = working(first)
    return own - second.astype(own.dtype)


def difference(first: Any, second: Any) -> Any:
    """first - second, at least one of which is jax's, on its device."""
    first, second = (numpy_vector(vector) if is_tensor(vector) else vector for vector in (first, second))
    device = (first if isinstance(first, jax.Array) else second).sharding
    return _minus(jnp.asarray(first, device=device), jnp.asarray(second, device=device))


def subtract(vector: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """The vector less a piece, times a factor, in a place of it."""
    own = jnp.asarray(piece, vector.dtype, device=vector.sharding)
    scaled = own if factor == 1.0 else own * factor
    return _minus(vector, scaled) if len(scaled) == len(vector) else vector.at[place].add(-scaled)


def empty(like: Any, *, double: bool) -> Any:
    """An array without entries, of the kind and on the device of `like`, in single or double precision."""
    dtype = jax.dtypes.canonicalize_dtype(np.float64 if double else np.float32)
    return jnp.zeros(0, dtype, device=like.sharding)


def device(vector: Any) -> Any:
    """The device of a vector."""
    return vector.device


def added(total: Any, values: Any, factor: float) -> Any:
    """A total plus `factor` times values."""
    return total + values * factor


def put(row: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """The row with `factor` times a piece in a place of it, in the row's precision."""
    scaled = piece if factor == 1.0 else piece * factor
    own = jnp.asarray(scaled, row.dtype, device=row.sharding)
    return own if len(own) == len(row) else row.at[place].set(own)


def numbers(values: list[Any]) -> npt.NDArray[np.float64]:
    """Numbers of the host; all devices are waited for together."""
    return np.array(jax.device_get(values), dtype=np.float64)


def moved(array: Any, sharding: Any) -> Any:
    """An array as a sharding has it; without one, on the first of its devices."""
    if sharding is None:
        sharding = min(array.sharding.device_set, key=lambda device: device.id)
    return jax.device_put(array, sharding)


def one_of_each(array: Any) -> list[tuple[Any, Any]]:
    """The parts of an array on several devices, each once, with their devices; those of one device are one part."""
    if len(array.sharding.device_set) == 1:
        return [(next(iter(array.sharding.device_set)), array)]
    shards = sorted(array.addressable_shards, key=lambda shard: _order(array.sharding)[shard.device])
    seen: dict[str, tuple[Any, Any]] = {}
    for shard in shards:
        seen.setdefault(str(shard.index), (shard.device, shard.data))
    return list(seen.values())


def assembled(shape: tuple[int, ...], sharding: Any, rows: list[Any]) -> Any:
    """The inverse of `one_of_each`: an array of these parts, copied to every device that holds them too."""
    places = sharding.addressable_devices_indices_map(shape)
    order = _order(sharding)
    devices = sorted(places, key=lambda device: order[device])
    part_of: dict[str, Any] = {}
    for device in devices:
        if str(places[device]) not in part_of:
            part_of[str(places[device])] = rows[len(part_of)].reshape(sharding.shard_shape(shape))
    parts = [jax.device_put(part_of[str(places[device])], device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _order(sharding: Any) -> dict[Any, int]:
    """The devices of a sharding in the order of its mesh."""
    mesh = getattr(sharding, "mesh", None)
    devices = sorted(sharding.device_set, key=lambda device: device.id) if mesh is None else list(mesh.devices.flat)
    return {device: number for number, device in enumerate(devices)}
