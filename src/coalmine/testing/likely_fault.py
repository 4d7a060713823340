"""The fault that best explains a failed check, in a sentence."""

import math
from dataclasses import dataclass

from coalmine.evidence.gauges.gauge import gauge_of
from coalmine.evidence.gauges.repetition import Repetition
from coalmine.known_faults import evidence_of_gauges
from coalmine.result.audit_result import AuditResult
from coalmine.testing.tested_mechanism import Mechanism
from coalmine.verdict.findings.canaries import ShortCanaries
from coalmine.verdict.findings.checks import (
    ClientTooLoud,
    NoiseFollowsData,
    ReplyMovesTooFar,
    ShrunkByOthers,
    SilentCoordinates,
)
from coalmine.verdict.findings.finding import Finding
from coalmine.verdict.findings.gauges import GaugeReading
from coalmine.verdict.outcome import Outcome

APART = 4.0  # standard errors by which two measured norms must differ
UNCLIPPED = 50.0  # ratio of the measured norms at 1,000 and 10 clip norms: 100 without clipping, 1 with it
SINGLE = ("independent", "one-hot", "sparse")  # updates that do not meet, where a client moves its own part
REPEATED = (
    "the noise of one call is repeated in another, in whole or in part. Draw new noise in every call: seed the generator "
    "once, outside. If the noise is meant to be correlated, declare it with noise=…"
)


@dataclass(frozen=True)
class TrialReading:
    """A tested canary's contribution to a release, the noise std per coordinate, and the number of scores behind it."""

    length: float
    noise: float
    canaries: int

    @property
    def error(self) -> float:
        """The standard error of the length."""
        return self.noise / math.sqrt(self.canaries)

    def is_longer(self, other: "TrialReading", factor: float) -> bool:
        """Whether its canaries are longer than another's by more than this factor, significantly."""
        return self.length - factor * other.length > APART * math.hypot(self.error, factor * other.error)


def likely_fault(
    mechanism: Mechanism, pattern: str, result: AuditResult, readings: dict[str, TrialReading]
) -> str | None:
    """The fault that best fits the measurements; None if nothing points to one."""
    long, exact, huge = (readings.get(name) for name in ("long", "exact", "huge"))
    assert long is not None
    verdict = result.verdict
    assert verdict is not None
    refuted = verdict.outcome == Outcome.VIOLATION
    if pattern == "weights" and refuted:
        return (
            "a client with the largest weight counts for more than the noise was sized for. Weigh all clients equally, or "
            "size the noise for the largest weight"
        )
    if refuted and (fault := _fault_of_single_clients(pattern, verdict.finding, long, readings)):
        return fault
    if refuted and pattern == "huge" and huge is not None and huge.noise < 0.8 * long.noise:
        return (
            "very long updates are released with less noise. If noise is added to an update before the clip, the clip "
            "shrinks both. Clip first, then add noise to the sum"
        )
    if refuted and huge is not None and huge.is_longer(long, UNCLIPPED):
        return "updates are not clipped: a longer update counts for more, however long it is. Clip every update"
    if refuted and exact is not None and long.is_longer(exact, 1.1):
        return (
            f"the clip does not bound each client's update: one that is {mechanism.scale:g} times too long counts "
            f"{long.length / exact.length:.3g} times as much as one of the clip norm. The sum or the mean may be clipped "
            "instead, or each layer or coordinate by itself. Scale each whole update to at most the clip norm"
        )
    if refuted and pattern in ("uneven", "outliers"):
        if readings[pattern].noise < 0.9 * long.noise:
            return (
                "the noise depends on the updates: there is less of it if others are shorter. Size the noise by the clip "
                "norm alone"
            )
        return (
            "a long update counts for more if others are shorter, as when the sum or the mean is clipped. Clip each "
            "client's update by itself"
        )
    if isinstance(verdict.finding, NoiseFollowsData):
        return "the noise is sized by the updates. Size it by the clip norm alone"
    if isinstance(verdict.finding, ShrunkByOthers):
        return "all updates are scaled by the largest norm, or by that of their sum. Scale each update by its own norm"
    if isinstance(verdict.finding, ShortCanaries):
        return (
            "the sum or the mean may be clipped, so that each client counts for less the more there are, or updates are "
            "lost. Clip each client's update by itself"
        )
    if mechanism.noise is None and not _is_bare(long):
        if isinstance(verdict.finding, GaugeReading) and gauge_of(verdict.finding.statistic) is Repetition:
            return REPEATED
        causes = [symptom for symptom in evidence_of_gauges(result) if symptom.cause]
        if causes:
            return max(causes, key=lambda symptom: symptom.precedence).cause
    return _too_little_noise(mechanism, readings[pattern]) if refuted else None


def _fault_of_single_clients(
    pattern: str, finding: Finding, long: TrialReading, readings: dict[str, TrialReading]
) -> str | None:
    """The fault if single clients, or updates of a special shape, refuted the claim."""
    if pattern == "clients":
        return "one client counts for more than the others. Look for a client that is added twice, or is not clipped"
    if isinstance(finding, ReplyMovesTooFar):
        if finding.updates in SINGLE:
            return "one client counts for more than its clip norm. Look for a client that is added twice, or is not clipped"
        return "one client changes how much the others count. Scale each client's update by its own norm alone"
    if pattern not in ("one-hot", "sparse", "flat"):
        return None
    if isinstance(finding, SilentCoordinates):
        return "noise is missing where no client contributes. Add noise to every coordinate that is released"
    if isinstance(finding, ClientTooLoud):
        return "some coordinates are not clipped. Scale each whole update to at most the clip norm"
    reading = readings[pattern]
    if reading.noise < 0.9 * long.noise:
        return "there is less noise where no client contributes. Add noise of the same std to every coordinate"
    return (
        f"the clip does not bound every shape of update: {pattern} ones count {reading.length / long.length:.3g} times as "
        "much as dense ones. Compute the L2 norm over all coordinates"
    )


def _is_bare(reading: TrialReading) -> bool:
    """Whether there is practically no noise."""
    return reading.noise < 1e-6 * abs(reading.length)


def _too_little_noise(mechanism: Mechanism, reading: TrialReading) -> str:
    """The noise relative to the noise that the claim needs, and the usual reason for such a factor."""
    if _is_bare(reading):
        return "there is no noise. Add Gaussian noise to the sum"
    if mechanism.noise is not None or reading.length <= 0:
        return "there is less noise than the claim needs. Compare its std with that in the accounting"
    share = reading.noise / (mechanism.needed_noise * reading.length)
    error = reading.error / reading.length
    text = f"the noise is {share:.2g} of what the claim needs"
    factor, meaning = min(_usual_factors(mechanism), key=lambda pair: abs(math.log(share * pair[0])))
    if abs(math.log(share * factor)) < max(3 * error, 0.02):
        return f"{text}: {meaning}"
    return f"{text}. Compare the std of the noise that is drawn with the noise multiplier times the clip norm"


def _usual_factors(mechanism: Mechanism) -> list[tuple[float, str]]:
    factors = [
        (math.sqrt(2), "a variance may have been taken for a standard deviation"),
        (
            2.0,
            "it may be sized for zero-out adjacency; under replace-one a client moves the sum by two clip norms"
            if mechanism.moves == 2
            else "half of it is missing, or every update counts twice",
        ),
    ]
    if mechanism.clients > 4:
        factors.append((float(mechanism.clients), "it may be divided by the number of clients twice"))
        factors.append((math.sqrt(mechanism.clients), "it may be divided by the square root of the number of clients"))
    return factors
