"""A table of epsilons against noise as in Section 5; shared by Stack Overflow and EMNIST."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from coalmine.evidence.ladder import RUNGS
from coalmine.simulation.config import RunConfig
from reproduction import paper_claims
from reproduction.experiment import Account, Experiment, Found, PaperCheck, Table, beside, interval_shown, shown
from reproduction.experiment_options import RUNS, Options
from reproduction.paper import EpsilonRow
from reproduction.run_grid import Follow, PlannedRun, carry_out
from reproduction.run_numbers import RunNumbers, not_learnt, read_finished, rung
from reproduction.training_configs import WORDS_DELTA, with_noise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = dict(zip(RUNGS, ("#1d63b8", "#0e7c86", "#b45309", "#be185d", "#147a3d", "#7a3fc4"), strict=True))


def grid(config: RunConfig, noises: Sequence[float]) -> list[PlannedRun]:
    """A run for each noise multiplier, each with its own seed, so that the runs are independent."""
    return [
        PlannedRun(config=replace(with_noise(config, noise), seed=config.seed + place))
        for place, noise in enumerate(noises)
    ]


def experiment(
    name: str, title: str, config: Callable[[Options], RunConfig], paper: Mapping[float, EpsilonRow], *, original: str
) -> Experiment:
    """A table of the paper: a run for each of its noise multipliers, and the paper's numbers for `original`."""

    def plan(options: Options) -> list[PlannedRun]:
        return grid(config(options), tuple(paper))

    account = Account(
        partial(tables, paper=paper),
        checked,
        partial(conclusion, paper=paper, original=original),
        partial(draw, paper=paper),
    )
    return Experiment(
        name=name,
        title=title,
        takes=RUNS,
        plan=plan,
        gather=lambda options, follow: gather(plan(options), options, follow),
        account=account,
    )


def gather(plan: list[PlannedRun], options: Options, follow: Follow) -> Found:
    """The readings of the finished runs, in the order of the plan."""
    done = carry_out(plan, options, follow=follow)
    readings = [read_finished(directory) for directory in done.values()]
    return about(options, readings, missing(plan, done))


def about(options: Options, readings: list[RunNumbers], not_finished: list[str]) -> Found:
    """Common to every experiment with runs: the readings, the missing runs, the training time and the machine."""
    return {
        "scale": options.scale,
        "seconds": sum(reading["seconds"] for reading in readings),
        "device": readings[0]["device"] if readings else None,
        "missing": not_finished,
        "readings": readings,
    }


def kind(reading: RunNumbers) -> str:
    """The paper's task that a run reproduces, identified by its delta."""
    return "next words" if reading["delta"] == WORDS_DELTA else "handwriting"


def missing(plan: Sequence[PlannedRun], done: Mapping[str, Any]) -> list[str]:
    """The unfinished runs."""
    return [planned.name for planned in plan if planned.name not in done]


def tables(found: Found, paper: Mapping[float, EpsilonRow]) -> list[Table]:
    """The paper's columns with our values next to them, then coalmine's rungs."""
    return [_papers_columns(found["readings"], paper), ladder_table(found["readings"])]


def _papers_columns(readings: Sequence[RunNumbers], paper: Mapping[float, EpsilonRow]) -> Table:
    rows = []
    for reading in readings:
        theirs = paper.get(reading["noise_multiplier"])
        every, final = rung(reading, "all-iterates"), rung(reading, "final")
        pairs = [
            (reading["analytical"], theirs and theirs.analytical),
            (every and every["paper_lower_bound"], theirs and theirs.all_lower_bound),
            (every and every["paper_epsilon"], theirs and theirs.all_estimate),
            (final and final["paper_lower_bound"], theirs and theirs.final_lower_bound),
            (final and final["paper_epsilon"], theirs and theirs.final_estimate),
        ]
        cells = [beside(ours, its) for ours, its in pairs]
        rows.append((f"{reading['noise_multiplier']:g}", *cells, f"{reading['accuracy']:.1%}"))
    return Table(
        "The paper's estimators, ours / the paper's",
        ("noise", "analytical ε", "ε_lo-all", "ε_est-all", "ε_lo-final", "ε_est-final", "accuracy"),
        tuple(rows),
    )


def ladder_table(readings: Sequence[RunNumbers], title: str = "coalmine's, all five rungs") -> Table:
    """Every rung of every run: estimate, interval, valid bound, floor, and the analytical ε for known-others."""
    rows = []
    for reading in readings:
        for row in reading["rows"]:
            times = "" if row["presentations"] is None else f"{row['presentations']}×"
            rows.append(
                (
                    f"{reading['noise_multiplier']:g}",
                    row["rung"],
                    times,
                    shown(row["epsilon"]),
                    interval_shown(row["interval"]),
                    shown(row["lower_bound"]),
                    shown(row["floor"]),
                    shown(row["analytical"], 4),
                    shown(row["anderson_darling"]["p_value"], 2),
                )
            )
    columns = (
        "noise",
        "rung",
        "shown",
        "ε",
        "95 % interval",
        "valid bound",
        "floor",
        "analytical ε of updates",
        "AD p",
    )
    return Table(title, columns, tuple(rows), left=2)


