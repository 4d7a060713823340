"""The rows of a result: those that tables and plots show, one for each adversary, and the folded ones."""

import math
from dataclasses import dataclass
from typing import Literal

from coalmine.evidence.gaussian_bound import CONFIDENCE, NO_LAW, GaussianBound
from coalmine.evidence.ladder import RUNGS, Scores
from coalmine.result.audit_result import Adversary, AuditResult, Headline, Row
from coalmine.result.words import format_bound, format_interval, format_measured, format_number
from coalmine.verdict.outcome import UNDERPOWERED

GAUSSIAN_HEAD, ANY_LAW_HEAD = "≥ if Gaussian", "≥ any law"  # the two lower bounds, named for what they assume
ASSUMPTIONS = (
    f"lower bounds, 95 %: `{GAUSSIAN_HEAD}` assumes that the noise is Gaussian, or normal scores of a final model, and is "
    f"withheld where a measurement contradicts it; `{ANY_LAW_HEAD}` assumes no law"
)
KNOWN_NULL = tuple(rung for rung in RUNGS if rung != "all-iterates")  # rungs whose null has a closed form
Kind = Literal["estimate", "heuristic", "valid bound"]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """The result of one method on a row's scores, and what kind of number it is."""

    name: str
    value: float
    kind: Kind
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A row of an adversary with the adversary's name, or the pooled headline in its place.

    `row` is None if the headline is pooled and no row has its number of presentations. Values that only a row has are then
    NaN.
    """

    rung: str
    row: Row | None
    headline: Headline | None = (
        None  # set if pooled, that is, fitted to all canaries whatever their number of presentations
    )
    canaries: int

    @property
    def pooled(self) -> bool:
        return self.headline is not None

    @property
    def presentations(self) -> int | None:
        if self.headline is not None:
            return self.headline.participations
        return None if self.row is None else self.row.presentations

    @property
    def name(self) -> str:
        return self.rung if self.presentations is None else f"{self.rung} {self.presentations}×"

    @property
    def epsilon(self) -> float:
        if self.headline is not None:
            return self.headline.epsilon
        return math.nan if self.row is None else self.row.estimate.epsilon

    @property
    def interval(self) -> tuple[float, float] | None:
        if self.headline is not None:
            return self.headline.interval
        interval = None if self.row is None else self.row.estimate.interval
        return None if interval is None else (float(interval.low), float(interval.high))

    @property
    def lower_bound(self) -> float:
        return math.nan if self.row is None else self.row.lower_bound

    @property
    def gaussian(self) -> GaussianBound:
        """The bound and the interval if the noise is Gaussian."""
        if self.headline is not None:
            return self.headline.gaussian
        return GaussianBound(withheld="") if self.row is None else self.row.gaussian

    @property
    def lower_bound_gaussian(self) -> float | None:
        """The lower bound if the noise is Gaussian; None if it is withheld."""
        return self.gaussian.lower_bound

    @property
    def floor(self) -> float:
        """95 % of estimates from as many canaries fall below this when nothing leaks."""
        return math.nan if self.row is None else self.row.estimate.floor.q95

    @property
    def ceiling(self) -> float:
        return math.nan if self.row is None else self.row.estimate.ceiling

    @property
    def paper_epsilon(self) -> float:
        return math.nan if self.row is None else self.row.paper_epsilon

    @property
    def paper_lower_bound(self) -> float:
        return math.nan if self.row is None else self.row.paper_lower_bound

    @property
    def warnings(self) -> tuple[str, ...]:
        return () if self.row is None or self.pooled else self.row.warnings

    @property
    def detected(self) -> bool:
        """Whether the estimate lies above the noise floor."""
        return not self.epsilon <= self.floor

    @property
    def std_fitted(self) -> bool:
        """Whether the standard deviation was fitted to few scores, although the null's is known."""
        fitted = self.row is not None and not self.pooled and self.row.estimate.variance.used == "fitted"
        return fitted and self.rung in KNOWN_NULL

    @property
    def estimators(self) -> tuple[Estimator, ...]:
        """All numbers of this row with their kinds."""
        level = f"{CONFIDENCE:.0%}"
        used = None if self.row is None else self.row.estimate.variance.used
        how = "a normal law with " + ("the null's std" if used == "null" else "a fitted std")
        if used == "accountant":
            how = "the accountant's ε at the measured noise, for the declared sampling"
        chosen = f"each threshold at {level}, the best one chosen afterwards: not a bound at {level}"
        estimators = (
            Estimator(name="estimate", value=self.epsilon, kind="estimate", note=how),
            Estimator(
                name="lower bound if Gaussian",
                value=math.nan if self.lower_bound_gaussian is None else self.lower_bound_gaussian,
                kind="valid bound",
                note=f"withheld: {self.gaussian.withheld}"
                if self.gaussian.withheld
                else f"{level}, if the noise is Gaussian",
            ),
            Estimator(
                name="lower bound",
                value=self.lower_bound,
                kind="valid bound",
                note=f"{level}, for any law of the scores",
            ),
            Estimator(
                name="paper's ε", value=self.paper_epsilon, kind="estimate", note="a normal law with a fitted std"
            ),
            Estimator(name="paper's ε_lo", value=self.paper_lower_bound, kind="heuristic", note=chosen),
        )
        return tuple(each for each in estimators if not (used == "accountant" and math.isnan(each.value)))


