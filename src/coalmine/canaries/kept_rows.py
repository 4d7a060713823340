"""Canaries as the rows of a matrix. Those of a small model are made once and kept: a transform costs more than a copy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coalmine.canaries.array_types import Array, is_tensor

MOST_KEPT = 1 << 26  # numbers of a matrix that is kept: 256 MB in single precision, of which only used rows take memory
AHEAD = 1 << 19  # numbers that are made at a time before they are needed, in some milliseconds


class KeptRows:
    """The observed canaries of a model on the host, in single precision; each is made once, and kept."""

    def __init__(self, make: Callable[[Sequence[int]], Array], count: int, dim: int) -> None:
        self._make, self._dim = make, dim
        self._rows: Array | None = np.empty((count, dim), np.float32) if count * dim <= MOST_KEPT else None
        self._is_made = np.zeros(count, np.bool_)

    def keeps(self, like: Any) -> bool:
        """Whether canaries of the kind of `like` are kept: not those on a GPU, of a large model, or in double precision."""
        on_host = isinstance(like, np.ndarray) or (is_tensor(like) and like.device.type == "cpu")
        return self._rows is not None and on_host and like.dtype.itemsize <= 4

    def of(self, indices: Sequence[int]) -> Array:
        """Copies of the canaries at `indices`, as the rows of a matrix."""
        return self._made(indices)[list(indices)]

    def sum_of(self, indices: Sequence[int]) -> Array:
        """The sum of the canaries at `indices`."""
        rows, total = self._made(indices), np.zeros(self._dim, np.float32)
        for index in indices:  # np.sum would copy the rows first
            total += rows[index]
        return total

    @property
    def is_growing(self) -> bool:
        """Whether some are made, so the others will be needed."""
        return bool(self._is_made.any()) and not self._is_made.all()

    def make_more(self) -> None:
        """Make the next few that nobody has needed yet. Another thread may do so: each row is the same whoever makes it."""
        self._made(np.flatnonzero(~self._is_made)[: max(AHEAD // self._dim, 1)].tolist())

    def _made(self, indices: Sequence[int]) -> Array:
        assert self._rows is not None
        missing = [index for index in indices if not self._is_made[index]]
        if missing:
            self._rows[missing] = self._make(missing)
            self._is_made[missing] = True
        return self._rows
