"""What result.json says, typed and checked: a file of another program is refused here, not half-way down a page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard

from coalmine.audit.ladder import RUNGS

Kind = Literal["estimate", "heuristic", "valid bound"]
LAYER = "layer "  # the names of gauges of single tensors begin so
STD_FITTED = "the standard deviation was fitted"
TOO_FEW = "too few to say anything"  # notes on small groups of canaries end so


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One number that some method gives for the same scores, and what kind of number it is."""

    name: str
    value: float
    kind: Kind
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One adversary, for canaries presented equally often: a row of the result."""

    rung: str
    presentations: int | None
    canaries: int
    epsilon: float
    interval: tuple[float, float] | None
    lower_bound: float
    confidence: float
    floor: float
    ceiling: float
    paper_epsilon: float
    paper_lower_bound: float
    mean: float
    std: float
    null_mean: float
    null_std: float
    anderson_darling: float
    p_value: float
    variance: str
    warnings: tuple[str, ...] = ()
    published: tuple[Estimator, ...] = ()  # by other methods, where the result has them
    pooled: bool = False  # epsilon and interval are fitted to all canaries of the rung, however often they took part

    @property
    def name(self) -> str:
        return self.rung if self.presentations is None else f"{self.rung} {self.presentations}×"

    @property
    def detected(self) -> bool:
        """Whether the estimate lies above what as many canaries read when nothing leaks."""
        return not self.epsilon <= self.floor

    @property
    def std_fitted(self) -> bool:
        """Whether the estimate rests on a standard deviation that was fitted to few scores, as a warning of the row says."""
        return any(warning.startswith(STD_FITTED) for warning in self.warnings)

    @property
    def estimators(self) -> tuple[Estimator, ...]:
        """Every number of this row with its kind, coalmine's first."""
        level = f"{self.confidence:.0%}"
        std = "the null's std" if self.variance == "null" else "its own fitted std"
        own = [
            Estimator(name="estimate", value=self.epsilon, kind="estimate", note=f"a normal law with {std}"),
            Estimator(
                name="lower bound", value=self.lower_bound, kind="valid bound", note=f"{level}, whatever the law"
            ),
            Estimator(name="paper's ε", value=self.paper_epsilon, kind="estimate", note="a normal law, its std fitted"),
            Estimator(
                name="paper's ε_lo",
                value=self.paper_lower_bound,
                kind="heuristic",
                note=f"each threshold at {level}, the best one chosen afterwards: no bound at {level}",
            ),
        ]
        return (*own, *self.published)


@dataclass(frozen=True, kw_only=True)
class GaugeReading:
    """One gauge of the noise over the whole run."""

    name: str
    meaning: str
    smallest: float
    largest: float
    limits: tuple[float, float]
    flagged: tuple[int, ...]
    status: str
    noise_left: float | None = None  # upper confidence limit of the noise that still protects, over the stated noise

    @property
    def layer(self) -> str | None:
        """The name of the tensor that this gauge is about; None where it is about the whole model."""
        return self.name.removeprefix(LAYER) if self.name.startswith(LAYER) else None


