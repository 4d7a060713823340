"""The items of a privacy statement: what the run knows, what the operator states, and what nobody states.

Every number comes from result.json or from the facts file. Nothing is computed here but the words.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from coalmine.argument_checks import one_line
from coalmine.argument_checks import shown as quoted
from coalmine.audit.coverage import AuditedItem
from coalmine.audit.gauge import LAYER, Gauge
from coalmine.audit.pipeline_record import CLOSED_FORM, PipelineRecord
from coalmine.audit.result import AuditResult
from coalmine.audit.verdict import ROUNDED
from coalmine.estimators.correlated import TreeNoise
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.report.sentences import ATTACKERS, interval_text, percent, rounds_of, shown, whose
from coalmine.report.statement_facts import Facts
from coalmine.report.table_rows import TableRow, top_row
from coalmine.report.trainer_entries import client_exposure, number
from coalmine.storage.record import Commitment

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
    "example": "one example; a person who gave several is protected less",
}
ADJACENCIES = {
    "add/remove": "add/remove: with and without one {unit}",
    "replace": "replace: one {unit} exchanged for another",
    "zero-out": "zero-out: the contribution of one {unit} set to zero",
    "add/remove or zero-out": "add/remove or zero-out: the contribution of one {unit} is there or it is not",
}
SAMPLED_ADJACENCY = {"add or remove one": "add/remove", "replace one": "replace", "zero out one": "zero-out"}
TRUST = {
    "central": "central: one party sees the clipped updates and adds the noise",
    "local": "local: everybody adds noise before anything leaves them",
    "distributed": "distributed: everybody adds a share of the noise, and only the sum is seen",
}
RELEASES = {
    "all checkpoints": "all checkpoints: the ε counts what every round releases, and so covers the final model too",
    "final model": "the final model alone",
}
SCHEMES = {
    "none": "none: the ε holds against an attacker who knows in which rounds somebody took part",
    "poisson": "Poisson sampling",
    "random_allocation": "random allocation",
    "shuffled": "shuffling",
    "fixed_size": "fixed-size sampling",
}
ASSUMPTIONS = {  # by audited item: label, and the assumption in a sentence
    "noise level": ("size of the noise", "Every round has as much noise as stated."),
    "noise law": ("law of the noise", "The noise follows the stated scheme: Gaussian, in every coordinate."),
    "clipping": ("clipping", "Every contribution is cut to the clip norm."),
    "weights": ("weights", "Nobody counts for more than a canary."),
    "tensors": ("tensors", "Every tensor gets its noise."),
}
LENGTH_GAUGES = ("noise", "residual", "pooled residual", "difference", "parts of blocks")
OTHER_GAUGES = ("dilution", "others", "rounding")  # of no assumption of the accounting
SCORE_CODES = ("mean", "bound", "round", "stated", "evidence")  # verdicts that the canaries' scores refute
NO_LEGS = "no leg of its own: the claim counts on no sampling"
NO_CLAIM = "none: nothing was claimed"
FALSE_ALARMS = (
    "A true claim is called VIOLATION in at most 1 % of runs. A gauge leaves its limits in at most one honest run of "
    "10,000."
)
WATCHED = "The alarm during training adds at most 0.2 %."
LIMITS = (
    "The audit is about this run alone. It says nothing about other models trained on the same data.",
    "It measures what canaries give away. That people were treated as canaries were is assumed.",
    "The measured ε is an estimate for the attacker that it names. Only the guarantee is an upper limit, and only if its "
    "assumptions hold.",
    "It trusts the pipeline to hand over what it released.",
)
VERIFY = (
    "coalmine verify DIR --seed-file SEED --model MODEL.npy --commitment HEX --log-digest HEX --statement FILE "
    "--facts FACTS"
)
SAME = 1e-6  # relative difference of numbers that are the same


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line of a statement: what is stated, and how that is known.

    `value` is for programs, None where the text says it all. `detail` says more of it.
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
    """A fact that is not what the run says."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a statement is made of."""

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
        """The noise multiplier that the trainer wrote, or that an amplified claim was accounted with."""
        claim = self.result.claim
        written = number(self.result.extra.get("noise_multiplier"))
        return written if written is not None or claim is None else claim.noise_multiplier

    @property
    def unit(self) -> str:
        """The unit of privacy in one word, for sentences."""
        return self.facts.guarantee.unit or self.pipeline.unit or "participant"


