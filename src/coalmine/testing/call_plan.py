"""The plan of a check: how often the function is called, with which canaries, and the norms of their updates."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats
from coalmine.audit.verdict import POWER, TEST_LEVEL
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.planning import power_against_claim
from coalmine.storage.record import FEWEST

FEWEST_CALLS = 3  # repeated noise shows only between calls
FEWEST_CANARIES = 20
PLANNED_POWER = 0.98  # power of each check: one that fails by a small margin is repeated, and must fail twice
OTHER_CALLS = 12  # most calls for each of the other norms
HUGE, SHORT = 1_000.0, 0.1  # norms of updates, in clip norms
ONE_IN = 10  # one in this many clients is an outlier
A_LITTLE = 1.8  # clip norms: an unclipped update of this norm is as visible as twice the claim
GOLDEN = (math.sqrt(5) - 1) / 2
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The updates of a call: the norm of each in clip norms, and the clients that are tested.

    Both are functions of the number of the call. The other clients' part is removed from the release before it is audited.
    Canaries are orthogonal, so that takes nothing from the tested ones. If `weighted`, clients have different weights.
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
        return np.flatnonzero((np.arange(clients) - call) % min(clients, ONE_IN) == 0)

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
        spread = A_LITTLE * (longest / A_LITTLE) ** steps
        return np.where((np.arange(clients) + call) % 2 == 0, A_LITTLE, spread)

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

    `power` is the probability of detecting twice the claim.
    """

    groups: int
    calls: int
    power: float


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
    clients: int, dim: int, *, noise: float, delta: float, most_calls: int, tested: float | None = None
) -> CallPlan:
    """The fewest calls that detect twice the claim with 98 % probability, from three up to `most_calls`.

    Only a few, if even `most_calls` calls do not decide the claim. `noise` is the noise multiplier that the claim needs.
    `tested` clients of each call are canaries under test, by default all of them.
    """
    groups = canary_groups(clients, dim)
    share = 1.0 if tested is None else tested / clients

    def power(turns: int) -> float:
        exposure = max(round(turns * share), 1)
        count = max(round(groups * clients * turns * share / exposure), 1)
        epsilon = float(mechanism_epsilon(noise, delta=delta, participations=exposure))
        dof = float(dim - groups * clients) * groups * turns
        return power_against_claim(count, epsilon, delta=delta, level=TEST_LEVEL, null_dof=dof)

    most = max(most_calls // groups, 1)
    turns = low = min(-(-FEWEST_CALLS // groups), most)
    if power(most) < POWER:  # even the most calls do not decide the claim, and a few show gross faults
        turns = min(-(-OTHER_CALLS // groups), most)
        return CallPlan(groups, turns * groups, power(turns))
    while power(turns) < PLANNED_POWER and turns < most:
        low, turns = turns, min(2 * turns, most)
    while turns - low > 1:
        middle = (low + turns) // 2
        low, turns = (low, middle) if power(middle) >= PLANNED_POWER else (middle, turns)
    return CallPlan(groups, turns * groups, power(turns))


def other_calls(plan: CallPlan) -> int:
    """The number of calls for each of the other norms."""
    return plan.groups * math.ceil(min(plan.calls, OTHER_CALLS) / plan.groups)
