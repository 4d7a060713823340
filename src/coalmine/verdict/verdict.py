"""Verdicts on a claim: PASS, VIOLATION or UNDERPOWERED."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.estimators.amplification import amplified_epsilon
from coalmine.estimators.bounds import bound_of
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.estimators.planning import canaries_for_power, detectable_mean, power_against_claim
from coalmine.estimators.sampling import Sampling
from coalmine.evidence import levels
from coalmine.evidence.gauges.coordinate_gauge import COUNTS, EXTREMES
from coalmine.evidence.gauges.gauge import TRAINING, Gauge
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_schedule import NoiseSchedule
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.evidence.stated_noise import RoundScores, StatedNoise
from coalmine.measure.settings import FEWEST
from coalmine.verdict.claim import LARGEST_CLAIM, Claim
from coalmine.verdict.reasons import reason, times_of
from coalmine.verdict.round_limits import (
    RoundLimits,
    alike,
    composed_epsilon,
    expected_means,
    pessimistic_limits,
    rounds_signal,
    shared_means,
)

# A true claim is called VIOLATION in at most 1 % of runs: evidence/levels.py adds up the levels of all tests.
TEST_LEVEL = levels.TEST_LEVEL
BOUND_LEVEL = levels.BOUND_LEVEL
BOUND_CONFIDENCE = 1 - BOUND_LEVEL / 5  # on each of five rungs
SCAN_LEVEL = levels.SCAN_LEVEL
POWER = 0.9
KNOWN = ("known-round", "known-others")
FEWEST_STDS, LOUD_STDS = (
    2.0,
    4.0,
)  # stds by which canaries must be detected; stds at which they cannot be missed if the claim is exact
DETECTED, UNDETECTED_LEVEL = 0.5, 1e-4  # below this share of the claimed signal, at this level, there is a note
ROUNDED = 1.005  # printed epsilons are rounded: a claim is refuted only beyond this factor
WEAKER = 0.9  # share of the usual stated noise; rounds below it state little noise
SHORT = 0.95  # share of the declared norm; canaries with a smaller one were lost or shortened
LARGEST_FACTOR, FACTOR_STEP = 16.0, 1.25  # of the search for the noise at twice the claim: largest factor, and step
EXCLUDED_LEVEL = 0.01  # level at which scores exclude a noise multiplier that the stated noise suggests
# Gauges that only the amount of noise moves.
LAW = ("shape", "distribution", "tails")  # gauges of the noise's law in all coordinates together
LENGTHS = ("noise", "difference", "residual", "pooled residual", "parts of blocks")


class Outcome(StrEnum):
    """The outcome of a verdict: a string, which prints as one."""

    PASS = "PASS"
    VIOLATION = "VIOLATION"
    UNDERPOWERED = "UNDERPOWERED"


PASS, VIOLATION, UNDERPOWERED = Outcome.PASS, Outcome.VIOLATION, Outcome.UNDERPOWERED


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on a claim, and its facts; `reason` is the sentence made of them.

    `code` is the reason in one word, for programs: for a VIOLATION "bound", "mean", "round", "stated", "gauge" or, for an
    alarm during training, "evidence"; for a PASS "power"; for UNDERPOWERED what is missing. `rung` is the one that decided;
    None if a gauge did. Facts that the reason does not use are None.
    """

    outcome: Outcome
    code: str = ""
    rung: str | None = None
    p_value: float | None = None
    level: float | None = None  # level of the test
    score: float | None = None  # mean score per presentation
    claimed_score: float | None = None  # mean score that the claim implies
    stds: float | None = None  # standard deviations by which the mean score lies above 0
    lower_bound: float | None = None
    confidence: float | None = None  # confidence level of the lower bound
    ceiling: float | None = None  # largest lower bound that this many scores can give
    claimed_epsilon: float | None = None  # epsilon that the lower bound was compared with
    power: float | None = None  # power against twice the claim
    canaries: int | None = None
    canaries_needed: int | None = None  # None if the power is too small: no number of canaries is enough
    participations: int | None = None
    claimed_noise: float | None = None  # noise multiplier that the claim needs
    measured_noise: float | None = None  # noise multiplier that was measured or stated
    noise_left: float | None = None  # upper limit, as a share of the stated noise
    epsilon: float | None = None  # epsilon that follows for the client of the claim
    gauge: str | None = None  # name of the deciding gauge
    reading: tuple[float, float] | None = None  # smallest and largest value of that gauge
    limits: tuple[float, float] | None = None  # limits of that gauge
    rounds: int | None = None  # number of rounds concerned
    first_round: int | None = None  # first of those rounds
    factor: float | None = None  # factor by which `others` must be multiplied
    spread: float | None = None  # std of the canaries' scores, over that of the noise
    most_spread: float | None = None  # largest spread if all canaries count equally
    canaries_lost: int | None = None
    length: float | None = None  # norm of the canaries, over the declared one
    length_error: float | None = None
    correlated: bool | None = None  # whether the noise is correlated
    leg: str | None = None  # leg of a verdict on an amplified claim: accounting, noise or sampling
    epsilon_range: tuple[float, float] | None = None  # range that the accountant gives for a scheme
    epsilon_kind: str | None = None  # kind of the accountant's figure: upper bound, range or estimate
    accountant: str | None = None
    adjacency: str | None = None
    scheme: str | None = None  # claimed sampling scheme
    seen: str | None = None  # pattern of the sampler, as in sampler_tests.MEANING
    seen_scheme: str | None = None  # the scheme to account for instead
    test: str | None = None  # name of the sampler test with the smallest p-value
    picks: int | None = None  # number of times that the sampler picked a canary
    rate: float | None = None  # rate of those picks
    cohorts_known: bool | None = None  # whether cohort sizes were given
    detectable_rate: float | None = None  # rate that would have been detected with probability `power`
    detectable_epsilon: float | None = None  # epsilon that would have been detected with probability `power`
    odds: float | None = None  # likelihood ratio of the scores: less noise than claimed against the claimed noise
    item: str | None = None  # audited item that the pipeline itself saw to be not as claimed
    detail: str | None = None  # what the pipeline saw
    evidence: tuple[str, ...] = ()  # other rungs and gauges with the same outcome

    @property
    def reason(self) -> str:
        """The verdict's reason in one sentence."""
        return reason(self)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that are not None, by name."""
        named = ("outcome", "code", "rung")
        return {name: value for name, value in vars(self).items() if name not in named and value not in (None, ())}

    def to_dict(self) -> dict[str, Any]:
        """Outcome, code, rung, the facts, and the sentence made of them."""
        return {
            "verdict": str(self.outcome),
            "reason": self.reason,
            "reason_code": self.code,
            "decided_by": self.rung,
            "facts": {name: list(value) if isinstance(value, tuple) else value for name, value in self.facts.items()},
        }


LEGS = ("accounting", "noise", "sampling")  # of a claim amplified by sampling
NO_VERDICT = dict.fromkeys(("verdict", "reason", "reason_code", "decided_by", "facts"))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence of a verdict besides scores and gauges.

    `planned` is the number of presentations of the audit's own schedule; None if the pattern is the user's own or rounds
    were not observed. `presentations` is the largest observed number of presentations. `most_hidden` bounds the real
    clients' part of a round, ‖X‖/(C√d). `without_others` and `without_noise` count rounds in which these were not given.
    `schedule` is that of the stated noise if it varies.
    `correlated` means that noise is correlated between rounds. `vouched` means that the caller vouches for `others`,
    although no stated noise can confirm it.
    """

    delta: float
    planned: int | None
    presentations: int
    rounds: RoundScores | None = None
    stated: StatedNoise | None = None
    schedule: NoiseSchedule | None = None
    without_others: int = 0
    without_noise: int = 0
    most_hidden: float | None = None
    correlated: bool = False
    vouched: bool = False

    def exposure_of(self, times: int) -> float:
        """Σ(reference/z_t)² over the `times` rounds with the least noise: `times` if all rounds state the same."""
        return float(times) if self.schedule is None else self.schedule.exposure(times)


