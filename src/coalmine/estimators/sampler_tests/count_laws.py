"""Laws of counts of random picks: exact for few picks, else a gamma law with three exact moments.

No random numbers are used, so the same picks always give the same p-values.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import perm, sqrt

import numpy as np
from scipy.fft import irfft, irfft2, next_fast_len, rfft, rfft2
from scipy.special import gammainc, gammaincc, ndtr

from coalmine.argument_checks import Floats
from coalmine.estimators.sampler_tests.picks import Ints, scipy_stats

EXACT_PICKS = 100  # with at most this many picks, and EXACT_PAIRS pairs of them, the law of a dispersion is exact
EXACT_PAIRS = 400
EXACT_VARIANCE = 400.0  # up to this variance the law of shared canaries is convolved; above it, three moments are used


@dataclass(frozen=True)
class Count:
    """An observed count, its expected value, and the probabilities of at most and at least as many."""

    observed: float
    expected: float
    lower: float
    upper: float

    @property
    def two_sided(self) -> float:
        """The two-sided p-value."""
        return min(1.0, 2 * min(self.lower, self.upper))


def tail(above: float, variance: float, third: float) -> tuple[float, float]:
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


def lattice_tails(statistic: float, mean: float, variance: float, third: float) -> tuple[float, float]:
    """Pr(X <= statistic) and Pr(X >= statistic) for a whole number, with the correction for continuity."""
    if variance < 1e-9:
        return 1.0, 1.0
    return tail(statistic + 0.5 - mean, variance, third)[0], tail(statistic - 0.5 - mean, variance, third)[1]


def pairs_within(counts: Ints) -> int:
    """The number of pairs within groups of these sizes: the measure of every dispersion here."""
    return int((counts * (counts - 1) // 2).sum())


def pair_moments(total: int, groups: int, capacity: int | None) -> tuple[float, float, float]:
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


def pairs_exactly(weights: Floats, groups: int, total: int, statistic: int) -> tuple[float, float]:
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


def dispersion(counts: Ints, capacity: int | None) -> Count:
    """The number of pairs within the counts, given their total; each has room for `capacity`, None if without limit."""
    total, groups, statistic = int(counts.sum()), len(counts), pairs_within(counts)
    mean, variance, third = pair_moments(total, groups, capacity)
    if total <= EXACT_PICKS and statistic <= EXACT_PAIRS and variance > 0:
        share = total / groups
        orders = np.arange(min(total, capacity or total) + 1)
        if capacity is None:
            weights = np.exp(orders * np.log(share) - share - np.cumsum(np.log(np.maximum(orders, 1))))
        else:
            weights = scipy_stats().binom.pmf(orders, capacity, share / capacity)
        return Count(statistic, mean, *pairs_exactly(weights, groups, total, statistic))
    return Count(statistic, mean, *lattice_tails(statistic, mean, variance, third))


def grouped_dispersion(counts: Ints, groups: Ints) -> Count:
    """As `dispersion` without a limit, within each group of counts; the moments add up."""
    parts = [counts[groups == group] for group in np.unique(groups)]
    if len(parts) == 1:
        return dispersion(parts[0], None)
    moments = {key: np.array(pair_moments(*key, None)) for key in {(int(part.sum()), len(part)) for part in parts}}
    mean, variance, third = np.sum([moments[int(part.sum()), len(part)] for part in parts], axis=0)
    statistic = float(sum(pairs_within(part) for part in parts))
    return Count(statistic, float(mean), *lattice_tails(statistic, float(mean), float(variance), float(third)))


def shared_law(firsts: Ints, seconds: Ints, canaries: int, statistic: int) -> tuple[float, float]:
    """Both tails at `statistic` of the number of canaries that pairs of rounds share, summed over pairs that form chains."""
    scale = firsts * seconds / canaries
    rest = (1 - firsts / canaries) * (1 - seconds / canaries)
    mean, variance = float(scale.sum()), float((scale * rest).sum() * canaries / max(canaries - 1, 1))
    bend = (1 - 2 * firsts / canaries) * (1 - 2 * seconds / canaries) * canaries / max(canaries - 2, 1)
    third = float((scale * rest * bend).sum() * canaries / max(canaries - 1, 1))
    if variance > EXACT_VARIANCE:
        return lattice_tails(statistic, mean, variance, third)
    pairs, times = np.unique(np.sort(np.stack([firsts, seconds]), axis=0), axis=1, return_counts=True)
    floor = int(np.maximum(pairs.sum(axis=0) - canaries, 0) @ times)  # canaries that must be shared
    size = next_fast_len(int(min(pairs[0] @ times, mean + 20 * sqrt(variance) + 60)) - floor + 1, real=True)
    transform = np.ones(size // 2 + 1, dtype=complex)
    for (few, many), repeats in zip(pairs.T.tolist(), times.tolist(), strict=True):
        least = max(few + many - canaries, 0)
        law = scipy_stats().hypergeom.pmf(np.arange(least, few + 1), canaries, many, few)
        folded = np.zeros(size)
        np.add.at(folded, np.arange(len(law)) % size, law)
        transform *= rfft(folded) ** repeats
    masses = np.maximum(irfft(transform, size), 0.0)
    at = statistic - floor
    if at >= size:
        return 1.0, 0.0
    return min(float(masses[: at + 1].sum()), 1.0), min(float(masses[at:].sum()), 1.0)
