"""`assert_private`: the check as an assertion of a test."""

import warnings
from collections.abc import Callable
from typing import Any

from coalmine.result.audit_result import AuditResult
from coalmine.result.trainer_section import FunctionCheck
from coalmine.result.words import format_interval, format_number
from coalmine.testing.mechanism_check import check_private
from coalmine.verdict.findings.power import PowerFacts
from coalmine.verdict.outcome import Outcome


class PrivacyNote(UserWarning):
    """A warning about a mechanism that passes its check."""


def assert_private(release: Callable[..., Any], **claim: Any) -> AuditResult:
    """Raise AssertionError unless the check of `release` passes; the arguments are those of `check_private`.

    The message has the verdict, the measured epsilon and the likely fault. UNDERPOWERED raises as well: the check could not
    confirm the claim, and the message says why. Noise in half precision that passes is a warning
    (PrivacyNote). The result is returned.
    """
    __tracebackhide__ = True  # pytest then points at the line of the test
    result = check_private(release, **claim)
    raise_unless_private(result, name_of(release))
    return result


def raise_unless_private(result: AuditResult, name: str) -> None:
    """Raise AssertionError unless the verdict is PASS; noise or a release of few bits is a warning."""
    __tracebackhide__ = True
    if result.verdict is None or result.verdict.outcome != Outcome.PASS:
        raise AssertionError(describe_failure(result, name))
    if note := check_of(result).warning:
        warnings.warn(f"{name}: {note}", PrivacyNote, stacklevel=3)


def properties(result: AuditResult) -> dict[str, str]:
    """Verdict, measured, claimed and detectable epsilon, and the likely fault, as the properties of a JUnit report."""
    assert result.verdict is not None
    assert result.claim is not None
    values = {
        "verdict": str(result.verdict.outcome),
        "epsilon": "" if result.epsilon is None else f"{result.epsilon:.6g}",
        "claimed_epsilon": f"{result.claim.epsilon:.6g}",
        "delta": f"{result.settings.delta:.6g}",
        "adjacency": check_of(result).adjacency,
    }
    if result.interval is not None:
        values["epsilon_interval"] = format_interval(result.interval)
    detectable = result.verdict.facts.get("detectable_epsilon")
    if detectable is not None:
        values["detectable_epsilon"] = f"{detectable:.6g}"
    fault = check_of(result).likely_fault
    return values | ({"likely_fault": fault} if fault else {})


def check_of(result: AuditResult) -> FunctionCheck:
    """The circumstances of the check that gave this result."""
    assert result.trainer.check is not None
    return result.trainer.check


def name_of(release: Callable[..., Any]) -> str:
    """The function's name in messages."""
    return str(getattr(release, "__name__", type(release).__name__))


def describe_failure(result: AuditResult, name: str) -> str:
    """Verdict, measured epsilon, reason and likely fault of a check that did not pass, in a few lines."""
    assert result.verdict is not None
    assert result.claim is not None
    check = check_of(result)
    refuted = result.verdict.outcome == Outcome.VIOLATION
    claimed = f"({result.claim.epsilon:g}, {result.settings.delta:g})-private for one call"
    lines = [
        f"{name} is not {claimed}: VIOLATION"
        if refuted
        else f"{name}: could not confirm that it is {claimed}: UNDERPOWERED",
        f"measured epsilon: {measured_epsilon(result)}; claimed: {result.claim.epsilon:g} ({check.adjacency} adjacency)",
        f"reason: {result.verdict.reason}",
    ]
    if check.likely_fault:
        lines.append(f"likely fault: {check.likely_fault}")
    if isinstance(result.verdict.finding, PowerFacts):
        lines.append("what to do: each call gives one score for every client; raise clients or most_calls")
    lines += [f"note: {note}" for note in result.notes]
    calls = f"{check.calls} calls with {check.clients} clients in {result.settings.dim:,} dimensions"
    return "\n".join([*lines, f"checked: {calls}, clip norm {check.clip_norm:g}"])


def measured_epsilon(result: AuditResult) -> str:
    """The measured epsilon with its interval."""
    if result.epsilon is None:
        return "none"
    return f"{format_number(result.epsilon)} (95 % interval {format_interval(result.interval)})"
