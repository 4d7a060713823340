"""The parts of an experiment: runs, numbers, tables, checks, a plot, and a conclusion.

Tables, checks, plots and conclusions are functions of the numbers alone, so they can also be made from a JSON file.
"""

import importlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coalmine.log.files import write_atomically
from coalmine.report.svg import STYLE, needs_matplotlib
from reproduction.experiment_options import Options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from reproduction.run_grid import Follow, PlannedRun

Found = dict[str, Any]
MODULES = {  # module of each experiment
    "table-2": "table_2", "accuracy": "table_3_accuracy", "stackoverflow": "table_4_stackoverflow",
    "emnist": "table_5_emnist", "presentations": "figures_1_to_3_presentations", "normality": "appendix_c_normality",
    "multirun": "appendix_d_multirun", "canife": "section_5_3_canife", "cost": "cost", "beyond": "beyond_the_paper",
    "amplification": "accountant_measured", "errata": "paper_errata",
}  # fmt: skip


def no_runs(options: Options) -> "list[PlannedRun]":
    """The plan of an experiment without stored training runs."""
    return []


@dataclass(frozen=True)
class Table:
    """A table to print: the first `left` columns contain text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 0


@dataclass(frozen=True)
class PaperCheck:
    """A claim checked against the numbers; `holds` is None if they do not decide it."""

    claim: str
    holds: bool | None
    detail: str

    @property
    def outcome(self) -> str:
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


class Account(NamedTuple):
    """The presentation of an experiment's numbers: tables, checks of the paper's claims, a conclusion, and a figure."""

    tables: Callable[[Found], list[Table]]
    checks: Callable[[Found], list[PaperCheck]]
    conclusion: Callable[[Found], str]
    draw: "Callable[[Figure, Found], None] | None" = None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of the paper's experiments, or one beyond it.

    `takes` are the options that it uses, besides scale and out. `repeats` lists what it trains instead of runs: noise,
    repeat, and whether it is finished. Without `gather`, its command provides the numbers.
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
    """Import the module of this experiment and return the experiment."""
    experiment: Experiment = importlib.import_module(f"reproduction.{MODULES[name]}").EXPERIMENT
    return experiment


def save_figure(path: Path, experiment: Experiment, found: Found) -> None:
    """Write the experiment's plot as a PNG atomically; the same numbers give the same bytes."""
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
    """Write 1,000 instead of 10³ on logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
                axis.set_minor_formatter(NullFormatter())


def shown(value: float | None, digits: int = 3) -> str:
    """A number formatted for tables; None is a dash."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    rounded = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(float(rounded)) >= 1000 else rounded


def beside(ours: float | None, paper: float | None) -> str:
    """Our value and the paper's value, formatted for tables."""
    return f"{shown(ours)} / {shown(paper)}"


def interval_shown(interval: Sequence[float] | None) -> str:
    """Both ends of an interval."""
    return "none" if interval is None else f"{shown(interval[0])} … {shown(interval[1])}"


def all_of(claim: str, cases: Sequence[tuple[str, bool]], *, nothing: str) -> PaperCheck:
    """A check that holds if every case does and that names the others; undecided without cases."""
    if not cases:
        return PaperCheck(claim, None, nothing)
    failed = [name for name, holds in cases if not holds]
    if failed:
        return PaperCheck(claim, False, f"not in {len(failed)} of {len(cases)}: {'; '.join(failed)}")
    return PaperCheck(claim, True, f"in all {len(cases)}")