def judge(
    claim: Claim,
    rungs: list[Scores],
    gauges: list[Gauge],
    evidence: Evidence,
    *,
    sampled: tuple[float, Sampling] | None = None,
) -> tuple[Verdict, dict[str, Verdict], list[str]]:
    """The verdict on the run, that of each rung, and notes; a true claim is called VIOLATION in at most 1 % of runs.

    For an amplified claim, `sampled` is the noise multiplier that it needs and its scheme, and the verdict is about the
    noise alone; the rungs that do not know the rounds are compared with the claim itself.
    """
    names = list(dict.fromkeys(scores.rung for scores in rungs))
    case = case_of(claim, rungs, gauges, evidence, sampled)
    case = replace(case, bound_level=BOUND_LEVEL / max(len(names), 5))
    by_rung = {name: _judge_rung(name, [s for s in rungs if s.rung == name], case) for name in names}
    notes = [note for note in (_undetected(rungs, case), _more_often(case), *_less_noise(gauges, case)) if note]
    judged = {name: verdict for name, verdict in by_rung.items() if sampled is None or name in KNOWN}
    return _judge_run(judged, rungs, gauges, case), by_rung, notes


def judge_unclaimed(rungs: list[Scores], gauges: list[Gauge], evidence: Evidence) -> Verdict:
    """The verdict if nothing was claimed: the noise that the rounds state is then the only promise, and PASS impossible."""
    nothing = Verdict(outcome=UNDERPOWERED, code="no claim")
    stated = evidence.stated
    if stated is None or evidence.correlated:
        return nothing
    times = evidence.planned or max(evidence.presentations, 1)
    usual = float(np.median(stated.multipliers * stated.low))
    if not 0 < usual < math.inf:
        return nothing
    epsilon = float(mechanism_epsilon(usual / math.sqrt(evidence.exposure_of(times)), delta=evidence.delta))
    if not 0 < epsilon <= LARGEST_CLAIM:
        return nothing
    verdict, _, _ = judge(Claim(epsilon, participations=times), rungs, gauges, evidence)
    return replace(verdict, code="less noise", detail=verdict.code) if verdict.outcome == VIOLATION else nothing


