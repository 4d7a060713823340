"""Claims and verdicts (STATISTICS 5): what an audit refutes, what it would have caught, and what it cannot tell."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtri

from coalmine.audit.adversaries import Scores
from coalmine.audit.gauges import Gauge
from coalmine.audit.settings import FEWEST
from coalmine.checks import one_number, whole_number
from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.estimators.planning import canaries_for_power, power_against_claim

Outcome = Literal["PASS", "VIOLATION", "UNDERPOWERED"]
TEST_LEVEL = 0.002  # of the z-test on each of the two known rungs
BOUND_CONFIDENCE = 0.999  # of the bound on each of the five rungs
POWER = 0.9
KNOWN = ("known-round", "known-others")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An epsilon that somebody claims.

    accounting "mechanism": that of a client who took part `participations` times (default: as often as the most often
    presented canaries), its rounds known. "amplified": sampling or shuffling hides its rounds, so the claim says nothing
    of attackers who know them and is judged on the other rungs alone.
    """

    epsilon: float
    accounting: Literal["mechanism", "amplified"] = "mechanism"
    participations: int | None = None

    def __post_init__(self) -> None:
        epsilon = one_number("claim", self.epsilon)
        if epsilon <= 0:
            raise ValueError(f"claim must be above 0, got {epsilon}")
        if self.accounting not in ("mechanism", "amplified"):
            raise ValueError(f"accounting must be 'mechanism' or 'amplified', got {self.accounting!r}")
        if self.participations is not None:
            whole_number("participations", self.participations, minimum=1)


@dataclass(frozen=True)
class Verdict:
    """What the audit says of the claim, and on which evidence."""

    outcome: Outcome
    reason: str


def judge(
    claim: Claim, rungs: list[Scores], gauges: list[Gauge], *, delta: float
) -> tuple[Verdict, dict[str, Verdict]]:
    """The verdict on the run and that of each rung; a true claim is called VIOLATION in at most 1 % of runs."""
    noise = _claimed_noise(claim, rungs, delta)
    names = list(dict.fromkeys(scores.rung for scores in rungs))
    by_rung = {
        name: _judge_rung(name, [s for s in rungs if s.rung == name], claim, noise, gauges, delta) for name in names
    }
    return _judge_run(claim, by_rung, gauges), by_rung


def _claimed_noise(claim: Claim, rungs: list[Scores], delta: float) -> float:
    """The noise multiplier that the claim amounts to."""
    presented = [s.presentations for s in rungs if s.presentations]
    times = claim.participations or max(presented, default=1)
    return float(mechanism_noise(claim.epsilon, delta=delta, participations=times))


def _judge_run(claim: Claim, by_rung: dict[str, Verdict], gauges: list[Gauge]) -> Verdict:
    low = [gauge for gauge in gauges if gauge.status == "low"]
    violated = [name for name, verdict in by_rung.items() if verdict.outcome == "VIOLATION"]
    if violated:
        others = f"; also {', '.join(violated[:-1])}" if len(violated) > 1 else ""
        also = f"; the {low[0].name} gauge is low too" if low else ""
        return Verdict("VIOLATION", f"{violated[-1]}: {by_rung[violated[-1]].reason}{others}{also}")
    if low:
        gauge = low[0]
        return Verdict(
            "VIOLATION",
            f"the {gauge.name} gauge ({gauge.meaning}) left {gauge.limits[0]:.4g} … {gauge.limits[1]:.4g} in "
            f"{len(gauge.flagged)} rounds, first in round {gauge.flagged[0]}: there is less noise than claimed, or it is "
            "used again",
        )
    passed = [name for name, verdict in by_rung.items() if verdict.outcome == "PASS"]
    if passed:
        return Verdict("PASS", f"{passed[-1]}: {by_rung[passed[-1]].reason}")
    if claim.accounting == "amplified":
        reason = "nothing refutes the claim, but an amplified claim can be refuted here, not confirmed"
        return Verdict("UNDERPOWERED", f"{reason}: judge the noise itself by a mechanism claim")
    known = [by_rung[name].reason for name in KNOWN if name in by_rung]
    return Verdict("UNDERPOWERED", known[-1] if known else "no round was observed, so nothing can be said of the noise")


