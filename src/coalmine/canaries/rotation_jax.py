"""A rotation applied by jax: to arrays on the device where they are, and to values that jax traces.

numpy draws the tables of a rotation, jax takes them as arguments. So the canaries are those of numpy and torch, and one
compiled function serves every rotation of the same dimension. A Walsh-Hadamard transform of 2^m numbers is a product with
a Kronecker power. Each step multiplies five of its factors at once, by the last axis, which then becomes the first: after
all steps the axes are in their old order.

On a CPU numpy is faster, and reads a jax array without a copy. So the canaries call this module for other devices and
under tracing. Sums are hierarchical: their errors in single precision do not grow with the dimension.
"""

import math
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from coalmine.canaries.array_types import is_traced
from coalmine.canaries.rotation import Rotation, Stage, block_size

_STEPS = 5  # steps of a transform in one product: 2^5 rows are the fastest on two cores
_FRONT = 1 << 16  # outputs of the last transform that are computed at least, as in numpy: sums of few terms each
_ROW = 64  # terms that are summed at a time
_PRECISION = jax.lax.Precision.HIGHEST  # GPUs and TPUs would round the factors
# On a CUDA device: factors of ±1 are exact in TF32, so that three products of it keep 22 bits of each number.
_CUDA_STEPS = 6
_CUDA_PRECISION = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


class StageTables(NamedTuple):
    """The tables of one stage as jax takes them (see `rotation.Stage`)."""

    order: Any
    places: Any
    opening: Any
    closing: Any
    insert: Any


Tables = tuple[StageTables, ...]


def draw_tables(rotation: Rotation) -> Tables:
    """The tables of a rotation as numpy arrays, which jax takes as arguments of a function."""
    return tuple(_stage_tables(stage) for stage in rotation.stages)


def tables_on(rotation: Rotation, device: Any) -> Tables:
    """The tables of a rotation, on a device or as a sharding has it."""
    return jax.device_put(draw_tables(rotation), device)


def _stage_tables(stage: Stage) -> StageTables:
    return StageTables(
        stage.order.astype(np.int32),
        stage.places.astype(np.int32),
        stage.opening,
        stage.closing,
        np.int32(stage.insert),
    )


