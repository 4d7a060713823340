"""Does a pipeline's sampler do what its accountant assumes? Tests on the rounds in which it picked the canaries.

Every law here is exact or has three exact moments. No random numbers are used, so the same picks always give the same
p-values.
Given how many canaries each round picked, Poisson and fixed-size sampling pick a uniform subset in each round, and the
rounds are independent. Then the numbers of canaries that two rounds share are hypergeometric, independent along any chain
of rounds, and pairwise independent over all pairs of rounds. The tests for lags and for canaries that move together rest
on this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import comb, perm, sqrt
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, irfft2, next_fast_len, rfft, rfft2
from scipy.special import gammainc, gammaincc, ndtr

from coalmine.argument_checks import Floats, shown, unit_interval, whole_number
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Sampling, Shuffled, checked_sampling

LEVEL = 2e-4  # level of each test
EXACT_PICKS = 100  # with at most this many picks, and EXACT_PAIRS pairs of them, the law of a dispersion is exact
EXACT_PAIRS = 400
EXACT_VARIANCE = 400.0  # up to this variance the law of shared canaries is convolved; above it, three moments are used
LARGEST_SIDE = 2_000  # most canaries compared with each other; more add cost and little power
FEWEST = 10  # with fewer rounds or canaries, the law of meetings is bounded and not approximated
LARGEST_TABLE = 40_000_000  # most rounds × canaries compared with each other
LONGEST_SPAN = 1_000_000  # largest distance of the first and the last round, plus 100 for each observed round

Ints = npt.NDArray[np.int64]
Seen = Literal[
    "poisson", "random_allocation", "shuffled", "fixed_size", "random_allocation or shuffled",
    "too many", "repeated order", "spaced", "adjacent rounds", "clumped", "uneven", "changing rate", "other",
]  # fmt: skip

MEANING: dict[Seen, str] = {
    "poisson": "each client joins each round independently, with the same probability",
    "random_allocation": "each client takes part once in each epoch, in a round drawn independently",
    "shuffled": "each client takes part once in each epoch, in cohorts of a fixed size",
    "random_allocation or shuffled": "each client takes part once in each epoch; cohort sizes would tell which scheme it is",
    "fixed_size": "each round picks a fixed number, independently of the other rounds",
    "too many": "some canaries are picked more often than the scheme allows",
    "repeated order": "canaries return after a fixed number of rounds",
    "spaced": "no canary returns before a number of rounds has passed",
    "adjacent rounds": "canaries that were picked are picked again in the next rounds",
    "clumped": "canaries are picked in groups",
    "uneven": "some canaries are picked more often than others",
    "changing rate": "the share of canaries that are picked changes over the rounds",
    "other": "none of the known patterns",
}


@dataclass(frozen=True, kw_only=True)
class SamplerTest:
    """One test of a sampler: a statistic, its expected value under the claimed scheme, and the p-value."""

    name: str
    title: str
    statistic: float
    expected: float
    p_value: float
    level: float = LEVEL

    @property
    def seen(self) -> float:
        """Another name for `statistic`."""
        return self.statistic

    @property
    def high(self) -> bool:
        """Whether the statistic is above its expected value."""
        return self.statistic > self.expected

    @property
    def passed(self) -> bool:
        return self.p_value >= self.level


@dataclass(frozen=True, kw_only=True)
class SamplerReading:
    """The tests of a sampler on the rounds in which it picked the canaries, and the scheme that fits.

    `seen` names the sampler: the claimed scheme if every test passed, otherwise the pattern of the picks (`MEANING`).
    `seen_sampling` is that scheme with its parameters, None if no single scheme fits. `candidates` are all schemes that
    fit, so for "random_allocation or shuffled" there are two. `worst_rate` is a lower bound, at the level of a test, on the
    share of rounds that the canary picked most often takes part in.
    """

    tests: tuple[SamplerTest, ...]
    seen: Seen
    seen_sampling: Sampling | None
    candidates: tuple[Sampling, ...]
    rate: float
    rate_interval: tuple[float, float]  # 95 %
    worst_rate: float
    picks: int
    rounds: int
    canaries: int
    cohort_sizes_known: bool

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the claimed scheme."""
        return all(test.passed for test in self.tests)

    @property
    def failed(self) -> tuple[SamplerTest, ...]:
        """The tests that contradict the claimed scheme."""
        return tuple(test for test in self.tests if not test.passed)

    @property
    def meaning(self) -> str:
        """`seen` in words."""
        return MEANING[self.seen]


def read_sampler(
    present: Sequence[npt.ArrayLike],
    numbers: npt.ArrayLike,
    canaries: int,
    sampling: Sampling,
    participants: Sequence[float | None] | None = None,
) -> SamplerReading:
    """Test the rounds in which a pipeline picked its canaries against the claimed scheme, and name the scheme that fits.

    `present` holds the canaries of each observed round, `numbers` the rounds' numbers from 1; rounds may be missing.
    `participants` holds the cohort size of each round, canaries included; None or NaN if it is unknown. Sampling at a
    lower rate than claimed leaks less, so it passes.

    >>> round_robin = [[t % 10] for t in range(100)]
    >>> read_sampler(round_robin, range(1, 101), 10, Poisson(0.1, rounds=100)).seen
    'repeated order'
    """
    sampling = checked_sampling(sampling)
    picks = _Picks.checked(present, numbers, canaries, participants)
    tests = tuple(_tests(picks, sampling))
    seen, candidates = (
        (_scheme_name(sampling), (sampling,)) if all(t.passed for t in tests) else _recognise(picks, sampling)
    )
    return SamplerReading(
        tests=tests,
        seen=seen,
        seen_sampling=candidates[0] if len(candidates) == 1 else None,
        candidates=candidates,
        rate=picks.rate,
        rate_interval=picks.rate_interval(0.05),
        worst_rate=picks.worst_rate,
        picks=picks.total,
        rounds=picks.rounds,
        canaries=picks.canaries,
        cohort_sizes_known=picks.cohorts is not None,
    )


