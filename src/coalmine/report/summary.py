"""A result in a few lines: the numbers on top with whose they are, what was audited, the gauges and the notes."""

import math
from dataclasses import dataclass
from typing import Any

from coalmine.report.advice import gauge_steps
from coalmine.report.findings import Audited, Finding, Findings, GaugeReading
from coalmine.report.sentences import interval_text, rounds_of, shown

NAMED = 12  # tensors that are named in a line of text
NOT_SEEN = "not seen: "


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    """One of the numbers on top, and whose ε it is."""

    label: str
    value: float
    detail: str
    verdict: str = ""


def key_figures(findings: Findings) -> list[KeyFigure]:
    """The numbers on top: the measured ε that the verdict rests on, and beside it a client's own where that differs."""
    found = []
    if findings.top is not None:
        found.append(
            KeyFigure(
                label="measured ε", value=findings.top.epsilon, detail=_measured(findings.top) + _decided(findings)
            )
        )
    client = findings.client
    if client is not None:
        takes_part = f"takes part in {'' if client.exact else 'about '}{rounds_of(client.rounds)} of this run"
        who = f"the client who comes most often {takes_part}" if client.exact else f"a client {takes_part}"
        found.append(
            KeyFigure(label="client's ε", value=client.epsilon, detail=f"analytical: {who}{_canary(findings)}")
        )
    if findings.claimed is not None:
        found.append(
            KeyFigure(
                label="claimed ε",
                value=findings.claimed,
                detail=_claimed(findings),
                verdict=findings.verdict or "",
            )
        )
    if not _claims_analytical(findings):
        found += _analytical(findings)
    accounted = findings.accounted
    if accounted is not None:
        judged = f"; judged as a claim: {accounted.verdict}" if accounted.verdict else ""
        found.append(
            KeyFigure(
                label="accountant's ε",
                value=accounted.epsilon,
                detail=f"amplified by sampling{judged}",
                verdict=accounted.verdict or "",
            )
        )
    return found


def _measured(row: Finding) -> str:
    """Who measured it, for whom, and how far it can be trusted."""
    parts = [row.rung]
    if row.pooled and row.presentations is not None:
        parts = [f"{row.rung}, for somebody who takes part in {rounds_of(row.presentations)}"]
        parts.append("fitted to all canaries, which took part in different numbers of rounds")
    elif row.presentations is not None:
        parts = [f"{row.rung}, from {row.canaries:,} canaries that took part in {rounds_of(row.presentations)}"]
    if row.interval is not None:
        parts.append(f"95 % interval {interval_text(row.interval)}")
    if row.lower_bound > 0:
        parts.append(f"at least {shown(row.lower_bound)}")
    if not row.detected:
        parts.append(f"nothing was detected, as the noise floor is {shown(row.floor)}")
    if row.std_fitted:
        parts.append("less precise, as the standard deviation was fitted to the scores")
    return "; ".join(parts)


def _decided(findings: Findings) -> str:
    """Whether something else than this number refuted the claim."""
    by_gauge = findings.verdict == "VIOLATION" and findings.code == "gauge"
    return "; a gauge refutes the claim, not this number" if by_gauge else ""


def _canary(findings: Findings) -> str:
    times = findings.raw.get("presentations")
    return f", a canary in {times:,}" if isinstance(times, int) and not isinstance(times, bool) else ""


def _claimed(findings: Findings) -> str:
    if findings.accounting == "amplified":
        return "amplified by sampling"
    times = findings.participations
    who = (
        "for a client whose rounds are known"
        if times is None
        else f"for a client that takes part in {rounds_of(times)}"
    )
    if findings.sensitivity is not None:
        who = f"{who} and counts {shown(findings.sensitivity)} clip norms in all"
    return f"{who}; this is the analytical ε" if _claims_analytical(findings) else who


def _claims_analytical(findings: Findings) -> bool:
    """Whether the analytical ε is what was claimed, for the same number of rounds as far as the trainer wrote it."""
    if findings.claimed is None or findings.analytical is None or findings.accounting == "amplified":
        return False
    return math.isclose(findings.claimed, findings.analytical, rel_tol=1e-9)


