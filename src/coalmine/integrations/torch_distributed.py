"""Sums over the processes of `torch.distributed`, for an audit of a model in several processes.

    reduce = reduce_over()  # on every rank
    audit = Audit.for_model(dict(model.named_parameters()), ..., reduce=reduce)

An audit sums a few thousand numbers per round over the ranks, and never anything of the model's size. The sum has its own
process group, so it cannot interfere with the training's collectives, and it fails soon after a rank is lost.
"""

import math
from collections import Counter
from datetime import timedelta
from typing import Any

import numpy as np

try:
    import torch
    from torch import distributed
except ImportError as error:
    raise ImportError("auditing several processes needs: pip install 'coalmine[simulation]'") from error

from coalmine.argument_checks import Floats, one_number, short_repr
from coalmine.measure.torch_group import LostRankError, TorchGroup, missing_ranks

__all__ = ["GroupSum", "LostRankError", "reduce_over"]
TIMEOUT = 50.0  # seconds that a sum may take, including the wait for the slowest rank
ARRIVAL = 600.0  # seconds that the first rank in `reduce_over` waits for the last one
_MADE: Counter[tuple[int, ...]] = Counter()  # sums made so far over these ranks


def reduce_over(group: Any = None, *, timeout: float = TIMEOUT, backend: str = "gloo") -> "GroupSum":
    """The sum over the ranks of a process group, by default of all ranks: `reduce` for `Audit.for_model`.

    Every rank of the group must call this the same number of times. It returns a callable that sums arrays, with
    attributes `rank` and `size`. A sum that takes longer than `timeout` seconds raises a LostRankError. Increase it if a
    rank may be away for longer, for example to evaluate the model. The sum uses CPU memory and gloo, whatever backend the
    training uses. `backend="nccl"` sums on the GPU, but then torch itself ends a process whose peer is lost.
    """
    seconds = one_number("timeout", timeout)
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {seconds}")
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError("reduce_over needs a process group: call torch.distributed.init_process_group before it")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend must be 'gloo' or 'nccl', got {short_repr(backend)}")
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
            self._group = TorchGroup(self._store, self.rank, self.size, backend=backend, seconds=timeout)
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
        # With different lengths, gloo would end the process without an exception.
        total, squares = self._sum(np.array([count, count * count]))
        if total != self.size * count or squares != self.size * count * count:
            raise ValueError(
                f"every rank must be at the same point of the training: rank {self.rank} passed {numbers.size} numbers, "
                f"and all {self.size} ranks {total:.0f} in total; each must take the same steps in the same order"
            )
        return self._sum(numbers)

    def _sum(self, numbers: Floats) -> Floats:
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        try:
            self._group.sum(tensor)
            return np.asarray(tensor.cpu().numpy())
        except RuntimeError as error:
            raise self.lost_rank(self.missing_ranks()) from error

    def missing_ranks(self) -> list[int] | None:
        """The ranks that do not answer after a sum has failed on the others; None if unknown."""
        return missing_ranks(self._store, self.rank, self.size, call=self._calls)

    def lost_rank(self, missing: list[int] | None) -> LostRankError:
        """The error for a lost rank, with its number if known."""
        who = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
        return LostRankError(
            f"{who} of {self.size} no longer takes part: it was killed, has failed, or was away for more than "
            f"{self.timeout:g} s; restart all ranks, and an audit with a directory resumes after its last round"
        )


def _own_store(group: Any) -> Any:
    """A separate prefix of the group's store, one for each sum over that group."""
    store = distributed.distributed_c10d._get_process_group_store(group)
    ranks = tuple(distributed.get_process_group_ranks(group))
    _MADE[ranks] += 1
    return distributed.distributed_c10d.PrefixStore(f"coalmine/{_MADE[ranks]}", store)


def _kind(numbers: Any) -> str:
    if isinstance(numbers, np.ndarray):
        return f"an array of {numbers.dtype} with {numbers.ndim} dimensions"
    return short_repr(numbers)
