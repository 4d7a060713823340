"""`coalmine compare`: finished runs beside each other."""

import csv
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from coalmine.audit.adversaries import RUNGS
from coalmine.audit.run_directory import RunDirectory, runs_in
from coalmine.cli.output import print_json, print_table, shown_number

logger = logging.getLogger("coalmine")
FIRST = ("run", "task", "rounds", "noise_multiplier", "canaries", "presentations", "accuracy", "analytical_epsilon")


@click.command()
@click.argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--csv", "as_csv", is_flag=True, help="CSV instead of a table, with interval and bound of each adversary."
)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also epsilon against noise: .png, .svg or .pdf."
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def compare(directories: tuple[Path, ...], as_csv: bool, plot: Path | None, as_json: bool) -> None:
    """Finished runs beside each other: accuracy, analytical epsilon, and what each adversary finds.

    Where groups of canaries came differently often, "presentations" lists how often; epsilons are of the first number.

    A directory that holds runs, as that of a sweep, stands for all of those that are finished.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json are two ways to print the same: give one")
    found = finished_runs(directories)
    runs = [summary(directory) for directory in found]
    if plot is not None:
        _plot(plot, found)
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


def finished_runs(directories: Sequence[Path]) -> list[Path]:
    """The directories of the runs; of a directory that holds several, those that are finished, a warning for others."""
    found: list[Path] = []
    for directory in directories:
        inside = runs_in(directory)
        done = [run for run in inside if (run / "result.json").exists()]
        if inside != [directory]:
            for run in inside:
                if run not in done:
                    logger.warning("%s is not finished, and left out", run)
        found += done or [directory]
    return found


def print_runs(runs: list[dict[str, Any]]) -> None:
    """A table of summaries."""
    shown = [name for name in RUNGS if any(name in run["adversaries"] for run in runs)]
    several = len({run["delta"] for run in runs}) > 1
    first = [*FIRST, "delta"] if several else list(FIRST)
    cells = [
        [*(_shown(run, name) for name in first), *(_epsilon(run, name) for name in shown), run["verdict"] or "-"]
        for run in runs
    ]
    print_table([*first, *shown, "verdict"], cells)
    if several:
        logger.warning("these runs have different deltas: their epsilons are not to be compared with each other")


def _shown(run: dict[str, Any], name: str) -> str:
    """A cell; where groups of canaries came differently often, all the numbers of times: epsilons are of the first."""
    if name != "presentations":
        return _cell(run[name])
    others = [times for times in run["presented"] if times != run[name]]
    return ", ".join(map(str, [_cell(run[name]), *others])) if others else _cell(run[name])


def _plot(path: Path, directories: Sequence[Path]) -> None:
    from coalmine.report import plots, read_run
    from coalmine.report.pictures import save_plot

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
    hash(result.get("delta"))  # of which all runs are asked whether it is the same
    adversaries = {
        name: {key: found.get(key) for key in ("epsilon", "interval", "lower_bound", "verdict")}
        for name, found in result.get("adversaries", {}).items()
    }
    claim = {name: result.get(name) for name in ("delta", "claimed_epsilon", "verdict")}
    groups = [group for found in result.get("adversaries", {}).values() for group in found.get("groups", [])]
    presented = sorted({group["presentations"] for group in groups if group.get("presentations")})
    return first | {"run": str(directory)} | claim | {"presented": presented, "adversaries": adversaries}


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in run.items() if name != "adversaries"}
    flat["presented"] = " ".join(map(str, run["presented"]))
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