def _undetected(rungs: list[Scores], case: "Case") -> str | None:
    """A note if an attacker who knows all other updates measures far less of the canaries than the claim allows.

    Not a verdict: there may be more noise than claimed. The canaries may also not be in the rounds. Nothing else would show
    that, since then there is no excess.
    """
    groups = [scores for scores in rungs if scores.rung == "known-others"]
    if all(np.ptp(scores.observed) == 0 for scores in groups):
        return None
    signal = NoiseSignal.of(groups)
    claimed = 1 / case.noise
    if signal.beta >= DETECTED * claimed or 1 - signal.p_value(claimed) > UNDETECTED_LEVEL:
        return None
    return (
        f"known-others: mean score per presentation {signal.beta:.3g}, far below the {claimed:.3g} that the claim implies: "
        "either there is much more noise than claimed, or the canaries were not in the rounds as stated (made from another "
        "seed, lost, or clipped on their way)"
    )


def case_of(
    claim: Claim,
    rungs: list[Scores],
    gauges: list[Gauge],
    evidence: Evidence,
    sampled: tuple[float, Sampling] | None,
) -> "Case":
    """The case by which every rung and gauge is judged; arguments as for `judge`."""
    strongest = None
    if evidence.correlated:
        strengths = [s.largest_strength for s in rungs if s.largest_strength is not None]
        strongest = max(strengths, default=(claim.sensitivity or 1.0) ** 2)
    times = claim.participations or evidence.planned
    explicit = times is not None or claim.sensitivity is not None or evidence.correlated
    exposure = evidence.exposure_of(times or 1)
    if sampled is None:
        noise = _claimed_noise(claim, times or 1, strongest, exposure, evidence.delta)
    else:  # a client may be in any of the rounds
        noise, times, explicit = sampled[0], sampled[1].total_rounds, True
    return Case(
        claim,
        noise,
        times if explicit else None,
        max(evidence.presentations, times or 1),
        strongest,
        evidence,
        noise_seen=max((float(np.median(gauge.values)) for gauge in gauges if gauge.name == "residual"), default=1.0),
        shortest=min((gauge.smallest for gauge in gauges if gauge.name == "residual"), default=1.0),
        others_wrong=next((g.largest for g in gauges if g.name == "others" and g.status != "ok"), None),
        sampling=None if sampled is None else sampled[1],
    )


def _claimed_noise(claim: Claim, times: int, strongest: float | None, exposure: float, delta: float) -> float:
    """The noise multiplier that the claim implies, in the reference of the rounds' schedule if their noise varies."""
    if claim.sensitivity is None and strongest is None:
        noise = float(mechanism_noise(claim.epsilon, delta=delta, participations=times))
        return noise if exposure == times else noise * math.sqrt(exposure / times)
    if claim.sensitivity is None and claim.participations is not None:
        raise ValueError(
            "under correlated noise the number of participations does not determine a client's exposure: give the claim its "
            "sensitivity, or omit participations to claim epsilon for the most exposed canary"
        )
    sensitivity = math.sqrt(strongest or 1.0) if claim.sensitivity is None else claim.sensitivity
    return sensitivity * math.sqrt(exposure / times) * float(mechanism_noise(claim.epsilon, delta=delta))


