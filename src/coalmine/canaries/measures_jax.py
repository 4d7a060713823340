"""What is measured of a vector that jax holds on a device: lengths, sums of powers, largest values. Only numbers leave it.

Sums are hierarchical, a few terms at a time, and products are multiplied and summed, not contracted: GPUs and TPUs would
round the factors of a contraction.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from coalmine.canaries.rotation_jax import squared_length, summed, working

Places = tuple[tuple[int, int], ...]  # begin and end of parts of a vector


def is_off_host(array: Any) -> bool:
    """Whether a jax array lies on a device that numpy cannot read without a copy."""
    from coalmine.canaries import rotation_jax

    return not rotation_jax.on_cpu(array)


@jax.jit
def length(vector: Any) -> Any:
    """The Euclidean norm, of the vector over its largest entry: squares neither vanish nor overflow."""
    own = working(vector)
    largest = jnp.abs(own).max(initial=0.0)
    return jnp.sqrt(squared_length(own / jnp.where(largest > 0, largest, 1))) * largest


@partial(jax.jit, static_argnames="places")
def lengths(vector: Any, *, places: Places) -> Any:
    """The Euclidean norms of parts of a vector."""
    return jnp.stack([length(vector[start:stop]) for start, stop in places])


@partial(jax.jit, static_argnames=("groups", "pairs"))
def law_sums(vector: Any, *, groups: Places, pairs: tuple[Places, ...]) -> Any:
    """Of each group the sums of sizes, squares and fourth powers; then products of neighbours, and of pairs of parts."""
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


@jax.jit
def follows(standard: Any, weights: Any) -> Any:
    """The product of a vector's squares, less 1, with another one's sizes about their mean, and those squared."""
    sizes = jnp.abs(working(weights))
    mean = summed(sizes) / sizes.size
    sizes = jnp.clip(sizes / jnp.where(mean > 0, mean, 1), 0, 3)
    sizes = sizes - summed(sizes) / sizes.size
    return jnp.stack([summed(sizes * (standard * standard - 1)), summed(sizes * sizes)])


@partial(jax.jit, static_argnames="size")
def strongest_lag(standard: Any, *, size: int) -> tuple[Any, Any, Any]:
    """The largest product of a padded vector with itself moved, over the root of its terms; its lag; and that at lag 0."""
    dim, half = len(standard), size // 2
    image = jnp.fft.rfft(standard, n=size)
    lagged = jnp.abs(jnp.fft.irfft(image.real**2 + image.imag**2, n=size)[: half + 1])
    lag = jnp.arange(half + 1, dtype=lagged.dtype)
    terms = jnp.clip(dim - lag, 0) + jnp.clip(dim - size + lag, 0)  # around the end of the padded vector
    terms = terms * (1 + ((lag == half) & (2 * half == size)))  # at half the length each product comes twice
    scores = jnp.where(lag > 0, lagged / jnp.sqrt(jnp.clip(terms, 1)), 0.0)
    best = scores.argmax()
    return scores[best], lag[best], lagged[0]


@partial(jax.jit, static_argnames="number")
def counts(cells: Any, *, number: int) -> Any:
    """How many entries are in each of so many cells."""
    return jnp.bincount(cells.astype(jnp.int32), length=number)


@jax.jit
def zeros_like(vector: Any) -> Any:
    """Zeros in single precision, where a vector is."""
    return jnp.zeros_like(vector, dtype=jnp.float32)


@partial(jax.jit, static_argnames="groups", donate_argnames="total")
def squares_added(total: Any, vector: Any, release: Any, numbers: Any, *, groups: Places) -> Any:
    """The total with the squares of a vector, scaled by group; each size grows by a share of the release's, and a step."""
    sizes = np.array([stop - start for start, stop in groups])
    scale, relative, step = (jnp.repeat(row, sizes, total_repeat_length=len(vector)) for row in numbers)
    size = jnp.abs(working(vector)) * (1 + relative) + jnp.abs(working(release)) * relative + step
    return total + jnp.square(size * scale)


@partial(jax.jit, static_argnames="count")
def largest(vector: Any, *, count: int) -> tuple[Any, Any, Any]:
    """The largest sizes, where they are, and their signs."""
    sizes, places = jax.lax.top_k(jnp.abs(vector), count)
    return sizes, places, jnp.sign(vector[places])


@partial(jax.jit, static_argnames=("chunks", "sketch"))
def block_parts(vector: Any, *, chunks: int, sketch: int) -> tuple[Any, Any]:
    """Squared lengths in equal parts, and sums of every so-manieth number, every other one with a minus."""
    each, rows = len(vector) // chunks, len(vector) // (2 * sketch)
    squares = lengths(vector, places=tuple((part * each, (part + 1) * each) for part in range(chunks))) ** 2
    pairs = vector[: rows * 2 * sketch].reshape(rows, 2, sketch).sum(0)
    return squares, pairs[0] - pairs[1]


def joined(pieces: list[Any], dtype: Any) -> Any:
    """Rows one after another, on the device of the first that is on one: always an array of its own."""
    device = next(piece.sharding for piece in pieces if isinstance(piece, jax.Array))
    own = [jnp.asarray(piece, dtype, device=device) for piece in pieces]
    return jnp.concatenate(own) if len(own) > 1 else jnp.array(own[0], copy=True)


@jax.jit
def minus(first: Any, second: Any) -> Any:
    """The difference of two vectors in the first one's working precision."""
    own = working(first)
    return own - second.astype(own.dtype)


def difference(first: Any, second: Any) -> Any:
    """The difference of two vectors, at least one of which is jax's, on its device."""
    device = (first if isinstance(first, jax.Array) else second).sharding
    return minus(jnp.asarray(first, device=device), jnp.asarray(second, device=device))


def taken_away(vector: Any, place: slice, piece: Any, factor: float) -> Any:
    """The vector less a piece, times a factor, in a place of it."""
    own = jnp.asarray(piece, vector.dtype, device=vector.sharding)
    scaled = own if factor == 1.0 else own * factor
    return minus(vector, scaled) if len(scaled) == len(vector) else vector.at[place].add(-scaled)


def empty_like(array: Any, dtype: Any) -> Any:
    """An empty array where another one is, in jax's precision for a dtype."""
    return jnp.zeros(0, jax.dtypes.canonicalize_dtype(dtype), device=array.sharding)


def put(row: Any, place: slice, piece: Any) -> Any:
    """The row with a piece in a place of it, in the row's precision."""
    own = jnp.asarray(piece, row.dtype, device=row.sharding)
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
