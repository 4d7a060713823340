"""Claims and verdicts (STATISTICS 5): what an audit refutes, what it would have caught, and what it cannot tell."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.special import nctdtr, ndtr

from coalmine.audit.adversaries import Scores
from coalmine.audit.gauges import Gauge
from coalmine.audit.settings import FEWEST
from coalmine.checks import one_number, whole_number
from coalmine.estimators.bounds import bound_of
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.estimators.planning import canaries_for_power, power_against_claim

Outcome = Literal["PASS", "VIOLATION", "UNDERPOWERED"]
TEST_LEVEL = 0.002  # of the z-test on each of the two known rungs
BOUND_LEVEL = 0.005  # of the bounds on all rungs together
BOUND_CONFIDENCE = 1 - BOUND_LEVEL / 5  # on each of the five
MANY = 10_000  # dof from which on the scale is as good as known to the test
POWER = 0.9
KNOWN = ("known-round", "known-others")
FEWEST_STDS, LOUD_STDS = (
    2.0,
    4.0,
)  # that canaries must be heard by where they should be this loud, or silence says nothing
HEARD, UNHEARD_LEVEL = 0.5, 1e-4  # below this share of the claim's signal, and so unlikely: remarked upon


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An epsilon that somebody claims.

    accounting "mechanism": that of a client who took part `participations` times (default: as often as the most often
    presented canaries), its rounds known. "amplified": sampling or shuffling hides its rounds, so the claim says nothing
    of attackers who know them and is judged on the other rungs alone. `sensitivity` is what the claim was accounted with,
    in clip norms (default: √participations; under correlated noise that of the most exposed canary).
    """

    epsilon: float
    accounting: Literal["mechanism", "amplified"] = "mechanism"
    participations: int | None = None
    sensitivity: float | None = None

    def __post_init__(self) -> None:
        epsilon = one_number("claim", self.epsilon)
        if epsilon <= 0:
            raise ValueError(f"claim must be above 0, got {epsilon}")
        object.__setattr__(self, "epsilon", epsilon)  # a number of Python's own, whichever kind came
        if self.accounting not in ("mechanism", "amplified"):
            raise ValueError(f"accounting must be 'mechanism' or 'amplified', got {self.accounting!r}")
        if self.participations is not None:
            object.__setattr__(self, "participations", whole_number("participations", self.participations, minimum=1))
        if self.sensitivity is not None:
            sensitivity = one_number("sensitivity", self.sensitivity)
            if sensitivity <= 0:
                raise ValueError(f"sensitivity must be above 0, got {sensitivity}")
            object.__setattr__(self, "sensitivity", sensitivity)


@dataclass(frozen=True)
class Verdict:
    """What the audit says of the claim, and on which evidence."""

    outcome: Outcome
    reason: str


def judge(
    claim: Claim,
    rungs: list[Scores],
    gauges: list[Gauge],
    *,
    delta: float,
    most_hidden: float | None = None,
    presentations: int = 1,
    correlated: bool = False,
) -> tuple[Verdict, dict[str, Verdict]]:
    """The verdict on the run and that of each rung; a true claim is called VIOLATION in at most 1 % of runs.

    `most_hidden` bounds the real clients' part of a round, ‖X‖/(C√d); `presentations` is how often canaries were to be
    presented, in case not all rounds were observed. Under `correlated` noise with no round observed nobody knows how exposed
    canaries were: then as much as the claim says.
    """
    names = list(dict.fromkeys(scores.rung for scores in rungs))
    case = _case_of(claim, rungs, delta, presentations, correlated)
    case = replace(
        case,
        bound_level=BOUND_LEVEL / max(len(names), 5),
        most_hidden=most_hidden,
        noise_seen=max((float(np.median(gauge.values)) for gauge in gauges if gauge.name == "residual"), default=1.0),
    )
    by_rung = {name: _judge_rung(name, [s for s in rungs if s.rung == name], case) for name in names}
    return _judge_run(claim, by_rung, gauges), by_rung