def guarantee_items(sources: Sources) -> Iterator[Item]:
    """Part 1: the guarantee."""
    result, facts, pipeline = sources.result, sources.facts.guarantee, sources.pipeline
    claim, delta = result.claim, result.settings.delta
    yield _choice("variant", "kind of privacy", "approximate DP" if claim else None, facts.variant, VARIANTS)
    epsilon = None if claim is None else claim.epsilon
    yield _number("guarantee.epsilon", "ε", epsilon, facts.epsilon, tolerance=ROUNDED - 1)
    if claim is None and facts.delta is not None and not math.isclose(facts.delta, delta, rel_tol=SAME):
        raise _contradiction("guarantee.delta", facts.delta, delta)
    yield _number("guarantee.delta", "δ", delta if claim else None, facts.delta)
    yield _mu(sources)
    yield _unit(sources)
    yield _words("guarantee.unit_details", "what one unit is", None, facts.unit_details)
    yield _adjacency(sources)
    yield _choice("trust_model", "who adds the noise", pipeline.trust_model, facts.trust_model, TRUST)
    yield _choice("releases", "releases covered", "all checkpoints" if claim else None, facts.releases, RELEASES)
    yield _words("guarantee.tuning", "data used for tuning", None, facts.tuning)
    yield _words("guarantee.pretraining", "data used for pre-training", pipeline.pretraining, facts.pretraining)
    yield _words("guarantee.evaluation", "data used for evaluation", pipeline.evaluation, facts.evaluation)


def accounting_items(sources: Sources) -> Iterator[Item]:
    """Part 2: the accountant and its assumptions."""
    facts, pipeline = sources.facts.accounting, sources.pipeline
    leg = sources.result.legs.get("accounting")
    checked = "" if leg is None or not leg.accountant else f"the audit's own accountant is {leg.accountant}"
    yield _words("accounting.accountant", "accountant", pipeline.accountant, facts.accountant, detail=checked)
    yield _words(
        "accounting.accountant_version", "accountant's version", pipeline.accountant_version, facts.accountant_version
    )
    yield _sampling(sources)
    yield _participations(sources)
    yield _composition(sources)
    for name, (label, sentence) in ASSUMPTIONS.items():
        yield _assumption(sources, name, label, sentence)


def mechanism_items(sources: Sources) -> Iterator[Item]:
    """Part 3: the mechanism."""
    facts, pipeline = sources.facts.mechanism, sources.pipeline
    yield _number(
        "mechanism.clip_norm",
        "clip norm",
        pipeline.clip_norm,
        facts.clip_norm,
        detail="the first one: it then follows the updates" if pipeline.clipping == "adaptive" else "",
    )
    yield _noise_multiplier(sources)
    yield _words("mechanism.noise_scheme", "noise scheme", _noise_scheme(sources), facts.noise_scheme)
    yield _words("mechanism.library", "library", pipeline.library, facts.library)
    yield _words("mechanism.library_version", "library's version", pipeline.library_version, facts.library_version)
    yield _words("mechanism.generator", "random number generator", pipeline.generator, facts.generator)
    yield _words("mechanism.precision", "floating-point precision", pipeline.precision, facts.precision)
    yield _words("mechanism.also_released", "what else is released", pipeline.also_released, facts.also_released)


