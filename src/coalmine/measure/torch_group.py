"""A process group of torch over a store, for an audit's sums and for the ranks of the simulation."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any
from weakref import finalize

from torch import Tensor, distributed

ROLL_CALL = 2.0  # seconds that live ranks have to answer
LONGEST_PAUSE = 0.001  # seconds between two checks whether the others are ready
LOOPBACK = "127.0.0.1"


class LostRankError(ConnectionError):
    """Another rank was killed, has failed, hangs, or cannot be reached. All ranks must be started again."""


class TorchGroup:
    """Sums and broadcasts over ranks 0 to size − 1, through gloo or nccl. They raise RuntimeError if a rank is lost.

    It is not a group of `torch.distributed.new_group`, which every rank of a job would have to call, in the group or not.
    With `local`, all ranks are on this machine.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, backend: str = "gloo", seconds: float, local: bool = False
    ) -> None:
        make = _gloo if backend == "gloo" else _nccl
        self._group: list[Any] = [make(store, rank, size, timedelta(seconds=seconds), local=local)]
        finalize(self, self._group.clear)  # ends the group's threads, at the latest when Python exits

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over all ranks."""
        self._finish(lambda: self._group[0].allreduce([tensor]))

    def broadcast(self, tensor: Tensor) -> None:
        """Replace the tensor by that of rank 0."""
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._finish(lambda: self._group[0].broadcast([tensor], options))

    def shut_down(self) -> None:
        """Close the connections."""
        self._group[0].shutdown()

    def _finish(self, begin: Callable[[], Any]) -> None:
        """Wait for an operation by polling, so that signals are still handled."""
        work, pause = begin(), 0.0001
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        work.wait()


def missing_ranks(store: Any, rank: int, size: int, *, call: int = 0) -> list[int] | None:
    """The ranks that do not answer after operation number `call` has failed; None if the store does not answer."""
    return _RollCall(store, rank, size, call).missing()


def can_connect(host: str, port: int) -> bool:
    """Whether a port accepts connections."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def store_answers(store: Any) -> bool:
    """Whether a store's process accepts connections: torch writes a stack trace to stderr if it does not."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return not hasattr(store, "port") or can_connect(store.host, store.port)  # a file store has no port


class _RollCall:
    """Finds the live ranks, through the store that the ranks connected with.

    The store may be in the lost process itself, so a daemon thread queries it.
    """

    def __init__(self, store: Any, rank: int, size: int, call: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._key = f"present/{call}/"
        self._present = {rank}
        self._answered = False

    def missing(self) -> list[int] | None:
        """The ranks that do not answer; None if the store cannot be reached."""
        query = Thread(target=self._query, daemon=True)
        query.start()
        query.join(ROLL_CALL + 1)
        return sorted(set(range(self._size)) - self._present) if self._answered else None

    def _query(self) -> None:
        if not store_answers(self._store):
            return
        try:
            self._store.set(f"{self._key}{self._rank}", "present")
            end = time.monotonic() + ROLL_CALL
            while len(self._present) < self._size and time.monotonic() < end:
                self._present |= {i for i in range(self._size) if self._store.check([f"{self._key}{i}"])}
                self._answered = True
                time.sleep(0.05)
        except RuntimeError:
            self._answered = False


def _gloo(store: Any, rank: int, size: int, limit: timedelta, *, local: bool) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    if not local:
        return gloo(store, rank, size, limit)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = limit
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, limit: timedelta, *, local: bool) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = limit
    return distributed.ProcessGroupNCCL(store, rank, size, options)
