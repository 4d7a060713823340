"""A model's arrays as one row of numbers, in the order of its ArrayRecord."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

Row = npt.NDArray[Any]
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Layout:
    """Which arrays the audit looks at, fixed by the first model: those of floating-point numbers.

    Whole-number buffers stay out, also when Flower's noise has made fractions of them.
    """

    names: tuple[str, ...]
    left_out: tuple[str, ...]
    dim: int
    single: bool  # whether float32 holds every array

    @classmethod
    def of(cls, record: Mapping[str, Array], left_out: Iterable[str] | None = None) -> "Layout":
        """The layout of a model; `left_out` comes from whoever saw the first one."""
        known = {name: _dtype_and_size(array) for name, array in record.items()}
        if left_out is None:
            left_out = [name for name, (dtype, _) in known.items() if not dtype.startswith(("float", "bfloat"))]
        out = tuple(left_out)
        names = tuple(name for name in record if name not in out)
        single = all(known[name][0] != "float64" for name in names)
        return cls(names, out, sum(known[name][1] for name in names), single)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Arrays that are no parameters, by the names that PyTorch gives them."""
        return tuple(name for name in (*self.names, *self.left_out) if name.endswith(BUFFERS))

    def row(self, record: Mapping[str, Array]) -> Row:
        """The model as one row."""
        parts = [record[name].numpy().reshape(-1) for name in self.names]
        return np.concatenate(parts).astype(np.float32 if self.single else np.float64, copy=False)

    def moved(self, record: Mapping[str, Array], step: Row) -> ArrayRecord:
        """The model with `step` added to its row; what is left out stays as it is."""
        result, place = {}, 0
        for name, array in record.items():
            if name in self.left_out:
                result[name] = array
                continue
            values = array.numpy()
            part = step[place : place + values.size].reshape(values.shape)
            result[name] = Array(np.asarray(values + part, dtype=values.dtype))
            place += values.size
        return ArrayRecord(result)


def _dtype_and_size(array: Array) -> tuple[str, int]:
    """From what the array says of itself; those of the legacy API say nothing, and are read."""
    if array.dtype:
        return array.dtype, int(np.prod(array.shape))
    values = array.numpy()
    return str(values.dtype), int(values.size)
