"""A rotation of fewer than 2^16 coordinates, applied to the rows of a matrix on the CPU.

Small vectors spend more time between numpy's calls than in them, and hold Python's lock there. So the calls of one transform
serve all rows, and signs and shuffles are kept as arrays. Every number is the same bit for bit as by `rotation_numpy`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coalmine.canaries.array_types import Array
from coalmine.canaries.rotation_numpy import INNER_STEPS, PRODUCT, drawn_signs, groups_of, hadamard_matrix, tiles

if TYPE_CHECKING:
    from coalmine.canaries.rotation import Rotation, Stage

LARGEST = 2**16 - 1  # coordinates: each of them is a block of the shuffle, and all transforms are within a chunk


class RowRotation:
    """The tables of a rotation in one precision; `products` and `sums` take and return rows."""

    def __init__(self, rotation: "Rotation", dtype: npt.DTypeLike) -> None:
        if rotation.dim > LARGEST:
            raise ValueError(f"dim must be at most {LARGEST:,}, got {rotation.dim:,}")
        self._dim, self._size, self._dtype = rotation.dim, rotation.size, np.dtype(dtype)
        self._steps = groups_of(rotation.levels, INNER_STEPS)
        self._stages = [_Tables(stage, rotation.size, self._dtype) for stage in rotation.stages]

    def products(self, rows: Array, count: int) -> Array:
        """The products of each row with the first `count` columns."""
        *stages, last = self._stages
        for stage in stages:
            rows = self._stage_back(rows, stage)
        return self._stage_back(rows, last, shortened=self._fits(count))[:, :count]

    def sums(self, members: Sequence[Sequence[int]]) -> Array:
        """For each list of members, the sum of these columns."""
        rows = np.zeros((len(members), self._dim), self._dtype)
        for row, indices in zip(rows, members, strict=True):
            row[list(indices)] = 1.0
        most = max((max(indices, default=0) for indices in members), default=0)
        *stages, last = self._stages
        rows = self._stage_forward(rows, last, shortened=self._fits(most + 1))
        for stage in reversed(stages):
            rows = self._stage_forward(rows, stage)
        return rows

    def _fits(self, count: int) -> bool:
        """Whether the second transform of the last stage leaves the first `count` coordinates as they are."""
        return count <= self._dim - self._size

    def _stage_back(self, rows: Array, stage: "_Tables", *, shortened: bool = False) -> Array:
        moved = np.empty(rows.shape, self._dtype)
        np.take(rows, stage.order, axis=1, out=moved, mode="clip")
        moved *= stage.opening
        self._transform(moved[:, : self._size])
        if not shortened:
            end = moved[:, -self._size :]
            end *= stage.closing
            self._transform(end)
        return moved

    def _stage_forward(self, rows: Array, stage: "_Tables", *, shortened: bool = False) -> Array:
        """The inverse; the rows are overwritten."""
        if not shortened:
            end = rows[:, -self._size :]
            self._transform(end)
            end *= stage.closing
        self._transform(rows[:, : self._size])
        rows *= stage.opening
        return np.take(rows, stage.places, axis=1, mode="clip")

    def _transform(self, rows: Array) -> None:
        """The Walsh-Hadamard transform of each row, unscaled, in place."""
        source, stride, spare = rows, 1, [np.empty(rows.shape, self._dtype) for _ in self._steps[:2]]
        for number, steps in enumerate(self._steps, 1):
            target = rows if number == len(self._steps) else spare[number % len(spare)]
            _products(steps, source, target, stride)
            source, stride = target, stride << steps


class _Tables:
    """The signs and the shuffle of one stage. Signs are scaled as the transform after them needs it."""

    def __init__(self, stage: "Stage", size: int, dtype: "np.dtype[Any]") -> None:
        scratch, scale = np.empty(stage.dim + 16, dtype), size**-0.5
        self.order, self.places = stage.order.astype(np.intp), stage.places.astype(np.intp)
        self.opening = drawn_signs(stage.opening, 0, stage.dim, 1.0, scratch).copy()
        self.opening[:size] = drawn_signs(stage.opening, 0, size, scale, scratch)
        self.closing = drawn_signs(stage.closing, 0, size, scale, scratch).copy()


def _products(steps: int, source: Array, target: Array, stride: int) -> None:
    """`steps` steps in each row, between values `stride` apart and more, from `source` into `target`."""
    matrix, size, count = hadamard_matrix(steps, source.dtype), 1 << steps, len(source)
    if stride == 1:
        rows = min(source.shape[1] >> steps, PRODUCT >> (2 * steps))
        shape = (count, -1, rows, size)
        np.matmul(source.reshape(shape), matrix, out=target.reshape(shape))
    else:
        shape = (count, -1, size, stride)
        np.matmul(matrix, tiles(source.reshape(shape), steps), out=tiles(target.reshape(shape), steps))
