"""The judge of a mechanism claim: the noise of the rounds, for an attacker who knows them."""

import math
from dataclasses import replace

import numpy as np

from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampling import Sampling
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.evidence.gauges.training import Training
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.evidence.stated_noise import StatedNoise
from coalmine.verdict.claim import LARGEST_CLAIM, Claim
from coalmine.verdict.claim_context import BOUND_LEVEL, ClaimContext, RunFacts, context_of
from coalmine.verdict.findings.canaries import ShortCanaries, Undetected, UnevenScores
from coalmine.verdict.findings.finding import Doubt, Refutation, times_of
from coalmine.verdict.findings.gauges import Untrained
from coalmine.verdict.findings.missing import (
    NoCanaries,
    NoiseStdMissing,
    NothingClaimed,
    OthersMissing,
    OthersWrong,
    ParticipationsUnknown,
)
from coalmine.verdict.findings.noise import LessThanStated, StatedNoiseVaries, WeakRounds
from coalmine.verdict.gauge_proofs import is_allowed, less_noise_notes, outside_limits, proof, proofs_of
from coalmine.verdict.outcome import PASS, VIOLATION
from coalmine.verdict.round_limits import expected_means, rounds_signal
from coalmine.verdict.rung_claim import KNOWN, judge_rung, limits_of
from coalmine.verdict.verdict import Verdict

MIN_DETECTED_SHARE = 0.5  # of the claimed signal: below it, there is a note
UNDETECTED_NOTE_LEVEL = 1e-4  # level of that note
LOW_NOISE_SHARE = 0.9  # of the usual stated noise; rounds below it state little noise
MIN_LENGTH_SHARE = 0.95  # of the declared norm; canaries with a smaller one were lost or shortened
EXCLUDED_LEVEL = 0.01  # level at which scores exclude a noise multiplier that the stated noise suggests


def judge(
    claim: Claim,
    rungs: list[Scores],
    gauges: list[GaugeResult],
    run: RunFacts,
    *,
    sampled: tuple[float, Sampling] | None = None,
) -> tuple[Verdict, dict[str, Verdict], list[str]]:
    """The verdict on the run, that of each rung, and notes; a true claim is called VIOLATION in at most 1 % of runs.

    For an amplified claim, `sampled` is the noise multiplier that it needs and its scheme, and the verdict is about the
    noise alone; the rungs that do not know the rounds are compared with the claim itself.
    """
    names = list(dict.fromkeys(scores.rung for scores in rungs))
    context = context_of(claim, rungs, gauges, run, sampled)
    context = replace(context, bound_level=BOUND_LEVEL / max(len(names), 5))
    by_rung = {name: judge_rung(name, [s for s in rungs if s.rung == name], context) for name in names}
    notes = [
        note for note in (_undetected(rungs, context), _more_often(context), *less_noise_notes(gauges, context)) if note
    ]
    judged = {name: verdict for name, verdict in by_rung.items() if sampled is None or name in KNOWN}
    return _judge_run(judged, rungs, gauges, context), by_rung, notes


def judge_unclaimed(rungs: list[Scores], gauges: list[GaugeResult], run: RunFacts) -> Verdict:
    """The verdict if nothing was claimed: the noise that the rounds state is then the only promise, and PASS impossible."""
    nothing = Verdict(finding=NothingClaimed())
    stated = run.stated
    if stated is None or run.correlated:
        return nothing
    times = run.planned or max(run.presentations, 1)
    usual = float(np.median(stated.multipliers * stated.low))
    if not 0 < usual < math.inf:
        return nothing
    epsilon = float(mechanism_epsilon(usual / math.sqrt(run.exposure_of(times)), delta=run.delta))
    if not 0 < epsilon <= LARGEST_CLAIM:
        return nothing
    verdict, _, _ = judge(Claim(epsilon, participations=times), rungs, gauges, run)
    if not isinstance(verdict.finding, Refutation):
        return nothing
    return replace(verdict, finding=LessThanStated(refuted=verdict.finding))


def _undetected(rungs: list[Scores], context: ClaimContext) -> str | None:
    """A note if an attacker who knows all other updates measures far less of the canaries than the claim allows.

    Not a verdict: there may be more noise than claimed. The canaries may also not be in the rounds. Nothing else would show
    that, since then the attack measures no more.
    """
    groups = [scores for scores in rungs if scores.rung == "known-others"]
    if all(np.ptp(scores.observed) == 0 for scores in groups):
        return None
    signal = NoiseSignal.of(groups)
    claimed = 1 / context.noise
    if signal.beta >= MIN_DETECTED_SHARE * claimed or 1 - signal.p_value(claimed) > UNDETECTED_NOTE_LEVEL:
        return None
    return (
        f"known-others: mean score per presentation {signal.beta:.3g}, far below the {claimed:.3g} that the claim implies: "
        "either there is much more noise than claimed, or the canaries were not in the rounds as stated (made from another "
        "seed, lost, or clipped on their way)"
    )


def _judge_run(
    by_rung: dict[str, Verdict], rungs: list[Scores], gauges: list[GaugeResult], context: ClaimContext
) -> Verdict:
    violated = [name for name, verdict in by_rung.items() if verdict.outcome == VIOLATION]
    proofs = proofs_of(gauges, context)
    if violated:
        also = violated[:-1] + [f"the {gauge.name} gauge" for gauge in proofs]
        return replace(by_rung[violated[-1]], evidence=tuple(also))
    if proofs:
        return Verdict(finding=proof(proofs[0], context))
    known = [by_rung[name] for name in KNOWN if name in by_rung]
    if not known:
        return Verdict(finding=NoCanaries())
    barred = _barred(rungs, gauges, context)
    if barred is not None:
        unseen = isinstance(known[-1].finding, Undetected)
        untold = isinstance(barred.finding, OthersWrong | OthersMissing | NoiseStdMissing)
        return known[-1] if unseen and untold else barred
    passed = [name for name, verdict in by_rung.items() if verdict.outcome == PASS]
    if passed:
        return by_rung[passed[-1]]
    return known[-1]