def _judge_rung(
    name: str, groups: list[Scores], claim: Claim, noise: float, gauges: list[Gauge], delta: float
) -> Verdict:
    if name in KNOWN and claim.accounting == "amplified":
        return Verdict("UNDERPOWERED", "an amplified claim is not about an attacker who knows the rounds")
    tested = name in KNOWN
    bound = _bound_above(groups, claim, noise, delta, by_presentations=tested)
    if bound:
        return Verdict("VIOLATION", bound)
    if not tested:
        return Verdict("UNDERPOWERED", "nothing refutes the claim, but this attacker is too weak to confirm it")
    beta, error = _signal(groups, 1 / noise)
    excess = (beta - 1 / noise) / error
    if excess > -float(ndtri(TEST_LEVEL)):
        return Verdict(
            "VIOLATION",
            f"the mean score {beta:.3f} a presentation lies {excess:.1f} standard errors above the claim's {1 / noise:.3f}",
        )
    return _power_of(name, groups, claim, noise, gauges, delta, beta)


def _bound_above(
    groups: list[Scores], claim: Claim, noise: float, delta: float, *, by_presentations: bool
) -> str | None:
    """What to say if the valid lower bound at 99.9 % lies above the claim; groups share the level."""
    confidence = 1 - (1 - BOUND_CONFIDENCE) / len(groups)
    for scores in groups:
        compared = scores.observed.size if scores.bound_null else min(scores.observed.size, scores.unobserved.size)
        if compared < FEWEST:
            continue
        claimed = claim.epsilon
        if by_presentations and scores.presentations:
            claimed = float(mechanism_epsilon(noise, delta=delta, participations=scores.presentations))
        null = scores.unobserved if scores.bound_null is None else scores.bound_null
        bound = epsilon_lower_bound(scores.observed, null=null, delta=delta, confidence=confidence)
        if bound > claimed:
            return f"the lower bound {bound:.3g} at {confidence:.2%} confidence lies above the claimed {claimed:.3g}"
    return None


def _signal(groups: list[Scores], claimed: float) -> tuple[float, float]:
    """β in score = β√R + noise over all groups, and its standard error under the claim, the null's std known to its dof."""
    weight = sum(s.observed.size * (s.presentations or 1) for s in groups)
    beta = sum(math.sqrt(s.presentations or 1) * float(s.observed.sum()) for s in groups) / weight
    dof = min(s.null_dof for s in groups)
    return beta, math.sqrt(1 / weight + claimed * claimed / (2 * dof))


def _power_of(
    name: str, groups: list[Scores], claim: Claim, noise: float, gauges: list[Gauge], delta: float, beta: float
) -> Verdict:
    """PASS if twice the claim would have been caught with 90 % probability, dilution by real signal included."""
    weight = sum(s.observed.size * (s.presentations or 1) for s in groups)
    times = max(s.presentations or 1 for s in groups)
    dof = min(s.null_dof for s in groups)
    dilution = 0.0 if name == "known-others" else _dilution(noise, beta, weight, gauges)
    settings = {"delta": delta, "level": TEST_LEVEL, "dilution": dilution / math.sqrt(times), "null_dof": dof}
    epsilon = float(mechanism_epsilon(noise, delta=delta, participations=times))
    count = max(round(weight / times), 1)
    power = power_against_claim(count, epsilon, **settings)
    if power >= POWER:
        return Verdict("PASS", f"no excess, and twice the claim would have been caught with probability {power:.1%}")
    needed = canaries_for_power(epsilon, power=POWER, **settings)
    if needed is not None:
        advice = f"{needed:,} canaries would decide, {count:,} were there"
    elif name == "known-round":
        advice = (
            "no number of canaries would, real updates hide them; known-others (pass `others`) is the rung that can"
        )
    else:
        advice = "no number of canaries would in this dimension"
    return Verdict(
        "UNDERPOWERED", f"twice the claim would have been caught with probability {power:.1%} only; {advice}"
    )


def _dilution(noise: float, beta: float, weight: float, gauges: list[Gauge]) -> float:
    """‖X‖/(C√d): from the noise gauge where there is one, else from how far the mean score fell short of the claim's."""
    for gauge in gauges:
        if gauge.name == "noise":
            return noise * math.sqrt(max(float(np.mean(gauge.values**2)) - 1, 0.0))
    low = beta - 1.645 / math.sqrt(weight)
    return math.sqrt(max(1 / low**2 - noise * noise, 0.0)) if low > 0 else 1e6
