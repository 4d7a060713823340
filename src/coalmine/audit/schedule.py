"""In which rounds the canaries take part: the shipped schedules."""

import hashlib
import itertools
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from coalmine.storage.record import presentation_counts, seed_bytes

Indices = npt.NDArray[np.int32]


def schedule_key(seed: SupportsIndex | bytes) -> bytes:
    """What the canaries' rounds follow from."""
    return hashlib.sha256(seed_bytes(seed)).digest()


def spread_schedule(count: int, *, rounds: int, presentations: int | Sequence[int], key: bytes) -> list[Indices]:
    """The canaries of each round: R presentations are one in each of R equal periods, in random order (Section 5.3).

    Every period has about as many canaries in each of its rounds. The order follows from `key`.
    """
    times = presentation_counts(count, presentations)
    if times.max() > rounds:
        raise ValueError(f"presentations must be at most rounds = {rounds}, got {times.max()}")
    rng = _stream(key, b"schedule")
    rows: list[list[int]] = [[] for _ in range(rounds)]
    for presented in np.unique(times):
        group = np.flatnonzero(times == presented)
        edges = np.linspace(0, rounds, presented + 1).round().astype(int)
        for first, last in itertools.pairwise(edges):
            order = group[np.argsort(rng.random(group.size), kind="stable")]
            offset = rng.integers(last - first)  # so that the odd canaries out do not always meet the first rounds
            for place, canary in enumerate(order):
                rows[first + (offset + place * (last - first) // group.size) % (last - first)].append(int(canary))
    return [np.array(sorted(row), dtype=np.int32) for row in rows]


def sample_canaries(count: int, probability: float, *, round_number: int, key: bytes) -> Indices:
    """The canaries of one round under Poisson sampling: each is in it with this probability, whatever other rounds had."""
    number = round_number.to_bytes(max(8, round_number.bit_length() // 8 + 1), "little")
    drawn = _stream(key + number, b"sampled").random(count)
    return np.flatnonzero(drawn < probability).astype(np.int32)


def _stream(key: bytes, purpose: bytes) -> np.random.Generator:
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=16, person=purpose).digest(), "little")
    return np.random.Generator(np.random.Philox(key=seed))
