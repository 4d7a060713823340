"""The arrays of a model, one by one: numpy arrays, torch tensors or jax arrays, as flat rows of numbers and back."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coalmine.argument_checks import short_repr
from coalmine.canaries.array_types import is_jax, is_tensor
from coalmine.measure.arrays import arrays_of, is_device_jax, jax_arrays, number_kind, numpy_vector

WHOLE = "parameters"  # name of a model that is one array
WIDEST = 8  # bytes of a number in a leaf that holds canaries


@dataclass(frozen=True)
class Leaf:
    """One array of a model: its name, shape and type, and the information needed to create another one like it."""

    name: str
    shape: tuple[int, ...]
    kind: str  # numpy, torch, jax
    dtype: Any
    size: int  # coordinates in this process
    place: Any = None  # torch: the device; jax: the sharding
    mesh: Any = None  # of a DTensor: mesh, placements, shape and stride of the whole
    audited: bool = True  # integers, flags and frozen parameters hold no canary
    parts: tuple["Part", ...] = ()  # of a jax array that is not on the host: one for each device, without replicas

    @classmethod
    def of(cls, name: str, value: Any, *, frozen: bool) -> "Leaf":
        local, mesh = _local_part(name, value)
        kind = kind_of(local)
        if kind is None:
            module = "; for a torch module pass dict(module.named_parameters())" if name == WHOLE else ""
            raise ValueError(
                f"parameters must be numpy arrays, torch tensors or jax arrays in dicts, lists and tuples, got "
                f"{short_repr(value)} at {name}{module}"
            )
        if problem := _unreadable(local, kind):
            raise ValueError(f"{name} must be a plain array, got {problem}")
        place = local.device if kind == "torch" else local.sharding if kind == "jax" else None
        size = math.prod(local.shape)
        audited = not frozen and _holds_canaries(name, local)
        parts = _device_parts(name, local) if audited and is_device_jax(local) else ()
        return cls(name, tuple(local.shape), kind, local.dtype, size, place, mesh, audited, parts)

    @property
    def coordinates(self) -> int:
        """The number of the audit's coordinates in this leaf."""
        return self.size if self.audited else 0

    @property
    def on_host(self) -> bool:
        """Whether the array is in host memory."""
        return not self.parts and (self.kind != "torch" or self.place.type == "cpu")

    def rows(self, argument: str, value: Any) -> dict[str, Any]:
        """The numbers of a value for this leaf, as flat rows by layer name: one row, or one for each device."""
        local = self.local_array(argument, value)
        if not self.parts and not is_device_jax(local):
            return {self.name: as_plain_array(local).reshape(-1)}
        # A value on other devices is moved to the model's devices, or to one device.
        source = numpy_vector(local) if is_tensor(local) else local
        array = jax_arrays().moved(source, self.place if self.parts else None)
        pieces = jax_arrays().one_of_each(array)
        names = [part.name for part in self.parts] or [self.name]
        return {name: piece.reshape(-1) for name, (_, piece) in zip(names, pieces, strict=True)}

    def empty_rows(self) -> dict[str, Any]:
        """Uninitialised rows for this leaf's numbers, by layer name."""
        if not self.parts:
            return {self.name: self.empty_row()}
        jax = sys.modules["jax"]
        return {part.name: jax.numpy.zeros(part.size, self.dtype, device=part.device) for part in self.parts}

    def local_array(self, argument: str, value: Any) -> Any:
        """This process's part of a value for this leaf. Raises ValueError if it is not an array of this shape."""
        local, _ = _local_part(f"{argument} at {self.name}", value)
        kind = kind_of(local)
        problem = short_repr(value) if kind is None else _unreadable(local, kind)
        if problem:
            raise ValueError(f"{argument} must hold a plain array at {self.name}, got {problem}")
        if number_kind(local) in ("b", "c", ""):
            raise ValueError(f"{argument} must hold real numbers at {self.name}, got {local.dtype}")
        if tuple(local.shape) != self.shape:
            raise ValueError(f"{argument} must have shape {self.shape} at {self.name}, got {tuple(local.shape)}")
        return local

    def empty_row(self) -> Any:
        """A row for this leaf's numbers, to be filled and passed to `rebuild`. A leaf without canaries gets zeros."""
        if self.kind == "torch":
            torch = sys.modules["torch"]
            return (torch.empty if self.audited else torch.zeros)(self.size, dtype=self.dtype, device=self.place)
        return np.empty(self.size, self.dtype) if self.audited else np.zeros(self.size, self.dtype)

    def rebuild(self, rows: Mapping[str, Any]) -> Any:
        """An array like this leaf, made from the rows of its numbers."""
        if self.parts:
            return jax_arrays().assembled(self.shape, self.place, [rows[part.name] for part in self.parts])
        shaped = rows[self.name].reshape(self.shape)
        if self.kind == "jax":
            return sys.modules["jax"].device_put(shaped, self.place)
        if self.mesh is not None:
            kind, mesh, placements, shape, stride = self.mesh
            return kind.from_local(shaped, mesh, placements, run_check=False, shape=shape, stride=stride)
        return shaped