def unheard(
    claim: Claim, rungs: list[Scores], *, delta: float, presentations: int = 1, correlated: bool = False
) -> str | None:
    """What to say where who knows all others hears far less of the canaries than the claim allows.

    No verdict: it may be that there is more noise than claimed. It may also be that the canaries are not in the rounds,
    which nothing else shows, as then there is no excess.
    """
    groups = [scores for scores in rungs if scores.rung == "known-others"]
    if claim.accounting == "amplified" or all(np.ptp(scores.observed) == 0 for scores in groups):
        return None
    beta, weight, dof = _signal(groups)
    claimed = 1 / _case_of(claim, rungs, delta, presentations, correlated).noise
    if beta >= HEARD * claimed or 1 - _p_value(beta, weight, dof, claimed) > UNHEARD_LEVEL:
        return None
    return (
        f"known-others: the mean score {beta:.3g} a presentation is far below the claim's {claimed:.3g}: either there is "
        "much more noise than claimed, or the canaries were not in the rounds as said (made from another seed, lost, or "
        "cut short on their way)"
    )


def _case_of(claim: Claim, rungs: list[Scores], delta: float, presentations: int, correlated: bool) -> "_Case":
    shown = max([presentations, *(s.presentations for s in rungs if s.presentations)])
    strongest = max((s.largest_strength for s in rungs if s.largest_strength is not None), default=None)
    if correlated and strongest is None:
        strongest = (claim.sensitivity or 1.0) ** 2
    noise = _claimed_noise(claim, claim.participations or shown, strongest, delta)
    return _Case(claim, noise, shown, strongest, delta)


def _claimed_noise(claim: Claim, times: int, strongest: float | None, delta: float) -> float:
    """The noise multiplier that the claim stands for."""
    if claim.sensitivity is None and strongest is None:
        return float(mechanism_noise(claim.epsilon, delta=delta, participations=times))
    if claim.sensitivity is None and claim.participations is not None:
        raise ValueError(
            "under correlated noise the number of participations does not say how exposed somebody is: give the claim its "
            "sensitivity, or leave participations out to claim epsilon for the most exposed canary"
        )
    sensitivity = math.sqrt(strongest or 1.0) if claim.sensitivity is None else claim.sensitivity
    return sensitivity * float(mechanism_noise(claim.epsilon, delta=delta))


@dataclass(frozen=True)
class _Case:
    """What every rung is judged by: the claim and its noise multiplier, and how often the canaries were presented.

    `strongest` is the most exposed canary's ‖Cu‖² under correlated noise, `noise_seen` what the residual gauge reads.
    """

    claim: Claim
    noise: float
    presentations: int
    strongest: float | None
    delta: float
    bound_level: float = BOUND_LEVEL
    most_hidden: float | None = None
    noise_seen: float = 1.0

    def epsilon(self, presentations: int | None, strength: float | None = None) -> float:
        """What is claimed for somebody who takes part so often, or is so exposed."""
        if self.claim.accounting == "amplified":
            return self.claim.epsilon
        if self.strongest is not None:
            return float(mechanism_epsilon(self.noise / math.sqrt(strength or self.strongest), delta=self.delta))
        times = presentations or self.presentations
        return float(mechanism_epsilon(self.noise, delta=self.delta, participations=times))


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
    missing = "no round with a canary in it was observed, so nothing can be said of the noise"
    return Verdict("UNDERPOWERED", known[-1] if known else missing)


def _judge_rung(name: str, groups: list[Scores], case: _Case) -> Verdict:
    if name in KNOWN and case.claim.accounting == "amplified":
        return Verdict("UNDERPOWERED", "an amplified claim is not about an attacker who knows the rounds")
    bound = _bound_above(groups, case)
    if bound:
        return Verdict("VIOLATION", bound)
    if name not in KNOWN:
        return Verdict("UNDERPOWERED", "nothing refutes the claim, but this attacker is too weak to confirm it")
    if all(np.ptp(scores.observed) == 0 for scores in groups):
        return Verdict("UNDERPOWERED", "all of its scores are equal, so they say nothing; was the model ever updated?")
    beta, weight, dof = _signal(groups)
    p_value = _p_value(beta, weight, dof, 1 / case.noise)
    if p_value < TEST_LEVEL:
        claimed = f"the claim's {1 / case.noise:.3f}"
        return Verdict("VIOLATION", f"the mean score {beta:.3f} a presentation is above {claimed} (p = {p_value:.1g})")
    verdict = _power_of(name, groups, case, weight, dof)
    heard = beta * math.sqrt(weight)
    if verdict.outcome == "PASS" and heard < FEWEST_STDS and not _explained(name, heard, weight, case):
        return Verdict("UNDERPOWERED", _silence(beta, heard, case))
    return verdict


