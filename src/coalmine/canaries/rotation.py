"""Orthonormal canaries: the first columns of one fast random rotation, so k cosines cost as much as one."""

import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from coalmine.canaries import philox, rotation_numpy, rotation_rows
from coalmine.canaries.array_types import (
    Array,
    checked_vector,
    euclidean_norm,
    is_jax,
    is_tensor,
    is_traced,
    working_dtype,
)
from coalmine.canaries.base import Canaries, rescaled, usable

if TYPE_CHECKING:
    import torch

STAGES = 3
_PARALLEL_DIM = 2**25  # from this dim on transforms run one after another, to save memory
_BLOCKS = 2**16  # the shuffle moves fewer blocks than this, so that its table is small and its copies are long


@dataclass(frozen=True, repr=False)  # the canaries follow from it
class Stage:
    """One stage of a rotation: its signs and its shuffle, drawn from a key on first use."""

    dim: int
    key: int
    number: int
    shuffled: bool = True

    @cached_property
    def order(self) -> npt.NDArray[np.uint16]:
        """Block j of the shuffled vector is block order[j] of the vector."""
        blocks = self.dim // block_size(self.dim)
        if not self.shuffled:
            return np.arange(blocks).astype(np.uint16)
        return np.argsort(self._words(philox.SHUFFLE, blocks), kind="stable").astype(np.uint16)

    @cached_property
    def insert(self) -> int:
        """The shuffled block before which the left-over coordinates (dim mod block) go."""
        blocks = self.dim // block_size(self.dim)
        return int(self._words(philox.INSERT, 1)[0]) * (blocks + 1) >> 64 if self.shuffled else blocks

    @cached_property
    def opening(self) -> npt.NDArray[np.uint8]:
        """`dim` signs as bits, first coordinate lowest; set means minus."""
        return self._bits(philox.OPENING_SIGNS, self.dim)

    @cached_property
    def closing(self) -> npt.NDArray[np.uint8]:
        """2^m signs, of the last 2^m coordinates."""
        return self._bits(philox.CLOSING_SIGNS, 1 << (self.dim.bit_length() - 1))

    @cached_property
    def places(self) -> npt.NDArray[np.uint16]:
        """The inverse of `order`: where in the shuffled vector each block is."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(self.order), dtype=np.uint16)
        return places

    def forget_signs(self) -> None:
        """Free the signs, which take most of the memory; they are drawn again when they are needed."""
        vars(self).pop("opening", None)
        vars(self).pop("closing", None)

    def _words(self, domain: int, count: int) -> philox.Words:
        return philox.words(self.key, domain=domain, dim=self.dim, index=self.number, count=count)

    def _bits(self, domain: int, count: int) -> npt.NDArray[np.uint8]:
        words = self._words(domain, -(-count // 64))
        return words.astype("<u8").view(np.uint8)[: -(-count // 8)].copy()


@dataclass(frozen=True, repr=False)  # the canaries follow from it
class Rotation:
    """An orthogonal map of R^dim, drawn from a key: a product of stages, each of

    1. a shuffle of the coordinates, in blocks of 2^max(0, m - 15) coordinates that stay together,
    2. random signs,
    3. a Walsh-Hadamard transform of the first 2^m coordinates, 2^m the largest power of two up to dim,
    4. random signs on the last 2^m coordinates,
    5. a Walsh-Hadamard transform of those.

    Without the shuffle the two halves hardly mix if dim is just below a power of two. After one stage the image of a
    one-hot vector is far from Gaussian. tests/canaries/test_law.py shows both. The third stage is there for safety.
    """

    dim: int
    stages: tuple[Stage, ...]

    @cached_property
    def levels(self) -> int:
        """m: the transforms are of 2^m coordinates."""
        return self.dim.bit_length() - 1

    @cached_property
    def size(self) -> int:
        """2^m."""
        return 1 << self.levels

    @cached_property
    def block(self) -> int:
        """The number of neighbouring coordinates that the shuffle moves as one."""
        return block_size(self.dim)


def block_size(dim: int) -> int:
    """The smallest power of two that cuts `dim` into fewer than 2^16 blocks."""
    block = 1
    while dim // block >= _BLOCKS:
        block *= 2
    return block


def draw_rotation(dim: int, key: int, *, stages: int = STAGES, shuffled: bool = True) -> Rotation:
    """The rotation of a key; its signs and shuffles are drawn on first use.

    Fewer stages and no shuffle are for the tests, which must be able to fail.
    """
    return Rotation(dim, tuple(Stage(dim, key, number, shuffled) for number in range(stages)))


class RotatedCanaries(Canaries):
    """`count` orthonormal vectors: the first columns of a fast random rotation of R^dim.

    All cosines with a vector are `count` entries of its image under the transposed rotation, and the sum of any set of
    canaries is one image too: each a transform of O(dim log dim), whatever `count` is. Canary i depends on the seed and
    on `dim`, not on `count`. The law of the cosines is tested from dim 1,000 up; in low dimensions the rotation takes few
    values, and `SphereCanaries` cost little there.

        >>> canaries = RotatedCanaries(3, 1000, seed=7)
        >>> abs(canaries.cosines(canaries.combine([0, 2]))).round(3)
        array([0.707, 0.   , 0.707])
    """

    def __init__(self, count: int, dim: int, *, seed: SupportsIndex | bytes) -> None:
        super().__init__(count, dim, seed=seed)
        self._rotation = draw_rotation(self.dim, self._key)
        for stage in self._rotation.stages:  # draw now, so that a lack of memory shows here
            _ = stage.order, stage.opening, stage.closing
        self._devices: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_devices": {}}  # tables on a device are made again on first use

    def cosines_of_each(self, vectors: Sequence[Any]) -> list[Any]:
        """`cosines` of several vectors. On a CPU each core transforms its own: cores that share one transform are slower."""
        parallel = len(vectors) > 1 and rotation_numpy.threads() > 1 and self.dim < _PARALLEL_DIM
        elsewhere = any(is_jax(v) or (is_tensor(v) and v.device.type != "cpu") for v in vectors)
        if self.dim <= rotation_rows.LARGEST and not elsewhere and (together := self._cosines_together(vectors)):
            return together
        if not parallel or elsewhere:
            return super().cosines_of_each(vectors)
        with ThreadPoolExecutor(len(vectors), initializer=rotation_numpy.stay_in_one_thread) as pool:
            return list(pool.map(self.cosines, vectors))

    def _cosines_together(self, vectors: Sequence[Any]) -> list[Any] | None:
        """`cosines` of several small vectors by one transform; None if their precision differs, or one needs rescaling."""
        arrays: list[Any] = [np.asarray(checked_vector(vector, self.dim)) for vector in vectors]
        norms = [euclidean_norm(array) for array in arrays]
        if len({array.dtype for array in arrays}) > 1 or not all(map(usable, norms)):
            return None
        products = self._rows_in(arrays[0].dtype).products(np.stack(arrays), self.count)
        found = [row / np.float64(norm) for row, norm in zip(products, norms, strict=True)]
        return [
            sys.modules["torch"].from_numpy(row) if is_tensor(v) else row for row, v in zip(found, vectors, strict=True)
        ]

    def rows(self, indices: Sequence[int]) -> Array:
        """The canaries at these indices as the rows of a matrix in single precision."""
        if self.dim > rotation_rows.LARGEST:
            return super().rows(indices)
        return self._rows_in(np.dtype(np.float32)).sums([[index] for index in indices])

    def _rows_in(self, dtype: "np.dtype[Any]") -> rotation_rows.RowRotation:
        """The rotation of a small model, with its tables in this precision."""
        if dtype not in self._devices:
            self._devices[dtype] = rotation_rows.RowRotation(self._rotation, dtype)
        tables: rotation_rows.RowRotation = self._devices[dtype]
        return tables

    def measure_later(self, vector: Any, others: Any, total: Any, layers: tuple[int, ...], *, copy: bool = True) -> Any:
        """Start to measure a round on its GPU, without waiting (rotation_torch.Measurement); None on other devices.

        Without `copy`, nobody may change `vector` and `others` until the measurement has been read. `total` is never copied.
        """
        if not is_tensor(vector) or vector.device.type != "cuda":
            return None
        from coalmine.canaries.rotation_torch import MeasurePlan

        plan = MeasurePlan(self.count, others is not None, layers, total is not None)
        return self._on(vector.device).measure_later(vector, others, total, plan, copy=copy)

    def _sum(self, indices: list[int], like: "Array | torch.Tensor") -> "Array | torch.Tensor":
        if is_tensor(like) and like.device.type != "cpu":
            return self._on(like.device).combine(indices, working_dtype(like))
        dtype = np.dtype(np.float64 if like.dtype.itemsize > 4 else np.float32)
        if self.dim <= rotation_rows.LARGEST:
            return self._rows_in(dtype).sums([indices])[0]
        return rotation_numpy.combine(self._rotation, indices, dtype)

    def _cosines(self, vector: Any) -> tuple[Any, float]:
        if not is_tensor(vector):
            norm = euclidean_norm(vector)
            if not usable(norm):
                return vector[:0], norm
            if self.dim <= rotation_rows.LARGEST:
                products = self._rows_in(vector.dtype).products(vector[None], self.count)[0]
            else:
                products = rotation_numpy.products(self._rotation, vector, self.count)
            return products / np.float64(norm), norm
        if vector.device.type != "cpu":
            return self._on(vector.device).cosines(vector, self.count)
        import torch

        cosines, norm = self._cosines(vector.numpy())
        return torch.from_numpy(cosines), norm

    def traced_canary(self, index: Any, like: Any) -> Any:
        """Canary `index`, a number that jax may trace, as a jax array like `like`; zeros if it is out of range."""
        from coalmine.canaries import rotation_jax

        jax = sys.modules["jax"]
        weights = jax.nn.one_hot(index, self.count, dtype=rotation_jax.working(like).dtype)
        return rotation_jax.combine(self._jax_tables(like), weights, dim=self.dim).astype(like.dtype)

    def _jax_cosines(self, vector: Any) -> Any:
        from coalmine.canaries import rotation_jax

        if rotation_jax.on_cpu(vector):
            return super()._jax_cosines(vector)  # numpy is faster there
        tables = self._jax_tables(vector)
        if is_traced(vector):
            return rotation_jax.cosines(tables, rotation_jax.working(vector), count=self.count)[0]
        cosines, norm = rotation_jax.cosines_and_length(tables, vector, count=self.count)
        if not (math.isfinite(norm) and norm):
            rescaled(np.asarray(rotation_jax.working(vector)))  # raises an error that states the problem
        return cosines

    def _jax_sum(self, indices: list[int], like: Any) -> Any:
        from coalmine.canaries import rotation_jax

        if rotation_jax.on_cpu(like):
            return super()._jax_sum(indices, like)
        weights = np.zeros(self.count, np.float64 if like.dtype.itemsize > 4 else np.float32)
        weights[indices] = 1.0
        return rotation_jax.combine(self._jax_tables(like), rotation_jax.placed(weights, like), dim=self.dim)

    def _jax_tables(self, like: Any) -> Any:
        from coalmine.canaries.rotation_jax import DeviceTables

        return self._devices.setdefault("jax", DeviceTables()).of(self._rotation, like)

    def _on(self, device: "torch.device") -> Any:
        from coalmine.canaries.rotation_torch import DeviceRotation

        if device not in self._devices:
            self._devices[device] = DeviceRotation(self._rotation, device)
        return self._devices[device]
