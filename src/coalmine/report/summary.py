"""A result in a few lines: the key figures with their context, the audited items, and the gauges."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coalmine.evidence.gauges.gauge import GaugeResult, by_gauge, status_of
from coalmine.report.advice import gauge_steps
from coalmine.report.sentences import LEGS, format_number, format_rounds, interval_text, shorten
from coalmine.report.table_rows import TableRow, folded_rows, row_warnings, top_row
from coalmine.report.trainer_entries import (
    accounted_epsilon,
    analytical_for,
    client_exposure,
    note_lines,
    number,
    whole,
)
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.amplified_claim import ACCOUNTING, SAMPLING
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.findings.amplified import Accounting
from coalmine.verdict.findings.gauges import NoiseRemovable
from coalmine.verdict.findings.missing import NothingClaimed

MOST_NAMED = 12  # tensors in a line of text
NOT_SEEN = "not seen: "


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    """One of the numbers at the top of a report, and what it is for."""

    label: str
    value: float
    detail: str
    verdict: str = ""


def key_figures(result: AuditResult) -> list[KeyFigure]:
    """The numbers at the top: the measured ε that the verdict rests on, a client's ε if that differs, and the claim."""
    figures = []
    top = top_row(result)
    if top is not None:
        figures.append(
            KeyFigure(label="measured ε", value=top.epsilon, detail=_measured_detail(top) + _refuted_by(result))
        )
    client = client_exposure(result)
    if client is not None:
        takes_part = f"takes part in {'' if client.exact else 'about '}{format_rounds(client.rounds)} of this run"
        who = f"the most frequent client {takes_part}" if client.exact else f"a client {takes_part}"
        figures.append(
            KeyFigure(label="client's ε", value=client.epsilon, detail=f"analytical: {who}{_canary_rounds(result)}")
        )
    if result.claim is not None:
        verdict = "" if result.verdict is None else str(result.verdict.outcome)
        detail = claim_words(result) or _claim_detail(result.claim, _claims_analytical(result))
        figures.append(KeyFigure(label="claimed ε", value=result.claim.epsilon, detail=detail, verdict=verdict))
    if not _claims_analytical(result):
        figures += _analytical_figures(result)
    accounted = accounted_epsilon(result)
    if accounted is not None and not _claims_accounted(result, accounted.epsilon):
        judged = f"; judged as a claim: {accounted.verdict}" if accounted.verdict else ""
        figures.append(
            KeyFigure(
                label="accountant's ε",
                value=accounted.epsilon,
                detail=f"amplified by sampling{judged}",
                verdict=accounted.verdict,
            )
        )
    return figures


