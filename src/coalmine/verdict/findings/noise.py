"""Findings that refute a claim because there is less noise than it needs, or that cast doubt on the stated noise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from coalmine.argument_checks import count_of
from coalmine.verdict.findings.finding import (
    Doubt,
    Refutation,
    Significance,
    at_least,
    compared,
    read_finding,
    rounded_count,
    times_of,
)


@dataclass(frozen=True, kw_only=True)
class LittleNoise(Refutation):
    """The scores, or the rounds' own statements, show too little noise for the claim."""


@dataclass(frozen=True, kw_only=True)
class MeanTooHigh(Significance, LittleNoise):
    """The mean score of `known-round` or `known-others` lies above the claim's 1/z: a one-sided noncentral t test."""

    code = "mean"
    remedy = "look for missing noise, or for updates that are not clipped"
    score: float  # per presentation
    claimed_score: float
    claimed_noise: float  # noise multiplier that the claim needs
    measured_noise: float

    def sentence(self) -> str:
        score, claimed = compared(self.score, self.claimed_score, form="f")
        return f"mean score per presentation {score}, above the {claimed} that the claim implies ({self.chance})"

    def plain(self) -> str:
        measured, needed = compared(self.measured_noise, self.claimed_noise, (2, 2))
        return f"the canaries stand out as with a noise multiplier of {measured}; the claim needs {needed}"


@dataclass(frozen=True, kw_only=True)
class BoundAboveClaim(LittleNoise):
    """A lower bound that holds for any law of the scores lies above the claim, on any rung."""

    code = "bound"
    remedy = "look for missing noise, or for updates that are not clipped"
    lower_bound: float
    confidence: float
    claimed_epsilon: float
    participations: int | None = None

    def sentence(self) -> str:
        bound, claimed = compared(self.lower_bound, self.claimed_epsilon)
        above = f"lies above the claimed {claimed}"
        if self.participations is not None:  # the claim's own client may take part more or less often
            client = f"a client that takes part {times_of(self.participations)}"
            above = f"lies above the {claimed} that the claim implies for {client}"
        return f"the lower bound {bound} at {min(self.confidence, 0.9999):.2%} confidence {above}"

    def plain(self) -> str:
        least = at_least(self.lower_bound, 2, above=self.claimed_epsilon)
        if self.participations is None:
            return f"ε is at least {least} (allowed: {self.claimed_epsilon:.4g})"
        rounds = count_of(self.participations, "round")
        known = f"{rounds} {'is' if self.participations == 1 else 'are'} known"
        return f"ε ≥ {least} for a client whose {known} (allowed: {self.claimed_epsilon:.4g})"


@dataclass(frozen=True, kw_only=True)
class ComposedAboveClaim(LittleNoise):
    """The most noise that the scores allow, in groups of rounds with similar noise, composes to more than the claim."""

    code = "composed"
    remedy = "look for rounds with less noise than they state"
    epsilon: float
    claimed_epsilon: float
    level: float

    def sentence(self) -> str:
        least = at_least(self.epsilon, above=self.claimed_epsilon)
        return (
            f"with the most noise that the scores allow in each round, epsilon is at least {least}, above the claimed "
            f"{self.claimed_epsilon:.4g}"
        )

    def plain(self) -> str:
        return f"ε is at least {at_least(self.epsilon)}, even with the most noise that the scores allow"


@dataclass(frozen=True, kw_only=True)
class RoundAboveClaim(Significance, LittleNoise):
    """Single rounds have less noise than they state, and one of them alone exceeds the claim."""

    code = "round"
    remedy = "look at the rounds that it names"
    score: float
    claimed_score: float
    rounds: int
    first_round: int
    epsilon: float | None = None  # None in an alarm, which looks at one round by itself
    claimed_epsilon: float | None = None

    def sentence(self) -> str:
        score, claimed = compared(self.score, self.claimed_score, form="f")
        return (
            f"mean score {score} in round {self.first_round}, above the {claimed} that its noise "
            f"implies ({self.chance}; the level is {self.level:.1g}, since many rounds are tested)"
        )

    def plain(self) -> str:
        return f"{weak_rounds(self.rounds, self.first_round)}, and one round alone exceeds the claim"


@dataclass(frozen=True, kw_only=True)
class StatedTooLittle(LittleNoise):
    """The stated noise itself composes to more than the claim, at a declared clip norm. No chance is involved."""

    code = "stated"
    remedy = "add noise, or claim the ε of the stated noise"
    measured_noise: float  # in the rounds with the least noise
    claimed_noise: float
    epsilon: float
    claimed_epsilon: float
    scheme: str | None = None  # of an amplified claim

    def sentence(self) -> str:
        if self.scheme is not None:
            return composed_for(self.scheme, self.epsilon, self.claimed_epsilon)
        stated, needed = compared(self.measured_noise, self.claimed_noise, (4, 4))
        return (
            f"the stated noise multiplier is {stated} in the rounds with the least noise, where the claim "
            f"needs {needed}: a client in those rounds has an epsilon of {self.epsilon:.3g}"
        )

    def plain(self) -> str:
        stated, needed = compared(self.measured_noise, self.claimed_noise, (2, 2))
        epsilon, _ = compared(self.epsilon, self.claimed_epsilon, (2, 4))
        return f"the noise multiplier is {stated} in the weakest rounds, and the claim needs {needed}: ε is {epsilon}"

    def advice(self) -> str:
        return ACCOUNT_AGAIN