def evidence_items(sources: Sources) -> Iterator[Item]:
    """Part 4: what the audit measured."""
    result, verdict = sources.result, sources.result.verdict
    outcome = None if verdict is None else str(verdict.outcome)
    yield _known("evidence.verdict", "verdict", NO_CLAIM if verdict is None else _judged(verdict), outcome)
    for name in ("accounting", "noise", "sampling"):
        leg = result.legs.get(name)
        told = (NO_CLAIM if verdict is None else NO_LEGS) if leg is None else _judged(leg)
        yield _known(f"evidence.{name}_leg", f"verdict on {name}", told, None if leg is None else str(leg.outcome))
    yield from _measured(top_row(result))
    yield _power(result)
    watched = f" {WATCHED}" if result.watched else ""
    yield _known("evidence.false_alarms", "false alarms", FALSE_ALARMS + watched)
    yield _gauges(result.gauges)
    yield from _commitments(sources)
    yield _known("evidence.verification", "how to verify", VERIFY)
    limits = [one_line(line) for line in _limits(sources)]
    yield _known("evidence.limits", "limits of the audit", " ".join(limits), limits)


def _known(key: str, label: str, text: str, value: Any = None, *, basis: Basis = RECORDED, detail: str = "") -> Item:
    return Item(key=key, label=label, text=one_line(text), basis=basis, value=value, detail=one_line(detail))


def _missing(key: str, label: str, detail: str = "") -> Item:
    return Item(key=key, label=label, text=NOT_STATED, basis=NOT_STATED, detail=one_line(detail))


def _contradiction(key: str, fact: Any, known: Any) -> ContradictionError:
    return ContradictionError(
        f"{key} is {quoted(fact)} in the facts file and {quoted(known)} in the run; correct the one that is wrong, or leave "
        "it out of the facts file"
    )


def _number(
    key: str, label: str, known: float | None, fact: float | None, *, tolerance: float = SAME, detail: str = ""
) -> Item:
    """A number of the run, or else of the facts; where both have it, the run's."""
    if known is None:
        return _missing(key, label) if fact is None else _known(key, label, figure(fact), fact, basis=OPERATOR)
    if fact is not None and not math.isclose(fact, known, rel_tol=tolerance):
        raise _contradiction(key, fact, known)
    return _known(key, label, figure(known), known, detail=detail)


def _words(key: str, label: str, known: str | None, fact: str | None, *, detail: str = "") -> Item:
    """Words of the run, or else of the facts."""
    if known is None:
        return (
            _missing(key, label, detail)
            if fact is None
            else _known(key, label, fact, fact, basis=OPERATOR, detail=detail)
        )
    if fact is not None and one_line(fact).casefold() != one_line(known).casefold():
        raise _contradiction(key, fact, known)
    return _known(key, label, known, one_line(known), detail=detail)


def _choice(name: str, label: str, known: str | None, fact: str | None, words: Mapping[str, str]) -> Item:
    """One of a few words of part 1, explained."""
    item = _words(f"guarantee.{name}", label, known, fact)
    if not item.stated:
        return item
    text = words.get(item.value, item.value)
    return _known(item.key, label, text, item.value, basis=item.basis)


def _mu(sources: Sources) -> Item:
    key, label, claim = "guarantee.mu", "μ of the Gaussian trade-off curve", sources.result.claim
    if claim is not None and claim.amplified:
        return _known(key, label, "does not apply: under sampling the trade-off curve is not Gaussian")
    mu = sources.result.claim_mu
    return _missing(key, label) if mu is None else _known(key, label, figure(mu), mu)


def _unit(sources: Sources) -> Item:
    key, label = "guarantee.unit", "unit of privacy"
    known, fact = sources.pipeline.unit, sources.facts.guarantee.unit
    if known == "example" and fact == "document":  # a document is one row of the data
        detail = "the run clips and counts one example at a time: each must hold a whole document"
        return _known(key, label, UNITS[fact], fact, basis=OPERATOR, detail=detail)
    return _choice("unit", label, known, fact, UNITS)


