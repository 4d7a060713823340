"""`coalmine compare`: a table of finished runs."""

import csv
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from coalmine.audit.ladder import RUNGS
from coalmine.cli.output import print_json, print_table, shown_number
from coalmine.cli.runs import BAD_INPUT, find_runs, how_to_finish, is_finished, print_notes, print_problems, read_error
from coalmine.storage.run_directory import RunDirectory

logger = logging.getLogger("coalmine")
FIRST = ("run", "task", "rounds", "noise_multiplier", "canaries", "presentations", "accuracy", "analytical_epsilon")
FEW = 4  # numbers of presentations that a table lists
TOPS = ("headline", "client_epsilon", "client_rounds", "accounted_epsilon")


@click.command()
@click.argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with each adversary's interval and lower bound.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also plot epsilon against noise into a .png, .svg or .pdf file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare(directories: tuple[Path, ...], as_csv: bool, plot: Path | None, as_json: bool) -> int:
    """Compare finished runs: accuracy, the epsilon that each verdict rests on, and each adversary's estimate.

    DIRECTORIES are run directories; a directory of runs, such as a sweep's, stands for all of them. Unfinished runs are
    listed below the table with what to do.

    "measured" is the estimate that the verdict rests on, with the number of rounds that it is for. "client_epsilon" is the
    analytical epsilon of a client, with the number of rounds that a client takes part in. If groups of canaries were
    presented different numbers of times, "presentations" lists those numbers, and the adversaries' epsilons are for the
    first one.

    Exit codes: 0 if at least one run is finished, 2 if none is, or if a path holds no run or a damaged one. The readable
    runs are shown in any case.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json are two ways to print the same: give one")
    named = find_runs(directories)
    runs, unfinished, problems = _read_runs(named.runs)
    problems += named.problems.values()
    if runs:
        if plot is not None:
            _plot(plot, [directory for directory, _ in runs])
        _print([found for _, found in runs], as_csv=as_csv, as_json=as_json)
    print_problems(unfinished)
    print_notes(f"{line}: left out" for line in named.ignored.values())
    print_problems(problems)
    return 0 if runs and not problems else BAD_INPUT


def _read_runs(directories: Sequence[Path]) -> tuple[list[tuple[Path, dict[str, Any]]], list[str], list[str]]:
    """Summaries of the finished runs, a line for each unfinished run, and a line for each damaged one."""
    runs, unfinished, problems = [], [], []
    for directory in directories:
        if not is_finished(directory):
            unfinished.append(f"{directory} is not finished and is left out: {how_to_finish(directory)}")
            continue
        try:
            runs.append((directory, summary(directory)))
        except (OSError, ValueError, RecursionError) as error:
            problems.append(read_error(directory, error))
    return runs, unfinished, problems


def _print(runs: list[dict[str, Any]], *, as_csv: bool, as_json: bool) -> None:
    if as_json:
        print_json(runs)
    elif as_csv:
        rows = [_flat(run) for run in runs]
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        print_runs(runs)


def print_runs(runs: list[dict[str, Any]]) -> None:
    """A table of summaries."""
    shown = [name for name in RUNGS if any(name in run["adversaries"] for run in runs)]
    several = len({run["delta"] for run in runs}) > 1
    first = [*FIRST, "delta"] if several else list(FIRST)
    tops = ["measured"] if any(run["headline"] for run in runs) else []
    tops += ["client_epsilon"] if any(run["client_epsilon"] is not None for run in runs) else []
    cells = [
        [
            *(_shown(run, name) for name in first),
            *(_top(run, name) for name in tops),
            *(_epsilon(run, name) for name in shown),
            run["verdict"] or "-",
        ]
        for run in runs
    ]
    print_table([name.replace("_", " ") for name in [*first, *tops, *shown, "verdict"]], cells)
    if several:
        logger.warning("these runs have different deltas: their epsilons are not to be compared with each other")


def _shown(run: dict[str, Any], name: str) -> str:
    """A cell; for "presentations" every number of presentations, or of many the range, that of the epsilons first."""
    if name != "presentations":
        return _cell(run[name])
    first = [] if run[name] is None else [run[name]]
    others = [times for times in run["presented"] if times != run[name]]
    if len(others) > FEW:
        others = [f"{min(others)} … {max(others)}"]
    return ", ".join(map(str, [*first, *others])) or "-"


def _top(run: dict[str, Any], name: str) -> str:
    """One of the numbers on top, with the number of rounds that it is for."""
    top = run["headline"] or {}
    value, times = (
        (top.get("epsilon"), top.get("participations"))
        if name == "measured"
        else (run["client_epsilon"], run["client_rounds"])
    )
    return _cell(value) if times is None or value is None else f"{_cell(value)} ({times}×)"


def _plot(path: Path, directories: Sequence[Path]) -> None:
    from coalmine.report import plots, read_run
    from coalmine.report.svg import save_plot

    found = [(run.noise_multiplier, run.findings) for run in map(read_run, directories)]
    known = [(noise, findings) for noise, findings in found if noise is not None and findings is not None]
    if not known:
        raise ValueError("none of these runs says what its noise multiplier was, so there is nothing to plot")
    save_plot(path, plots.noise, known)


def summary(directory: Path) -> dict[str, Any]:
    """What is compared, from a run's result; what a trainer did not write is None."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory of a run")
    result = RunDirectory(directory).read_result()
    try:
        return _summary(directory, result)
    except (AttributeError, KeyError, TypeError):
        path = directory / "result.json"
        raise ValueError(f"{path} is not a result as an audit writes it; restore it from a copy") from None


