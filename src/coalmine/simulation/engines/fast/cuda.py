"""CUDA graphs, and the precision of matrix products on a GPU."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coalmine.simulation.batches import Batches
from coalmine.simulation.engines.plain.engine import chunks
from coalmine.simulation.population import Indices


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Multiply matrices in fp32, or with factors rounded to tf32 (10 bits) where the GPU supports it.

    Weights and sums stay in fp32.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def train_in_chunks(
    train: Callable[[Tensor, Batches, Indices], Tensor],
    model_vector: Tensor,
    batches: Batches,
    *,
    size: int,
    precision: str,
) -> Iterator[Tensor]:
    """The clients' updates in chunks of `size` clients, without autograd and at this precision of matrix products."""
    for clients in chunks(len(batches), size):
        with torch.no_grad(), matmul_precision(precision):
            trained = train(model_vector, batches, clients)
        yield trained


class Graphs:
    """Replays steps as CUDA graphs, so that many small calls become one, and owns their tensors.

    On other devices it simply calls the step.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # graphs that run one after another share the memory of their steps

    def tensors(
        self, kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> dict[str, Tensor]:
        """Tensors of these shapes; their memory stays the same until one of them has to grow."""
        if not all(self._fits(name, *kind) for name, kind in kinds.items()):
            self.clear()
            self._tensors = {
                name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in kinds.items()
            }
        return {name: self._tensors[name][: shape[0]] for name, (shape, _) in kinds.items()}

    def _fits(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        tensor = self._tensors.get(name)
        return (
            tensor is not None and tensor.dtype == dtype and tensor.shape[1:] == shape[1:] and len(tensor) >= shape[0]
        )

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Replay the graph of a step, or record it. The step must only read and write tensors that stay in place."""
        if next(iter(self._tensors.values())).device.type != "cuda":
            step()
            return
        if key not in self._graphs:
            self._record(key, step)
        else:
            self._graphs[key].replay()

    def clear(self) -> None:
        """Release graphs and tensors."""
        self._graphs.clear()
        self._pool = None
        self._tensors.clear()

    def _record(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run this step without a graph, which also warms up the libraries, then record it for the next time."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()  # recorded, not run
        self._pool = graph.pool()
        self._graphs[key] = graph
