"""The items of a privacy statement: recorded by the run, stated by the operator, or not stated.

Every number comes from result.json or from the facts file. This module only puts them into words.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from coalmine.argument_checks import one_line
from coalmine.argument_checks import short_repr as quoted
from coalmine.estimators.correlated import TreeNoise
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.log.commitment import Commitment
from coalmine.report.sentences import (
    ATTACKERS,
    format_number,
    format_rounds,
    interval_text,
    participation_words,
    percent,
)
from coalmine.report.statement_facts import Facts
from coalmine.report.table_rows import TableRow, top_row
from coalmine.report.trainer_entries import client_exposure, number
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.amplified_claim import ACCOUNTING
from coalmine.verdict.claim_context import ROUNDED
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.findings.amplified import Accounting
from coalmine.verdict.findings.noise import LittleNoise
from coalmine.verdict.pipeline_record import CLOSED_FORM, LONGEST_UNIT, ROW, PipelineRecord

Basis = Literal["observed", "recorded by the run", "stated by the operator", "not stated"]
OBSERVED: Basis = "observed"
RECORDED: Basis = "recorded by the run"
OPERATOR: Basis = "stated by the operator"
NOT_STATED: Basis = "not stated"

VARIANTS = {
    "approximate DP": "(ε, δ)-differential privacy, also called approximate DP",
    "pure DP": "ε-differential privacy, also called pure DP",
    "zero-concentrated DP": "zero-concentrated differential privacy",
    "Rényi DP": "Rényi differential privacy",
    "Gaussian DP": "μ-Gaussian differential privacy",
}
UNITS = {
    "client": "one client, with everything that it contributes",
    "document": "one document",
    "example": "one example; a person who contributed several is protected less",
}
ROW_UNIT = "one {unit}, which is one row of the data set; a person with several rows is protected less"
ADJACENCIES = {
    "add/remove": "add/remove: with and without one {unit}",
    "replace": "replace: one {unit} exchanged for another",
    "zero-out": "zero-out: the contribution of one {unit} set to zero",
    "add/remove or zero-out": "add/remove or zero-out: with and without the contribution of one {unit}",
}
SAMPLED_ADJACENCY = {"add or remove one": "add/remove", "replace one": "replace", "zero out one": "zero-out"}
TRUST = {
    "central": "central: one party sees the clipped updates and adds the noise",
    "local": "local: everybody adds noise before they send anything",
    "distributed": "distributed: everybody adds a share of the noise, and only the sum is visible",
}
RELEASES = {
    "all checkpoints": "all checkpoints: the ε covers the release of every round, and so the final model too",
    "final model": "only the final model",
}
SCHEMES = {
    "none": "none: the ε holds against an attacker who knows in which rounds somebody took part",
    "poisson": "Poisson sampling",
    "random_allocation": "random allocation",
    "shuffled": "shuffling",
    "fixed_size": "fixed-size sampling",
}
ASSUMPTIONS = {  # by audited item: label, and the assumption as a sentence
    "noise level": ("size of the noise", "Every round has as much noise as stated."),
    "noise law": ("law of the noise", "The noise follows the stated scheme: Gaussian, in every coordinate."),
    "clipping": ("clipping", "Every contribution is clipped to the clip norm."),
    "weights": ("weights", "Nobody counts for more than a canary."),
    "tensors": ("tensors", "Every tensor gets its noise."),
}
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
    "It trusts that the pipeline passed to the audit what it released.",
)
VERIFY = (
    "coalmine verify DIR --seed-file SEED --model MODEL.npy --commitment HEX --log-digest HEX --statement FILE "
    "--facts FACTS"
)
SAME = 1e-6  # relative difference below which numbers count as equal


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line of a statement: its text, and the basis on which it is stated.

    `value` is for programs; it is None if there is only the text. `detail` is an explanation.
    """

    key: str
    label: str
    text: str
    basis: Basis
    value: Any = None
    detail: str = ""

    @property
    def stated(self) -> bool:
        return self.basis != NOT_STATED

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "basis": self.basis, "value": self.value, "detail": self.detail}