def _adjacency(sources: Sources) -> Item:
    key, label, result = "guarantee.adjacency", "neighbouring data sets", sources.result
    fact, known, claim = sources.facts.guarantee.adjacency, None, result.claim
    if claim is not None and claim.amplified:
        leg = result.legs.get("accounting")
        known = None if leg is None or leg.adjacency is None else SAMPLED_ADJACENCY.get(leg.adjacency)
    elif claim is not None and (claim.sensitivity is None or sources.pipeline.accountant == CLOSED_FORM):
        known = "add/remove or zero-out"  # one clip norm in each round, not two
    basis = RECORDED
    if known is not None and fact is not None and fact not in known.split(" or "):
        raise _contradiction(key, fact, known)
    if fact is not None and fact != known:
        known, basis = fact, OPERATOR
    if known is None:
        return _missing(key, label)
    return _known(key, label, ADJACENCIES[known].format(unit=sources.unit), known, basis=basis)


def _sampling(sources: Sources) -> Item:
    key, label, result = "accounting.sampling", "sampling scheme assumed", sources.result
    fact, claim = sources.facts.accounting.sampling, result.claim
    if claim is None:
        return _missing(key, label) if fact is None else _known(key, label, SCHEMES[fact], fact, basis=OPERATOR)
    scheme = "none" if claim.sampling is None else claim.sampling.scheme
    if fact is not None and fact != scheme:
        raise _contradiction(key, fact, scheme)
    if claim.sampling is None:
        return _known(key, label, SCHEMES["none"], scheme, basis=OPERATOR)
    leg, text = result.legs.get("sampling"), str(claim.sampling)
    if leg is not None and leg.outcome == "VIOLATION":
        return _known(key, label, f"{text}. Contradicted: {leg.reason}", scheme, basis=OBSERVED)
    seen = _item(result, "sampler")
    if claim.sampler_observed and seen is not None and seen.status == "checked":
        return _known(key, label, text, scheme, basis=OBSERVED, detail=seen.detail)
    return _known(
        key, label, text, scheme, basis=OPERATOR, detail="" if seen is None else f"not observed: {seen.detail}"
    )


def _participations(sources: Sources) -> Item:
    key, label, claim = "accounting.participations", "participations assumed", sources.result.claim
    fact, item = sources.facts.accounting.participations, _item(sources.result, "participations")
    detail = "" if item is None else item.detail
    if claim is not None and claim.amplified:
        if fact is not None:
            raise _contradiction(key, fact, "as the sampling decides")
        observed = claim.sampler_observed and item is not None and item.status == "checked"
        text = "as often as the sampling picks somebody, in rounds that nobody outside knows"
        return _known(key, label, text, basis=OBSERVED if observed else OPERATOR, detail=detail)
    known = None if claim is None else claim.participations
    if known is not None and fact is not None and fact != known:
        raise _contradiction(key, fact, known)
    times = fact if known is None else known
    if times is None:
        return _missing(key, label, detail)
    text, seen = (
        f"the ε is for one {sources.unit} who takes part in at most {rounds_of(times)}",
        client_sentence(sources.result),
    )
    if seen:
        return _known(key, label, f"{text}. Contradicted: {seen}", times, basis=OBSERVED, detail=detail)
    return _known(key, label, text, times, basis=OPERATOR, detail=detail)


def _composition(sources: Sources) -> Item:
    key, label, result = "accounting.composition", "composition", sources.result
    added = _added(sources.facts.accounting.composition)
    if result.claim is None:
        return _words(key, label, None, sources.facts.accounting.composition)
    over = (
        "every round of the scheme" if result.claim.amplified else f"the rounds that one {sources.unit} takes part in"
    )
    skipped = f", {rounds_of(result.skipped)} skipped" if result.skipped else ""
    text = f"over {over}; {rounds_of(result.rounds)} observed{skipped}"
    return _known(key, label, text, result.rounds, basis=OBSERVED, detail=added)