def _summary(directory: Path, result: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = {name: result.get(name) for name in FIRST}
    hash(result.get("delta"))  # print_runs puts the deltas into a set
    adversaries = {
        name: {key: found.get(key) for key in ("epsilon", "interval", "lower_bound", "verdict")}
        for name, found in result.get("adversaries", {}).items()
    }
    claim = {name: result.get(name) for name in ("delta", "claimed_epsilon", "verdict")}
    verdicts = [claim["verdict"], *(found["verdict"] for found in adversaries.values())]
    top = result.get("headline")
    measured = [*adversaries.values(), *([] if top is None else [top])]
    intervals = [found["interval"] for found in measured if found["interval"] is not None]
    if any(not isinstance(each, str | None) for each in verdicts) or any(len(each) != 2 for each in intervals):
        raise TypeError("a verdict is a word, and an interval is two numbers")
    tops = {name: result.get(name) for name in TOPS}
    statuses = {name: item["status"] for name, item in result.get("audited", {}).items()}
    groups = [group for found in result.get("adversaries", {}).values() for group in found.get("groups", [])]
    presented = sorted({group["presentations"] for group in groups if group.get("presentations")})
    return (
        first
        | {"run": str(directory)}
        | claim
        | tops
        | {"presented": presented, "audited": statuses, "adversaries": adversaries}
    )


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in run.items() if name not in ("adversaries", "audited", "headline")}
    flat["presented"] = " ".join(map(str, run["presented"]))
    top = run["headline"] or {}
    flat |= {f"headline {key}": top.get(key) for key in ("rung", "participations", "epsilon")}
    flat["headline low"], flat["headline high"] = top.get("interval") or (None, None)
    flat |= {f"audited {name}": status for name, status in run["audited"].items()}
    for name, found in run["adversaries"].items():
        low, high = found["interval"] or (None, None)
        figures = {"epsilon": found["epsilon"], "low": low, "high": high, "lower_bound": found["lower_bound"]}
        flat |= {f"{name} {key}": value for key, value in figures.items()}
    return flat


def _cell(value: Any) -> str:
    return "-" if value is None else shown_number(value) if isinstance(value, float) else str(value)


def _epsilon(run: dict[str, Any], name: str) -> str:
    found = run["adversaries"].get(name)
    return "-" if found is None else _cell(found["epsilon"])
