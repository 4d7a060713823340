"""A model's arrays as one row of numbers, in the order of its ArrayRecord, and that row on disk."""

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

from coalmine.argument_checks import shown
from coalmine.storage.files import write_atomically

Row = npt.NDArray[Any]
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
NPY = b"\x93NUMPY\x01\x00"  # how data in numpy's format begins, version 1.0
# what numpy and zipfile raise over a file that is cut short, changed or not theirs
DAMAGED = (ValueError, OSError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, tokenize.TokenError)


@dataclass(frozen=True)
class Layout:
    """Which arrays the audit looks at, fixed by the first model: those of floating-point numbers.

    Whole-number buffers stay out, also when Flower's noise has made fractions of them.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    left_out: tuple[str, ...]
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
        return cls(names, tuple(known[name][1] for name in names), out, single)

    @property
    def dim(self) -> int:
        """How many numbers the audit looks at."""
        return sum(self.sizes)

    @property
    def layers(self) -> list[tuple[str, int]]:
        """Name and size of every array that the audit looks at: each gets a noise gauge of its own."""
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
        """Of the row: single precision where that holds every array."""
        return np.float32 if self.single else np.float64

    def row(self, record: Mapping[str, Array]) -> Row:
        """The model as one row."""
        parts = [array_values(record[name]).reshape(-1) for name in self.names]
        return np.concatenate(parts, dtype=self.dtype)

    def update_into(self, out: Row, record: Mapping[str, Array], current: Row) -> None:
        """`out` becomes what a client's model adds to the current one; read where it lies, nothing is copied."""
        place = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            values, part = array_values(record[name]).reshape(-1), slice(place, place + size)
            if values.size != size:
                raise ValueError(f"a reply's {name!r} must hold {size} numbers as the model's does, got {values.size}")
            np.subtract(values, current[part], out=out[part], casting="same_kind")
            place += size

    def moved(self, record: Mapping[str, Array], step: Row) -> ArrayRecord:
        """The model with `step` added to its row; what is left out stays as it is."""
        result, place = {}, 0
        for name, array in record.items():
            if name in self.left_out:
                result[name] = array
                continue
            values = array_values(array)
            part = step[place : place + values.size].reshape(values.shape)
            result[name] = Array(np.asarray(values + part, dtype=values.dtype))
            place += values.size
        return ArrayRecord(result)


def as_record(model: Any) -> ArrayRecord:
    """A model as an ArrayRecord: from an ArrayRecord, a torch Module, a state_dict, or a list of numpy arrays.

    torch is never imported here: whoever has a Module has imported it already.
    """
    if isinstance(model, ArrayRecord):
        return model
    named = model.state_dict() if callable(getattr(model, "state_dict", None)) else model
    if isinstance(named, list | tuple):
        named = {str(index): values for index, values in enumerate(named)}
    if not isinstance(named, Mapping):
        raise TypeError(f"a model must be an ArrayRecord, a torch Module or a state_dict, got {shown(model)}")
    return ArrayRecord({str(name): _as_array(name, values) for name, values in named.items()})


def _as_array(name: object, values: Any) -> Array:
    if isinstance(values, Array):
        return values
    try:
        values = np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
    except TypeError as error:
        raise TypeError(f"array {name!r} must be of a type that numpy knows, got {values.dtype} ({error})") from None
    if values.dtype.kind not in "biufc":
        raise TypeError(f"a model must hold numbers in array {name!r}, got {shown(values)}")
    return Array(values)


def _dtype_and_size(array: Array) -> tuple[str, int]:
    """From what the array says of itself; those of the legacy API say nothing, and are read."""
    if array.dtype:
        return array.dtype, int(np.prod(array.shape))
    values = array.numpy()
    return str(values.dtype), int(values.size)


def array_values(array: Array) -> npt.NDArray[Any]:
    """The array's numbers where they lie, not to be written to; copied only if they must be made into floats of ours."""
    if array.data.startswith(NPY):
        length = len(NPY) + 2 + int.from_bytes(array.data[len(NPY) : len(NPY) + 2], "little")
        shape, order, dtype = _header(array.data[:length])
        if dtype.kind == "f" and dtype.isnative and min(shape, default=0) >= 0:  # numpy's own reader refuses others
            count = int(np.prod(shape, dtype=np.int64))
            return np.frombuffer(array.data, dtype, count, offset=length).reshape(shape, order=order)
    return array.numpy()


@lru_cache(maxsize=1024)  # replies of a round have the same headers, and reading one costs more than a small array
def _header(data: bytes) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]:
    """What a header in numpy's format says: shape, order and dtype."""
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
        """Their names; none before the first reply."""
        return tuple(self._unchanged) if self._replies else ()

    def compare(self, sent: Mapping[str, Array], reply: Mapping[str, Array]) -> None:
        """Drop the arrays that this reply changed. Arrays that changed once are not read again."""
        self._replies += 1
        self._unchanged = [name for name in self._unchanged if name in reply and _same(sent[name], reply[name])]


def _same(first: Array, second: Array) -> bool:
    """Whether two arrays hold the same numbers; equal bytes settle it without reading them."""
    return first.data == second.data or np.array_equal(array_values(first), array_values(second))


def save_row(path: Path, row: Any) -> None:
    """One .npy row, as `coalmine verify --model` reads it."""
    content = io.BytesIO()
    np.save(content, row, allow_pickle=False)
    write_atomically(path, content.getvalue())


def load_row(path: Path, like: Row) -> Row:
    """The inverse, refused unless the row is as long as `like`, whose kind it takes."""
    try:
        row = np.asarray(np.load(path, allow_pickle=False), dtype=like.dtype)
    except DAMAGED as error:
        raise ValueError(f"{path} is no model ({error}); restore it from a copy, or name another directory") from None
    if row.shape != like.shape:
        raise ValueError(
            f"{path} must be a model of {like.size} numbers, got shape {row.shape}; restore it, or name another directory"
        )
    return row
