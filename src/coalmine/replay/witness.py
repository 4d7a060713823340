"""What a replay showed, as the result of a run keeps it: the witness of a step."""

from typing import Any

from msgspec import ValidationError, convert

from coalmine.replay.outcome import Replay
from coalmine.verdict.replayed_rows import MOST_KEPT, ReplayedStep

LEAST_EXCESS = 1e-3  # of the clip norm: a smaller excess is called rounding
ROUNDOFFS = 4  # of the precision of a row's gradient, by which its clipped length may be off


def witness(step: int, outcome: Replay, *, precision: float = 0.0) -> ReplayedStep:
    """The witness of a step; `precision` is the roundoff with which rows' gradients are computed."""
    tolerance = max(outcome.tolerance, ROUNDOFFS * precision, LEAST_EXCESS)
    if outcome.difference > tolerance:
        return unshown(
            step,
            f"the step does not repeat with the same random numbers: it differs by {outcome.difference:.2g} clip norms",
        )
    if outcome.unaligned:
        return unshown(step, "random numbers belong to places in the batch, and the step takes no weights of rows")
    worst = outcome.worst
    if worst is None:
        return unshown(step, f"the sum is NaN or infinite with {', '.join(outcome.not_finite[:1]) or 'every row'}")
    return ReplayedStep(
        step=step,
        rows=len(outcome.rows),
        factor=worst.factor,
        tolerance=tolerance,
        row=worst.row,
        kind=worst.kind,
        tensors=tuple((each.name, each.change) for each in worst.tensors[:MOST_KEPT]),
        coupled=outcome.coupled,
        leaks=tuple(outcome.leaks),
    )


def read_step(values: Any) -> ReplayedStep | None:
    """A step from a line of metrics; None if there is none."""
    try:
        return None if values is None else convert(values, ReplayedStep)
    except ValidationError:
        return None


def unshown(step: int, problem: str) -> ReplayedStep:
    """A step whose replay shows nothing."""
    return ReplayedStep(step=step, rows=0, problem=problem)
