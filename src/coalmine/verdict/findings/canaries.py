"""Findings about the canaries: they were not detected, or did not all arrive as declared."""

from dataclasses import dataclass

from coalmine.verdict.findings.finding import Doubt

FLIPPED = -4.0  # standard deviations below which no noise explains the mean score


@dataclass(frozen=True, kw_only=True)
class Undetected(Doubt):
    """The mean score is no more than chance."""

    code = "undetected"
    remedy = "check the seed, the sign of the updates, and that `others` does not contain the canaries"
    headline = "the canaries were not detected, so the claim is not confirmed"
    score: float
    claimed_score: float
    stds: float  # standard deviations by which the mean score lies above 0

    def sentence(self) -> str:
        if self.stds <= FLIPPED:
            return (
                f"the mean score {self.score:.3g} lies far below 0, which no noise explains: is the sign of the updates "
                "flipped?"
            )
        return (
            f"the mean score per presentation {self.score:.3g} is no more than chance, where the claim implies "
            f"{self.claimed_score:.3g}: either there is far more noise than claimed, or the canaries were not in the "
            "rounds (made from another seed, lost on their way, or among the `others`)"
        )

    def plain(self) -> str:
        if self.stds <= FLIPPED:
            return "the canaries appear with the wrong sign: is the sign of the updates flipped?"
        return "the canaries were not found: far more noise than claimed, or they never were in the rounds"


@dataclass(frozen=True, kw_only=True)
class EqualScores(Doubt):
    """All scores are equal, or there is one canary."""

    code = "constant"
    remedy = "use at least 10 canaries"
    headline = "there are too few canaries to judge it"
    canaries: int
    canaries_needed: int

    def sentence(self) -> str:
        first = (
            "one canary's score alone proves nothing" if self.canaries == 1 else f"all {self.canaries} scores are equal"
        )
        return f"{first}; at least {self.canaries_needed} canaries must take part"


@dataclass(frozen=True, kw_only=True)
class UnevenScores(Doubt):
    """The canaries' scores spread too much: some were lost, or count for more."""

    code = "uneven"
    remedy = "find out which canaries did not arrive"
    headline = "the canaries did not all count equally, so the claim is not confirmed"
    spread: float  # std of the canaries' scores, over that of the noise
    most_spread: float
    canaries: int
    canaries_lost: int

    def sentence(self) -> str:
        return (
            f"the canaries' scores spread {self.spread:.3g} times as much as if all canaries counted equally (limit "
            f"{self.most_spread:.3g}): some were lost or count for more. If the others are complete, about "
            f"{self.canaries_lost} of {self.canaries} did not arrive"
        )

    def plain(self) -> str:
        return f"the canaries did not count equally: about {self.canaries_lost} of {self.canaries} seem lost"


@dataclass(frozen=True, kw_only=True)
class ShortCanaries(Doubt):
    """The canaries arrive shorter than the declared clip norm."""

    code = "short"
    remedy = "check their way through the clip, and the units of `clip_norm`"
    headline = "the canaries arrived shorter than declared, so the claim is not confirmed"
    length: float  # norm of the canaries, over the declared one
    length_error: float

    def sentence(self) -> str:
        return (
            f"the canaries arrive at {self.length:.3g} of the declared clip norm (standard error {self.length_error:.2g}): "
            "they were lost or shortened on the way, or clip_norm is not in the units of model_delta"
        )

    def plain(self) -> str:
        return f"the canaries arrive at {self.length:.2g} of the declared clip norm"