@dataclass(frozen=True)
class Case:
    """The case by which every rung is judged: the claim, its noise multiplier, and the client's participations.

    `times` is None if the participations are unknown. Then the noise multiplier is that of one participation, the least that
    the claim can mean, so that a VIOLATION contradicts every interpretation of the claim. `strongest` is the most exposed
    canary's ‖Cu‖² under correlated noise. `noise_seen` and `shortest` are the median and the smallest reading of the
    residual gauge, and `others_wrong` is the factor by which `others` is off. `sampling` is the scheme of an amplified
    claim.
    """

    claim: Claim
    noise: float
    times: int | None
    presentations: int
    strongest: float | None
    evidence: Evidence
    bound_level: float = BOUND_LEVEL
    noise_seen: float = 1.0
    shortest: float = 1.0
    others_wrong: float | None = None
    sampling: Sampling | None = None

    @property
    def delta(self) -> float:
        return self.evidence.delta

    @property
    def explicit(self) -> bool:
        return self.times is not None or self.claim.sensitivity is not None or self.evidence.correlated

    @property
    def needed_noise(self) -> float:
        """The noise multiplier that the claim needs if the client's rounds all have equal noise: from the claim alone."""
        if self.sampling is not None or self.evidence.schedule is None:
            return self.noise
        times = self.times or 1
        return self.noise / math.sqrt(self.evidence.exposure_of(times) / times)

    @property
    def in_every_round(self) -> bool:
        """Whether the claim is about a client who takes part in every observed round: then one pooled factor is valid."""
        rounds = self.evidence.rounds
        return self.sampling is None and rounds is not None and (self.times or 1) >= len(rounds.numbers)

    def epsilon(self, presentations: int | None, strength: float | None = None) -> float:
        """The claimed epsilon for a client with these presentations, or with this strength."""
        if self.sampling is not None and presentations is None:
            return self.claim.epsilon
        if self.strongest is not None:
            return float(mechanism_epsilon(self.noise / math.sqrt(strength or self.strongest), delta=self.delta))
        if self.evidence.schedule is not None:
            exposure = strength or self.evidence.exposure_of(presentations or self.presentations)
            return float(mechanism_epsilon(self.noise / math.sqrt(exposure), delta=self.delta))
        times = presentations or self.presentations
        return float(mechanism_epsilon(self.noise, delta=self.delta, participations=times))

    def composed(self, inverse: npt.NDArray[np.float64]) -> float:
        """Epsilon of the claim's own client if round t has noise multiplier 1/inverse[t]: the accountant's lower end."""
        times = self.times or 1
        exposure = (self.claim.sensitivity or math.sqrt(times)) ** 2
        return composed_epsilon(inverse, delta=self.delta, times=times, exposure=exposure, sampling=self.sampling)

    def implied(self, multiplier: float) -> float:
        """The epsilon of the claim's own client under another noise multiplier in all of its rounds."""
        if multiplier <= 0 or math.isinf(multiplier):
            return 0.0 if multiplier > 0 else math.inf
        if self.sampling is not None:
            return amplified_epsilon(multiplier, replace(self.sampling, strengths=()), self.delta).low
        exposure = self.claim.sensitivity or math.sqrt(self.strongest or self.times or 1)
        return float(mechanism_epsilon(multiplier / exposure, delta=self.delta))

    def refutes(self, multiplier: float) -> bool:
        """Whether this noise multiplier in all rounds implies more than the claimed epsilon."""
        return self.exceeded(self.implied(multiplier))

    def exceeded(self, epsilon: float) -> bool:
        """Whether an epsilon is more than the claimed one, which may be rounded."""
        return epsilon > ROUNDED * self.claim.epsilon

    def permits(self, multiplier: float) -> bool:
        """Whether the claim holds with this noise multiplier in all rounds."""
        if self.sampling is None or multiplier <= 0:
            return not self.refutes(multiplier)
        plain = replace(self.sampling, strengths=())
        return amplified_epsilon(multiplier, plain, self.delta).high <= ROUNDED * self.claim.epsilon


def _judge_run(by_rung: dict[str, Verdict], rungs: list[Scores], gauges: list[Gauge], case: Case) -> Verdict:
    violated = [name for name, verdict in by_rung.items() if verdict.outcome == VIOLATION]
    proofs = _proofs(gauges, case)
    if violated:
        also = violated[:-1] + [f"the {gauge.name} gauge" for gauge in proofs]
        return replace(by_rung[violated[-1]], evidence=tuple(also))
    if proofs:
        return proof(proofs[0], case)
    known = [by_rung[name] for name in KNOWN if name in by_rung]
    if not known:
        return Verdict(outcome=UNDERPOWERED, code="no canaries")
    barred = _barred(rungs, gauges, case)
    if barred is not None:
        return known[-1] if known[-1].code == "undetected" and barred.code in ("others", "noise_std") else barred
    passed = [name for name, verdict in by_rung.items() if verdict.outcome == PASS]
    if passed:
        return by_rung[passed[-1]]
    return known[-1]


def _proofs(gauges: list[Gauge], case: Case) -> list[Gauge]:
    """The gauges that refute the claim. Those of single coordinates assume a Gaussian law, so another law voids them."""
    gaussian = all(gauge.status == "ok" for gauge in gauges if gauge.name in LAW)
    return [gauge for gauge in gauges if proves(gauge, case) and (gaussian or gauge.name not in (EXTREMES, COUNTS))]


def proves(gauge: Gauge, case: Case) -> bool:
    """Whether a gauge proves that there is too little noise for the claim."""
    if gauge.status != "low" or gauge.noise_left is None or gauge.noise_left >= 1:
        return False
    if gauge.noise_left < 1e-3:
        return True
    if not case.explicit:
        return False
    stated = case.evidence.stated
    if stated is None:
        return False
    return case.exceeded(_weakened(gauge, stated, case))


