"""What an experiment is made of: runs, numbers, tables, checks, a picture, and words about them.

Tables, checks, pictures and words are functions of the numbers alone, so that they can be had from a JSON file too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coalmine.reproduction.setting import Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from coalmine.reproduction.runs import Follow, PlannedRun

Found = dict[str, Any]
RUNS = ("device", "data_dir", "only", "rounds", "max_examples", "originals", "minutes")  # what grids of runs take


def no_runs(setting: Setting) -> "list[PlannedRun]":
    """The plan of an experiment that trains nothing, or nothing that is kept."""
    return []


@dataclass(frozen=True)
class Table:
    """A table as it is printed: the first `left` columns hold words."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 0


@dataclass(frozen=True)
class Check:
    """A claim held against the numbers; `holds` is None where they do not decide it."""

    claim: str
    holds: bool | None
    detail: str

    @property
    def outcome(self) -> str:
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of the paper's experiments, or one beyond it.

    `takes` are the options it has a use for, beside scale and out. `repeats` are what it trains in the place of runs:
    noise, repeat, and whether it is done. Without `gather` its command brings the numbers.
    """

    name: str
    title: str
    takes: tuple[str, ...] = ()
    plan: "Callable[[Setting], list[PlannedRun]]" = no_runs
    gather: "Callable[[Setting, Follow], Found] | None" = None
    tables: Callable[[Found], list[Table]]
    checks: Callable[[Found], list[Check]]
    words: Callable[[Found], str]
    draw: "Callable[[Figure, Found], None] | None" = None
    size: tuple[float, float] = (9.0, 4.0)
    repeats: Callable[[Setting], list[dict[str, Any]]] | None = None


def shown(value: float | None, digits: int = 3) -> str:
    """A number as tables have it; none is a dash."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    rounded = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(float(rounded)) >= 1000 else rounded


def beside(ours: float | None, paper: float | None) -> str:
    """Ours, then the paper's."""
    return f"{shown(ours)} / {shown(paper)}"


def interval_shown(interval: Sequence[float] | None) -> str:
    """Both ends of an interval."""
    return "none" if interval is None else f"{shown(interval[0])} … {shown(interval[1])}"


def all_of(claim: str, cases: Sequence[tuple[str, bool]], *, nothing: str) -> Check:
    """A check that holds if every case does; it names those that do not. Without a case nothing is decided."""
    if not cases:
        return Check(claim, None, nothing)
    failed = [name for name, holds in cases if not holds]
    if failed:
        return Check(claim, False, f"not in {len(failed)} of {len(cases)}: {'; '.join(failed)}")
    return Check(claim, True, f"in all {len(cases)}")
