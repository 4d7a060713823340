"""`coalmine selftest`: put known faults into a training loop and show which ones the audit detects."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from coalmine.cli.options import JSON, Command, Verbosity
from coalmine.cli.output import print_json, print_table, progress_bar, shown_number
from coalmine.evidence.faults import FAULTS, HONEST, Fault
from coalmine.known_faults import likely_faults

if TYPE_CHECKING:
    from coalmine.result.audit_result import AuditResult
    from coalmine.simulation.faults import Margin, Trial

NAMES = [fault.name for fault in FAULTS]


@click.command(cls=Command)
@click.option(
    "--fault",
    "names",
    type=click.Choice(NAMES),
    multiple=True,
    metavar="NAME",
    help=f"Fault to test; repeatable: {', '.join(NAMES)}.  [default: all faults]",
)
@click.option(
    "--seeds", type=click.IntRange(1), default=1, show_default=True, help="Number of training runs per fault."
)
@JSON
@click.pass_obj
def selftest(verbosity: Verbosity, names: tuple[str, ...], seeds: int, as_json: bool) -> int:
    """Check that the audit detects known faults.

    Each fault is put into a real training loop. A fault is detected if a rung or a gauge contradicts the claim and the
    verdict is not PASS. The fault is also named if the report lists it as likely.

    Exit codes: 1 if a detectable fault was missed or honest training was a VIOLATION, else 0.
    """
    from coalmine.simulation.faults import margins, try_fault

    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    trials: list[Trial] = []
    with progress_bar("selftest", total=len(chosen) * seeds, hidden=verbosity.quiet) as advance:
        for fault in chosen:
            for seed in range(1, seeds + 1):
                trials.append(try_fault(fault, seed))
                advance()
    missed = [trial for trial in trials if trial.fault.detectable and not trial.caught]
    false = [trial for trial in trials if trial.fault is HONEST and trial.outcome == "VIOLATION"]
    if as_json:
        print_json([_as_dict(trial, margins(trial.result), margins(trial.blind)) for trial in trials])
        return int(bool(missed or false))
    _print_trials(chosen, trials, title="With the other clients' updates known (`others`)", blind=False)
    _print_trials(chosen, trials, title="Without them", blind=True)
    return int(bool(missed or false))


def _print_trials(faults: "list[Fault]", trials: "list[Trial]", *, title: str, blind: bool) -> None:
    """A table with a line for each fault; `blind` is for an audit without `others`, which names no fault."""
    from coalmine.simulation.faults import evidence, is_caught, margins

    heads = ["fault", "caught", *([] if blind else ["named"]), "verdict", "by", "margin"]
    rows = []
    for fault in faults:
        mine = [trial for trial in trials if trial.fault is fault]
        results = [trial.blind if blind else trial.result for trial in mine]
        named = f"{sum(trial.named for trial in mine)} of {len(mine)}" if fault.detectable else ""
        by = [name for result in results for name in evidence(result)]
        verdicts = [result.verdict.outcome for result in results if result.verdict]
        strongest = next((result for result in results if evidence(result)), results[0])
        rows.append(
            [
                fault.title,
                f"{sum(is_caught(result) for result in results)} of {len(mine)}",
                *([] if blind else [named]),
                ", ".join(f"{word} {verdicts.count(word)}" for word in dict.fromkeys(verdicts)),
                "; ".join(part for part in (_silence(fault, by, blind), _summary(by)) if part),
                _margin(strongest, margins(strongest)),
            ]
        )
    print_table(heads, rows, title=title, left=(0, len(heads) - 2))


def _summary(by: list[str]) -> str:
    """Each kind of evidence once; the gauges of all layers count as one."""
    names = list(dict.fromkeys("layer gauges" if name.startswith("layer ") else name for name in by))
    return ", ".join(names)


def _silence(fault: Fault, by: list[str], blind: bool) -> str:
    """Why nothing was detected; for an undetectable fault the reason is printed even next to a false alarm."""
    if fault.reason:
        return f"cannot be detected: {fault.reason}"
    if by:
        return ""
    if fault is HONEST:
        return "nothing, as expected"
    return "not detected without `others`" if blind else "MISSED"


def _margin(result: "AuditResult", found: "list[Margin]") -> str:
    """The strongest rung that refutes the claim, and the gauge farthest outside its limits."""
    rungs = [margin for margin in found if margin.by in result.adversaries]
    gauges = [margin for margin in found if margin.by not in result.adversaries]
    texts = [_reads(rungs[-1].by, rungs[-1].reading, rungs[-1].limit)] if rungs else []
    if gauges:
        worst = max(gauges, key=lambda margin: margin.times)
        texts.append(
            _reads(worst.by, worst.reading, worst.limit, "at least " if worst.reading < worst.limit else "at most ")
        )
    if not texts:
        rung = result.adversaries.get("known-others") or result.adversaries["known-round"]
        texts.append(
            _reads(rung.name, rung.headline.estimate.epsilon, result.claim.epsilon if result.claim else math.nan)
        )
    return "; ".join(texts)


def _reads(name: str, reading: float, limit: float, bound: str = "") -> str:
    return f"{name} reads {shown_number(reading, 3)} for {bound}{shown_number(limit, 3)}"


def _as_dict(trial: "Trial", found: "list[Margin]", found_blind: "list[Margin]") -> dict[str, object]:
    return {
        "fault": trial.fault.name,
        "seed": trial.seed,
        "detectable": trial.fault.detectable,
        "claim": trial.claim,
        "smallest_signal": min(trial.signal),
        "caught": trial.caught,
        "named": trial.named,
        "caught_by": [margin.by for margin in found],
        "caught_by_without_others": [margin.by for margin in found_blind],
        "margins": [asdict(margin) for margin in found],
        "margins_without_others": [asdict(margin) for margin in found_blind],
        "likely": [fault.name for fault in likely_faults(trial.result)],
        "result": trial.result.to_dict(),
    }
