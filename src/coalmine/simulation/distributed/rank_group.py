"""Communication between ranks: rank 0 sends rounds and models, and all ranks add their sums."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from coalmine.simulation.population import Indices

WAIT = 1_800.0  # seconds that the first rank waits for the last before a sum; a killed rank is noticed immediately
ROLL_CALL = 2.0  # seconds that the remaining ranks have to report after a failure
LONGEST_PAUSE = 0.001  # seconds between two checks whether the others are ready
LOOPBACK = "127.0.0.1"


Result = TypeVar("Result")


class RankError(RuntimeError):
    """Another rank raised an unexpected error."""


class RankInputError(ValueError):
    """Another rank cannot use its input, for example because files are missing on its machine."""


class LostRankError(ConnectionError):
    """Another rank was killed, has failed, or cannot be reached."""


@dataclass(frozen=True)
class Round:
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
        limit = timedelta(seconds=WAIT)
        try:
            self._control = _gloo(distributed_c10d.PrefixStore("control", store), rank, size, limit, local=local)
            self._vectors = self._control
            if torch.device(device).type == "cuda":
                self._vectors = _nccl(distributed_c10d.PrefixStore("vectors", store), rank, size, limit)
        except RuntimeError as error:
            raise self._lost_rank_error() from error

    @property
    def backend(self) -> str:
        return "gloo" if self._vectors is self._control else "nccl"

    def send_round(self, planned: Round, model_vector: Tensor) -> None:
        """On rank 0: send the round and its model to the others."""
        head = torch.tensor([planned.number, len(planned.clients), planned.clip_norm], dtype=torch.float64)
        self._broadcast(self._control, head)
        if len(planned.clients):
            self._broadcast(self._control, torch.from_numpy(np.ascontiguousarray(planned.clients, dtype=np.int64)))
        self._broadcast(self._vectors, model_vector)

    def receive_round(self, model_vector: Tensor) -> Round | None:
        """On the other ranks: receive the next round and write its model to `model_vector`; None if the training ends."""
        head = torch.zeros(3, dtype=torch.float64)
        self._broadcast(self._control, head)
        number, count, clip_norm = head.tolist()
        if not number:
            self._shut_down()
            return None
        clients = torch.zeros(int(count), dtype=torch.int64)
        if len(clients):
            self._broadcast(self._control, clients)
        self._broadcast(self._vectors, model_vector)
        return Round(int(number), clip_norm, clients.numpy())

    def end(self) -> None:
        """On rank 0: tell the others that the training has ended."""
        self._broadcast(self._control, torch.zeros(3, dtype=torch.float64))
        self._shut_down()

    def _shut_down(self) -> None:
        """Shut down nccl, which otherwise prints a warning."""
        if self._vectors is not self._control:
            with suppress(RuntimeError, AttributeError):
                self._vectors.shutdown()

    def add(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Add the two tensors that each rank computes over all ranks."""
        tensors = self.run_on_all(compute)
        for tensor in tensors:
            if tensor.numel():
                self._sum(self._vectors, tensor)
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
        self._sum(self._control, failed)
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
        self._sum(self._control, torch.zeros(1))

    def read(self) -> str:
        """On the other ranks: receive the text that rank 0 publishes."""
        self._sum(self._control, torch.zeros(1))
        return str(self._use_store(lambda: self.store.get("text").decode()))

    def _broadcast(self, group: Any, tensor: Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._finish(lambda: group.broadcast([tensor], options))

    def _sum(self, group: Any, tensor: Tensor) -> None:
        self._finish(lambda: group.allreduce([tensor]))

    def _finish(self, begin: Callable[[], Any]) -> None:
        """Wait for a collective operation by polling, so that signals are still handled."""
        try:
            work, pause = begin(), 0.0001
            while not work.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            work.wait()
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
            missing = self._missing_ranks()
            subject = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
            description = (
                f"{subject} of {self.size} no longer takes part: it was killed, has failed, or cannot be reached"
            )
        return LostRankError(description)

    def _missing_ranks(self) -> list[int]:
        """The ranks that do not report after a failure; empty if this cannot be determined."""
        if not store_answers(self.store):
            return [0] if self.rank else []
        try:
            self.store.set(f"present/{self.rank}", "yes")
            end, present = time.monotonic() + ROLL_CALL, set[int]()
            while len(present) < self.size and time.monotonic() < end:
                present = {rank for rank in range(self.size) if self.store.check([f"present/{rank}"])}
                time.sleep(0.05)
        except RuntimeError:
            return []
        return sorted(set(range(self.size)) - present)


def store_answers(store: Any) -> bool:
    """Whether the process of a store accepts connections. Asking first avoids a stack trace from torch."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return can_connect(store.host, store.port)


def can_connect(host: str, port: int) -> bool:
    """Whether a port accepts connections."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _gloo(store: Any, rank: int, size: int, limit: timedelta, *, local: bool) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    if not local:
        return gloo(store, rank, size, limit)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = limit
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = limit
    return distributed.ProcessGroupNCCL(store, rank, size, options)
