"""A privacy statement: the guarantee, its accounting, the mechanism, the evidence, and the items that are not stated.

    statement = read_statement(directory, read_facts("facts.toml"))
    print(statement_text(statement, "md"))

Every item comes from the run or from the operator's facts, or says "not stated".
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coalmine.argument_checks import one_line
from coalmine.log.commitment import Commitment
from coalmine.log.run_directory import RunDirectory
from coalmine.report.sentences import meaning, percent, posterior
from coalmine.report.statement_evidence import evidence_items
from coalmine.report.statement_facts import NO_FACTS, Facts
from coalmine.report.statement_item import Item, Sources, client_sentence
from coalmine.report.statement_items import accounting_items, guarantee_items, mechanism_items
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import format_number, format_rounds, plural
from coalmine.version import __version__

SCHEMA_VERSION = 1
CROWD = 100  # people of whom an attacker guesses who took part
NEARLY_ALL = 0.99
PRIORS = (0.01, 0.1, 0.5)
PARTS = {
    "guarantee": "The guarantee",
    "accounting": "Accounting",
    "mechanism": "Mechanism",
    "evidence": "Evidence",
}
MISSING_PART = "What is not stated"
PERSON = "person"
OUTCOMES = {
    "PASS": "An audit of this very training planted test participants, looked for them as an attacker would, and found "
    "nothing that speaks against the promise.",
    "VIOLATION": "An audit of this very training planted test participants, looked for them as an attacker would, and found "
    "that more is given away: nobody should rely on the promise.",
    "UNDERPOWERED": "An audit of this very training planted test participants and looked for them as an attacker would, but "
    "could neither confirm nor refute the promise.",
}
NO_OUTCOME = "No audit has confirmed anything about it."
PEOPLE = (PERSON, "client", "user")  # units that are taken for one person each


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """An ε and the posteriors that an attacker with each of `PRIORS` can reach."""

    name: str
    epsilon: float

    @property
    def posteriors(self) -> tuple[float, ...]:
        return tuple(posterior(prior, self.epsilon) for prior in PRIORS)

    def to_dict(self) -> dict[str, Any]:
        by_prior = {f"{prior:g}": value for prior, value in zip(PRIORS, self.posteriors, strict=True)}
        return {"name": self.name, "epsilon": self.epsilon, "suspicion_becomes": by_prior}


@dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """A privacy statement. `parts` has the items of each of `PARTS`."""

    title: str
    parts: dict[str, tuple[Item, ...]]
    facts: Facts
    delta: float
    passed_scope: str
    outcome: str  # of the audit; empty without a verdict
    left_open: int  # things that the audit could not check
    more_exposed: str  # a sentence on clients who take part more often than the claim says, or empty

    @cached_property
    def items(self) -> dict[str, Item]:
        """Every item by its key, such as "guarantee.epsilon"."""
        return {item.key: item for items in self.parts.values() for item in items}

    @property
    def not_stated(self) -> list[Item]:
        """The items that neither the run nor the facts answer."""
        return [item for item in self.items.values() if not item.stated]

    @property
    def meanings(self) -> list[Meaning]:
        """The guaranteed and the measured ε, if there are any."""
        keys = {"guaranteed": "guarantee.epsilon", "measured (an estimate)": "evidence.measured_epsilon"}
        values = {name: self.items[key].value for name, key in keys.items()}
        return [Meaning(name=name, epsilon=value) for name, value in values.items() if isinstance(value, int | float)]

    @property
    def meaning(self) -> str:
        """The meaning of the first ε in plain words."""
        return (
            meaning(self.meanings[0].epsilon, self.delta) if self.meanings else "No ε is stated, and none was measured."
        )

    @property
    def subject(self) -> str:
        """The person or thing that the guarantee protects, as a noun."""
        unit = self.items["guarantee.unit"]
        return str(unit.value) if unit.stated and unit.value not in PEOPLE else PERSON

    @property
    def meaning_title(self) -> str:
        return f"What this means for {'a' if self.subject == PERSON else 'one'} {self.subject}"

    @property
    def right_guesses(self) -> int:
        """The number of people in a crowd of 100 about whom an attacker can be right, rounded up; 100 only if certain."""
        accuracy = self.meanings[0].posteriors[-1]
        return CROWD if accuracy == 1 else min(math.ceil(CROWD * accuracy - 1e-9), CROWD - 1)

    @property
    def guesses(self) -> str:
        """That number in words, for the picture and the sentence under it; a measured ε is an estimate, not a limit."""
        accuracy = self.meanings[0].posteriors[-1]
        if accuracy > NEARLY_ALL:
            return "all" if accuracy == 1 else "nearly all"
        return f"at most {self.right_guesses}" if self.meanings[0].name == "guaranteed" else f"{self.right_guesses}"

    @property
    def guess_sentence(self) -> str:
        """The sentence under the picture: how often an attacker can guess right."""
        first, guaranteed = self.meanings[0], self.meanings[0].name == "guaranteed"
        start = "An" if guaranteed else "Going by the measured ε, which is an estimate, an"
        which = "who takes part" if self.subject == PERSON else "which take part"
        return (
            f"Toss a coin for each of {CROWD} {plural(self.subject)} to decide {which}. Somebody who only guesses is right "
            f"about {CROWD // 2} of them. {start} attacker who sees every release can be right about {self.guesses} of "
            f"them, at ε = {format_number(first.epsilon)}."
        )

    @property
    def for_signers(self) -> str:
        """Three sentences for somebody who signs, without a term that they do not explain."""
        return " ".join([self._promise, OUTCOMES.get(self.outcome, NO_OUTCOME), self._gaps])

    @property
    def _promise(self) -> str:
        noun = f"one {self.subject}"
        if not self.items["guarantee.epsilon"].stated:
            return f"Nobody has promised how much this model can give away about {noun} in its training data."
        sure = self.meanings[0].posteriors[-1]
        weak = ", so the promise protects little" if sure > NEARLY_ALL else ""
        return (
            f"The promise about this model is that somebody who watches all of its training, and takes it for a coin toss "
            f"whether {noun} was in the data, can become {percent(sure)} sure, and hardly ever more{weak}."
        )

    @property
    def _gaps(self) -> str:
        if not self.outcome:
            return "Do not rely on this statement alone."
        if not self.left_open:
            return "It left out nothing of what such an audit can check."
        return "It could not check everything, and the statement says below what it left out."

    @property
    def summary(self) -> list[str]:
        """The statement in two or three sentences."""
        epsilon, delta, unit = (self.items[f"guarantee.{name}"] for name in ("epsilon", "delta", "unit"))
        protected = f" for one {unit.value}" if unit.stated else ""
        times = self.items["accounting.participations"].value
        who = "who" if self.subject == PERSON else "that"
        often = f" {who} takes part in at most {format_rounds(times)}" if protected and times else ""
        lines = ["No ε is guaranteed."]
        if epsilon.stated:
            with_delta = f" and δ = {delta.text}" if delta.stated else ""
            lines = [
                f"The training promises differential privacy with ε = {epsilon.text}{with_delta}{protected}{often}."
            ]
            if not protected:
                lines.append("The unit of privacy, the contribution that is protected as a whole, is not stated.")
            if self.more_exposed:
                lines.append(self.more_exposed)
        verdict = self.items["evidence.verdict"]
        lines.append(f"The audit's verdict is {verdict.text}." if verdict.value else "The audit has no verdict.")
        return [*lines, self.passed_scope] if self.passed_scope else lines

    @property
    def facts_digest(self) -> str:
        """The SHA-256 of the facts; empty without facts."""
        facts = self.facts.to_dict()
        text = json.dumps(facts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest() if facts else ""

    @property
    def made_by(self) -> str:
        facts = f" and a facts file with the fingerprint {self.facts_digest}" if self.facts_digest else ""
        return f"Made by coalmine {__version__} from the run's result.json{facts}."

    def to_dict(self) -> dict[str, Any]:
        """The statement for JSON, as docs/reference/statement.schema.json describes it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "coalmine_version": __version__,
            "title": self.title,
            "summary": self.summary,
            **{
                name: {item.key.partition(".")[2]: item.to_dict() for item in items}
                for name, items in self.parts.items()
            },
            "not_stated": [item.key for item in self.not_stated],
            "meaning": {"text": self.meaning, "epsilons": [each.to_dict() for each in self.meanings]},
            "facts": self.facts.to_dict(),
        }


