"""A rotation applied on a tensor's device: by Triton kernels on a CUDA device in float32, otherwise by plain torch."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from coalmine.canaries.rotation import Rotation, Stage

if TYPE_CHECKING:
    from coalmine.canaries.layer_sums_triton import LayerSums
    from coalmine.canaries.rotation_triton import TritonBlocks, TritonRotation

_GRAPH = 2**25  # from this dim on a graph, which keeps three vectors on the device, no longer saves much time
_BESIDE = 0.1  # largest share of the device's memory for copies of a round that is measured during the training
_BLOCK_GRAPHS = 16  # most graphs of one BlockRotations: one per block size and number of canaries


class DeviceRotation:
    """A rotation and its tables on one device, made on first use."""

    def __init__(self, rotation: Rotation, device: torch.device) -> None:
        self._rotation = rotation
        self._device = device
        self._kernels: TritonRotation | None = _kernels(rotation, device)
        self._graphs: dict[int, _Graph] = {}
        self._sum_graphs: dict[int, _SumGraph] = {}
        self._measures: dict[MeasurePlan, _MeasureGraph | _MeasureStream] = {}
        self._lock = Lock()

    def cosines(self, vector: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
        """Cosines of the first `count` columns with `vector`, and its norm, the only value that the host waits for."""
        if vector.dtype == torch.float32 and self._kernels is not None and self._rotation.dim < _GRAPH:
            with self._lock, _on_device(self._device):
                if count not in self._graphs:
                    self._graphs[count] = _Graph(lambda given: self._cosines(given, count), vector)
                return self._graphs[count](vector)
        with _on_device(self._device):
            cosines, norm = self._cosines(vector, count)
            return cosines, float(norm)

    def combine(self, indices: list[int], dtype: torch.dtype) -> torch.Tensor:
        """The sum of the columns at `indices`."""
        kernels = self._kernels if dtype == torch.float32 else None
        length = self._rotation.dim if kernels is None else kernels.length_for(max(indices, default=0) + 1)
        chosen = torch.zeros(length, dtype=dtype, device=self._device)
        chosen.index_fill_(0, _sent(indices, self._device), 1.0)
        if kernels is not None:
            with self._lock, _on_device(self._device):
                if self._rotation.dim >= _GRAPH:
                    return kernels.rotate(chosen)
                if length not in self._sum_graphs:
                    self._sum_graphs[length] = _SumGraph(kernels, chosen)
                return self._sum_graphs[length](chosen)
        return rotate(self._rotation, chosen)

    def measure_later(
        self,
        vector: torch.Tensor,
        others: torch.Tensor | None,
        total: torch.Tensor | None,
        plan: "MeasurePlan",
        *,
        copy: bool,
    ) -> "Measurement | None":
        """Start to measure a round in parallel with the device's next work; None if that is not possible.

        One measurement at a time: its numbers must be read before the next one starts. Without `copy`, `vector` and
        `others` must not change until then; `total` never may.
        """
        if vector.dtype != torch.float32 or self._kernels is None or not self._room_beside():
            return None
        with self._lock, _on_device(self._device):
            if plan not in self._measures:
                recorded = self._rotation.dim < _GRAPH
                self._measures[plan] = (_MeasureGraph if recorded else _MeasureStream)(self, vector, plan)
            return self._measures[plan](vector, others, total, copy=copy)

    def _room_beside(self) -> bool:
        """Whether copies of a round's three vectors are a small part of the device's memory."""
        memory = torch.cuda.get_device_properties(self._device).total_memory
        return 3 * 4 * self._rotation.dim <= _BESIDE * memory

    def layer_sums(self, layers: Sequence[int]) -> "LayerSums":
        """The kernels for squares and products of a round's vectors, by layer or of the whole vectors."""
        from coalmine.canaries.layer_sums_triton import LayerSums

        return LayerSums(layers or (self._rotation.dim,), self._device)

    def _cosines(self, vector: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        norm = torch.linalg.vector_norm(vector).double()
        return self._products(vector, count) / norm, norm

    def _products(self, vector: torch.Tensor, count: int) -> torch.Tensor:
        """Products of a vector with the first `count` columns, in float64."""
        if vector.dtype == torch.float32 and self._kernels is not None:
            return self._kernels.products(vector, count).double()
        return rotate_back(self._rotation, vector)[:count].double()


class _Graph:
    """A function of a vector, recorded once as a CUDA graph: a dozen launches cost as much as one."""

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
            self._input.copy_(self._given)  # a rotation overwrites its input
            self._sum = kernels.rotate(self._input)

    def __call__(self, chosen: torch.Tensor) -> torch.Tensor:
        self._given.copy_(chosen)
        self._graph.replay()
        return self._sum.clone()


@dataclass(frozen=True)
class MeasurePlan:
    """The measurements of a round: cosines of `count` canaries with it and, if `others`, without the others.

    With `layers`, also the squared norm of each layer without the others. With a `total`, also the products that give the
    norm of each layer less any multiple of the total.
    """

    count: int
    others: bool
    layers: tuple[int, ...] = ()
    total: bool = False


@dataclass(frozen=True)
class Measurement:
    """Numbers that a device is computing. The tensors stay valid until the next measurement starts."""

    plan: MeasurePlan
    vector: torch.Tensor
    others: torch.Tensor
    total: torch.Tensor
    _numbers: torch.Tensor
    _done: Any
    _stream: Any

    def aside(self) -> AbstractContextManager[Any]:
        """A stream to measure more of the tensors on, without waiting for work that was queued since."""
        return torch.cuda.stream(self._stream)

    def numbers(self) -> dict[str, npt.NDArray[np.float64]]:
        """Wait for the numbers: `norm`, `cosines`, their `residual_` counterparts, and the products by layer."""
        self._done.synchronize()
        flat, plan = self._numbers.numpy(), self.plan
        names = [("norm", 1), ("cosines", plan.count)]
        if plan.others:
            names += [("residual_norm", 1), ("residual_cosines", plan.count)]
            names += [("rests", len(plan.layers)), ("others", len(plan.layers))]
        if plan.others and plan.total:
            names += [("overlaps", len(plan.layers)), ("totals", len(plan.layers))]
        pieces = np.split(flat.copy(), np.cumsum([size for _, size in names])[:-1])
        return {name: piece for (name, _), piece in zip(names, pieces, strict=True)}


class _MeasureGraph:
    """A round's measurement as a CUDA graph, on its own stream."""

    def __init__(self, rotation: DeviceRotation, example: torch.Tensor, plan: MeasurePlan) -> None:
        self._plan = plan
        self._vector, self._others, self._total = (torch.ones_like(example) for _ in range(3))
        self._others.zero_()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._measured = _RoundNumbers(rotation, plan)  # kept: the graph reads its tables
        self._measured(self._vector, self._others, self._total)  # compiles the kernels
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = self._measured(self._vector, self._others, self._total)
        self._numbers = torch.empty(self._result.shape, dtype=torch.float64, pin_memory=True)
        self._done.record()

    def __call__(
        self, vector: torch.Tensor, others: torch.Tensor | None, total: torch.Tensor | None, *, copy: bool
    ) -> Measurement:
        del copy  # a graph reads its own tensors, so all three are copied in any case
        current = torch.cuda.current_stream()
        current.wait_event(self._done)  # until the last measurement has read the tensors that are overwritten now
        for held, given in ((self._vector, vector), (self._others, others), (self._total, total)):
            if given is not None:
                held.copy_(given)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._graph.replay()
            self._numbers.copy_(self._result, non_blocking=True)
            self._done.record(self._stream)
        return Measurement(self._plan, self._vector, self._others, self._total, self._numbers, self._done, self._stream)


class _MeasureStream:
    """A round's measurement on a stream of its own, launch by launch: for vectors so long that launches do not count."""

    def __init__(self, rotation: DeviceRotation, example: torch.Tensor, plan: MeasurePlan) -> None:
        self._plan, self._measured = plan, _RoundNumbers(rotation, plan)
        self._nothing = example.new_zeros(1)
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._numbers: torch.Tensor | None = None

    def __call__(
        self, vector: torch.Tensor, others: torch.Tensor | None, total: torch.Tensor | None, *, copy: bool
    ) -> Measurement:
        held = [
            self._nothing if given is None else given.clone() if copied else given.contiguous()
            for given, copied in ((vector, copy), (others, copy), (total, False))
        ]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._measured(*held)
            if self._numbers is None:
                self._numbers = torch.empty(result.shape, dtype=torch.float64, pin_memory=True)
            self._numbers.copy_(result, non_blocking=True)
            self._done.record(self._stream)
        for tensor in held:
            tensor.record_stream(self._stream)
        return Measurement(self._plan, held[0], held[1], held[2], self._numbers, self._done, self._stream)


class _RoundNumbers:
    """The numbers that a plan wants of a round, in the order that `Measurement.numbers` reads them in."""

    def __init__(self, rotation: DeviceRotation, plan: MeasurePlan) -> None:
        self._rotation, self._plan = rotation, plan
        self._sums = rotation.layer_sums(plan.layers) if plan.others else None

    def __call__(self, vector: torch.Tensor, others: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        plan, rotation = self._plan, self._rotation
        if self._sums is None:
            parts = list(reversed(rotation._cosines(vector, plan.count)))
        else:
            rest, sums = self._sums(vector, others, total if plan.total else None)
            norm, rest_norm = sums[:2].sum(1).sqrt()
            parts = [norm, rotation._products(vector, plan.count) / norm]
            parts += [rest_norm, rotation._products(rest, plan.count) / rest_norm]
            if plan.layers:
                parts.append(sums[1:])
        return torch.cat([part.reshape(-1) for part in parts])


def noise_sums(
    vector: torch.Tensor, groups: Sequence[tuple[int, int]], pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]]
) -> torch.Tensor | None:
    """The sums of `layer_sums_triton.NoiseSums`; None for a vector that its kernels cannot read."""
    if vector.dtype != torch.float32 or not vector.is_contiguous() or _triton(vector.device) is None:
        return None
    from coalmine.canaries import layer_sums_triton

    with _on_device(vector.device):
        return layer_sums_triton.noise_sums(tuple(groups), tuple(pairs), len(vector), vector.device)(vector)