class ContradictionError(ValueError):
    """A fact contradicts the run."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The inputs of a statement."""

    result: AuditResult
    facts: Facts
    commitment: Commitment | None
    demonstration: bool

    @property
    def pipeline(self) -> PipelineRecord:
        record = PipelineRecord.read(self.result.extra.get("pipeline"))
        level = self.result.extra.get("level")
        return replace(record, unit=level) if record.unit is None and level in ("client", "example") else record

    @property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier that the trainer wrote, or else that of an amplified claim."""
        claim = self.result.claim
        stored = number(self.result.extra.get("noise_multiplier"))
        return stored if stored is not None or claim is None else claim.noise_multiplier

    @property
    def row_unit(self) -> str | None:
        """What one row of the data set holds, if the trainer was told."""
        name = self.result.extra.get("privacy_unit")
        if self.pipeline.unit != "example" or not isinstance(name, str) or not 0 < len(name.strip()) <= LONGEST_UNIT:
            return None
        return None if name == ROW else one_line(name.strip())

    @property
    def unit(self) -> str:
        """The unit of privacy as a noun, for use in sentences."""
        return self.row_unit or self.facts.guarantee.unit or self.pipeline.unit or "participant"


def guarantee_items(sources: Sources) -> Iterator[Item]:
    """Part 1: the guarantee."""
    result, facts, pipeline = sources.result, sources.facts.guarantee, sources.pipeline
    claim, delta = result.claim, result.settings.delta
    yield _choice_item("variant", "kind of privacy", "approximate DP" if claim else None, facts.variant, VARIANTS)
    epsilon = None if claim is None else claim.epsilon
    yield _number_item("guarantee.epsilon", "ε", epsilon, facts.epsilon, tolerance=ROUNDED - 1)
    if claim is None and facts.delta is not None and not math.isclose(facts.delta, delta, rel_tol=SAME):
        raise _contradiction_error("guarantee.delta", facts.delta, delta)
    yield _number_item("guarantee.delta", "δ", delta if claim else None, facts.delta)
    yield _mu_item(sources)
    yield _unit_item(sources)
    named = None if sources.row_unit is None else f"One row of the data set holds one {sources.row_unit}."
    details = facts.unit_details
    yield _text_item("guarantee.unit_details", "what one unit is", None if details else named, details)
    yield _adjacency_item(sources)
    yield _choice_item("trust_model", "who adds the noise", pipeline.trust_model, facts.trust_model, TRUST)
    yield _choice_item("releases", "releases covered", "all checkpoints" if claim else None, facts.releases, RELEASES)
    yield _text_item("guarantee.tuning", "data used for tuning", None, facts.tuning)
    yield _text_item("guarantee.pretraining", "data used for pre-training", pipeline.pretraining, facts.pretraining)
    yield _text_item("guarantee.evaluation", "data used for evaluation", pipeline.evaluation, facts.evaluation)


def accounting_items(sources: Sources) -> Iterator[Item]:
    """Part 2: the accountant and its assumptions."""
    facts, pipeline = sources.facts.accounting, sources.pipeline
    accounted = _accounted(sources.result)
    detail = "" if accounted is None else f"the audit's own accountant is {accounted.accountant}"
    yield _text_item("accounting.accountant", "accountant", pipeline.accountant, facts.accountant, detail=detail)
    yield _text_item(
        "accounting.accountant_version", "accountant's version", pipeline.accountant_version, facts.accountant_version
    )
    yield _sampling_item(sources)
    yield _participations_item(sources)
    yield _composition_item(sources)
    for name, (label, sentence) in ASSUMPTIONS.items():
        yield _assumption_item(sources, name, label, sentence)


def mechanism_items(sources: Sources) -> Iterator[Item]:
    """Part 3: the mechanism."""
    facts, pipeline = sources.facts.mechanism, sources.pipeline
    yield _number_item(
        "mechanism.clip_norm",
        "clip norm",
        pipeline.clip_norm,
        facts.clip_norm,
        detail="the initial value: it then adapts to the updates" if pipeline.clipping == "adaptive" else "",
    )
    yield _noise_multiplier_item(sources)
    yield _text_item("mechanism.noise_scheme", "noise scheme", _noise_scheme(sources), facts.noise_scheme)
    yield _text_item("mechanism.library", "library", pipeline.library, facts.library)
    yield _text_item("mechanism.library_version", "library's version", pipeline.library_version, facts.library_version)
    yield _text_item("mechanism.generator", "random number generator", pipeline.generator, facts.generator)
    yield _text_item("mechanism.precision", "floating-point precision", pipeline.precision, facts.precision)
    yield _text_item("mechanism.also_released", "what else is released", pipeline.also_released, facts.also_released)


def evidence_items(sources: Sources) -> Iterator[Item]:
    """Part 4: the evidence of the audit."""
    result, verdict = sources.result, sources.result.verdict
    outcome = None if verdict is None or result.claim is None else str(verdict.outcome)
    yield _make_item(
        "evidence.verdict", "verdict", NO_CLAIM if result.claim is None else _verdict_text(verdict), outcome
    )
    for name in ("accounting", "noise", "sampling"):
        leg = result.legs.get(name)
        text = (NO_CLAIM if result.claim is None else NO_LEGS) if leg is None else _verdict_text(leg)
        yield _make_item(f"evidence.{name}_leg", f"verdict on {name}", text, None if leg is None else str(leg.outcome))
    yield from _measured_items(top_row(result))
    yield _power_item(result)
    alarm = f" {ALARM_ERRORS}" if result.watched else ""
    yield _make_item("evidence.false_alarms", "false alarms", FALSE_ALARMS + alarm)
    yield _gauges_item(result.gauges)
    yield from _commitment_items(sources)
    yield _make_item("evidence.verification", "how to verify", VERIFY)
    limits = [one_line(line) for line in _limit_sentences(sources)]
    yield _make_item("evidence.limits", "limits of the audit", " ".join(limits), limits)


def _make_item(
    key: str, label: str, text: str, value: Any = None, *, basis: Basis = RECORDED, detail: str = ""
) -> Item:
    return Item(key=key, label=label, text=one_line(text), basis=basis, value=value, detail=one_line(detail))


def _missing_item(key: str, label: str, detail: str = "") -> Item:
    return Item(key=key, label=label, text=NOT_STATED, basis=NOT_STATED, detail=one_line(detail))


def _contradiction_error(key: str, fact: Any, from_run: Any) -> ContradictionError:
    return ContradictionError(
        f"{key} is {quoted(fact)} in the facts file and {quoted(from_run)} in the run; correct the one that is wrong, or "
        "leave it out of the facts file"
    )


def _number_item(
    key: str, label: str, from_run: float | None, fact: float | None, *, tolerance: float = SAME, detail: str = ""
) -> Item:
    """An item with the run's number, or else with that of the facts."""
    if from_run is None:
        return (
            _missing_item(key, label)
            if fact is None
            else _make_item(key, label, format_value(fact), fact, basis=OPERATOR)
        )
    if fact is not None and not math.isclose(fact, from_run, rel_tol=tolerance):
        raise _contradiction_error(key, fact, from_run)
    return _make_item(key, label, format_value(from_run), from_run, detail=detail)


