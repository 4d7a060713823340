"""What a replay measured: the change of the sum by each row, and whatever else moved with a row."""

from dataclasses import asdict, dataclass
from typing import Any

from coalmine.argument_checks import count_of

MOST_SHOWN = 4  # rows and tensors that a printout names
BEYOND = (
    "a row moves the sum by {factor:.4g} times what the claim's noise is meant for: where this happens, the noise "
    "multiplier z counts as z/{factor:.4g}"
)


@dataclass(frozen=True, kw_only=True)
class TensorChange:
    """How far one row moves one tensor of the release, in clip norms."""

    name: str
    change: float


@dataclass(frozen=True, kw_only=True)
class RowChange:
    """How far one row moves the release.

    `kind` is "real", or what was made of the row. `change` is in clip norms, and `factor` is the change over what the
    adjacency allows: 1 clip norm, or 2 if another row takes the row's place. `tensors` are ordered by their change.
    """

    row: int
    kind: str
    change: float
    factor: float
    tensors: tuple[TensorChange, ...] = ()

    def __str__(self) -> str:
        moved = ", ".join(f"{each.name} {each.change:.3g}" for each in self.tensors[:MOST_SHOWN])
        more = len(self.tensors) - MOST_SHOWN
        moved += f" and {more} more" if more > 0 else ""
        return f"row {self.row} ({self.kind}): {self.change:.4g} clip norms ({moved})"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What one row can move in one step.

    `tolerance` is the rounding in `factor`, `repeats` whether a second run with restored generators gave the same release,
    and `difference` how far it was off, in clip norms. `leaks` are the buffers, statistics and other values that a row
    changes outside of the release, with their relative change. `coupled` is how far another row's output moved, relative to
    the outputs, if the step's outputs are known. `unaligned` means that random numbers are drawn by row, so
    leaving a row out shifts those of the others. `divisor` is the release with a row of weight 0 over the one without it:
    1 if the sum is divided by a fixed number, None if that was not tested. `not_finite` lists rows whose release is NaN or
    infinite.
    """

    adjacency: str
    clip_norm: float
    batch: int
    rows: tuple[RowChange, ...]
    tolerance: float
    difference: float = 0.0
    leaks: dict[str, float]
    coupled: float = 0.0
    unaligned: bool = False
    divisor: float | None = None
    not_finite: tuple[str, ...] = ()

    @property
    def worst(self) -> RowChange | None:
        """The row that moves the release most."""
        return max(self.rows, key=lambda row: row.factor, default=None)

    @property
    def factor(self) -> float:
        """The largest factor; 0 if no row could be measured."""
        return 0.0 if self.worst is None else self.worst.factor

    @property
    def repeats(self) -> bool:
        """Whether the release was the same in a second run with the same random numbers, up to rounding."""
        return self.difference <= self.tolerance

    @property
    def is_counterexample(self) -> bool:
        """Whether a row moves the release further than the adjacency allows, beyond rounding."""
        return self.repeats and not self.unaligned and self.factor > 1 + self.tolerance

    @property
    def ok(self) -> bool:
        """Whether everything repeats, no row moves too much, and nothing else moves with a row."""
        fixed = self.divisor is None or abs(self.divisor - 1) <= self.tolerance
        return (
            self.repeats
            and not self.unaligned
            and not self.is_counterexample
            and not self.leaks
            and not self.coupled
            and not self.not_finite
            and fixed
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields and what follows from them, for JSON."""
        values = asdict(self)
        values["rows"] = [asdict(row) for row in self.rows]
        for row in values["rows"]:
            row["tensors"] = list(row["tensors"])
        values["not_finite"] = list(self.not_finite)
        return values | {"factor": self.factor, "repeats": self.repeats, "ok": self.ok}

    def __str__(self) -> str:
        tried = f"{count_of(len(self.rows), 'row')} in a batch of {self.batch} ({self.adjacency})"
        lines = [
            f"replay of {tried}: at most {self.factor:.4f} of what one row may move, rounding {self.tolerance:.1g}"
        ]
        listed = sorted(self.rows, key=lambda row: -row.factor)
        lines += [f"  {row}" for row in listed[:MOST_SHOWN]]
        return "\n".join(
            [*lines, *(f"  {line}" for line in self.problems()), *([] if not self.ok else ["  nothing else moved"])]
        )

    def problems(self) -> list[str]:
        """What is wrong, one sentence each; empty if nothing is."""
        lines = []
        if not self.repeats:
            lines.append(
                f"the release does not repeat with the same random numbers: it differs by {self.difference:.3g} clip norms. "
                "Its generator cannot be restored: pass it as generators=, or return the sum before the noise"
            )
        elif self.unaligned:
            lines.append(
                "random numbers are drawn by row, as for dropout, so leaving a row out shifts those of the others and "
                "nothing can be said: let the step take a weight for each row as its second argument"
            )
        elif self.is_counterexample:
            lines.append(BEYOND.format(factor=self.factor))
        if self.coupled:
            lines.append(
                f"rows see each other: the output of another row moves by {self.coupled:.2g} of the outputs' size"
            )
        if self.leaks:
            names = ", ".join(list(self.leaks)[:MOST_SHOWN])
            more = len(self.leaks) - MOST_SHOWN
            lines.append(f"moves with a row, outside of the release: {names}{f' and {more} more' if more > 0 else ''}")
        if self.divisor is not None and abs(self.divisor - 1) > self.tolerance:
            lines.append(
                "the sum is divided by the number of rows that are present, which one row changes: divide by the expected "
                "number"
            )
        if self.not_finite:
            lines.append(f"the release is NaN or infinite with {', '.join(self.not_finite[:MOST_SHOWN])}")
        return lines
