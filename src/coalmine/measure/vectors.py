"""Operations on vectors of a model's size, numpy or torch, besides cosines."""

import hashlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from coalmine.argument_checks import Floats, WrongTypeError, short_repr
from coalmine.canaries.array_types import is_jax
from coalmine.canaries.base import usable

_ROW = 4096
SHORTEST, LONGEST = 1e-100, 1e100  # norms of a vector; products of norms neither underflow nor overflow


class NotFiniteError(ValueError):
    """A vector holds NaN or infinity."""


def is_tensor(vector: Any) -> bool:
    """Whether `vector` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(vector, torch.Tensor)


def is_device_jax(vector: Any) -> bool:
    """Whether it is a jax array on a device that numpy cannot read without a copy."""
    return is_jax(vector) and bool(jax_measures().is_off_host(vector))


def jax_measures() -> Any:
    """The module that measures vectors of jax; who holds one has imported jax."""
    from coalmine.canaries import measures_jax

    return measures_jax


def checked_length(name: str, vector: Any, dim: int) -> None:
    """ValueError unless `vector` is one row of `dim` real numbers."""
    if not isinstance(vector, np.ndarray) and not is_tensor(vector) and not is_device_jax(vector):
        raise WrongTypeError(f"{name} must be a numpy array, a torch tensor or a jax array, got {short_repr(vector)}")
    if problem := unusable(vector):
        raise ValueError(f"{name} must be a plain array, got {problem}")
    if tuple(vector.shape) != (dim,):
        raise ValueError(f"{name} must be one row of dim = {dim} numbers, got shape {tuple(vector.shape)}")
    real = vector.is_floating_point() if is_tensor(vector) else vector.dtype.kind in "fiu"
    if not real and not (is_device_jax(vector) and str(vector.dtype) == "bfloat16"):
        raise ValueError(f"{name} must be real numbers, got {vector.dtype}")
    if not is_tensor(vector) and vector.dtype.kind == "f" and vector.dtype.itemsize > 8:
        raise ValueError(f"{name} must be float64 or smaller, got {vector.dtype}: convert it with .astype(float)")


def unusable(vector: Any) -> str | None:
    """The reason why an array cannot be read as numbers; None for a plain one."""
    if isinstance(vector, np.ma.MaskedArray):
        return "a masked array: fill its masked entries first"
    if not is_tensor(vector):
        return None
    if vector.is_nested or vector.layout is not sys.modules["torch"].strided:
        return "a sparse or nested tensor: call .to_dense() first"
    if vector.is_meta:
        return "a tensor on the meta device, which has no numbers"
    if vector.is_quantized:
        return "a quantized tensor: call .dequantize() first"
    return None


def vector_norm(name: str, vector: Any) -> float:
    """The norm, in float64; ValueError if it is not finite."""
    if is_tensor(vector):
        norm = float(tensor_norm(vector.detach()))
        if not usable(norm):  # near the limits of float32, squares are zero or infinite
            norm = float(sys.modules["torch"].linalg.vector_norm(vector.detach(), dtype=sys.modules["torch"].float64))
    elif is_device_jax(vector):
        norm = float(jax_measures().length(vector))
    else:
        norm = _array_norm(vector)
    if not np.isfinite(norm):
        raise NotFiniteError(f"{name} must be finite, got NaN or infinity in it, or numbers too large to be squared")
    if norm and not SHORTEST < norm < LONGEST:
        raise ValueError(f"{name} must have a length between {SHORTEST:g} and {LONGEST:g}, got {norm:.3g}")
    return norm


def _array_norm(vector: Any) -> float:
    """The norm in float64; the vector is divided by its largest entry if squares would underflow or overflow."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        norm = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
        if SHORTEST < norm < LONGEST:
            return norm
        largest = float(np.abs(vector).max(initial=0.0))
        if largest == 0 or not np.isfinite(largest):
            return largest
        return float(largest * np.sqrt(np.square(vector / largest, dtype=np.float64).sum()))


