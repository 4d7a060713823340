"""Tests of Poisson and fixed-size sampling, whose rounds are independent and treat all canaries alike.

Given how many canaries each round picked, both schemes pick a uniform subset in each round. Then the numbers of canaries
that two rounds share are hypergeometric, independent along any chain of rounds, and pairwise independent over all pairs of
rounds. The tests for lags and for canaries that move together rest on this.
"""

from math import sqrt

import numpy as np
from scipy.special import gammaincc

from coalmine.argument_checks import Floats
from coalmine.estimators.sampler_tests.count_laws import (
    EXACT_PAIRS,
    EXACT_PICKS,
    Count,
    dispersion,
    lattice_tails,
    pairs_exactly,
    pairs_within,
    shared_law,
    tail,
)
from coalmine.estimators.sampler_tests.picks import Ints, Picks, scipy_stats
from coalmine.estimators.sampler_tests.sampler_test import SamplerTest
from coalmine.estimators.sampling import FixedSize

FEWEST = 10  # with fewer rounds or canaries, the law of meetings is bounded and not approximated


def independent_round_tests(picks: Picks, rate: float, fixed: FixedSize | None = None) -> list[SamplerTest]:
    """The tests of schemes whose rounds are independent and treat all canaries alike."""
    return [
        _most_picked_test(picks, rate),
        _canaries_test(picks, fixed),
        _rounds_test(picks, fixed),
        _halves_test(picks),
        _adjacent_test(picks),
        _any_lag_test(picks),
        together_test(picks),
    ]


def _most_picked_test(picks: Picks, rate: float) -> SamplerTest:
    """The canary that is picked most often, corrected for the number of canaries."""
    most = int(picks.per_canary.max())
    return SamplerTest(
        name="most picked",
        title="rounds of the canary that is picked most often",
        statistic=float(most),
        expected=picks.rounds * rate,
        p_value=min(1.0, picks.canaries * float(scipy_stats().binom.sf(most - 1, picks.rounds, rate))),
    )


def _halves_test(picks: Picks) -> SamplerTest:
    """The number of picks in the first half of the rounds, given all picks."""
    half = picks.rounds // 2
    first, capacity = int(picks.per_round[:half].sum()), half * picks.canaries
    law = scipy_stats().hypergeom(picks.cells, capacity, picks.total)
    count = Count(float(first), picks.total * half / picks.rounds, float(law.cdf(first)), float(law.sf(first - 1)))
    return SamplerTest.two_sided("halves", "picks in the first half of the rounds: the rate changes", count)


def _canaries_test(picks: Picks, fixed: FixedSize | None) -> SamplerTest:
    """Dispersion of the rounds of a canary. For fixed sizes the law is conditional on the canaries of each round."""
    count = dispersion(picks.per_canary, picks.rounds)
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
        tails = lattice_tails(count.observed, float(mean), float(variance), float(third))
        count = Count(count.observed, float(mean), *tails)
    title = "pairs of rounds of the same canary: some canaries more often than others"
    return SamplerTest.two_sided("canaries", title, count)


def _rounds_test(picks: Picks, fixed: FixedSize | None) -> SamplerTest:
    """Dispersion of the canaries of a round. With a fixed size it is smaller if canaries are much of the population."""
    if fixed is None or fixed.population < picks.canaries:
        count = dispersion(picks.per_round, picks.canaries)
    else:
        count = _fixed_size_dispersion(picks, fixed.population)
    return SamplerTest.two_sided("rounds", "pairs of canaries in the same round: some rounds fuller than others", count)


def _fixed_size_dispersion(picks: Picks, population: int) -> Count:
    """The number of pairs of canaries within rounds that pick a fixed number of the population."""
    size = min(max(round(picks.rate * population), 1), population)
    orders = np.arange(min(picks.canaries, size) + 1)
    weights = scipy_stats().hypergeom.pmf(orders, population, picks.canaries, size)
    statistic, total, rounds = pairs_within(picks.per_round), picks.total, picks.rounds
    about = orders - weights @ orders
    variance, fourth = float(weights @ about**2), float(weights @ about**4)
    mean = total * (total / rounds - 1) / 2 + (rounds - 1) * variance / 2
    if rounds == 1 or variance < 1e-12:
        return Count(statistic, mean, 1.0, 1.0)
    if total <= EXACT_PICKS and statistic <= EXACT_PAIRS:
        return Count(statistic, mean, *pairs_exactly(weights, rounds, total, statistic))
    # half the sum of squares about the mean, a gamma law with the variance of a sample variance
    relative = (fourth / variance**2 - 3) / rounds + 2 / (rounds - 1)
    scale = (rounds - 1) * variance / 2
    return Count(statistic, mean, *lattice_tails(statistic, mean, relative * scale**2, 2 * relative**2 * scale**3))