def _weakened(gauge: Gauge, stated: StatedNoise, case: Case) -> float:
    """Epsilon if only the gauge's share of the stated noise is left: in the flagged rounds, or in all."""
    assert gauge.noise_left is not None
    if case.evidence.correlated:
        return case.implied(stated.least(gauge.flagged) * gauge.noise_left * stated.high)
    inverse = 1 / (stated.multipliers * stated.high)
    if not gauge.flagged:  # over all rounds: the rounds with the most noise alone may lack it
        return case.composed(np.full(inverse.size, inverse.mean() / gauge.noise_left))
    return case.composed(np.where(np.isin(stated.numbers, gauge.flagged), inverse / gauge.noise_left, inverse))


def gauge_verdict(gauge: Gauge, outcome: Outcome) -> Verdict:
    """A verdict based on one gauge: its reading, its limits, and the rounds outside them."""
    return Verdict(
        outcome=outcome,
        code="gauge",
        gauge=gauge.name,
        reading=(gauge.smallest, gauge.largest),
        limits=gauge.limits,
        rounds=len(gauge.flagged) or None,
        first_round=gauge.flagged[0] if gauge.flagged else None,
    )


def proof(gauge: Gauge, case: Case) -> Verdict:
    """The verdict if a gauge refutes the claim."""
    stated, verdict = case.evidence.stated, gauge_verdict(gauge, VIOLATION)
    if not gauge.noise_left or gauge.noise_left < 1e-3 or stated is None:
        return verdict
    return replace(
        verdict,
        noise_left=gauge.noise_left,
        epsilon=_weakened(gauge, stated, case),
        measured_noise=stated.least(gauge.flagged) * gauge.noise_left * stated.high,
        claimed_noise=case.noise,
    )


def _less_noise(gauges: list[Gauge], case: Case) -> list[str]:
    """Notes on gauges that measure less noise than stated, although the claim still holds."""
    return [
        f"less noise than stated: the {gauge.name} gauge leaves at most {gauge.noise_left:.3g} of it; the claim allows that"
        for gauge in gauges
        if gauge.noise_left is not None and gauge.noise_left < 1 and _allowed(gauge, case)
    ]


def _allowed(gauge: Gauge, case: Case) -> bool:
    """Whether the claim allows a gauge's noise; only for gauges of norms, which are all that less noise changes."""
    lengths = gauge.name in LENGTHS or gauge.name.startswith("layer ")
    stated = case.evidence.stated
    if not lengths or gauge.status != "low" or stated is None or not case.explicit:
        return False
    least = min(gauge.smallest, gauge.noise_left or 0.0) * 0.98  # the limit's own uncertainty
    if gauge.name == "difference" and least < 0.9 * case.shortest:
        return False  # rounds differ by less than their noise, so noise is reused
    return case.permits(stated.least(gauge.flagged) * stated.low * least)


def _barred(rungs: list[Scores], gauges: list[Gauge], case: Case) -> Verdict | None:
    """The reason why there is no PASS although nothing refutes the claim; None if there is none."""
    if case.others_wrong is not None:
        return Verdict(outcome=UNDERPOWERED, code="others", factor=case.others_wrong)
    odd = [gauge for gauge in gauges if gauge.bars_pass and not _allowed(gauge, case)]
    untrained = [gauge for gauge in odd if gauge.name in TRAINING]
    if untrained and len(untrained) == len(odd):
        return Verdict(outcome=UNDERPOWERED, code="training", gauge=untrained[0].name)
    if odd:
        return _alarm(odd)
    if not case.explicit:
        return Verdict(
            outcome=UNDERPOWERED,
            code="participations",
            claimed_epsilon=case.claim.epsilon,
            participations=case.evidence.presentations,
        )
    gaps = _gaps(rungs, case.evidence)
    if gaps:
        return gaps
    uneven = _uneven(rungs, case)
    if uneven:
        return uneven
    stated = case.evidence.stated
    if stated is not None and not stated.exact and case.claim.sensitivity is None and not case.evidence.correlated:
        weakest = stated.weakest(case.times or 1)
        highest = case.composed(1 / (stated.multipliers * stated.high))
        if case.exceeded(highest) and not _excluded(weakest * stated.high, stated, case):
            return Verdict(outcome=UNDERPOWERED, code="stated", measured_noise=weakest, claimed_noise=case.needed_noise)
    return _weak_rounds(case)


def _gaps(rungs: list[Scores], evidence: Evidence) -> Verdict | None:
    """UNDERPOWERED if some rounds lack `others` or noise_std, so that known-others cannot confirm the claim."""
    if not any(scores.rung == "known-others" for scores in rungs) or evidence.vouched:
        return None
    for count, code in ((evidence.without_others, "others"), (evidence.without_noise, "noise_std")):
        if count:
            return Verdict(outcome=UNDERPOWERED, code=code, rounds=count)
    return None