def _text_item(key: str, label: str, from_run: str | None, fact: str | None, *, detail: str = "") -> Item:
    """An item with the run's text, or else with that of the facts."""
    if from_run is None:
        return (
            _missing_item(key, label, detail)
            if fact is None
            else _make_item(key, label, fact, fact, basis=OPERATOR, detail=detail)
        )
    if fact is not None and one_line(fact).casefold() != one_line(from_run).casefold():
        raise _contradiction_error(key, fact, from_run)
    return _make_item(key, label, from_run, one_line(from_run), detail=detail)


def _choice_item(name: str, label: str, from_run: str | None, fact: str | None, words: Mapping[str, str]) -> Item:
    """An item of part 1 with one of a few values, and its explanation as text."""
    item = _text_item(f"guarantee.{name}", label, from_run, fact)
    if not item.stated:
        return item
    text = words.get(item.value, item.value)
    return _make_item(item.key, label, text, item.value, basis=item.basis)


def _mu_item(sources: Sources) -> Item:
    key, label, claim = "guarantee.mu", "μ of the Gaussian trade-off curve", sources.result.claim
    if claim is not None and claim.amplified:
        return _make_item(key, label, "does not apply: under sampling the trade-off curve is not Gaussian")
    mu = sources.result.claim_mu
    return _missing_item(key, label) if mu is None else _make_item(key, label, format_value(mu), mu)


