"""Reads a result from result.json: the inverse of `AuditResult.to_dict`, which refuses contradictions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import convert

from coalmine.argument_checks import short_repr
from coalmine.evidence.gauges.gauge import GaugeResult, Status, statistic_of
from coalmine.evidence.gaussian_bound import GaussianBound
from coalmine.measure.settings import Settings
from coalmine.result.audit_result import (
    CLAIM_FIELDS,
    COUNTS_SAMPLING,
    MU,
    TOP_LEVEL_SETTINGS,
    Adversary,
    AuditResult,
    Headline,
    Row,
    SmallGroup,
)
from coalmine.result.trainer_section import TrainerSection
from coalmine.verdict.alarm import Alarm
from coalmine.verdict.amplified_claim import PARTS
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.outcome import PASS
from coalmine.verdict.verdict import Verdict


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
        "log_digest",
        "small_groups",
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
        log_notes=convert(values["notes"], tuple[str, ...]),
        small_groups=convert(values.get("small_groups", []), tuple[SmallGroup, ...]),
        watched="alarm" in values,
        alarm=None if values.get("alarm") is None else _alarm(_mapping(values["alarm"])),
        trainer=TrainerSection.from_dict({name: value for name, value in values.items() if name not in known}),
        log_digest=convert(values.get("log_digest"), str | None),
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
        "gaussian": _gaussian(row),
    }
    return convert(shaped | {"estimate": whole}, Row)


def _gaussian(values: Mapping[str, Any]) -> dict[str, Any]:
    interval = values["interval_gaussian"]
    return {
        "lower_bound": _maybe(values["lower_bound_gaussian"]),
        "interval": None if interval is None else _two(interval),
        "withheld": values["gaussian_withheld"] or "",
    }


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
        gaussian=convert(_gaussian(top), GaussianBound),
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