def _excluded(multiplier: float, stated: StatedNoise, case: Case) -> bool:
    """Whether the scores in the rounds that state the least noise exclude a noise multiplier this small."""
    rounds = case.evidence.rounds
    if rounds is None or not rounds.residual:
        return False
    weak = stated.numbers[stated.multipliers < WEAKER * stated.usual]
    members = np.flatnonzero(np.isin(rounds.numbers, weak))
    if not members.size or set(weak.tolist()) - set(rounds.numbers[members].tolist()):
        return False
    signal = rounds_signal(rounds, members)
    return 1 - signal.p_value(1 / multiplier) < EXCLUDED_LEVEL


def _weak_rounds(case: Case) -> Verdict | None:
    """UNDERPOWERED if single rounds have less noise than they state, unless the claim holds with what they measure."""
    limits, rounds = _limits(case), case.evidence.rounds
    if limits is None or rounds is None or not limits.flagged.size:
        return None
    expected = expected_means(rounds, case.evidence.stated, 1 / case.noise)
    expected[limits.flagged] = np.maximum(rounds.means[limits.flagged], expected[limits.flagged])
    epsilon = case.composed(expected)
    if not case.exceeded(epsilon):
        return None
    return Verdict(
        outcome=UNDERPOWERED,
        code="weak rounds",
        rounds=len(limits.flagged),
        first_round=int(rounds.numbers[limits.flagged[0]]),
        p_value=limits.smallest_p,
        level=limits.level,
        epsilon=epsilon,
        claimed_epsilon=case.claim.epsilon,
    )


def _alarm(odd: list[Gauge]) -> Verdict:
    """The verdict if gauges are outside their limits but refute nothing."""
    gauge = next((gauge for gauge in odd if gauge.name == "rounding"), odd[0])
    long = gauge.name in ("residual", "pooled residual") and gauge.status == "warning"
    return replace(
        gauge_verdict(gauge, UNDERPOWERED),
        length=gauge.largest if long else None,
        evidence=tuple(other.name for other in odd if other is not gauge),
    )


def _uneven(rungs: list[Scores], case: Case) -> Verdict | None:
    """UNDERPOWERED if canaries differ from each other, or are shorter than declared: some were lost, or count for more."""
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
        return Verdict(
            outcome=UNDERPOWERED,
            code="uneven",
            spread=spread,
            most_spread=limit,
            canaries=count,
            canaries_lost=round(lost),
        )
    rounds = case.evidence.rounds
    if rounds is None or not rounds.declared:
        return None
    length, error = rounds.length
    if length < SHORT and length + 4 * error < 1:
        return Verdict(outcome=UNDERPOWERED, code="short", length=length, length_error=error)
    return None


def _judge_rung(name: str, groups: list[Scores], case: Case) -> Verdict:
    """The verdict on one rung by itself."""
    return replace(_rung_facts(name, groups, case), rung=name)


def _rung_facts(name: str, groups: list[Scores], case: Case) -> Verdict:
    stated = stated_too_little(case) if name in KNOWN else None
    if stated:  # no chance is involved
        return stated
    bound = _bound_above(groups, case)
    if bound:
        return bound
    if name not in KNOWN:
        return Verdict(outcome=UNDERPOWERED, code="weak")
    if all(np.ptp(scores.observed) == 0 for scores in groups):
        count = sum(scores.observed.size for scores in groups)
        return Verdict(outcome=UNDERPOWERED, code="constant", canaries=count, canaries_needed=FEWEST)
    signal = NoiseSignal.of(groups)
    p_value = signal.p_value(1 / case.noise)
    if p_value < TEST_LEVEL and _pooled(case):
        return Verdict(
            outcome=VIOLATION,
            code="mean",
            score=signal.beta,
            claimed_score=1 / case.noise,
            p_value=p_value,
            level=TEST_LEVEL,
            claimed_noise=case.noise,
            measured_noise=1 / signal.beta,
        )
    excess = _scanned(case) if name == _scored_rung(case) else None
    if excess:
        return excess
    if name == "known-others" and case.others_wrong is not None:
        # An error in `others` increases the residual and so lowers the scores: an excess is valid, a PASS is not.
        return Verdict(outcome=UNDERPOWERED, code="others", factor=case.others_wrong)
    verdict = _power_of(name, groups, case, signal)
    detected = signal.beta * math.sqrt(signal.weight)
    undetected = detected < FEWEST_STDS and not _explained(name, detected, signal.weight, case)
    if undetected and (verdict.outcome == PASS or verdict.code == "noise_std"):
        # an attacker who detects no canary would detect no fault either
        return Verdict(
            outcome=UNDERPOWERED, code="undetected", score=signal.beta, claimed_score=1 / case.noise, stds=detected
        )
    return verdict


