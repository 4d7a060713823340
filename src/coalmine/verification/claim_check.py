"""Whether the judged claim is the one that was made before round 1."""

from dataclasses import replace
from typing import Any

from coalmine.evidence.ladder import presented_times
from coalmine.log.commitment import TOLERANCE, json_equal
from coalmine.measure.settings import Settings
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.amplified_claim import read_claim
from coalmine.verdict.claim import Claim
from coalmine.verification.check import Check, Evidence


def check_claim(known: Evidence) -> Check:
    """Whether the judged claim is the one that was made before round 1."""
    try:
        judged = AuditResult.from_dict(known.stored).claim
    except ValueError as error:
        return Check("claim", False, f"result.json cannot be read: {error}")
    promised = known.statement.claim
    if promised is None:
        detail = "no claim was made before round 1, so nobody can tell whether it was fitted to the result"
        return Check("claim", None if judged else True, detail if judged else "nothing was claimed")
    if judged is None:
        return Check("claim", False, "a claim was made before round 1, and the result judges none: it was removed")
    made = Claim.from_dict(promised)
    read_by_pipeline = _may_be_completed(made, judged, known.settings)
    fault = _reading_fault(known, judged) if read_by_pipeline else None
    if fault is not None:
        return Check(
            "claim", False, f"the number claimed before round 1 was read otherwise than the run allows: {fault}"
        )
    last_round = max(known.log.numbers, default=0)
    read = (
        judged
        if read_by_pipeline
        else _for_weight(made, judged) or read_claim(made, known.settings, last_round) or made
    )
    different = _differs(made.read_as(read).to_dict(), judged)
    if different:
        return Check("claim", False, f"the claim was changed after round 1: it differs in {', '.join(different)}")
    return Check("claim", True, "the claim is the one made before round 1")


def _differs(promised: dict[str, Any], judged: Claim) -> list[str]:
    """The fields in which a claim differs from the one that was made before round 1."""
    fields = judged.to_dict()
    return [name for name in sorted(fields | promised) if not json_equal(fields.get(name), promised.get(name))]


def _may_be_completed(made: Claim, judged: Claim, settings: Settings) -> bool:
    """Whether the claim leaves its accounting to the pipeline, which completed it.

    The pipeline knows its sampling scheme, unless the audit has a schedule of its own, and how often clients took part.
    """
    if settings.sampling is not None or made.amplified or made.participations or made.sensitivity:
        return False
    same_kind = made.bare or made.counts_sampling == judged.counts_sampling
    return same_kind and (settings.rounds is None or not judged.amplified)


def _for_weight(made: Claim, judged: Claim) -> Claim | None:
    """The claim for a client that weighs more than a canary, which only makes it stricter; None for any other reading."""
    if not made.participations or made.sensitivity or (judged.sensitivity or 0) < made.participations**0.5:
        return None
    times = made.participations if judged.participations else None
    return replace(made, participations=times, sensitivity=judged.sensitivity)


def _reading_fault(known: Evidence, judged: Claim) -> str | None:
    """The reason why the pipeline cannot have read a bare number as the judged claim; None if it can.

    It knows its sampling scheme, and how often clients took part and weigh: no less than the canaries did.
    """
    rounds = max(known.log.numbers, default=0)
    if judged.sampling is not None:
        covered = judged.sampling.total_rounds
        return None if covered >= rounds else f"it was read for {covered} of {rounds} rounds"
    most = max(int(presented_times(known.log, known.settings).max()), 1)
    if judged.participations is not None and judged.participations < most:
        return f"it was read for a client in {judged.participations} rounds, and canaries were in up to {most}"
    if judged.sensitivity is not None and judged.sensitivity < (1 - TOLERANCE) * most**0.5:
        return f"it was read for a sensitivity of {judged.sensitivity:.3g}, and canaries had {most**0.5:.3g}"
    if known.settings.rounds is not None and judged.participations == most and judged.sensitivity is None:
        return "the audit's own schedule already says how often canaries take part, so participations were added"
    return None
