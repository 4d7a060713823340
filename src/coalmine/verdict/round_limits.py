"""What the scores prove about the noise of each round, and the epsilon to which that composes.

Rounds that state similar noise share one lower limit of 1/z, the mean score of their canaries less its error. A round
whose own scores contradict its stated noise leaves its group and has a limit of its own. Averages within a group are valid
limits: an epsilon, sampled or not, is at least that of rounds which share the mean strength of the group.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from coalmine.argument_checks import Floats
from coalmine.estimators.amplification import least_epsilon
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampling import FixedSize, Poisson, Sampling
from coalmine.evidence.noise_schedule import counted_strengths
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.evidence.stated_noise import RoundScores, StatedNoise

ALIKE = 1.25  # ratio of stated noise up to which rounds share a limit
NEGLIGIBLE = 1e-3  # strength relative to the largest below which a round adds nothing to an epsilon
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RoundLimits:
    """Lower confidence limits of 1/z, one for each round with canaries, and the rounds with less noise than stated."""

    inverse: Floats
    flagged: Indices  # indices of rounds
    level: float  # level at which a round is flagged
    smallest_p: float  # smallest p-value of a single round

    @classmethod
    def of(
        cls, rounds: RoundScores, stated: StatedNoise | None, expected: float, *, level: float, scan_level: float
    ) -> "RoundLimits":
        """The limits at `level` for all groups together, and `scan_level` for all single rounds together.

        `expected` is the 1/z of a round whose noise is not stated.
        """
        count = len(rounds.counts)
        own_level = scan_level / count
        means = expected_means(rounds, stated, expected)
        each = [rounds_signal(rounds, [index]) for index in range(count)]
        p_values = np.array([signal.p_value(float(mean)) for signal, mean in zip(each, means, strict=True)])
        flagged = np.flatnonzero(p_values < own_level)
        groups = alike(rounds, stated)
        inverse = np.zeros(count)
        for group in groups:
            members = np.setdiff1d(group, flagged)
            if members.size:
                inverse[members] = lower_limit(rounds_signal(rounds, members), level / len(groups))
        for index in flagged:
            inverse[index] = lower_limit(each[index], own_level)
        return cls(inverse, flagged, own_level, float(p_values.min(initial=1.0)))


def expected_means(rounds: RoundScores, stated: StatedNoise | None, expected: float) -> Floats:
    """The mean score of each round with canaries if its noise is as stated, or else `expected`."""
    if stated is None:
        return np.full(len(rounds.numbers), expected)
    by_number = dict(zip(stated.numbers.tolist(), stated.multipliers.tolist(), strict=True))
    return np.array([1 / (by_number[int(number)] * stated.low) for number in rounds.numbers])


def alike(rounds: RoundScores, stated: StatedNoise | None) -> list[Indices]:
    """The rounds with canaries in groups that state similar noise, from the least noise to the most."""
    means = expected_means(rounds, stated, 1.0)
    groups: list[list[int]] = []
    first = 0.0
    for index in np.argsort(-means, kind="stable"):
        if not groups or means[index] * ALIKE < first:
            groups.append([])
            first = float(means[index])
        groups[-1].append(int(index))
    return [np.array(group) for group in groups]


def rounds_signal(rounds: RoundScores, members: Indices | list[int]) -> NoiseSignal:
    """The mean score over some of the rounds."""
    counts = rounds.counts[members]
    weight = float(counts.sum())
    beta = float(counts @ rounds.means[members]) / weight
    dof = float(rounds.dofs[members].min())
    return NoiseSignal(beta, weight, dof * len(counts), dof, 0.0)


def lower_limit(signal: NoiseSignal, level: float) -> float:
    """A lower confidence limit of 1/z."""
    return signal.interval(1 - 2 * level)[0]


def composed_epsilon(inverse: Floats, *, delta: float, times: int, exposure: float, sampling: Sampling | None) -> float:
    """Epsilon of a run whose round t has noise multiplier 1/inverse[t] at most: the lower end of the accountant's range.

    Without sampling, of a client in the `times` rounds with the least noise; `exposure` is the sum of its squared
    contributions over those rounds, in clip norms: `times`, unless it weighs more than a canary.
    """
    largest = float(inverse.max(initial=0.0))
    if largest <= 0:
        return 0.0
    if math.isinf(largest):
        return math.inf
    if sampling is None:
        strongest = np.sort(inverse)[::-1][: max(times, 1)]
        shift = math.sqrt(exposure / max(times, 1) * float(strongest @ strongest))
        return float(mechanism_epsilon(1 / shift, delta=delta)) if shift > 0 else 0.0
    if isinstance(sampling, Poisson | FixedSize):  # leaving rounds out lowers epsilon
        kept = inverse[inverse > NEGLIGIBLE * largest]
        sampling = type(sampling)(**{**vars(sampling), "rounds": kept.size, "strengths": ()})
    else:  # a client may be in a round without a limit, of which nothing is known
        kept = np.pad(inverse, (0, max(sampling.total_rounds - inverse.size, 0)))
    reference = float(np.median(kept[kept > 0]))
    strengths = counted_strengths(np.round(kept / reference, 12))
    scheme = type(sampling)(**{**vars(sampling), "strengths": strengths})
    return least_epsilon(1 / reference, scheme, delta)


def shared_means(rounds: RoundScores, stated: StatedNoise | None, means: Floats) -> Floats:
    """The mean score of each round, averaged over the rounds that state similar noise: fewer to compose."""
    shared = np.zeros(len(means))
    for group in alike(rounds, stated):
        shared[group] = float(rounds.counts[group] @ means[group]) / float(rounds.counts[group].sum())
    return shared


def pessimistic_limits(
    rounds: RoundScores, stated: StatedNoise | None, means: Floats, level: float, power: float
) -> Floats:
    """Limits that mean scores shared by similar rounds reach in all groups together with probability `power`."""
    groups = alike(rounds, stated)
    reach = float(-ndtri(level / len(groups)) - ndtri((1 - power) / len(groups)))
    inverse = np.zeros(len(means))
    for group in groups:
        signal, mean = rounds_signal(rounds, group), float(means[group[0]])
        inverse[group] = max(mean - reach * math.sqrt(1 / signal.weight + mean * mean / (2 * signal.dof)), 0.0)
    return inverse