def _pooled(case: Case) -> bool:
    """Whether one factor for all rounds refutes a claim: if they state similar noise, or the client is in all of them."""
    rounds = case.evidence.rounds
    return rounds is None or case.in_every_round or len(alike(rounds, case.evidence.stated)) == 1


def _scored_rung(case: Case) -> str | None:
    """The rung whose scores the single rounds have."""
    rounds = case.evidence.rounds
    if rounds is None:
        return None
    return "known-others" if rounds.residual else "known-round"


def _limits(case: Case) -> RoundLimits | None:
    rounds = case.evidence.rounds
    if rounds is None or case.evidence.correlated:
        return None
    return RoundLimits.of(
        rounds,
        case.evidence.stated,
        1 / case.noise,
        level=TEST_LEVEL,
        scan_level=SCAN_LEVEL if rounds.residual else 0.0,
    )


def _scanned(case: Case) -> Verdict | None:
    """VIOLATION if the noise that the scores of groups of rounds, or of single ones, leave at most exceeds the claim."""
    limits, rounds = _limits(case), case.evidence.rounds
    if limits is None or rounds is None or (not limits.flagged.size and _pooled(case)):
        return None
    epsilon = case.composed(limits.inverse)
    if not case.exceeded(epsilon):
        return None
    facts = Verdict(
        outcome=VIOLATION, code="composed", epsilon=epsilon, claimed_epsilon=case.claim.epsilon, level=TEST_LEVEL
    )
    alone = case.composed(limits.inverse[limits.flagged])
    if not limits.flagged.size or not case.exceeded(alone):
        return facts
    worst = max(limits.flagged, key=lambda index: limits.inverse[index])
    stated = expected_means(rounds, case.evidence.stated, 1 / case.noise)
    return replace(
        facts,
        code="round",
        score=float(rounds.means[worst]),
        claimed_score=float(stated[worst]),
        p_value=limits.smallest_p,
        level=limits.level,
        rounds=len(limits.flagged),
        first_round=int(rounds.numbers[limits.flagged[0]]),
    )


def stated_too_little(case: Case) -> Verdict | None:
    """VIOLATION if the rounds themselves state less noise than the claim needs.

    A claim with participations and a sensitivity is for a client that contributes more to these rounds than a canary.
    """
    stated = case.evidence.stated
    if stated is None or not stated.exact:
        return None
    if case.claim.sensitivity is not None and (case.claim.participations is None or case.evidence.correlated):
        return None
    weakest = stated.weakest(case.times or 1)  # once is the least that a claim can mean
    epsilon = case.composed(1 / stated.multipliers) if not case.evidence.correlated else case.implied(weakest)
    if not case.exceeded(epsilon):
        return None
    return Verdict(
        outcome=VIOLATION,
        code="stated",
        measured_noise=weakest,
        claimed_noise=case.needed_noise,
        epsilon=epsilon,
        claimed_epsilon=case.claim.epsilon,
        scheme=None if case.sampling is None else str(case.sampling),
    )


def _explained(name: str, detected: float, weight: float, case: Case) -> bool:
    """Whether the measured noise is enough to hide canaries that would be detected with the claimed noise.

    With the claimed noise, the mean score of a rung with enough power lies more than four standard deviations above 0.
    """
    expected = math.sqrt(weight) / (case.noise * case.noise_seen)
    return name == "known-others" and expected < LOUD_STDS and detected > -LOUD_STDS


def _bound_above(groups: list[Scores], case: Case) -> Verdict | None:
    """The verdict if the valid lower bound lies above the claim; groups share the level.

    A claim amplified by sampling is about every client, however often they were drawn. If the rounds are not known, only
    scores of all canaries count. If they are, the bound is about the noise: it is compared with the mechanism's epsilon.
    """
    if case.sampling is not None and groups[0].rung not in KNOWN:
        groups = [scores for scores in groups if scores.presentations is None]
    confidence = 1 - case.bound_level / max(len(groups), 1)
    for scores in groups:
        compared = scores.unobserved.size if scores.bound_null is None else FEWEST
        if min(scores.observed.size, compared) < FEWEST:
            continue
        null = scores.unobserved if scores.bound_null is None else scores.bound_null
        bound = bound_of(scores.bounded, null=null, delta=case.delta, confidence=confidence)
        claimed = case.epsilon(scores.presentations, scores.largest_strength)
        if bound > claimed:
            return Verdict(
                outcome=VIOLATION,
                code="bound",
                lower_bound=bound,
                confidence=confidence,
                claimed_epsilon=claimed,
                participations=scores.presentations,
            )
    return None


def _more_often(case: Case) -> str | None:
    """A note if canaries took part more often than the claim states."""
    claim, times = case.claim, case.evidence.presentations
    if claim.participations is None or claim.sensitivity is not None or times <= claim.participations:
        return None
    return (
        f"the claim is about a client that takes part {times_of(claim.participations)}; canaries took part up to "
        f"{times_of(times)}, and for a client who does the claim's noise means an epsilon of {case.epsilon(times):.3g}"
    )


