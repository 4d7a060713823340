"""The plan of a check: how often the function is called, with which canaries, and the norms of their updates."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from coalmine.argument_checks import Floats
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.measure.settings import FEWEST
from coalmine.verdict.rung_claim import POWER, TEST_LEVEL

FEWEST_CALLS = 3  # repeated noise shows only between calls
FEWEST_CANARIES = 20
PLANNED_POWER = 0.98  # probability of detecting NARROW_FACTOR times the claim
NARROW_FACTOR = 1.2
CERTAIN = 1e-6  # p-value below which a failure is not repeated
MOST_CALLS = 1_000  # default limit for the calls of one pattern
SMALL_CLAIM, SHORT_CALLS = 2.0, 200  # smaller claims need many scores, so time limits the calls
MOST_KEPT = 10**8  # most numbers in the kept releases of one pattern, unless twice the claim needs more
LARGEST_FACTOR = 1e6
OTHER_CALLS = 12  # most calls for each of the other patterns
VERY_LONG, SHORT = 1_000.0, 0.1  # norms of updates, in clip norms
CLIENTS_PER_OUTLIER = 10
SLIGHTLY_LONG = 1.8  # clip norms: an unclipped update of this norm is as visible as twice the claim
GOLDEN = (math.sqrt(5) - 1) / 2
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The updates of a call: the norm of each in clip norms, and the clients that are tested.

    Both are functions of the number of the call. The other clients' part is removed from the release before it is audited.
    Canaries are orthogonal, so this does not change the tested ones. If `weighted`, clients have different weights.
    """

    name: str
    lengths: Callable[[int], Floats]
    tested: Callable[[int], Indices]
    weighted: bool = False


def all_alike(name: str, clients: int, length: float) -> Pattern:
    """Every client sends an update of this norm."""
    everyone = np.arange(clients)
    return Pattern(name=name, lengths=lambda call: np.full(clients, length), tested=lambda call: everyone)


def uneven(clients: int, long: float) -> Pattern:
    """A third of the clients, in turns, send long updates; all others send short ones."""

    def tested(call: int) -> Indices:
        return np.flatnonzero(np.arange(clients) % 3 == call % 3)

    def lengths(call: int) -> Floats:
        norms = np.full(clients, SHORT)
        norms[tested(call)] = long
        return norms

    return Pattern(name="uneven", lengths=lengths, tested=tested)


def outliers(clients: int, long: float) -> Pattern:
    """One client in ten, in turns, sends a very long update; those of all others have exactly the clip norm."""

    def tested(call: int) -> Indices:
        return np.flatnonzero((np.arange(clients) - call) % min(clients, CLIENTS_PER_OUTLIER) == 0)

    def lengths(call: int) -> Floats:
        norms = np.ones(clients)
        norms[tested(call)] = long
        return norms

    return Pattern(name="outliers", lengths=lengths, tested=tested)


def assorted(clients: int, longest: float) -> Pattern:
    """Half of the clients send updates that are a little too long; the others send various norms up to `longest`."""
    everyone = np.arange(clients)

    def lengths(call: int) -> Floats:
        steps = (np.arange(clients) * GOLDEN + call * GOLDEN**2 + 0.5) % 1.0  # evenly spread, and never twice the same
        spread = SLIGHTLY_LONG * (longest / SLIGHTLY_LONG) ** steps
        return np.where((np.arange(clients) + call) % 2 == 0, SLIGHTLY_LONG, spread)

    return Pattern(name="assorted", lengths=lengths, tested=lambda call: everyone)


def alone(clients: int, long: float) -> Pattern:
    """One client, in turns, sends a long update; all others send short ones."""

    def lengths(call: int) -> Floats:
        norms = np.full(clients, SHORT)
        norms[call % clients] = long
        return norms

    return Pattern(name="alone", lengths=lengths, tested=lambda call: np.array([call % clients]))


def heaviest(weights: Floats, long: float) -> Pattern:
    """Every client sends a long update; those with the largest weight are tested. Weights shift by one client per call."""

    def tested(call: int) -> Indices:
        return np.flatnonzero(np.roll(weights, call) == weights.max())

    return Pattern(name="weights", lengths=lambda call: np.full(weights.size, long), tested=tested, weighted=True)


@dataclass(frozen=True)
class CallPlan:
    """`groups` of canaries that take turns, each with one canary per client, and the number of calls.

    `others` is the number of calls for each of the other patterns.
    """

    groups: int
    calls: int
    others: int = 0