def _unit_item(sources: Sources) -> Item:
    key, label = "guarantee.unit", "unit of privacy"
    from_run, fact, name = sources.pipeline.unit, sources.facts.guarantee.unit, sources.row_unit
    if name is not None:
        if fact not in (None, from_run) and fact != name.casefold():
            raise _contradiction_error(key, fact, name)
        return _make_item(key, label, ROW_UNIT.format(unit=name), name)
    if from_run == "example" and fact == "document":  # a document can be one example
        detail = "the run clips and counts single examples: each must be a whole document"
        return _make_item(key, label, UNITS[fact], fact, basis=OPERATOR, detail=detail)
    return _choice_item("unit", label, from_run, fact, UNITS)


def _adjacency_item(sources: Sources) -> Item:
    key, label, result = "guarantee.adjacency", "neighbouring data sets", sources.result
    fact, adjacency, claim = sources.facts.guarantee.adjacency, None, result.claim
    if claim is not None and claim.amplified:
        accounted = _accounted(result)
        adjacency = None if accounted is None else SAMPLED_ADJACENCY.get(accounted.adjacency)
    elif claim is not None and (claim.sensitivity is None or sources.pipeline.accountant == CLOSED_FORM):
        adjacency = "add/remove or zero-out"  # the sensitivity is one clip norm per round, not two
    basis = RECORDED
    if adjacency is not None and fact is not None and fact not in adjacency.split(" or "):
        raise _contradiction_error(key, fact, adjacency)
    if fact is not None and fact != adjacency:
        adjacency, basis = fact, OPERATOR
    if adjacency is None:
        return _missing_item(key, label)
    return _make_item(key, label, ADJACENCIES[adjacency].format(unit=sources.unit), adjacency, basis=basis)


def _sampling_item(sources: Sources) -> Item:
    key, label, result = "accounting.sampling", "sampling scheme assumed", sources.result
    fact, claim = sources.facts.accounting.sampling, result.claim
    if claim is None:
        return (
            _missing_item(key, label) if fact is None else _make_item(key, label, SCHEMES[fact], fact, basis=OPERATOR)
        )
    scheme = "none" if claim.sampling is None else claim.sampling.scheme
    if fact is not None and fact != scheme:
        raise _contradiction_error(key, fact, scheme)
    if claim.sampling is None:
        return _make_item(key, label, SCHEMES["none"], scheme, basis=OPERATOR)
    leg, text = result.legs.get("sampling"), str(claim.sampling)
    if leg is not None and leg.outcome == "VIOLATION":
        return _make_item(key, label, f"{text}. Contradicted: {leg.reason}", scheme, basis=OBSERVED)
    item = _audited_item(result, "sampler")
    if claim.sampler_observed and item is not None and item.status == "checked":
        return _make_item(key, label, text, scheme, basis=OBSERVED, detail=item.detail)
    return _make_item(
        key, label, text, scheme, basis=OPERATOR, detail="" if item is None else f"not observed: {item.detail}"
    )


def _participations_item(sources: Sources) -> Item:
    key, label, claim = "accounting.participations", "participations assumed", sources.result.claim
    fact, item = sources.facts.accounting.participations, _audited_item(sources.result, "participations")
    detail = "" if item is None else item.detail
    if claim is not None and claim.amplified:
        if fact is not None:
            raise _contradiction_error(key, fact, "decided by the sampling")
        observed = claim.sampler_observed and item is not None and item.status == "checked"
        text = "as often as the sampling picks somebody, in rounds that are not public"
        return _make_item(key, label, text, basis=OBSERVED if observed else OPERATOR, detail=detail)
    from_run = None if claim is None else claim.participations
    if from_run is not None and fact is not None and fact != from_run:
        raise _contradiction_error(key, fact, from_run)
    times = fact if from_run is None else from_run
    if times is None:
        return _missing_item(key, label, detail)
    text = f"the ε is for one {sources.unit} who takes part in at most {format_rounds(times)}"
    contradiction = client_sentence(sources.result)
    if contradiction:
        return _make_item(key, label, f"{text}. Contradicted: {contradiction}", times, basis=OBSERVED, detail=detail)
    return _make_item(key, label, text, times, basis=OPERATOR, detail=detail)


