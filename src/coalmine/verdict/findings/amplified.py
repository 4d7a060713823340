"""Findings about the three parts of a claim amplified by sampling: accounting, noise and sampling."""

import math
from dataclasses import dataclass

from coalmine.argument_checks import count_of
from coalmine.estimators.sampler_tests import MEANING
from coalmine.verdict.findings.finding import Doubt, Refutation, Significance, Support, at_least, is_close
from coalmine.verdict.findings.noise import ACCOUNT_AGAIN, composed_for

RESTATE = "Account for the observed sampling scheme and claim its ε, or fix the sampler."
MORE_CANARIES = "Audit again with more canaries: `coalmine plan --sampling` prints how many."


@dataclass(frozen=True, kw_only=True)
class AccountantFacts:
    """The accountant's epsilon for the claimed noise and scheme; `epsilon_kind` is upper bound, range or estimate."""

    claimed_epsilon: float
    epsilon: float
    epsilon_range: tuple[float, float]
    epsilon_kind: str
    claimed_noise: float
    accountant: str
    adjacency: str
    scheme: str

    @property
    def result(self) -> str:
        """The clause that says what the accountant returns."""
        low, high = self.epsilon_range
        between = "" if is_close(low, high) else f" (at least {at_least(low, 4)})"
        return (
            f"{self.accountant} gives an epsilon of {self.epsilon:.4g}{between} for noise multiplier "
            f"{self.claimed_noise:.4g} and {self.scheme}"
        )


@dataclass(frozen=True, kw_only=True)
class Accounted(AccountantFacts, Support):
    """The accountant's ε is no more than the claimed one."""

    code = "accounted"

    def sentence(self) -> str:
        return f"{self.result}, and the claim is {self.claimed_epsilon:.4g}"


@dataclass(frozen=True, kw_only=True)
class AccountedAboveClaim(AccountantFacts, Refutation):
    """The accountant's ε is above the claimed one."""

    code = "accounting"
    remedy = "account again with the noise, the scheme and the rounds of this run"

    def sentence(self) -> str:
        return f"{self.result}, more than the claimed {self.claimed_epsilon:.4g}"

    def plain(self) -> str:
        return f"the accountant gives ε {self.epsilon:.3g} for this noise and sampling"

    def advice(self) -> str:
        return ACCOUNT_AGAIN


@dataclass(frozen=True, kw_only=True)
class ScheduleAboveClaim(AccountedAboveClaim):
    """The stated noise of the rounds composes to more than the claim."""

    code = "stated"

    def sentence(self) -> str:
        return composed_for(self.scheme, self.epsilon, self.claimed_epsilon)


@dataclass(frozen=True, kw_only=True)
class EpsilonInRange(AccountantFacts, Doubt):
    """The exact ε of this scheme is unknown, and the claim lies in its range."""

    code = "range"
    remedy = "use Poisson sampling or random allocation, or claim the upper end"
    headline = "the exact ε of this sampling scheme is not known"

    def sentence(self) -> str:
        low, high = self.epsilon_range
        return (
            f"the epsilon of {self.scheme} at noise multiplier {self.claimed_noise:.4g} lies between {low:.4g} and "
            f"{high:.4g}, but its exact value is unknown: a claim of {self.claimed_epsilon:.4g} can be neither confirmed "
            "nor refuted"
        )

    def plain(self) -> str:
        low, high = self.epsilon_range
        return f"the ε of this sampling scheme lies between {low:.2g} and {high:.2g}; its exact value is not known"

    def advice(self) -> str:
        return "Use Poisson sampling or random allocation, whose ε is known accurately, or claim the upper end of the range."


@dataclass(frozen=True, kw_only=True)
class NoisePower:
    """What a test of the noise would have detected; inf if nothing."""

    power: float
    detectable_epsilon: float
    claimed_epsilon: float
    canaries: int
    claimed_noise: float
    measured_noise: float | None = None


@dataclass(frozen=True, kw_only=True)
class NoiseAsClaimed(NoisePower, Support):
    """The rounds had the noise that the claim needs."""

    code = "sampled power"

    def sentence(self) -> str:
        return (
            f"the rounds had the noise that the claim needs, a multiplier of {self.claimed_noise:.4g}; noise with an "
            f"epsilon of {self.detectable_epsilon:.3g} or more would have been detected with probability {self.power:.0%}"
        )