@dataclass(frozen=True, kw_only=True)
class ScoreTest:
    """The test of the mean score, as the check uses it, in closed form.

    A claim of `epsilon` for a client who moves the sum by `moves` clip norms implies a mean score of 1/z. A failure with a
    p-value above CERTAIN is repeated with other canaries, and counts only if it happens again.
    """

    epsilon: float
    delta: float
    moves: int = 1

    def detection(self, epsilon: float, scores: float, dof: float) -> float:
        """The probability that the check refutes the claim if the true epsilon is `epsilon`.

        The scores' scale is estimated with `dof` degrees of freedom.
        """
        claimed, faulty = self._mean(self.epsilon), self._mean(epsilon)
        scale = 1 - 1 / (4 * dof)  # mean of the estimated scale over the true one, whose variance follows
        variance = 1 - scale**2

        def rejected(level: float) -> float:
            """P(X > tS), where the mean X and the scale S are normal and P(X > tS) = level under the claim."""
            width = float(ndtri(level)) ** 2
            square = scale**2 - width * variance
            if square <= 0:
                return 0.0
            root = math.sqrt((scale * claimed) ** 2 - square * (claimed**2 - width / scores))
            limit = (scale * claimed + root) / square
            return float(ndtr((faulty - limit * scale) / math.sqrt(1 / scores + limit**2 * variance)))

        once, certainly = rejected(TEST_LEVEL), rejected(CERTAIN)
        return certainly + (once - certainly) * once

    def detectable(self, scores: float, dof: float, power: float = PLANNED_POWER) -> float:
        """The smallest epsilon that the check refutes with this probability; inf if there is none.

        >>> round(ScoreTest(epsilon=3.0, delta=1e-5).detectable(1_900, 1e5), 2)
        3.56
        """

        def missing(factor: float) -> float:
            return self.detection(factor * self.epsilon, scores, dof) - power

        high = 2.0
        while missing(high) < 0:
            high *= 2
            if high > LARGEST_FACTOR:
                return math.inf
        return self.epsilon * float(brentq(missing, 1.0, high, xtol=1e-6))

    def _mean(self, epsilon: float) -> float:
        return 1 / (self.moves * _noise(epsilon, self.delta))


@lru_cache(maxsize=256)
def _noise(epsilon: float, delta: float) -> float:
    return float(mechanism_noise(epsilon, delta=delta))


def canary_groups(clients: int, dim: int) -> int:
    """The smallest sufficient number of groups of canaries. Canaries are orthogonal, so a group can be used again."""
    if clients > dim // 2:
        raise ValueError(
            f"clients must be at most dim / 2, got {clients:,} clients in {dim:,} dimensions: canaries are orthogonal. Test "
            "the function with a larger dim or fewer clients"
        )
    groups = 1 if clients >= FEWEST_CANARIES else -(-FEWEST_CANARIES // clients)
    groups = max(min(groups, dim // 2 // clients), 1)
    if groups * clients < FEWEST:
        raise ValueError(f"dim must be at least {2 * FEWEST} for {clients} clients, got {dim}")
    return groups


def plan_calls(
    test: ScoreTest, clients: int, dim: int, *, most_calls: int | None = None, tested: float | None = None
) -> CallPlan:
    """The fewest calls that detect 1.2 times the claim with 98 % probability, at least three.

    At most `most_calls`. The default is 1,000, but at most 200 calls go beyond those that twice the claim needs if the
    claim is below 2 or only `tested` clients of each call are canaries under test. If not even the most calls detect twice
    the claim, there are only a few, which show gross faults.
    """
    groups = canary_groups(clients, dim)
    count = clients if tested is None else tested

    def detection(factor: float, turns: int) -> float:
        calls = groups * turns
        return test.detection(factor * test.epsilon, count * calls, float(dim - groups * clients) * calls)

    most = max((most_calls or MOST_CALLS) // groups, 1)
    few = min(-(-OTHER_CALLS // groups), most)
    if detection(2.0, most) < POWER:
        return CallPlan(groups, few * groups, few * groups)
    least = min(-(-FEWEST_CALLS // groups), most)
    twice = _fewest(lambda turns: detection(2.0, turns) >= PLANNED_POWER, least, most)
    if most_calls is None:
        limit = SHORT_CALLS if test.epsilon < SMALL_CLAIM or tested is not None else MOST_CALLS
        most = max(min(limit, MOST_KEPT // dim) // groups, twice)
    narrow = _fewest(lambda turns: detection(NARROW_FACTOR, turns) >= PLANNED_POWER, twice, most)
    return CallPlan(groups, narrow * groups, min(twice, few) * groups)


def _fewest(enough: Callable[[int], bool], low: int, most: int) -> int:
    """The smallest number from `low` to `most` that is enough; `most` if none is."""
    while low < most:
        middle = (low + most) // 2
        low, most = (low, middle) if enough(middle) else (middle + 1, most)
    return most
