"""`coalmine selftest`: break the training loop on purpose, and show what catches it."""

from typing import TYPE_CHECKING

import click

from coalmine.audit.signatures import SIGNATURES, likely_faults
from coalmine.cli.output import print_json, print_table, progress_bar, shown_number

if TYPE_CHECKING:
    from coalmine.simulation.faults import Trial

NAMES = [fault.name for fault in SIGNATURES]


@click.command()
@click.option("--fault", "names", type=click.Choice(NAMES), multiple=True, help="Only this one; repeatable.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Runs of each.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
@click.pass_obj
def selftest(settings: dict[str, bool], names: tuple[str, ...], seeds: int, as_json: bool) -> int:
    """Show that the audit catches broken privacy: each known fault is put into a real training loop.

    Exit code 1 if a fault that can be seen was missed, or honest training called VIOLATION.
    """
    from coalmine.simulation.faults import evidence, try_fault

    chosen = [fault for fault in SIGNATURES if not names or fault.name in names]
    trials: list[Trial] = []
    with progress_bar("selftest", total=len(chosen) * seeds, hidden=settings["quiet"]) as advance:
        for fault in chosen:
            for seed in range(1, seeds + 1):
                trials.append(try_fault(fault, seed))
                advance()
    missed = [trial for trial in trials if trial.fault.detectable and not trial.caught]
    false = [trial for trial in trials if trial.fault.name == "honest" and trial.outcome == "VIOLATION"]
    if as_json:
        print_json([_as_dict(trial, evidence(trial.result), evidence(trial.blind)) for trial in trials])
        return int(bool(missed or false))
    for title, blind in (("With everybody else's updates known (`others`)", False), ("Without them", True)):
        rows = []
        for fault in chosen:
            mine = [trial for trial in trials if trial.fault is fault]
            shown = [trial.blind if blind else trial.result for trial in mine]
            by = [name for result in shown for name in evidence(result)]
            verdicts = [result.verdict.outcome for result in shown if result.verdict]
            rows.append(
                [
                    fault.title,
                    f"{sum(bool(evidence(result)) for result in shown)} of {len(mine)}",
                    ", ".join(f"{word} {verdicts.count(word)}" for word in dict.fromkeys(verdicts)),
                    _summary(by) if by else _silence(fault.reason, fault.name, blind),
                    _margin(mine[0], blind),
                ]
            )
        print_table(["fault", "caught", "verdict", "by", "margin"], rows, title=title, left=(0, 3))
    return int(bool(missed or false))


def _summary(by: list[str]) -> str:
    """Each piece of evidence once; layers together."""
    names = list(dict.fromkeys("layer gauges" if name.startswith("layer ") else name for name in by))
    return ", ".join(names)


def _silence(reason: str, name: str, blind: bool) -> str:
    if name == "honest":
        return "nothing, as it should be"
    if reason:
        return f"cannot be seen: {reason}"
    return "not seen without `others`" if blind else "MISSED"


def _margin(trial: "Trial", blind: bool) -> str:
    result = trial.blind if blind else trial.result
    rung = result.adversaries.get("known-others") or result.adversaries["known-round"]
    return f"{rung.name} reads {shown_number(rung.headline.estimate.epsilon, 3)} for {shown_number(trial.claim, 3)}"


def _as_dict(trial: "Trial", seen: list[str], seen_blind: list[str]) -> dict[str, object]:
    return {
        "fault": trial.fault.name,
        "seed": trial.seed,
        "detectable": trial.fault.detectable,
        "claim": trial.claim,
        "smallest_signal": min(trial.signal),
        "caught_by": seen,
        "caught_by_without_others": seen_blind,
        "likely": [fault.name for fault in likely_faults(trial.result.to_dict())],
        "result": trial.result.to_dict(),
    }
