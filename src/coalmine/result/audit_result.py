"""The result of an audit: a row for each adversary, the gauges, a verdict, and what its trainer adds."""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from coalmine.estimators.gaussian_fit import EpsilonEstimate
from coalmine.estimators.intervals import Interval
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.evidence.gauges.gauge import GaugeResult, by_gauge, status_of
from coalmine.evidence.gaussian_bound import CONFIDENCE, GaussianBound
from coalmine.evidence.unknown_round import LossFit
from coalmine.log.commitment import SCHEMA_VERSION
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.settings import Settings
from coalmine.result.curves import (
    GaussianPrivacy,
    PrivacyProfile,
    TradeOff,
    gaussian_privacy,
    privacy_profile,
    tradeoff,
)
from coalmine.result.trainer_section import TrainerSection
from coalmine.verdict.alarm import Alarm
from coalmine.verdict.claim import TERMS, Claim
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.scored_records import ScoredRecords
from coalmine.verdict.verdict import NO_VERDICT, Verdict

CLAIM_FIELDS = ("sensitivity", "sampling", "noise_multiplier", "sampler_observed", *TERMS)  # stored if a claim has them
COUNTS_SAMPLING = "claim_counts_sampling"
MU = "claim_mu"
UNTESTED_ROWS = "How real rows enter the sum was not tested."
RENDERER = "coalmine.report.result_text"
TOP_LEVEL_SETTINGS = ("dim", "delta", "canaries", "unobserved", "kind")  # settings at the top level of result.json