@dataclass(frozen=True, kw_only=True)
class TooFewScores(NoisePower, Doubt):
    """Too few canaries to catch noise with twice the claimed ε."""

    code = "sampled power"
    remedy = "use more canaries (`coalmine plan`)"
    headline = "there are too few canaries to confirm the noise"

    def sentence(self) -> str:
        if math.isinf(self.detectable_epsilon):
            return (
                f"the scores are too few: twice the claimed {self.claimed_epsilon:.4g} would not have been caught with "
                f"probability {self.power:.0%}. Use more canaries"
            )
        return (
            f"the scores are too few: only noise with an epsilon of {self.detectable_epsilon:.3g} would have been caught "
            f"with probability {self.power:.0%}, more than twice the claimed {self.claimed_epsilon:.4g}. Use more canaries"
        )

    def plain(self) -> str:
        if math.isinf(self.detectable_epsilon):
            return "with this number of canaries, missing noise would not have shown"
        return f"with this number of canaries, missing noise shows only if ε exceeds {self.detectable_epsilon:.2g}"

    def advice(self) -> str:
        return MORE_CANARIES


@dataclass(frozen=True, kw_only=True)
class RoundsUnobserved(Doubt):
    """Some rounds that the claim covers were not observed."""

    code = "unobserved"
    remedy = "observe every round, or claim for the rounds that there were"
    headline = "some of the rounds that it covers were not observed"
    rounds: int
    scheme: str

    def sentence(self) -> str:
        return (
            f"{self.rounds} of the rounds that the claim speaks of were not observed, and nothing is known of noise and "
            "sampling in them: observe every round, or claim for the number of rounds that there were"
        )

    def plain(self) -> str:
        return f"{count_of(self.rounds, 'round')} that the claim covers were not observed"

    def advice(self) -> str:
        return (
            "Observe every round that the claim covers. If training ended early, account for the rounds that took place "
            "and claim that ε."
        )


@dataclass(frozen=True, kw_only=True)
class SamplerNotObserved(Doubt):
    """Nobody observed how the pipeline picks people."""

    code = "sampler not observed"
    remedy = "let the pipeline's sampler pick the canaries"
    headline = "nobody observed how the pipeline picks people"
    scheme: str

    def sentence(self) -> str:
        return (
            "the pipeline's own sampler was not observed, so the rounds of clients are unknown: let the canaries take part "
            "when the sampler picks them, and pass sampler_observed=True in the claim"
        )

    def plain(self) -> str:
        return "nobody observed whom the pipeline's own sampler picks"

    def advice(self) -> str:
        return (
            "Let each canary take part exactly when the pipeline's own sampler picks it, and set `sampler_observed=True` "
            "in the claim. Until then, claim the mechanism's ε."
        )


@dataclass(frozen=True, kw_only=True)
class PickFacts:
    """How often the pipeline's own sampler picked canaries; `cohorts_known` tells whether cohort sizes were given."""

    scheme: str
    picks: int
    rate: float
    cohorts_known: bool


@dataclass(frozen=True, kw_only=True)
class DividedByCohort(PickFacts, Doubt):
    """The sum is divided by the number of participants, which the accounting does not cover."""

    code = "divisor"
    remedy = "divide the sum by a fixed number, not by how many took part"
    headline = "the sum is divided by the number of people who took part, which its accounting does not cover"

    def sentence(self) -> str:
        return (
            "a client's contribution shrinks as more take part, so the sum is divided by their number: the accounting of "
            f"{self.scheme} holds for a fixed divisor, such as the expected number"
        )

    def plain(self) -> str:
        return "the sum is divided by how many took part, which the accounting does not cover"

    def advice(self) -> str:
        return "Divide every round's sum by the same number, such as the expected number of participants."


@dataclass(frozen=True, kw_only=True)
class PicksPower(PickFacts):
    """The rate, and its epsilon, that a test of the rate would have detected; None if the scheme has no rate to test."""

    detectable_rate: float | None = None
    detectable_epsilon: float | None = None
    power: float | None = None


@dataclass(frozen=True, kw_only=True)
class SampledAsClaimed(PicksPower, Support):
    """The sampler picked canaries as the scheme does."""

    code = "sampled"

    def sentence(self) -> str:
        text = f"the sampler picked canaries {self.picks} times, as {self.scheme} would"
        if self.detectable_rate is not None:
            text += (
                f"; a rate of {self.detectable_rate:.3g} for all would have been detected with probability "
                f"{self.power:.0%}"
            )
        return (
            text if self.cohorts_known else f"{text}. Cohort sizes were not given, so fixed cohorts cannot be excluded"
        )