@dataclass(frozen=True, kw_only=True)
class Audited:
    """One item that the audit may have looked at: "checked", "not checked" or "cannot be checked", and why."""

    name: str
    status: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The number on top: what the rung that the verdict rests on reads for a client who takes part so often."""

    rung: str
    participations: int | None
    epsilon: float
    interval: tuple[float, float] | None
    pooled: bool = False  # fitted to all canaries of the rung, however often they took part


@dataclass(frozen=True, kw_only=True)
class ClientExposure:
    """How often a client takes part and its analytical epsilon; `exact` where this run's own rounds were counted."""

    rounds: int
    epsilon: float
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Accounted:
    """The epsilon of the trainer's accountant, and the verdict on it as a claim that sampling amplifies."""

    epsilon: float
    verdict: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything a result says. `raw` is the result as it came, entries of the trainer's own included."""

    dim: int
    delta: float
    canaries: int
    unobserved: int
    rounds: int
    skipped: int
    analytical: float | None
    claimed: float | None
    accounting: str | None
    verdict: str | None
    reason: str
    code: str  # of the reason, one word
    participations: int | None  # that the claim is for
    sensitivity: float | None  # that the claim is for, in clip norms, where it was accounted with one
    rows: tuple[Finding, ...]
    verdicts: dict[str, str]  # by rung
    gauges: tuple[GaugeReading, ...]
    audited: tuple[Audited, ...]
    headline: Headline | None
    notes: tuple[str, ...]
    raw: dict[str, Any] = field(repr=False)

    @property
    def rungs(self) -> tuple[str, ...]:
        """The names of the attackers that have rows, weakest first."""
        return tuple(dict.fromkeys(row.rung for row in self.rows))

    @property
    def largest_rows(self) -> tuple[Finding, ...]:
        """For each rung the row with most canaries."""
        return tuple(next(row for row in self.rows if row.rung == rung) for rung in self.rungs)

    @property
    def headlines(self) -> tuple[Finding, ...]:
        """One row for each rung: that of the headline's participations, or else the one with most canaries."""
        times = None if self.headline is None else self.headline.participations
        return tuple(
            next((row for row in self.rows if row.rung == first.rung and row.presentations == times), first)
            for first in self.largest_rows
        )

    @property
    def shown_rows(self) -> tuple[Finding, ...]:
        """One row for each rung as tables show it: a pooled headline stands in the place of its rung's row."""
        top, rows = self.headline, self.headlines
        if top is None or not (top.pooled or top.rung not in self.rungs):
            return rows
        pooled = self._pooled_row(top)
        if top.rung not in self.rungs:
            return (*rows, pooled)
        return tuple(pooled if row.rung == top.rung else row for row in rows)

    @property
    def folded_rows(self) -> tuple[Finding, ...]:
        """The other rows, one for each number of presentations, in the order of tables."""
        shown = self.shown_rows
        rest = [row for row in self.rows if all(row is not other for other in shown)]
        return tuple(sorted(rest, key=lambda row: (self.rungs.index(row.rung), row.presentations or 0)))

    def _pooled_row(self, top: Headline) -> Finding:
        """The headline as a row, with the bounds of the canaries that took part as often, where there are enough."""
        for row in self.rows:
            if (row.rung, row.presentations) == (top.rung, top.participations):
                return replace(
                    row, epsilon=top.epsilon, interval=top.interval, canaries=self.canaries, warnings=(), pooled=True
                )
        none = math.nan
        return Finding(
            rung=top.rung, presentations=top.participations, canaries=self.canaries, epsilon=top.epsilon,
            interval=top.interval, lower_bound=none, confidence=none, floor=none, ceiling=none, paper_epsilon=none,
            paper_lower_bound=none, mean=none, std=none, null_mean=none, null_std=none, anderson_darling=none, p_value=none,
            variance="", pooled=True,
        )  # fmt: skip

    @property
    def top(self) -> Finding | None:
        """The row of the number on top: the headline's, or without one that of the strongest attacker."""
        if self.headline is None:
            return self.strongest
        return next((row for row in self.shown_rows if row.rung == self.headline.rung), None)

    @property
    def strongest(self) -> Finding | None:
        """The strongest attacker's row among `headlines`."""
        known = [row for row in self.headlines if row.rung in RUNGS]
        return max(known, key=lambda row: RUNGS.index(row.rung), default=None)

    @property
    def published_row(self) -> Finding | None:
        """The row on whose scores published estimators are tried: the headline's, or its rung's with most canaries."""
        top = self.top
        if top is None or not top.pooled:
            return top
        return next((row for row in self.headlines if row.rung == top.rung), None)

    def rung_verdict(self, rung: str) -> str:
        """The verdict on one rung, empty without a claim; of a rung without rows the run's, if it decided."""
        decided = self.headline is not None and self.headline.rung == rung and rung not in self.rungs
        return self.verdicts.get(rung, (self.verdict or "") if decided else "")

    @property
    def client(self) -> ClientExposure | None:
        """A client's own exposure, where the trainer wrote one that differs from that of the canaries."""
        rounds, epsilon = self.raw.get("client_rounds"), _readable(self.raw.get("client_epsilon"))
        if isinstance(rounds, bool) or not isinstance(rounds, int) or epsilon is None or math.isnan(epsilon):
            return None
        if self.analytical is not None and math.isclose(epsilon, self.analytical, rel_tol=1e-3):
            return None
        return ClientExposure(rounds=rounds, epsilon=epsilon, exact=self.raw.get("client_exposure") == "most exposed")

    @property
    def accounted(self) -> Accounted | None:
        """The accountant's epsilon, where the trainer has an accountant."""
        epsilon, judged = _readable(self.raw.get("accounted_epsilon")), self.raw.get("if_accounted_were_claimed")
        if epsilon is None:
            return None
        if not isinstance(judged, Mapping) or not judged.get("verdict"):
            return Accounted(epsilon=epsilon, verdict=None, reason="")
        return Accounted(epsilon=epsilon, verdict=str(judged["verdict"]), reason=str(judged.get("reason", "")))

    def analytical_for(self, times: int | None) -> float | None:
        """The analytical epsilon of somebody who takes part so often, as far as the trainer wrote it."""
        if times is None:
            return None
        if self.raw.get("presentations") == times:
            return self.analytical
        return _readable(self.raw.get("most_exposed_epsilon")) if self.raw.get("most_presentations") == times else None

    @property
    def small_groups(self) -> int:
        """How many groups of canaries are too small for a row of their own."""
        return sum(note.endswith(TOO_FEW) for note in self.notes)

    @property
    def trainer_warnings(self) -> tuple[str, ...]:
        """What an integration warns of."""
        return tuple(_sentences(self.raw.get("warnings")))

    @property
    def remarks(self) -> tuple[str, ...]:
        """The audit's own notes and the integration's, without those on groups that are too small for a row."""
        own = [note for note in self.notes if not note.endswith(TOO_FEW)]
        return (*own, *_sentences(self.raw.get("trainer_notes")))

    @property
    def row_warnings(self) -> dict[str, list[str]]:
        """The warnings of the rows that are shown, each with the names of the rows that it is about."""
        found: dict[str, list[str]] = {}
        for row in self.shown_rows:
            for warning in row.warnings:
                found.setdefault(warning, []).append(row.name)
        return found

    @property
    def noise_multiplier(self) -> float | None:
        return optional_number(self.raw.get("noise_multiplier"))

    @classmethod
    def from_dict(cls, result: Mapping[str, Any]) -> "Findings":
        """From result.json, or from an AuditResult's `to_dict`; ValueError where it is something else."""
        try:
            return _findings(result)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError) as error:
            raise ValueError(f"this is not a result of an audit ({_told(error)})") from None