def _analytical(findings: Findings) -> list[KeyFigure]:
    """The analytical ε of the canaries, that of the headline's participations first where the trainer wrote both."""
    if findings.analytical is None:
        return []
    top, sensitivity = findings.top, findings.raw.get("sensitivity")
    usual: Any = findings.raw.get("presentations")
    if findings.raw.get("noise") not in (None, "gaussian") and isinstance(sensitivity, float):
        detail = f"for canaries, which count {shown(sensitivity)} clip norms under this noise"
        return [KeyFigure(label="analytical ε", value=findings.analytical, detail=detail)]
    times = None if top is None else top.presentations
    exact = findings.analytical_for(times)
    if exact is not None and times is not None:
        return [KeyFigure(label="analytical ε", value=exact, detail=f"for {rounds_of(times)}")]
    known = isinstance(usual, int) and not isinstance(usual, bool)
    detail = f"for {rounds_of(int(usual))}" if known else "what the stated noise promises"
    return [KeyFigure(label="analytical ε", value=findings.analytical, detail=detail)]


def coverage_lines(findings: Findings) -> list[str]:
    """What was audited, in few lines: the checked items in one, and each of the others with its reason."""
    checked = [_checked(item, findings) for item in findings.audited if item.status == "checked"]
    lines = [f"checked: {', '.join(checked)}"] if checked else []
    lines += [
        f"{item.status}: {item.name} ({item.detail})"
        for status in ("not checked", "cannot be checked")
        for item in findings.audited
        if item.status == status
    ]
    return lines


def _checked(item: Audited, findings: Findings) -> str:
    layers = tensor_names(findings)
    if item.name == "tensors" and layers:
        more = f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
        return f"tensors ({', '.join(layers[:NAMED])}{more})"
    _, _, missing = item.detail.partition(NOT_SEEN)
    return f"{item.name} ({NOT_SEEN}{missing})" if missing else item.name


def tensor_names(findings: Findings) -> list[str]:
    """Every tensor that has a gauge of its own."""
    return [gauge.layer for gauge in findings.gauges if gauge.layer is not None]


def gauge_lines(findings: Findings) -> list[str]:
    """How many gauges are within their limits, a line for each that is not, and what those mean."""
    if not findings.gauges:
        return []
    odd = [gauge for gauge in findings.gauges if gauge.status != "ok"]
    fine = len(findings.gauges) - len(odd)
    start = "all" if not odd else f"{fine} of"
    return [
        f"gauges: {start} {len(findings.gauges)} are within their limits",
        *map(_reading, odd),
        *gauge_steps(findings),
    ]


def _reading(gauge: GaugeReading) -> str:
    span = shown(gauge.smallest)
    if gauge.smallest != gauge.largest:
        span += f" … {shown(gauge.largest)}"
    where = f" in {rounds_of(len(gauge.flagged))}" if gauge.flagged else ""
    left = "" if gauge.noise_left is None else f"; at most {shown(gauge.noise_left)} of the stated noise is left"
    return f"gauge {gauge.name} is {gauge.status}: {span}, limits {interval_text(gauge.limits)}{where}{left}"


def folded_line(findings: Findings) -> str:
    """How many rows a table of one row for each attacker leaves out; empty where it leaves out none."""
    count = len(findings.folded_rows)
    if not count:
        return ""
    return (
        "1 more row, for another number of presentations"
        if count == 1
        else (f"{count:,} more rows, one for each number of presentations")
    )


def note_lines(findings: Findings) -> list[str]:
    """Warnings first, then the notes of the audit and of the trainer."""
    notes = [f"warning: {text}" for text in findings.trainer_warnings]
    notes += findings.remarks
    small = findings.small_groups
    if small:
        are = "group of canaries is" if small == 1 else "groups of canaries are"
        notes.append(f"{small:,} {are} too small for a row of {'its' if small == 1 else 'their'} own")
    return notes