@dataclass(frozen=True, kw_only=True)
class Row:
    """One adversary, for canaries presented equally often. `lower_bound` is valid; `paper_lower_bound` is not.

    `gaussian` has the larger lower bound and the interval that hold if the noise is Gaussian, or why they are withheld.
    Under correlated noise the estimate is for a client of this `sensitivity`, in clip norms: the canaries' root mean
    square. `fit` is the goodness of fit of the scores of unknown-round to the accountant's law.
    """

    presentations: int | None
    canaries: int
    estimate: EpsilonEstimate
    lower_bound: float
    paper_epsilon: float
    paper_lower_bound: float
    warnings: tuple[str, ...] = ()
    sensitivity: float | None = None
    fit: LossFit | None = None
    gaussian: GaussianBound

    @property
    def lower_bound_gaussian(self) -> float | None:
        """The lower bound if the noise is Gaussian; None if it is withheld."""
        return self.gaussian.lower_bound

    def to_dict(self) -> dict[str, Any]:
        exposed: dict[str, Any] = {} if self.sensitivity is None else {"sensitivity": self.sensitivity}
        if self.fit is not None:
            exposed["fit"] = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self.fit).items()}
        return exposed | {
            "presentations": self.presentations,
            "canaries": self.canaries,
            **self.estimate.to_dict(),
            "lower_bound": self.lower_bound,
            **self.gaussian.to_dict(),
            "confidence": CONFIDENCE,
            "paper": {"epsilon": self.paper_epsilon, "lower_bound": self.paper_lower_bound},
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """One rung of the ladder: a row for each number of presentations, the one with the most canaries first."""

    name: str
    rows: tuple[Row, ...]
    verdict: Verdict | None = None

    @property
    def headline(self) -> Row:
        return self.rows[0]

    @property
    def epsilon(self) -> float:
        """The estimate of the first row."""
        return self.headline.estimate.epsilon

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of `epsilon`."""
        return interval_ends(self.headline.estimate.interval)

    @property
    def lower_bound(self) -> float:
        """The valid lower bound of the first row."""
        return self.headline.lower_bound

    @property
    def lower_bound_gaussian(self) -> float | None:
        """The lower bound of the first row if the noise is Gaussian; None if it is withheld."""
        return self.headline.lower_bound_gaussian

    def row_for(self, participations: int | None) -> Row:
        """The row of canaries with this many presentations, or else the one with the most canaries."""
        return next((row for row in self.rows if row.presentations == participations), self.headline)

    def to_dict(self) -> dict[str, Any]:
        return self.headline.to_dict() | {
            "groups": [row.to_dict() for row in self.rows],
            **(NO_VERDICT if self.verdict is None else self.verdict.to_dict()),
        }


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The main number: the estimate of the rung that decides the verdict, in the claim's own terms.

    `participations` is the number of rounds of the client; None if presentations make no difference to the rung. If canaries
    have different numbers of presentations, the estimate is pooled: score = β√R + noise is fitted to all of them.
    """

    rung: str
    participations: int | None
    epsilon: float
    interval: tuple[float, float] | None
    gaussian: GaussianBound
    pooled: bool = False

    def to_dict(self) -> dict[str, Any]:
        interval = None if self.interval is None else list(self.interval)
        values = {name: value for name, value in vars(self).items() if name != "gaussian"}
        return values | {"interval": interval, **self.gaussian.to_dict()}


@dataclass(frozen=True, kw_only=True)
class SmallGroup:
    """Canaries with one number of presentations that are too few for an estimate of an adversary."""

    adversary: str
    presentations: int | None
    canaries: int


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditResult:
    """The full result of an audit: `finish` returns it, result.json holds it, and every command prints it.

    It prints in at most ten lines; `details()` has the rest. `to_dict` is for JSON, and `from_dict` its inverse.

    Without a claim the `verdict` is never PASS. `legs` are those of an amplified claim: accounting, noise and sampling.
    `watched` means that the alarm was checked during training, and `alarm` is its outcome: a claim that it refuted stays
    refuted. `log_notes` follow from the rounds, and `small_groups` have no row. `trainer` is what the trainer adds, such as
    the accuracy. `log_digest` is the digest of the log when the result was written, and `directory` where it stands.
    """

    settings: Settings
    rounds: int
    skipped: int
    adversaries: dict[str, Adversary]
    gauges: tuple[GaugeResult, ...]
    analytical_epsilon: float | None = None
    claim: Claim | None = None
    clients: int | None = None
    verdict: Verdict | None = None
    legs: dict[str, Verdict] = field(default_factory=dict)
    headline: Headline | None = None
    audited: tuple[AuditedItem, ...] = ()
    log_notes: tuple[str, ...] = ()
    small_groups: tuple[SmallGroup, ...] = ()
    watched: bool = False
    alarm: Alarm | None = None
    trainer: TrainerSection = field(default_factory=TrainerSection)
    log_digest: str | None = None
    directory: Path | None = field(default=None, compare=False)

    def __getitem__(self, rung: str) -> Adversary:
        """One adversary of the ladder by its name."""
        if rung not in self.adversaries:
            raise KeyError(f"{rung!r} is not in this result; it holds {', '.join(self.adversaries) or 'no adversary'}")
        return self.adversaries[rung]

    @property
    def epsilon(self) -> float | None:
        """The estimate of the rung that decides the verdict; None if no rung has one."""
        return None if self.headline is None else self.headline.epsilon

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of `epsilon`."""
        return None if self.headline is None else self.headline.interval

    @property
    def records(self) -> ScoredRecords | None:
        """What the model's outputs tell about data canaries; None without any."""
        return next((item.scored for item in self.audited if item.scored is not None), None)

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes: those that follow from the rounds, the trainer's, and its warnings."""
        return (*self.log_notes, *self.trainer.notes, *(f"warning: {text}" for text in self.trainer.warnings))

    def with_entries(self, **entries: Any) -> "AuditResult":
        """The result with further entries of the trainer, by their names in result.json."""
        return replace(self, trainer=self.trainer.with_entries(**entries))

    def written_to(self, directory: RunDirectory | None) -> "AuditResult":
        """Write result.json, and return the result as it stands there; without a directory, the result itself."""
        if directory is None:
            return self
        digest = directory.write_result(self)
        return replace(self, log_digest=digest, directory=directory.path)

    @property
    def claim_mu(self) -> float | None:
        """μ of the Gaussian trade-off curve that goes through the claimed (ε, δ); None for an amplified claim.

        A claim about known rounds is one about a Gaussian mechanism, whose curve ε and δ fix. Sampling bends the curve.
        """
        if self.claim is None or self.claim.amplified:
            return None
        noise = float(mechanism_noise(self.claim.epsilon, delta=self.settings.delta))
        return 1 / noise if 0 < noise < math.inf else None

    def to_dict(self) -> dict[str, Any]:
        """The result in the form of docs/reference/result.schema.json, except that inf and NaN are still floats."""
        claim = {} if self.claim is None else self.claim.to_dict()
        accounted = {f"claim_{name}": claim[name] for name in CLAIM_FIELDS if claim.get(name)}
        if self.claim is not None and self.claim.counts_sampling is not None:
            accounted[COUNTS_SAMPLING] = self.claim.counts_sampling
        curve = {} if self.claim_mu is None else {MU: self.claim_mu}
        plan = {name: value for name, value in self.settings.to_dict().items() if name not in TOP_LEVEL_SETTINGS}
        alarm = {"alarm": None if self.alarm is None else self.alarm.to_dict()} if self.watched else {}
        digest = {} if self.log_digest is None else {"log_digest": self.log_digest}
        small = {"small_groups": [vars(group) for group in self.small_groups]} if self.small_groups else {}
        return {**self.trainer.to_dict(), **accounted, **curve, **alarm, **digest, **small} | {
            "schema_version": SCHEMA_VERSION,
            "dim": self.settings.dim,
            "delta": self.settings.delta,
            "canaries": self.settings.canaries,
            "unobserved": self.settings.unobserved,
            "kind": self.settings.kind,
            "plan": plan,
            "rounds": self.rounds,
            "skipped_rounds": self.skipped,
            "analytical_epsilon": self.analytical_epsilon,
            "claimed_epsilon": None if self.claim is None else self.claim.epsilon,
            "claim_accounting": None if self.claim is None else self.claim.accounting,
            "claim_participations": None if self.claim is None else self.claim.participations,
            "clients": self.clients,
            **(NO_VERDICT if self.verdict is None else self.verdict.to_dict()),
            "legs": {name: leg.to_dict() for name, leg in self.legs.items()},
            "headline": None if self.headline is None else self.headline.to_dict(),
            "audited": {item.name: item.to_dict() for item in self.audited},
            "gauges": {
                gauge.name: {
                    "question": gauge.question(),
                    "status": status_of(results),
                    "statistics": {each.name: each.to_dict() for each in results},
                }
                for gauge, results in by_gauge(self.gauges).items()
            },
            "adversaries": {name: adversary.to_dict() for name, adversary in self.adversaries.items()},
            "notes": list(self.log_notes),
        }

    @property
    def mu(self) -> GaussianPrivacy:
        """μ of Gaussian differential privacy with its interval, for the strongest attacker who knows rounds."""
        return gaussian_privacy(self)

    def tradeoff(self, rates: npt.ArrayLike | None = None) -> TradeOff:
        """The trade-off function of f-DP with its band: an attacker's false negatives at these rates of false positives."""
        return tradeoff(self, rates)

    def privacy_profile(self, epsilons: npt.ArrayLike | None = None) -> PrivacyProfile:
        """The privacy profile δ(ε) with its band."""
        return privacy_profile(self, epsilons)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AuditResult":
        """The inverse of `to_dict`, also after conversion to JSON and back; ValueError for anything else."""
        from coalmine.result.reading import read_result  # which imports this module

        return read_result(values)

    @property
    def scope(self) -> str:
        """The items that a PASS covers, and those that it does not."""
        checked = [item.name for item in self.audited if item.status == "checked"]
        rest = [item.name for item in self.audited if item.is_open]
        text = f"This PASS covers: {', '.join(checked) or 'the canaries alone'}."
        text = f"{text} It does not cover: {', '.join(rest)}." if rest else text
        return f"{text} {UNTESTED_ROWS}" if "rows" in rest else text

    def __str__(self) -> str:
        return str(_text().brief(self))

    def details(self) -> str:
        """Everything that a terminal shows of the result: the ladder, the parts of the claim, the gauges, all notes."""
        return str(_text().details(self))

    def to_frame(self) -> Any:
        """The ladder as numbers, one row for each adversary and number of presentations: a pandas DataFrame.

        Without pandas it is a dict of columns, which any data frame is made of.
        """
        return _text().frame(self)

    def plot(self, kind: str = "ladder", **options: Any) -> Any:
        """Draw the result, and return the matplotlib Axes; `options` are those of the plot.

        The kinds are "ladder", each adversary's interval beside the claim, "curve", the trade-off between false positives
        and false negatives, and "profile", δ(ε). Needs matplotlib: `pip install 'coalmine[report]'`.
        """
        return _text().draw(self, kind, **options)

    def __repr__(self) -> str:
        outcome = "" if self.verdict is None else f", verdict={self.verdict.outcome}"
        return f"AuditResult(rounds={self.rounds}, adversaries={', '.join(self.adversaries)}{outcome})"

    def _repr_html_(self) -> str:
        return str(_text().notebook(self))


def _text() -> Any:
    """The module that puts a result into words: found by its name, since `report` is built on results."""
    return importlib.import_module(RENDERER)


def interval_ends(interval: Interval | None) -> tuple[float, float] | None:
    """An interval as two numbers."""
    return None if interval is None else (float(interval.low), float(interval.high))