def _findings(result: Mapping[str, Any]) -> Findings:
    adversaries = _mapping(result["adversaries"])
    rows = [
        _finding(str(rung), _mapping(group))
        for rung, found in adversaries.items()
        for group in _listed(_mapping(found)["groups"])
    ]
    verdicts = {str(rung): str(found["verdict"]) for rung, found in adversaries.items() if found.get("verdict")}
    return Findings(
        dim=_whole(result["dim"]),
        delta=_number(result["delta"]),
        canaries=_whole(result["canaries"]),
        unobserved=_whole(result["unobserved"]),
        rounds=_whole(result["rounds"]),
        skipped=_whole(result["skipped_rounds"]),
        analytical=optional_number(result["analytical_epsilon"]),
        claimed=optional_number(result["claimed_epsilon"]),
        accounting=_optional_text(result["claim_accounting"]),
        verdict=_optional_text(result["verdict"]),
        reason=_optional_text(result["reason"]) or "",
        code=_optional_text(result.get("reason_code")) or "",
        participations=None if result.get("claim_participations") is None else _whole(result["claim_participations"]),
        sensitivity=optional_number(result.get("claim_sensitivity")),
        rows=tuple(rows),
        verdicts=verdicts,
        gauges=tuple(_gauge(str(name), _mapping(gauge)) for name, gauge in _mapping(result["gauges"]).items()),
        audited=tuple(
            _audited(str(name), _mapping(item)) for name, item in _mapping(result.get("audited", {})).items()
        ),
        headline=None if result.get("headline") is None else _headline(_mapping(result["headline"])),
        notes=tuple(str(note) for note in _listed(result["notes"])),
        raw=dict(result),
    )


