"""Sums over the processes of `torch.distributed`, for an audit of a model in several processes.

    reduce = reduce_over()  # on every rank
    audit = Audit.for_model(dict(model.named_parameters()), ..., reduce=reduce)

An audit sums a few thousand numbers a round over the ranks, and nothing of the model's size. The sum has a process group of
its own: it cannot get between the collectives of the training, and a rank that is gone ends it soon.
"""

import math
import socket
import time
from collections import Counter
from datetime import timedelta
from threading import Thread
from typing import Any

import numpy as np

try:
    import torch
    from torch import distributed
except ImportError as error:
    raise ImportError("auditing several processes needs: pip install 'coalmine[simulation]'") from error

from coalmine.argument_checks import Floats, one_number, shown

__all__ = ["GroupSum", "LostRankError", "reduce_over"]
TIMEOUT = 50.0  # seconds that a sum may take, waiting for the slowest rank included
ARRIVAL = 600.0  # seconds between the first rank that calls `reduce_over` and the last
ROLL_CALL = 2.0  # seconds that the ranks which are still there have to say so
_MADE: Counter[tuple[int, ...]] = Counter()  # sums made so far over these ranks


class LostRankError(ConnectionError):
    """Another rank was killed, has failed, or hangs. All ranks must be started again."""


def reduce_over(group: Any = None, *, timeout: float = TIMEOUT, backend: str = "gloo") -> "GroupSum":
    """The sum over the ranks of a process group, by default of all ranks: `reduce` for `Audit.for_model`.

    Every rank of the group calls this, equally often, and gets an object with its `rank`, the `size` of the group, and a
    call that sums arrays. A sum that takes longer than `timeout` seconds is a LostRankError: give more where a rank may be
    away for longer, for example to evaluate the model. The sum goes over CPU memory and gloo, beside whatever backend the
    training uses. `backend="nccl"` sums on the GPU, but then torch itself ends a process whose peer is lost.
    """
    seconds = one_number("timeout", timeout)
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {seconds}")
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError("reduce_over needs a process group: call torch.distributed.init_process_group before it")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend must be 'gloo' or 'nccl', got {shown(backend)}")
    if not getattr(distributed, f"is_{backend}_available")():
        raise ValueError(f"backend must be one that this torch was built with, got {backend!r}; name another")
    if group is distributed.GroupMember.NON_GROUP_MEMBER or distributed.get_rank(group) < 0:
        raise ValueError("this process is not in the group: only its members call reduce_over")
    return GroupSum(distributed.group.WORLD if group is None else group, timeout=seconds, backend=backend)


class GroupSum:
    """The sum of float64 numbers over the ranks of a group, the same to the bit on every rank."""

    def __init__(self, group: Any, *, timeout: float, backend: str) -> None:
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.timeout = timeout
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._calls = 0
        self._store = _own_store(group)
        arrivals = [f"arrived/{rank}" for rank in range(self.size)]
        try:
            self._store.set(arrivals[self.rank], "yes")
            self._store.wait(arrivals, timedelta(seconds=ARRIVAL))
            limit = timedelta(seconds=timeout)
            # Made by hand: `new_group` wants every rank of the job, whether it is in the group or not.
            if backend == "gloo":
                self._group: Any = distributed.ProcessGroupGloo(self._store, self.rank, self.size, limit)
            else:
                options = distributed.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._group = distributed.ProcessGroupNCCL(self._store, self.rank, self.size, options)
        except RuntimeError as error:
            raise self.lost_rank(self.missing_ranks()) from error

    def __repr__(self) -> str:
        return f"GroupSum(rank={self.rank}, size={self.size})"

    def __call__(self, numbers: Floats) -> Floats:
        """The elementwise sum over all ranks. Each rank passes an array of the same length."""
        if not isinstance(numbers, np.ndarray) or numbers.dtype != np.float64 or numbers.ndim != 1:
            raise ValueError(f"numbers must be a one-dimensional array of float64, got {_kind(numbers)}")
        self._calls += 1
        count = float(numbers.size)
        # Different lengths would end the process inside gloo, without an exception.
        total, squares = self._sum(np.array([count, count * count]))
        if total != self.size * count or squares != self.size * count * count:
            raise ValueError(
                f"every rank must be at the same point of the training: rank {self.rank} passed {numbers.size} numbers, "
                f"and the {self.size} ranks {total:.0f} together; each must take the same steps in the same order"
            )
        return self._sum(numbers)

    def _sum(self, numbers: Floats) -> Floats:
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        try:
            self._group.allreduce([tensor]).wait()
            return np.asarray(tensor.cpu().numpy())
        except RuntimeError as error:
            raise self.lost_rank(self.missing_ranks()) from error

    def missing_ranks(self) -> list[int] | None:
        """The ranks that do not answer after a sum has failed on the others; None if nobody can tell."""
        return _RollCall(self._store, self.rank, self.size, self._calls).missing()

    def lost_rank(self, missing: list[int] | None) -> LostRankError:
        """The error for a rank that no longer takes part, with its number if it is known."""
        who = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
        return LostRankError(
            f"{who} of {self.size} no longer takes part: it was killed, has failed, or was away for more than "
            f"{self.timeout:g} s; restart all ranks, and an audit with a directory continues where that ends"
        )


class _RollCall:
    """Who is still there, through the store with which the ranks found each other.

    The store may be in the lost process itself. So it is asked in a thread that nobody waits for.
    """

    def __init__(self, store: Any, rank: int, size: int, call: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._key = f"present/{call}/"
        self._present = {rank}
        self._answered = False

    def missing(self) -> list[int] | None:
        """The ranks that do not answer; None if nobody can tell."""
        asking = Thread(target=self._ask, daemon=True)
        asking.start()
        asking.join(ROLL_CALL + 1)
        return sorted(set(range(self._size)) - self._present) if self._answered else None

    def _ask(self) -> None:
        if not _reachable(self._store):
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


def _own_store(group: Any) -> Any:
    """A part of the group's store for the next sum over that group."""
    store = distributed.distributed_c10d._get_process_group_store(group)
    ranks = tuple(distributed.get_process_group_ranks(group))
    _MADE[ranks] += 1
    return distributed.distributed_c10d.PrefixStore(f"coalmine/{_MADE[ranks]}", store)


def _reachable(store: Any) -> bool:
    """Whether a store's process accepts connections: torch writes a stack trace to stderr if it does not."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "port"):
        return True  # a file
    try:
        socket.create_connection((store.host, store.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _kind(numbers: Any) -> str:
    if isinstance(numbers, np.ndarray):
        return f"an array of {numbers.dtype} with {numbers.ndim} dimensions"
    return shown(numbers)
