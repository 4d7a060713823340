"""A verdict on a claim: PASS, VIOLATION or UNDERPOWERED, and the finding that it rests on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import convert

from coalmine.verdict.findings.finding import Finding, read_finding
from coalmine.verdict.outcome import UNDERPOWERED, Outcome

NO_VERDICT = dict.fromkeys(("verdict", "reason", "reason_code", "decided_by", "facts"))
PART, EVIDENCE = "leg", "evidence"  # names among the stored facts that are not the finding's own


@dataclass(frozen=True, kw_only=True, repr=False)
class Verdict:
    """The verdict on a claim. `finding` decides it and holds the facts; `reason` is the sentence made of them.

    `rung` is the one that decided; None if a gauge did. `part` is that of a claim amplified by sampling: accounting, noise
    or sampling. `evidence` names other rungs and gauges with the same outcome.
    """

    finding: Finding
    rung: str | None = None
    part: str | None = None
    evidence: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """PASS, VIOLATION or UNDERPOWERED."""
        return self.finding.outcome

    @property
    def code(self) -> str:
        """The reason in one word, for programs."""
        return self.finding.code

    @property
    def reason(self) -> str:
        """The verdict's reason in one sentence; the deciding rung comes first."""
        start = f"{self.rung}: " if self.rung and self.outcome != UNDERPOWERED else ""
        return f"{start}{self.finding.sentence()}{self.finding.ending(self.evidence)}"

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that are known, by name: those of the finding, the part, and other evidence."""
        own = {PART: self.part, EVIDENCE: self.evidence}
        return self.finding.facts | {name: value for name, value in own.items() if value}

    def to_dict(self) -> dict[str, Any]:
        """Outcome, code, rung, the facts, and the sentence made of them."""
        return {
            "verdict": str(self.outcome),
            "reason": self.reason,
            "reason_code": self.code,
            "decided_by": self.rung,
            "facts": {name: list(value) if isinstance(value, tuple) else value for name, value in self.facts.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Verdict":
        """The inverse of `to_dict`; ValueError if no finding has these facts."""
        rung = convert(values["decided_by"], str | None)
        facts = convert(values["facts"], dict[str, Any])
        own = {name: value for name, value in facts.items() if name not in (PART, EVIDENCE)}
        return cls(
            finding=read_finding(Outcome(values["verdict"]), convert(values["reason_code"], str), own, rung),
            rung=rung,
            part=convert(facts.get(PART), str | None),
            evidence=convert(facts.get(EVIDENCE, ()), tuple[str, ...]),
        )

    def __repr__(self) -> str:
        return f"{self.outcome} ({self.code}): {self.reason}"
