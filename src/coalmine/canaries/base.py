"""The interface that sphere and rotated canaries share, and its checks."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar, overload

import numpy as np

from coalmine.argument_checks import Floats, short_repr, whole_number
from coalmine.canaries.array_types import (
    Array,
    checked_jax_vector,
    checked_like,
    checked_vector,
    is_jax,
    is_tensor,
    is_traced,
    same_kind,
)
from coalmine.canaries.philox import key_from_seed

if TYPE_CHECKING:
    import torch

Vector = TypeVar("Vector")


SMALLEST, LARGEST = 1e-15, 1e15


def usable(norm: float) -> bool:
    """Whether a vector of this norm needs no rescaling: not zero, not NaN, and far from the limits of float32."""
    return SMALLEST < norm < LARGEST


class Canaries(ABC):
    """`count` unit vectors of R^dim, recreated from a seed whenever they are needed."""

    def __init__(self, count: int, dim: int, *, seed: SupportsIndex | bytes) -> None:
        self.dim = whole_number("dim", dim, minimum=2)
        self.count = whole_number("count", count, minimum=1)
        if self.count > self.dim:
            raise ValueError(f"count must be at most dim, got {self.count} canaries in dimension {self.dim}")
        self._key = key_from_seed(seed)

    def __repr__(self) -> str:  # without the key, from which every canary can be made
        return f"{type(self).__name__}(count={self.count}, dim={self.dim})"

    def __reduce__(self) -> NoReturn:  # copy and pickle call it
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: the copy would carry the secret key; "
            "make it again from the seed where it is needed"
        )

    @overload
    def canary(self, index: SupportsIndex, *, like: None = None) -> Floats: ...
    @overload
    def canary(self, index: SupportsIndex, *, like: Vector) -> Vector: ...
    def canary(self, index: SupportsIndex, *, like: Any = None) -> Any:
        """Canary `index`, from 0 on: a unit vector, of the backend, device and dtype of `like` or else numpy float64."""
        try:
            number = operator.index(index)
        except TypeError:
            raise ValueError(f"index must be a whole number, got {short_repr(index)}") from None
        if not 0 <= number < self.count:
            raise ValueError(f"index must lie in 0..{self.count - 1}, got {number}")
        return self.combine([number], like=like)

    @overload
    def combine(self, indices: Iterable[SupportsIndex], *, like: None = None) -> Floats: ...
    @overload
    def combine(self, indices: Iterable[SupportsIndex], *, like: Vector) -> Vector: ...
    def combine(self, indices: Iterable[SupportsIndex], *, like: Any = None) -> Any:
        """The sum of the canaries at `indices`, each at most once; zeros if there are none. `like` as in `canary`."""
        template = np.empty(0) if like is None else checked_like(like)
        numbers = checked_indices(indices, self.count)
        if is_jax(template):
            return self._jax_sum(numbers, template).astype(template.dtype)
        return same_kind(self._sum(numbers, template), template)

    def rows(self, indices: Sequence[int]) -> Array:
        """The canaries at these indices as the rows of a matrix in single precision."""
        return np.array([self.combine([index], like=np.empty(0, np.float32)) for index in indices])

    def cosines(self, vector: Vector) -> Vector:
        """Cosines of all `count` canaries with `vector`: float64, on its backend and device.

        A float32 vector is transformed in float32 (errors near 1e-6 of a typical cosine), a float64 one in float64. For a
        jax array they are float32 unless jax has double precision enabled. While jax traces a function no value can be
        rejected, and cosines with a vector of zeros are NaN.
        """
        if is_jax(vector):
            jax_cosines: Any = self._jax_cosines(checked_jax_vector(vector, self.dim))
            return jax_cosines
        checked: Any = checked_vector(vector, self.dim)
        cosines, norm = self._cosines(checked)
        if not usable(norm):
            cosines, _ = self._cosines(rescaled(checked))
        return cosines

    def cosines_of_each(self, vectors: Sequence[Any]) -> list[Any]:
        """`cosines` of several vectors, in parallel where that is faster."""
        return [self.cosines(vector) for vector in vectors]

    def _jax_cosines(self, vector: Any) -> Any:
        """Cosines with a checked jax array: computed by numpy for canaries without jax functions of their own."""
        from coalmine.canaries import rotation_jax

        return rotation_jax.placed(self.cosines(_jax_numbers(vector)), vector)

    def _jax_sum(self, indices: list[int], like: Any) -> Any:
        """The sum of the canaries as a jax array on the device of `like`."""
        from coalmine.canaries import rotation_jax

        wide = np.float64 if like.dtype.itemsize > 4 else np.float32
        return rotation_jax.placed(np.asarray(self._sum(indices, np.empty(0, wide)), dtype=wide), like)

    @abstractmethod
    def _sum(self, indices: list[int], like: "Array | torch.Tensor") -> "Array | torch.Tensor":
        """The sum of the canaries, on the backend and device of `like`, in at least its precision."""

    @abstractmethod
    def _cosines(self, vector: Any) -> tuple[Any, float]:
        """Cosines of all canaries with a checked vector, float64 on its device, and its norm; undefined unless `usable`."""


def _jax_numbers(vector: Any) -> Array:
    """A jax array as numpy, in its working precision: without a copy if it is on a CPU and not in half precision."""
    if is_traced(vector):
        raise ValueError("these canaries need numbers, got a value that jax traces: call them outside of jit")
    from coalmine.canaries import rotation_jax

    return np.asarray(rotation_jax.working(vector))


def checked_indices(indices: Any, count: int) -> list[int]:
    """Distinct indices of canaries, rejected unless they lie in 0..count - 1."""
    try:
        listed = indices.tolist() if hasattr(indices, "tolist") else indices  # of arrays and tensors
        numbers = [operator.index(index) for index in listed]
    except TypeError:
        raise ValueError(f"indices must be a list of whole numbers, got {short_repr(indices)}") from None
    outside = [number for number in numbers if not 0 <= number < count]
    if outside:
        raise ValueError(f"indices must lie in 0..{count - 1}, got {outside[0]}")
    if len(set(numbers)) < len(numbers):
        repeated = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(f"indices must differ, got {repeated} twice; to count a canary twice, scale it yourself")
    return numbers


def rescaled(vector: Any) -> Any:
    """`vector` over its largest entry, in float64: rejected if that is 0 or not finite."""
    if is_tensor(vector):
        largest, bad = float(vector.abs().max()), int((~vector.isfinite()).sum())
    else:
        largest, bad = float(np.abs(vector).max()), int((~np.isfinite(vector)).sum())
    if bad:
        raise ValueError(f"vector must be finite, got NaN or infinity in {bad} of {len(vector)} entries")
    if largest == 0.0:
        raise ValueError("vector must not be zero, which has no direction; was the model ever updated?")
    return (vector.double() if is_tensor(vector) else vector.astype(np.float64)) / largest
