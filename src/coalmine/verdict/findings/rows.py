"""Findings of replayed steps: what one real row, or one client's reply, moves."""

from dataclasses import dataclass

from coalmine.verdict.findings.finding import Doubt, Refutation, at_least

CAUSES = "look for rows that see each other, a lost hook, or a clip of something other than a whole row"


@dataclass(frozen=True, kw_only=True)
class RowAboveClaim(Refutation):
    """A replayed row moves the sum further than its clip norm, and with the noise that this leaves the claim fails."""

    code = "row"
    remedy = CAUSES
    step: int
    row: int | None = None
    factor: float
    steps: int  # in which rows moved the sum too far
    epsilon: float
    claimed_epsilon: float

    def sentence(self) -> str:
        return (
            f"one client moves the sum of round {self.step} by {self.factor:.3g} clip norms, so the noise "
            f"counts as 1/{self.factor:.3g} of what is stated there: the run composes to an epsilon of {self.epsilon:.3g}, "
            f"above the claimed {self.claimed_epsilon:.4g}"
        )

    def plain(self) -> str:
        return (
            f"one client moves the sum of round {self.step} by {self.factor:.3g} clip norms instead of at "
            f"most 1, which makes ε at least {at_least(self.epsilon)}"
        )

    def advice(self) -> str:
        return _advice(self.remedy)


@dataclass(frozen=True, kw_only=True)
class RowMovesTooMuch(Doubt):
    """A replayed row moves the sum further than its clip norm, but in the replayed steps alone the claim still holds."""

    code = "row"
    remedy = CAUSES
    headline = "one row can move the sum by more than the clip norm"
    step: int
    row: int | None = None
    factor: float
    claimed_epsilon: float
    epsilon_if_every_step: float | None = None

    def sentence(self) -> str:
        return f"nothing refutes the claim, but {self.plain()}"

    def plain(self) -> str:
        text = f"one client moves the sum of round {self.step} by {self.factor:.4g} clip norms"
        if self.epsilon_if_every_step is None:
            return text
        return f"{text}; if every step were like that, ε would be {self.epsilon_if_every_step:.3g}"

    def advice(self) -> str:
        return _advice(self.remedy)


@dataclass(frozen=True, kw_only=True)
class RowMovesOthers(Doubt):
    """A replayed row moves the outputs of other rows, or buffers and statistics outside of the noised release."""

    code = "row"
    remedy = "compute every row by itself, and keep no statistics of rows in the model"
    headline = "one row moves more than its own part of the sum"
    coupled: float = 0.0  # change of other rows' outputs, relative to the outputs
    leaks: tuple[str, ...] = ()

    def sentence(self) -> str:
        return f"nothing refutes the claim, but {self.plain()}"

    def plain(self) -> str:
        parts = []
        if self.coupled:
            parts.append(
                f"one client moves what the model computes for others, by {self.coupled:.2g} of their outputs' size"
            )
        if self.leaks:
            parts.append(f"{', '.join(self.leaks)} moved with one client, outside of the noised release")
        return "; ".join(parts)


def _advice(remedy: str) -> str:
    return f"{remedy[0].upper()}{remedy[1:]}; `coalmine replay` shows it."