def _assumption(sources: Sources, name: str, label: str, sentence: str) -> Item:
    """One assumption that the audit may look at: observed, or else what the operator states of it."""
    result, field = sources.result, name.replace(" ", "_")
    key, fact = f"accounting.{field}", getattr(sources.facts.accounting, field)
    refuted = _refuted(result, name)
    if refuted:
        return _known(key, label, f"{sentence} Contradicted: {refuted}", False, basis=OBSERVED, detail=_added(fact))
    item = _item(result, name)
    if item is not None and item.status == "checked" and (item.source == "audit" or sources.pipeline.library):
        more = f"{item.detail}; {_added(fact)}" if fact else item.detail
        return _known(key, label, sentence, True, basis=OBSERVED, detail=more)
    if item is not None and item.status == "checked":  # a loop of one's own says so
        return _known(key, label, sentence, basis=OPERATOR, detail=item.detail)
    why = "" if item is None else f"{item.status}: {item.detail}"
    if fact is not None:
        return _known(key, label, fact, basis=OPERATOR, detail=why)
    return _missing(key, label, why)


def _refuted(result: AuditResult, name: str) -> str:
    """Why the audit contradicts an assumption; empty where it does not."""
    ours: dict[str, Callable[[str], bool]] = {
        "noise level": lambda gauge: gauge in LENGTH_GAUGES,
        "noise law": lambda gauge: not (gauge in (*LENGTH_GAUGES, *OTHER_GAUGES) or gauge.startswith(LAYER)),
        "tensors": lambda gauge: gauge.startswith(LAYER),
    }
    outside = [gauge.name for gauge in result.gauges if gauge.status != "ok" and ours.get(name, _never)(gauge.name)]
    if outside:
        return f"outside their limits are the gauges {', '.join(outside)}"
    verdict = result.legs.get("noise", result.verdict)
    if name == "noise level" and verdict is not None and verdict.outcome == "VIOLATION" and verdict.code in SCORE_CODES:
        return verdict.reason
    return ""


def _never(_: str) -> bool:
    return False


def _noise_multiplier(sources: Sources) -> Item:
    """The noise multiplier; one of the facts must not give more than the guaranteed epsilon."""
    key, fact, claim = "mechanism.noise_multiplier", sources.facts.mechanism.noise_multiplier, sources.result.claim
    item = _number(key, "noise multiplier", sources.noise_multiplier, fact, tolerance=ROUNDED - 1)
    times = None if claim is None else claim.participations or sources.facts.accounting.participations
    if item.basis == OPERATOR and claim is not None and not claim.amplified and claim.sensitivity is None and times:
        given = float(mechanism_epsilon(item.value, delta=sources.result.settings.delta, participations=times))
        if given > ROUNDED * claim.epsilon and sources.result.settings.noise is None:
            raise ContradictionError(
                f"{key} is {quoted(fact)} in the facts file, which gives an epsilon of {given:.4g} for "
                f"{rounds_of(times)}, and the run claims {claim.epsilon:.4g}; correct the one that is wrong"
            )
    return item


def _noise_scheme(sources: Sources) -> str | None:
    law, multiplier = sources.result.settings.noise, sources.noise_multiplier
    if law is not None:
        how = "tree aggregation" if isinstance(law, TreeNoise) else "a banded matrix factorisation"
        return f"Gaussian, correlated between rounds by {how}"
    if multiplier == 0:
        return "none: no noise is added"
    item = _item(sources.result, "noise law")
    if multiplier is None and (item is None or item.status != "checked"):
        return None
    return "Gaussian, independent in every round"


def _judged(verdict: Any) -> str:
    return f"{verdict.outcome}: {verdict.reason}"


def _measured(top: TableRow | None) -> Iterator[Item]:
    """The measured epsilon, its interval and the valid bound."""
    labels = ("measured ε, an estimate", "95 % interval of the measured ε", "lower bound of ε")
    keys = ("evidence.measured_epsilon", "evidence.interval", "evidence.lower_bound")
    if top is None or math.isnan(top.epsilon):
        yield from (_missing(key, label) for key, label in zip(keys, labels, strict=True))
        return
    sees = ATTACKERS.get(top.rung, "an attack of your own")
    text = f"{figure(top.epsilon)}{whose(top)}, for an attacker who {sees} ({top.rung})"
    detail = "" if top.detected else "nothing was detected: the estimate lies below the noise floor"
    yield _known(keys[0], labels[0], text, top.epsilon, basis=OBSERVED, detail=detail)
    if top.interval is None:
        yield _known(keys[1], labels[1], "none: this attacker's scores have none")
    else:
        yield _known(keys[1], labels[1], interval_text(top.interval), list(top.interval), basis=OBSERVED)
    if math.isnan(top.lower_bound):
        yield _missing(keys[2], labels[2])
    else:
        text = f"{figure(top.lower_bound)}: valid with 95 % confidence, whatever law the scores follow"
        yield _known(keys[2], labels[2], text, top.lower_bound, basis=OBSERVED)


