"""Findings of data canaries: what a model's outputs tell about records that a coin put into the training data."""

from dataclasses import dataclass

from coalmine.verdict.findings.finding import Doubt, Refutation, at_least

MORE = "insert more canaries, or stronger ones, and use canaries of gradients too: they can confirm a claim"


@dataclass(frozen=True, kw_only=True)
class RecordsAboveClaim(Refutation):
    """The model's outputs tell more about inserted records than the claimed ε allows."""

    code = "records"
    remedy = (
        "check that every row is clipped, that the full noise is added, and that records are trained on once a pick"
    )
    sees: str
    canaries: int
    copies: int = 1
    epsilon: float
    claimed_epsilon: float
    confidence: float

    def sentence(self) -> str:
        group = f" for a group of {self.copies}" if self.copies > 1 else ""
        least = at_least(self.epsilon, above=self.claimed_epsilon)
        return (
            f"outputs of {self.sees} tell which of {self.canaries:,} records were inserted: ε is at least "
            f"{least}{group}, with {self.confidence:.2%} confidence, above the claimed {self.claimed_epsilon:.4g}"
        )


@dataclass(frozen=True, kw_only=True)
class OutputsAlone(Doubt):
    """Outputs of the model do not refute the claim. They never confirm one."""

    code = "records"
    remedy = MORE
    headline = "outputs alone cannot confirm it"
    canaries: int
    ceiling: float

    def sentence(self) -> str:
        return (
            f"outputs do not refute the claim, and cannot confirm one: {self.canaries:,} perfect guesses would show an ε of "
            f"{self.ceiling:.3g}"
        )


@dataclass(frozen=True, kw_only=True)
class OutputsNotJudged(Doubt):
    """The claim is about something else than adding or removing one record from the whole training."""

    code = "records"
    remedy = "claim the ε of one row over the whole run"
    headline = "outputs say nothing of this claim"
    why: str

    def sentence(self) -> str:
        return f"outputs were not compared with the claim: {self.why}"
