"""Derives the result from the log of an audit, in one pass: for `Audit.result`, and for `coalmine verify`."""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from coalmine.argument_checks import count_of, nonnegative, short_repr, whole_number
from coalmine.estimators.sampling import FixedSize, Poisson, Sampling
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.evidence.gauges.gauge_reader import GaugeReader
from coalmine.evidence.gaussian_gate import BY_COHORT, NO_SAMPLER, OTHER_SAMPLER, GaussianGate
from coalmine.evidence.ladder import LadderReader, Scores, presented_times
from coalmine.evidence.noise_schedule import NoiseSchedule
from coalmine.evidence.stated_noise import StatedReader
from coalmine.evidence.unknown_round import RUNG as UNKNOWN
from coalmine.evidence.unknown_round import UnknownRound, UnknownRoundReader, stated_multiplier
from coalmine.evidence.views import Reader, read_log
from coalmine.log.recorded import RecordedRounds
from coalmine.measure.round_facts import MOST_CLIENTS
from coalmine.measure.settings import FEWEST, Settings, presentation_counts
from coalmine.result.audit_result import Adversary, AuditResult, Row, SmallGroup
from coalmine.result.rows import make_headline, make_row, make_sampled_row, sampled_headline, without_bound
from coalmine.verdict.alarm import Alarm, AlarmReader
from coalmine.verdict.amplified_claim import (
    SAMPLING,
    SampledClaim,
    judge_sampled,
    moves_in_groups,
    read_claim,
    with_schedule,
)
from coalmine.verdict.claim import Claim
from coalmine.verdict.claim_context import ClaimContext, RunFacts, context_of
from coalmine.verdict.coverage import AuditedItem, CoverageReader, audited_items, checked_items
from coalmine.verdict.findings.amplified import DividedByCohort, SampledAsClaimed, SamplerNotObserved, TooFewPicks
from coalmine.verdict.findings.missing import PipelineDiffers
from coalmine.verdict.mechanism_claim import judge, judge_unclaimed
from coalmine.verdict.outcome import PASS, VIOLATION
from coalmine.verdict.replayed_rows import judge_rows
from coalmine.verdict.scored_records import judge_records
from coalmine.verdict.verdict import Verdict

LEAST_NOISE = 1e-3  # noise multiplier below which every score is certain
MOST_ROWS = 3  # most rows of a rung if sampling decides how often a canary is presented
BEFORE = ("final", "final-update", "all-iterates")  # rungs below unknown-round


