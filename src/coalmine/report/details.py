"""Everything that a terminal shows of a result: the ladder, the claim, what was audited, the gauges, the notes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from coalmine.argument_checks import count_of
from coalmine.evidence.gauges.gauge import GaugeResult, by_gauge
from coalmine.report.advice import gauge_steps
from coalmine.report.brief import assumption, item_status
from coalmine.report.table_rows import bound_notes, ladder_table, row_warnings, secondary_rows, top_row
from coalmine.result.audit_result import AuditResult
from coalmine.result.trainer_section import SeenNode, SeenView
from coalmine.result.words import (
    Words,
    format_bound,
    format_interval,
    format_measured,
    format_number,
    format_rounds,
    short_power,
)
from coalmine.verdict.amplified_claim import ACCOUNTING
from coalmine.verdict.findings.amplified import AccountantFacts

MOST_NAMED = 12  # tensors in a line of text
NAMED_NODES = 3  # in a line of text


BOUNDS = ("valid bound", "bound if Gaussian")  # the figures that are lower bounds


@dataclass(frozen=True, kw_only=True)
class ClientExposure:
    """The number of rounds of a client and its analytical epsilon; `exact` if the rounds of this run were counted."""

    rounds: int
    epsilon: float
    exact: bool


def details(result: AuditResult) -> str:
    """The whole result as text: a table with one row for each attacker, and what stands behind it."""
    words = Words.of(result)
    heads, cells = ladder_table(result)
    widths = [max(len(line[column]) for line in [heads, *cells]) for column in range(len(heads))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [heads, *cells]]
    return "\n".join([words.say(line) for line in (_title(result), *table, *detail_lines(result))])


def _title(result: AuditResult) -> str:
    settings = result.settings
    return (
        f"audit of {format_rounds(result.rounds)}: {settings.canaries:,} {settings.kind} canaries and "
        f"{settings.unobserved:,} unobserved ones in {settings.dim:,} dimensions, δ {short_power(settings.delta)}"
    )


def detail_lines(result: AuditResult) -> Iterator[str]:
    """Everything below the table, the claim first."""
    folded = folded_line(result)
    if folded:
        yield f"{folded}: result.json and result.to_frame() have them"
    yield from bound_notes(result)
    yield from row_warnings(result)
    yield from (f"{name} {figure_text(name, value)}: {meaning}" for name, value, meaning in figures(result))
    if result.claim is not None:
        yield result.claim.sentence(result.settings.delta) + (f"; {basis}" if (basis := claim_basis(result)) else "")
    if result.verdict is not None:
        yield f"{result.verdict.outcome}: {result.verdict.reason}"
    for name, leg in result.legs.items():
        yield f"{name}: {leg.outcome}: {leg.reason}"
    yield from (f"{item.name}: {item_status(result, item)} ({item.detail})" for item in result.audited)
    yield from gauge_lines(result)
    if count := len(result.small_groups):
        yield f"{count_of(count, 'group')} of canaries with too few for an estimate: result.small_groups"
    yield from map(view_words, result.trainer.views)
    if result.trainer.nodes:
        yield f"most exposed: {'; '.join(map(_node, result.trainer.nodes[:NAMED_NODES]))}"
    yield from result.notes
    if result.log_digest is not None:
        yield f"digest of the log: {result.log_digest}"


def view_words(view: SeenView) -> str:
    """The verdict on what somebody else than the public sees, in a line."""
    measured = "" if view.measured is None else f", measured {format_number(view.measured)}"
    claimed = "nothing was claimed" if view.claimed is None else f"claimed ε {format_number(view.claimed)}{measured}"
    return f"view of {view.name}, which sees {view.sees}: {view.outcome or 'no verdict'} ({claimed})"


def _node(seen: SeenNode) -> str:
    """What a server saw of one node, in a few words."""
    epsilon = "" if seen.epsilon is None else f", ε {format_number(seen.epsilon)}"
    weight = "" if math.isclose(seen.weight, 1.0, rel_tol=1e-3) else f", weight {format_number(seen.weight)}"
    missed = {"dropped": seen.dropped, "errors": seen.failed, "no answer": seen.silent}
    counts = "".join(f", {name} {count}" for name, count in missed.items() if count)
    return f"node {seen.node}, {format_rounds(seen.rounds)}{epsilon}{weight}{counts}"


def figures(result: AuditResult) -> list[tuple[str, float, str]]:
    """Every ε of the result: its name in the glossary, the number, and for whom it holds."""
    found = []
    top, client, claim = top_row(result), client_exposure(result), result.claim
    if top is not None and not math.isnan(top.epsilon):
        digits = format_measured(top.epsilon, top.interval)[0] if math.isfinite(top.epsilon) else "inf"
        found.append(
            ("measured ε", float(digits.replace(",", "")), f"by {top.name}{', fitted to all canaries' * top.pooled}")
        )
    if top is not None and not math.isnan(top.lower_bound):
        found.append((BOUNDS[0], top.lower_bound, "at least as large, with 95 % confidence, for any law"))
    if top is not None and top.lower_bound_gaussian is not None:
        interval = format_measured(top.lower_bound_gaussian, top.gaussian.interval)[1]
        meaning = f"at least as large, with 95 % confidence, {assumption(top.rung)}; interval {interval}"
        found.append((BOUNDS[1], top.lower_bound_gaussian, meaning))
    if claim is not None:
        found.append(("claimed ε", claim.epsilon, f"claimed for one {claim.unit or 'client'}"))
    if result.analytical_epsilon is not None:
        times = result.trainer.presentations
        often = "" if times is None else f" for {format_rounds(times)}"
        found.append(
            ("analytical ε", result.analytical_epsilon, f"guaranteed by the stated noise{often}, rounds known")
        )
    if client is not None:
        who = f"the most frequent client, in {format_rounds(client.rounds)}"
        average = f"a client, in about {format_rounds(client.rounds)}"
        found.append(("client's ε", client.epsilon, f"analytical, for {who if client.exact else average}"))
    if result.trainer.accounted_epsilon is not None:
        found.append(("accountant's ε", result.trainer.accounted_epsilon, "quoted by the trainer's accountant"))
    return found


def figure_text(name: str, value: float) -> str:
    """A figure's number as every view shows it."""
    return format_bound(value) if name in BOUNDS else format_number(value, 4)


