"""The result of an audit: a row for each adversary, the gauges, a verdict; as text, as a notebook table, as JSON."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import convert

from coalmine.argument_checks import count_of, short_repr
from coalmine.estimators.gaussian_fit import EpsilonEstimate
from coalmine.estimators.intervals import Interval
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.evidence.gauges.gauge import GaugeResult, Status, by_gauge, statistic_of, status_of
from coalmine.evidence.unknown_round import LossFit
from coalmine.log.commitment import SCHEMA_VERSION
from coalmine.measure.settings import Settings
from coalmine.verdict.alarm import Alarm
from coalmine.verdict.amplified_claim import PARTS
from coalmine.verdict.claim import TERMS, Claim
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.outcome import PASS
from coalmine.verdict.verdict import NO_VERDICT, Verdict

CONFIDENCE = 0.95
CLAIM_FIELDS = ("sensitivity", "sampling", "noise_multiplier", "sampler_observed", *TERMS)  # stored if a claim has them
COUNTS_SAMPLING = "claim_counts_sampling"
MU = "claim_mu"
LISTED_LAYERS = 12  # most layers within their limits that are printed one by one
TOP_LEVEL_SETTINGS = ("dim", "delta", "canaries", "unobserved", "kind")  # settings at the top level of result.json


@dataclass(frozen=True, kw_only=True)
class Row:
    """One adversary, for canaries presented equally often. `lower_bound` is valid; `paper_lower_bound` is not.

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

    def to_dict(self) -> dict[str, Any]:
        exposed: dict[str, Any] = {} if self.sensitivity is None else {"sensitivity": self.sensitivity}
        if self.fit is not None:
            exposed["fit"] = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self.fit).items()}
        return exposed | {
            "presentations": self.presentations,
            "canaries": self.canaries,
            **self.estimate.to_dict(),
            "lower_bound": self.lower_bound,
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
    pooled: bool = False

    def to_dict(self) -> dict[str, Any]:
        interval = None if self.interval is None else list(self.interval)
        return vars(self) | {"interval": interval}


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditResult:
    """The full result of an audit. Prints as a table, in a notebook too; `to_dict` is for JSON, and `from_dict` its inverse.

    Without a claim the `verdict` is never PASS. `legs` are those of an amplified claim: accounting, noise and sampling.
    `watched` means that the alarm was checked during training, and `alarm` is its outcome: a claim that it refuted stays
    refuted. `extra` are a trainer's own entries, such as the accuracy: result.json has them all on one level.
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
    notes: tuple[str, ...] = ()
    watched: bool = False
    alarm: Alarm | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

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
        return {**self.extra, **accounted, **curve, **alarm} | {
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
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AuditResult":
        """The inverse of `to_dict`, also after conversion to JSON and back; ValueError for anything else."""
        return read_result(values)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Column heads and cells for every view: one line for each adversary."""
        heads = ["adversary", "shown", "epsilon", "95 % interval", "lower bound", "floor", "paper's ε", "paper's ε_lo"]
        judged = self.claim is not None and self.verdict is not None
        cells = [self._cells(adversary) for adversary in self.adversaries.values()]
        top = self.headline
        if (
            top is not None and top.rung not in self.adversaries
        ):  # too few canaries with any one number of presentations
            cells_of_headline = [
                _format_presentations(top.participations),
                format_number(top.epsilon),
                format_interval(top.interval),
            ]
            outcome = "" if self.verdict is None else self.verdict.outcome
            cells.append([top.rung, *cells_of_headline, "-", "-", "-", "-", outcome])
        if not judged:
            cells = [line[: len(heads)] for line in cells]
        return ([*heads, "verdict"] if judged else heads), cells

    def _cells(self, adversary: Adversary) -> list[str]:
        top = self.headline
        row = adversary.row_for(top.participations if top else None)
        epsilon, interval, times = row.estimate.epsilon, interval_ends(row.estimate.interval), row.presentations
        if top is not None and top.rung == adversary.name and top.pooled:
            cells_of_headline = [
                _format_presentations(top.participations),
                format_number(top.epsilon),
                format_interval(top.interval),
            ]
            return [
                adversary.name,
                *cells_of_headline,
                "-",
                "-",
                "-",
                "-",
                adversary.verdict.outcome if adversary.verdict else "",
            ]
        return [
            adversary.name,
            _format_presentations(times),
            format_number(epsilon),
            format_interval(interval),
            format_number(row.lower_bound),
            format_number(row.estimate.floor.q95),
            format_number(row.paper_epsilon),
            format_number(row.paper_lower_bound),
            adversary.verdict.outcome if adversary.verdict else "",
        ]

    def lines(self) -> list[str]:
        """The lines under the table: claim, verdict, coverage, gauges, notes."""
        texts = []
        if self.analytical_epsilon is not None:
            texts.append(f"analytical epsilon {format_number(self.analytical_epsilon)}")
        if self.claim is not None and self.verdict is not None:
            texts += [f"{self.claim.sentence(self.settings.delta)}: {self.verdict.outcome}", self.verdict.reason]
            texts += [f"{name} leg: {leg.outcome}: {leg.reason}" for name, leg in self.legs.items()]
            texts += [self.scope] if self.verdict.outcome == "PASS" else []
        elif self.verdict is not None:
            texts += [f"no claim: {self.verdict.outcome}", self.verdict.reason]
        texts += [f"{item.name}: {item.status} ({item.detail})" for item in self.audited]
        texts += self._gauge_lines()
        hidden = sum(len(adversary.rows) - 1 for adversary in self.adversaries.values())
        if hidden:
            texts.append(
                f"{hidden} more rows, one for each number of presentations, are in result.json and `result.adversaries`"
            )
        return texts + list(self.notes)

    def _gauge_lines(self) -> list[str]:
        """A line for each gauge, with its statistics; many tensors within their limits are counted."""
        lines = []
        for gauge, results in by_gauge(self.gauges).items():
            fine = [each for each in results if each.part and each.status == "ok"]
            merged = fine if len(fine) > LISTED_LAYERS else []
            texts = [_reading(each) for each in results if each not in merged]
            if merged:
                span = _span(min(each.smallest for each in merged), max(each.largest for each in merged))
                texts.append(f"{len(merged)} layers, all within their limits: {span}")
            lines.append(f"gauge {gauge.name}: {'; '.join(texts)}")
        return lines

    @property
    def scope(self) -> str:
        """The items that a PASS covers, and those that it does not."""
        checked = [item.name for item in self.audited if item.status == "checked"]
        rest = [item.name for item in self.audited if item.is_open]
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


def read_result(values: Mapping[str, Any]) -> AuditResult:
    """An AuditResult from its `to_dict`, or from result.json; ValueError for anything else."""
    try:
        return _result_of(values)
    except KeyError as error:
        raise ValueError(f"this is not a result of an audit ({error} is missing)") from None
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"this is not a result of an audit ({error})") from None