@dataclass(frozen=True, kw_only=True)
class EvidenceOfLess(LittleNoise):
    """During training, the scores so far are far likelier with less noise ([alarm](../how-to/alarm.md))."""

    code = "evidence"
    remedy = "stop, and look for missing noise, or for updates that are not clipped"
    score: float
    claimed_score: float
    claimed_noise: float
    level: float
    odds: float  # less noise than claimed against the claimed noise
    measured_noise: float | None = None

    def sentence(self) -> str:
        measured = ""
        if self.measured_noise is not None:
            about, claimed = compared(self.measured_noise, self.claimed_noise)
            measured = f" (noise multiplier about {about}, not {claimed})"
        return (
            f"the scores so far are {rounded_count(self.odds)} times likelier with less noise than claimed{measured}; a "
            f"true claim reaches {1 / self.level:.0f} times in at most {self.level:.1%} of runs, however often it is checked"
        )

    def plain(self) -> str:
        return f"the rounds so far are {rounded_count(self.odds)} times likelier with less noise than claimed"


@dataclass(frozen=True, kw_only=True)
class LessThanStated(Refutation):
    """Nothing was claimed, and there is less noise than the rounds state."""

    code = "less noise"
    remedy = "look for missing noise, or state the noise that is added"
    refuted: Refutation

    def sentence(self) -> str:
        return f"nothing was claimed, but there is less noise than the rounds state: {self.refuted.sentence()}"

    def plain(self) -> str:
        stated = self.refuted.plain().replace("allowed:", "by the stated noise:")
        return stated.replace("the claim needs", "the rounds state")

    def caution(self) -> str:
        return self.refuted.caution()

    @property
    def facts(self) -> dict[str, Any]:
        return self.refuted.facts | {"detail": self.refuted.code}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        own = {name: value for name, value in facts.items() if name != "detail"}
        refuted = read_finding(cls.outcome, str(facts["detail"]), own, None)
        assert isinstance(refuted, Refutation)  # as its outcome says
        return cls(refuted=refuted)

    @classmethod
    def fits(cls, facts: Mapping[str, Any], rung: str | None) -> bool:
        return "detail" in facts


@dataclass(frozen=True, kw_only=True)
class StatedNoiseVaries(Doubt):
    """The stated noise varies, and the weakest rounds may not support the claim."""

    code = "stated"
    remedy = "pass `clip_norm` in the units of `model_delta` to decide this"
    headline = "the stated noise varies, and some rounds may have too little"
    measured_noise: float
    claimed_noise: float

    def sentence(self) -> str:
        measured, needed = compared(self.measured_noise, self.claimed_noise)
        return (
            "the stated noise varies: a client in the rounds with the least noise has a noise multiplier of "
            f"{measured}, where the claim needs {needed}. Pass clip_norm in the units of "
            "model_delta to decide this"
        )


@dataclass(frozen=True, kw_only=True)
class WeakRounds(Significance, Doubt):
    """Single rounds have less noise than they state, and the claim would not hold with what they measure."""

    code = "weak rounds"
    remedy = "look at these rounds; state their noise"
    rounds: int
    first_round: int
    epsilon: float
    claimed_epsilon: float

    def sentence(self) -> str:
        epsilon, claimed = compared(self.epsilon, self.claimed_epsilon, (3, 4))
        return (
            f"the scores show less noise than stated in {count_of(self.rounds, 'round')}, first in round {self.first_round} "
            f"({self.chance}; the level is {self.level:.1g}). With the noise that they measure, epsilon is "
            f"{epsilon}, and the claim is {claimed}"
        )

    def plain(self) -> str:
        return f"{weak_rounds(self.rounds, self.first_round)}; with the noise that was measured ε is {self.epsilon:.2g}"


ACCOUNT_AGAIN = (
    "Account again for the noise, the sampling and the rounds of this training and claim that ε, or add noise."
)


def weak_rounds(count: int, first: int) -> str:
    """The rounds that have less noise than they state."""
    if count == 1:
        return f"round {first} has less noise than it states"
    return f"{count} rounds have less noise than they state, the first is round {first}"


def composed_for(scheme: str, epsilon: float, claimed: float) -> str:
    """The sentence if the stated noise of the rounds exceeds an amplified claim."""
    composed, most = compared(epsilon, claimed, (4, 4))
    return (
        f"the noise that the rounds state composes to an epsilon of {composed} for {scheme}, above the claimed {most}"
    )
