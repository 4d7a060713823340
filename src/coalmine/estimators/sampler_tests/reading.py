"""Does a pipeline's sampler do what its accountant assumes? All tests, and the scheme that fits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy.typing as npt

from coalmine.argument_checks import unit_interval, whole_number
from coalmine.estimators.sampler_tests.cohort_sizes import (
    allocated_cohort_tests,
    constant_cohort_tests,
    poisson_cohort_tests,
)
from coalmine.estimators.sampler_tests.epochs import epoch_rounds_test, epoch_tests
from coalmine.estimators.sampler_tests.independent_rounds import independent_round_tests
from coalmine.estimators.sampler_tests.picks import Picks, scipy_stats
from coalmine.estimators.sampler_tests.recognition import MEANING, Seen, recognise
from coalmine.estimators.sampler_tests.sampler_test import LEVEL, SamplerTest
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Sampling, checked_sampling


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
    picks = Picks.checked(present, numbers, canaries, participants)
    tests = tuple(_tests(picks, sampling))
    seen, candidates = (
        (cast(Seen, sampling.scheme), (sampling,)) if all(t.passed for t in tests) else recognise(picks, sampling)
    )
    return SamplerReading(
        tests=tests,
        seen=seen,
        seen_sampling=candidates[0] if len(candidates) == 1 else None,
        candidates=candidates,
        rate=picks.rate,
        rate_interval=picks.rate_interval(0.05),
        worst_rate=picks.worst_rate(LEVEL),
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
    smallest = int(scipy_stats().binom.isf(LEVEL, cells, claimed)) + 1  # smallest count that fails the test
    return float(scipy_stats().binom.sf(smallest - 1, cells, rate))


def _tests(picks: Picks, sampling: Sampling) -> list[SamplerTest]:
    """The tests of a claimed scheme."""
    if isinstance(sampling, Poisson):
        own = [*independent_round_tests(picks, sampling.rate), *poisson_cohort_tests(picks)]
    elif isinstance(sampling, FixedSize):
        own = [*independent_round_tests(picks, sampling.rate, sampling), *constant_cohort_tests(picks, sampling)]
    else:
        own = epoch_tests(picks, sampling.rounds)
        if isinstance(sampling, RandomAllocation):
            own += [epoch_rounds_test(picks, sampling.rounds), *allocated_cohort_tests(picks, sampling.rounds)]
        else:
            own += constant_cohort_tests(picks, sampling)
    return [_rate_test(picks, sampling.rate), *_repeat_tests(picks), *own]


def _rate_test(picks: Picks, rate: float) -> SamplerTest:
    return SamplerTest(
        name="rate",
        title="picks in total: more than claimed",
        statistic=float(picks.total),
        expected=picks.cells * rate,
        p_value=float(scipy_stats().binom.sf(picks.total - 1, picks.cells, rate)),
    )


def _repeat_tests(picks: Picks) -> list[SamplerTest]:
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