def _composition_item(sources: Sources) -> Item:
    key, label, result = "accounting.composition", "composition", sources.result
    note = _operator_note(sources.facts.accounting.composition)
    if result.claim is None:
        return _text_item(key, label, None, sources.facts.accounting.composition)
    over = (
        "every round of the scheme" if result.claim.amplified else f"the rounds that one {sources.unit} takes part in"
    )
    skipped = f", {format_rounds(result.skipped)} skipped" if result.skipped else ""
    text = f"over {over}; {format_rounds(result.rounds)} observed{skipped}"
    return _make_item(key, label, text, result.rounds, basis=OBSERVED, detail=note)


def _assumption_item(sources: Sources, name: str, label: str, sentence: str) -> Item:
    """An assumption that the audit may have checked; otherwise the operator's statement on it."""
    result, field = sources.result, name.replace(" ", "_")
    key, fact = f"accounting.{field}", getattr(sources.facts.accounting, field)
    contradiction = _contradicted_by(result, name)
    if contradiction:
        return _make_item(
            key, label, f"{sentence} Contradicted: {contradiction}", False, basis=OBSERVED, detail=_operator_note(fact)
        )
    item = _audited_item(result, name)
    if item is not None and item.status == "checked" and (item.source == "audit" or sources.pipeline.library):
        detail = f"{item.detail}; {_operator_note(fact)}" if fact else item.detail
        return _make_item(key, label, sentence, True, basis=OBSERVED, detail=detail)
    if item is not None and item.status == "checked":  # only the operator's own loop says so
        return _make_item(key, label, sentence, basis=OPERATOR, detail=item.detail)
    detail = "" if item is None else f"{item.status}: {item.detail}"
    if fact is not None:
        return _make_item(key, label, fact, basis=OPERATOR, detail=detail)
    return _missing_item(key, label, detail)


def _contradicted_by(result: AuditResult, name: str) -> str:
    """The evidence of the audit against an assumption; empty if there is none."""
    item = _audited_item(result, name)
    if item is not None and item.status == "failed":
        return item.detail
    outside = [each.name for each in result.gauges if each.status != "ok" and each.contradicts == name]
    if outside:
        return f"these gauges are outside their limits: {', '.join(outside)}"
    verdict = result.legs.get("noise", result.verdict)
    if name == "noise level" and verdict is not None and isinstance(verdict.finding, LittleNoise):
        return verdict.reason
    return ""


def _noise_multiplier_item(sources: Sources) -> Item:
    """The noise multiplier. One from the facts must not imply a larger epsilon than the guaranteed one."""
    key, fact, claim = "mechanism.noise_multiplier", sources.facts.mechanism.noise_multiplier, sources.result.claim
    item = _number_item(key, "noise multiplier", sources.noise_multiplier, fact, tolerance=ROUNDED - 1)
    times = None if claim is None else claim.participations or sources.facts.accounting.participations
    if item.basis == OPERATOR and claim is not None and not claim.amplified and claim.sensitivity is None and times:
        implied = float(mechanism_epsilon(item.value, delta=sources.result.settings.delta, participations=times))
        if implied > ROUNDED * claim.epsilon and sources.result.settings.noise is None:
            raise ContradictionError(
                f"{key} is {quoted(fact)} in the facts file, which gives an epsilon of {implied:.4g} for "
                f"{format_rounds(times)}, and the run claims {claim.epsilon:.4g}; correct the one that is wrong"
            )
    return item


def _noise_scheme(sources: Sources) -> str | None:
    law, multiplier = sources.result.settings.noise, sources.noise_multiplier
    if law is not None:
        how = "tree aggregation" if isinstance(law, TreeNoise) else "a banded matrix factorisation"
        return f"Gaussian, correlated between rounds by {how}"
    if multiplier == 0:
        return "none: no noise is added"
    item = _audited_item(sources.result, "noise law")
    if multiplier is None and (item is None or item.status != "checked"):
        return None
    return "Gaussian, independent in every round"


def _verdict_text(verdict: Any) -> str:
    return f"{verdict.outcome}: {verdict.reason}"


def _accounted(result: AuditResult) -> Accounting | None:
    """The facts of the accounting part of an amplified claim."""
    finding = result.legs[ACCOUNTING].finding if ACCOUNTING in result.legs else None
    return finding if isinstance(finding, Accounting) else None