def derive_result(
    log: RecordedRounds,
    settings: Settings,
    *,
    claim: Claim | None = None,
    analytical_epsilon: float | None = None,
    clients: int | None = None,
    audited: Iterable[AuditedItem] = (),
    watched: bool = False,
    others_complete: bool = False,
) -> AuditResult:
    """The result that follows from a log; `coalmine verify` derives it again.

    `watched` means that the alarm was checked during training: then a claim that it refuted is refuted.
    `others_complete` means that no client is missing from `others`: a claim can then be confirmed without stated noise.
    """
    clients = None if clients is None else _checked_clients(clients)
    analytical_epsilon = None if analytical_epsilon is None else _checked_epsilon(analytical_epsilon)
    audited = checked_items(audited)
    claim = read_claim(claim, settings, max(log.numbers, default=0))
    schedule = NoiseSchedule.of(log.observed, settings)
    rung_reader, gauge_reader = LadderReader(log, settings), GaugeReader(settings, len(log.numbers), final=log.final)
    stated, facts = StatedReader(settings), CoverageReader()
    sampled = _sampled(claim, log, settings, schedule)
    hidden, why = _unknown_rounds(log, settings, sampled, schedule)
    alarms = AlarmReader(settings, claim) if watched and claim is not None else None
    more_readers = [reader for reader in (hidden, alarms) if reader is not None]
    read_log(log, settings, rung_reader, gauge_reader, stated, facts, *more_readers)
    gauges = gauge_reader.results()
    unknown = None if hidden is None else hidden.reading()
    rungs = _in_order(rung_reader.scores(log.final), unknown)
    run = replace(_run_facts(log, settings, stated, clients), vouched=others_complete, schedule=schedule)
    participations = run.planned if claim is None else claim.participations or run.planned
    sensitivity = None if claim is None else claim.sensitivity
    if claim is not None and claim.moved != 1 and participations:
        sensitivity = claim.moved * math.sqrt(participations)
    verdict, by_rung, legs, notes = _judged(claim, sampled, rungs, gauges, run, log, settings, stated)
    notes = [*([] if why is None else [why]), *notes]
    alarm = None if alarms is None else alarms.alarm
    if alarm is not None:
        verdict = verdict if verdict is not None and verdict.outcome == VIOLATION else alarm.verdict
        notes.append(str(alarm))
    verdict = _with_rows(
        verdict, audited, None if claim is None else context_of(claim, rungs, gauges, run, _needs(sampled))
    )
    verdict = _with_records(verdict, audited, claim, max(log.numbers, default=0))
    verdict = _without_pass(verdict, audited)
    notes += _equal_noise(claim, run) + gauge_reader.notes()
    notes += _one_look(log, settings, verdict, alarm)
    gate = GaussianGate.of(gauges, gauge_reader.rounds, sampler=_sampler_doubt(legs))
    adversaries, more, small_groups = _adversaries(rungs, by_rung, unknown, settings, gate)
    notes += more
    if UNKNOWN in adversaries and moves_in_groups(legs):
        adversaries[UNKNOWN] = without_bound(adversaries[UNKNOWN])
    observed = len(log.observed)
    return AuditResult(
        settings=settings,
        rounds=observed,
        skipped=len(log.numbers) - observed,
        adversaries=adversaries,
        gauges=tuple(gauges),
        analytical_epsilon=analytical_epsilon,
        claim=claim,
        clients=clients,
        verdict=verdict,
        legs=legs,
        headline=sampled_headline(adversaries.get(UNKNOWN))
        if sampled is not None and UNKNOWN in adversaries
        else make_headline(
            rungs,
            settings,
            gate,
            rung=None if verdict is None else verdict.rung,
            participations=participations,
            sensitivity=sensitivity,
        ),
        audited=audited_items(
            facts,
            gauge_reader.rounds,
            gauges,
            unobserved=max((settings.rounds or max(log.numbers, default=0)) - len(log.numbers), 0),
            participations=None if claim is None else claim.participations,
            planned=run.planned,
            presentations=run.presentations,
            sampling=legs.get("sampling"),
            given=audited,
        ),
        log_notes=tuple(notes),
        small_groups=tuple(small_groups),
        watched=watched,
        alarm=alarm,
    )


def _equal_noise(claim: Claim | None, run: RunFacts) -> list[str]:
    """The assumption about rounds that do not state their noise, if there are several."""
    several = run.rounds is not None and len(run.rounds.numbers) > 1
    if claim is None or not run.without_noise or run.vouched or run.correlated or not several:
        return []
    return [
        f"the noise is taken to be equal in all rounds, as {count_of(run.without_noise, 'round')} did not state it: if it "
        "changes, pass noise_std in every round"
    ]


def _needs(sampled: SampledClaim | None) -> tuple[float, Sampling] | None:
    """The noise multiplier that an amplified claim needs, and its scheme."""
    return None if sampled is None else (sampled.required_noise, sampled.sampling)


def _with_rows(verdict: Verdict | None, audited: Iterable[AuditedItem], context: ClaimContext | None) -> Verdict | None:
    """The verdict with what replayed rows show of the claim."""
    item = next((item for item in audited if item.name == "rows"), None)
    if verdict is None or context is None or item is None or item.replayed is None:
        return verdict
    return judge_rows(verdict, item.replayed, context)


def _with_records(
    verdict: Verdict | None, audited: Iterable[AuditedItem], claim: Claim | None, rounds: int
) -> Verdict | None:
    """The verdict with what outputs of the model tell about inserted records."""
    scored = next((item.scored for item in audited if item.scored is not None), None)
    if verdict is None or claim is None or scored is None:
        return verdict
    return judge_records(verdict, scored, claim, rounds)


def _replaced(claim: Claim | None, judged: Claim) -> list[str]:
    """How a replace-one claim is judged that counts sampling."""
    if claim is None or judged is claim:
        return []
    unit = claim.unit or "client"
    return [
        f"epsilon {claim.epsilon:.4g} if one {unit} is replaced needs the noise that has epsilon {judged.epsilon:.4g} if "
        f"one {unit} is added or removed, which is what canaries show: the legs judge that"
    ]


