"""What an experiment is made of: runs, numbers, tables, checks, a picture, and words about them.

Tables, checks, pictures and words are functions of the numbers alone, so that they can be had from a JSON file too.
"""

import importlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coalmine.report.svg import STYLE, needs_matplotlib
from coalmine.reproduction.experiment_options import Options
from coalmine.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from coalmine.reproduction.run_grid import Follow, PlannedRun

Found = dict[str, Any]
MODULES = {  # where each experiment is
    "table-2": "table_2", "accuracy": "table_3_accuracy", "stackoverflow": "table_4_stackoverflow",
    "emnist": "table_5_emnist", "presentations": "figures_1_to_3_presentations", "normality": "appendix_c_normality",
    "multirun": "appendix_d_multirun", "canife": "section_5_3_canife", "cost": "cost", "beyond": "beyond_the_paper",
    "amplification": "accountant_measured", "oddities": "oddities",
}  # fmt: skip
RUNS = ("device", "data_dir", "only", "rounds", "max_examples", "originals", "minutes")  # what grids of runs take


def no_runs(options: Options) -> "list[PlannedRun]":
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


class Account(NamedTuple):
    """What an experiment says of the numbers it found: tables, checks of the paper's claims, a conclusion, and a figure."""

    tables: Callable[[Found], list[Table]]
    checks: Callable[[Found], list[Check]]
    conclusion: Callable[[Found], str]
    draw: "Callable[[Figure, Found], None] | None" = None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of the paper's experiments, or one beyond it.

    `takes` are the options it has a use for, beside scale and out. `repeats` are what it trains in the place of runs:
    noise, repeat, and whether it is done. Without `gather` its command brings the numbers.
    """

    name: str
    title: str
    takes: tuple[str, ...] = ()
    plan: "Callable[[Options], list[PlannedRun]]" = no_runs
    gather: "Callable[[Options, Follow], Found] | None" = None
    account: Account
    size: tuple[float, float] = (9.0, 4.0)
    repeats: Callable[[Options], list[dict[str, Any]]] | None = None


def load_experiment(name: str) -> Experiment:
    """The experiment of this name; its module is imported now."""
    experiment: Experiment = importlib.import_module(f"coalmine.reproduction.{MODULES[name]}").EXPERIMENT
    return experiment


def save_figure(path: Path, experiment: Experiment, found: Found) -> None:
    """The experiment's picture as a PNG, whole or not at all, the same bytes for the same numbers."""
    needs_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    assert experiment.account.draw is not None
    with mpl.rc_context(STYLE | {"savefig.facecolor": "white"}):
        figure = Figure(figsize=experiment.size, layout="constrained")
        experiment.account.draw(figure, found)
        _plain_numbers(figure)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=90, metadata={"Software": None})
    write_atomically(path, content.getvalue())


def _plain_numbers(figure: "Figure") -> None:
    """1,000 instead of 10³ on logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
                axis.set_minor_formatter(NullFormatter())


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