def rate_power(sampling: Sampling, rounds: int, canaries: int, rate: float) -> float:
    """The probability that the test of the rate fails when canaries take part in this share of the rounds.

    It is the one-sided binomial test at .02 % over `rounds` observed rounds. A claimed rate of 1 cannot be exceeded.

    >>> round(rate_power(Poisson(0.1, rounds=100), 100, 20, 0.2), 3)
    1.0
    """
    cells = whole_number("rounds", rounds, minimum=1) * whole_number("canaries", canaries, minimum=1)
    if rate != 1:
        rate = unit_interval("rate", rate)
    claimed = checked_sampling(sampling).rate
    smallest = int(_stats().binom.isf(LEVEL, cells, claimed)) + 1  # smallest count that fails the test
    return float(_stats().binom.sf(smallest - 1, cells, rate))


@dataclass(frozen=True)
class _Picks:
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
    ) -> "_Picks":
        canaries = whole_number("canaries", canaries, minimum=1)
        given = np.asarray(numbers)
        if given.ndim != 1 or not given.size or given.dtype.kind not in "iu" or given.min() < 1:
            raise ValueError(f"numbers must be round numbers counted from 1, got {shown(numbers)}")
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
        cells = _distinct(place * canaries + canary)
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
        low = _stats().beta.ppf(error / 2, self.total, self.cells - self.total + 1) if self.total else 0.0
        high = _stats().beta.isf(error / 2, self.total + 1, self.cells - self.total) if self.total < self.cells else 1.0
        return float(low), float(high)

    @cached_property
    def per_canary(self) -> Ints:
        return np.bincount(self.canary, minlength=self.canaries)

    @cached_property
    def per_round(self) -> Ints:
        return np.bincount(self.place, minlength=self.rounds)

    @property
    def worst_rate(self) -> float:
        """A lower bound on the highest rate of a canary, over all canaries at once."""
        most = int(self.per_canary.max())
        return float(_stats().beta.ppf(LEVEL / self.canaries, most, self.rounds - most + 1)) if most else 0.0

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

    def first_canaries(self, count: int) -> "_Picks":
        """The picks of the first `count` canaries alone."""
        if count >= self.canaries:
            return self
        taken = self.canary < count
        return _Picks(self.numbers, count, self.canary[taken], self.place[taken], 0, self.cohorts, self.cohort_numbers)


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