def _checked_clients(clients: int) -> int:
    number = whole_number("clients", clients, minimum=0)
    if number > MOST_CLIENTS:
        raise ValueError(f"clients must be at most {MOST_CLIENTS:,}, got {short_repr(clients)}")
    return number


def _checked_epsilon(epsilon: float) -> float:
    is_infinite = isinstance(epsilon, float) and epsilon == math.inf
    return epsilon if is_infinite else nonnegative("analytical_epsilon", epsilon)


def _judged(
    claim: Claim | None,
    sampled: SampledClaim | None,
    rungs: list[Scores],
    gauges: list[GaugeResult],
    run: RunFacts,
    log: RecordedRounds,
    settings: Settings,
    stated: StatedReader,
) -> tuple[Verdict | None, dict[str, Verdict], dict[str, Verdict], list[str]]:
    """The verdict on the claim, that of each rung, those of an amplified claim's parts, and notes."""
    if claim is None:
        return judge_unclaimed(rungs, gauges, run), {}, {}, []
    if sampled is not None:
        verdict, by_rung, legs, notes = judge_sampled(sampled, rungs, gauges, run, log, settings, stated.clip_norms)
        return verdict, by_rung, legs, notes + _replaced(claim, sampled.claim)
    verdict, by_rung, notes = judge(claim, rungs, gauges, run)
    return verdict, by_rung, {}, notes


def _without_pass(verdict: Verdict | None, audited: Iterable[AuditedItem]) -> Verdict | None:
    """The verdict; UNDERPOWERED instead of PASS if the pipeline states that an item failed."""
    failed = next((item for item in audited if item.status == "failed"), None)
    if failed is None or verdict is None or verdict.outcome != PASS:
        return verdict
    return Verdict(finding=PipelineDiffers(item=failed.name, detail=failed.detail))


def _one_look(log: RecordedRounds, settings: Settings, verdict: Verdict | None, alarm: Alarm | None) -> list[str]:
    """A note on a verdict in the middle of a run: its error rate holds for one look, not for many."""
    last = max(log.numbers, default=0)
    if verdict is None or alarm is not None or settings.rounds is None or last >= settings.rounds:
        return []
    return [
        f"{last} of {settings.rounds} rounds were observed: this verdict's error rate holds for one look, decided on "
        "beforehand. To look after every round, ask for the alarm: audit.alarm(), or `coalmine watch`"
    ]


def derive_scores(
    log: RecordedRounds,
    settings: Settings,
    *,
    claim: Claim | None = None,
    reader: LadderReader | None = None,
    beside: Iterable[Reader] = (),
) -> list[Scores]:
    """The scores of every rung behind the result that follows from a log, including unknown-round.

    The readers `beside` take each round in the same pass, after the ladder's own `reader`.
    """
    reader = LadderReader(log, settings) if reader is None else reader
    claim = read_claim(claim, settings, max(log.numbers, default=0))
    schedule = NoiseSchedule.of(log.observed, settings)
    hidden, _ = _unknown_rounds(log, settings, _sampled(claim, log, settings, schedule), schedule)
    read_log(log, settings, reader, *([] if hidden is None else [hidden]), *beside)
    return _in_order(reader.scores(log.final), None if hidden is None else hidden.reading())


def _sampled(
    claim: Claim | None, log: RecordedRounds, settings: Settings, schedule: NoiseSchedule | None
) -> SampledClaim | None:
    if claim is None or not claim.amplified:
        return None
    return SampledClaim.of(claim, delta=settings.delta, rounds=len(log.numbers), schedule=schedule)


def _in_order(rungs: list[Scores], unknown: UnknownRound | None) -> list[Scores]:
    """The scores in the order of the rungs, with those of unknown-round inserted."""
    index = next((n for n, scores in enumerate(rungs) if scores.rung not in BEFORE), len(rungs))
    return [*rungs[:index], *([] if unknown is None else [unknown.scores]), *rungs[index:]]


