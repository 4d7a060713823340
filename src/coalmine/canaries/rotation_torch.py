"""A rotation applied where a tensor is: by Triton kernels on a CUDA device in float32, else by plain torch."""

import math
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from coalmine.canaries.rotation import Rotation, Stage

if TYPE_CHECKING:
    from coalmine.canaries.rotation_triton import TritonRotation

_GRAPH = 2**25  # a graph keeps three vectors on the device; from this dim on launches are no longer what takes the time


class DeviceRotation:
    """A rotation with what it needs on one device, made when it is first needed there."""

    def __init__(self, rotation: Rotation, device: torch.device) -> None:
        self._rotation = rotation
        self._device = device
        self._kernels: TritonRotation | None = _kernels(rotation, device)
        self._graphs: dict[int, _Graph] = {}
        self._lock = Lock()

    def cosines(self, vector: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
        """Cosines of the first `count` columns with `vector`, and its norm: the one thing that is waited for."""
        if vector.dtype == torch.float32 and self._kernels is not None and self._rotation.dim < _GRAPH:
            with self._lock, self._here():
                if count not in self._graphs:
                    self._graphs[count] = _Graph(lambda given: self._cosines(given, count), vector)
                return self._graphs[count](vector)
        with self._here():
            cosines, norm = self._cosines(vector, count)
            return cosines, float(norm)

    def combine(self, indices: list[int], dtype: torch.dtype) -> torch.Tensor:
        """The sum of the columns at `indices`."""
        chosen = torch.zeros(self._rotation.dim, dtype=dtype, device=self._device)
        chosen[torch.tensor(indices, dtype=torch.int64, device=self._device)] = 1.0
        if dtype == torch.float32 and self._kernels is not None:
            with self._here():
                return self._kernels.rotate(chosen)
        return rotate(self._rotation, chosen)

    def _here(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the current device, whatever device their arguments are on."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _cosines(self, vector: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        norm = torch.linalg.vector_norm(vector).double()
        if vector.dtype == torch.float32 and self._kernels is not None:
            image = self._kernels.rotate_back(vector)
        else:
            image = rotate_back(self._rotation, vector)
        return image[:count].double() / norm, norm


class _Graph:
    """A function of a vector, recorded once as a CUDA graph: a dozen launches for the price of one."""

    def __init__(self, function: Any, example: torch.Tensor) -> None:
        function(example)  # compiles the kernels, which a recording cannot
        self._input = example.clone()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._cosines, self._norm = function(self._input)

    def __call__(self, vector: torch.Tensor) -> tuple[torch.Tensor, float]:
        self._input.copy_(vector)
        self._graph.replay()
        cosines = self._cosines.clone()  # before the wait below: the next call overwrites the original
        return cosines, float(self._norm)


def _kernels(rotation: Rotation, device: torch.device) -> "TritonRotation | None":
    if device.type != "cuda":
        return None
    try:
        from coalmine.canaries.rotation_triton import SMALLEST_LEVELS, TritonRotation
    except ImportError:  # no Triton on this platform
        return None
    return TritonRotation(rotation, device) if rotation.levels >= SMALLEST_LEVELS else None


def rotate_back(rotation: Rotation, vector: torch.Tensor) -> torch.Tensor:
    """The transposed rotation of `vector`, by plain torch: its products with all columns."""
    size = rotation.size
    for stage in rotation.stages:
        vector = vector[_origins(rotation, stage, vector.device)] * _signs(stage.opening, rotation.dim, vector)
        vector = torch.cat((_hadamard(vector[:size]), vector[size:]))
        last = _hadamard(vector[-size:] * _signs(stage.closing, size, vector))
        vector = torch.cat((vector[:-size], last))
    return vector


def rotate(rotation: Rotation, vector: torch.Tensor) -> torch.Tensor:
    """The rotation of `vector`, by plain torch: the sum of the columns, weighted by its entries."""
    size = rotation.size
    for stage in reversed(rotation.stages):
        last = _hadamard(vector[-size:]) * _signs(stage.closing, size, vector)
        vector = torch.cat((vector[:-size], last))
        shuffled = torch.cat((_hadamard(vector[:size]), vector[size:])) * _signs(stage.opening, rotation.dim, vector)
        vector = torch.empty_like(shuffled)
        vector[_origins(rotation, stage, vector.device)] = shuffled
    return vector


def _origins(rotation: Rotation, stage: Stage, device: torch.device) -> torch.Tensor:
    """Which coordinate each coordinate of a shuffled vector was."""
    coordinates = torch.arange(rotation.dim, device=device)
    blocks = coordinates[: len(stage.order) * rotation.block].reshape(-1, rotation.block)
    order = torch.from_numpy(stage.order.astype("int64")).to(device)
    left_over = coordinates[blocks.numel() :]
    return torch.cat((blocks[order[: stage.insert]].flatten(), left_over, blocks[order[stage.insert :]].flatten()))


def _signs(bits: Any, count: int, like: torch.Tensor) -> torch.Tensor:
    packed = torch.from_numpy(bits).to(like.device)
    unpacked = (packed[:, None] >> torch.arange(8, device=like.device, dtype=torch.uint8)) & 1
    signs: torch.Tensor = 1 - 2 * unpacked.flatten()[:count].to(like.dtype)
    return signs


def _hadamard(values: torch.Tensor) -> torch.Tensor:
    """The Walsh-Hadamard transform of 2^m values, by sums and differences: no setting of torch makes them coarser."""
    size = len(values)
    stride = 1
    while stride < size:
        first, second = values.reshape(-1, 2, stride).unbind(1)
        values = torch.stack((first + second, first - second), dim=1).flatten()
        stride *= 2
    return values / math.sqrt(size)
