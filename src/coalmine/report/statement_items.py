"""The items of a privacy statement on the guarantee, its accounting and its mechanism.

Every number comes from result.json or from the facts file. This module only puts them into words.
"""

import math
from collections.abc import Iterator, Mapping

from coalmine.argument_checks import short_repr as quoted
from coalmine.estimators.correlated import TreeNoise
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.report.statement_item import (
    OBSERVED,
    OPERATOR,
    RECORDED,
    SAME,
    ContradictionError,
    Item,
    Sources,
    audited_item,
    client_sentence,
    contradiction_error,
    format_value,
    make_item,
    missing_item,
    number_item,
    operator_note,
    text_item,
)
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import format_rounds
from coalmine.verdict.amplified_claim import ACCOUNTING
from coalmine.verdict.claim import REPLACE
from coalmine.verdict.claim_context import ROUNDED
from coalmine.verdict.findings.amplified import AccountantFacts
from coalmine.verdict.findings.noise import LittleNoise
from coalmine.verdict.pipeline_record import CLOSED_FORM

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
CLIENT_UNIT = "one {unit}, with everything that it contributes"
ROW_UNIT = "one {unit}, which is one row of the data set; a person with several rows is protected less"
ADJACENCIES = {
    "add/remove": "add/remove: with and without one {unit}",
    "replace": "replace: one {unit} exchanged for another",
    "zero-out": "zero-out: the contribution of one {unit} set to zero",
    "add/remove or zero-out": "add/remove or zero-out: with and without the contribution of one {unit}",
}
STATED_ADJACENCY = {"add or remove one": "add/remove", "replace one": "replace", "zero out one": "zero-out"}
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


def guarantee_items(sources: Sources) -> Iterator[Item]:
    """Part 1: the guarantee."""
    result, facts, pipeline = sources.result, sources.facts.guarantee, sources.pipeline
    claim, delta = result.claim, result.settings.delta
    yield _choice_item("variant", "kind of privacy", "approximate DP" if claim else None, facts.variant, VARIANTS)
    epsilon = None if claim is None else claim.epsilon
    yield number_item("guarantee.epsilon", "ε", epsilon, facts.epsilon, tolerance=ROUNDED - 1)
    if claim is None and facts.delta is not None and not math.isclose(facts.delta, delta, rel_tol=SAME):
        raise contradiction_error("guarantee.delta", facts.delta, delta)
    yield number_item("guarantee.delta", "δ", delta if claim else None, facts.delta)
    yield _mu_item(sources)
    yield _unit_item(sources)
    unit, whole = result.trainer.named_unit, "row of the data set" if result.trainer.unit == "example" else "client"
    named = (
        None
        if unit is None
        else f"One {whole} holds one {unit}."
        if whole != "client"
        else f"One client is one {unit}."
    )
    details = facts.unit_details
    yield text_item("guarantee.unit_details", "what one unit is", None if details else named, details)
    yield _adjacency_item(sources)
    yield _choice_item("trust_model", "who adds the noise", pipeline.trust_model, facts.trust_model, TRUST)
    yield _choice_item("releases", "releases covered", "all checkpoints" if claim else None, facts.releases, RELEASES)
    yield text_item("guarantee.tuning", "data used for tuning", None, facts.tuning)
    yield text_item("guarantee.pretraining", "data used for pre-training", pipeline.pretraining, facts.pretraining)
    yield text_item("guarantee.evaluation", "data used for evaluation", pipeline.evaluation, facts.evaluation)


