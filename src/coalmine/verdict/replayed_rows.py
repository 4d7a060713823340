"""Steps that were run again with one row or one client's reply less: what moved, and what that means for a claim."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coalmine.argument_checks import count_of
from coalmine.verdict.claim_context import ClaimContext
from coalmine.verdict.findings.rows import RowAboveClaim, RowMovesOthers, RowMovesTooMuch
from coalmine.verdict.verdict import Verdict

MOST_KEPT = 4  # tensors and leaks that a witness keeps


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """One step that was replayed: how many rows, and its witness, the row that moved the sum furthest.

    `factor` is that row's change in units of what the claim's noise is meant for, one clip norm, and `tolerance` the
    rounding in it. `row` is its place in the batch and `kind` what was made of it. `tensors` are the parts of the sum that
    it moved furthest, in clip norms. `coupled` is how far another row's output moved, relative to the outputs, and `leaks`
    are the buffers and statistics that moved with a row. `problem` says why the step shows nothing.
    """

    step: int
    rows: int
    factor: float = 0.0
    tolerance: float = 0.0
    row: int | None = None
    kind: str = "real"
    tensors: tuple[tuple[str, float], ...] = ()
    coupled: float = 0.0
    leaks: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def excess(self) -> float:
        """The factor that is proven beyond rounding: 1 if the row stays within its clip norm."""
        return max(self.factor - self.tolerance, 1.0) if self.problem is None else 1.0

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"tensors": [list(each) for each in self.tensors], "leaks": list(self.leaks)}

    def __str__(self) -> str:
        if self.problem is not None:
            return f"round {self.step}: {self.problem}"
        parts = ", ".join(f"{name} {change:.3g}" for name, change in self.tensors)
        where = (
            ""
            if self.row is None
            else f"; number {self.row} of the batch ({self.kind}) moves it most" + (f": {parts}" * bool(parts))
        )
        lines = [f"round {self.step}: {count_of(self.rows, 'client')}, at most {self.factor:.4g} clip norms{where}"]
        if self.coupled:
            lines.append(f"  the outputs of other clients move by {self.coupled:.2g} of their size")
        if self.leaks:
            lines.append(f"  moves with a client, outside of the release: {', '.join(self.leaks)}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class ReplayedRows:
    """All replayed steps of a run. `passes` counts their passes. Sentences say "client" and "round", as all findings do.

    `assumes` is what the replay took for granted, such as a loss that is a sum over rows.
    """

    steps: tuple[ReplayedStep, ...]
    passes: int = 0
    assumes: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"steps": [step.to_dict() for step in self.steps]}

    @property
    def shown(self) -> tuple[ReplayedStep, ...]:
        """The steps that show something."""
        return tuple(step for step in self.steps if step.problem is None and step.rows)

    @property
    def worst(self) -> ReplayedStep | None:
        """The step with the row that moves its sum furthest."""
        return max(self.shown, key=lambda step: step.factor, default=None)

    @property
    def coupled(self) -> float:
        return max((step.coupled for step in self.shown), default=0.0)

    @property
    def leaks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for step in self.shown for name in step.leaks))

    @property
    def holds(self) -> bool:
        """Whether no row moved more than it may."""
        return bool(self.shown) and not (self.coupled or self.leaks or any(step.excess > 1 for step in self.shown))

    @property
    def problem(self) -> str | None:
        """Why nothing was shown; None if something was."""
        if self.shown:
            return None
        return next((step.problem for step in self.steps if step.problem is not None), "no step was replayed")

    def sentence(self) -> str:
        """What was measured, for the audited item."""
        worst = self.worst
        if worst is None:
            return f"{self.problem}: {UNTESTED}"
        count = sum(step.rows for step in self.shown)
        steps = count_of(len({step.step for step in self.shown}), "round")  # several ranks replay the same one
        text = f"{count_of(count, 'real client')} in {steps}, at most {worst.factor:.3f} clip norms"
        if self.coupled:
            text += f"; one client moves the outputs of others, by {self.coupled:.2g} of their size"
        if self.leaks:
            text += f"; {', '.join(self.leaks[:MOST_KEPT])} moved with one client, outside of the release"
        if self.assumes:
            text += f"; {self.assumes}"
        return f"{text} (cost: {self.passes} passes)" if self.passes else text


UNTESTED = "how real rows enter the sum was not tested"


def judge_rows(verdict: Verdict, replayed: ReplayedRows, context: ClaimContext) -> Verdict:
    """The verdict with what the replayed rows show: they may refute a claim or bar a PASS, and confirm nothing.

    A row that moves the sum by s clip norms leaves the noise multiplier z/s in its step. The claim is refuted if the run
    composed like that exceeds it. No chance is involved: the change was measured without noise.
    """
    worst = replayed.worst
    if worst is None or replayed.holds:
        return verdict
    facts: dict[str, Any] = {"step": worst.step, "row": worst.row, "factor": worst.factor}
    if worst.excess > 1:
        witnessed: dict[int, float] = {}
        for step in replayed.shown:  # several ranks may have replayed the same step
            witnessed[step.step] = max(step.excess, witnessed.get(step.step, 1.0))
        epsilon = _composed(witnessed, context)
        always = _composed(dict.fromkeys(_numbers(context), worst.excess), context)
        claimed = context.claim.epsilon
        if epsilon is not None and context.exceeded(epsilon):
            steps = sum(step.excess > 1 for step in replayed.shown)
            found = RowAboveClaim(**facts, steps=steps, epsilon=epsilon, claimed_epsilon=claimed)
            return Verdict(finding=found, evidence=_also(verdict))
        if verdict.outcome != "VIOLATION":
            return Verdict(finding=RowMovesTooMuch(**facts, epsilon_if_every_step=always, claimed_epsilon=claimed))
    if verdict.outcome != "PASS":
        return verdict
    return Verdict(finding=RowMovesOthers(coupled=replayed.coupled, leaks=replayed.leaks[:MOST_KEPT]))


def _also(verdict: Verdict) -> tuple[str, ...]:
    """The rung that refutes the claim too."""
    return (verdict.rung,) if verdict.outcome == "VIOLATION" and verdict.rung else ()


def _numbers(context: ClaimContext) -> Sequence[int]:
    stated = context.run.stated
    return [] if stated is None else stated.numbers.tolist()


def _composed(factors: dict[int, float], context: ClaimContext) -> float | None:
    """Epsilon with z over these factors in these steps; None if the rounds do not state their noise."""
    stated = context.run.stated
    if stated is None or context.run.correlated or not np.isfinite(stated.multipliers).all():
        return None
    scale = np.array([factors.get(int(number), 1.0) for number in stated.numbers])
    with np.errstate(divide="ignore"):
        inverse = scale / (stated.multipliers * stated.high)
    return context.composed(inverse)
