"""What result.json says, typed and checked: a file of another program is refused here, not half-way down a page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from coalmine.audit.adversaries import RUNGS

Kind = Literal["estimate", "heuristic", "valid bound"]


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

    @property
    def name(self) -> str:
        return self.rung if self.presentations is None else f"{self.rung} {self.presentations}×"

    @property
    def detected(self) -> bool:
        """Whether the estimate lies above what as many canaries read when nothing leaks."""
        return not self.epsilon <= self.floor

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
    rows: tuple[Finding, ...]
    verdicts: dict[str, str]  # by rung
    gauges: tuple[GaugeReading, ...]
    notes: tuple[str, ...]
    raw: dict[str, Any] = field(repr=False)

    @property
    def headlines(self) -> tuple[Finding, ...]:
        """The first row of each rung, weakest attacker first."""
        return tuple({row.rung: row for row in reversed(self.rows)}.values())[::-1]

    @property
    def strongest(self) -> Finding | None:
        """The headline of the strongest attacker there is: what the run comes to in one number."""
        known = [row for row in self.headlines if row.rung in RUNGS]
        return max(known, key=lambda row: RUNGS.index(row.rung), default=None)

    @property
    def most_presented(self) -> Finding | None:
        """The same attacker's row for the canaries that came most often, where that is another one."""
        headline = self.strongest
        if headline is None or headline.presentations is None:
            return None
        most = max((row for row in self.rows if row.rung == headline.rung), key=lambda row: row.presentations or 0)
        return most if (most.presentations or 0) > headline.presentations else None

    @property
    def listed(self) -> tuple[Finding, ...]:
        """The rows in the order of tables: within a rung by presentations."""
        order = list(dict.fromkeys(row.rung for row in self.rows))
        return tuple(sorted(self.rows, key=lambda row: (order.index(row.rung), row.presentations or 0)))

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
        rows=tuple(rows),
        verdicts=verdicts,
        gauges=tuple(_gauge(str(name), _mapping(gauge)) for name, gauge in _mapping(result["gauges"]).items()),
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
    )


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