def _sent(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Whole numbers on a device. A copy from pinned memory is waited for by the device alone."""
    given = torch.tensor(numbers, dtype=torch.int64)
    return given.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else given.to(device)


class BlockRotations:
    """Rotations of the blocks of a model on one device, applied one after another.

    All blocks share scratch of two blocks in float32 and the signs of one block, which are drawn anew for each. A block
    keeps 16 bits for each entry of its shuffles: 400 KB for 2^24 - 1 coordinates. With Triton, the launches for a block
    are one CUDA graph, which serves all blocks of the same size. Nothing waits for the device.

    Float64 vectors, and devices without Triton, are served by plain torch, which needs more memory and time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._triton = _triton(device)
        self._scratch: TritonBlocks | None = None
        self._prepared: dict[Rotation, torch.Tensor] = {}
        self._graphs: dict[Any, tuple[Any, torch.Tensor]] = {}
        self._indices: tuple[list[int], torch.Tensor] | None = None
        self._done: Any = None
        self._lock = Lock()

    def room(self, rotation: Rotation) -> torch.Tensor:
        """A float32 buffer for a block's vector, which saves `products` a copy.

        It is scratch: every call of `products` or `combine` overwrites it.
        """
        if not self._fast(rotation):
            return torch.empty(rotation.dim, dtype=torch.float32, device=self._device)
        with self._lock, _on_device(self._device):
            self._wait()
            return self._scratch_for(rotation).room[: rotation.dim]

    def products(self, rotation: Rotation, vector: torch.Tensor, count: int) -> torch.Tensor:
        """Products of a vector with the first `count` columns, in float64. Overwrites `vector` only if it is `room`."""
        if vector.dtype == torch.float64 or not self._fast(rotation):
            products = rotate_back(rotation, vector)[:count].double()
            _forget_signs(rotation)
            return products
        with self._lock, _on_device(self._device):
            self._wait()
            scratch = self._load(rotation)
            if vector.data_ptr() != scratch.room.data_ptr():
                scratch.room[: rotation.dim].copy_(vector)
            key = ("products", rotation.dim, len(rotation.stages), count)
            return self._replay(key, lambda: scratch.products(rotation, count), torch.float64)

    def combine(self, rotation: Rotation, indices: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The sum of the columns at `indices`, computed in float32 unless `dtype` is float64."""
        if dtype == torch.float64 or not self._fast(rotation):
            working = dtype if dtype.itemsize > 2 else torch.float32
            chosen = torch.zeros(rotation.dim, dtype=working, device=self._device)
            chosen.index_fill_(0, _sent(indices, self._device), 1.0)
            total = rotate(rotation, chosen).to(dtype)
            _forget_signs(rotation)
            return total
        with self._lock, _on_device(self._device):
            self._wait()
            scratch = self._load(rotation)
            foldable = self._triton.foldable(rotation)
            limit = foldable if max(indices, default=0) < foldable else rotation.dim
            scratch.choose(rotation, self._index_tensor(indices), limit)
            key = ("combine", rotation.dim, len(rotation.stages), limit)
            return self._replay(key, lambda: scratch.combine(rotation, limit), dtype)

    def _replay(self, key: Any, function: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """A copy of the function's result, which lies in the scratch. From the second call on a CUDA graph computes it."""
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            copy = result.to(dtype, copy=True)
        else:
            copy = function().to(dtype, copy=True)  # compiles the kernels, which a recording cannot
            if len(self._graphs) == _BLOCK_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = function()
            self._graphs[key] = graph, result
        self._done.record()
        return copy

    def _load(self, rotation: Rotation) -> "TritonBlocks":
        scratch = self._scratch_for(rotation)
        if rotation not in self._prepared:
            self._prepared[rotation] = scratch.prepare(rotation)
        scratch.load(self._prepared[rotation])
        return scratch

    def _scratch_for(self, rotation: Rotation) -> "TritonBlocks":
        dim, stages = rotation.dim, len(rotation.stages)
        if self._scratch is not None:
            if dim <= self._scratch.dim and stages <= self._scratch.stages:
                return self._scratch
            dim, stages = max(dim, self._scratch.dim), max(stages, self._scratch.stages)
        self._graphs.clear()
        self._scratch = None  # first, so that old and new scratch never exist at once
        self._scratch = self._triton.TritonBlocks(dim, stages, self._device)
        return self._scratch

    def _wait(self) -> None:
        """Make the current stream, not the host, wait for the last call: all streams share the scratch."""
        if self._done is None:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            torch.cuda.current_stream().wait_event(self._done)

    def _index_tensor(self, indices: Sequence[int]) -> torch.Tensor:
        """Indices as a tensor, cached because every block combines the same canaries."""
        if self._indices is None or self._indices[0] != list(indices):
            tensor = torch.tensor(indices, dtype=torch.int64).to(self._device, non_blocking=True)
            self._indices = list(indices), tensor
        return self._indices[1]

    def _fast(self, rotation: Rotation) -> bool:
        return self._triton is not None and rotation.levels >= self._triton.SMALLEST_LEVELS


def _forget_signs(rotation: Rotation) -> None:
    for stage in rotation.stages:
        stage.forget_signs()


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, whatever device their arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _triton(device: torch.device) -> Any:
    """The module of Triton kernels; None if it cannot be used."""
    if device.type != "cuda":
        return None
    try:
        from coalmine.canaries import rotation_triton
    except ImportError:  # no Triton on this platform
        return None
    return rotation_triton


def _kernels(rotation: Rotation, device: torch.device) -> "TritonRotation | None":
    kernels = _triton(device)
    if kernels is None or rotation.levels < kernels.SMALLEST_LEVELS:
        return None
    rotated: TritonRotation = kernels.TritonRotation(rotation, device)
    return rotated


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
    """The original index of each coordinate of a shuffled vector."""
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
    """The Walsh-Hadamard transform of 2^m values, by sums and differences, whose precision no torch setting lowers."""
    size = len(values)
    stride = 1
    while stride < size:
        first, second = values.reshape(-1, 2, stride).unbind(1)
        values = torch.stack((first + second, first - second), dim=1).flatten()
        stride *= 2
    return values / math.sqrt(size)