def _adversaries(
    rungs: list[Scores],
    by_rung: dict[str, Verdict],
    unknown: UnknownRound | None,
    settings: Settings,
    gate: GaussianGate,
) -> tuple[dict[str, Adversary], list[str], list[SmallGroup]]:
    """Each rung's rows, one for each number of presentations, notes on those without a result, and groups too small.

    Under sampling these numbers vary from canary to canary, so only the most common ones have a row.
    """
    adversaries: dict[str, Adversary] = {}
    notes: list[str] = []
    small: list[SmallGroup] = []
    for name in dict.fromkeys(scores.rung for scores in rungs):
        rows: list[Row] = []
        groups = [scores for scores in rungs if scores.rung == name]
        if unknown is not None and len(groups) > MOST_ROWS:
            groups = sorted(groups, key=lambda scores: -scores.observed.size)[:MOST_ROWS]
        for scores in groups:
            try:
                if unknown is not None and name == UNKNOWN:
                    row = _sampled_row(unknown, rungs, settings, gate)
                else:
                    row = make_row(scores, settings, gate)
            except ValueError as error:  # constant scores, for example: the other rungs still have a result
                notes.append(f"{name}: {error}")
                continue
            if row is not None:
                rows.append(row)
            elif name != UNKNOWN:
                group = SmallGroup(adversary=name, presentations=scores.presentations, canaries=scores.observed.size)
                small.append(group)
        rows.sort(key=lambda row: (-row.canaries, -(row.presentations or 0)))
        if rows:
            adversaries[name] = Adversary(name=name, rows=tuple(rows), verdict=by_rung.get(name))
    return adversaries, notes, small


def _unknown_rounds(
    log: RecordedRounds, settings: Settings, sampled: SampledClaim | None, schedule: NoiseSchedule | None
) -> tuple[UnknownRoundReader | None, str | None]:
    """The reader of the rung unknown-round if its scheme is declared, or a note why there is none."""
    sampling = settings.sampling if sampled is None else sampled.sampling
    if sampling is None:
        return None, None
    if settings.noise is not None:
        return None, f"{UNKNOWN}: left out, as it is known for noise that is fresh in every round only"
    noise = stated_multiplier(log) if sampled is None else sampled.noise
    if schedule is not None:
        if not isinstance(sampling, Poisson | FixedSize):
            return (
                None,
                f"{UNKNOWN}: left out, as rounds state different noise, which is known for Poisson sampling only",
            )
        sampling, noise = with_schedule(sampling, schedule), schedule.reference
    if noise is not None and noise < LEAST_NOISE:
        return None, f"{UNKNOWN}: left out, as a noise multiplier of {noise:.2g} hides nobody"
    if noise is None:
        return None, f"{UNKNOWN}: left out, as it needs the noise multiplier: pass noise_std and clip_norm, or claim it"
    return UnknownRoundReader(settings, sampling, noise), None


def _sampler_doubt(legs: dict[str, Verdict]) -> str:
    """Why nothing may assume that the sampler is the declared one; empty if its tests support it."""
    if SAMPLING not in legs:
        return NO_SAMPLER
    finding = legs[SAMPLING].finding
    if isinstance(finding, SamplerNotObserved):
        return NO_SAMPLER
    if isinstance(finding, DividedByCohort):
        return BY_COHORT
    return "" if isinstance(finding, SampledAsClaimed | TooFewPicks) else OTHER_SAMPLER


def _sampled_row(unknown: UnknownRound, rungs: list[Scores], settings: Settings, gate: GaussianGate) -> Row | None:
    groups = [scores for scores in rungs if scores.rung == "known-others"]
    if not groups or settings.canaries < FEWEST or all(np.ptp(scores.observed) == 0 for scores in groups):
        return None
    return make_sampled_row(unknown, groups, settings, gate)


def _run_facts(log: RecordedRounds, settings: Settings, stated: StatedReader, clients: int | None) -> RunFacts:
    """The facts of the run that a verdict needs besides scores and gauges."""
    times = presented_times(log, settings)
    # numbers increase from 1, so they are complete if there are as many as planned and the last is the planned one
    scheduled = settings.rounds is not None and len(log.numbers) == settings.rounds == max(log.numbers, default=0)
    expected = presentation_counts(settings.canaries, settings.presentations)
    followed = scheduled and bool((times <= expected).all()) and int(times.max()) == int(expected.max())
    return RunFacts(
        delta=settings.delta,
        planned=int(expected.max()) if followed else None,
        presentations=int(times.max()),
        rounds=stated.round_scores(),
        stated=stated.stated_noise(),
        without_others=sum(not entry.has_others for entry in log.observed),
        without_noise=sum(not entry.states_noise for entry in log.observed),
        most_hidden=None if clients is None else clients / math.sqrt(settings.free),
        correlated=settings.noise is not None,
    )