def all_rows(result: AuditResult) -> list[TableRow]:
    """All rows of all adversaries, the weakest adversary first, and for each the row with the most canaries first."""
    return [_table_row(each, row) for each in result.adversaries.values() for row in each.rows]


def main_rows(result: AuditResult) -> list[TableRow]:
    """One row for each adversary: the one with the headline's participations, or else the one with the most canaries."""
    times = None if result.headline is None else result.headline.participations
    return [_table_row(each, each.row_for(times)) for each in result.adversaries.values()]


def table_rows(result: AuditResult) -> list[TableRow]:
    """The rows of the tables, one for each adversary. A pooled headline replaces its rung's row."""
    top, rows = result.headline, main_rows(result)
    if top is None or not (top.pooled or top.rung not in result.adversaries):
        return rows
    groups = result.adversaries[top.rung].rows if top.rung in result.adversaries else ()
    same = next((row for row in groups if row.presentations == top.participations), None)
    pooled = TableRow(rung=top.rung, row=same, headline=top, canaries=result.settings.canaries)
    if top.rung not in result.adversaries:
        return [*rows, pooled]
    return [pooled if row.rung == top.rung else row for row in rows]


def secondary_rows(result: AuditResult) -> list[TableRow]:
    """The other rows, one for each number of presentations, in the order of the tables."""
    main, rungs = table_rows(result), list(result.adversaries)
    rest = [row for row in all_rows(result) if row not in main]
    return sorted(rest, key=lambda row: (rungs.index(row.rung), row.presentations or 0))


def top_row(result: AuditResult) -> TableRow | None:
    """The row of the measured ε at the top: the headline's, or without a headline that of the strongest adversary."""
    if result.headline is None:
        return strongest_row(result)
    return next((row for row in table_rows(result) if row.rung == result.headline.rung), None)


def strongest_row(result: AuditResult) -> TableRow | None:
    """The main row of the strongest adversary."""
    known = [row for row in main_rows(result) if row.rung in RUNGS]
    return max(known, key=lambda row: RUNGS.index(row.rung), default=None)


def published_row(result: AuditResult) -> TableRow | None:
    """The row whose scores published estimators use: the headline's, or that of its rung with the most canaries."""
    top = top_row(result)
    if top is None or not top.pooled:
        return top
    return next((row for row in main_rows(result) if row.rung == top.rung), None)


def row_of(result: AuditResult, scores: Scores) -> Row | None:
    """The row of the result that was computed from these scores."""
    rows = result.adversaries[scores.rung].rows if scores.rung in result.adversaries else ()
    return next((row for row in rows if row.presentations == scores.presentations), None)


def rung_verdict(result: AuditResult, rung: str) -> str:
    """The verdict on one rung; empty without a claim, and "–" for a weaker attacker that could not confirm it.

    A rung without rows has the run's verdict if it decided.
    """
    adversary, verdict = result.adversaries.get(rung), None
    if adversary is not None:
        verdict = adversary.verdict
    elif result.headline is not None and result.headline.rung == rung:
        verdict = result.verdict
    if verdict is None:
        return ""
    last = next(reversed(result.adversaries), rung)
    decides = rung == last or (result.verdict is not None and result.verdict.rung == rung)
    return str(verdict.outcome) if decides or verdict.outcome != UNDERPOWERED else "–"


def ladder_table(result: AuditResult) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the ladder for terminals and notebooks: one line for each adversary."""
    heads = [
        *("adversary", "shown", "ε", "95 % interval", GAUSSIAN_HEAD, ANY_LAW_HEAD),
        *("floor", "paper's ε", "paper's ε_lo", "verdict"),
    ]
    lines = [
        [
            f"{row.rung}, pooled" if row.pooled else row.rung,
            "" if row.presentations is None else f"{row.presentations}×",
            *measured_cells(row),
            format_bound(row.lower_bound_gaussian),
            format_bound(row.lower_bound),
            *map(format_number, (row.floor, row.paper_epsilon, row.paper_lower_bound)),
            rung_verdict(result, row.rung),
        ]
        for row in table_rows(result)
    ]
    judged = any(line[-1] for line in lines)
    return (heads, lines) if judged else (heads[:-1], [line[:-1] for line in lines])


def bound_notes(result: AuditResult) -> list[str]:
    """What the two lower bounds assume, and why the one for Gaussian noise is withheld where it is."""
    names: dict[str, list[str]] = {}
    for row in table_rows(result):
        if row.gaussian.withheld not in ("", NO_LAW):
            names.setdefault(row.gaussian.withheld, []).append(row.name)
    return [ASSUMPTIONS, *(f"{', '.join(rows)}: not offered if Gaussian: {why}" for why, rows in names.items())]


def measured_cells(row: TableRow) -> tuple[str, str]:
    """The estimate and its interval, with the digits that the interval carries."""
    if row.interval is None:
        return format_number(row.epsilon), format_interval(None)
    return format_measured(row.epsilon, row.interval)


def row_warnings(result: AuditResult) -> list[str]:
    """The warnings of the rows in the tables, each after the names of its rows."""
    names_by_warning: dict[str, list[str]] = {}
    for row in table_rows(result):
        for warning in row.warnings:
            names_by_warning.setdefault(warning, []).append(row.name)
    return [f"{', '.join(names)}: {warning}" for warning, names in names_by_warning.items()]


def _table_row(adversary: Adversary, row: Row) -> TableRow:
    return TableRow(rung=adversary.name, row=row, canaries=row.canaries)
