"""What comes in and goes out: a numpy array or a torch tensor, told apart without importing torch."""

import os
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import shown

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Whether `value` is a torch tensor; who holds one has imported torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def checked_vector(vector: Any, dim: int) -> "Array | torch.Tensor":
    """`vector` in the precision it is computed in: contiguous float32 or float64 of shape (dim,), where it was.

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
        raise ValueError(f"vector must be real numbers, got {shown(vector)} (dtype {given.dtype})")
    if tuple(given.shape) != (dim,):
        hint = "; flatten it first" if given.ndim > 1 else ""
        raise ValueError(f"vector must have shape ({dim},), one entry per dimension, got {tuple(given.shape)}{hint}")
    if is_tensor(given):
        return given.to(working_dtype(given)).contiguous()
    return np.ascontiguousarray(given, dtype=working_dtype(given))


def checked_like(like: Any) -> Any:
    """`like` itself, refused unless it is an array or a tensor of floating-point numbers."""
    if is_tensor(like):
        floating = like.dtype.is_floating_point
    elif isinstance(like, np.ndarray):
        floating = like.dtype.kind == "f"
    else:
        raise ValueError(f"like must be a numpy array or a torch tensor, got {type(like).__name__}")
    if not floating:
        raise ValueError(f"like must be of a floating-point dtype, for canaries are unit vectors, got {like.dtype}")
    return like


def working_dtype(vector: "Array | torch.Tensor") -> Any:
    """float32 for that and for half precisions, else float64: the dtype to compute in, of the vector's own backend."""
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
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def euclidean_norm(vector: Array) -> float:
    """The Euclidean norm; squares are summed a few thousand at a time in the vector's precision, then in float64."""
    whole = len(vector) // 4096 * 4096
    rows = vector[:whole].reshape(-1, 4096)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # the caller looks at what came out
        squares = np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64)
        return float(np.sqrt(squares + np.einsum("i,i->", vector[whole:], vector[whole:])))