def _result_of(values: Mapping[str, Any]) -> AuditResult:
    adversaries = _mapping(values["adversaries"])
    legs = {str(name): _leg(_mapping(leg)) for name, leg in _mapping(values["legs"]).items()}
    claim, verdict = _claim(values), _verdict(values)
    _check_agreement(claim, verdict, legs)
    convert(values["reason"], str if verdict else None)
    known = {
        *AuditResult(settings=_EMPTY, rounds=0, skipped=0, adversaries={}, gauges=()).to_dict(),
        *(f"claim_{name}" for name in CLAIM_FIELDS),
        MU,
        "alarm",
    }
    return AuditResult(
        settings=Settings.from_dict(
            {**{name: values[name] for name in TOP_LEVEL_SETTINGS}, **_mapping(values["plan"])}
        ),
        rounds=convert(values["rounds"], int),
        skipped=convert(values["skipped_rounds"], int),
        adversaries={str(name): _adversary(str(name), _mapping(entry)) for name, entry in adversaries.items()},
        gauges=tuple(_gauge_results(_mapping(values["gauges"]))),
        analytical_epsilon=_maybe(values["analytical_epsilon"]),
        claim=claim,
        clients=convert(values["clients"], int | None),
        verdict=verdict,
        legs=legs,
        headline=None if values["headline"] is None else _headline(_mapping(values["headline"])),
        audited=tuple(
            convert({**_mapping(item), "name": name}, AuditedItem) for name, item in _mapping(values["audited"]).items()
        ),
        notes=convert(values["notes"], tuple[str, ...]),
        watched="alarm" in values,
        alarm=None if values.get("alarm") is None else _alarm(_mapping(values["alarm"])),
        extra={name: value for name, value in values.items() if name not in known},
    )


def _check_agreement(claim: Claim | None, verdict: Verdict | None, legs: Mapping[str, Verdict]) -> None:
    """ValueError where claim, verdict and legs contradict each other: a gate must not read a damaged file as a PASS."""
    if claim is not None and verdict is None:
        raise ValueError("a claim has a verdict")
    if claim is None and verdict is not None and verdict.outcome == PASS:
        raise ValueError("without a claim there is no PASS")
    if tuple(legs) != (PARTS if claim is not None and claim.amplified else ()):
        raise ValueError(f"a claim amplified by sampling has the legs {', '.join(PARTS)}, and no other claim has legs")
    if verdict is not None and verdict.outcome == PASS and any(leg.outcome != PASS for leg in legs.values()):
        raise ValueError("a PASS has no leg that did not pass")


_EMPTY = Settings(dim=2, canaries=1, unobserved=1, delta=0.5)


def _claim(values: Mapping[str, Any]) -> Claim | None:
    if values["claimed_epsilon"] is None:
        return None
    claim = Claim.from_dict(
        {
            "epsilon": convert(values["claimed_epsilon"], float),
            "participations": convert(values["claim_participations"], int | None),
            "sensitivity": _maybe(values.get("claim_sensitivity")),
            "sampling": values.get("claim_sampling"),
            "noise_multiplier": _maybe(values.get("claim_noise_multiplier")),
            "sampler_observed": convert(values.get("claim_sampler_observed", False), bool),
            "delta": _maybe(values.get("claim_delta")),
            "unit": convert(values.get("claim_unit"), str | None),
            "adjacency": convert(values.get("claim_adjacency"), str | None),
            "counts_sampling": convert(values.get(COUNTS_SAMPLING), bool | None),
        }
    )
    if values["claim_accounting"] != claim.accounting:
        raise ValueError(
            f"claim_accounting is {short_repr(values['claim_accounting'])} for a claim that is {claim.accounting}"
        )
    return claim


