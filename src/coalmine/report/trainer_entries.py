"""Entries that a trainer wrote into result.json beside the audit's own: read if they are there and make sense."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coalmine.audit.result import AuditResult

TOO_FEW = "too few to say anything"  # notes on small groups of canaries end so


@dataclass(frozen=True, kw_only=True)
class ClientExposure:
    """How often a client takes part and its analytical epsilon; `exact` where this run's own rounds were counted."""

    rounds: int
    epsilon: float
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Accounted:
    """The epsilon of the trainer's accountant, and the verdict on it as a claim that sampling amplifies."""

    epsilon: float
    verdict: str


def client_exposure(result: AuditResult) -> ClientExposure | None:
    """A client's own exposure, where the trainer wrote one that differs from that of the canaries."""
    rounds, epsilon = whole(result.extra.get("client_rounds")), number(result.extra.get("client_epsilon"))
    if rounds is None or epsilon is None:
        return None
    if result.analytical_epsilon is not None and math.isclose(epsilon, result.analytical_epsilon, rel_tol=1e-3):
        return None
    exact = result.extra.get("client_exposure") == "most exposed"
    return ClientExposure(rounds=rounds, epsilon=epsilon, exact=exact)


def accounted_epsilon(result: AuditResult) -> Accounted | None:
    """The accountant's epsilon, where the trainer has an accountant."""
    epsilon, judged = number(result.extra.get("accounted_epsilon")), result.extra.get("if_accounted_were_claimed")
    if epsilon is None:
        return None
    verdict = judged.get("verdict") if isinstance(judged, Mapping) else None
    return Accounted(epsilon=epsilon, verdict=str(verdict or ""))


def analytical_for(result: AuditResult, times: int) -> float | None:
    """The analytical epsilon of somebody who takes part so often, as far as the trainer wrote it."""
    if result.extra.get("presentations") == times:
        return result.analytical_epsilon
    most = result.extra.get("most_presentations") == times
    return number(result.extra.get("most_exposed_epsilon")) if most else None


def note_lines(result: AuditResult) -> list[str]:
    """The trainer's warnings first, then the notes of the audit and of the trainer, small groups in one line."""
    notes = [f"warning: {text}" for text in _sentences(result.extra.get("warnings"))]
    notes += [note for note in result.notes if not note.endswith(TOO_FEW)]
    notes += _sentences(result.extra.get("trainer_notes"))
    small = sum(note.endswith(TOO_FEW) for note in result.notes)
    if small:
        are = "group of canaries is" if small == 1 else "groups of canaries are"
        notes.append(f"{small:,} {are} too small for a row of {'its' if small == 1 else 'their'} own")
    return notes


def number(value: Any) -> float | None:
    """A number of a JSON file, in which "inf" is infinity; None where it is no number."""
    if value in ("inf", "-inf"):
        return float(value)
    known = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return float(value) if known else None


def whole(value: Any) -> int | None:
    """A whole number of a JSON file; None where it is something else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _sentences(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list | tuple) else []
