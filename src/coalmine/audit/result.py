"""What an audit found: a row for each adversary, the gauges, a verdict; as text, as a notebook table, as JSON."""

import html
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

from coalmine.audit.coverage import AuditedItem
from coalmine.audit.gauge import Gauge
from coalmine.audit.ladder import RUNGS, Scores
from coalmine.audit.verdict import Claim, Verdict
from coalmine.checks import count_of
from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.estimate import EpsilonEstimate, epsilon_estimate, estimate_from_final, estimate_from_iterates
from coalmine.estimators.gaussians import Gaussian
from coalmine.storage.record import SCHEMA_VERSION, Settings

CONFIDENCE = 0.95
KNOWN_RUNGS = ("known-round", "known-others")
FEWEST = 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """One adversary, for canaries presented equally often. `lower_bound` is valid; the paper's is not, by its own name.

    Under correlated noise the estimate is for somebody of this `sensitivity`, in clip norms: the canaries' root mean square.
    """

    presentations: int | None
    canaries: int
    estimate: EpsilonEstimate
    lower_bound: float
    paper_epsilon: float
    paper_lower_bound: float
    warnings: tuple[str, ...] = ()
    sensitivity: float | None = None

    def to_dict(self) -> dict[str, Any]:
        found = self.estimate
        exposed = {} if self.sensitivity is None else {"sensitivity": self.sensitivity}
        return exposed | {
            "presentations": self.presentations,
            "canaries": self.canaries,
            "epsilon": found.epsilon,
            "interval": None if found.interval is None else [float(found.interval.low), float(found.interval.high)],
            "lower_bound": self.lower_bound,
            "confidence": CONFIDENCE,
            "paper": {"epsilon": self.paper_epsilon, "lower_bound": self.paper_lower_bound},
            "floor": {"median": found.floor.median, "q95": found.floor.q95},
            "ceiling": found.ceiling,
            "variance": {"used": found.variance.used, "reason": found.variance.reason},
            "mean": found.mean,
            "std": found.std,
            "null_mean": found.null_mean,
            "null_std": found.null_std,
            "anderson_darling": {
                "statistic": found.anderson_darling.statistic,
                "p_value": found.anderson_darling.p_value,
            },
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """One rung of the ladder: a row for each number of presentations, the one with most canaries first."""

    name: str
    rows: tuple[Row, ...]
    verdict: Verdict | None = None

    @property
    def headline(self) -> Row:
        return self.rows[0]

    def row_for(self, participations: int | None) -> Row:
        """The row of canaries presented so often, or else the one with most canaries."""
        return next((row for row in self.rows if row.presentations == participations), self.headline)

    def to_dict(self) -> dict[str, Any]:
        return self.headline.to_dict() | {
            "groups": [row.to_dict() for row in self.rows],
            "verdict": None if self.verdict is None else self.verdict.outcome,
            "reason": None if self.verdict is None else self.verdict.reason,
        }


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The number on top: what the rung that the verdict rests on reads, in the claim's own terms.

    `participations` is how often its client takes part; None where presentations make no difference to the rung. Over
    canaries that were presented unequally often the reading is pooled: score = β√R + noise is fitted to all of them.
    """

    rung: str
    participations: int | None
    epsilon: float
    interval: tuple[float, float] | None
    pooled: bool = False

    def to_dict(self) -> dict[str, Any]:
        interval = None if self.interval is None else list(self.interval)
        return vars(self) | {"interval": interval}


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditResult:
    """Everything an audit found. `verdict` is None where nothing was claimed. Prints as a table; `to_dict` for JSON."""

    settings: Settings
    rounds: int
    skipped: int
    adversaries: dict[str, Adversary]
    gauges: tuple[Gauge, ...]
    analytical_epsilon: float | None = None
    claim: Claim | None = None
    clients: int | None = None
    verdict: Verdict | None = None
    headline: Headline | None = None
    audited: tuple[AuditedItem, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, rung: str) -> Adversary:
        """One adversary of the ladder by its name."""
        if rung not in self.adversaries:
            raise KeyError(f"{rung!r} is not in this result; it holds {', '.join(self.adversaries) or 'no adversary'}")
        return self.adversaries[rung]

    @property
    def epsilon(self) -> float | None:
        """The estimate on top: that of the rung which the verdict rests on; None where no rung could be read."""
        return None if self.headline is None else self.headline.epsilon

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of `epsilon`."""
        return None if self.headline is None else self.headline.interval

    def to_dict(self) -> dict[str, Any]:
        """As docs/result.schema.json has it; inf and NaN are still floats here."""
        sensitivity = None if self.claim is None else self.claim.sensitivity
        accounted = {} if sensitivity is None else {"claim_sensitivity": sensitivity}
        return accounted | {
            "schema_version": SCHEMA_VERSION,
            "dim": self.settings.dim,
            "delta": self.settings.delta,
            "canaries": self.settings.canaries,
            "unobserved": self.settings.unobserved,
            "kind": self.settings.kind,
            "rounds": self.rounds,
            "skipped_rounds": self.skipped,
            "analytical_epsilon": self.analytical_epsilon,
            "claimed_epsilon": None if self.claim is None else self.claim.epsilon,
            "claim_accounting": None if self.claim is None else self.claim.accounting,
            "claim_participations": None if self.claim is None else self.claim.participations,
            "clients": self.clients,
            "verdict": None if self.verdict is None else self.verdict.outcome,
            "reason": None if self.verdict is None else self.verdict.reason,
            "reason_code": None if self.verdict is None else self.verdict.code,
            "headline": None if self.headline is None else self.headline.to_dict(),
            "audited": {item.name: item.to_dict() for item in self.audited},
            "gauges": {gauge.name: gauge.to_dict() for gauge in self.gauges},
            "adversaries": {name: adversary.to_dict() for name, adversary in self.adversaries.items()},
            "notes": list(self.notes),
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Column heads and cells, as every view shows them: one line for each adversary."""
        heads = ["adversary", "shown", "epsilon", "95 % interval", "lower bound", "floor", "paper's ε", "paper's ε_lo"]
        judged = self.verdict is not None
        cells = [self._cells(adversary) for adversary in self.adversaries.values()]
        top = self.headline
        if top is not None and top.rung not in self.adversaries:  # too few canaries of any one number of presentations
            shown = [_shown_times(top.participations), format_number(top.epsilon), format_interval(top.interval)]
            outcome = "" if self.verdict is None else self.verdict.outcome
            cells.append([top.rung, *shown, "-", "-", "-", "-", outcome])
        if not judged:
            cells = [line[: len(heads)] for line in cells]
        return ([*heads, "verdict"] if judged else heads), cells

    def _cells(self, adversary: Adversary) -> list[str]:
        top = self.headline
        row = adversary.row_for(top.participations if top else None)
        epsilon, interval, times = row.estimate.epsilon, _pair(row.estimate.interval), row.presentations
        if top is not None and top.rung == adversary.name and top.pooled:
            shown = [_shown_times(top.participations), format_number(top.epsilon), format_interval(top.interval)]
            return [adversary.name, *shown, "-", "-", "-", "-", adversary.verdict.outcome if adversary.verdict else ""]
        return [
            adversary.name,
            _shown_times(times),
            format_number(epsilon),
            format_interval(interval),
            format_number(row.lower_bound),
            format_number(row.estimate.floor.q95),
            format_number(row.paper_epsilon),
            format_number(row.paper_lower_bound),
            adversary.verdict.outcome if adversary.verdict else "",
        ]

    def lines(self) -> list[str]:
        """What stands under the table: claim, verdict, what was checked, gauges, notes."""
        texts = []
        if self.analytical_epsilon is not None:
            texts.append(f"analytical epsilon {format_number(self.analytical_epsilon)}")
        if self.claim is not None and self.verdict is not None:
            claim = f"claimed epsilon {format_number(self.claim.epsilon)} ({self.claim.accounting})"
            texts += [f"{claim}: {self.verdict.outcome}", self.verdict.reason]
            texts += [self.scope] if self.verdict.outcome == "PASS" else []
        texts += [f"{item.name}: {item.status} ({item.detail})" for item in self.audited]
        for gauge in self.gauges:
            span = format_number(gauge.smallest)
            if gauge.smallest != gauge.largest:
                span += f" … {format_number(gauge.largest)}"
            where = f" in {count_of(len(gauge.flagged), 'round')}" if gauge.flagged else ""
            mark = "" if gauge.status == "ok" else f"  <- {gauge.status}{where}"
            texts.append(f"gauge {gauge.name}: {span}{mark}")
        hidden = sum(len(adversary.rows) - 1 for adversary in self.adversaries.values())
        if hidden:
            texts.append(
                f"{hidden} more rows, one for each number of presentations, are in result.json and `adversaries`"
            )
        return texts + list(self.notes)

    @property
    def scope(self) -> str:
        """What a PASS speaks of, and what it does not."""
        checked = [item.name for item in self.audited if item.status == "checked"]
        rest = [item.name for item in self.audited if item.status != "checked"]
        text = f"This PASS covers: {', '.join(checked) or 'the canaries alone'}."
        return f"{text} It does not cover: {', '.join(rest)}." if rest else text

    def __str__(self) -> str:
        heads, cells = self.table()
        widths = [max(len(line[column]) for line in [heads, *cells]) for column in range(len(heads))]
        rows = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [heads, *cells]
        ]
        settings = self.settings
        title = (
            f"audit of {self.rounds} rounds: {settings.canaries:,} {settings.kind} canaries and {settings.unobserved:,} "
            f"unobserved ones in {settings.dim:,} dimensions, delta {settings.delta:.3g}"
        )
        return "\n".join([title, *rows, *self.lines()])

    def __repr__(self) -> str:
        outcome = "" if self.verdict is None else f", verdict={self.verdict.outcome}"
        return f"AuditResult(rounds={self.rounds}, adversaries={', '.join(self.adversaries)}{outcome})"

    def _repr_html_(self) -> str:
        heads, cells = self.table()
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in cells)
        below = "".join(f"<p>{html.escape(line)}</p>" for line in self.lines())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def make_row(scores: Scores, settings: Settings) -> Row | None:
    """The figures of one group of scores; None where it is too small to say anything."""
    estimate = _estimate(scores, settings)
    if estimate is None:
        return None
    delta = settings.delta
    null = scores.unobserved if scores.bound_null is None else scores.bound_null
    return Row(
        presentations=scores.presentations,
        canaries=scores.observed.size,
        estimate=estimate,
        lower_bound=epsilon_lower_bound(scores.bounded, null=null, delta=delta, confidence=CONFIDENCE),
        paper_epsilon=estimate.epsilon if scores.null is None else _paper_epsilon(scores, settings),
        paper_lower_bound=epsilon_lower_bound(
            scores.bounded, null=null, delta=delta, confidence=CONFIDENCE, method="paper"
        ),
        warnings=_warnings(scores, estimate),
        sensitivity=None if scores.strength is None else math.sqrt(scores.strength),
    )


def _estimate(scores: Scores, settings: Settings) -> EpsilonEstimate | None:
    """The estimate from one group of scores; None where it is too small to say anything."""
    compared = scores.unobserved.size if scores.bound_null is None else FEWEST
    if min(scores.observed.size, compared) < FEWEST:
        return None
    if scores.null is None:
        return estimate_from_iterates(scores.observed, scores.unobserved, delta=settings.delta)
    return epsilon_estimate(
        scores.observed,
        null=scores.null,
        delta=settings.delta,
        confidence=None if scores.mixed else CONFIDENCE,
        null_dof=scores.null_dof,
    )


def _paper_epsilon(scores: Scores, settings: Settings) -> float:
    """The paper's own: fitted std, and against N(0, 1/d) for the final model (Algorithm 2)."""
    if scores.rung.startswith("final"):
        return estimate_from_final(scores.observed * scores.units, dim=settings.dim, delta=settings.delta).epsilon
    assert scores.null is not None
    return epsilon_estimate(
        scores.observed, null=scores.null, delta=settings.delta, variance="fitted", confidence=None
    ).epsilon


def _warnings(scores: Scores, estimate: EpsilonEstimate) -> tuple[str, ...]:
    found = list(scores.warnings)
    if scores.mixed:
        found.append(
            "canaries were presented different numbers of times: no interval; each number has a row of its own"
        )
    if estimate.anderson_darling.p_value < 0.01 and scores.null is not None:
        found.append(
            f"the scores are not normal (Anderson-Darling p = {estimate.anderson_darling.p_value:.2g}): "
            "trust the bound, not the interval"
        )
    if estimate.variance.used == "fitted" and scores.null is not None:
        found.append(
            f"the standard deviation was fitted to the {scores.observed.size} scores, as they spread {estimate.std:.3g} "
            "times as much as the null"
        )
    if estimate.epsilon <= estimate.floor.q95:
        found.append(f"nothing was detected: as many canaries read up to {estimate.floor.q95:.2g} when nothing leaks")
    return tuple(found)


def format_number(value: float) -> str:
    """A number as a table shows it."""
    return "inf" if math.isinf(value) else "-" if math.isnan(value) else f"{value:.3g}"


def format_interval(interval: tuple[float, float] | None) -> str:
    """An interval as a table shows it."""
    return "none" if interval is None else f"{format_number(interval[0])} … {format_number(interval[1])}"


def _shown_times(presentations: int | None) -> str:
    return "" if presentations is None else f"{presentations}×"


def _pair(interval: Any) -> tuple[float, float] | None:
    return None if interval is None else (float(interval.low), float(interval.high))


def make_headline(
    rungs: list[Scores],
    settings: Settings,
    *,
    rung: str | None,
    participations: int | None,
    sensitivity: float | None = None,
) -> Headline | None:
    """What one rung reads for a client who takes part so often: its own row, or all of its canaries pooled.

    A `sensitivity`, in clip norms, is that of a client who weighs more than a canary.
    """
    name = rung or next((known for known in reversed(RUNGS) if any(s.rung == known for s in rungs)), None)
    groups = [scores for scores in rungs if scores.rung == name]
    if name is None or not groups:
        return None
    usual = max(groups, key=lambda s: s.observed.size)
    times = participations or usual.presentations
    exact = [s for s in groups if s.presentations == times and s.observed.size >= FEWEST]
    heavier = sensitivity is not None and settings.noise is None and not math.isclose(sensitivity**2, times or 1)
    alone = groups if name not in KNOWN_RUNGS or len(groups) == 1 else exact
    if heavier and name in KNOWN_RUNGS:
        alone = []
    try:
        if alone:
            estimate = _estimate(alone[0], settings)
            if estimate is None:
                return None
            return Headline(
                rung=name,
                participations=alone[0].presentations,
                epsilon=estimate.epsilon,
                interval=_pair(estimate.interval),
            )
        return _pooled_headline(name, groups, settings, times, sensitivity if heavier else None)
    except ValueError:  # constant scores: the notes say so
        return None


def _pooled_headline(
    name: str, groups: list[Scores], settings: Settings, times: int | None, sensitivity: float | None
) -> Headline | None:
    """β from all canaries, and the epsilon of somebody who takes part `times` times, or has that sensitivity."""
    weight = float(sum(s.observed.size * s.exposure for s in groups))
    usual = max(groups, key=lambda s: s.observed.size)
    exposure = usual.exposure if times is None or usual.strength is not None else float(times)
    if sensitivity is not None:
        exposure = sensitivity**2
    beta = sum(math.sqrt(s.exposure) * float(s.observed.sum()) for s in groups) / weight
    residuals = np.concatenate([s.observed - beta * math.sqrt(s.exposure) for s in groups])
    count = round(weight / exposure)  # canaries of that exposure whose mean is known as well
    if min(count, residuals.size) < FEWEST:
        return None
    normal = ndtri((np.arange(count) + 0.5) / count)
    scores = beta * math.sqrt(exposure) + normal * (float(residuals.std()) / float(normal.std()))
    found = epsilon_estimate(
        scores,
        null=Gaussian(0.0, 1.0),
        delta=settings.delta,
        confidence=CONFIDENCE,
        null_dof=min(s.null_dof for s in groups),
    )
    return Headline(
        rung=name,
        participations=times,
        epsilon=found.epsilon,
        interval=_pair(found.interval),
        pooled=True,
    )
