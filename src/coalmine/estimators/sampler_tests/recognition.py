"""Which scheme fits a sampler that contradicts the claim, by elimination."""

from dataclasses import replace
from math import sqrt
from typing import Literal

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.estimators.sampler_tests.cohort_sizes import allocated_cohort_tests, equal_sizes, poisson_cohort_tests
from coalmine.estimators.sampler_tests.count_laws import dispersion
from coalmine.estimators.sampler_tests.epochs import epoch_rounds_test, epoch_tests, order_counts
from coalmine.estimators.sampler_tests.independent_rounds import independent_round_tests, lag_moments
from coalmine.estimators.sampler_tests.picks import Ints, Picks
from coalmine.estimators.sampler_tests.sampler_test import LEVEL, SamplerTest
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Sampling, Shuffled

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


def recognise(picks: Picks, claimed: Sampling) -> tuple[Seen, tuple[Sampling, ...]]:
    """The name of a sampler that contradicts the claim, and the schemes that fit it, by elimination."""
    if picks.repeated:
        return "too many", ()
    epochs = _find_epochs(picks, claimed)
    return _recognise_epochs(epochs[0], claimed, epochs[1]) if epochs else _recognise_rounds(picks, claimed)


def _find_epochs(picks: Picks, claimed: Sampling) -> tuple[Picks, int] | None:
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


def _in_bursts(picks: Picks) -> bool:
    """Whether rounds differ so much, and without a trend, that canaries must be picked in groups."""
    share = picks.total / picks.rounds
    varied = picks.rounds > 1 and float(picks.per_round.var(ddof=1)) > 3 * share * (1 - picks.rate)
    return varied and not _drifts(picks.per_round, picks.canaries)


def _recognise_epochs(picks: Picks, claimed: Sampling, length: int) -> tuple[Seen, tuple[Sampling, ...]]:
    tests = {test.name: test for test in [*epoch_tests(picks, length), epoch_rounds_test(picks, length)]}
    epochs = max(-(-claimed.total_rounds // length), 1)
    allocation, shuffled = RandomAllocation(length, epochs), Shuffled(length, epochs)
    rounds = tests["rounds"]
    returns, trials = order_counts(picks, length)
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
    (cohorts,) = allocated_cohort_tests(picks, length)
    if equal_sizes(picks.cohorts) or not (rounds.passed and (cohorts.passed or cohorts.high)):
        return "shuffled", (shuffled,)
    return ("random_allocation", (allocation,)) if cohorts.passed else ("other", ())


def _recognise_rounds(picks: Picks, claimed: Sampling) -> tuple[Seen, tuple[Sampling, ...]]:
    own = [*independent_round_tests(picks, picks.rate), *poisson_cohort_tests(picks)]
    tests = {test.name: test for test in own}
    failed = {test.name for test in own if not test.passed}
    if pattern := _pattern_in_time(picks, tests, failed):
        return pattern, ()
    canaries, cohorts = tests["canaries"], tests.get("cohort sizes")
    if "most picked" in failed or ("canaries" in failed and canaries.high):
        worst = picks.worst_rate(LEVEL)
        return "uneven", ((Poisson(worst, claimed.total_rounds),) if worst > claimed.rate else ())
    if "halves" in failed:
        return "changing rate", ()
    if failed & {"canaries", "adjacent rounds", "any lag"} or not picks.total:
        return "other", ()
    if failed & {"rounds", "same size"} or (cohorts and not cohorts.passed and not cohorts.high):
        return "fixed_size", (_fixed_size(picks, claimed.total_rounds),)
    return ("other", ()) if failed else ("poisson", (Poisson(picks.rate, claimed.total_rounds),))


def _pattern_in_time(picks: Picks, tests: dict[str, SamplerTest], failed: set[str]) -> Seen | None:
    """The pattern of rounds that depend on each other, or whose canaries move together; None if there is none."""
    canaries, rounds = tests["canaries"], tests["rounds"]
    # Uneven canaries return more often after any number of rounds; the question here is whether one lag stands out.
    ratio = max(canaries.statistic / canaries.expected, 1.0) if canaries.expected else 1.0
    mean, variance, _ = lag_moments(picks)
    scores = _scores((picks.by_lag - ratio * mean)[1:], ratio * variance[1:])
    if "rounds" in failed and _in_bursts(picks):
        return "clumped"
    if failed & {"any lag", "adjacent rounds"} and _periodic(scores):
        return "repeated order"
    if _spaced(picks.by_lag, mean):
        return "spaced"
    if "adjacent rounds" in failed and scores[0] > max(4.5, 4 * float(scores[len(scores) // 4 :].std())):
        return "adjacent rounds"
    if "rounds" in failed and rounds.high:
        return "changing rate" if _drifts(picks.per_round, picks.canaries) else "clumped"
    # Uneven canaries meet more often too, in all pairs of rounds alike: by (ratio - 1) times the mean.
    shared = ((ratio - 1) / picks.canaries) ** 2 * float((picks.per_round.astype(np.float64) ** 2).sum()) ** 2 / 2
    return "clumped" if "together" in failed and tests["together"].statistic > 3 * shared else None


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
    return alike > max(4 / sqrt(len(counts)), 0.3) or all(dispersion(half, canaries).upper > 0.01 for half in halves)


def _fixed_size(picks: Picks, total_rounds: int) -> FixedSize:
    """The fixed-size scheme that fits: its population from the cohorts, or from how evenly rounds are filled."""
    if picks.cohorts is not None:
        values, times = np.unique(picks.cohorts, return_counts=True)
        size = max(int(values[np.argmax(times)]), 1)
        return FixedSize(size, max(round(size / picks.rate), size), total_rounds)
    share = picks.total / picks.rounds
    ratio = float(picks.per_round.var(ddof=1)) / (share * (1 - picks.rate))
    population = max(round(picks.canaries / (1 - min(ratio, 0.999))), picks.canaries)
    return FixedSize(max(round(picks.rate * population), 1), population, total_rounds)
