"""Findings that name what an audit was not told, or what its pipeline reported."""

from dataclasses import dataclass

from coalmine.argument_checks import count_of
from coalmine.verdict.findings.finding import Doubt

NO_OTHERS = "without the right sum of the real clients (`others`) the claim cannot be confirmed"
NO_NOISE_STD = "without the stated noise of every round the claim cannot be confirmed"


@dataclass(frozen=True, kw_only=True)
class NothingClaimed(Doubt):
    """Nothing was claimed."""

    code = "no claim"
    remedy = "state the ε before training: `claim=3.0`"

    def sentence(self) -> str:
        return "nothing was claimed, so nothing can pass: state the epsilon before training, for example claim=3.0"


@dataclass(frozen=True, kw_only=True)
class NoCanaries(Doubt):
    """No round with a canary in it was observed."""

    code = "no canaries"
    remedy = "check `present`: it must list the canaries whose updates were in the round"
    headline = "no round with a canary was observed"

    def sentence(self) -> str:
        return "no round with a canary in it was observed, so no attack could be tried"


@dataclass(frozen=True, kw_only=True)
class OthersMissing(Doubt):
    """`others` was not given in every round."""

    code = "others"
    remedy = "pass it in every round, also in rounds without canaries"
    headline = NO_OTHERS
    rounds: int

    def sentence(self) -> str:
        return _lacking(self.rounds, "`others`")

    def plain(self) -> str:
        return f"{count_of(self.rounds, 'round')} came without the sum of the other clients (`others`)"


@dataclass(frozen=True, kw_only=True)
class OthersNeeded(Doubt):
    """`others` was not given, so real updates could hide missing noise."""

    code = "others"
    remedy = (
        "pass the clipped sum of the real clients, divided by the same n and scaled by the same learning rate; or "
        "`clients=`"
    )
    headline = NO_OTHERS

    def sentence(self) -> str:
        return (
            "nothing refutes the claim, but real updates could hide missing noise: pass `others`, or the largest number "
            "of `clients` in a round"
        )

    def plain(self) -> str:
        return "the updates of other clients could hide missing noise"


@dataclass(frozen=True, kw_only=True)
class OthersNeededForCorrelatedNoise(Doubt):
    """The noise is correlated between rounds, and `others` was not given."""

    code = "others"
    remedy = "pass the clipped sum of the real clients"
    headline = NO_OTHERS
    correlated: bool

    def sentence(self) -> str:
        return (
            "nothing refutes the claim, but this attacker does not undo the noise's correlation: known-others (pass "
            "`others`) can confirm it"
        )

    def plain(self) -> str:
        return "the noise is correlated between rounds, and without `others` nothing can confirm it"


@dataclass(frozen=True, kw_only=True)
class OthersWrong(Doubt):
    """`others` is not the sum that entered the rounds."""

    code = "others"
    remedy = "pass the clipped sum of the real clients, divided by the same n and scaled by the same learning rate"
    headline = NO_OTHERS
    factor: float  # by which `others` must be multiplied

    def sentence(self) -> str:
        scale = f"{1 / self.factor:.3g} times" if self.factor > 0 else "unlike"
        return (
            f"`others` is not the sum that entered the rounds: it is {scale} the real clients' part, so no verdict can be "
            "based on it. If you pass `others`, pass the clipped sum of the real clients, divided by the same n and scaled "
            "by the same server learning rate as model_delta; if the pipeline computes it, its clip is not the stated one"
        )

    def plain(self) -> str:
        return "`others` is not the sum of the other clients, so no verdict can rest on it"


@dataclass(frozen=True, kw_only=True)
class NoiseStdMissing(Doubt):
    """An observed round does not state its noise."""

    code = "noise_std"
    remedy = "pass `noise_std` in every round, also in rounds without canaries"
    headline = NO_NOISE_STD
    rounds: int

    def sentence(self) -> str:
        return _lacking(self.rounds, "noise_std")

    def plain(self) -> str:
        return f"{count_of(self.rounds, 'round')} came without the size of the noise (noise_std)"


@dataclass(frozen=True, kw_only=True)
class NoiseStdNeeded(Doubt):
    """No round states its noise, so what `others` lacks could hide missing noise."""

    code = "noise_std"
    remedy = "pass `noise_std` in every round"
    headline = NO_NOISE_STD

    def sentence(self) -> str:
        return (
            "nothing refutes the claim, but updates missing from `others` could hide missing noise: pass noise_std in "
            "every round"
        )

    def plain(self) -> str:
        return "updates that are missing from `others` could hide missing noise"


@dataclass(frozen=True, kw_only=True)
class ParticipationsUnknown(Doubt):
    """Nobody said how often a client takes part."""

    code = "participations"
    remedy = "state it in the claim: `Claim(epsilon, participations=…)`"
    headline = "the claim does not say how often a client takes part"
    claimed_epsilon: float
    participations: int  # largest number of presentations that was observed

    def sentence(self) -> str:
        return (
            "the claim does not say how often a client takes part, and neither does the audit's schedule, as the "
            f"pattern is your own or rounds were not observed (at most {self.participations} presentations were): claim "
            f"with Claim(epsilon={self.claimed_epsilon:.4g}, participations=…)"
        )

    def plain(self) -> str:
        return "nobody stated in how many rounds a client takes part"


@dataclass(frozen=True, kw_only=True)
class PipelineDiffers(Doubt):
    """The integration saw that the pipeline is not as claimed, such as examples not clipped, or a row twice in a step."""

    code = "pipeline"
    remedy = "fix this in the pipeline, then train and audit again"
    headline = "the pipeline differs from the claim, so the claim is not confirmed"
    item: str
    detail: str

    def sentence(self) -> str:
        return f"nothing refutes the claim, but the pipeline differs from it ({self.item}): {self.detail}"

    def plain(self) -> str:
        return self.detail


def _lacking(rounds: int, name: str) -> str:
    return (
        f"{rounds} observed rounds lack {name}: the noise in them is unknown. Pass both in every round, also in "
        "rounds without canaries"
    )