def _measured_detail(row: TableRow) -> str:
    """The rung, the presentations, the interval and the caveats of a measured ε."""
    parts = [row.rung]
    if row.pooled and row.presentations is not None:
        parts = [f"{row.rung}, for somebody who takes part in {format_rounds(row.presentations)}"]
        parts.append("fitted to all canaries, which took part in different numbers of rounds")
    elif row.presentations is not None:
        parts = [f"{row.rung}, from {row.canaries:,} canaries that took part in {format_rounds(row.presentations)}"]
    if row.rung == "unknown-round":
        parts.append("an estimate: the accountant's ε at the measured noise")
    if row.interval is not None:
        parts.append(f"95 % interval {interval_text(row.interval)}")
    if row.lower_bound > 0:
        parts.append(f"at least {format_number(row.lower_bound)}")
    if not row.detected:
        parts.append(f"nothing was detected, because the noise floor is {format_number(row.floor)}")
    if row.std_fitted:
        parts.append("less precise, because the standard deviation was fitted to the scores")
    return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One leg of a verdict on an amplified claim, with its question."""

    name: str
    outcome: str
    question: str
    reason: str

    @property
    def title(self) -> str:
        return self.name.capitalize()

    @property
    def line(self) -> str:
        """The leg in one line of text."""
        return f"{self.title}: {self.outcome} — {self.reason}"


def legs_of(result: AuditResult) -> list[Leg]:
    """The legs of a verdict on an amplified claim, in order; empty for other claims."""
    return [
        Leg(name=name, outcome=str(leg.outcome), question=LEGS.get(name, ""), reason=leg.reason)
        for name, leg in result.legs.items()
    ]


def claim_words(result: AuditResult) -> str:
    """The basis of an amplified claim: scheme, noise, accountant, adjacency, and the kind of its ε."""
    claim = result.claim
    if claim is None or claim.sampling is None:
        return ""
    parts = [f"amplified by sampling: {claim.sampling}"]
    accounted = result.legs[ACCOUNTING].finding if ACCOUNTING in result.legs else None
    if isinstance(accounted, Accounting):
        parts += [
            f"noise multiplier {format_number(accounted.claimed_noise)}",
            f"accountant: {accounted.accountant}{_figure_kind(accounted)}",
            f"adjacency: {accounted.adjacency}",
        ]
    return "; ".join(parts)


def _figure_kind(accounted: Accounting) -> str:
    """The kind of ε that the accountant gives, and the ε itself."""
    low, high = accounted.epsilon_range
    if accounted.epsilon_kind == "range":
        return f", a range: ε between {format_number(low)} and {format_number(high)}"
    article = "an" if accounted.epsilon_kind[0] in "aeiou" else "a"
    return f", {article} {accounted.epsilon_kind}: ε = {format_number(high)}"


def _refuted_by(result: AuditResult) -> str:
    """A note if something other than the measured ε refuted the claim; else empty."""
    verdict = result.verdict
    if verdict is None or verdict.outcome != "VIOLATION":
        return ""
    if verdict.part in (ACCOUNTING, SAMPLING):
        return f"; the {verdict.part} leg refutes the claim, not this number"
    return "; a gauge refutes the claim, not this number" if isinstance(verdict.finding, NoiseRemovable) else ""


def _canary_rounds(result: AuditResult) -> str:
    times = whole(result.extra.get("presentations"))
    return "" if times is None else f", a canary in {times:,}"


def _claim_detail(claim: Claim, is_analytical: bool) -> str:
    times = claim.participations
    who = (
        "for a client whose rounds are known"
        if times is None
        else f"for a client that takes part in {format_rounds(times)}"
    )
    if claim.sensitivity is not None:
        who = f"{who} and contributes {format_number(claim.sensitivity)} clip norms in total"
    return f"{who}; this is the analytical ε" if is_analytical else who


def _claims_analytical(result: AuditResult) -> bool:
    """Whether the claim is the analytical ε."""
    if result.claim is None or result.analytical_epsilon is None or result.claim.amplified:
        return False
    return math.isclose(result.claim.epsilon, result.analytical_epsilon, rel_tol=1e-9)


def _claims_accounted(result: AuditResult, epsilon: float) -> bool:
    """Whether the claim is the ε of the trainer's accountant."""
    claim = result.claim
    return claim is not None and claim.amplified and math.isclose(claim.epsilon, epsilon, rel_tol=1e-6)


def _mechanism_note(result: AuditResult) -> str:
    """Next to an amplified claim, the attacker of the analytical ε, and the verdict on that ε if the trainer wrote one."""
    if result.claim is None or not result.claim.amplified:
        return ""
    judged = result.extra.get("if_mechanism_were_claimed")
    verdict = judged.get("verdict") if isinstance(judged, Mapping) else None
    return "; not amplified: for an attacker who knows the rounds" + (f"; by itself: {verdict}" if verdict else "")


def _analytical_figures(result: AuditResult) -> list[KeyFigure]:
    """The analytical ε of the canaries, for the headline's participations if the trainer wrote that one."""
    if result.analytical_epsilon is None:
        return []
    top, value = top_row(result), result.analytical_epsilon
    sensitivity, usual = number(result.extra.get("sensitivity")), whole(result.extra.get("presentations"))
    detail = "guaranteed by the stated noise" if usual is None else f"for {format_rounds(usual)}"
    times = None if top is None else top.presentations
    exact = None if times is None else analytical_for(result, times)
    if result.extra.get("noise") not in (None, "gaussian") and sensitivity is not None:
        detail = f"for canaries, which contribute {format_number(sensitivity)} clip norms under this noise"
    elif exact is not None and times is not None:
        value, detail = exact, f"for {format_rounds(times)}"
    return [KeyFigure(label="analytical ε", value=value, detail=detail + _mechanism_note(result))]