def _measured_items(top: TableRow | None) -> Iterator[Item]:
    """The measured epsilon, its interval and the valid lower bound."""
    labels = ("measured ε, an estimate", "95 % interval of the measured ε", "lower bound of ε")
    keys = ("evidence.measured_epsilon", "evidence.interval", "evidence.lower_bound")
    if top is None or math.isnan(top.epsilon):
        yield from (_missing_item(key, label) for key, label in zip(keys, labels, strict=True))
        return
    sees = ATTACKERS.get(top.rung, "an attack of your own")
    text = f"{format_value(top.epsilon)}{participation_words(top)}, for an attacker who {sees} ({top.rung})"
    detail = "" if top.detected else "nothing was detected: the estimate lies below the noise floor"
    yield _make_item(keys[0], labels[0], text, top.epsilon, basis=OBSERVED, detail=detail)
    if top.interval is None:
        yield _make_item(keys[1], labels[1], "none: there is no interval for this attacker")
    else:
        yield _make_item(keys[1], labels[1], interval_text(top.interval), list(top.interval), basis=OBSERVED)
    if math.isnan(top.lower_bound):
        yield _missing_item(keys[2], labels[2])
    else:
        text = f"{format_value(top.lower_bound)}: valid with 95 % confidence for any law of the scores"
        yield _make_item(keys[2], labels[2], text, top.lower_bound, basis=OBSERVED)


def _power_item(result: AuditResult) -> Item:
    key, label, verdict = "evidence.power", "power", result.verdict
    if verdict is None or result.claim is None:
        return _make_item(key, label, NO_CLAIM)
    if verdict.outcome == "VIOLATION":
        return _make_item(key, label, "does not apply: the claim is refuted")
    power = verdict.facts.get("power")
    if power is None:
        return _missing_item(key, label, f"the verdict does not depend on it: {verdict.reason}")
    text = f"twice the claimed ε would have been detected with a probability of {percent(power)}"
    if verdict.outcome == "PASS" and result.legs:
        text = f"each leg would have detected twice the claimed ε with a probability of at least {percent(power)}"
    return _make_item(key, label, text, power)


def _gauges_item(gauges: tuple[GaugeResult, ...]) -> Item:
    key, label = "evidence.gauges", "gauges of the noise"
    if not gauges:
        return _make_item(key, label, "none: the rounds lack the inputs of the gauges")
    outside = [f"{gauge.name} ({gauge.status})" for gauge in gauges if gauge.status != "ok"]
    if not outside:
        return _make_item(key, label, "all are within their limits", [], basis=OBSERVED)
    names = [gauge.name for gauge in gauges if gauge.status != "ok"]
    return _make_item(key, label, f"outside their limits: {', '.join(outside)}", names, basis=OBSERVED)


def _commitment_items(sources: Sources) -> Iterator[Item]:
    committed, digest = sources.commitment, sources.result.extra.get("log_digest")
    key, label = "evidence.commitment", "commitment to the seed, before round 1"
    if committed is None or not committed.statement_sha256:
        yield _missing_item(key, label)
    else:
        warning = "the seed is short enough to guess, so this audit is a demonstration" if sources.demonstration else ""
        yield _make_item(key, label, committed.statement_sha256, committed.statement_sha256, detail=warning)
    key, label = "evidence.log_digest", "digest of the log, after the last round"
    yield _make_item(key, label, digest, digest) if isinstance(digest, str) and digest else _missing_item(key, label)


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


def client_sentence(result: AuditResult) -> str:
    """A sentence on clients who take part more often than the claim says; empty if none is known to."""
    client, claim = client_exposure(result), result.claim
    if client is None or claim is None or claim.amplified or client.epsilon <= claim.epsilon * ROUNDED:
        return ""
    who = "The client who takes part most often does so in" if client.exact else "A client takes part in about"
    epsilon = format_number(client.epsilon)
    return f"{who} {format_rounds(client.rounds)} of this run, for which the analytical ε is {epsilon}."


def _audited_item(result: AuditResult, name: str) -> AuditedItem | None:
    return next((item for item in result.audited if item.name == name), None)


def _operator_note(fact: str | None) -> str:
    return "" if fact is None else f"the operator adds: {fact}"


def format_value(value: float) -> str:
    """A number for a statement: whole numbers in full, others rounded."""
    return f"{value:,}" if isinstance(value, int) else format_number(value)