def _adjacent_test(picks: Picks) -> SamplerTest:
    """How often a canary is picked in two adjacent rounds."""
    count = _returns(picks, 1) if len(picks.in_time) > 1 else Count(0.0, 0.0, 1.0, 1.0)
    return SamplerTest.two_sided("adjacent rounds", "canaries picked again in the next round", count)


def _returns(picks: Picks, lag: int) -> Count:
    """The number of picks of a canary that was picked `lag` rounds before."""
    places = picks.in_time
    both = (places[:-lag] >= 0) & (places[lag:] >= 0)
    firsts, seconds = picks.per_round[places[:-lag][both]], picks.per_round[places[lag:][both]]
    statistic = float(picks.by_lag[lag])
    if not len(firsts):
        return Count(statistic, 0.0, 1.0, 1.0)
    mean = float((firsts * seconds).sum() / picks.canaries)
    return Count(statistic, mean, *shared_law(firsts, seconds, picks.canaries, int(statistic)))


def lag_moments(picks: Picks) -> tuple[Floats, Floats, Floats]:
    """Mean and second and third central moments of the returns after 0, 1, 2, ... rounds, given the sizes of rounds."""
    sizes, k = picks.per_round.astype(np.float64), picks.canaries
    spread = sizes * (1 - sizes / k)
    mean = picks.lagged(sizes) / k
    variance = picks.lagged(spread) / max(k - 1, 1)
    third = picks.lagged(spread * (1 - 2 * sizes / k)) / max(k - 1, 1) * k / max(k - 2, 1)
    variance[0] = 0.0
    return mean, variance, third


def _any_lag_test(picks: Picks) -> SamplerTest:
    """The lag from 2 on at which canaries return most unusually often; corrected for the number of lags."""
    mean, variance, third = lag_moments(picks)
    usable = variance > 1e-6
    usable[:2] = False
    lags = np.flatnonzero(usable)
    best, returns = 0, Count(0.0, 0.0, 1.0, 1.0)
    if len(lags):
        deviation = np.sqrt(variance[lags])
        scores = (picks.by_lag[lags] - 0.5 - mean[lags]) / deviation
        shape = 4 / np.maximum(np.abs(third[lags]) / deviation**3, 1e-3) ** 2  # accurate enough to choose the lag
        best = int(lags[np.argmin(gammaincc(shape, np.maximum(shape + np.sqrt(shape) * scores, 0.0)))])
        returns = _returns(picks, best)
    return SamplerTest(
        name="any lag",
        title=f"canaries picked again {best} rounds later, the most unusual lag" if best else "canaries that return",
        statistic=returns.observed,
        expected=returns.expected,
        p_value=min(1.0, max(len(lags), 1) * returns.upper),
    )


def together_test(picks: Picks) -> SamplerTest:
    """Do the same canaries meet again and again? Tested on the squared number of canaries that two rounds share.

    For each pair of rounds, G canaries in common give (G - μ)² - b(G - μ) - σ², which is uncorrelated with G; b is the
    third moment over the variance.
    """
    picks = picks.compared_canaries()
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
        variance, third = meeting_moments(picks.per_round, k)
        dimension = k * (k - 3) / 2
        third += sqrt(8 / dimension) * variance**1.5
        if variance > 1e-9 and min(k, rounds) >= FEWEST:
            p_value = tail(statistic - 1, variance, third)[1]
        elif variance > 1e-9 and statistic > 0:
            p_value = variance / (variance + statistic**2)  # Cantelli's inequality
    return SamplerTest(
        name="together",
        title="the same canaries meet in several rounds",
        statistic=statistic,
        expected=0.0,
        p_value=p_value,
    )


def meeting_moments(sizes: Ints, canaries: int) -> tuple[float, float]:
    """Variance of the statistic of `together_test`, and its third moment without triples of rounds."""
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
