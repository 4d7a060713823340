"""Communication between ranks: rank 0 sends rounds and models, and all ranks add their sums."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from coalmine.measure.torch_group import LostRankError, TorchGroup, missing_ranks
from coalmine.simulation.population import Indices

WAIT = 1_800.0  # seconds that the first rank waits for the last before a sum; a killed rank is noticed immediately
Result = TypeVar("Result")


class RankError(RuntimeError):
    """Another rank raised an unexpected error."""


class RankInputError(ValueError):
    """Another rank cannot use its input, for example because files are missing on its machine."""


@dataclass(frozen=True)
class PlannedRound:
    """The message from rank 0 to the others before a round, sent with the model."""

    number: int
    clip_norm: float
    clients: Indices


class RankGroup:
    """Ranks 0 to size − 1 of one training. Small messages go through gloo; vectors on a GPU go through nccl.

    A rank that ends closes its connections, which the others notice immediately. Before each sum the ranks confirm through
    gloo that all are present, so that none waits on a GPU for a rank that has ended.
    """

    def __init__(self, store: Any, rank: int, size: int, *, device: str = "cpu", local: bool = False) -> None:
        self.rank, self.size = rank, size
        self.store = store
        self.describe_loss: Callable[[], str | None] = lambda: None
        try:
            control = distributed_c10d.PrefixStore("control", store)
            self._control = TorchGroup(control, rank, size, seconds=WAIT, local=local)
            self._vectors = self._control
            if torch.device(device).type == "cuda":
                vectors = distributed_c10d.PrefixStore("vectors", store)
                self._vectors = TorchGroup(vectors, rank, size, backend="nccl", seconds=WAIT)
        except RuntimeError as error:
            raise self._lost_rank_error() from error

    @property
    def backend(self) -> str:
        return "gloo" if self._vectors is self._control else "nccl"

    def send_round(self, planned: PlannedRound, model_vector: Tensor) -> None:
        """On rank 0: send the round and its model to the others."""
        head = torch.tensor([planned.number, len(planned.clients), planned.clip_norm], dtype=torch.float64)
        self._finish(self._control.broadcast, head)
        if len(planned.clients):
            self._finish(
                self._control.broadcast, torch.from_numpy(np.ascontiguousarray(planned.clients, dtype=np.int64))
            )
        self._finish(self._vectors.broadcast, model_vector)

    def receive_round(self, model_vector: Tensor) -> PlannedRound | None:
        """On the other ranks: receive the next round and write its model to `model_vector`; None if the training ends."""
        head = torch.zeros(3, dtype=torch.float64)
        self._finish(self._control.broadcast, head)
        number, count, clip_norm = head.tolist()
        if not number:
            self._shut_down()
            return None
        clients = torch.zeros(int(count), dtype=torch.int64)
        if len(clients):
            self._finish(self._control.broadcast, clients)
        self._finish(self._vectors.broadcast, model_vector)
        return PlannedRound(int(number), clip_norm, clients.numpy())

    def end(self) -> None:
        """On rank 0: tell the others that the training has ended."""
        self._finish(self._control.broadcast, torch.zeros(3, dtype=torch.float64))
        self._shut_down()

    def _shut_down(self) -> None:
        """Shut down nccl, which otherwise prints a warning."""
        if self._vectors is not self._control:
            with suppress(RuntimeError, AttributeError):
                self._vectors.shut_down()

    def add(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Add the two tensors that each rank computes over all ranks."""
        tensors = self.run_on_all(compute)
        for tensor in tensors:
            if tensor.numel():
                self._finish(self._vectors.sum, tensor)
        return tensors

    def run_on_all(self, action: Callable[[], Result]) -> Result:
        """Call `action` and return its result once every rank has succeeded; an error on one rank is raised on all."""
        failure: Exception | None = None
        try:
            result = action()
        except (RuntimeError, ValueError, IndexError, OSError, MemoryError) as error:
            failure = error
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._use_store(lambda: self.store.set(f"failure/{self.rank}", text[:1_000]))
        failed = torch.zeros(self.size, dtype=torch.int64)
        if failure is not None:
            failed[self.rank] = 2 if isinstance(failure, ValueError | OSError | MemoryError) else 1
        self._finish(self._control.sum, failed)
        if failure is not None:
            raise failure
        if failed.any():
            first = int(failed.nonzero()[0])
            text = self._use_store(lambda: self.store.get(f"failure/{first}").decode())
            raise (RankError if failed[first] == 1 else RankInputError)(f"rank {first} failed: {text}")
        return result

    def publish(self, text: str) -> None:
        """On rank 0: send a text, which the others `read`."""
        self._use_store(lambda: self.store.set("text", text))
        self._finish(self._control.sum, torch.zeros(1))

    def read(self) -> str:
        """On the other ranks: receive the text that rank 0 publishes."""
        self._finish(self._control.sum, torch.zeros(1))
        return str(self._use_store(lambda: self.store.get("text").decode()))

    def _finish(self, operation: Callable[[Tensor], None], tensor: Tensor) -> None:
        try:
            operation(tensor)
        except RuntimeError as error:
            raise self._lost_rank_error() from error

    def _use_store(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as error:
            raise self._lost_rank_error() from error

    def _lost_rank_error(self) -> LostRankError:
        description = self.describe_loss()
        if description is None:
            missing = missing_ranks(self.store, self.rank, self.size)
            if missing is None:  # the store is in the process of rank 0
                missing = [0] if self.rank else []
            subject = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
            description = (
                f"{subject} of {self.size} no longer takes part: it was killed, has failed, or cannot be reached"
            )
        return LostRankError(description)
