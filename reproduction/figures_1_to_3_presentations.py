"""Section 5.2: canaries with 1, 2, 4 and 8 presentations, as four groups of one run for each noise multiplier."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from reproduction import epsilon_table, paper_claims
from reproduction.epsilon_table import kind
from reproduction.experiment import Account, Experiment, Found, PaperCheck, Table, interval_shown, shown
from reproduction.experiment_options import RUNS, Options
from reproduction.paper import STACK_OVERFLOW
from reproduction.run_grid import Follow, PlannedRun
from reproduction.run_numbers import RunNumbers, not_learnt
from reproduction.training_configs import CANARIES, characters, longer, with_groups, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMES = (1, 2, 4, 8)
CHARACTER_NOISES = (0.16, 0.18, 0.195)  # as in the paper's Figure 3
CHARACTER_CANARIES = 250  # per group: 34 clients per round leave no room for more
SMALL_CANARIES = 100
COLOURS = ("#9ecae1", "#4f9bd0", "#1d63b8", "#0b2f5e")


def plan(options: Options) -> list[PlannedRun]:
    """Next words with the noise multipliers of Table 4, then handwriting with those of Figure 3."""
    large, small = (SMALL_CANARIES,) * 2 if options.small else (CANARIES, CHARACTER_CANARIES)
    runs = epsilon_table.grid(with_groups(longer(words(options), options), TIMES, each=large), tuple(STACK_OVERFLOW))
    config = with_groups(longer(characters(options), options), TIMES, each=small)
    return runs + epsilon_table.grid(replace(config, seed=config.seed + len(runs)), CHARACTER_NOISES)


def gather(options: Options, follow: Follow) -> Found:
    """The numbers of the runs by group."""
    return epsilon_table.gather(plan(options), options, follow)


def tables(found: Found) -> list[Table]:
    """ε from the final model by presentations, and the rung of the analytical ε."""
    return [_table(found["readings"], "final"), _table(found["readings"], "known-others")]


def _table(readings: Sequence[RunNumbers], name: str) -> Table:
    rows = [
        (
            f"{kind(reading)}, {reading['task']}",
            f"{reading['noise_multiplier']:g}",
            f"{row['presentations']}×",
            shown(row["paper_epsilon"]),
            shown(row["paper_lower_bound"]),
            shown(row["epsilon"]),
            interval_shown(row["interval"]),
            shown(row["lower_bound"]),
            shown(row["floor"]),
            shown(row["analytical"], 4),
        )
        for reading in readings
        for row in _groups(reading, name)
    ]
    columns = ("task", "noise", "shown", "ε_est", "ε_lo", "ε", "95 % interval", "valid bound", "floor",
               "analytical ε of updates")  # fmt: skip
    return Table(f"{name}, by presentations; ε_est and ε_lo are the paper's estimators", columns, tuple(rows), left=1)


def _groups(reading: RunNumbers, name: str) -> list[dict[str, Any]]:
    rows = [row for row in reading["rows"] if row["rung"] == name and row["presentations"]]
    return sorted(rows, key=lambda row: row["presentations"])


def checked(found: Found) -> list[PaperCheck]:
    """Epsilon grows with presentations, and known-others agrees with the analytical ε of every group."""
    readings = found["readings"]
    return [
        paper_claims.grows_with_presentations(readings),
        paper_claims.covers_analytical(readings),
        paper_claims.bounds_hold(readings),
    ]


def draw(figure: "Figure", found: Found) -> None:
    """Plot densities above and bars below, in one column per run."""
    readings = found["readings"]
    axes = figure.subplots(2, max(len(readings), 1), squeeze=False)
    null = np.linspace(-4, 4, 201)
    for column, reading in enumerate(readings):
        top, bottom = axes[0][column], axes[1][column]
        top.plot(null, np.exp(-(null**2) / 2) / np.sqrt(2 * np.pi), color="k", lw=1)
        for density in reading["densities"]:
            colour = COLOURS[TIMES.index(density["presentations"])]
            label = f"{density['presentations']}×" if column == 0 else None
            top.plot(density["x"], density["density"], color=colour, label=label)
        top.set_title(f"{kind(reading)}\nnoise {reading['noise_multiplier']:g}", fontsize=8)
        top.set_xlabel("cosine · √d", fontsize=8)
        for place, row in enumerate(_groups(reading, "final")):
            bottom.bar(place, row["paper_epsilon"], color=COLOURS[place], width=0.7)
            bottom.plot([place - 0.35, place + 0.35], [row["paper_lower_bound"]] * 2, color="#c62828", lw=1.5)
            bottom.plot([place - 0.35, place + 0.35], [row["lower_bound"]] * 2, color="k", lw=1.5)
        bottom.set_xticks(range(len(TIMES)), [f"{number}×" for number in TIMES])
    if readings:
        axes[0][0].set_ylabel("density")
        axes[1][0].set_ylabel("ε_est (bar), ε_lo (red), valid bound (black)", fontsize=8)
        figure.legend(loc="outside right upper")


def conclusion(found: Found) -> str:
    """The conclusion as text."""
    if not found["readings"]:
        return "No run is finished yet."
    parts = []
    for reading in found["readings"]:
        values = [shown(row["paper_epsilon"]) for row in _groups(reading, "final")]
        parts.append(f"For {kind(reading)} at noise {reading['noise_multiplier']:g}: {', '.join(values)}.")
    rises = paper_claims.grows_with_presentations(found["readings"]).outcome
    lines = [
        f"These are the values of ε_est-final at {', '.join(map(str, TIMES))} presentations. {' '.join(parts)} The paper's "
        f"Figures 1 to 3 print no numbers, so only their shape can be compared: that ε rises with presentations {rises}. "
        "Here all groups belong to one run, while the paper has a separate run for each."
    ]
    for name in dict.fromkeys(map(kind, found["readings"])):
        readings = [reading for reading in found["readings"] if kind(reading) == name]
        sizes = [row["canaries"] for reading in readings for row in _groups(reading, "final")]
        fewest = min(sizes, default=CANARIES)
        if fewest < CANARIES:
            lines.append(f"Groups of {name} have {fewest:,} canaries, fewer than the paper's {CANARIES:,}.")
        lines.append(not_learnt(readings))
    return " ".join(line for line in lines if line)


EXPERIMENT = Experiment(
    name="presentations",
    title="Canaries with several presentations (Figures 1 to 3)",
    takes=RUNS,
    plan=plan,
    gather=gather,
    size=(15.0, 5.0),
    account=Account(tables, checked, conclusion, draw),
)