@partial(jax.jit, static_argnames="count")
def products(tables: Tables, vector: Any, *, count: int) -> Any:
    """The products of a vector of floating-point numbers with the first `count` columns of its rotation."""
    dim = vector.shape[0]
    size = 1 << (dim.bit_length() - 1)
    front = _front(dim, size, count)
    *stages, last = tables
    for stage in tables if not front else stages:
        vector = _shuffled(stage, vector) * _signs(stage.opening, dim, vector.dtype)
        vector = jnp.concatenate([_hadamard(vector[:size]), vector[size:]])
        closed = _hadamard(vector[dim - size :] * _signs(stage.closing, size, vector.dtype))
        vector = jnp.concatenate([vector[: dim - size], closed])
    if not front:
        return vector[:count]
    # The last transform leaves the first outputs alone, and those of the one before it are of a sum of pieces.
    opened = (_shuffled(last, vector) * _signs(last.opening, dim, vector.dtype))[:size]
    pieces = opened.reshape(size // front, front).sum(axis=0)
    return _hadamard(pieces)[:count] * _scale(vector.dtype, front / size)


@partial(jax.jit, static_argnames="dim")
def combine(tables: Tables, weights: Any, *, dim: int) -> Any:
    """The sum of the first columns, weighted: `weights` are floating-point numbers, one for each column."""
    size = 1 << (dim.bit_length() - 1)
    count, dtype = weights.shape[0], weights.dtype
    front = _front(dim, size, count)
    *stages, last = tables
    if front:
        image = _hadamard(jnp.concatenate([weights, jnp.zeros(front - count, dtype)])) * _scale(dtype, front / size)
        spread = jnp.broadcast_to(image, (size // front, front)).reshape(-1) * _signs(last.opening, size, dtype)
        vector = _unshuffled(last, jnp.concatenate([spread, jnp.zeros(dim - size, dtype)]))
    else:
        vector = jnp.concatenate([weights, jnp.zeros(dim - count, dtype)])
    for stage in reversed(tables if not front else stages):
        opened = _hadamard(vector[dim - size :]) * _signs(stage.closing, size, dtype)
        vector = jnp.concatenate([vector[: dim - size], opened])
        vector = jnp.concatenate([_hadamard(vector[:size]), vector[size:]]) * _signs(stage.opening, dim, dtype)
        vector = _unshuffled(stage, vector)
    return vector


@jax.jit
def squared_length(vector: Any) -> Any:
    """The sum of squares, a few terms at a time."""
    return summed(vector * vector)


def summed(terms: Any) -> Any:
    """The sum of a vector, a few terms at a time."""
    while terms.shape[0] > _ROW:
        whole = terms.shape[0] // _ROW * _ROW
        rows = terms[:whole].reshape(-1, _ROW).sum(axis=1)
        terms = jnp.concatenate([rows, terms[whole:]])
    return terms.sum()


@partial(jax.jit, static_argnames="count")
def cosines(tables: Tables, vector: Any, *, count: int) -> tuple[Any, Any]:
    """Cosines with the first `count` columns, and the vector's length; the vector's largest entry is taken out first.

    Nothing can be refused where jax traces: cosines with a vector of zeros, or one that is not finite, are NaN.
    """
    largest = jnp.abs(vector).max()
    scaled = vector / jnp.where(largest > 0, largest, 1)
    length = jnp.sqrt(squared_length(scaled))
    return products(tables, scaled, count=count) / length, length * largest


def cosines_and_length(tables: Tables, vector: Any, *, count: int) -> tuple[Any, float]:
    """`cosines` of an array that is not traced; the length is a number of Python's.

    The device writes the length into the host's memory, where reading it takes a third of the time of a copy.
    """
    found, length = _cosines_on(placement(vector))(tables, vector, count=count)
    return found, float(length)


@cache
def _cosines_on(place: Any) -> Any:
    """`cosines`, compiled for one device."""

    def measured(tables: Tables, vector: Any, *, count: int) -> tuple[Any, Any]:
        return cosines(tables, working(vector), count=count)

    on_gpu = isinstance(place, jax.Device) and place.platform == "gpu"  # elsewhere the host's memory may be listed only
    kinds = {memory.kind for memory in place.addressable_memories()} if on_gpu else set()
    if "pinned_host" not in kinds:
        return jax.jit(measured, static_argnames="count")
    near = jax.sharding.SingleDeviceSharding(place, memory_kind="pinned_host")
    return jax.jit(measured, static_argnames="count", out_shardings=(None, near))


def _front(dim: int, size: int, count: int) -> int:
    """How many outputs of the last transform are computed; 0 if all of them are wanted."""
    if count > dim - size:
        return 0
    return max(min(_FRONT, size), 1 << (count - 1).bit_length())


def _shuffled(stage: StageTables, vector: Any) -> Any:
    """Blocks in the stage's order, with the left-over coordinates between two of them."""
    dim = vector.shape[0]
    block = block_size(dim)
    left_over = dim % block
    end = dim - left_over
    blocks = vector[:end].reshape(-1, block)[stage.order].reshape(-1)
    if not left_over:
        return blocks
    gap, start = jnp.zeros(left_over, vector.dtype), stage.insert * block
    before = jnp.arange(dim, dtype=jnp.int32) < start
    moved = jnp.where(before, jnp.concatenate([blocks, gap]), jnp.concatenate([gap, blocks]))
    return jax.lax.dynamic_update_slice(moved, vector[end:], (start,))


def _unshuffled(stage: StageTables, vector: Any) -> Any:
    """The inverse of `_shuffled`."""
    dim = vector.shape[0]
    block = block_size(dim)
    left_over = dim % block
    end = dim - left_over
    if not left_over:
        return vector.reshape(-1, block)[stage.places].reshape(-1)
    start = stage.insert * block
    before = jnp.arange(end, dtype=jnp.int32) < start
    blocks = jnp.where(before, vector[:end], vector[left_over:]).reshape(-1, block)
    rest = jax.lax.dynamic_slice(vector, (start,), (left_over,))
    return jnp.concatenate([blocks[stage.places].reshape(-1), rest])


def _signs(bits: Any, count: int, dtype: Any) -> Any:
    """The first `count` signs; a set bit means minus."""
    single = (bits[:, None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return 1 - 2 * single.reshape(-1)[:count].astype(dtype)


def _hadamard(values: Any) -> Any:
    """The orthonormal Walsh-Hadamard transform of 2^m numbers."""
    if values.dtype != jnp.float32:
        return _transformed(values, _STEPS, _PRECISION)
    return jax.lax.platform_dependent(
        values,
        cuda=partial(_transformed, steps=_CUDA_STEPS, precision=_CUDA_PRECISION),
        default=partial(_transformed, steps=_STEPS, precision=_PRECISION),
    )


def _transformed(values: Any, steps: int, precision: Any) -> Any:
    """The transform in products of at most that many of its steps."""
    size = values.shape[0]
    levels = size.bit_length() - 1
    groups = -(-levels // steps)
    for number in range(groups):
        taken = levels // groups + (number < levels % groups)
        rows = values.reshape(size >> taken, 1 << taken)
        matrix = jnp.asarray(_hadamard_matrix(taken), values.dtype)
        values = jax.lax.dot_general(matrix, rows, (((1,), (1,)), ((), ())), precision=precision).reshape(-1)
    return values * _scale(values.dtype, 1 / size)


def _hadamard_matrix(steps: int) -> npt.NDArray[np.float64]:
    matrix = np.ones((1, 1))
    for _ in range(steps):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _scale(dtype: Any, square: float) -> Any:
    return jnp.asarray(math.sqrt(square), dtype)


def working(vector: Any) -> Any:
    """A jax array in the precision it is computed in: float32 for that and half precisions, else float64 if jax has it."""
    single = vector.dtype.itemsize <= 4 and jnp.issubdtype(vector.dtype, jnp.floating)
    wide = jnp.float32 if single else jax.dtypes.canonicalize_dtype(np.float64)
    return _gathered(vector).astype(wide)


def _gathered(vector: Any) -> Any:
    """A vector that is traced with its sharding in its type, on every device whole: one rotation needs all of it."""
    sharding = jax.typeof(vector).sharding if is_traced(vector) else None
    if sharding is None or not any(sharding.spec):
        return vector
    return jax.sharding.reshard(vector, jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(None)))


def on_cpu(array: Any) -> bool:
    """Whether a jax array is in the host's memory, where numpy reads it without a copy; not while jax traces it."""
    return not is_traced(array) and all(device.platform == "cpu" for device in array.sharding.device_set)


def placement(array: Any) -> Any:
    """Where a result belongs that comes of this array: its device, or all the devices of its mesh."""
    if isinstance(array.sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(array.sharding.mesh, jax.sharding.PartitionSpec())
    devices = array.sharding.device_set
    return next(iter(devices)) if len(devices) == 1 else None


def placed(result: Any, like: Any) -> Any:
    """Numbers as a jax array where `like` is, in jax's precision for their dtype."""
    if is_traced(like):
        return jnp.asarray(result)
    return jax.device_put(jnp.asarray(result), placement(like))


class DeviceTables:
    """Tables of rotations on the devices where they were needed."""

    def __init__(self) -> None:
        self._found: dict[Any, Tables] = {}

    def of(self, rotation: Rotation, like: Any) -> Tables:
        """The tables of a rotation where an array is; under tracing as constants, which the compiler leaves alone."""
        if is_traced(like):
            return jax.lax.optimization_barrier(jax.tree.map(jnp.asarray, draw_tables(rotation)))
        place = placement(like)
        key = (id(rotation), place)
        if key not in self._found:
            self._found[key] = tables_on(rotation, place)
        return self._found[key]