def _distinct(values: Ints) -> Ints:
    """The distinct values, sorted. np.unique hashes them, which is slow for a million."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], np.diff(ordered) > 0])] if len(ordered) else ordered


def _stats() -> Any:
    """scipy.stats, imported on first use because it takes longer to import than all of coalmine."""
    import scipy.stats

    return scipy.stats


# --- laws


def _tail(above: float, variance: float, third: float) -> tuple[float, float]:
    """Pr(X <= x) and Pr(X >= x) for x `above` the mean: a gamma law with these central moments (Pearson's type III)."""
    if variance <= 0:
        return 1.0, 1.0
    z, skew = above / sqrt(variance), third / variance**1.5
    if abs(skew) < 1e-5:
        return float(ndtr(z)), float(ndtr(-z))
    shape = 4 / skew**2
    point = max(shape + sqrt(shape) * (z if skew > 0 else -z), 0.0)
    lower, upper = float(gammainc(shape, point)), float(gammaincc(shape, point))
    return (lower, upper) if skew > 0 else (upper, lower)


def _lattice_tails(statistic: float, mean: float, variance: float, third: float) -> tuple[float, float]:
    """Pr(X <= statistic) and Pr(X >= statistic) for a whole number, with the correction for continuity."""
    if variance < 1e-9:
        return 1.0, 1.0
    return _tail(statistic + 0.5 - mean, variance, third)[0], _tail(statistic - 0.5 - mean, variance, third)[1]


def _two_sided(tails: tuple[float, float]) -> float:
    return min(1.0, 2 * min(tails))


def _pairs(counts: Ints) -> int:
    """The number of pairs within groups of these sizes: the measure of every dispersion here."""
    return int((counts * (counts - 1) // 2).sum())


def _pair_moments(total: int, groups: int, capacity: int | None) -> tuple[float, float, float]:
    """Mean and second and third central moments of the number of pairs within groups, for `total` picks at random.

    Each group has room for `capacity` picks; None for groups without a limit (multinomial counts). The factorial moments
    of the counts are exact fractions, because nearly all their digits cancel in the central moments.
    """

    def factorial_moment(*orders: int) -> Fraction:
        order = sum(orders)
        if order > total:
            return Fraction(0)
        if capacity is None:
            return Fraction(perm(total, order), groups**order)
        ways = 1
        for one in orders:
            ways *= perm(capacity, one)
        return Fraction(ways * perm(total, order), perm(groups * capacity, order)) if ways else Fraction(0)

    def expected(*coefficients: dict[int, Fraction]) -> Fraction:
        terms: list[tuple[Fraction, tuple[int, ...]]] = [(Fraction(1), ())]
        for one in coefficients:
            terms = [(weight * w, (*orders, order)) for weight, orders in terms for order, w in one.items()]
        return sum((weight * factorial_moment(*orders) for weight, orders in terms), Fraction(0))

    # c(c - 1)/2, its square and its cube in falling factorials of c
    first = {2: Fraction(1, 2)}
    square = {4: Fraction(1, 4), 3: Fraction(1), 2: Fraction(1, 2)}
    cube = {6: Fraction(1, 8), 5: Fraction(12, 8), 4: Fraction(38, 8), 3: Fraction(4), 2: Fraction(1, 2)}
    mean = groups * expected(first)
    second = groups * expected(square) + groups * (groups - 1) * expected(first, first)
    third = (
        groups * expected(cube)
        + 3 * groups * (groups - 1) * expected(square, first)
        + groups * (groups - 1) * (groups - 2) * expected(first, first, first)
    )
    return float(mean), float(second - mean**2), float(third - 3 * mean * second + 2 * mean**3)


def _pairs_exactly(weights: Floats, groups: int, total: int, statistic: int) -> tuple[float, float]:
    """Pr(pairs <= statistic) and Pr(pairs >= statistic) for independent counts with this law that sum to `total`."""
    sums, pairs = total + 1, statistic + 1
    shape = (next_fast_len(2 * sums, real=True), next_fast_len(2 * pairs, real=True))

    def times(a: Floats, b: Floats) -> Floats:
        product = irfft2(rfft2(a, shape) * rfft2(b, shape), shape)[:sums, :pairs]
        return np.maximum(product, 0.0)

    one = np.zeros((sums, pairs))
    for count, weight in enumerate(weights[:sums]):
        if count * (count - 1) // 2 < pairs:
            one[count, count * (count - 1) // 2] = weight
    law, left = None, groups
    while left:
        if left & 1:
            law = one if law is None else times(law, one)
        left >>= 1
        one = times(one, one) if left else one
    assert law is not None
    size = next_fast_len(groups * (len(weights) - 1) + 1, real=True)
    every_sum = irfft(rfft(weights, size) ** groups, size)[total]
    inside = law[total] / every_sum
    return min(float(inside.sum()), 1.0), max(1.0 - float(inside[:statistic].sum()), 0.0)


def _dispersion(counts: Ints, capacity: int | None) -> tuple[float, float, tuple[float, float]]:
    """The number of pairs within the counts, its expected value given the total, and the two tails."""
    total, groups, statistic = int(counts.sum()), len(counts), _pairs(counts)
    mean, variance, third = _pair_moments(total, groups, capacity)
    if total <= EXACT_PICKS and statistic <= EXACT_PAIRS and variance > 0:
        share = total / groups
        orders = np.arange(min(total, capacity or total) + 1)
        if capacity is None:
            weights = np.exp(orders * np.log(share) - share - np.cumsum(np.log(np.maximum(orders, 1))))
        else:
            weights = _stats().binom.pmf(orders, capacity, share / capacity)
        return statistic, mean, _pairs_exactly(weights, groups, total, statistic)
    return statistic, mean, _lattice_tails(statistic, mean, variance, third)


def _shared_law(firsts: Ints, seconds: Ints, canaries: int, statistic: int) -> tuple[float, float]:
    """Both tails at `statistic` of the number of canaries that pairs of rounds share, summed over pairs that form chains."""
    scale = firsts * seconds / canaries
    rest = (1 - firsts / canaries) * (1 - seconds / canaries)
    mean, variance = float(scale.sum()), float((scale * rest).sum() * canaries / max(canaries - 1, 1))
    bend = (1 - 2 * firsts / canaries) * (1 - 2 * seconds / canaries) * canaries / max(canaries - 2, 1)
    third = float((scale * rest * bend).sum() * canaries / max(canaries - 1, 1))
    if variance > EXACT_VARIANCE:
        return _lattice_tails(statistic, mean, variance, third)
    pairs, times = np.unique(np.sort(np.stack([firsts, seconds]), axis=0), axis=1, return_counts=True)
    floor = int(np.maximum(pairs.sum(axis=0) - canaries, 0) @ times)  # canaries that must be shared
    size = next_fast_len(int(min(pairs[0] @ times, mean + 20 * sqrt(variance) + 60)) - floor + 1, real=True)
    transform = np.ones(size // 2 + 1, dtype=complex)
    for (few, many), repeats in zip(pairs.T.tolist(), times.tolist(), strict=True):
        least = max(few + many - canaries, 0)
        law = _stats().hypergeom.pmf(np.arange(least, few + 1), canaries, many, few)
        folded = np.zeros(size)
        np.add.at(folded, np.arange(len(law)) % size, law)
        transform *= rfft(folded) ** repeats
    masses = np.maximum(irfft(transform, size), 0.0)
    at = statistic - floor
    if at >= size:
        return 1.0, 0.0
    return min(float(masses[: at + 1].sum()), 1.0), min(float(masses[at:].sum()), 1.0)


# --- tests


def _tests(picks: _Picks, sampling: Sampling) -> list[SamplerTest]:
    """The tests of a claimed scheme."""
    if isinstance(sampling, Poisson):
        own = [*_independent_round_tests(picks, sampling.rate), *_poisson_cohort_tests(picks)]
    elif isinstance(sampling, FixedSize):
        own = [*_independent_round_tests(picks, sampling.rate, sampling), *_constant_cohort_tests(picks, sampling)]
    else:
        own = _epoch_tests(picks, sampling.rounds)
        own += _allocation_tests(picks, sampling) if isinstance(sampling, RandomAllocation) else []
        own += _constant_cohort_tests(picks, sampling) if isinstance(sampling, Shuffled) else []
    return [_rate_test(picks, sampling.rate), *_repeat_tests(picks), *own]


def _rate_test(picks: _Picks, rate: float) -> SamplerTest:
    return SamplerTest(
        name="rate",
        title="picks in total: more than claimed",
        statistic=float(picks.total),
        expected=picks.cells * rate,
        p_value=float(_stats().binom.sf(picks.total - 1, picks.cells, rate)),
    )


def _repeat_tests(picks: _Picks) -> list[SamplerTest]:
    """No round picks a canary twice."""
    return [
        SamplerTest(
            name="twice in a round",
            title="canaries picked twice in the same round",
            statistic=float(picks.repeated),
            expected=0.0,
            p_value=float(picks.repeated == 0),
        )
    ]


def _independent_round_tests(picks: _Picks, rate: float, fixed: FixedSize | None = None) -> list[SamplerTest]:
    """The tests of schemes whose rounds are independent and treat all canaries alike."""
    return [
        _most_picked_test(picks, rate),
        _canaries_test(picks, fixed),
        _rounds_test(picks, fixed),
        _halves_test(picks),
        _adjacent_test(picks),
        _any_lag_test(picks),
        _together_test(picks),
    ]


def _most_picked_test(picks: _Picks, rate: float) -> SamplerTest:
    """The canary that is picked most often, corrected for the number of canaries."""
    most = int(picks.per_canary.max())
    return SamplerTest(
        name="most picked",
        title="rounds of the canary that is picked most often",
        statistic=float(most),
        expected=picks.rounds * rate,
        p_value=min(1.0, picks.canaries * float(_stats().binom.sf(most - 1, picks.rounds, rate))),
    )


def _halves_test(picks: _Picks) -> SamplerTest:
    """The number of picks in the first half of the rounds, given all picks."""
    half = picks.rounds // 2
    first, capacity = int(picks.per_round[:half].sum()), half * picks.canaries
    lower = float(_stats().hypergeom.cdf(first, picks.cells, capacity, picks.total))
    upper = float(_stats().hypergeom.sf(first - 1, picks.cells, capacity, picks.total))
    return SamplerTest(
        name="halves",
        title="picks in the first half of the rounds: the rate changes",
        statistic=float(first),
        expected=picks.total * half / picks.rounds,
        p_value=_two_sided((lower, upper)),
    )


def _canaries_test(picks: _Picks, fixed: FixedSize | None) -> SamplerTest:
    """Dispersion of the rounds of a canary. For fixed sizes the law is conditional on the canaries of each round."""
    statistic, mean, tails = _dispersion(picks.per_canary, picks.rounds)
    if fixed is not None and picks.total > EXACT_PICKS and picks.canaries > 2:
        sizes, k = picks.per_round.astype(np.float64), picks.canaries
        spread = sizes * (1 - sizes / k)
        bend = 1 - 2 * sizes / k
        mean = (sizes.sum() ** 2 - (sizes**2).sum()) / (2 * k)
        variance = (spread.sum() ** 2 - (spread**2).sum()) / (2 * (k - 1))
        skewed = spread * bend
        third = (skewed.sum() ** 2 - (skewed**2).sum()) / 2 * k / ((k - 1) * (k - 2))
        s1, s2, s3 = spread.sum(), (spread**2).sum(), (spread**3).sum()
        third += (s1**3 - 3 * s1 * s2 + 2 * s3) / (k - 1) ** 2  # six times the sum over triples of rounds
        tails = _lattice_tails(statistic, float(mean), float(variance), float(third))
    return SamplerTest(
        name="canaries",
        title="pairs of rounds of the same canary: some canaries more often than others",
        statistic=statistic,
        expected=float(mean),
        p_value=_two_sided(tails),
    )


def _rounds_test(picks: _Picks, fixed: FixedSize | None) -> SamplerTest:
    """Dispersion of the canaries of a round. With a fixed size it is smaller if canaries are much of the population."""
    if fixed is None or fixed.population < picks.canaries:
        statistic, mean, tails = _dispersion(picks.per_round, picks.canaries)
    else:
        size = min(max(round(picks.rate * fixed.population), 1), fixed.population)
        orders = np.arange(min(picks.canaries, size) + 1)
        weights = _stats().hypergeom.pmf(orders, fixed.population, picks.canaries, size)
        counts = picks.per_round
        statistic, total, rounds = _pairs(counts), int(counts.sum()), picks.rounds
        share = total / rounds
        about = orders - weights @ orders
        variance, fourth = float(weights @ about**2), float(weights @ about**4)
        mean = total * (share - 1) / 2 + (rounds - 1) * variance / 2
        if rounds == 1 or variance < 1e-12:
            tails = (1.0, 1.0)
        elif total <= EXACT_PICKS and statistic <= EXACT_PAIRS:
            tails = _pairs_exactly(weights, rounds, total, statistic)
        else:  # half the sum of squares about the mean, a gamma law with the variance of a sample variance
            relative = (fourth / variance**2 - 3) / rounds + 2 / (rounds - 1)
            scale = (rounds - 1) * variance / 2
            tails = _lattice_tails(statistic, mean, relative * scale**2, 2 * relative**2 * scale**3)
    return SamplerTest(
        name="rounds",
        title="pairs of canaries in the same round: some rounds fuller than others",
        statistic=statistic,
        expected=float(mean),
        p_value=_two_sided(tails),
    )


def _adjacent_test(picks: _Picks) -> SamplerTest:
    """How often a canary is picked in two adjacent rounds."""
    statistic, mean, tails = _lag_tails(picks, 1) if len(picks.in_time) > 1 else (0.0, 0.0, (1.0, 1.0))
    return SamplerTest(
        name="adjacent rounds",
        title="canaries picked again in the next round",
        statistic=statistic,
        expected=mean,
        p_value=_two_sided(tails),
    )


def _lag_tails(picks: _Picks, lag: int) -> tuple[float, float, tuple[float, float]]:
    places = picks.in_time
    both = (places[:-lag] >= 0) & (places[lag:] >= 0)
    firsts, seconds = picks.per_round[places[:-lag][both]], picks.per_round[places[lag:][both]]
    statistic = float(picks.by_lag[lag])
    if not len(firsts):
        return statistic, 0.0, (1.0, 1.0)
    mean = float((firsts * seconds).sum() / picks.canaries)
    return statistic, mean, _shared_law(firsts, seconds, picks.canaries, int(statistic))


def _lag_moments(picks: _Picks) -> tuple[Floats, Floats, Floats]:
    """Mean and second and third central moments of the returns after 0, 1, 2, ... rounds, given the sizes of rounds."""
    sizes, k = picks.per_round.astype(np.float64), picks.canaries
    spread = sizes * (1 - sizes / k)
    mean = picks.lagged(sizes) / k
    variance = picks.lagged(spread) / max(k - 1, 1)
    third = picks.lagged(spread * (1 - 2 * sizes / k)) / max(k - 1, 1) * k / max(k - 2, 1)
    variance[0] = 0.0
    return mean, variance, third


def _any_lag_test(picks: _Picks) -> SamplerTest:
    """The lag from 2 on at which canaries return most unusually often; corrected for the number of lags."""
    mean, variance, third = _lag_moments(picks)
    usable = variance > 1e-6
    usable[:2] = False
    lags = np.flatnonzero(usable)
    best, statistic, expected, p_value = 0, 0.0, 0.0, 1.0
    if len(lags):
        deviation = np.sqrt(variance[lags])
        scores = (picks.by_lag[lags] - 0.5 - mean[lags]) / deviation
        shape = 4 / np.maximum(np.abs(third[lags]) / deviation**3, 1e-3) ** 2  # accurate enough to choose the lag
        best = int(lags[np.argmin(gammaincc(shape, np.maximum(shape + np.sqrt(shape) * scores, 0.0)))])
        statistic, expected, (_, upper) = _lag_tails(picks, best)
        p_value = min(1.0, len(lags) * upper)
    return SamplerTest(
        name="any lag",
        title=f"canaries picked again {best} rounds later, the most unusual lag" if best else "canaries that return",
        statistic=statistic,
        expected=expected,
        p_value=p_value,
    )


def _together_test(picks: _Picks) -> SamplerTest:
    """Do the same canaries meet again and again? Tested on the squared number of canaries that two rounds share.

    For each pair of rounds, G canaries in common give (G - μ)² - b(G - μ) - σ², which is uncorrelated with G; b is the
    third moment over the variance.
    """
    picks = picks.first_canaries(min(LARGEST_SIDE, max(LARGEST_TABLE // picks.rounds, 4)))
    statistic, p_value = 0.0, 1.0
    k, rounds = picks.canaries, picks.rounds
    if k >= 4 and rounds >= 2 and 0 < picks.total < picks.cells:
        sizes = picks.per_round.astype(np.float64)
        slope, spread = 1 - 2 * sizes / k, sizes * (1 - sizes / k)
        skewing = k / (k - 2)

        def met(values: Floats) -> float:
            """Sum over pairs of rounds of G times the values of both."""
            per_canary = np.bincount(picks.canary, weights=values[picks.place], minlength=k)
            return float((per_canary**2).sum() - (values**2 * sizes).sum()) / 2

        def over_pairs(values: Floats) -> float:
            return float(values.sum() ** 2 - (values**2).sum()) / 2

        squares = (picks.squared_meetings - float((sizes**2).sum())) / 2
        about_mean = squares - 2 * met(sizes) / k + over_pairs(sizes**2) / k**2
        linear = skewing * (met(slope) - over_pairs(slope * sizes) / k)
        statistic = about_mean - linear - over_pairs(spread) / (k - 1)
        variance, third = _meeting_moments(picks.per_round, k)
        dimension = k * (k - 3) / 2
        third += sqrt(8 / dimension) * variance**1.5
        if variance > 1e-9 and min(k, rounds) >= FEWEST:
            p_value = _tail(statistic - 1, variance, third)[1]
        elif variance > 1e-9 and statistic > 0:
            p_value = variance / (variance + statistic**2)  # Cantelli's inequality
    return SamplerTest(
        name="together",
        title="the same canaries meet in several rounds",
        statistic=statistic,
        expected=0.0,
        p_value=p_value,
    )


def _meeting_moments(sizes: Ints, canaries: int) -> tuple[float, float]:
    """Variance of the statistic of `_together_test`, and its third moment without triples of rounds."""
    values, times = np.unique(sizes, return_counts=True)
    n, k, m = float(canaries), values[:, None].astype(np.float64), values[None, :].astype(np.float64)
    product = k * m * (n - k) * (n - m)
    spread = product / (n**2 * (n - 1))
    safe = np.where(product > 0, product, 1.0)
    excess = (n - 1) * n**2 * (n * (n + 1) - 6 * k * (n - k) - 6 * m * (n - m)) + 6 * product * (5 * n - 6)
    excess = excess / (safe * (n - 2) * (n - 3)) if canaries > 3 else np.zeros_like(safe)
    slope = (n - 2 * k) * (n - 2 * m) / (n * (n - 2))
    variances = np.where(product > 0, (excess + 2) * spread**2 - slope**2 * spread, 0.0)
    thirds = 8 * spread**3 + 4 * (k * m / n) ** 2
    pairs = np.outer(times, times) - np.diag(times)
    return float((variances * pairs).sum() / 2), float((thirds * pairs).sum() / 2)


def _poisson_cohort_tests(picks: _Picks) -> list[SamplerTest]:
    """Tests that cohort sizes are binomial: neither more even nor more varied, and no size repeats too often."""
    if picks.cohorts is None:
        return []
    sizes = picks.cohorts
    low, high = picks.rate_interval(1e-3)
    statistic, total = float(_pairs(sizes)), int(sizes.sum())
    mean, p_value, tie = statistic, 1.0, 1.0
    most = int(np.unique(sizes, return_counts=True)[1].max())
    if len(sizes) > 1 and total:
        share = total / len(sizes)

        def tails(rate: float) -> tuple[float, tuple[float, float]]:
            population = max(round(share / rate), int(sizes.max()), 1)
            mean, variance, third = _pair_moments(total, len(sizes), population)
            return mean, _lattice_tails(statistic, mean, variance, third)

        lower = tails(high)[1][0] if high < 1 else 1.0
        mean, (_, upper) = tails(max(low, 1e-9))
        p_value = min(1.0, 2 * min(lower, upper))
        if high < 1:
            wide = 10 * sqrt(share) + 10
            around = np.arange(max(int(share - wide), 0), int(share + wide) + 1)
            masses = _stats().binom.pmf(around, max(round(share / high), 1), high)
            tie = min(1.0, float(_stats().binom.sf(most - 1, len(sizes), masses).sum()))
    return [
        SamplerTest(
            name="cohort sizes",
            title="pairs within the cohorts: sizes more even, or more varied, than Poisson sampling makes them",
            statistic=statistic,
            expected=mean,
            p_value=p_value,
        ),
        SamplerTest(
            name="same size",
            title="rounds with the most common cohort size",
            statistic=float(most),
            expected=float(_expected_ties(sizes, picks.rate)),
            p_value=tie,
        ),
    ]


def _expected_ties(sizes: Ints, rate: float) -> float:
    """The expected number of rounds with the most probable size."""
    deviation = sqrt(max(float(sizes.mean()) * (1 - rate), 1e-9))
    return len(sizes) * min(1.0, 1 / (deviation * sqrt(2 * np.pi)))


def _even(sizes: Ints) -> bool:
    """Whether cohort sizes differ by at most 1, or the largest is the most common (dropouts make cohorts smaller)."""
    values, times = np.unique(sizes, return_counts=True)
    return bool(sizes.max() - sizes.min() <= 1 or (values[np.argmax(times)] == values[-1] and times.max() > 1))


def _constant_cohort_tests(picks: _Picks, sampling: FixedSize | Shuffled) -> list[SamplerTest]:
    """Tests that cohorts have the same size; smaller ones are dropouts, or the last cohort of an epoch."""
    if picks.cohorts is None:
        return []
    even = _even(picks.cohorts)
    if isinstance(sampling, FixedSize):
        even = even or int(picks.cohorts.max()) <= sampling.size
    return [
        SamplerTest(
            name="cohort sizes",
            title="the variance of cohort sizes: they must be equal",
            statistic=float(picks.cohorts.var()),
            expected=0.0,
            p_value=float(even),
        )
    ]


def _epoch_tests(picks: _Picks, length: int) -> list[SamplerTest]:
    """Tests that canaries are picked at most once in an epoch, and that no order repeats from one epoch to the next."""
    tests = [_once_test(picks, length), _order_test(picks, length), _epochs_together_test(picks, length)]
    positions = _dispersion(np.bincount((picks.numbers[picks.place] - 1) % length, minlength=length), None)
    if len(picks.numbers) == length * (len(np.unique((picks.numbers - 1) // length))) > length:
        tests.append(
            SamplerTest(
                name="positions",
                title="pairs of picks at the same position of an epoch: some positions more often than others",
                statistic=positions[0],
                expected=positions[1],
                p_value=min(1.0, 2 * positions[2][1]),
            )
        )
    return tests


def _epoch_rounds_test(picks: _Picks, length: int) -> SamplerTest:
    """Test of the canaries of a round, given those of its epoch: multinomial under random allocation."""
    statistic, mean, tails = _epoch_dispersion(picks.per_round, (picks.numbers - 1) // length)
    return SamplerTest(
        name="rounds",
        title="pairs of canaries in the same round: some rounds fuller than others",
        statistic=statistic,
        expected=mean,
        p_value=_two_sided(tails),
    )


def _epoch_dispersion(counts: Ints, epochs: Ints) -> tuple[float, float, tuple[float, float]]:
    """As `_dispersion`, within each epoch; the moments add up."""
    parts = [counts[epochs == epoch] for epoch in np.unique(epochs)]
    if len(parts) == 1:
        return _dispersion(parts[0], None)
    moments = {key: np.array(_pair_moments(*key, None)) for key in {(int(part.sum()), len(part)) for part in parts}}
    mean, variance, third = np.sum([moments[int(part.sum()), len(part)] for part in parts], axis=0)
    statistic = float(sum(_pairs(part) for part in parts))
    return statistic, float(mean), _lattice_tails(statistic, float(mean), float(variance), float(third))


def _allocation_tests(picks: _Picks, sampling: RandomAllocation) -> list[SamplerTest]:
    """Tests that rounds, and cohorts if known, fill up as in balls and bins: one ball per client and epoch."""
    tests = [_epoch_rounds_test(picks, sampling.rounds)]
    if picks.cohorts is not None:
        statistic, mean, tails = _epoch_dispersion(picks.cohorts, (picks.cohort_numbers - 1) // sampling.rounds)
        tests.append(
            SamplerTest(
                name="cohort sizes",
                title="pairs within the cohorts: sizes more even, or more varied, than independent draws make them",
                statistic=statistic,
                expected=mean,
                p_value=_two_sided(tails),
            )
        )
    return tests


def _once_test(picks: _Picks, length: int) -> SamplerTest:
    """Counts repeated picks of a canary in the same epoch; a canary that is missing leaks less, so it passes."""
    again = _again_in_epoch(picks, length)
    return SamplerTest(
        name="once an epoch",
        title="canaries picked a second time in an epoch",
        statistic=float(again),
        expected=0.0,
        p_value=float(again == 0),
    )


def _again_in_epoch(picks: _Picks, length: int) -> int:
    epochs = (picks.numbers[picks.place] - 1) // length
    return picks.total - len(_distinct(epochs * picks.canaries + picks.canary))


def _order_counts(picks: _Picks, length: int) -> tuple[Ints, Ints]:
    """The number of returns after 1, 2, ... rounds, and of picks followed, that much later, by a round of another epoch."""
    span = len(picks.in_time)
    observed = picks.in_time >= 0
    sizes = np.where(observed, picks.per_round[picks.in_time], 0)
    epochs = (np.arange(span) + int(picks.numbers[0]) - 1) // length
    size = next_fast_len(2 * span, real=True)
    products = irfft(np.conj(rfft(sizes.astype(np.float64), size)) * rfft(observed.astype(np.float64), size), size)
    trials = np.rint(products[1:span]).astype(np.int64)
    for lag in range(1, min(length, span)):  # no canary returns within an epoch
        trials[lag - 1] -= int((sizes[:-lag] * observed[lag:])[epochs[:-lag] == epochs[lag:]].sum())
    return picks.by_lag[1:span].astype(np.int64), trials


def _order_test(picks: _Picks, length: int) -> SamplerTest:
    """The lag at which canaries return to a round of another epoch most unusually often; corrected for the lags."""
    returns, trials = _order_counts(picks, length)
    tails = np.where(trials > 0, _stats().binom.sf(returns - 1, np.maximum(trials, 1), 1 / length), 1.0)
    usable = int((trials > 0).sum())
    best = int(np.argmin(tails)) if usable else 0
    return SamplerTest(
        name="order",
        title=f"canaries picked again {best + 1} rounds later" if usable else "canaries that return in the same order",
        statistic=float(returns[best]) if usable else 0.0,
        expected=float(trials[best] / length) if usable else 0.0,
        p_value=min(1.0, usable * float(tails[best])) if usable and length > 1 else 1.0,
    )


def _epochs_together_test(picks: _Picks, length: int) -> SamplerTest:
    """Do the same canaries meet again in other epochs? Tested on the pairs of canaries that meet in two epochs."""
    picks = picks.first_canaries(min(LARGEST_SIDE, max(LARGEST_TABLE // picks.rounds, 4)))
    epochs = (picks.numbers - 1) // length
    pairs = comb(picks.canaries, 2)
    within = np.bincount(epochs - epochs[0], weights=picks.per_round * (picks.per_round - 1) / 2)
    shares = within / max(pairs, 1)
    products = float(shares.sum() ** 2 - (shares**2).sum()) / 2
    statistic, mean, p_value = 0.0, pairs * products, 1.0
    if mean > 0 and length > 1:
        sizes = picks.per_round.astype(np.float64)
        # Over pairs of rounds, the pairs of canaries they share; rounds of one epoch share no canary.
        squares = (picks.squared_meetings - float((sizes**2).sum())) / 2
        statistic = (squares - float(_pairs(picks.per_canary))) / 2
        odds = shares * (1 - shares)
        variance = pairs * float(odds.sum() ** 2 - (odds**2).sum()) / 2
        epoch_pairs = max(comb(int((shares > 0).sum()), 2), 1)
        skewness = sqrt(8 / epoch_pairs) / (length - 1) + sqrt(8 / max(pairs, 1))
        p_value = _tail(statistic - 0.5 - mean, variance, mean + skewness * variance**1.5)[1]
    return SamplerTest(
        name="together",
        title="pairs of canaries that meet in two epochs",
        statistic=statistic,
        expected=mean,
        p_value=p_value,
    )


# --- names


def _scheme_name(sampling: Sampling) -> Seen:
    return cast(Seen, sampling.scheme)


def _recognise(picks: _Picks, claimed: Sampling) -> tuple[Seen, tuple[Sampling, ...]]:
    """The name of a sampler that contradicts the claim, and the schemes that fit it, by elimination."""
    if picks.repeated:
        return "too many", ()
    epochs = _find_epochs(picks, claimed)
    return _recognise_epochs(epochs[0], claimed, epochs[1]) if epochs else _recognise_rounds(picks, claimed)


def _find_epochs(picks: _Picks, claimed: Sampling) -> tuple[_Picks, int] | None:
    """The picks with rounds counted from the start of an epoch, and the length of epochs; None if there are none.

    No canary is picked twice in an epoch, although independent rounds would have picked many twice.
    """
    if not picks.total:
        return None
    nearest = 1 / picks.rate
    lengths = [round(1 / claimed.rate), round(nearest), int(nearest), int(nearest) + 1]
    lengths += sorted(range(max(int(0.8 * nearest), 2), int(1.25 * nearest) + 2), key=lambda r: abs(r - nearest))[:60]
    order = np.lexsort((picks.place, picks.canary))
    times, canary = picks.numbers[picks.place[order]], picks.canary[order]
    same = canary[1:] == canary[:-1]
    firsts, gaps = times[:-1][same], np.diff(times)[same]
    for length in dict.fromkeys(lengths):
        if not 2 <= length <= int(picks.numbers[-1]):
            continue
        expected = picks.canaries * (picks.rounds / length) * (length * (length - 1) / 2) * picks.rate**2
        if picks.rounds < length:
            expected = picks.canaries * picks.rounds * (picks.rounds - 1) / 2 * picks.rate**2
        start = _epoch_start(firsts[gaps < length], gaps[gaps < length], length)
        if expected > 12 + np.log(length) and start is not None:
            shift = (1 - start) % length
            moved = replace(picks, numbers=picks.numbers + shift, cohort_numbers=picks.cohort_numbers + shift)
            return moved, length
    return None


def _epoch_start(firsts: Ints, gaps: Ints, length: int) -> int | None:
    """The first round of an epoch, 1 if possible, such that an epoch starts between any two close picks of a canary."""
    covered = np.zeros(2 * length + 1, dtype=np.int64)
    begin = (firsts + 1) % length
    np.add.at(covered, begin, 1)
    np.add.at(covered, begin + gaps, -1)
    covers = np.cumsum(covered)[: 2 * length]
    fits = np.flatnonzero(covers[:length] + covers[length:] == len(firsts))
    if not len(fits):
        return None
    return 1 if 1 % length in fits else int(fits[0])


def _periodic(scores: Floats) -> bool:
    """Whether returns peak at a lag of 2 or more and its multiples, far above the other lags; entry 0 is lag 1."""
    lags = np.arange(1, len(scores) + 1)
    best, period = 0.0, 0
    for one in range(2, len(scores) + 1):
        multiples = scores[one - 1 :: one]
        if (strength := float(multiples.sum()) / sqrt(len(multiples))) > best:
            best, period = strength, one
    if best < 5:
        return False
    multiples, others = scores[period - 1 :: period], scores[lags % period != 0]
    scatter = max(float(others[1:].std()), 1.0) / sqrt(len(multiples))  # lag 1 has its own pattern
    return bool(multiples.mean() - others.mean() > 7 * scatter)


def _in_bursts(picks: _Picks) -> bool:
    """Whether rounds differ so much, and without a trend, that canaries must be picked in groups."""
    share = picks.total / picks.rounds
    varied = picks.rounds > 1 and float(picks.per_round.var(ddof=1)) > 3 * share * (1 - picks.rate)
    return varied and not _drifts(picks.per_round, picks.canaries)


def _recognise_epochs(picks: _Picks, claimed: Sampling, length: int) -> tuple[Seen, tuple[Sampling, ...]]:
    tests = {test.name: test for test in [*_epoch_tests(picks, length), _epoch_rounds_test(picks, length)]}
    epochs = max(-(-claimed.total_rounds // length), 1)
    allocation, shuffled = RandomAllocation(length, epochs), Shuffled(length, epochs)
    rounds = tests["rounds"]
    returns, trials = _order_counts(picks, length)
    variance = trials / length * (1 - 1 / length)
    if not rounds.passed and _in_bursts(picks):
        return "clumped", ()
    if not tests["order"].passed and _periodic(_scores(returns - trials / length, variance)):
        return "repeated order", ()
    if not rounds.passed and rounds.high:
        return ("changing rate" if _drifts(picks.per_round, picks.canaries) else "clumped"), ()
    if not tests["together"].passed or not tests["order"].passed:
        return "clumped", ()
    if not tests.get("positions", rounds).passed and rounds.passed:
        return "changing rate", ()
    if picks.cohorts is None:
        return ("random_allocation or shuffled", (allocation, shuffled)) if rounds.passed else ("shuffled", (shuffled,))
    cohorts = _allocation_tests(picks, allocation)[-1]
    if _even(picks.cohorts) or not (rounds.passed and (cohorts.passed or cohorts.high)):
        return "shuffled", (shuffled,)
    return ("random_allocation", (allocation,)) if cohorts.passed else ("other", ())


def _recognise_rounds(picks: _Picks, claimed: Sampling) -> tuple[Seen, tuple[Sampling, ...]]:
    own = [*_independent_round_tests(picks, picks.rate), *_poisson_cohort_tests(picks)]
    tests = {test.name: test for test in own}
    failed = {test.name for test in own if not test.passed}
    canaries, rounds = tests["canaries"], tests["rounds"]
    # Uneven canaries return more often after any number of rounds; the question here is whether one lag stands out.
    ratio = max(canaries.statistic / canaries.expected, 1.0) if canaries.expected else 1.0
    mean, variance, _ = _lag_moments(picks)
    scores = _scores((picks.by_lag - ratio * mean)[1:], ratio * variance[1:])
    if "rounds" in failed and _in_bursts(picks):
        return "clumped", ()
    if failed & {"any lag", "adjacent rounds"} and _periodic(scores):
        return "repeated order", ()
    if _spaced(picks.by_lag, mean):
        return "spaced", ()
    if "adjacent rounds" in failed and scores[0] > max(4.5, 4 * float(scores[len(scores) // 4 :].std())):
        return "adjacent rounds", ()
    if "rounds" in failed and rounds.high:
        return ("changing rate" if _drifts(picks.per_round, picks.canaries) else "clumped"), ()
    # Uneven canaries meet more often too, in all pairs of rounds alike: by (ratio - 1) times the mean.
    shared = ((ratio - 1) / picks.canaries) ** 2 * float((picks.per_round.astype(np.float64) ** 2).sum()) ** 2 / 2
    if "together" in failed and tests["together"].statistic > 3 * shared:
        return "clumped", ()
    if "most picked" in failed or ("canaries" in failed and canaries.high):
        worst = picks.worst_rate
        return "uneven", ((Poisson(worst, claimed.total_rounds),) if worst > claimed.rate else ())
    if "halves" in failed:
        return "changing rate", ()
    if failed & {"canaries", "adjacent rounds", "any lag"}:
        return "other", ()
    if failed & {"rounds", "same size"} or ("cohort sizes" in failed and not tests["cohort sizes"].high):
        return "fixed_size", (_fixed_size(picks, claimed.total_rounds),)
    if failed or not picks.total:
        return "other", ()
    return "poisson", (Poisson(picks.rate, claimed.total_rounds),)


def _scores(above: Floats, variance: Floats) -> Floats:
    """Standard scores; 0 if the variance is at most 1, since such scores have long tails."""
    usable = variance > 1
    return np.where(usable, above / np.sqrt(np.where(usable, variance, 1.0)), 0.0)


def _spaced(returns: Floats, expected: Floats) -> bool:
    """Whether no canary returns within at least two rounds, although many would by chance."""
    lags = np.flatnonzero(returns[1:] > 0)
    wait = int(lags[0]) if len(lags) else len(returns) - 1
    return wait >= 2 and float(expected[1 : wait + 1].sum()) > 12


def _drifts(counts: Ints, canaries: int) -> bool:
    """Whether the canaries per round follow a trend: neighbouring rounds are alike, or each half of the run is steady."""
    if len(counts) < 4:
        return False
    about = counts - counts.mean()
    alike = float((about[1:] * about[:-1]).sum()) / max(float((about**2).sum()), 1e-9)
    halves = np.array_split(counts, 2)
    return alike > max(4 / sqrt(len(counts)), 0.3) or all(_dispersion(half, canaries)[2][1] > 0.01 for half in halves)


def _fixed_size(picks: _Picks, total_rounds: int) -> FixedSize:
    """The fixed-size scheme that fits: its population from the cohorts, or from how evenly rounds are filled."""
    if picks.cohorts is not None:
        values, times = np.unique(picks.cohorts, return_counts=True)
        size = max(int(values[np.argmax(times)]), 1)
        return FixedSize(size, max(round(size / picks.rate), size), total_rounds)
    share = picks.total / picks.rounds
    ratio = float(picks.per_round.var(ddof=1)) / (share * (1 - picks.rate))
    population = max(round(picks.canaries / (1 - min(ratio, 0.999))), picks.canaries)
    return FixedSize(max(round(picks.rate * population), 1), population, total_rounds)
