"""What measuring needs of an array library: one module for each, with the same functions.

`arrays_of` returns the module for a vector: `on_numpy`, `on_torch`, or `on_jax` for arrays on devices that numpy cannot
read. Only the module of a library that is in use is imported.
"""

import sys
from typing import Any

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.canaries.array_types import is_tensor
from coalmine.measure.arrays import on_numpy
from coalmine.measure.arrays.host import (
    host_array,
    is_device_jax,
    is_on_device,
    number_kind,
    numpy_vector,
    use_one_core,
)

__all__ = [
    "arrays_of",
    "host_array",
    "host_numbers",
    "is_device_jax",
    "is_on_device",
    "jax_arrays",
    "number_kind",
    "numpy_vector",
    "use_one_core",
]


def arrays_of(*vectors: Any) -> Any:
    """The functions for the first vector; those of jax if a numpy vector meets one that is on a device."""
    if is_tensor(vectors[0]):
        from coalmine.measure.arrays import on_torch

        return on_torch
    return jax_arrays() if any(is_device_jax(vector) for vector in vectors) else on_numpy


def jax_arrays() -> Any:
    """The functions for jax; who holds one of its arrays has imported it."""
    from coalmine.measure.arrays import on_jax

    return on_jax


def host_numbers(values: list[Any]) -> Floats:
    """Numbers that were computed anywhere, on the host; those on one device are transferred together."""
    if values and all(is_tensor(value) for value in values) and len({value.device for value in values}) == 1:
        return numpy_vector(sys.modules["torch"].stack([value.double() for value in values]))
    if any(is_device_jax(value) for value in values):
        return np.asarray(jax_arrays().numbers(values))
    return np.array([float(value) for value in values], dtype=np.float64)
