"""Which canary a sampler picked in which round, and the counts that the tests need."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, next_fast_len, rfft

from coalmine.argument_checks import Floats, short_repr, whole_number

LARGEST_SIDE = 2_000  # most canaries compared with each other; more add cost and little power
LARGEST_TABLE = 40_000_000  # most rounds × canaries compared with each other
LONGEST_SPAN = 1_000_000  # largest distance of the first and the last round, plus 100 for each observed round
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Picks:
    """Which canary was picked in which round, one pick per entry; rounds are indices into `numbers`."""

    numbers: Ints
    canaries: int
    canary: Ints
    place: Ints
    repeated: int  # picks of a canary that the same round had picked before
    cohorts: Ints | None  # cohort sizes of the rounds in `cohort_numbers`
    cohort_numbers: Ints

    @classmethod
    def checked(
        cls,
        present: Sequence[npt.ArrayLike],
        numbers: npt.ArrayLike,
        canaries: int,
        participants: Sequence[float | None] | None,
    ) -> "Picks":
        canaries = whole_number("canaries", canaries, minimum=1)
        given = np.asarray(numbers)
        if given.ndim != 1 or not given.size or given.dtype.kind not in "iu" or given.min() < 1:
            raise ValueError(f"numbers must be round numbers counted from 1, got {short_repr(numbers)}")
        if len(np.unique(given)) < len(given):
            raise ValueError("numbers must be different round numbers, got one twice; keep one record of each round")
        if given.max() - given.min() > LONGEST_SPAN + 100 * len(given):
            raise ValueError(
                f"numbers must count rounds as 1, 2, 3, ..., got {len(given)} rounds from {given.min()} to {given.max()}; "
                "number them in order"
            )
        if len(present) != len(given):
            raise ValueError(f"present must have an entry for each of the {len(given)} rounds, got {len(present)}")
        order = np.argsort(given)
        rows = [np.asarray(present[i], dtype=np.int64).ravel() for i in order]
        canary = np.concatenate(rows)
        if canary.size and not (canary.min() >= 0 and canary.max() < canaries):
            raise ValueError(
                f"present must hold canaries from 0 to {canaries - 1}, got {canary.min()} to {canary.max()}"
            )
        place = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        cells = distinct(place * canaries + canary)
        numbers_in_order = given[order].astype(np.int64)
        cohorts, known = _cohorts(participants, order)
        return cls(
            numbers=numbers_in_order,
            canaries=canaries,
            canary=cells % canaries,
            place=cells // canaries,
            repeated=len(canary) - len(cells),
            cohorts=cohorts,
            cohort_numbers=numbers_in_order[known],
        )

    @property
    def rounds(self) -> int:
        return len(self.numbers)

    @property
    def total(self) -> int:
        return len(self.canary)

    @property
    def cells(self) -> int:
        return self.canaries * self.rounds

    @property
    def rate(self) -> float:
        return self.total / self.cells

    def rate_interval(self, error: float) -> tuple[float, float]:
        """The Clopper-Pearson interval."""
        low = scipy_stats().beta.ppf(error / 2, self.total, self.cells - self.total + 1) if self.total else 0.0
        high = (
            scipy_stats().beta.isf(error / 2, self.total + 1, self.cells - self.total)
            if self.total < self.cells
            else 1.0
        )
        return float(low), float(high)

    @cached_property
    def per_canary(self) -> Ints:
        return np.bincount(self.canary, minlength=self.canaries)

    @cached_property
    def per_round(self) -> Ints:
        return np.bincount(self.place, minlength=self.rounds)

    def worst_rate(self, level: float) -> float:
        """A lower bound on the highest rate of a canary, over all canaries at once."""
        most = int(self.per_canary.max())
        return float(scipy_stats().beta.ppf(level / self.canaries, most, self.rounds - most + 1)) if most else 0.0

    @cached_property
    def in_time(self) -> Ints:
        """For each round number between the first and the last, the index of that round, or -1."""
        places = np.full(int(self.numbers[-1] - self.numbers[0]) + 1, -1)
        places[self.numbers - self.numbers[0]] = np.arange(self.rounds)
        return places

    @cached_property
    def by_lag(self) -> Floats:
        """How often a canary is picked in two rounds that are 1, 2, ... apart; entry 0 is the number of picks."""
        span = len(self.in_time)
        times = (self.numbers - self.numbers[0])[self.place]
        size = next_fast_len(2 * span, real=True)
        power, chunk = np.zeros(size // 2 + 1), max(1, 2**20 // size)
        for first in range(0, self.canaries, chunk):
            taken = (self.canary >= first) & (self.canary < first + chunk)
            rows = np.zeros((min(chunk, self.canaries - first), span))
            rows[self.canary[taken] - first, times[taken]] = 1
            power += (np.abs(rfft(rows, size, axis=1)) ** 2).sum(axis=0)
        return np.rint(irfft(power, size)[:span])

    def lagged(self, values: Floats) -> Floats:
        """The sum of products of a round's value with that of the round 0, 1, 2, ... later."""
        spread = np.where(self.in_time >= 0, values[self.in_time], 0.0)
        size = next_fast_len(2 * len(spread), real=True)
        return irfft(np.abs(rfft(spread, size)) ** 2, size)[: len(spread)]

    @cached_property
    def squared_meetings(self) -> float:
        """The sum over ordered pairs of rounds, a round with itself too, of the squared number of canaries they share."""
        table = np.zeros((self.rounds, self.canaries), dtype=np.float32)
        table[self.place, self.canary] = 1
        table = table if self.rounds <= self.canaries else table.T
        shared = table @ table.T  # whole numbers far below 2^24: exact
        return float((shared.astype(np.float64) ** 2).sum())

    def compared_canaries(self) -> "Picks":
        """The picks of the first canaries alone, if there are too many to compare all with each other."""
        count = min(LARGEST_SIDE, max(LARGEST_TABLE // self.rounds, 4))
        if count >= self.canaries:
            return self
        taken = self.canary < count
        return Picks(self.numbers, count, self.canary[taken], self.place[taken], 0, self.cohorts, self.cohort_numbers)


def _cohorts(participants: Sequence[float | None] | None, order: Ints) -> tuple[Ints | None, npt.NDArray[np.bool_]]:
    """The known cohort sizes in the order of the rounds, and a mask of the rounds that have one."""
    unknown = np.zeros(len(order), dtype=bool)
    if participants is None:
        return None, unknown
    given = np.array([np.nan if size is None else size for size in participants], dtype=np.float64)
    if len(given) != len(order):
        raise ValueError(f"participants must have an entry for each of the {len(order)} rounds, got {len(given)}")
    given = given[order]
    known = np.isfinite(given)
    if (given[known] < 0).any():
        raise ValueError(f"participants must be cohort sizes of at least 0, got {given[known].min():g}")
    return (np.rint(given[known]).astype(np.int64), known) if known.any() else (None, unknown)


def distinct(values: Ints) -> Ints:
    """The distinct values, sorted. np.unique hashes them, which is slow for a million."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], np.diff(ordered) > 0])] if len(ordered) else ordered


def scipy_stats() -> Any:
    """scipy.stats, imported on first use because it takes longer to import than all of coalmine."""
    import scipy.stats

    return scipy.stats
