"""Any vector as numpy sees it: the kind of its numbers, whether they are on the host, and the numbers themselves."""

import sys
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats
from coalmine.canaries.array_types import is_jax, is_tensor
from coalmine.canaries.rotation_numpy import stay_in_one_thread


def use_one_core() -> None:
    """Let this thread measure on one core only: it works beside a training that keeps every core busy."""
    stay_in_one_thread()
    torch = sys.modules.get("torch")
    if torch is not None:
        count = torch.get_num_threads()
        torch.set_num_threads(1)  # for this thread, and for all that start from now on
        restore = Thread(target=torch.set_num_threads, args=(count,))
        restore.start()
        restore.join()


def is_device_jax(vector: Any) -> bool:
    """Whether it is a jax array on a device that numpy cannot read without a copy."""
    if not is_jax(vector):
        return False
    from coalmine.canaries import rotation_jax

    return not rotation_jax.on_cpu(vector)


def is_on_device(vector: Any) -> bool:
    """Whether a vector lies on a GPU, where many small measurements cost more than a few large ones."""
    return bool(vector.device.type != "cpu") if is_tensor(vector) else is_device_jax(vector)


def numpy_vector(vector: Any) -> Floats:
    """A vector as numpy float64, from any device."""
    if is_tensor(vector):
        vector = vector.detach().cpu().double().numpy()
    return np.asarray(vector, dtype=np.float64)


def host_array(vector: Any, *, double: bool = True) -> npt.NDArray[np.floating[Any]]:
    """A vector on the host as numpy float32 or float64; without `double`, a tensor always in float32."""
    if is_tensor(vector):
        own = vector.detach()
        vector = (own if double and own.dtype.itemsize == 8 else own.float()).numpy()
    array = np.asarray(vector)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def number_kind(array: Any) -> str:
    """The kind of an array's numbers: f for floating-point, i or u for whole ones, b for flags, c for complex ones."""
    if is_tensor(array):
        dtype = array.dtype
        return "f" if dtype.is_floating_point else "c" if dtype.is_complex else "b" if str(dtype)[6:] == "bool" else "i"
    kind: str = getattr(array.dtype, "kind", "")
    return "f" if kind == "V" and str(array.dtype) == "bfloat16" else kind  # numpy has no bfloat16 of its own
