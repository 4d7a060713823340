"""In which rounds the canaries take part: the shipped schedules."""

import hashlib
import itertools
import struct
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import one_number, whole_number
from coalmine.canaries.secret import SecretBytes
from coalmine.canaries.seeds import seed_bytes
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Sampling, Shuffled
from coalmine.measure.settings import Settings, presentation_counts

Indices = npt.NDArray[np.int32]


def schedule_key(seed: SupportsIndex | bytes) -> bytes:
    """The key from which the canaries' rounds are derived."""
    return hashlib.sha256(seed_bytes(seed)).digest()


class CanarySchedule:
    """In which rounds an audit's canaries take part, and in which rows of its data they are; all as secret as the seed."""

    def __init__(self, settings: Settings, seed: SupportsIndex | bytes) -> None:
        self._settings, self._key = settings, SecretBytes(schedule_key(seed))

    @property
    def key(self) -> SecretBytes:
        """The key that draws everything that must not be known beforehand; as secret as the seed."""
        return self._key

    def in_round(self, round_number: int) -> Indices:
        """The canaries of a round, counted from 1, as they were planned."""
        number, rounds = whole_number("round_number", round_number, minimum=1), self._settings.rounds
        if rounds is None:
            raise ValueError("canaries_in_round needs the number of rounds: pass rounds= or sampling= to Audit")
        if number > rounds:
            raise ValueError(f"round_number must be at most rounds = {rounds}, got {number}")
        return self._planned(number)

    def sampled(self, round_number: int, sampling_probability: float) -> Indices:
        """The canaries of a round under Poisson sampling."""
        number = whole_number("round_number", round_number, minimum=1)
        probability = one_number("sampling_probability", sampling_probability)
        if not 0 <= probability <= 1:
            raise ValueError(f"sampling_probability must lie in [0, 1], got {probability}")
        return sample_canaries(self._settings.canaries, probability, round_number=number, key=self._key)

    def rows(self, rows: int) -> npt.NDArray[np.int64]:
        """A row for each canary, in a data set with this many rows.

        A canary that takes part exactly when the pipeline picks its row shows how the pipeline samples.
        """
        return rows_of_canaries(self._settings.canaries, whole_number("rows", rows, minimum=1), key=self._key)

    def drawn(self, round_number: int, canaries: Indices, count: int) -> Indices:
        """At most `count` of a round's canaries, in their order."""
        if canaries.size <= count:
            return canaries
        digest = hashlib.blake2b(
            self._key + _number_bytes(round_number), digest_size=8 * count, person=b"drawn"
        ).digest()
        left = canaries.tolist()
        return np.array(sorted(left.pop(word % len(left)) for word in struct.unpack(f"<{count}Q", digest)), np.int32)

    @cached_property
    def _planned(self) -> Callable[[int], Indices]:
        return canary_schedule(self._settings, self._key)


def canary_schedule(settings: Settings, key: bytes) -> Callable[[int], Indices]:
    """The canaries of each round, counted from 1, as an audit with these settings plans them."""
    assert settings.rounds is not None
    if settings.sampling is not None:
        return sampled_schedule(settings.canaries, settings.sampling, key=key)
    rows = spread_schedule(settings.canaries, rounds=settings.rounds, presentations=settings.presentations, key=key)
    return lambda number: rows[number - 1]


def spread_schedule(count: int, *, rounds: int, presentations: int | Sequence[int], key: bytes) -> list[Indices]:
    """The canaries of each round: R presentations are one in each of R equal periods, in random order (Section 5.3).

    Every period has about equally many canaries in each of its rounds. The order is derived from `key`.
    """
    times = presentation_counts(count, presentations)
    if times.max() > rounds:
        raise ValueError(f"presentations must be at most rounds = {rounds}, got {times.max()}")
    rng = keyed_stream(key, b"schedule")
    rows: list[list[int]] = [[] for _ in range(rounds)]
    for presented in np.unique(times):
        group = np.flatnonzero(times == presented)
        edges = np.linspace(0, rounds, presented + 1).round().astype(int)
        for first, last in itertools.pairwise(edges):
            order = group[np.argsort(rng.random(group.size), kind="stable")]
            offset = rng.integers(last - first)  # so that left-over canaries are not always in the first rounds
            for index, canary in enumerate(order):
                rows[first + (offset + index * (last - first) // group.size) % (last - first)].append(int(canary))
    return [np.array(sorted(row), dtype=np.int32) for row in rows]


def sampled_schedule(count: int, sampling: Sampling, *, key: bytes) -> Callable[[int], Indices]:
    """The canaries of a round, counted from 1, sampled by this scheme. They are derived from `key`."""
    if isinstance(sampling, Poisson):
        return lambda number: sample_canaries(count, sampling.probability, round_number=number, key=key)
    if isinstance(sampling, FixedSize):
        return lambda number: _sized_canaries(count, sampling, round_number=number, key=key)
    if isinstance(sampling, Shuffled):
        rows = spread_schedule(count, rounds=sampling.total_rounds, presentations=sampling.epochs, key=key)
    else:
        rows = _allocated_canaries(count, sampling, key=key)
    return lambda number: rows[number - 1]


def _allocated_canaries(count: int, sampling: RandomAllocation, *, key: bytes) -> list[Indices]:
    """Each canary in one round of each epoch, drawn independently."""
    rng = keyed_stream(key, b"allocated")
    rows: list[Indices] = []
    for _ in range(sampling.epochs):
        rounds = np.floor(rng.random(count) * sampling.rounds).astype(np.int64)
        order = np.argsort(rounds, kind="stable").astype(np.int32)
        rows += np.split(order, np.searchsorted(rounds[order], np.arange(1, sampling.rounds)))
    return rows


def _sized_canaries(count: int, sampling: FixedSize, *, round_number: int, key: bytes) -> Indices:
    """The canaries of one round if `size` of `population`, which includes the canaries, are drawn."""
    if count > sampling.population:
        raise ValueError(f"canaries must be part of the population of {sampling.population}, got {count}")
    rng = keyed_stream(key + _number_bytes(round_number), b"sized")
    number = int(rng.hypergeometric(count, sampling.population - count, sampling.size))
    return np.sort(np.argsort(rng.random(count), kind="stable")[:number]).astype(np.int32)


def sample_canaries(count: int, probability: float, *, round_number: int, key: bytes) -> Indices:
    """The canaries of one round under Poisson sampling: each with this probability, independently of other rounds."""
    uniforms = keyed_stream(key + _number_bytes(round_number), b"sampled").random(count)
    return np.flatnonzero(uniforms < probability).astype(np.int32)


def rows_of_canaries(count: int, rows: int, *, key: bytes) -> npt.NDArray[np.int64]:
    """A different row of a data set with `rows` rows for each canary, derived from `key`."""
    if count > rows:
        raise ValueError(f"canaries must be at most the {rows} rows, one row for each, got {count}")
    return np.argsort(keyed_stream(key, b"rows").random(rows), kind="stable")[:count].astype(np.int64)


def _number_bytes(round_number: int) -> bytes:
    return round_number.to_bytes(max(8, round_number.bit_length() // 8 + 1), "little")


def keyed_stream(key: bytes, purpose: bytes) -> np.random.Generator:
    """The random numbers for one purpose, of at most 16 bytes: a stream of its own for each."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=16, person=purpose).digest(), "little")
    return np.random.Generator(np.random.Philox(key=seed))
