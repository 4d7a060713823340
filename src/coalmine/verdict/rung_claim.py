"""The judge of one rung: what its scores alone say about a claim, and what they would have detected."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from coalmine.estimators.amplification import amplified_epsilon
from coalmine.estimators.bounds import bound_of
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.estimators.planning import canaries_for_power, detectable_mean, power_against_claim
from coalmine.estimators.sampling import Sampling
from coalmine.evidence import levels
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.measure.settings import FEWEST
from coalmine.verdict.claim_context import BOUND_LEVEL, ROUNDED, ClaimContext
from coalmine.verdict.findings.amplified import NoiseAsClaimed, TooFewScores
from coalmine.verdict.findings.canaries import EqualScores, Undetected
from coalmine.verdict.findings.finding import Finding
from coalmine.verdict.findings.missing import (
    NoiseStdNeeded,
    OthersNeeded,
    OthersNeededForCorrelatedNoise,
    OthersWrong,
)
from coalmine.verdict.findings.noise import (
    BoundAboveClaim,
    ComposedAboveClaim,
    LittleNoise,
    MeanTooHigh,
    RoundAboveClaim,
    StatedTooLittle,
)
from coalmine.verdict.findings.power import (
    EnoughPower,
    PowerFacts,
    PowerHidden,
    PowerOutOfReach,
    TooFewCanaries,
    WeakAttacker,
)
from coalmine.verdict.outcome import PASS
from coalmine.verdict.round_limits import (
    RoundLimits,
    alike,
    expected_means,
    pessimistic_limits,
    shared_means,
)
from coalmine.verdict.verdict import Verdict

TEST_LEVEL = levels.TEST_LEVEL
SCAN_LEVEL = levels.SCAN_LEVEL
BOUND_CONFIDENCE = 1 - BOUND_LEVEL / 5  # on each of five rungs
POWER = 0.9
KNOWN = ("known-round", "known-others")
TWO_SAMPLES = "two-sample"  # no rung of an audit: scores against unobserved ones, each canary independent
MIN_DETECTION_STDS = 2.0  # by which the mean score must lie above 0
CERTAIN_DETECTION_STDS = 4.0  # canaries with this expected mean score cannot be missed if the claim is exact
LARGEST_SEARCHED_FACTOR, SEARCH_STEP = 16.0, 1.25  # of the search for the noise at twice the claim


def judge_rung(name: str, groups: list[Scores], context: ClaimContext) -> Verdict:
    """The verdict on one rung by itself."""
    return Verdict(finding=_finding_of(name, groups, context), rung=name)


def _finding_of(name: str, groups: list[Scores], context: ClaimContext) -> Finding:
    if name not in KNOWN:
        return _bound_above(groups, context) or WeakAttacker()
    refuted = stated_too_little(context) or _bound_above(groups, context)  # the first involves no chance
    if refuted:
        return refuted
    if all(np.ptp(scores.observed) == 0 for scores in groups):
        count = sum(scores.observed.size for scores in groups)
        return EqualScores(canaries=count, canaries_needed=FEWEST)
    signal = NoiseSignal.of(groups)
    p_value = signal.p_value(1 / context.noise)
    if p_value < TEST_LEVEL and _pooled(context):
        return MeanTooHigh(
            score=signal.beta,
            claimed_score=1 / context.noise,
            p_value=p_value,
            level=TEST_LEVEL,
            claimed_noise=context.noise,
            measured_noise=1 / signal.beta,
        )
    excess = _scanned(context) if name == _scored_rung(context) else None
    if excess:
        return excess
    if name == "known-others" and context.others_wrong is not None:
        # An error in `others` increases the residual and so lowers the scores: an excess is valid, a PASS is not.
        return OthersWrong(factor=context.others_wrong)
    finding = _power_of(name, groups, context, signal)
    detected = signal.beta * math.sqrt(signal.weight)
    undetected = detected < MIN_DETECTION_STDS and not _explained(name, detected, signal.weight, context)
    if undetected and (finding.outcome == PASS or isinstance(finding, NoiseStdNeeded)):
        # an attacker who detects no canary would detect no fault either
        return Undetected(score=signal.beta, claimed_score=1 / context.noise, stds=detected)
    return finding


def _pooled(context: ClaimContext) -> bool:
    """Whether one factor for all rounds refutes a claim: if they state similar noise, or the client is in all of them."""
    rounds = context.run.rounds
    return rounds is None or context.in_every_round or len(alike(rounds, context.run.stated)) == 1


def _scored_rung(context: ClaimContext) -> str | None:
    """The rung whose scores the single rounds have."""
    rounds = context.run.rounds
    if rounds is None:
        return None
    return "known-others" if rounds.residual else "known-round"


def limits_of(context: ClaimContext) -> RoundLimits | None:
    """The limits of single rounds and groups of them; None if the rounds have no scores of their own."""
    rounds = context.run.rounds
    if rounds is None or context.run.correlated:
        return None
    return RoundLimits.of(
        rounds,
        context.run.stated,
        1 / context.noise,
        level=TEST_LEVEL,
        scan_level=SCAN_LEVEL if rounds.residual else 0.0,
    )


def _scanned(context: ClaimContext) -> LittleNoise | None:
    """The finding if the noise that the scores of groups of rounds, or of single ones, leave at most exceeds the claim."""
    limits, rounds = limits_of(context), context.run.rounds
    if limits is None or rounds is None or (not limits.flagged.size and _pooled(context)):
        return None
    epsilon = context.composed(limits.inverse)
    if not context.exceeded(epsilon):
        return None
    alone = context.composed(limits.inverse[limits.flagged])
    if not limits.flagged.size or not context.exceeded(alone):
        return ComposedAboveClaim(epsilon=epsilon, claimed_epsilon=context.claim.epsilon, level=TEST_LEVEL)
    worst = max(limits.flagged, key=lambda index: limits.inverse[index])
    stated = expected_means(rounds, context.run.stated, 1 / context.noise)
    return RoundAboveClaim(
        epsilon=epsilon,
        claimed_epsilon=context.claim.epsilon,
        score=float(rounds.means[worst]),
        claimed_score=float(stated[worst]),
        p_value=limits.smallest_p,
        level=limits.level,
        rounds=len(limits.flagged),
        first_round=int(rounds.numbers[limits.flagged[0]]),
    )


def stated_too_little(context: ClaimContext) -> StatedTooLittle | None:
    """The finding if the rounds themselves state less noise than the claim needs.

    A claim with participations and a sensitivity is for a client that contributes more to these rounds than a canary.
    """
    stated = context.run.stated
    if stated is None or not stated.exact:
        return None
    if context.claim.sensitivity is not None and (context.claim.participations is None or context.run.correlated):
        return None
    weakest = stated.weakest(context.times or 1)  # once is the least that a claim can mean
    epsilon = context.composed(1 / stated.multipliers) if not context.run.correlated else context.implied(weakest)
    if not context.exceeded(epsilon):
        return None
    return StatedTooLittle(
        measured_noise=weakest,
        claimed_noise=context.needed_noise,
        epsilon=epsilon,
        claimed_epsilon=context.claim.epsilon,
        scheme=None if context.sampling is None else str(context.sampling),
    )


def _explained(name: str, detected: float, weight: float, context: ClaimContext) -> bool:
    """Whether the measured noise is enough to hide canaries that would be detected with the claimed noise.

    With the claimed noise, the mean score of a rung with enough power lies more than four standard deviations above 0.
    """
    expected = math.sqrt(weight) / (context.noise * context.noise_seen)
    return name == "known-others" and expected < CERTAIN_DETECTION_STDS and detected > -CERTAIN_DETECTION_STDS


def _bound_above(groups: list[Scores], context: ClaimContext) -> BoundAboveClaim | None:
    """The finding if the valid lower bound lies above the claim; groups share the level.

    A claim amplified by sampling is about every client, however often they were drawn. If the rounds are not known, only
    scores of all canaries count. If they are, the bound is about the noise: it is compared with the mechanism's epsilon.
    """
    if context.sampling is not None and groups[0].rung not in KNOWN:
        groups = [scores for scores in groups if scores.presentations is None]
    confidence = 1 - context.bound_level / max(len(groups), 1)
    for scores in groups:
        compared = scores.unobserved.size if scores.bound_null is None else FEWEST
        if min(scores.observed.size, compared) < FEWEST:
            continue
        null = scores.unobserved if scores.bound_null is None else scores.bound_null
        method = "ranks" if scores.rung == TWO_SAMPLES else "simultaneous"
        bound = bound_of(scores.bounded, null=null, delta=context.delta, confidence=confidence, method=method)
        claimed = context.epsilon(scores.presentations, scores.largest_strength)
        if bound > claimed:
            return BoundAboveClaim(
                lower_bound=bound,
                confidence=confidence,
                claimed_epsilon=claimed,
                participations=scores.presentations,
            )
    return None


def _power_of(name: str, groups: list[Scores], context: ClaimContext, signal: NoiseSignal) -> Finding:
    """PASS if twice the claim would have been detected with 90 % probability, whatever real updates may hide.

    known-round sees the noise and the real clients' signal as one, so a bound on the signal must be known: a signal in place
    of missing noise looks the same. At worst it is the same in every round. known-others sees the noise alone if `others` is
    complete, which only the stated noise can show.
    """
    if name == "known-round" and context.strongest is not None:
        return OthersNeededForCorrelatedNoise(correlated=True)
    exposure = max(s.exposure for s in groups)
    count, epsilon = max(round(signal.weight / exposure), 1), context.epsilon(round(exposure), exposure)
    if name == "known-round" and context.run.most_hidden is None:
        return OthersNeeded()
    if name == "known-others" and context.run.stated is None and not context.run.vouched:
        return NoiseStdNeeded()
    hidden = (context.run.most_hidden or 0.0) if name == "known-round" else 0.0
    if not _pooled(context):
        alone = name == _scored_rung(context) and not hidden
        return _grouped_power(context, signal) if alone else OthersNeeded()
    if context.sampling is not None:
        return _sampled_power(context, context.sampling, signal, hidden)
    factor = _canary_factor(context, epsilon, exposure)
    settings = {
        "delta": context.delta,
        "level": TEST_LEVEL,
        "dilution": hidden,
        "null_dof": signal.dof,
        "factor": factor,
    }
    power = power_against_claim(count, epsilon, **settings)
    facts = vars(
        PowerFacts(power=power, canaries=count, claimed_noise=context.noise, measured_noise=_measured_noise(signal))
    )
    if power >= POWER:
        return EnoughPower(**facts, participations=context.times)
    needed = canaries_for_power(epsilon, power=POWER, **settings)
    if needed is not None:
        return TooFewCanaries(**facts, canaries_needed=needed)
    return PowerHidden(**facts) if name == PowerHidden.rung else PowerOutOfReach(**facts)


def _canary_factor(context: ClaimContext, epsilon: float, exposure: float) -> float:
    """The factor by which a canary's epsilon grows if that of the claim's own client doubles."""
    claim = context.claim
    if claim.sensitivity is None and claim.moved == 1:
        return 2.0
    less = float(mechanism_noise(2 * claim.epsilon, delta=context.delta))
    share = less / float(mechanism_noise(claim.epsilon, delta=context.delta))
    return replace(context, noise=share * context.noise).epsilon(round(exposure), exposure) / epsilon


def _measured_noise(signal: NoiseSignal) -> float | None:
    return 1 / signal.beta if signal.beta > 0 else None


def _grouped_power(context: ClaimContext, signal: NoiseSignal) -> Finding:
    """PASS if twice the claim would have been refuted with 90 % probability by rounds that state different noise."""
    rounds, stated = context.run.rounds, context.run.stated
    assert rounds is not None
    means = shared_means(rounds, stated, expected_means(rounds, stated, 1 / context.noise))
    faulty = _means_at(2 * context.claim.epsilon, means, context)
    reached, passes = math.inf, False
    if faulty is not None:
        passes = context.exceeded(context.composed(pessimistic_limits(rounds, stated, faulty, TEST_LEVEL, POWER)))
        reached = 2 * context.claim.epsilon if passes else math.inf
    return (NoiseAsClaimed if passes else TooFewScores)(
        power=POWER,
        detectable_epsilon=reached,
        claimed_epsilon=context.claim.epsilon,
        canaries=round(float(rounds.counts.sum())),
        claimed_noise=context.noise,
        measured_noise=_measured_noise(signal),
    )


def _means_at(epsilon: float, means: npt.NDArray[np.float64], context: ClaimContext) -> npt.NDArray[np.float64] | None:
    """Mean scores in proportion to these that compose to an epsilon; None if none up to LARGEST_SEARCHED_FACTOR do.

    log ε is almost linear in the log of the factor, between two factors as close as these.
    """
    factor, reached = 1.0, context.composed(means)
    while factor < LARGEST_SEARCHED_FACTOR and reached > 0:
        following = context.composed(factor * SEARCH_STEP * means)
        if following >= epsilon:
            share = math.log(epsilon / reached) / math.log(following / reached)
            return np.asarray(factor * SEARCH_STEP ** min(share, 1.0) * means)
        factor, reached = factor * SEARCH_STEP, following
    return None


def _sampled_power(context: ClaimContext, sampling: Sampling, signal: NoiseSignal, hidden: float) -> Finding:
    """PASS if noise at which the accountant's epsilon is twice the claim would have been detected with 90 % probability."""
    settings = {"level": TEST_LEVEL, "power": POWER, "null_dof": signal.dof}
    faulty = detectable_mean(signal.weight, 1 / context.noise, **settings)
    left = None if faulty is None else 1 / faulty**2 - hidden**2  # the squared noise that gives such scores
    reached = (
        math.inf if left is None or left <= 0 else amplified_epsilon(math.sqrt(left), sampling, context.delta).high
    )
    passes = reached <= 2 * ROUNDED * context.claim.epsilon
    return (NoiseAsClaimed if passes else TooFewScores)(
        power=POWER,
        detectable_epsilon=reached,
        claimed_epsilon=context.claim.epsilon,
        canaries=round(signal.weight),
        claimed_noise=context.noise,
        measured_noise=_measured_noise(signal),
    )
