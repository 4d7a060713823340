"""Several processes that audit one model together; they communicate only by sums of numbers."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from coalmine.argument_checks import Floats, one_line, short_repr

_OK, _FAILED = 1.0, 2.0
_STATE = 3  # numbers of each rank in every sum: its status, its round, and a digest of its arguments
_BYTES = 6  # bytes in one number: a double holds them exactly


class Reduce(Protocol):
    """The communication of an audit with other processes: its rank, their number, and sums over them.

    Called with a row of float64 numbers, it returns their sums over all ranks: the same bit for bit on every rank. It
    raises an error if a rank has ended. `coalmine.integrations.torch_distributed.reduce_over` makes one.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def __call__(self, numbers: Floats, /) -> Floats: ...


class Ranks:
    """This process and the others; with one process, every sum is the number itself."""

    def __init__(self, reduce: Reduce | None) -> None:
        self._reduce = reduce
        self.rank = 0 if reduce is None else _whole("rank", reduce)
        self.size = 1 if reduce is None else _whole("size", reduce)
        if not 0 <= self.rank < self.size:
            raise ValueError(f"reduce must have a rank from 0 to size - 1, got rank {self.rank} of {self.size}")
        if reduce is not None and not callable(reduce):
            raise ValueError(f"reduce must be a function of numbers, got {short_repr(reduce)}")

    @property
    def several(self) -> bool:
        return self.size > 1

    def sum(self, numbers: Floats) -> Floats:
        """The sums over all ranks."""
        if self._reduce is None or not self.several:
            return numbers
        given = np.ascontiguousarray(numbers, dtype=np.float64)
        sums = np.asarray(self._reduce(given), dtype=np.float64)
        if sums.shape != given.shape:
            raise ValueError(f"reduce must return as many numbers as it is given, {given.size}, got {sums.shape}")
        return sums

    def sum_of(self, size: int, measure: Callable[[], Floats], *, number: int, arguments: Any) -> Floats:
        """The sums of every rank's measurements; if one of them fails, all of them raise an error.

        `size` is the number of measurements, on every rank. `number` is the round, and `arguments` the rank's own for it:
        both must be the same on every rank.
        """
        if not self.several:
            return measure()
        body, failure = np.zeros(size), None
        try:
            body = measure()
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            failure = error
        state = np.zeros((self.size, _STATE))
        state[self.rank] = (_OK if failure is None else _FAILED, number, _digest(arguments))
        sums = self.sum(np.concatenate([state.ravel(), body]))
        states = sums[: state.size].reshape(-1, _STATE)
        self._raise_failure(states[:, 0], failure)
        self._check_agreement(states, arguments)
        return sums[state.size :]

    def gather(self, make: Callable[[], Any]) -> list[Any]:
        """Gather every rank's return value, which must be JSON, on all ranks. If one fails, all raise an error."""
        made, failure = None, None
        try:
            made = make()
        except Exception as error:
            if not self.several:
                raise
            failure = error
        if not self.several:
            return [made]
        states = np.zeros(self.size)
        states[self.rank] = _OK if failure is None else _FAILED
        self._raise_failure(self.sum(states), failure)
        return [json.loads(text) for text in self._gather(json.dumps(made).encode())]

    def _check_agreement(self, states: Floats, arguments: Any) -> None:
        """ValueError on every rank if they are in different rounds, or were given different arguments."""
        numbers, digests = states[:, 1].astype(np.int64), states[:, 2]
        if (numbers != numbers[0]).any():
            other = int(np.flatnonzero(numbers != numbers[0])[0])
            raise ValueError(
                f"every rank must observe the same rounds, but rank 0 is in round {numbers[0]} and rank {other} in round "
                f"{numbers[other]}"
            )
        if (digests != digests[0]).any():
            other = int(np.flatnonzero(digests != digests[0])[0])
            everything = self.gather(lambda: arguments)
            raise ValueError(
                f"every rank must pass the same arguments, but rank {other} differs from rank 0 in round {numbers[0]}: "
                f"{differences(everything[0], everything[other], other)}"
            )

    def _raise_failure(self, states: Floats, failure: Exception | None) -> None:
        """If a rank failed, raise its own error on it, and one that reports it on the others."""
        if (states == _OK).all():
            return
        texts = self._gather(b"" if failure is None else one_line(str(failure) or type(failure).__name__).encode())
        if failure is not None:
            raise failure
        rank = int(np.flatnonzero(states != _OK)[0])
        raise ValueError(f"rank {rank} failed: {texts[rank].decode()}")

    def _gather(self, text: bytes) -> list[bytes]:
        """Gather the bytes of each rank."""
        lengths = np.zeros(self.size)
        lengths[self.rank] = len(text)
        sizes = self.sum(lengths).astype(np.int64)
        words = -(-sizes // _BYTES)
        start = int(words[: self.rank].sum())
        everything = np.zeros(int(words.sum()))
        padded = np.zeros((int(words[self.rank]), 8), np.uint8)
        padded[:, :_BYTES].flat[: len(text)] = np.frombuffer(text, np.uint8)
        everything[start : start + len(padded)] = padded.view("<u8").ravel()
        received = self.sum(everything).astype("<u8").view(np.uint8).reshape(-1, 8)[:, :_BYTES]
        starts = np.concatenate([[0], np.cumsum(words)])
        return [
            received[int(one) : int(two)].tobytes()[: int(size)]
            for one, two, size in zip(starts, starts[1:], sizes, strict=False)
        ]


def _whole(name: str, reduce: Any) -> int:
    value = getattr(reduce, name, None)
    if not isinstance(value, int):
        raise ValueError(f"reduce must have a whole number as {name}, got {short_repr(value)}; use reduce_over()")
    return value


def _digest(arguments: Any) -> float:
    """48 bits of a hash, which a double holds exactly."""
    text = json.dumps(arguments, sort_keys=True).encode()
    return float(int.from_bytes(hashlib.blake2b(text, digest_size=_BYTES).digest(), "little"))


def differences(own: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    """The arguments in which rank 0, with its `own`, and another rank differ, with both values, as JSON has them."""
    parts = []
    for name in sorted({*own, *other}):
        first, second = (json.dumps(values.get(name), sort_keys=True) for values in (own, other))
        if first != second:
            texts = _shown_differences(own.get(name), other.get(name))
            parts.append(f"{name} ({texts[0]} on rank 0, {texts[1]} on rank {rank})")
    return ", ".join(parts)


def _shown_differences(first: Any, second: Any, place: str = "") -> tuple[str, str]:
    """Two different values as text; of long lists, which `short_repr` would cut, the part from the first difference on."""
    texts = (place + short_repr(first), place + short_repr(second))
    if texts[0] != texts[1] or not (isinstance(first, list) and isinstance(second, list)):
        return texts
    index = next((n for n, (one, two) in enumerate(zip(first, second, strict=False)) if one != two), None)
    index = min(len(first), len(second)) if index is None else index
    if index == 0:
        return _shown_differences(first[0], second[0], place)
    return _shown_differences(first[index:], second[index:], f"from entry {index + 1} on ")
