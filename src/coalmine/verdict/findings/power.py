"""Findings about the power of an audit: what it would have detected."""

import math
from dataclasses import dataclass

from coalmine.verdict.findings.finding import Doubt, Support, detectable, times_of

TOO_WEAK = "this audit is too weak to confirm it"


@dataclass(frozen=True, kw_only=True)
class PowerFacts:
    """The facts of every judgement of power; `measured_noise` is None if the mean score is not above 0."""

    power: float
    canaries: int
    claimed_noise: float
    measured_noise: float | None = None


@dataclass(frozen=True, kw_only=True)
class EnoughPower(PowerFacts, Support):
    """Nothing refutes the claim, and twice the claimed ε would have been detected."""

    code = "power"
    participations: int | None = None

    def sentence(self) -> str:
        times = "" if self.participations is None else f" for a client that takes part {times_of(self.participations)}"
        return (
            f"the attack measures no more than claimed{times}, and twice the claim would have been detected with "
            f"probability {self.power:.1%}"
        )


@dataclass(frozen=True, kw_only=True)
class DetectableInCalls(EnoughPower):
    """A check of a function measures no more than claimed."""

    code = "power"
    detectable_epsilon: float

    def sentence(self) -> str:
        return f"the attack measures no more than claimed, and {detectable(self.detectable_epsilon, self.power)}"


@dataclass(frozen=True, kw_only=True)
class TooFewCanaries(PowerFacts, Doubt):
    """Too few canaries to catch twice the claim."""

    code = "power"
    remedy = "use as many canaries as the reason says"
    headline = TOO_WEAK
    canaries_needed: int

    def sentence(self) -> str:
        return f"{_detected(self.power)}; {self.canaries_needed:,} canaries would decide, {self.canaries:,} took part"

    def plain(self) -> str:
        return f"even twice the claimed ε would be noticed with a probability of only {_percent(self.power)}"

    def advice(self) -> str:
        return (
            f"Audit again with {self.canaries_needed:,} canaries, which is enough to decide the claim (this run had "
            f"{self.canaries:,})."
        )


@dataclass(frozen=True, kw_only=True)
class PowerOutOfReach(PowerFacts, Doubt):
    """No number of canaries catches twice the claim in this dimension."""

    code = "power"
    remedy = "audit more parameters, or make a larger claim"
    headline = TOO_WEAK

    def sentence(self) -> str:
        return f"{_detected(self.power)}; no number of canaries would in this dimension"


@dataclass(frozen=True, kw_only=True)
class PowerHidden(PowerOutOfReach):
    """Real updates can hide too much for any number of canaries."""

    code = "power"
    rung = "known-round"
    remedy = "pass `others`, the clipped sum of the real clients: it is subtracted, and cannot hide missing noise"

    def sentence(self) -> str:
        return (
            f"{_detected(self.power)}; no number of canaries would, real updates can hide too much; known-others (pass "
            "`others`) can"
        )

    def plain(self) -> str:
        return f"{_detected(self.power)}; real updates can hide too much, whatever the number of canaries"


@dataclass(frozen=True, kw_only=True)
class TooFewCalls(PowerFacts, Doubt):
    """A check of a function had too few calls to catch twice the claim."""

    code = "power"
    remedy = "raise `clients` or `most_calls`"
    headline = TOO_WEAK
    detectable_epsilon: float
    canaries_needed: int | None = None

    def sentence(self) -> str:
        if math.isinf(self.detectable_epsilon):
            return "the scores are too few to detect any epsilon"
        return f"only {detectable(self.detectable_epsilon, self.power)}"


@dataclass(frozen=True, kw_only=True)
class WeakAttacker(Doubt):
    """This rung's attacker cannot confirm a claim (a rung's own verdict)."""

    code = "weak"
    remedy = "look at `known-others`"
    headline = TOO_WEAK

    def sentence(self) -> str:
        return "nothing refutes the claim, but this attacker is too weak to confirm it"


@dataclass(frozen=True, kw_only=True)
class PossiblyHidden(Doubt):
    """Scores without their run (`coalmine estimate`) do not show how much real updates hide."""

    code = "hidden"
    remedy = "audit the run, with `others`"

    def sentence(self) -> str:
        return "nothing refutes the claim, but real updates could hide missing noise, so these scores cannot confirm it"


@dataclass(frozen=True, kw_only=True)
class NoClosedForm(Doubt):
    """Unobserved scores are no exact null, so they cannot confirm a claim (`coalmine estimate`)."""

    code = "no closed form"
    remedy = "give the null in closed form, `--dim` or `--null-std`"
    confidence: float
    ceiling: float | None = None  # largest lower bound of this many scores, if it lies below the claim

    def sentence(self) -> str:
        reach = "" if self.ceiling is None else f" (it is {self.ceiling:.3g} at most with so few scores)"
        return (
            f"the lower bound at {self.confidence * 100:g} % does not refute the claim{reach}, and unobserved scores alone "
            "cannot confirm a claim: give a null in closed form, --dim or --null-std"
        )


def _detected(power: float) -> str:
    return f"twice the claim would have been detected with probability {_percent(power)} only"


def _percent(power: float) -> str:
    """Rounded down: what misses the power that a PASS needs is not printed as if it reached it."""
    return f"{math.floor(1000 * power) / 10:.1f}%"