def client_exposure(result: AuditResult) -> ClientExposure | None:
    """A client's exposure, if the trainer knows one and it differs from that of the canaries."""
    rounds, epsilon = result.trainer.client_rounds, result.trainer.client_epsilon
    if rounds is None or epsilon is None:
        return None
    if result.analytical_epsilon is not None and math.isclose(epsilon, result.analytical_epsilon, rel_tol=1e-3):
        return None
    return ClientExposure(rounds=rounds, epsilon=epsilon, exact=result.trainer.client_exposure == "most exposed")


def claim_basis(result: AuditResult) -> str:
    """The accounting of an amplified claim: noise, accountant, adjacency, and the kind of its ε; else empty."""
    accounted = result.legs[ACCOUNTING].finding if ACCOUNTING in result.legs else None
    if not isinstance(accounted, AccountantFacts):
        return ""
    low, high = accounted.epsilon_range
    kind = f"{accounted.epsilon_kind} ε = {format_number(high)}"
    if accounted.epsilon_kind == "range":
        kind = f"range ε between {format_number(low)} and {format_number(high)}"
    return (
        f"noise multiplier {format_number(accounted.claimed_noise)}; accountant: {accounted.accountant}, {kind}; "
        f"adjacency: {accounted.adjacency}"
    )


def tensor_names(result: AuditResult) -> list[str]:
    """The names of the tensors that have their own gauge."""
    return [gauge.part for gauge in result.gauges if gauge.part]


def gauge_lines(result: AuditResult) -> Iterator[str]:
    """A line for each gauge with its statistics, then advice. Many tensors within their limits are counted."""
    for gauge, results in by_gauge(result.gauges).items():
        fine = [each for each in results if each.part and each.status == "ok"]
        merged = fine if len(fine) > MOST_NAMED else []
        texts = [_reading(each) for each in results if each not in merged]
        if merged:
            span = min(each.smallest for each in merged), max(each.largest for each in merged)
            texts.append(f"{len(merged)} layers, all within their limits: {format_interval(span)}")
        yield f"gauge {gauge.name}: {'; '.join(texts)}"
    yield from gauge_steps(result)


def _reading(gauge: GaugeResult) -> str:
    span = format_number(gauge.smallest)
    if gauge.smallest != gauge.largest:
        span += f" … {format_number(gauge.largest)}"
    if gauge.status == "ok":
        return f"{gauge.name} {span}"
    where = f" in {count_of(len(gauge.flagged), 'round')}" if gauge.flagged else ""
    left = (
        "" if gauge.noise_left is None else f", at most {format_number(gauge.noise_left)} of the stated noise is left"
    )
    return f"{gauge.name} {span}, outside {format_interval(gauge.limits)}{where} ({gauge.status}){left}"


def folded_line(result: AuditResult) -> str:
    """The number of rows that a table with one row for each attacker omits; empty if there are none."""
    count = len(secondary_rows(result))
    if not count:
        return ""
    return (
        "1 more row, for another number of presentations"
        if count == 1
        else f"{count:,} more rows, one for each number of presentations"
    )
