"""Clients' updates in the form that a user's function takes, and its release as one vector."""

import importlib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from coalmine.argument_checks import Floats, WrongTypeError, short_repr
from coalmine.canaries.array_types import is_tensor

LIBRARIES = ("numpy", "torch", "jax")
Form = Literal["matrix", "list"]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class UpdateForm:
    """The form in which a function takes updates: one matrix or a list, its library, and its layers.

    `like` is the name of a library, or an array whose library, dtype and device the updates take.
    """

    form: Form
    like: Any
    shapes: Shapes | None

    @classmethod
    def of(cls, form: Any, like: Any, shapes: Shapes | None) -> "UpdateForm":
        """The form, checked; ImportError if its library is not installed."""
        if short_repr(form) not in ("'matrix'", "'list'"):  # an array has no truth value
            raise ValueError(f"updates must be 'matrix' or 'list', got {short_repr(form)}")
        if isinstance(like, str):
            if like not in LIBRARIES:
                raise ValueError(f"like must be 'numpy', 'torch', 'jax' or an array, got {short_repr(like)}")
            if like != "numpy":
                try:
                    importlib.import_module(like)
                except ImportError as error:
                    raise ImportError(f"like={like!r} needs {like}: pip install {like}") from error
        elif not hasattr(like, "dtype") or not hasattr(like, "shape"):
            raise WrongTypeError(f"like must be 'numpy', 'torch', 'jax' or an array, got {short_repr(like)}")
        if not isinstance(like, str) and not _is_floating(like):
            raise WrongTypeError(f"like must hold floating-point numbers, got {short_repr(like)}")
        return cls("list" if shapes is not None else form, like, shapes)

    @property
    def is_half(self) -> bool:
        """Whether updates come in half precision, which holds no numbers above 65,504."""
        return not isinstance(self.like, str) and int(np.dtype(self._numpy_dtype).itemsize) < 4

    def present(self, matrix: Floats) -> Any:
        """The updates, one row for each client, as the function takes them; it may change them."""
        if self.form == "matrix":
            return self._array(matrix)
        if self.shapes is None:
            return [self._array(row) for row in matrix]
        return [[self._array(part) for part in self._layers(row)] for row in matrix]

    def vector(self, values: Floats) -> Any:
        """A few numbers, such as weights, in the same library."""
        return self._array(values)

    def _layers(self, row: Floats) -> list[Floats]:
        assert self.shapes is not None
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(row, ends), self.shapes, strict=True)]

    def _array(self, values: Floats) -> Any:
        if isinstance(self.like, str):
            if self.like == "numpy":
                return values
            if self.like == "torch":
                return importlib.import_module("torch").from_numpy(values.astype(np.float32))
            return importlib.import_module("jax.numpy").asarray(values.astype(np.float32))
        if is_tensor(self.like):
            torch = importlib.import_module("torch")
            return torch.from_numpy(values).to(device=self.like.device, dtype=self.like.dtype)
        if isinstance(self.like, np.ndarray):
            return values.astype(self.like.dtype)
        return importlib.import_module("jax.numpy").asarray(values, dtype=self.like.dtype)

    @property
    def _numpy_dtype(self) -> Any:
        if is_tensor(self.like):
            return {2: np.float16, 4: np.float32}.get(self.like.dtype.itemsize, np.float64)
        return self.like.dtype


def _is_floating(array: Any) -> bool:
    if is_tensor(array):
        return bool(array.is_floating_point())
    kind = np.dtype(array.dtype).kind
    return kind == "f" or (kind == "V" and np.dtype(array.dtype).names is None)  # jax's bfloat16 has kind V


def checked_shapes(shapes: Any) -> Shapes | None:
    """Layers' shapes as tuples of whole numbers; None if there are none."""
    if shapes is None:
        return None
    try:
        checked = tuple(tuple(operator.index(side) for side in shape) for shape in shapes)
    except (TypeError, ValueError):
        raise WrongTypeError(f"shapes must list the shape of each layer, got {short_repr(shapes)}") from None
    if not checked or min((side for shape in checked for side in shape), default=1) < 1:
        raise ValueError(f"shapes must list the shape of each layer, sides at least 1, got {short_repr(shapes)}")
    return checked


def released_vector(released: Any, dim: int) -> Floats:
    """The function's release as one vector of float64; layers are joined in order.

    ValueError for a wrong shape, for anything but real numbers, and for NaN or infinity.
    """
    if released is None:
        raise ValueError("release must return the noised aggregate, got None; does it lack a return statement?")
    try:
        parts = [_flat(part) for part in _leaves(released)]
    except RecursionError:
        raise WrongTypeError(
            "release must return an array, or a list of arrays, got a list that is nested too deeply"
        ) from None
    size = sum(part.size for part in parts)
    if size != dim:
        shapes = ", ".join(str(tuple(np.shape(part))) for part in parts[:4])
        raise ValueError(
            f"release must return dim = {dim:,} numbers, the sum or mean of the updates with its noise, got {size:,} "
            f"(shapes {shapes}{', …' if len(parts) > 4 else ''})"
        )
    vector = np.concatenate(parts)
    if not np.isfinite(vector).all():
        raise ValueError(
            f"release must return finite numbers, got NaN or infinity in {(~np.isfinite(vector)).sum():,} of {dim:,}"
        )
    return vector


def _leaves(released: Any) -> list[Any]:
    """Arrays of a list, tuple or dictionary of layers, however nested; numbers in a list are one array."""
    if isinstance(released, Mapping):
        released = list(released.values())
    if not isinstance(released, list | tuple):
        return [released]
    if all(isinstance(item, int | float | np.number) for item in released):
        return [np.asarray(released)]
    return [leaf for item in released for leaf in _leaves(item)]


def _flat(part: Any) -> Floats:
    try:
        if is_tensor(part):
            part = part.detach().cpu()
            part = part.double().numpy() if part.is_floating_point() else part.numpy()
        array = np.asarray(part)
        if isinstance(part, np.ma.MaskedArray) or array.dtype.kind not in "iufV" or array.dtype.names is not None:
            raise TypeError
        return np.array(array, dtype=np.float64).ravel()  # jax's bfloat16 has kind V
    except (TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError, LookupError):
        raise WrongTypeError(
            f"release must return an array of real numbers, or a list of such arrays, got {short_repr(part)}"
        ) from None