@dataclass(frozen=True)
class Part:
    """The part of a jax array on one device: the name of its layer, its size, and the device."""

    name: str
    size: int
    device: Any


def _device_parts(name: str, array: Any) -> tuple[Part, ...]:
    """The parts of a jax array, without replicas. An array on one device is one part with the array's name."""
    pieces = jax_arrays().one_of_each(array)
    names = [name] if len(pieces) == 1 else [f"{name}@{number}" for number in range(len(pieces))]
    return tuple(
        Part(part, math.prod(piece.shape), device) for part, (device, piece) in zip(names, pieces, strict=True)
    )


def as_plain_array(array: Any) -> Any:
    """The array without its framework's extras: a jax array on the host becomes numpy, a tensor is detached."""
    if is_device_jax(array):
        return array
    if is_tensor(array):
        return array.detach().resolve_neg()
    return np.asarray(array)


def kind_of(value: Any) -> str | None:
    """numpy, torch or jax; None for anything else, and for arrays of objects or text."""
    if is_tensor(value):
        return "torch"
    if isinstance(value, np.ndarray | np.generic):  # most operations turn an array without dimensions into a scalar
        return "numpy" if number_kind(value) in ("f", "i", "u", "b", "c") else None
    return "jax" if is_jax(value) else None


def _unreadable(array: Any, kind: str) -> str | None:
    """Why the array's numbers cannot be read; None if they can."""
    reason: str | None = (jax_arrays() if kind == "jax" else arrays_of(array)).unreadable(array)
    return reason


def _holds_canaries(name: str, array: Any) -> bool:
    """Whether a leaf holds canaries: floating-point numbers do, integers and flags do not. Other types raise ValueError."""
    kind = number_kind(array)
    if kind in ("b", "i", "u"):
        return False
    if kind != "f" or not 2 <= array.dtype.itemsize <= WIDEST:
        raise ValueError(
            f"{name} must be float16, bfloat16, float32 or float64 to hold a canary, got {array.dtype}; convert it, or "
            "leave it out if it is not trained"
        )
    return True


def _local_part(name: str, value: Any) -> tuple[Any, Any]:
    """This process's part of a DTensor, and the layout to create another; anything else unchanged, and None."""
    tensor: Any = value if is_tensor(value) else None
    if not (hasattr(tensor, "to_local") and hasattr(tensor, "placements")):
        return value, None
    if not all(placement.is_shard() for placement in tensor.placements):
        raise ValueError(
            f"{name} must be sharded over the processes, each coordinate in one of them, got {tensor.placements}"
        )
    layout = (type(tensor), tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    return tensor.detach().to_local(), layout