def _power_of(name: str, groups: list[Scores], case: Case, signal: NoiseSignal) -> Verdict:
    """PASS if twice the claim would have been detected with 90 % probability, whatever real updates may hide.

    known-round sees the noise and the real clients' signal as one, so a bound on the signal must be known: a signal in place
    of missing noise looks the same. At worst it is the same in every round. known-others sees the noise alone if `others` is
    complete, which only the stated noise can show.
    """
    if name == "known-round" and case.strongest is not None:
        return Verdict(outcome=UNDERPOWERED, code="others", correlated=True)
    exposure = max(s.exposure for s in groups)
    count, epsilon = max(round(signal.weight / exposure), 1), case.epsilon(round(exposure), exposure)
    if name == "known-round" and case.evidence.most_hidden is None:
        return Verdict(outcome=UNDERPOWERED, code="others")
    if name == "known-others" and case.evidence.stated is None and not case.evidence.vouched:
        return Verdict(outcome=UNDERPOWERED, code="noise_std")
    hidden = (case.evidence.most_hidden or 0.0) if name == "known-round" else 0.0
    if not _pooled(case):
        alone = name == _scored_rung(case) and not hidden
        return _grouped_power(case, signal) if alone else Verdict(outcome=UNDERPOWERED, code="others")
    if case.sampling is not None:
        return _sampled_power(case, case.sampling, signal, hidden)
    settings = {"delta": case.delta, "level": TEST_LEVEL, "dilution": hidden, "null_dof": signal.dof}
    power = power_against_claim(count, epsilon, **settings)
    passes = power >= POWER
    return Verdict(
        outcome=PASS if passes else UNDERPOWERED,
        code="power",
        power=power,
        participations=case.times if passes else None,
        canaries=count,
        canaries_needed=None if passes else canaries_for_power(epsilon, power=POWER, **settings),
        claimed_noise=case.noise,
        measured_noise=1 / signal.beta if signal.beta > 0 else None,
    )


def _grouped_power(case: Case, signal: NoiseSignal) -> Verdict:
    """PASS if twice the claim would have been refuted with 90 % probability by rounds that state different noise."""
    rounds, stated = case.evidence.rounds, case.evidence.stated
    assert rounds is not None
    means = shared_means(rounds, stated, expected_means(rounds, stated, 1 / case.noise))
    faulty = _means_at(2 * case.claim.epsilon, means, case)
    reached, passes = math.inf, False
    if faulty is not None:
        passes = case.exceeded(case.composed(pessimistic_limits(rounds, stated, faulty, TEST_LEVEL, POWER)))
        reached = 2 * case.claim.epsilon if passes else math.inf
    return Verdict(
        outcome=PASS if passes else UNDERPOWERED,
        code="sampled power",
        power=POWER,
        detectable_epsilon=reached,
        claimed_epsilon=case.claim.epsilon,
        canaries=round(float(rounds.counts.sum())),
        claimed_noise=case.noise,
        measured_noise=1 / signal.beta if signal.beta > 0 else None,
    )


def _means_at(epsilon: float, means: npt.NDArray[np.float64], case: Case) -> npt.NDArray[np.float64] | None:
    """Mean scores in proportion to these that compose to an epsilon; None if none up to LARGEST_FACTOR do.

    log ε is almost linear in the log of the factor, between two factors as close as these.
    """
    factor, reached = 1.0, case.composed(means)
    while factor < LARGEST_FACTOR and reached > 0:
        following = case.composed(factor * FACTOR_STEP * means)
        if following >= epsilon:
            share = math.log(epsilon / reached) / math.log(following / reached)
            return np.asarray(factor * FACTOR_STEP ** min(share, 1.0) * means)
        factor, reached = factor * FACTOR_STEP, following
    return None


def _sampled_power(case: Case, sampling: Sampling, signal: NoiseSignal, hidden: float) -> Verdict:
    """PASS if noise at which the accountant's epsilon is twice the claim would have been detected with 90 % probability."""
    settings = {"level": TEST_LEVEL, "power": POWER, "null_dof": signal.dof}
    faulty = detectable_mean(signal.weight, 1 / case.noise, **settings)
    left = None if faulty is None else 1 / faulty**2 - hidden**2  # the squared noise that gives such scores
    reached = math.inf if left is None or left <= 0 else amplified_epsilon(math.sqrt(left), sampling, case.delta).high
    passes = reached <= 2 * ROUNDED * case.claim.epsilon
    return Verdict(
        outcome=PASS if passes else UNDERPOWERED,
        code="sampled power",
        power=POWER,
        detectable_epsilon=reached,
        claimed_epsilon=case.claim.epsilon,
        canaries=round(signal.weight),
        claimed_noise=case.noise,
        measured_noise=1 / signal.beta if signal.beta > 0 else None,
    )
