"""A rotation applied where a tensor is: by Triton kernels on a CUDA device in float32, else by plain torch."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
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
        self._sum_graph: _SumGraph | None = None
        self._measures: dict[MeasurePlan, _MeasureGraph] = {}
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
            with self._lock, self._here():
                if self._rotation.dim >= _GRAPH:
                    return self._kernels.rotate(chosen)
                if self._sum_graph is None:
                    self._sum_graph = _SumGraph(self._kernels, chosen)
                return self._sum_graph(chosen)
        return rotate(self._rotation, chosen)

    def measure_later(
        self, vector: torch.Tensor, others: torch.Tensor | None, total: torch.Tensor | None, plan: "MeasurePlan"
    ) -> "Measurement | None":
        """Begin to measure a round beside what the device does next; None where that cannot be.

        One measurement at a time: its numbers must be taken before the next one begins.
        """
        if vector.dtype != torch.float32 or self._kernels is None or self._rotation.dim >= _GRAPH:
            return None
        with self._lock, self._here():
            if plan not in self._measures:
                self._measures[plan] = _MeasureGraph(self, vector, plan)
            return self._measures[plan](vector, others, total)

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


class _SumGraph:
    """A rotation recorded as a CUDA graph."""

    def __init__(self, kernels: "TritonRotation", example: torch.Tensor) -> None:
        kernels.rotate(example.clone())  # compiles the kernels
        self._given, self._input = torch.empty_like(example), torch.empty_like(example)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._input.copy_(self._given)  # a rotation overwrites what it is given
            self._sum = kernels.rotate(self._input)

    def __call__(self, chosen: torch.Tensor) -> torch.Tensor:
        self._given.copy_(chosen)
        self._graph.replay()
        return self._sum.clone()


@dataclass(frozen=True)
class MeasurePlan:
    """What is measured of a round: cosines of `count` canaries with it and, if `others`, with what is left without them.

    With a `total`, also the lengths of each of the `layers` of that rest, less any multiple of the total.
    """

    count: int
    others: bool
    layers: tuple[int, ...] = ()
    total: bool = False


@dataclass(frozen=True)
class Measurement:
    """Numbers that a device is working out. The tensors are held until the next measurement begins."""

    plan: MeasurePlan
    vector: torch.Tensor
    others: torch.Tensor
    total: torch.Tensor
    _numbers: torch.Tensor
    _done: Any
    _stream: Any

    def aside(self) -> AbstractContextManager[Any]:
        """Where more can be measured of the tensors without waiting for what the device was told since."""
        return torch.cuda.stream(self._stream)

    def numbers(self) -> dict[str, npt.NDArray[np.float64]]:
        """Wait for them: `norm`, `cosines`, their `residual_` twins, and by layer the products of rest and total."""
        self._done.synchronize()
        flat, plan = self._numbers.numpy(), self.plan
        names = [("norm", 1), ("cosines", plan.count)]
        if plan.others:
            names += [("residual_norm", 1), ("residual_cosines", plan.count), ("rests", len(plan.layers))]
        if plan.others and plan.total:
            names += [("overlaps", len(plan.layers)), ("totals", len(plan.layers))]
        pieces = np.split(flat.copy(), np.cumsum([size for _, size in names])[:-1])
        return {name: piece for (name, _), piece in zip(names, pieces, strict=True)}


class _MeasureGraph:
    """A round's measurement as a CUDA graph, on a stream of its own."""

    def __init__(self, rotation: DeviceRotation, example: torch.Tensor, plan: MeasurePlan) -> None:
        self._plan = plan
        self._vector, self._others, self._total = (torch.ones_like(example) for _ in range(3))
        self._others.zero_()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._measured(rotation)  # compiles the kernels
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = self._measured(rotation)
        self._numbers = torch.empty(self._result.shape, dtype=torch.float64, pin_memory=True)
        self._done.record()

    def __call__(self, vector: torch.Tensor, others: torch.Tensor | None, total: torch.Tensor | None) -> Measurement:
        current = torch.cuda.current_stream()
        current.wait_event(self._done)  # the last measurement has read what is overwritten now
        for held, given in ((self._vector, vector), (self._others, others), (self._total, total)):
            if given is not None:
                held.copy_(given)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._graph.replay()
            self._numbers.copy_(self._result, non_blocking=True)
            self._done.record(self._stream)
        return Measurement(self._plan, self._vector, self._others, self._total, self._numbers, self._done, self._stream)

    def _measured(self, rotation: DeviceRotation) -> torch.Tensor:
        plan = self._plan
        parts = list(reversed(rotation._cosines(self._vector, plan.count)))
        if plan.others:
            rest = self._vector - self._others
            parts += reversed(rotation._cosines(rest, plan.count))
            pieces = torch.split(rest, list(plan.layers)) if plan.layers else ()
            parts += [piece.square().sum(dtype=torch.float64) for piece in pieces]
            if plan.total and plan.layers:
                totals = torch.split(self._total, list(plan.layers))
                parts += [(one * other).sum(dtype=torch.float64) for one, other in zip(pieces, totals, strict=True)]
                parts += [piece.square().sum(dtype=torch.float64) for piece in totals]
        return torch.cat([part.reshape(-1) for part in parts])


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
