"""The likely faults behind a result, from the evidence of its gauges and rungs."""

import math
from collections.abc import Iterator

from coalmine.evidence import faults
from coalmine.evidence.faults import FAULTS, Fault
from coalmine.evidence.gauges.gauge import Results, Symptom, all_gauges
from coalmine.evidence.gauges.length import Length
from coalmine.result.audit_result import Adversary, AuditResult
from coalmine.verdict.outcome import Outcome

SPREAD = 1.2  # the observed scores' standard deviation over that of the noise
SPREAD_OF_MEAN = 0.5  # excess spread over the mean score; large scores spread by the error of the scale

# Evidence of rungs that refute the claim. Gauges have their own.
REFUTED = (
    Symptom(
        name="known-others",
        always=(*faults.SCALED_UPDATES, *faults.LITTLE_NOISE, faults.NOISE_ON_HALF, faults.NOISE_AFTER_ADAM),
        sometimes=(
            faults.CLIP_AFTER_AVERAGING,
            faults.NOISE_ON_ONE_LAYER,
            faults.NOISE_IN_LAST_ROUNDS,
            faults.CANARIES_LOST,
        ),
        never=(faults.NOISE_TIMES_N, *faults.SIGNAL_IN_NOISE),
    ),
    Symptom(
        name="known-round",
        always=(faults.CLIP_AFTER_AVERAGING,),
        sometimes=faults.SCALED_UPDATES,
        never=(faults.OTHERS_WRONG, faults.OTHERS_INCOMPLETE),
    ),
    Symptom(name="all-iterates", sometimes=(*faults.SCALED_UPDATES, faults.CLIP_AFTER_AVERAGING)),
    Symptom(name="final"),
    Symptom(name="final-update"),
)
UNEVEN = Symptom(
    name="uneven scores",
    always=(faults.CANARIES_LOST,),
    sometimes=(faults.CLIP_AFTER_AVERAGING, faults.NOISE_IN_LAST_ROUNDS),
)


def evidence_of(result: AuditResult) -> list[Symptom]:
    """The evidence in a result: of rungs that refute the claim, then of gauges."""
    return [*_evidence_of_rungs(result), *evidence_of_gauges(result)]


def evidence_of_gauges(result: AuditResult) -> list[Symptom]:
    """The evidence in the gauges of a result."""
    results = Results(result.gauges, result.rounds)
    return [symptom for gauge in all_gauges() for symptom in gauge.shown(results)]


def _evidence_of_rungs(result: AuditResult) -> Iterator[Symptom]:
    for symptom in REFUTED:
        rung = result.adversaries.get(symptom.name)
        if rung is not None and rung.verdict and rung.verdict.outcome == Outcome.VIOLATION:
            yield symptom
    if _has_uneven_scores(result.adversaries.get("known-others")):
        yield UNEVEN


def _has_uneven_scores(rung: Adversary | None) -> bool:
    """Whether the scores of observed canaries spread more than the noise explains: they do not all count equally."""
    if rung is None:
        return False
    error, row = 5 / math.sqrt(2 * rung.headline.canaries), rung.headline.estimate
    excess = row.std**2 - row.null_std**2
    above = row.std > max(SPREAD, 1 + error) * row.null_std
    return bool(above and excess > (SPREAD_OF_MEAN * row.mean) ** 2)


def likely_faults(result: AuditResult, most: int = 5) -> list[Fault]:
    """The faults that fit a result best, with ties: most evidence explained, least contradicted.

    Of faults that only differ in how much noise they leave, it is the one that leaves what was measured.
    """
    evidence, possible = evidence_of(result), _possible_evidence(result)
    explained = {fault for symptom in evidence for fault in (*symptom.always, *symptom.sometimes)}
    rated = [(_fit(fault, evidence, possible), fault) for fault in FAULTS if fault in explained]
    rated.sort(key=lambda pair: -pair[0])
    best = [fault for rating, fault in rated if rating == rated[0][0]]
    by_noise = _nearest_noise([fault for fault in best if fault.noise_left is not None], result)
    return [*by_noise, *(fault for fault in best if fault.noise_left is None)][:most]


def _nearest_noise(tied: list[Fault], result: AuditResult) -> list[Fault]:
    """The one of these faults that leaves as much of the noise as the residual has; all of them without a residual."""
    shares = [each.smallest for each in result.gauges if each.name == Length.POOLED.name and each.smallest > 0]
    if not shares or len(tied) < 2:
        return tied
    return [min(tied, key=lambda fault: abs(math.log(shares[0] / (fault.noise_left or 1.0))))]


def _possible_evidence(result: AuditResult) -> list[Symptom]:
    """Evidence that the result could have shown, because it has the rung or the statistic."""
    measured = Results(result.gauges).statistics
    rungs = [symptom for symptom in REFUTED if symptom.name in result.adversaries]
    uneven = [UNEVEN] if "known-others" in result.adversaries else []
    return rungs + uneven + [each for gauge in all_gauges() for each in gauge.symptoms() if each.of in measured]


def _fit(fault: Fault, evidence: list[Symptom], possible: list[Symptom]) -> int:
    """How well a fault explains the evidence.

    Evidence that the fault does not explain counts against it. So does evidence that it would have shown but did not.
    Evidence that points to another fault counts twice more.
    """
    explained = sum(fault in (*each.always, *each.sometimes) for each in evidence)
    missing = sum(fault in each.always and each not in evidence for each in possible)
    contradicted = sum(fault in each.never for each in evidence)
    return 2 * explained - len(evidence) - missing - 2 * contradicted
