"""Vectors of a model's size, of any array library: what a round must be given, and their norms."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from coalmine.argument_checks import Floats, WrongTypeError, short_repr
from coalmine.canaries.array_types import is_jax, is_tensor
from coalmine.canaries.base import LARGEST, SMALLEST
from coalmine.measure.arrays import arrays_of, is_device_jax, jax_arrays, number_kind
from coalmine.measure.arrays.on_numpy import LONGEST, SHORTEST


class NotFiniteError(ValueError):
    """A vector holds NaN or infinity."""


def host_vector(name: str, value: Any) -> Any:
    """A jax array on a CPU as numpy, without a copy; anything else unchanged."""
    if not is_jax(value):
        return value
    if problem := jax_arrays().unreadable(value):
        raise ValueError(f"{name} must be a plain array, got {problem}")
    return value if is_device_jax(value) else np.asarray(value)


def checked_length(name: str, vector: Any, dim: int) -> None:
    """ValueError unless `vector` is one row of `dim` real numbers."""
    tensor, plain = is_tensor(vector), isinstance(vector, np.ndarray)
    if not tensor and not plain and not is_device_jax(vector):
        raise WrongTypeError(f"{name} must be a numpy array, a torch tensor or a jax array, got {short_repr(vector)}")
    readable = arrays_of(vector)
    if problem := readable.unreadable_row(vector) if tensor else readable.unreadable(vector):
        raise ValueError(f"{name} must be a plain array, got {problem}")
    if tuple(vector.shape) != (dim,):
        raise ValueError(f"{name} must be one row of dim = {dim} numbers, got shape {tuple(vector.shape)}")
    if (vector.dtype.kind if plain else number_kind(vector)) not in ("f" if tensor else "fiu"):
        raise ValueError(f"{name} must be real numbers, got {vector.dtype}")
    if not tensor and vector.dtype.kind == "f" and vector.dtype.itemsize > 8:
        raise ValueError(f"{name} must be float64 or smaller, got {vector.dtype}: convert it with .astype(float)")


def vector_norm(name: str, vector: Any) -> float:
    """The norm, in float64; ValueError if it is not finite."""
    norm = float(arrays_of(vector).norm(vector))
    if norm:
        check_norm(name, norm)
    return norm


def check_norm(name: str, norm: float) -> None:
    """ValueError unless a norm is finite, and far from the limits of double precision."""
    if not np.isfinite(norm):
        raise NotFiniteError(f"{name} must be finite, got NaN or infinity in it, or numbers too large to be squared")
    if not SHORTEST < norm < LONGEST:
        raise ValueError(f"{name} must have a length between {SHORTEST:g} and {LONGEST:g}, got {norm:.3g}")


def layer_norms(vector: Any, sizes: Sequence[int]) -> Floats:
    """The norms of consecutive pieces of a vector."""
    norms = np.asarray(arrays_of(vector).norms(vector, sizes))
    starts = np.cumsum([0, *sizes])
    for layer in np.flatnonzero(~((norms > SMALLEST) & (norms < LARGEST))):
        norms[layer] = vector_norm("a layer", vector[int(starts[layer]) : int(starts[layer + 1])])
    return norms


def difference(first: Any, second: Any) -> Any:
    """first - second on the device and in the precision of `first`."""
    return arrays_of(first, second).difference(first, second)


def copied(vector: Any) -> Any:
    """A copy that does not change with the original."""
    return arrays_of(vector).copied(vector)


def single_precision(vector: Any) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """A vector as numpy float32, from any device."""
    if is_tensor(vector):
        vector = vector.detach().cpu().float().numpy()
    with np.errstate(over="ignore"):  # larger numbers are infinite
        return np.asarray(vector, dtype=np.float32)


def model_sha256(vector: Any, shards: Sequence[int] = ()) -> str:
    """The SHA-256 of a model's numbers in single precision.

    `shards` are the numbers of coordinates in each process, if the model was sharded over several.
    """
    with np.errstate(over="ignore"):  # beyond single precision numbers are infinite
        singles = np.ascontiguousarray(vector, dtype="<f4")
    pieces = np.split(singles, np.cumsum(shards)[:-1]) if shards else [singles]
    return shared_sha256([hashlib.sha256(piece.data).hexdigest() for piece in pieces], sharded=bool(shards))


def shared_sha256(digests: Sequence[str], *, sharded: bool) -> str:
    """The digest of a model from those of its processes: that of rank 0, or of all shards' digests in a row."""
    return hashlib.sha256("".join(digests).encode()).hexdigest() if sharded else digests[0]
