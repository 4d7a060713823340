"""A model's arrays as one flat vector, in the order of its ArrayRecord, and that vector on disk."""

import io
import tokenize
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

from coalmine.argument_checks import short_repr

Row = npt.NDArray[Any]
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
NPY = b"\x93NUMPY\x01\x00"  # the first bytes of numpy's format, version 1.0
# Errors that numpy and zipfile raise for truncated, changed or unrelated files.
DAMAGED = (ValueError, OSError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, tokenize.TokenError)


@dataclass(frozen=True)
class RecordLayout:
    """The arrays that the audit covers: those that hold floating-point numbers in the first model.

    Integer buffers stay out, even after Flower's noise has turned them into fractions.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    left_out: tuple[str, ...]
    single: bool  # whether float32 can hold every array

    @classmethod
    def of(cls, record: Mapping[str, Array], left_out: Iterable[str] | None = None) -> "RecordLayout":
        """The layout of a model. For a later model, pass the `left_out` of the first."""
        described = {name: _dtype_and_size(array) for name, array in record.items()}
        if left_out is None:
            left_out = [name for name, (dtype, _) in described.items() if not dtype.startswith(("float", "bfloat"))]
        excluded = tuple(left_out)
        names = tuple(name for name in record if name not in excluded)
        single = all(described[name][0] != "float64" for name in names)
        return cls(names, tuple(described[name][1] for name in names), excluded, single)

    @property
    def dim(self) -> int:
        """Number of audited parameters."""
        return sum(self.sizes)

    @property
    def layers(self) -> list[tuple[str, int]]:
        """Name and size of every audited array: each gets its own noise gauge."""
        return [(name, size) for name, size in zip(self.names, self.sizes, strict=True) if size]

    @property
    def buffers(self) -> tuple[str, ...]:
        """Audited arrays that are not parameters, by the names that PyTorch gives to buffers."""
        return tuple(name for name in self.names if name.endswith(BUFFERS))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about arrays that are not parameters."""
        warnings = []
        if self.left_out:
            names = ", ".join(self.left_out)
            warnings.append(f"integer arrays are left out of the audit, though Flower clips and noises them: {names}")
        if self.buffers:
            names = ", ".join(self.buffers)
            warnings.append(
                f"buffers are not parameters, but Flower clips and noises them, and the audit includes them: {names}"
            )
        return tuple(warnings)

    @property
    def dtype(self) -> type[np.floating[Any]]:
        """The row's dtype: single precision if it can hold every array."""
        return np.float32 if self.single else np.float64

    def row(self, record: Mapping[str, Array]) -> Row:
        """The model as one flat vector."""
        parts = [array_values(record[name]).reshape(-1) for name in self.names]
        return np.concatenate(parts, dtype=self.dtype)

    def update_into(self, out: Row, record: Mapping[str, Array], current: Row) -> None:
        """Write the difference of a client's model and the current one into `out`, without copying the arrays."""
        start = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            values, part = array_values(record[name]).reshape(-1), slice(start, start + size)
            if values.size != size:
                raise ValueError(f"a reply's {name!r} must hold {size} numbers like the model's, got {values.size}")
            np.subtract(values, current[part], out=out[part], casting="same_kind")
            start += size

    def add_update(self, record: Mapping[str, Array], update: Row) -> ArrayRecord:
        """The model plus `update`. Arrays that are left out stay unchanged."""
        result, start = {}, 0
        for name, array in record.items():
            if name in self.left_out:
                result[name] = array
                continue
            values = array_values(array)
            part = update[start : start + values.size].reshape(values.shape)
            result[name] = Array(np.asarray(values + part, dtype=values.dtype))
            start += values.size
        return ArrayRecord(result)


def as_record(model: Any) -> ArrayRecord:
    """A model as an ArrayRecord: from an ArrayRecord, a torch Module, a state_dict, or a list of numpy arrays.

    This does not import torch: a caller with a Module has already imported it.
    """
    if isinstance(model, ArrayRecord):
        return model
    named = model.state_dict() if callable(getattr(model, "state_dict", None)) else model
    if isinstance(named, list | tuple):
        named = {str(index): values for index, values in enumerate(named)}
    if not isinstance(named, Mapping):
        raise TypeError(f"a model must be an ArrayRecord, a torch Module or a state_dict, got {short_repr(model)}")
    return ArrayRecord({str(name): _as_array(name, values) for name, values in named.items()})


def _as_array(name: object, values: Any) -> Array:
    if isinstance(values, Array):
        return values
    try:
        values = np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
    except TypeError as error:
        raise TypeError(f"array {name!r} must be of a type that numpy knows, got {values.dtype} ({error})") from None
    if values.dtype.kind not in "biufc":
        raise TypeError(f"a model must hold numbers in array {name!r}, got {short_repr(values)}")
    return Array(values)


def _dtype_and_size(array: Array) -> tuple[str, int]:
    """From the array's metadata, or from its numbers: arrays of the legacy API have no metadata."""
    if array.dtype:
        return array.dtype, int(np.prod(array.shape))
    values = array.numpy()
    return str(values.dtype), int(values.size)


def array_values(array: Array) -> npt.NDArray[Any]:
    """The array's numbers, read-only. They are copied only if they are not native floats in numpy's format."""
    if array.data.startswith(NPY):
        length = len(NPY) + 2 + int.from_bytes(array.data[len(NPY) : len(NPY) + 2], "little")
        shape, order, dtype = _header(array.data[:length])
        if (
            dtype.kind == "f" and dtype.isnative and min(shape, default=0) >= 0
        ):  # numpy's own reader rejects other shapes
            count = int(np.prod(shape, dtype=np.int64))
            return np.frombuffer(array.data, dtype, count, offset=length).reshape(shape, order=order)
    return array.numpy()


@lru_cache(maxsize=1024)  # a round's replies share headers, and parsing one costs more than a small array
def _header(data: bytes) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]:
    """Shape, order and dtype in a header of numpy's format."""
    file = io.BytesIO(data)
    np.lib.format.read_magic(file)
    shape, column_first, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, "F" if column_first else "C", dtype


class FrozenArrays:
    """The arrays that were the same in every real client's reply as in the model sent to it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._unchanged = list(names)
        self._replies = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays so far; none before the first reply."""
        return tuple(self._unchanged) if self._replies else ()

    def compare(self, sent: Mapping[str, Array], reply: Mapping[str, Array]) -> None:
        """Drop the arrays that this reply changed. A dropped array is not read again."""
        self._replies += 1
        self._unchanged = [name for name in self._unchanged if name in reply and _same_numbers(sent[name], reply[name])]


def _same_numbers(first: Array, second: Array) -> bool:
    """Whether two arrays hold the same numbers. Equal bytes need no parsing."""
    return first.data == second.data or np.array_equal(array_values(first), array_values(second))


def load_row(path: Path, like: Row) -> Row:
    """Load a saved row with the dtype of `like`. A row of another length is rejected."""
    try:
        row = np.asarray(np.load(path, allow_pickle=False), dtype=like.dtype)
    except DAMAGED as error:
        raise ValueError(
            f"{path} is not a model ({error}); restore it from a copy, or name another directory"
        ) from None
    if row.shape != like.shape:
        raise ValueError(
            f"{path} must be a model of {like.size} numbers, got shape {row.shape}; restore it, or name another directory"
        )
    return row