def verdict_lines(result: AuditResult) -> list[str]:
    """The verdict and its reason in one line; empty without a claim."""
    if result.verdict is None or isinstance(result.verdict.finding, NothingClaimed):
        return []
    return [f"{result.verdict.outcome}: {shorten(result.verdict.reason)}"]


def summary_lines(result: AuditResult, notes: Sequence[str] = ()) -> list[str]:
    """Everything below the table: omitted rows, warnings, the verdict, the audited items, gauges, notes."""
    folded = folded_line(result)
    passed = result.verdict is not None and result.verdict.outcome == "PASS"
    return [
        *([f"{folded}; the rows are in result.json"] if folded else []),
        *row_warnings(result),
        *verdict_lines(result),
        *(leg.line for leg in legs_of(result)),
        *(["this PASS covers only what was checked:"] if passed else []),
        *coverage_lines(result),
        *gauge_lines(result),
        *notes,
        *note_lines(result),
    ]


def coverage_lines(result: AuditResult) -> list[str]:
    """The audited items: the checked ones in one line, and each of the others with its reason."""
    checked = [_checked_words(item, result) for item in result.audited if item.status == "checked"]
    lines = [f"checked: {', '.join(checked)}"] if checked else []
    lines += [
        f"{item.status}: {item.name} ({item.detail})"
        for status in ("failed", "not checked", "cannot be checked", "does not apply")
        for item in result.audited
        if item.status == status
    ]
    return lines


def _checked_words(item: AuditedItem, result: AuditResult) -> str:
    layers = tensor_names(result)
    if item.name == "tensors" and layers:
        more = f" and {len(layers) - MOST_NAMED} more" if len(layers) > MOST_NAMED else ""
        return f"tensors ({', '.join(layers[:MOST_NAMED])}{more})"
    _, _, missing = item.detail.partition(NOT_SEEN)
    return f"{item.name} ({NOT_SEEN}{missing})" if missing else item.name


def tensor_names(result: AuditResult) -> list[str]:
    """The names of the tensors that have their own gauge."""
    return [gauge.part for gauge in result.gauges if gauge.part]


def gauge_lines(result: AuditResult) -> list[str]:
    """The number of gauges within their limits, and a line and advice for the others."""
    if not result.gauges:
        return []
    gauges = by_gauge(result.gauges)
    within = [gauge for gauge, results in gauges.items() if status_of(results) == "ok"]
    start = "all" if len(within) == len(gauges) else f"{len(within)} of"
    return [
        f"gauges: {start} {len(gauges)} are within their limits",
        *(_gauge_line(each) for each in result.gauges if each.status != "ok"),
        *gauge_steps(result),
    ]


def _gauge_line(gauge: GaugeResult) -> str:
    span = format_number(gauge.smallest)
    if gauge.smallest != gauge.largest:
        span += f" … {format_number(gauge.largest)}"
    where = f" in {format_rounds(len(gauge.flagged))}" if gauge.flagged else ""
    left = (
        "" if gauge.noise_left is None else f"; at most {format_number(gauge.noise_left)} of the stated noise is left"
    )
    return f"gauge {gauge.name} is {gauge.status}: {span}, limits {interval_text(gauge.limits)}{where}{left}"


def folded_line(result: AuditResult) -> str:
    """The number of rows that a table with one row for each attacker omits; empty if there are none."""
    count = len(folded_rows(result))
    if not count:
        return ""
    return (
        "1 more row, for another number of presentations"
        if count == 1
        else f"{count:,} more rows, one for each number of presentations"
    )