def _verdict(values: Mapping[str, Any]) -> Verdict | None:
    if values["verdict"] is None:
        return None
    facts = {name: _special(value) for name, value in _mapping(values["facts"]).items()}
    return Verdict.from_dict({**values, "facts": facts})


def _alarm(values: Mapping[str, Any]) -> Alarm:
    return Alarm(round=convert(values["round"], int), evidence=_number(values["evidence"]), verdict=_leg(values))


def _leg(values: Mapping[str, Any]) -> Verdict:
    verdict = _verdict(values)
    if verdict is None:
        raise ValueError("a leg must have an outcome")
    return verdict


def _adversary(name: str, values: Mapping[str, Any]) -> Adversary:
    rows = tuple(_row(_mapping(row)) for row in _listed(values["groups"]))
    if not rows:
        raise ValueError(f"{name} has no rows")
    return Adversary(name=name, rows=rows, verdict=_verdict(values))


def _row(row: Mapping[str, Any]) -> Row:
    interval = None if row["interval"] is None else [_number(end) for end in _listed(row["interval"])]
    estimate = {name: _number(row[name]) for name in ("epsilon", "ceiling", "mean", "std", "null_mean", "null_std")}
    whole = {
        **estimate,
        "interval": interval,
        "confidence": None if interval is None else _number(row["confidence"]),
        "floor": [_number(row["floor"][name]) for name in ("median", "q95")],
        "variance": row["variance"],
        "anderson_darling": {name: _number(row["anderson_darling"][name]) for name in ("statistic", "p_value")},
    }
    shaped = {
        "presentations": row["presentations"],
        "canaries": row["canaries"],
        "lower_bound": _number(row["lower_bound"]),
        "paper_epsilon": _number(row["paper"]["epsilon"]),
        "paper_lower_bound": _number(row["paper"]["lower_bound"]),
        "warnings": row["warnings"],
        "sensitivity": _maybe(row.get("sensitivity")),
        "fit": row.get("fit"),
    }
    return convert(shaped | {"estimate": whole}, Row)


def _gauge_results(gauges: Mapping[str, Any]) -> Iterator[GaugeResult]:
    for gauge in gauges.values():
        for name, entry in _mapping(_mapping(gauge)["statistics"]).items():
            values, (statistic, part) = _mapping(entry), statistic_of(str(name))
            yield GaugeResult(
                statistic=statistic,
                part=part,
                smallest=_number(values["smallest"]),
                largest=_number(values["largest"]),
                limits=_two(values["limits"]),
                flagged=convert(values["flagged"], tuple[int, ...]),
                status=convert(values["status"], Status),
                noise_left=_maybe(values["noise_left"]),
            )


def _headline(top: Mapping[str, Any]) -> Headline:
    return Headline(
        rung=convert(top["rung"], str),
        participations=convert(top["participations"], int | None),
        epsilon=_number(top["epsilon"]),
        interval=None if top["interval"] is None else _two(top["interval"]),
        pooled=convert(top["pooled"], bool),
    )


def _special(value: Any) -> Any:
    """A value of a JSON file, with infinities as floats."""
    if isinstance(value, list):
        return [_special(item) for item in value]
    return float(value) if value in ("inf", "-inf") else value


def _number(value: Any) -> float:
    return math.nan if value is None else convert(_special(value), float)


def _maybe(value: Any) -> float | None:
    return None if value is None else _number(value)


def _two(values: Any) -> tuple[float, float]:
    low, high = _listed(values)
    return _number(low), _number(high)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{str(value)[:40]!r} is not an object")
    return value


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{str(value)[:40]!r} is not a list")
    return value


def format_number(value: float) -> str:
    """A number for a table."""
    return "inf" if math.isinf(value) else "-" if math.isnan(value) else f"{value:.3g}"


def format_interval(interval: tuple[float, float] | None) -> str:
    """An interval for a table."""
    return "none" if interval is None else f"{format_number(interval[0])} … {format_number(interval[1])}"


def _reading(result: GaugeResult) -> str:
    where = f" in {count_of(len(result.flagged), 'round')}" if result.flagged else ""
    mark = "" if result.status == "ok" else f" <- {result.status}{where}"
    return f"{result.name} {_span(result.smallest, result.largest)}{mark}"


def _span(smallest: float, largest: float) -> str:
    return format_number(smallest) + ("" if smallest == largest else f" … {format_number(largest)}")


def _format_presentations(presentations: int | None) -> str:
    return "" if presentations is None else f"{presentations}×"


def interval_ends(interval: Interval | None) -> tuple[float, float] | None:
    """An interval as two numbers."""
    return None if interval is None else (float(interval.low), float(interval.high))
