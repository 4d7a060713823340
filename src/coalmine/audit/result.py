"""What an audit found: a row for each adversary, the gauges, a verdict; as text, as a notebook table, as JSON."""

import html
import math
from dataclasses import dataclass
from typing import Any

from coalmine.audit.adversaries import Scores
from coalmine.audit.gauge import Gauge
from coalmine.audit.settings import SCHEMA_VERSION, Settings
from coalmine.audit.verdict import Claim, Verdict
from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.estimate import EpsilonEstimate, epsilon_estimate, estimate_from_final, estimate_from_iterates

CONFIDENCE = 0.95
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

    def to_dict(self) -> dict[str, Any]:
        return self.headline.to_dict() | {
            "groups": [row.to_dict() for row in self.rows],
            "verdict": None if self.verdict is None else self.verdict.outcome,
            "reason": None if self.verdict is None else self.verdict.reason,
        }


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
    notes: tuple[str, ...] = ()

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
            "gauges": {gauge.name: gauge.to_dict() for gauge in self.gauges},
            "adversaries": {name: adversary.to_dict() for name, adversary in self.adversaries.items()},
            "notes": list(self.notes),
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Column heads and cells, as every view shows them."""
        heads = ["adversary", "shown", "epsilon", "95 % interval", "lower bound", "floor", "paper's ε", "paper's ε_lo"]
        judged = self.verdict is not None
        cells = []
        for adversary in self.adversaries.values():
            for row in sorted(adversary.rows, key=lambda row: row.presentations or 0):
                found = row.estimate
                line = [
                    adversary.name,
                    "" if row.presentations is None else f"{row.presentations}×",
                    _shown(found.epsilon),
                    "none"
                    if found.interval is None
                    else f"{_shown(found.interval.low)} … {_shown(found.interval.high)}",
                    _shown(row.lower_bound),
                    _shown(found.floor.q95),
                    _shown(row.paper_epsilon),
                    _shown(row.paper_lower_bound),
                ]
                verdict = adversary.verdict.outcome if adversary.verdict else ""
                cells.append([*line, verdict] if judged else line)
        return ([*heads, "verdict"] if judged else heads), cells

    def lines(self) -> list[str]:
        """What stands under the table: claim, verdict, gauges, notes."""
        said = []
        if self.analytical_epsilon is not None:
            said.append(f"analytical epsilon {_shown(self.analytical_epsilon)}")
        if self.claim is not None and self.verdict is not None:
            said.append(
                f"claimed epsilon {_shown(self.claim.epsilon)} ({self.claim.accounting}): {self.verdict.outcome}"
            )
            said.append(self.verdict.reason)
        for gauge in self.gauges:
            span = (
                _shown(gauge.smallest)
                if gauge.smallest == gauge.largest
                else (f"{_shown(gauge.smallest)} … {_shown(gauge.largest)}")
            )
            mark = "" if gauge.status == "ok" else f"  <- {gauge.status} in {len(gauge.flagged)} rounds"
            said.append(f"gauge {gauge.name}: {span}{mark}")
        return said + list(self.notes)

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
    compared = scores.unobserved.size if scores.bound_null is None else FEWEST
    if min(scores.observed.size, compared) < FEWEST:
        return None
    delta = settings.delta
    if scores.null is None:
        estimate = estimate_from_iterates(scores.observed, scores.unobserved, delta=delta)
        paper_epsilon = estimate.epsilon
    else:
        estimate = epsilon_estimate(
            scores.observed,
            null=scores.null,
            delta=delta,
            confidence=None if scores.mixed else CONFIDENCE,
            null_dof=scores.null_dof,
        )
        paper_epsilon = _paper_epsilon(scores, settings)
    null = scores.unobserved if scores.bound_null is None else scores.bound_null
    return Row(
        presentations=scores.presentations,
        canaries=scores.observed.size,
        estimate=estimate,
        lower_bound=epsilon_lower_bound(scores.bounded, null=null, delta=delta, confidence=CONFIDENCE),
        paper_epsilon=paper_epsilon,
        paper_lower_bound=epsilon_lower_bound(
            scores.bounded, null=null, delta=delta, confidence=CONFIDENCE, method="paper"
        ),
        warnings=_warnings(scores, estimate),
        sensitivity=None if scores.strength is None else math.sqrt(scores.strength),
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
    if estimate.epsilon <= estimate.floor.q95:
        found.append(f"nothing was detected: as many canaries read up to {estimate.floor.q95:.2g} when nothing leaks")
    return tuple(found)


def _shown(value: float) -> str:
    return "inf" if math.isinf(value) else "-" if math.isnan(value) else f"{value:.3g}"
