"""Numpy arrays, torch tensors and jax arrays, distinguished without importing torch or jax."""

import os
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import short_repr

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Whether `value` is a torch tensor; if it is, torch has been imported already."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_jax(value: object) -> bool:
    """Whether `value` is a jax array, or stands for one while jax traces a function."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def is_traced(value: object) -> bool:
    """Whether `value` stands for a jax array while jax traces a function: it has a shape but no numbers yet."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def checked_jax_vector(vector: Any, dim: int) -> Any:
    """A jax array, rejected unless it is one row of `dim` real numbers that can be read."""
    if not is_traced(vector):
        if vector.is_deleted():
            raise ValueError("vector must have its numbers, got a jax array that was deleted or donated")
        if not vector.is_fully_addressable:
            raise ValueError("vector must be on this host, got a jax array of several hosts: pass this host's part")
    numpy = sys.modules["jax"].numpy
    if not (numpy.issubdtype(vector.dtype, numpy.floating) or numpy.issubdtype(vector.dtype, numpy.integer)):
        raise ValueError(f"vector must be real numbers, got dtype {vector.dtype}")
    _check_shape(vector, dim)
    return vector


def _check_shape(vector: Any, dim: int) -> None:
    if tuple(vector.shape) != (dim,):
        hint = "; flatten it first" if vector.ndim > 1 else ""
        raise ValueError(f"vector must have shape ({dim},), one entry per dimension, got {tuple(vector.shape)}{hint}")


def checked_vector(vector: Any, dim: int) -> "Array | torch.Tensor":
    """`vector` in the precision it is computed in: contiguous float32 or float64 of shape (dim,), on its device.

    Half precisions are computed in float32, integers in float64.
    """
    given: Any
    if is_tensor(vector):
        given = vector.detach()
        real = not (given.dtype.is_complex or str(given.dtype) == "torch.bool")
    else:
        given = np.asarray(vector)
        real = given.dtype.kind in "fiu"
    if not real:
        raise ValueError(f"vector must be real numbers, got {short_repr(vector)} (dtype {given.dtype})")
    _check_shape(given, dim)
    if is_tensor(given):
        return given.to(working_dtype(given)).contiguous()
    return np.ascontiguousarray(given, dtype=working_dtype(given))


def checked_like(like: Any) -> Any:
    """`like` itself, rejected unless it is an array or a tensor of floating-point numbers."""
    if is_tensor(like):
        floating = like.dtype.is_floating_point and like.dtype.itemsize > 1  # 8-bit floats cannot be multiplied
    elif isinstance(like, np.ndarray):
        floating = like.dtype.kind == "f"
    elif is_jax(like):
        floating = bool(sys.modules["jax"].numpy.issubdtype(like.dtype, np.floating))
    else:
        raise ValueError(f"like must be a numpy array, a torch tensor or a jax array, got {type(like).__name__}")
    if not floating:
        raise ValueError(
            f"like must be of a floating-point dtype, at least 16 bits wide, as canaries are unit vectors, got {like.dtype}"
        )
    return like


def working_dtype(vector: "Array | torch.Tensor") -> Any:
    """The dtype to compute in, of the vector's backend: float32 for float32 and half precisions, otherwise float64."""
    single = vector.dtype.itemsize <= 4
    if is_tensor(vector):
        torch = sys.modules["torch"]
        return torch.float32 if single and vector.dtype.is_floating_point else torch.float64
    return np.float32 if single and np.asarray(vector).dtype.kind == "f" else np.float64


def same_kind(result: Any, like: Any) -> Any:
    """`result` with the backend, device and dtype of `like`; torch on a CPU shares numpy's memory."""
    if is_tensor(like):
        torch = sys.modules["torch"]
        tensor = result if is_tensor(result) else torch.from_numpy(result)
        return tensor.to(device=like.device, dtype=like.dtype)
    return result.astype(like.dtype, copy=False)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def euclidean_norm(vector: Array) -> float:
    """The Euclidean norm; squares are summed a few thousand at a time in the vector's precision, then in float64."""
    whole = len(vector) // 4096 * 4096
    rows = vector[:whole].reshape(-1, 4096)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # the caller checks the result
        squares = np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64)
        return float(np.sqrt(squares + np.einsum("i,i->", vector[whole:], vector[whole:])))