def _finding(rung: str, row: Mapping[str, Any]) -> Finding:
    return Finding(
        rung=rung,
        presentations=None if row["presentations"] is None else _whole(row["presentations"]),
        canaries=_whole(row["canaries"]),
        epsilon=_number(row["epsilon"]),
        interval=None if row["interval"] is None else _pair(row["interval"]),
        lower_bound=_number(row["lower_bound"]),
        confidence=_number(row["confidence"]),
        floor=_number(row["floor"]["q95"]),
        ceiling=_number(row["ceiling"]),
        paper_epsilon=_number(row["paper"]["epsilon"]),
        paper_lower_bound=_number(row["paper"]["lower_bound"]),
        mean=_number(row["mean"]),
        std=_number(row["std"]),
        null_mean=_number(row["null_mean"]),
        null_std=_number(row["null_std"]),
        anderson_darling=_number(row["anderson_darling"]["statistic"]),
        p_value=_number(row["anderson_darling"]["p_value"]),
        variance=str(row["variance"]["used"]),
        warnings=tuple(str(warning) for warning in _listed(row["warnings"])),
        published=tuple(_estimator(_mapping(entry)) for entry in _listed(row.get("estimators", []))),
    )


def _estimator(entry: Mapping[str, Any]) -> Estimator:
    kind = entry["kind"]
    if not _is_kind(kind):
        raise ValueError(f"an estimator's kind must be estimate, heuristic or valid bound, got {kind!r}")
    return Estimator(
        name=str(entry["name"]), value=_number(entry["value"]), kind=kind, note=str(entry.get("assumptions", ""))
    )


def _gauge(name: str, gauge: Mapping[str, Any]) -> GaugeReading:
    return GaugeReading(
        name=name,
        meaning=str(gauge["meaning"]),
        smallest=_number(gauge["smallest"]),
        largest=_number(gauge["largest"]),
        limits=_pair(gauge["limits"]),
        flagged=tuple(_whole(number) for number in _listed(gauge["flagged"])),
        status=str(gauge["status"]),
        noise_left=optional_number(gauge.get("noise_left")),
    )


def _audited(name: str, item: Mapping[str, Any]) -> Audited:
    return Audited(name=name, status=str(item["status"]), detail=str(item["detail"]))


def _headline(top: Mapping[str, Any]) -> Headline:
    return Headline(
        rung=str(top["rung"]),
        participations=None if top["participations"] is None else _whole(top["participations"]),
        epsilon=_number(top["epsilon"]),
        interval=None if top["interval"] is None else _pair(top["interval"]),
        pooled=top["pooled"] is True,
    )


def _sentences(value: Any) -> Iterator[str]:
    """The sentences of an entry that a trainer wrote; none where it is something else than a list."""
    yield from (str(each) for each in value) if isinstance(value, list | tuple) else ()


def _readable(value: Any) -> float | None:
    """A number that a trainer wrote, None where it is none."""
    try:
        return optional_number(value)
    except (ValueError, OverflowError):
        return None


def optional_number(value: Any) -> float | None:
    """A number of a JSON file, or None where there is none; "inf" is infinity."""
    return None if value is None else _number(value)


def _is_kind(value: Any) -> TypeGuard[Kind]:
    return value in ("estimate", "heuristic", "valid bound")


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in ("inf", "-inf")):
        raise ValueError(f"{str(value)[:40]!r} is no number")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{str(value)[:40]!r} is no whole number")
    return value


def _pair(values: Any) -> tuple[float, float]:
    low, high = _listed(values)
    return _number(low), _number(high)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{str(value)[:40]!r} is no object")
    return value


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{str(value)[:40]!r} is no list")
    return value


def _optional_text(value: Any) -> str | None:
    return None if value is None else str(value)


def _told(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