def accounting_items(sources: Sources) -> Iterator[Item]:
    """Part 2: the accountant and its assumptions."""
    facts, pipeline = sources.facts.accounting, sources.pipeline
    accounted = _accounted(sources.result)
    detail = "" if accounted is None else f"the audit's own accountant is {accounted.accountant}"
    yield text_item("accounting.accountant", "accountant", pipeline.accountant, facts.accountant, detail=detail)
    yield text_item(
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
    yield number_item(
        "mechanism.clip_norm",
        "clip norm",
        pipeline.clip_norm,
        facts.clip_norm,
        detail="the initial value: it then adapts to the updates" if pipeline.clipping == "adaptive" else "",
    )
    yield _noise_multiplier_item(sources)
    yield text_item("mechanism.noise_scheme", "noise scheme", _noise_scheme(sources), facts.noise_scheme)
    yield text_item("mechanism.library", "library", pipeline.library, facts.library)
    yield text_item("mechanism.library_version", "library's version", pipeline.library_version, facts.library_version)
    yield text_item("mechanism.generator", "random number generator", pipeline.generator, facts.generator)
    yield text_item("mechanism.precision", "floating-point precision", pipeline.precision, facts.precision)
    yield text_item("mechanism.also_released", "what else is released", pipeline.also_released, facts.also_released)


def _choice_item(name: str, label: str, from_run: str | None, fact: str | None, words: Mapping[str, str]) -> Item:
    """An item of part 1 with one of a few values, and its explanation as text."""
    item = text_item(f"guarantee.{name}", label, from_run, fact)
    if not item.stated:
        return item
    text = words.get(item.value, item.value)
    return make_item(item.key, label, text, item.value, basis=item.basis)


def _mu_item(sources: Sources) -> Item:
    key, label, claim = "guarantee.mu", "μ of the Gaussian trade-off curve", sources.result.claim
    if claim is not None and claim.amplified:
        return make_item(key, label, "does not apply: under sampling the trade-off curve is not Gaussian")
    mu = sources.result.claim_mu
    return missing_item(key, label) if mu is None else make_item(key, label, format_value(mu), mu)


def _unit_item(sources: Sources) -> Item:
    key, label = "guarantee.unit", "unit of privacy"
    from_run, fact, name = sources.result.trainer.unit, sources.facts.guarantee.unit, sources.result.trainer.named_unit
    if name is not None:
        if fact not in (None, from_run) and fact != name.casefold():
            raise contradiction_error(key, fact, name)
        return make_item(key, label, (ROW_UNIT if from_run == "example" else CLIENT_UNIT).format(unit=name), name)
    if from_run == "example" and fact == "document":  # a document can be one example
        detail = "the run clips and counts single examples: each must be a whole document"
        return make_item(key, label, UNITS[fact], fact, basis=OPERATOR, detail=detail)
    return _choice_item("unit", label, from_run, fact, UNITS)


def _adjacency_item(sources: Sources) -> Item:
    key, label, result = "guarantee.adjacency", "neighbouring data sets", sources.result
    fact, adjacency, claim = sources.facts.guarantee.adjacency, None, result.claim
    if claim is not None and claim.amplified:
        accounted = _accounted(result)
        adjacency = None if accounted is None else STATED_ADJACENCY.get(claim.adjacency or accounted.adjacency)
    elif claim is not None and claim.adjacency == REPLACE:
        adjacency = STATED_ADJACENCY[claim.adjacency]
    elif claim is not None and (claim.sensitivity is None or sources.pipeline.accountant == CLOSED_FORM):
        adjacency = "add/remove or zero-out"  # the sensitivity is one clip norm per round, not two
    basis = RECORDED
    if adjacency is not None and fact is not None and fact not in adjacency.split(" or "):
        raise contradiction_error(key, fact, adjacency)
    if fact is not None and fact != adjacency:
        adjacency, basis = fact, OPERATOR
    if adjacency is None:
        return missing_item(key, label)
    return make_item(key, label, ADJACENCIES[adjacency].format(unit=sources.unit), adjacency, basis=basis)


def _sampling_item(sources: Sources) -> Item:
    key, label, result = "accounting.sampling", "sampling scheme assumed", sources.result
    fact, claim = sources.facts.accounting.sampling, result.claim
    if claim is None:
        return missing_item(key, label) if fact is None else make_item(key, label, SCHEMES[fact], fact, basis=OPERATOR)
    scheme = "none" if claim.sampling is None else claim.sampling.scheme
    if fact is not None and fact != scheme:
        raise contradiction_error(key, fact, scheme)
    if claim.sampling is None:
        return make_item(key, label, SCHEMES["none"], scheme, basis=OPERATOR)
    leg, text = result.legs.get("sampling"), str(claim.sampling)
    if leg is not None and leg.outcome == "VIOLATION":
        return make_item(key, label, f"{text}. Not met: {leg.reason}", scheme, basis=OBSERVED)
    item = audited_item(result, "sampler")
    if claim.sampler_observed and item is not None and item.status == "checked":
        return make_item(key, label, text, scheme, basis=OBSERVED, detail=item.detail)
    return make_item(
        key, label, text, scheme, basis=OPERATOR, detail="" if item is None else f"not observed: {item.detail}"
    )


def _participations_item(sources: Sources) -> Item:
    key, label, claim = "accounting.participations", "participations assumed", sources.result.claim
    fact, item = sources.facts.accounting.participations, audited_item(sources.result, "participations")
    detail = "" if item is None else item.detail
    if claim is not None and claim.amplified:
        if fact is not None:
            raise contradiction_error(key, fact, "decided by the sampling")
        observed = claim.sampler_observed and item is not None and item.status == "checked"
        text = "as often as the sampling picks somebody, in rounds that are not public"
        return make_item(key, label, text, basis=OBSERVED if observed else OPERATOR, detail=detail)
    from_run = None if claim is None else claim.participations
    if from_run is not None and fact is not None and fact != from_run:
        raise contradiction_error(key, fact, from_run)
    times = fact if from_run is None else from_run
    if times is None:
        return missing_item(key, label, detail)
    text = f"the ε is for one {sources.unit} who takes part in at most {format_rounds(times)}"
    contradiction = client_sentence(sources.result)
    if contradiction:
        return make_item(key, label, f"{text}. Not met: {contradiction}", times, basis=OBSERVED, detail=detail)
    return make_item(key, label, text, times, basis=OPERATOR, detail=detail)


def _composition_item(sources: Sources) -> Item:
    key, label, result = "accounting.composition", "composition", sources.result
    note = operator_note(sources.facts.accounting.composition)
    if result.claim is None:
        return text_item(key, label, None, sources.facts.accounting.composition)
    over = (
        "every round of the scheme" if result.claim.amplified else f"the rounds that one {sources.unit} takes part in"
    )
    skipped = f", {format_rounds(result.skipped)} skipped" if result.skipped else ""
    text = f"over {over}; {format_rounds(result.rounds)} observed{skipped}"
    return make_item(key, label, text, result.rounds, basis=OBSERVED, detail=note)


def _assumption_item(sources: Sources, name: str, label: str, sentence: str) -> Item:
    """An assumption that the audit may have checked; otherwise the operator's statement on it."""
    result, field = sources.result, name.replace(" ", "_")
    key, fact = f"accounting.{field}", getattr(sources.facts.accounting, field)
    contradiction = _contradicted_by(result, name)
    if contradiction:
        return make_item(
            key, label, f"{sentence} Not met: {contradiction}", False, basis=OBSERVED, detail=operator_note(fact)
        )
    item = audited_item(result, name)
    if item is not None and item.status == "checked" and (item.source == "audit" or sources.pipeline.library):
        detail = f"{item.detail}; {operator_note(fact)}" if fact else item.detail
        return make_item(key, label, sentence, True, basis=OBSERVED, detail=detail)
    if item is not None and item.status == "checked":  # only the operator's own loop says so
        return make_item(key, label, sentence, basis=OPERATOR, detail=item.detail)
    detail = "" if item is None else f"{item.status}: {item.detail}"
    if fact is not None:
        return make_item(key, label, fact, basis=OPERATOR, detail=detail)
    return missing_item(key, label, detail)


def _contradicted_by(result: AuditResult, name: str) -> str:
    """The evidence of the audit against an assumption; empty if there is none."""
    item = audited_item(result, name)
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
    item = number_item(key, "noise multiplier", sources.noise_multiplier, fact, tolerance=ROUNDED - 1)
    times = None if claim is None else claim.participations or sources.facts.accounting.participations
    if item.basis == OPERATOR and claim is not None and not claim.amplified and claim.sensitivity is None and times:
        implied = float(
            mechanism_epsilon(item.value / claim.moved, delta=sources.result.settings.delta, participations=times)
        )
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
    item = audited_item(sources.result, "noise law")
    if multiplier is None and (item is None or item.status != "checked"):
        return None
    return "Gaussian, independent in every round"


def _accounted(result: AuditResult) -> AccountantFacts | None:
    """The facts of the accounting part of an amplified claim."""
    finding = result.legs[ACCOUNTING].finding if ACCOUNTING in result.legs else None
    return finding if isinstance(finding, AccountantFacts) else None
