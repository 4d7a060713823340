"""The items of a privacy statement on the evidence of the audit, and on its limits."""

import math
from collections.abc import Iterator
from typing import Any

from coalmine.argument_checks import one_line
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.report.brief import assumption
from coalmine.report.sentences import ATTACKERS, participation_words, percent
from coalmine.report.statement_item import (
    OBSERVED,
    Item,
    Sources,
    client_sentence,
    format_value,
    make_item,
    missing_item,
)
from coalmine.report.table_rows import TableRow, top_row
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import Words, format_bound, format_interval, format_rounds

NO_LEGS = "no separate leg: the claim does not rely on sampling"
NO_CLAIM = "none: nothing was claimed"
FALSE_ALARMS = (
    "A true claim gets the verdict VIOLATION in at most 1 % of runs. A gauge leaves its limits in at most one honest run "
    "in 10,000."
)
ALARM_ERRORS = "The alarm during training adds at most 0.25 %."
LIMITS = (
    "The audit is about this run alone. It says nothing about other models trained on the same data.",
    "It measures what the canaries give away. It assumes that people were treated in the same way as canaries.",
    "The measured ε is an estimate for the attacker that it names. Only the guarantee is an upper limit, and only if its "
    "assumptions hold.",
    "It assumes that the pipeline reported its releases correctly.",
)
VERIFY = (
    "coalmine verify DIR --seed-file SEED --model MODEL.npy --commitment HEX --log-digest HEX --statement FILE "
    "--facts FACTS"
)


def evidence_items(sources: Sources) -> Iterator[Item]:
    """Part 4: the evidence of the audit."""
    result, verdict, words = sources.result, sources.result.verdict, sources.words
    outcome = None if verdict is None or result.claim is None else str(verdict.outcome)
    yield make_item(
        "evidence.verdict", "verdict", NO_CLAIM if result.claim is None else _verdict_text(verdict, words), outcome
    )
    for name in ("accounting", "noise", "sampling"):
        leg = result.legs.get(name)
        text = (NO_CLAIM if result.claim is None else NO_LEGS) if leg is None else _verdict_text(leg, words)
        yield make_item(f"evidence.{name}_leg", f"verdict on {name}", text, None if leg is None else str(leg.outcome))
    yield from _measured_items(top_row(result))
    yield _power_item(result)
    alarm = f" {ALARM_ERRORS}" if result.watched else ""
    yield make_item("evidence.false_alarms", "false alarms", FALSE_ALARMS + alarm)
    yield _gauges_item(result.gauges)
    yield from _commitment_items(sources)
    yield make_item("evidence.verification", "how to verify", VERIFY)
    limits = [one_line(line) for line in _limit_sentences(sources)]
    yield make_item("evidence.limits", "limits of the audit", " ".join(limits), limits)


def _verdict_text(verdict: Any, words: Words) -> str:
    return f"{verdict.outcome}: {words.say(verdict.reason)}"


def _measured_items(top: TableRow | None) -> Iterator[Item]:
    """The measured epsilon, its interval and the valid lower bound."""
    labels = (
        *("measured ε, an estimate", "95 % interval of the measured ε", "lower bound of ε"),
        "lower bound of ε if the noise is Gaussian",
    )
    names = ("measured_epsilon", "interval", "lower_bound", "lower_bound_gaussian")
    keys = tuple(f"evidence.{name}" for name in names)
    if top is None or math.isnan(top.epsilon):
        yield from (missing_item(key, label) for key, label in zip(keys, labels, strict=True))
        return
    sees = ATTACKERS.get(top.rung, "an attack of your own")
    text = f"{format_value(top.epsilon)}{participation_words(top)}, for an attacker who {sees} ({top.rung})"
    detail = "" if top.detected else "nothing was detected: the estimate lies below the noise floor"
    yield make_item(keys[0], labels[0], text, top.epsilon, basis=OBSERVED, detail=detail)
    if top.interval is None:
        yield make_item(keys[1], labels[1], "none: there is no interval for this attacker")
    else:
        yield make_item(keys[1], labels[1], format_interval(top.interval), list(top.interval), basis=OBSERVED)
    if math.isnan(top.lower_bound):
        yield missing_item(keys[2], labels[2])
    else:
        text = f"{format_bound(top.lower_bound)}: valid with 95 % confidence for any law of the scores"
        yield make_item(keys[2], labels[2], text, top.lower_bound, basis=OBSERVED)
    if top.lower_bound_gaussian is None:
        yield make_item(keys[3], labels[3], f"withheld: {top.gaussian.withheld or 'there are no scores'}")
    else:
        text = f"{format_bound(top.lower_bound_gaussian)}: valid with 95 % confidence {assumption(top.rung)}"
        yield make_item(keys[3], labels[3], text, top.lower_bound_gaussian, basis=OBSERVED)


def _power_item(result: AuditResult) -> Item:
    key, label, verdict = "evidence.power", "power", result.verdict
    if verdict is None or result.claim is None:
        return make_item(key, label, NO_CLAIM)
    if verdict.outcome == "VIOLATION":
        return make_item(key, label, "does not apply: the claim is refuted")
    power = verdict.facts.get("power")
    if power is None:
        return missing_item(key, label, f"the verdict does not depend on it: {verdict.reason}")
    text = f"twice the claimed ε would have been detected with a probability of {percent(power)}"
    if verdict.outcome == "PASS" and result.legs:
        text = f"each leg would have detected twice the claimed ε with a probability of at least {percent(power)}"
    return make_item(key, label, text, power)


def _gauges_item(gauges: tuple[GaugeResult, ...]) -> Item:
    key, label = "evidence.gauges", "gauges of the noise"
    if not gauges:
        return make_item(key, label, "none: the rounds lack the inputs of the gauges")
    outside = [f"{gauge.name} ({gauge.status})" for gauge in gauges if gauge.status != "ok"]
    if not outside:
        return make_item(key, label, "all are within their limits", [], basis=OBSERVED)
    names = [gauge.name for gauge in gauges if gauge.status != "ok"]
    return make_item(key, label, f"outside their limits: {', '.join(outside)}", names, basis=OBSERVED)


def _commitment_items(sources: Sources) -> Iterator[Item]:
    committed, digest = sources.commitment, sources.result.log_digest
    key, label = "evidence.commitment", "commitment to the seed, before round 1"
    if committed is None or not committed.statement_sha256:
        yield missing_item(key, label)
    else:
        warning = "the seed is short enough to guess, so this audit is a demonstration" if sources.demonstration else ""
        yield make_item(key, label, committed.statement_sha256, committed.statement_sha256, detail=warning)
    key, label = "evidence.log_digest", "digest of the log, after the last round"
    yield make_item(key, label, digest, digest) if digest else missing_item(key, label)


def _limit_sentences(sources: Sources) -> Iterator[str]:
    """The limits of this audit, one sentence each."""
    result = sources.result
    yield from LIMITS
    if sources.demonstration:
        yield "Its seed is short enough to guess, so nobody else can rely on it."
    if client_sentence(result):
        yield client_sentence(result)
    if result.skipped:
        verb, them = ("was", "it") if result.skipped == 1 else ("were", "them")
        yield f"{format_rounds(result.skipped)} {verb} skipped, and nothing is known about {them}."
    for item in result.audited:
        if item.is_open:
            yield f"{item.status.capitalize()}: {item.name} ({item.detail})."
