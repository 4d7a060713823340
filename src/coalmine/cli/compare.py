"""`coalmine compare`: a table of finished runs."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from coalmine.cli.exit_codes import BAD_INPUT
from coalmine.cli.named_runs import find_runs, how_to_finish, is_finished, print_notes, print_problems, read_result
from coalmine.cli.options import JSON, Command, run_directories
from coalmine.cli.output import print_json, print_table, shown_number
from coalmine.evidence.ladder import RUNGS
from coalmine.report import plots, read_run
from coalmine.report.svg import save_plot
from coalmine.result.audit_result import AuditResult

logger = logging.getLogger("coalmine")
FEW = 4  # most numbers of presentations that a table lists


@click.command(cls=Command)
@run_directories()
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also plot epsilon against noise into a .png, .svg or .pdf file.",
)
@JSON
def compare(directories: tuple[Path, ...], plot: Path | None, as_json: bool) -> int:
    """Compare finished runs in a table.

    The table shows the accuracy, the epsilon behind each verdict, and each adversary's estimate. Unfinished runs are
    listed below the table, with instructions to finish them.

    "measured" is the estimate behind the verdict, with its number of rounds. "client_epsilon" is the analytical epsilon
    of a client, with the number of rounds that a client takes part in. If groups of canaries have different numbers of
    presentations, "presentations" lists those numbers, and the adversaries' epsilons are for the first one. For a claim
    amplified by sampling, "legs" lists the legs (accounting, noise, sampling) that did not pass.

    Exit codes: 0 if at least one run is finished, 2 if none is, or if a path has no run or a damaged one. The
    readable runs are shown in any case.
    """
    named = find_runs(directories)
    results, unfinished, problems = _read_results(named.runs)
    problems += named.problems.values()
    if results:
        if plot is not None:
            _plot(plot, [Path(name) for name in results])
        if as_json:
            print_json([run_record(name, result) for name, result in results.items()])
        else:
            print_results(results)
    print_problems(unfinished)
    print_notes(f"{line}: left out" for line in named.ignored.values())
    print_problems(problems)
    return 0 if results and not problems else BAD_INPUT


def _read_results(directories: Sequence[Path]) -> tuple[dict[str, AuditResult], list[str], list[str]]:
    """The results of the finished runs by their paths, a line for each unfinished run, and a line for each damaged one."""
    results, unfinished, problems = {}, [], []
    for directory in directories:
        if not is_finished(directory):
            unfinished.append(f"{directory} is not finished and is left out: {how_to_finish(directory)}")
            continue
        try:
            results[str(directory)] = read_result(directory)
        except ValueError as error:
            problems.append(str(error))
    return results, unfinished, problems


def print_results(results: Mapping[str, AuditResult]) -> None:
    """A table of runs by their names."""
    every = list(results.values())
    rungs = [name for name in RUNGS if any(name in result.adversaries for result in every)]
    columns = ["task", "rounds", "noise multiplier", "canaries", "presentations", "accuracy", "analytical epsilon"]
    several = len({result.settings.delta for result in every}) > 1
    columns += ["delta"] if several else []
    columns += ["measured"] if any(result.headline for result in every) else []
    columns += ["claimed epsilon", "legs"] if any(result.legs for result in every) else []
    columns += ["client epsilon"] if any(result.trainer.client_epsilon is not None for result in every) else []
    cells = []
    for name, result in results.items():
        named = _cells(result)
        epsilons = [_epsilon(result, rung) for rung in rungs]
        cells.append([name, *(named[column] for column in columns), *epsilons, _verdict(result)])
    print_table(["run", *columns, *rungs, "verdict"], cells)
    if several:
        logger.warning("these runs have different deltas: do not compare their epsilons with each other")


def _cells(result: AuditResult) -> dict[str, str]:
    """The cells of a run by column name."""
    told, top, claim = result.trainer, result.headline, result.claim
    return {
        "task": _cell(told.task),
        "rounds": _cell(result.rounds),
        "noise multiplier": _cell(told.noise_multiplier),
        "canaries": _cell(result.settings.canaries),
        "presentations": _presentations(result),
        "accuracy": _cell(told.accuracy),
        "analytical epsilon": _cell(result.analytical_epsilon),
        "delta": _cell(result.settings.delta),
        "measured": "-" if top is None else _for_rounds(top.epsilon, top.participations),
        "claimed epsilon": "-" if claim is None else _cell(claim.epsilon),
        "legs": _legs(result),
        "client epsilon": _for_rounds(told.client_epsilon, told.client_rounds),
    }


def _presentations(result: AuditResult) -> str:
    """Every number of presentations, or the range of many; the number that the epsilons refer to comes first."""
    usual = result.trainer.presentations
    others: list[Any] = [times for times in _presented(result) if times != usual]
    if len(others) > FEW:
        others = [f"{min(others)} … {max(others)}"]
    return ", ".join(map(str, [*([] if usual is None else [usual]), *others])) or "-"


def _presented(result: AuditResult) -> list[int]:
    return sorted({row.presentations for each in result.adversaries.values() for row in each.rows if row.presentations})


def _epsilon(result: AuditResult, rung: str) -> str:
    return _cell(result[rung].headline.estimate.epsilon) if rung in result.adversaries else "-"


def _verdict(result: AuditResult) -> str:
    return "-" if result.verdict is None or result.claim is None else str(result.verdict.outcome)


def _legs(result: AuditResult) -> str:
    """The legs of an amplified claim that did not pass, with their outcomes."""
    odd = [f"{name} {leg.outcome}" for name, leg in result.legs.items() if leg.outcome != "PASS"]
    return ", ".join(odd) or ("all PASS" if result.legs else "-")


def _for_rounds(value: Any, times: Any) -> str:
    """An epsilon with its number of rounds."""
    return _cell(value) if times is None or value is None else f"{_cell(value)} ({times}×)"


def _cell(value: Any) -> str:
    return "-" if value is None else shown_number(value) if isinstance(value, float) else str(value)


def _plot(path: Path, directories: Sequence[Path]) -> None:
    found = [(run.noise_multiplier, run.result) for run in map(read_run, directories)]
    known = [(noise, result) for noise, result in found if noise is not None]
    if not known:
        raise ValueError("none of these runs has recorded its noise multiplier, so there is nothing to plot")
    save_plot(path, plots.noise, known)


def run_record(name: str, result: AuditResult) -> dict[str, Any]:
    """The compared entries of a run, for JSON and CSV; None for entries that a trainer did not write."""
    told, whole = result.trainer, result.to_dict()
    kept = ("epsilon", "interval", "lower_bound", "lower_bound_gaussian", "interval_gaussian", "verdict")
    return {
        "run": name,
        "task": told.task,
        "rounds": result.rounds,
        "noise_multiplier": told.noise_multiplier,
        "canaries": result.settings.canaries,
        "presentations": told.presentations,
        "accuracy": told.accuracy,
        "analytical_epsilon": result.analytical_epsilon,
        "delta": result.settings.delta,
        "claimed_epsilon": whole["claimed_epsilon"],
        "claim_accounting": whole["claim_accounting"],
        "claim_sampling": whole.get("claim_sampling"),
        "legs": {name: str(leg.outcome) for name, leg in result.legs.items()},
        "verdict": whole["verdict"],
        "headline": whole["headline"],
        "client_epsilon": told.client_epsilon,
        "client_rounds": told.client_rounds,
        "accounted_epsilon": told.accounted_epsilon,
        "presented": _presented(result),
        "audited": {item.name: item.status for item in result.audited},
        "adversaries": {rung: {key: found[key] for key in kept} for rung, found in whole["adversaries"].items()},
    }
