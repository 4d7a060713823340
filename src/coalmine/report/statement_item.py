"""One item of a privacy statement, and the sources that it is made from."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from coalmine.argument_checks import one_line
from coalmine.argument_checks import short_repr as quoted
from coalmine.log.commitment import Commitment
from coalmine.report.details import client_exposure
from coalmine.report.statement_facts import Facts
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import Words, format_number, format_rounds
from coalmine.verdict.claim_context import ROUNDED
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.pipeline_record import PipelineRecord

Basis = Literal["observed", "recorded by the run", "stated by the operator", "not stated"]
OBSERVED: Basis = "observed"
RECORDED: Basis = "recorded by the run"
OPERATOR: Basis = "stated by the operator"
NOT_STATED: Basis = "not stated"

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
        """The facts that the trainer recorded."""
        return self.result.trainer.pipeline

    @property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier that the trainer wrote, or else that of an amplified claim."""
        claim, stored = self.result.claim, self.result.trainer.noise_multiplier
        return stored if stored is not None or claim is None else claim.noise_multiplier

    @property
    def unit(self) -> str:
        """The unit of privacy as a noun, for use in sentences."""
        trainer = self.result.trainer
        return trainer.named_unit or self.facts.guarantee.unit or trainer.unit or "participant"

    @property
    def words(self) -> Words:
        """The user's words for the unit and for a step of training."""
        return Words.of(self.result)


def make_item(key: str, label: str, text: str, value: Any = None, *, basis: Basis = RECORDED, detail: str = "") -> Item:
    """An item that is stated."""
    return Item(key=key, label=label, text=one_line(text), basis=basis, value=value, detail=one_line(detail))


def missing_item(key: str, label: str, detail: str = "") -> Item:
    """An item that nobody states."""
    return Item(key=key, label=label, text=NOT_STATED, basis=NOT_STATED, detail=one_line(detail))


def contradiction_error(key: str, fact: Any, from_run: Any) -> ContradictionError:
    """The error for a fact that the run contradicts."""
    return ContradictionError(
        f"{key} is {quoted(fact)} in the facts file and {quoted(from_run)} in the run; correct the one that is wrong, or "
        "leave it out of the facts file"
    )


def number_item(
    key: str, label: str, from_run: float | None, fact: float | None, *, tolerance: float = SAME, detail: str = ""
) -> Item:
    """An item with the run's number, or else with that of the facts."""
    if from_run is None:
        return (
            missing_item(key, label)
            if fact is None
            else make_item(key, label, format_value(fact), fact, basis=OPERATOR)
        )
    if fact is not None and not math.isclose(fact, from_run, rel_tol=tolerance):
        raise contradiction_error(key, fact, from_run)
    return make_item(key, label, format_value(from_run), from_run, detail=detail)


def text_item(key: str, label: str, from_run: str | None, fact: str | None, *, detail: str = "") -> Item:
    """An item with the run's text, or else with that of the facts."""
    if from_run is None:
        return (
            missing_item(key, label, detail)
            if fact is None
            else make_item(key, label, fact, fact, basis=OPERATOR, detail=detail)
        )
    if fact is not None and one_line(fact).casefold() != one_line(from_run).casefold():
        raise contradiction_error(key, fact, from_run)
    return make_item(key, label, from_run, one_line(from_run), detail=detail)


def client_sentence(result: AuditResult) -> str:
    """A sentence on clients who take part more often than the claim says; empty if none is known to."""
    client, claim = client_exposure(result), result.claim
    if client is None or claim is None or claim.amplified or client.epsilon <= claim.epsilon * ROUNDED:
        return ""
    who = "The client who takes part most often does so in" if client.exact else "A client takes part in about"
    epsilon = format_number(client.epsilon)
    return f"{who} {format_rounds(client.rounds)} of this run, for which the analytical ε is {epsilon}."


def audited_item(result: AuditResult, name: str) -> AuditedItem | None:
    """An audited item by its name."""
    return next((item for item in result.audited if item.name == name), None)


def operator_note(fact: str | None) -> str:
    """The operator's fact, beside what the run recorded."""
    return "" if fact is None else f"the operator adds: {fact}"


def format_value(value: float) -> str:
    """A number for a statement: whole numbers in full, others rounded."""
    return f"{value:,}" if isinstance(value, int) else format_number(value)