def privacy_statement(
    result: AuditResult,
    *,
    facts: Facts = NO_FACTS,
    commitment: Commitment | None = None,
    demonstration: bool = False,
) -> PrivacyStatement:
    """The statement of a result. Raises ValueError with a one-line message if the facts contradict it."""
    sources = Sources(result=result, facts=facts, commitment=commitment, demonstration=demonstration)
    parts = {
        "guarantee": tuple(guarantee_items(sources)),
        "accounting": tuple(accounting_items(sources)),
        "mechanism": tuple(mechanism_items(sources)),
        "evidence": tuple(evidence_items(sources)),
    }
    passed = result.verdict is not None and result.verdict.outcome == "PASS" and bool(result.audited)
    return PrivacyStatement(
        title=next(_titles(result, facts)),
        parts=parts,
        facts=facts,
        delta=result.settings.delta,
        passed_scope=one_line(result.scope) if passed else "",
        outcome=str(result.verdict.outcome) if result.verdict is not None and result.claim is not None else "",
        left_open=sum(item.is_open for item in result.audited),
        more_exposed=client_sentence(result),
    )


def read_statement(directory: Path | str, facts: Facts = NO_FACTS) -> PrivacyStatement:
    """The statement of a finished run. Raises ValueError if the run is not finished or the facts contradict it."""
    path = Path(directory)
    if not path.is_dir():
        raise ValueError(f"{path} is not a run directory")
    home = RunDirectory(path)
    try:
        result = AuditResult.from_dict(home.read_result())
    except ValueError as error:
        if (path / "result.json").exists():
            raise ValueError(f"{path / 'result.json'}: {error}") from None
        raise
    if not (path / "audit" / "record.json").exists():
        return privacy_statement(result, facts=facts)
    _, commitment = home.read_record()
    demonstration = home.read_statement().demonstration
    return privacy_statement(result, facts=facts, commitment=commitment, demonstration=demonstration)


def _titles(result: AuditResult, facts: Facts) -> Iterator[str]:
    """Possible names of the model, the best one first."""
    for name in (facts.deployment.name, result.trainer.title, result.trainer.task):
        if name is not None and name.strip():
            yield one_line(name)
    yield "a model"


def finite(value: Any) -> bool:
    """Whether a value is a finite number, which YAML and JSON can represent."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
