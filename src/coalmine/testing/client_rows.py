"""The clients' updates as rows of a matrix, checked before they enter a framework, and a model's arrays as one row."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, finite_array, short_repr
from coalmine.testing.call_plan import SHORT

Release: TypeAlias = Callable[..., Floats]  # release(updates); that of a strategy takes weights too
ROUNDING = 1e-4  # relative loss by which single precision may shorten an update of exactly the clip norm


def client_rows(updates: Any, *, dim: int | None = None, clip_norm: float | None = None) -> Floats:
    """`updates` as a matrix with one row for each client, of `dim` numbers if that is known.

    At least one row must be as long as the framework's clip norm, unless all are short on purpose. Otherwise canaries
    contribute less than a client may, and the test measures less than leaks.
    """
    rows = finite_array("updates", updates)
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"updates must be a matrix with one row for each client, got shape {rows.shape}")
    if dim is not None and rows.shape[1] != dim:
        raise ValueError(f"updates must have {dim} numbers for each client, got {rows.shape[1]}; pass dim={dim}")
    if clip_norm is not None:
        longest = float(np.linalg.norm(rows, axis=1).max())
        if 1.5 * SHORT * clip_norm < longest < clip_norm * (1 - ROUNDING):
            raise ValueError(
                f"updates must be at least as long as the clip norm, {clip_norm:g}, or they contribute less than a client "
                f"may; the longest has length {longest:g}: pass clip_norm={clip_norm:g}"
            )
    return rows


class ModelArrays:
    """A model's arrays by name, and their layout in a row. Without a model there is one array, "weights"."""

    def __init__(self, model: Mapping[str, npt.NDArray[Any]] | None) -> None:
        if model is not None and (not isinstance(model, Mapping) or not model):
            raise TypeError(f"model must map names to arrays, got {short_repr(model)}")
        self._model = None if model is None else {str(name): np.asarray(values) for name, values in model.items()}
        for name, values in (self._model or {}).items():
            if values.dtype.kind != "f":
                raise ValueError(
                    f"model must hold floating-point arrays, got {values.dtype} in {name!r}; leave it out of the test"
                )

    @property
    def dim(self) -> int | None:
        """The number of the model's parameters; None if it is that of the first update."""
        return None if self._model is None else sum(values.size for values in self._model.values())

    def initial(self, dim: int) -> dict[str, npt.NDArray[Any]]:
        """The model that training starts from: zeros in single precision if none was given."""
        if self._model is None:
            return {"weights": np.zeros(dim, dtype=np.float32)}
        return {name: values.copy() for name, values in self._model.items()}

    def split(self, row: Floats) -> dict[str, npt.NDArray[Any]]:
        """A row as arrays of the model's shapes and types."""
        parts, start = {}, 0
        for name, values in self.initial(row.size).items():
            part = row[start : start + values.size].reshape(values.shape)
            parts[name] = np.asarray(part, dtype=values.dtype)
            start += values.size
        return parts


def joined(arrays: Mapping[str, Any]) -> Floats:
    """Arrays by name as one row."""
    return np.concatenate([np.asarray(values, dtype=np.float64).reshape(-1) for values in arrays.values()])
