"""Entries that a trainer added to result.json. Entries of the wrong type are ignored."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coalmine.result.audit_result import AuditResult

TOO_FEW = "too few to say anything"  # the end of a note on a small group of canaries


@dataclass(frozen=True, kw_only=True)
class ClientExposure:
    """The number of rounds of a client and its analytical epsilon; `exact` if the rounds of this run were counted."""

    rounds: int
    epsilon: float
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Accounted:
    """The epsilon of the trainer's accountant, and the verdict on it as an amplified claim."""

    epsilon: float
    verdict: str


def client_exposure(result: AuditResult) -> ClientExposure | None:
    """A client's exposure, if the trainer wrote one and it differs from that of the canaries."""
    rounds, epsilon = whole(result.extra.get("client_rounds")), number(result.extra.get("client_epsilon"))
    if rounds is None or epsilon is None:
        return None
    if result.analytical_epsilon is not None and math.isclose(epsilon, result.analytical_epsilon, rel_tol=1e-3):
        return None
    exact = result.extra.get("client_exposure") == "most exposed"
    return ClientExposure(rounds=rounds, epsilon=epsilon, exact=exact)


def accounted_epsilon(result: AuditResult) -> Accounted | None:
    """The epsilon of the trainer's accountant; None if it has none."""
    epsilon, judged = number(result.extra.get("accounted_epsilon")), result.extra.get("if_accounted_were_claimed")
    if epsilon is None:
        return None
    verdict = judged.get("verdict") if isinstance(judged, Mapping) else None
    return Accounted(epsilon=epsilon, verdict=str(verdict or ""))


def analytical_for(result: AuditResult, times: int) -> float | None:
    """The analytical epsilon for `times` presentations; None if the trainer did not write it."""
    if result.extra.get("presentations") == times:
        return result.analytical_epsilon
    most = result.extra.get("most_presentations") == times
    return number(result.extra.get("most_exposed_epsilon")) if most else None


def note_lines(result: AuditResult) -> list[str]:
    """The trainer's warnings, then the notes of the audit and of the trainer. Small groups share one line."""
    notes = [f"warning: {text}" for text in _as_strings(result.extra.get("warnings"))]
    notes += [note for note in result.notes if not note.endswith(TOO_FEW)]
    notes += _as_strings(result.extra.get("trainer_notes"))
    small = sum(note.endswith(TOO_FEW) for note in result.notes)
    if small:
        groups = "group of canaries is" if small == 1 else "groups of canaries are"
        notes.append(f"{small:,} {groups} too small for a row of {'its' if small == 1 else 'their'} own")
    return notes


def number(value: Any) -> float | None:
    """A number from JSON, where "inf" is infinity; None for anything else."""
    if value in ("inf", "-inf"):
        return float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return float(value) if is_number else None


def whole(value: Any) -> int | None:
    """A whole number from JSON; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_strings(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list | tuple) else []