def _barred(rungs: list[Scores], gauges: list[GaugeResult], context: ClaimContext) -> Verdict | None:
    """The verdict if there is no PASS although nothing refutes the claim; None if nothing bars one."""
    if context.others_wrong is not None:
        return Verdict(finding=OthersWrong(factor=context.others_wrong))
    odd = [gauge for gauge in gauges if gauge.bars_pass and not is_allowed(gauge, context)]
    untrained = [gauge for gauge in odd if gauge.gauge is Training]
    if untrained and len(untrained) == len(odd):
        return Verdict(finding=Untrained(gauge=untrained[0].name))
    if odd:
        return outside_limits(odd)
    doubt = _doubt(rungs, context)
    return None if doubt is None else Verdict(finding=doubt)


def _doubt(rungs: list[Scores], context: ClaimContext) -> Doubt | None:
    """What the claim or the rounds do not say, or the scores contradict, although no gauge is outside its limits."""
    if not context.explicit:
        return ParticipationsUnknown(claimed_epsilon=context.claim.epsilon, participations=context.run.presentations)
    return _gaps(rungs, context.run) or _uneven(rungs, context) or _varying_noise(context) or _weak_rounds(context)


def _gaps(rungs: list[Scores], run: RunFacts) -> Doubt | None:
    """The finding if some rounds lack `others` or noise_std, so that known-others cannot confirm the claim."""
    if not any(scores.rung == "known-others" for scores in rungs) or run.vouched:
        return None
    if run.without_others:
        return OthersMissing(rounds=run.without_others)
    return NoiseStdMissing(rounds=run.without_noise) if run.without_noise else None


def _varying_noise(context: ClaimContext) -> Doubt | None:
    """The finding if the rounds that state the least noise may have less than the claim needs."""
    stated = context.run.stated
    if stated is None or stated.exact or context.claim.sensitivity is not None or context.run.correlated:
        return None
    weakest = stated.weakest(context.times or 1)
    highest = context.composed(1 / (stated.multipliers * stated.high))
    if not context.exceeded(highest) or _excluded(weakest * stated.high, stated, context):
        return None
    return StatedNoiseVaries(measured_noise=weakest, claimed_noise=context.needed_noise)


def _excluded(multiplier: float, stated: StatedNoise, context: ClaimContext) -> bool:
    """Whether the scores in the rounds that state the least noise exclude a noise multiplier this small."""
    rounds = context.run.rounds
    if rounds is None or not rounds.residual:
        return False
    weak = stated.numbers[stated.multipliers < LOW_NOISE_SHARE * stated.usual]
    members = np.flatnonzero(np.isin(rounds.numbers, weak))
    if not members.size or set(weak.tolist()) - set(rounds.numbers[members].tolist()):
        return False
    signal = rounds_signal(rounds, members)
    return 1 - signal.p_value(1 / multiplier) < EXCLUDED_LEVEL


def _weak_rounds(context: ClaimContext) -> Doubt | None:
    """The finding if single rounds have less noise than they state, unless the claim holds with what they measure."""
    limits, rounds = limits_of(context), context.run.rounds
    if limits is None or rounds is None or not limits.flagged.size:
        return None
    expected = expected_means(rounds, context.run.stated, 1 / context.noise)
    expected[limits.flagged] = np.maximum(rounds.means[limits.flagged], expected[limits.flagged])
    epsilon = context.composed(expected)
    if not context.exceeded(epsilon):
        return None
    return WeakRounds(
        rounds=len(limits.flagged),
        first_round=int(rounds.numbers[limits.flagged[0]]),
        p_value=limits.smallest_p,
        level=limits.level,
        epsilon=epsilon,
        claimed_epsilon=context.claim.epsilon,
    )


def _uneven(rungs: list[Scores], context: ClaimContext) -> Doubt | None:
    """The finding if canaries differ from each other, or are shorter than declared: some were lost, or count for more."""
    groups = [scores for scores in rungs if scores.rung == "known-others"] or [
        scores for scores in rungs if scores.rung == "known-round"
    ]
    if not groups:
        return None
    signal = NoiseSignal.of(groups)
    spread, limit = signal.spread(groups)
    count = sum(scores.observed.size for scores in groups)
    if spread > limit:
        excess = spread * spread - 1
        lost = count * excess / (signal.mean_square + excess) if signal.beta > 0 else 0.0
        return UnevenScores(spread=spread, most_spread=limit, canaries=count, canaries_lost=round(lost))
    rounds = context.run.rounds
    if rounds is None or not rounds.declared:
        return None
    length, error = rounds.length
    if length < MIN_LENGTH_SHARE and length + 4 * error < 1:
        return ShortCanaries(length=length, length_error=error)
    return None


def _more_often(context: ClaimContext) -> str | None:
    """A note if canaries took part more often than the claim states."""
    claim, times = context.claim, context.run.presentations
    if claim.participations is None or claim.sensitivity is not None or times <= claim.participations:
        return None
    return (
        f"the claim is about a client that takes part {times_of(claim.participations)}; canaries took part up to "
        f"{times_of(times)}, and for a client who does the claim's noise means an epsilon of "
        f"{context.implied_for(times):.3g}"
    )
