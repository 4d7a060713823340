"""The participants of each round, a function of the round number and the run's seed, so that a run can be resumed."""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from coalmine.argument_checks import unit_interval, whole_number
from coalmine.simulation.population import Indices
from coalmine.simulation.randomness import numpy_stream

PARTICIPATIONS = ("shuffled", "poisson", "fixed", "limited", "file")
LONGEST_SHOWN = 8  # characters of a seed that could be guessed
CANARY_PREFIX = "canary:"


class Participation(Protocol):
    """A rule that selects which of the participants 0 to n − 1 take part in a round."""

    def participants(self, round_number: int) -> Indices:
        """The participants of round `round_number`, without repetitions; rounds are counted from 1."""
        ...

    @property
    def expected_size(self) -> float:
        """The average number of participants of a round."""
        ...


@dataclass(frozen=True)
class ShuffledEpochs:
    """All participants in a random order, `size` per round; a new order in each epoch (Section 5).

    The last round of an epoch takes the remaining participants, so each takes part once per epoch. The order of one epoch
    is kept in memory, 8 bytes per participant.
    """

    population: int
    size: int
    seed: int
    _orders: dict[int, Indices] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_size(self.size, self.population)

    def participants(self, round_number: int) -> Indices:
        epoch, place = divmod(round_number - 1, self.rounds_per_epoch)
        return self._order(epoch)[place * self.size : (place + 1) * self.size].copy()

    def _order(self, epoch: int) -> Indices:
        if epoch not in self._orders:
            self._orders.clear()  # first, so that only one order is in memory
            self._orders[epoch] = numpy_stream(self.seed, "shuffled epochs", epoch).permutation(self.population)
        return self._orders[epoch]

    @property
    def rounds_per_epoch(self) -> int:
        """The number of rounds in which every participant takes part once."""
        return -(-self.population // self.size)

    @property
    def expected_size(self) -> float:
        return self.population / self.rounds_per_epoch


@dataclass(frozen=True)
class PoissonCohorts:
    """Each participant takes part in a round independently, with the same probability."""

    population: int
    probability: float
    seed: int

    def __post_init__(self) -> None:
        if self.probability != 1:
            unit_interval("probability", self.probability)

    def participants(self, round_number: int) -> Indices:
        rng = numpy_stream(self.seed, "poisson", round_number)
        # Sampling a binomial count first gives the same distribution with fewer draws.
        return _sample(rng, self.population, int(rng.binomial(self.population, self.probability)))

    @property
    def expected_size(self) -> float:
        return self.population * self.probability


@dataclass(frozen=True)
class FixedSizeCohorts:
    """`size` different participants, sampled independently in each round."""

    population: int
    size: int
    seed: int

    def __post_init__(self) -> None:
        _check_size(self.size, self.population)

    def participants(self, round_number: int) -> Indices:
        return _sample(numpy_stream(self.seed, "fixed size", round_number), self.population, self.size)

    @property
    def expected_size(self) -> float:
        return float(self.size)


@dataclass(frozen=True)
class LimitedCheckIns:
    """Like FixedSizeCohorts, but a participant can return only after `separation` rounds (Section 5.3).

    Only the last rounds are kept, so a request for an earlier round samples all rounds again from the first.
    """

    population: int
    size: int
    separation: int
    seed: int
    _recent: deque[Indices] = field(default_factory=deque, repr=False, compare=False)
    _last: list[int] = field(default_factory=lambda: [0], repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_size(self.size, self.population)
        whole_number("separation", self.separation, minimum=1)
        if self.size * self.separation > self.population:
            raise ValueError(
                f"{self.size} clients per round, {self.separation} rounds apart, need {self.size * self.separation} "
                f"clients, got {self.population}"
            )

    def participants(self, round_number: int) -> Indices:
        if round_number == self._last[0] and self.separation > 1:
            return self._recent[-1]
        if round_number <= self._last[0]:
            self._recent.clear()
            self._last[0] = 0
        for number in range(self._last[0] + 1, round_number + 1):
            sampled = self._draw(number)
            self._recent.append(sampled)
            while len(self._recent) >= self.separation and len(self._recent) > 1:
                self._recent.popleft()
        self._last[0] = round_number
        return sampled

    @property
    def expected_size(self) -> float:
        return float(self.size)

    def _draw(self, round_number: int) -> Indices:
        recent = [] if self.separation == 1 else list(self._recent)
        ineligible = np.sort(np.concatenate(recent)) if recent else np.zeros(0, dtype=np.int64)
        rng = numpy_stream(self.seed, "limited check-ins", round_number)
        rank = _sample(rng, self.population - len(ineligible), self.size)
        # Map the rank among eligible participants to the participant by skipping every ineligible one below it.
        return rank + np.searchsorted(ineligible - np.arange(len(ineligible)), rank, side="right")


@dataclass(frozen=True)
class RoundsFromFile:
    """The rounds that a file lists, one per line."""

    rounds: tuple[Indices, ...]

    def participants(self, round_number: int) -> Indices:
        if round_number > len(self.rounds):
            raise ValueError(f"the rounds file has {len(self.rounds)} rounds, so there is no round {round_number}")
        return self.rounds[round_number - 1]

    @property
    def expected_size(self) -> float:
        return float(np.mean([len(present) for present in self.rounds]))


def read_rounds(path: Path, *, clients: int, canaries: int = 0) -> RoundsFromFile:
    """Read a rounds file: one line per round with the numbers of its clients.

    canary:3 is canary 3, which is participant clients + 3.
    """
    try:
        lines = _read_bytes(path).decode().splitlines()
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} must be a rounds file, one line of numbers per round, got a file that is not text"
        ) from None
    rounds = []
    for number, line in enumerate(lines, start=1):
        words = enumerate(line.split(), start=1)
        present = [_participant(word, f"{path}, line {number}", place, clients, canaries) for place, word in words]
        if len(set(present)) < len(present):
            raise ValueError(f"{path}, line {number}: a participant is listed twice")
        rounds.append(np.array(present, dtype=np.int64))
    if not rounds:
        raise ValueError(f"{path} has no rounds")
    return RoundsFromFile(tuple(rounds))


def rounds_digest(path: Path) -> str:
    """The SHA-256 of a rounds file, which a run stores."""
    return hashlib.sha256(_read_bytes(path)).hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"the rounds file {path} must be readable ({error.strerror}); restore it from a copy"
        ) from None


def write_rounds(path: Path, rounds: Sequence[Indices], *, clients: int) -> None:
    """Write rounds to a file in the format that read_rounds reads."""

    def word(participant: int) -> str:
        return str(participant) if participant < clients else f"{CANARY_PREFIX}{participant - clients}"

    lines = (" ".join(word(participant) for participant in present.tolist()) for present in rounds)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _participant(word: str, where: str, place: int, clients: int, canaries: int) -> int:
    digits = word.removeprefix(CANARY_PREFIX)
    first, count, kind = (clients, canaries, "canaries") if word != digits else (0, clients, "clients")
    if not digits.isascii() or not digits.isdigit() or int(digits) >= count:
        shown = repr(word) if len(digits) < LONGEST_SHOWN else f"word {place}"  # it may be a seed file
        raise ValueError(f"{where}: {shown} is not one of the {count} {kind}, counted from 0")
    return first + int(digits)


def _sample(rng: np.random.Generator, population: int, size: int) -> Indices:
    return rng.choice(population, size, replace=False).astype(np.int64, copy=False)


def _check_size(size: int, population: int) -> None:
    whole_number("clients_per_round", size, minimum=1)
    if size > population:
        raise ValueError(f"clients_per_round must be at most the population, {population}, got {size}")