def checked(found: Found) -> list[PaperCheck]:
    """The claims of Section 5 and of the audit."""
    readings = found["readings"]
    return [
        paper_claims.covers_analytical(readings),
        paper_claims.bounds_hold(readings),
        paper_claims.known_others_falls(readings),
        paper_claims.final_falls(readings),
        paper_claims.final_below_all(readings),
    ]


def draw(figure: "Figure", found: Found, paper: Mapping[float, EpsilonRow]) -> None:
    """Plot epsilon of every rung against noise, with the analytical ε, the floor and the paper's estimates."""
    ax = figure.add_subplot()
    readings = found["readings"]
    for name in RUNGS:
        pairs = [(reading["noise_multiplier"], rung(reading, name)) for reading in readings]
        seen = [(noise, row) for noise, row in pairs if row is not None]
        if not seen:
            continue
        ax.plot([noise for noise, _ in seen], [_positive(row["epsilon"]) for _, row in seen], "o-", ms=4,
                color=COLOURS[name], label=name)  # fmt: skip
        for noise, row in seen:
            if row["interval"]:
                ax.plot(
                    [noise, noise], [_positive(end) for end in row["interval"]], color=COLOURS[name], lw=3, alpha=0.3
                )
    noisy = [reading for reading in readings if reading["noise_multiplier"] > 0]
    ax.plot(
        [r["noise_multiplier"] for r in noisy], [r["update_epsilon"] for r in noisy], "k--", lw=1, label="analytical"
    )
    floors = [(r["noise_multiplier"], final["floor"]) for r in readings if (final := rung(r, "final"))]
    ax.plot([noise for noise, _ in floors], [floor for _, floor in floors], ":", color="0.5", label="floor of final")
    finals = [(noise, theirs.final_estimate) for noise, theirs in paper.items()]
    every = [(noise, theirs.all_estimate) for noise, theirs in paper.items()]
    for name, points in (("all-iterates", every), ("final", finals)):
        xs, ys = [noise for noise, _ in points], [value for _, value in points]
        ax.plot(xs, ys, "x", color=COLOURS[name], ms=7, label=f"{name}, the paper's")
    ax.set_yscale("log")
    ax.set_xlabel("noise multiplier")
    ax.set_ylabel("ε")
    figure.legend(loc="outside right center")


def conclusion(found: Found, paper: Mapping[float, EpsilonRow], *, original: str) -> str:
    """Agreement and disagreement with the paper, as text."""
    readings = found["readings"]
    if not readings:
        return "No run is finished yet."
    stand_in = readings[0]["data"]
    lines = [
        f"Trained on {stand_in} ({readings[0]['dim']:,} parameters, {readings[0]['rounds']:,} rounds of "
        f"{readings[0]['clients_per_round']} clients, {readings[0]['canaries']:,} canaries and "
        f"{readings[0]['unobserved']:,} unobserved ones, delta {readings[0]['delta']:.3g}). The paper's numbers are for "
        f"{original}, so only size and direction can be compared."
    ]
    pairs = [
        (reading, row, paper[reading["noise_multiplier"]])
        for reading in readings
        if reading["noise_multiplier"] in paper and (row := rung(reading, "final"))
    ]
    ratios = [row["paper_epsilon"] / theirs.final_estimate for _, row, theirs in pairs]
    if ratios:
        lines.append(f"ε_est-final is {shown(min(ratios), 2)} to {shown(max(ratios), 2)} times the paper's.")
    over = [
        f"{shown(row['epsilon'])} against {shown(reading['analytical'])} at noise {reading['noise_multiplier']:g}"
        for reading in readings
        if reading["noise_multiplier"] > 0
        and (row := rung(reading, "all-iterates"))
        and row["epsilon"] > reading["analytical"]
    ]
    if over:
        lines.append(
            "ε_est-all exceeds the analytical ε, like the paper's 382 against 300, because a maximum over rounds is not "
            f"Gaussian. It is {', '.join(over)}."
        )
    if lost := not_learnt(readings):
        lines.append(f"{lost} The ε of such a run describes a valid mechanism, but not a useful model.")
    bounds = [row["paper_lower_bound"] for reading in readings if (row := rung(reading, "final"))]
    valid = [row["lower_bound"] for reading in readings if (row := rung(reading, "final"))]
    if bounds and any(math.isfinite(value) for value in bounds):
        lines.append(
            f"For the final model the paper's ε_lo is {shown(min(bounds))} to {shown(max(bounds))}, and the valid bound is "
            f"{shown(min(valid))} to {shown(max(valid))}."
        )
    return " ".join(lines)


def _positive(value: float) -> float:
    return max(value, 1e-2)
