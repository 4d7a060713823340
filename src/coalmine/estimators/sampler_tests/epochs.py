"""Tests of schemes that pick each client once in each epoch: random allocation and shuffling."""

from math import comb, sqrt

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from coalmine.estimators.sampler_tests.count_laws import dispersion, grouped_dispersion, pairs_within, tail
from coalmine.estimators.sampler_tests.picks import Ints, Picks, distinct, scipy_stats
from coalmine.estimators.sampler_tests.sampler_test import SamplerTest


def epoch_tests(picks: Picks, length: int) -> list[SamplerTest]:
    """Tests that canaries are picked at most once in an epoch, and that no order repeats from one epoch to the next."""
    tests = [_once_test(picks, length), _order_test(picks, length), _epochs_together_test(picks, length)]
    positions = dispersion(np.bincount((picks.numbers[picks.place] - 1) % length, minlength=length), None)
    if len(picks.numbers) == length * (len(np.unique((picks.numbers - 1) // length))) > length:
        tests.append(
            SamplerTest(
                name="positions",
                title="pairs of picks at the same position of an epoch: some positions more often than others",
                statistic=positions.observed,
                expected=positions.expected,
                p_value=min(1.0, 2 * positions.upper),
            )
        )
    return tests


def epoch_rounds_test(picks: Picks, length: int) -> SamplerTest:
    """Test of the canaries of a round, given those of its epoch: multinomial under random allocation."""
    return SamplerTest.two_sided(
        "rounds",
        "pairs of canaries in the same round: some rounds fuller than others",
        grouped_dispersion(picks.per_round, (picks.numbers - 1) // length),
    )


def _once_test(picks: Picks, length: int) -> SamplerTest:
    """Counts repeated picks of a canary in the same epoch; a canary that is missing leaks less, so it passes."""
    again = _again_in_epoch(picks, length)
    return SamplerTest(
        name="once an epoch",
        title="canaries picked a second time in an epoch",
        statistic=float(again),
        expected=0.0,
        p_value=float(again == 0),
    )


def _again_in_epoch(picks: Picks, length: int) -> int:
    epochs = (picks.numbers[picks.place] - 1) // length
    return picks.total - len(distinct(epochs * picks.canaries + picks.canary))


def order_counts(picks: Picks, length: int) -> tuple[Ints, Ints]:
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


def _order_test(picks: Picks, length: int) -> SamplerTest:
    """The lag at which canaries return to a round of another epoch most unusually often; corrected for the lags."""
    returns, trials = order_counts(picks, length)
    tails = np.where(trials > 0, scipy_stats().binom.sf(returns - 1, np.maximum(trials, 1), 1 / length), 1.0)
    usable = int((trials > 0).sum())
    best = int(np.argmin(tails)) if usable else 0
    return SamplerTest(
        name="order",
        title=f"canaries picked again {best + 1} rounds later" if usable else "canaries that return in the same order",
        statistic=float(returns[best]) if usable else 0.0,
        expected=float(trials[best] / length) if usable else 0.0,
        p_value=min(1.0, usable * float(tails[best])) if usable and length > 1 else 1.0,
    )


def _epochs_together_test(picks: Picks, length: int) -> SamplerTest:
    """Do the same canaries meet again in other epochs? Tested on the pairs of canaries that meet in two epochs."""
    picks = picks.compared_canaries()
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
        statistic = (squares - float(pairs_within(picks.per_canary))) / 2
        odds = shares * (1 - shares)
        variance = pairs * float(odds.sum() ** 2 - (odds**2).sum()) / 2
        epoch_pairs = max(comb(int((shares > 0).sum()), 2), 1)
        skewness = sqrt(8 / epoch_pairs) / (length - 1) + sqrt(8 / max(pairs, 1))
        p_value = tail(statistic - 0.5 - mean, variance, mean + skewness * variance**1.5)[1]
    return SamplerTest(
        name="together",
        title="pairs of canaries that meet in two epochs",
        statistic=statistic,
        expected=mean,
        p_value=p_value,
    )