def _explained(name: str, heard: float, weight: float, case: _Case) -> bool:
    """Whether the noise that was seen is enough to hide canaries which at the claim itself would be loud.

    There the mean score of a rung with enough power lies more than four stds above 0.
    """
    expected = math.sqrt(weight) / (case.noise * case.noise_seen)
    return name == "known-others" and expected < LOUD_STDS and heard > -LOUD_STDS


def _silence(beta: float, heard: float, case: _Case) -> str:
    """Why there is no PASS though nothing is in excess: an attacker who hears no canary would hear no fault either."""
    if heard <= -LOUD_STDS:
        return (
            f"the mean score {beta:.3g} lies far below 0, which no noise explains: is the sign of the updates turned?"
        )
    return (
        f"the mean score {beta:.3g} a presentation is no more than chance, where the claim's is {1 / case.noise:.3g}: "
        "either there is far more noise than claimed, or the canaries were not in the rounds (made from another seed, lost "
        "on their way, or among the `others`)"
    )


def _bound_above(groups: list[Scores], case: _Case) -> str | None:
    """What to say if the valid lower bound lies above the claim; groups share the level."""
    confidence = 1 - case.bound_level / len(groups)
    for scores in groups:
        compared = scores.unobserved.size if scores.bound_null is None else FEWEST
        if min(scores.observed.size, compared) < FEWEST:
            continue
        null = scores.unobserved if scores.bound_null is None else scores.bound_null
        bound = bound_of(scores.bounded, null=null, delta=case.delta, confidence=confidence)
        claimed = case.epsilon(scores.presentations, scores.largest_strength)
        if bound > claimed:
            return f"the lower bound {bound:.3g} at {confidence:.2%} confidence lies above the claimed {claimed:.3g}"
    return None


def _signal(groups: list[Scores]) -> tuple[float, float, float]:
    """β in score = β√R + noise over all groups, ΣR, and the dof of the null's std; R is ‖Cu‖² under correlated noise."""
    weight = float(sum(s.observed.size * s.exposure for s in groups))
    beta = sum(math.sqrt(s.exposure) * float(s.observed.sum()) for s in groups) / weight
    return beta, weight, min(s.null_dof for s in groups)


def _p_value(beta: float, weight: float, dof: float, claimed: float) -> float:
    """Chance of a β as large under the claim: noncentral t, as the scale rests on dof directions; normal for many."""
    if dof > MANY:
        return float(ndtr(-(beta - claimed) / math.sqrt(1 / weight + claimed * claimed / (2 * dof))))
    root = math.sqrt(weight)
    return float(1 - nctdtr(dof, claimed * root, beta * root))


def _power_of(name: str, groups: list[Scores], case: _Case, weight: float, dof: float) -> Verdict:
    """PASS if twice the claim would have been caught with 90 % probability, whatever real updates may hide.

    known-round sees the noise and the real clients' signal as one, so what the signal may be must be known: a signal in the
    place of missing noise looks the same. At worst it is the same in every round.
    """
    if name == "known-round" and case.strongest is not None:
        return Verdict(
            "UNDERPOWERED",
            "nothing refutes the claim, but this attacker does not undo the noise's correlation: known-others (pass "
            "`others`) can confirm it",
        )
    exposure = max(s.exposure for s in groups)
    count, epsilon = max(round(weight / exposure), 1), case.epsilon(round(exposure), exposure)
    if name == "known-round" and case.most_hidden is None:
        return Verdict(
            "UNDERPOWERED",
            "nothing refutes the claim, but real updates could stand in for missing noise: pass `others`, or the largest "
            "number of `clients` in a round",
        )
    hidden = (case.most_hidden or 0.0) if name == "known-round" else 0.0
    settings = {"delta": case.delta, "level": TEST_LEVEL, "dilution": hidden, "null_dof": dof}
    power = power_against_claim(count, epsilon, **settings)
    if power >= POWER:
        return Verdict("PASS", f"no excess, and twice the claim would have been caught with probability {power:.1%}")
    needed = canaries_for_power(epsilon, power=POWER, **settings)
    if needed is not None:
        advice = f"{needed:,} canaries would decide, {count:,} were there"
    elif name == "known-round":
        advice = "no number of canaries would, so much can real updates hide; known-others (pass `others`) can"
    else:
        advice = "no number of canaries would in this dimension"
    return Verdict(
        "UNDERPOWERED", f"twice the claim would have been caught with probability {power:.1%} only; {advice}"
    )
