"""From the log of an audit to its result, in one pass: for `Audit.result`, and for `coalmine verify`."""

import math
from collections.abc import Iterable

from coalmine.argument_checks import nonnegative_array, one_number, whole_number
from coalmine.audit.claim import Claim
from coalmine.audit.coverage import AuditedItem, CoverageReader, audited_items, checked_items
from coalmine.audit.gauge_reader import GaugeReader
from coalmine.audit.ladder import LadderReader, presented_times
from coalmine.audit.result import Adversary, AuditResult, Row
from coalmine.audit.result_rows import make_headline, make_row
from coalmine.audit.stated_noise import StatedReader
from coalmine.audit.verdict import Evidence, Verdict, judge
from coalmine.audit.views import read_log
from coalmine.storage.record import Settings, presentation_counts
from coalmine.storage.rounds_file import RoundLog


def derive_result(
    log: RoundLog,
    settings: Settings,
    *,
    claim: Claim | None = None,
    analytical_epsilon: float | None = None,
    clients: int | None = None,
    audited: Iterable[AuditedItem] = (),
) -> AuditResult:
    """The result that follows from a log: the audit's own, and what `coalmine verify` derives again."""
    clients = None if clients is None else whole_number("clients", clients, minimum=0)
    if analytical_epsilon is not None and not (
        isinstance(analytical_epsilon, float) and analytical_epsilon == math.inf
    ):
        number = one_number("analytical_epsilon", analytical_epsilon)
        analytical_epsilon = float(nonnegative_array("analytical_epsilon", number))
    audited = checked_items(audited)
    rung_reader, gauge_reader = LadderReader(log, settings), GaugeReader(log, settings)
    told, facts = StatedReader(settings), CoverageReader()
    read_log(log, settings, rung_reader, gauge_reader, told, facts)
    rungs, gauges = rung_reader.scores(log.final), gauge_reader.gauges()
    evidence = _evidence(log, settings, told, clients)
    participations = evidence.planned if claim is None else claim.participations or evidence.planned
    verdict: Verdict | None = None
    by_rung: dict[str, Verdict] = {}
    notes: list[str] = []
    if claim is not None:
        verdict, by_rung, notes = judge(claim, rungs, gauges, evidence)
    adversaries = {}
    for name in dict.fromkeys(scores.rung for scores in rungs):
        rows: list[Row] = []
        for scores in (scores for scores in rungs if scores.rung == name):
            try:
                row = make_row(scores, settings)
            except ValueError as error:  # constant scores, say: the other rungs still have something to tell
                notes.append(f"{name}: {error}")
                continue
            if row is None:
                shown_times = f"{scores.observed.size} canaries were presented {scores.presentations} times"
                notes.append(f"{name}: {shown_times}, too few to say anything")
            else:
                rows.append(row)
        rows.sort(key=lambda row: (-row.canaries, -(row.presentations or 0)))
        if rows:
            adversaries[name] = Adversary(name=name, rows=tuple(rows), verdict=by_rung.get(name))
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
        headline=make_headline(
            rungs,
            settings,
            rung=None if verdict is None else verdict.rung,
            participations=participations,
            sensitivity=None if claim is None else claim.sensitivity,
        ),
        audited=audited_items(
            facts,
            settings,
            gauges,
            unobserved=max((settings.rounds or max(log.numbers, default=0)) - len(log.numbers), 0),
            participations=None if claim is None else claim.participations,
            planned=evidence.planned,
            shown=evidence.shown,
            given=audited,
        ),
        notes=tuple(notes),
    )


def _evidence(log: RoundLog, settings: Settings, told: StatedReader, clients: int | None) -> Evidence:
    """What a verdict rests on beside scores and gauges."""
    times = presented_times(log, settings)
    scheduled = settings.rounds is not None and set(log.numbers) == set(range(1, settings.rounds + 1))
    expected = presentation_counts(settings.canaries, settings.presentations)
    followed = scheduled and bool((times <= expected).all()) and int(times.max()) == int(expected.max())
    return Evidence(
        delta=settings.delta,
        planned=int(expected.max()) if followed else None,
        shown=int(times.max()),
        rounds=told.round_scores(),
        stated=told.stated_noise(),
        without_others=sum(not entry.has_others for entry in log.observed),
        without_noise=sum(not entry.states_noise for entry in log.observed),
        most_hidden=None if clients is None else clients / math.sqrt(settings.free),
        correlated=settings.noise is not None,
    )