def _power(result: AuditResult) -> Item:
    key, label, verdict = "evidence.power", "power", result.verdict
    if verdict is None:
        return _known(key, label, NO_CLAIM)
    if verdict.outcome == "VIOLATION":
        return _known(key, label, "does not apply: the claim is refuted")
    if verdict.power is None:
        return _missing(key, label, f"the verdict does not rest on one: {verdict.reason}")
    text = f"a leak of twice the claimed ε would have been detected with a probability of {percent(verdict.power)}"
    if verdict.outcome == "PASS" and result.legs:
        text = (
            f"each leg would have detected twice the claimed ε with a probability of at least {percent(verdict.power)}"
        )
    return _known(key, label, text, verdict.power)


def _gauges(gauges: tuple[Gauge, ...]) -> Item:
    key, label = "evidence.gauges", "gauges of the noise"
    if not gauges:
        return _known(key, label, "none: the rounds came without what gauges need")
    outside = [f"{gauge.name} ({gauge.status})" for gauge in gauges if gauge.status != "ok"]
    if not outside:
        return _known(key, label, "all are within their limits", [], basis=OBSERVED)
    names = [gauge.name for gauge in gauges if gauge.status != "ok"]
    return _known(key, label, f"outside their limits: {', '.join(outside)}", names, basis=OBSERVED)


def _commitments(sources: Sources) -> Iterator[Item]:
    committed, digest = sources.commitment, sources.result.extra.get("log_digest")
    key, label = "evidence.commitment", "commitment to the seed, before round 1"
    if committed is None or not committed.statement_sha256:
        yield _missing(key, label)
    else:
        weak = "the seed is short enough to guess, so this audit is a demonstration" if sources.demonstration else ""
        yield _known(key, label, committed.statement_sha256, committed.statement_sha256, detail=weak)
    key, label = "evidence.log_digest", "digest of the log, after the last round"
    yield _known(key, label, digest, digest) if isinstance(digest, str) and digest else _missing(key, label)


def _limits(sources: Sources) -> Iterator[str]:
    """What this audit cannot say, one sentence each."""
    result = sources.result
    yield from LIMITS
    if sources.demonstration:
        yield "Its seed is short enough to guess, so it convinces nobody but its maker."
    if client_sentence(result):
        yield client_sentence(result)
    if result.skipped:
        yield f"{rounds_of(result.skipped)} were skipped, and nothing is known of them."
    for item in result.audited:
        if item.status != "checked":
            yield f"{item.status.capitalize()}: {item.name} ({item.detail})."


def client_sentence(result: AuditResult) -> str:
    """What a client is exposed to who takes part more often than the claim says; empty where none does, as far as known."""
    client, claim = client_exposure(result), result.claim
    if client is None or claim is None or claim.amplified or client.epsilon <= claim.epsilon * ROUNDED:
        return ""
    who = "The client who takes part most often does so in" if client.exact else "A client takes part in about"
    return f"{who} {rounds_of(client.rounds)} of this run, for which the analytical ε is {shown(client.epsilon)}."


def _item(result: AuditResult, name: str) -> AuditedItem | None:
    return next((item for item in result.audited if item.name == name), None)


def _added(fact: str | None) -> str:
    return "" if fact is None else f"the operator adds: {fact}"


def figure(value: float) -> str:
    """A number as a statement shows it: whole numbers in full."""
    return f"{value:,}" if isinstance(value, int) else shown(value)
