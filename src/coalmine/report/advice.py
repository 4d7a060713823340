"""Advice on a result: the next steps after a verdict, and the likely cause behind each gauge outside its limits."""

from collections.abc import Sequence

from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.known_faults import likely_faults
from coalmine.report.brief import CLAIM_FIRST
from coalmine.report.stored_run import Run
from coalmine.report.table_rows import strongest_row, top_row
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import Words, format_number
from coalmine.verdict.findings.amplified import AccountedAboveClaim, SamplerAboveClaim
from coalmine.verdict.findings.missing import NothingClaimed
from coalmine.verdict.findings.noise import StatedTooLittle
from coalmine.verdict.verdict import Verdict

MOST_NAMED = 6  # tensors or gauges in one step


def next_steps(run: Run) -> list[str]:
    """The next steps, most urgent first."""
    result = run.result
    steps = [] if run.finished else [_unfinished_advice(run)]
    if result.verdict is not None and not isinstance(result.verdict.finding, NothingClaimed):
        steps += _after_verdict(result, result.verdict)
    elif run.finished:
        steps.append(CLAIM_FIRST)
    steps += gauge_steps(result)
    steps += _stronger_audit(result)
    if result.trainer.secret_seed is not False and run.demonstration:
        steps.append(
            "This audit is a demonstration: its seed is so short that others could guess it. An audit that others should "
            "trust needs a long seed: `coalmine seed FILE`."
        )
    if result.trainer.secret_seed is False:
        steps.append(
            "The canaries' seed is the public demo seed. An audit that others should trust needs a secret seed: "
            "`coalmine seed FILE`, then `--seed-file FILE`."
        )
    words = Words.of(result)
    return [words.say(step) for step in steps]


def gauge_steps(result: AuditResult) -> list[str]:
    """One step for each cause: the gauges outside their limits that point to it, and where to look."""
    grouped: dict[str, list[GaugeResult]] = {}
    for gauge in result.gauges:
        if gauge.status != "ok":
            grouped.setdefault(gauge.advice, []).append(gauge)
    return [f"{_list_names(gauges)}: {advice}" for advice, gauges in grouped.items()]


def _list_names(gauges: Sequence[GaugeResult]) -> str:
    layers = [gauge.part for gauge in gauges if gauge.part]
    if layers:
        more = f" and {len(layers) - MOST_NAMED} more" if len(layers) > MOST_NAMED else ""
        return f"Tensor{'s' * (len(layers) > 1)} {', '.join(layers[:MOST_NAMED])}{more}"
    names = [gauge.name for gauge in gauges]
    return f"Gauge {names[0]}" if len(names) == 1 else f"Gauges {', '.join(names[:-1])} and {names[-1]}"


def _unfinished_advice(run: Run) -> str:
    if run.has_result_file:
        return f"Its result.json cannot be read: restore it from a copy, or remove it and check what is left in {run.path}."
    if "task" in run.config:
        return f"The run is not finished: `coalmine run --resume {run.path}` resumes it."
    return "The run is not finished: resume it with its own trainer."


def _after_verdict(result: AuditResult, verdict: Verdict) -> list[str]:
    if verdict.outcome == "VIOLATION":
        return _after_violation(result, verdict)
    if verdict.outcome == "PASS":
        return [_after_pass(result, verdict)]
    return [verdict.finding.advice()]


def _after_pass(result: AuditResult, verdict: Verdict) -> str:
    unchecked = [item.name for item in result.audited if item.is_open]
    caveat = f" When you quote the verdict, also say what was not checked: {', '.join(unchecked)}." if unchecked else ""
    return f"{verdict.finding.advice()}{caveat}"


def _after_violation(result: AuditResult, verdict: Verdict) -> list[str]:
    rungs = [each.name for each in result.adversaries.values() if each.verdict and each.verdict.outcome == "VIOLATION"]
    low = [gauge.name for gauge in result.gauges if gauge.status == "low"]
    evidence = []
    if rungs:
        evidence.append(f"The claim is refuted by {', '.join(rungs)}.")
    if low:
        names = f"{', '.join(low[:MOST_NAMED])}{f' and {len(low) - MOST_NAMED} more' if len(low) > MOST_NAMED else ''}"
        evidence.append(f"Noise is missing according to the gauge{'s' * (len(low) > 1)} {names}.")
    promise = "the claimed ε" if result.claim is not None else "an ε that was computed from the stated noise"
    steps = [" ".join([f"Do not release this model under {promise}.", *evidence])]
    if isinstance(verdict.finding, AccountedAboveClaim | SamplerAboveClaim | StatedTooLittle):
        return [*steps, verdict.finding.advice()]
    faults = likely_faults(result)
    steps += [f"Likely: {fault.title}. {fault.meaning} {fault.fix}" for fault in faults]
    if not faults and not low:
        steps.append(verdict.finding.advice())
    return steps


def _stronger_audit(result: AuditResult) -> list[str]:
    """Ways to make the audit more sensitive."""
    steps, top, strongest = [], top_row(result), strongest_row(result)
    if top is not None and not top.detected:
        steps.append(
            f"{top.rung} detected nothing: {top.canaries:,} canaries cannot see below ε = {format_number(top.floor)}. More "
            "canaries lower that floor: `coalmine plan --detect` prints how many are needed."
        )
    if strongest is not None and strongest.rung != "known-others":
        steps.append(
            f"The strongest attacker here is {strongest.rung}. Also pass the sum of the real clients (`others`): "
            "known-others is the attacker that differential privacy protects against."
        )
    return steps