def tensor_norm(vector: Any) -> Any:
    """The norm in float64, without waiting for the device: squares are summed a few thousand at a time, then in float64."""
    torch = sys.modules["torch"]
    whole = len(vector) // _ROW * _ROW
    if not whole or vector.dtype.itemsize < 4 or not vector.is_contiguous():
        return torch.linalg.vector_norm(vector, dtype=torch.float64)
    rows = torch.linalg.vector_norm(vector[:whole].view(-1, _ROW), dim=1).double()
    rest = torch.linalg.vector_norm(vector[whole:], dtype=torch.float64)
    return torch.linalg.vector_norm(torch.cat([rows, rest.unsqueeze(0)]))


def difference(first: Any, second: Any) -> Any:
    """first - second on the device and in the precision of `first`."""
    if is_tensor(first) and not is_tensor(second):
        second = as_tensor(second)
    elif is_tensor(second) and not is_tensor(first):
        second = numpy_vector(second)
    if is_device_jax(first) or is_device_jax(second):
        return jax_measures().difference(first, second)
    if is_tensor(first):
        return first.detach() - second.detach().to(device=first.device, dtype=first.dtype)
    return first - second


def on_gpu(vector: Any) -> bool:
    """Whether a vector lies outside the host's memory."""
    return is_tensor(vector) and vector.device.type != "cpu"


def copied(vector: Any) -> Any:
    """A copy that does not change with the original."""
    if is_device_jax(vector):
        return jax_measures().joined([vector], vector.dtype)
    return vector.detach().clone() if is_tensor(vector) else np.array(vector)


def has_single_precision(vector: Any) -> bool:
    """Whether a vector has at least single precision."""
    return vector.dtype.itemsize >= 4


def like_model(vector: Any, model_delta: Any) -> Any:
    """A vector as a tensor on the model delta's device, without gradient."""
    return as_tensor(vector, device=model_delta.device).detach()


def as_tensor(vector: Any, **options: Any) -> Any:
    """A tensor, if possible without a copy; a read-only array is copied, since torch warns about it."""
    if isinstance(vector, np.ndarray) and not vector.flags.writeable:
        vector = vector.copy()
    return sys.modules["torch"].as_tensor(vector, **options)


def layer_norms(vector: Any, sizes: Sequence[int]) -> Floats:
    """The norms of consecutive pieces of a vector."""
    if is_tensor(vector):
        torch = sys.modules["torch"]
        parts = vector.detach().split(list(sizes))
        # Waits once for all of them; on a GPU there are also few launches.
        several = on_gpu(vector)
        lengths = torch._foreach_norm(parts, 2, torch.float64) if several else [tensor_norm(part) for part in parts]
        pairs = zip(numpy_vector(torch.stack(lengths)).tolist(), parts, strict=True)
        return np.array([norm if usable(norm) else vector_norm("a layer", part) for norm, part in pairs])
    if is_device_jax(vector):
        edges = np.cumsum([0, *sizes]).tolist()
        return numpy_vector(jax_measures().lengths(vector, places=tuple(itertools.pairwise(edges))))
    return np.array([vector_norm("a layer", part) for part in np.split(vector, np.cumsum(sizes)[:-1])])


def numpy_vector(vector: Any) -> Floats:
    """A vector as numpy float64, from any device."""
    if is_tensor(vector):
        vector = vector.detach().cpu().double().numpy()
    return np.asarray(vector, dtype=np.float64)


def single_precision(vector: Any) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """A vector as numpy float32, from any device."""
    if is_tensor(vector):
        vector = vector.detach().cpu().float().numpy()
    with np.errstate(over="ignore"):  # larger numbers are infinite
        return np.asarray(vector, dtype=np.float32)


def model_sha256(vector: Any) -> str:
    """The SHA-256 of a model's numbers in single precision."""
    with np.errstate(over="ignore"):  # beyond single precision numbers are infinite
        singles = np.ascontiguousarray(vector, dtype="<f4")
    return hashlib.sha256(singles.data).hexdigest()