@dataclass(frozen=True, kw_only=True)
class TooFewPicks(PicksPower, Doubt):
    """The sampler picked too few canaries."""

    code = "picks"
    remedy = "use more canaries"
    headline = "the sampler picked too few canaries to judge it"

    def sentence(self) -> str:
        text = f"the sampler picked canaries {self.picks} times"
        if self.detectable_rate is None:
            return f"{text}, too few to measure how often it picks them: use more canaries"
        return (
            f"{text}, too few: only a rate of {self.detectable_rate:.3g} would have been detected with probability "
            f"{self.power:.0%}, and its epsilon is {self.detectable_epsilon:.3g}. Use more canaries"
        )

    def advice(self) -> str:
        return MORE_CANARIES


@dataclass(frozen=True, kw_only=True)
class OtherSampler(Significance, PickFacts):
    """The sampler does something else than claimed: the pattern of its picks, as in `sampler_tests.MEANING`.

    `seen_scheme` is the scheme to account for instead, None if no scheme fits. `test` has the smallest p-value.
    """

    seen: str
    test: str
    epsilon_range: tuple[float, float]  # for the observed sampler
    claimed_epsilon: float
    seen_scheme: str | None = None

    @property
    def described(self) -> str:
        """The clause that says what the sampler does."""
        like = f", as in {self.seen_scheme}" if self.seen_scheme else ""
        return f"the sampler does not follow the claimed scheme: {pattern(self.seen)}{like} ({self.chance})"

    def plain(self) -> str:
        least = at_least(self.epsilon_range[0], 2)
        return f"clients are not sampled as claimed: sampled as they were, ε is at least {least}"

    def advice(self) -> str:
        return RESTATE if self.seen_scheme is None else f"Account for {self.seen_scheme}, or fix the sampler."


@dataclass(frozen=True, kw_only=True)
class SamplerAboveClaim(OtherSampler, Refutation):
    """The sampler does something else than claimed, and its ε is above the claim."""

    code = "sampler"
    remedy = "account for the observed scheme, or fix the sampler"

    def sentence(self) -> str:
        low, _ = self.epsilon_range
        least = at_least(low, above=self.claimed_epsilon)
        return (
            f"{self.described}. That has an epsilon of at least {least}, above the claimed {self.claimed_epsilon:.4g}"
        )


@dataclass(frozen=True, kw_only=True)
class SamplerUnclear(OtherSampler, Doubt):
    """The sampler does something else than claimed, and its ε may be above the claim."""

    code = "sampler"
    remedy = "account for the observed scheme, or fix the sampler"
    headline = "the sampler does not follow the claimed scheme, and the ε of its own scheme is not known accurately"

    def sentence(self) -> str:
        low, high = self.epsilon_range
        text = f"{self.described}. The epsilon of the observed sampler lies between {low:.3g} and {high:.3g}"
        remedy = f"account for {self.seen_scheme}" if self.seen_scheme else "no accountant covers that"
        return f"{text}, the claim is {self.claimed_epsilon:.4g}: {remedy}"


@dataclass(frozen=True, kw_only=True)
class SamplerAllowed(OtherSampler, Support):
    """The sampler does something else than claimed, and its ε is at most the claim."""

    code = "sampler allowed"

    def sentence(self) -> str:
        _, high = self.epsilon_range
        return (
            f"{self.described}. That is harmless: its epsilon is at most {high:.3g}, and the claim is "
            f"{self.claimed_epsilon:.4g}"
        )


@dataclass(frozen=True, kw_only=True)
class AllPartsAgree(Support):
    """AccountantFacts, noise and sampling support the claim.

    `seen` is the pattern of a sampler that is harmless.
    """

    code = "legs"
    claimed_epsilon: float
    scheme: str
    accountant: str
    adjacency: str
    claimed_noise: float
    power: float
    seen: str | None = None
    detectable_epsilon: float | None = None

    def sentence(self) -> str:
        sampler = "picked canaries as the scheme says" if self.seen is None else f"is harmless ({pattern(self.seen)})"
        return (
            f"accounting, noise and sampling support the claim for {self.scheme}: the accountant's epsilon is no more than "
            f"the claimed one, the rounds had the noise that it needs, and the pipeline's own sampler {sampler}"
        )

    def plain(self) -> str:
        return f"accounting, noise and sampling support the claim for {self.scheme}"


def pattern(seen: str) -> str:
    """The pattern of a sampler in words."""
    return {str(name): meaning for name, meaning in MEANING.items()}[seen]
