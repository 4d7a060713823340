"""Table 3: accuracy with and without canaries; both runs of a pair have the same clients and the same noise."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.simulation.config import RunConfig
from reproduction.epsilon_table import missing
from reproduction.experiment import Account, Experiment, Found, PaperCheck, Table, beside, shown
from reproduction.experiment_options import RUNS, Options
from reproduction.paper import ACCURACY
from reproduction.run_grid import Follow, PlannedRun, carry_out
from reproduction.run_numbers import FELL_APART, RunNumbers, least_learnt, read_finished, rung
from reproduction.training_configs import with_canaries, with_noise, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pair = tuple[PlannedRun, PlannedRun]  # without canaries, and with them
SMALL_SEEDS = 2
COLUMNS = ("noise", "analytical ε", "without canaries", "with", "cost", "pairs")
MOST_POINTS, MOST_SHARE = 0.2, 0.3  # percentage points of accuracy, and percent of client slots


def pairs(options: Options) -> list[Pair]:
    """Next words with the paper's 1,000 canaries."""
    base = few_canaries(options) if options.small else words(options)
    return pairs_of(base, seeds=options.seeds or (SMALL_SEEDS if options.small else 1))


def pairs_of(base: RunConfig, *, seeds: int) -> list[Pair]:
    """A run without canaries and one with them, for each of the paper's noise multipliers and each seed."""
    configs = [
        replace(with_noise(base, noise), seed=base.seed + place + len(ACCURACY) * number)
        for number in range(seeds)
        for place, noise in enumerate(ACCURACY)
    ]
    return [(PlannedRun(config=config, without_canaries=True), PlannedRun(config=config)) for config in configs]


def few_canaries(options: Options) -> RunConfig:
    """Digits with 34 clients in each of 100 rounds, so that ten canaries are 0.3 % of the slots."""
    base = with_canaries(words(options), 10)
    return replace(base, participation=replace(base.participation, clients_per_round=34))


def plan(options: Options) -> list[PlannedRun]:
    """Both runs of every pair."""
    return runs_of(pairs(options))


def runs_of(asked: list[Pair]) -> list[PlannedRun]:
    """The runs of these pairs, one after another."""
    return [planned for pair in asked for planned in pair]


def gather(options: Options, follow: Follow) -> Found:
    """The numbers of the finished pairs."""
    return gather_pairs(pairs(options), options, follow)


def gather_pairs(asked: list[Pair], options: Options, follow: Follow) -> Found:
    """The accuracies of the finished pairs."""
    runs = runs_of(asked)
    done = carry_out(runs, options, follow=follow)
    read = {name: read_finished(directory) for name, directory in done.items()}
    found = [
        _pair(read[without.name], read[mixed.name])
        for without, mixed in asked
        if without.name in read and mixed.name in read
    ]
    seconds = sum(reading["seconds"] for reading in read.values())
    first = next(iter(read.values()), None)
    return {
        "scale": options.scale,
        "pairs": found,
        "seconds": seconds,
        "data": first and first["data"],
        "dim": first and first["dim"],
        "rounds": first and first["rounds"],
        "device": first and first["device"],
        "delta": first and first["delta"],
        "missing": missing(runs, done),
    }


def _pair(without: RunNumbers, mixed: RunNumbers) -> dict[str, Any]:
    absent = rung(without, "final")
    return {
        "noise_multiplier": mixed["noise_multiplier"],
        "without": without["accuracy"],
        "with": mixed["accuracy"],
        "canaries": mixed["canaries"],
        "share": mixed["canary_slots"] / (mixed["canary_slots"] + mixed["client_slots"]),
        "runs": [without["run"], mixed["run"]],
        "absent_epsilon": absent and absent["epsilon"],  # of canaries that never took part
        "absent_floor": absent and absent["floor"],
    }


def learnt(found: Found) -> list[dict[str, Any]]:
    """The pairs in which both models have at least half of the best accuracy; in others training diverged."""
    least = least_learnt(max(pair["without"], pair["with"]) for pair in found["pairs"])
    return [pair for pair in found["pairs"] if min(pair["without"], pair["with"]) >= least]


def cost(found: Found, noise_multiplier: float | None = None) -> tuple[float, float, float]:
    """Points of accuracy that canaries cost on average, with a 95 % t-interval over the pairs that learnt."""
    chosen = [
        pair for pair in learnt(found) if noise_multiplier is None or pair["noise_multiplier"] == noise_multiplier
    ]
    lost = np.array([100 * (pair["without"] - pair["with"]) for pair in chosen])
    if lost.size < 2:
        return (float(lost.mean()) if lost.size else math.nan), -math.inf, math.inf
    half = float(stdtrit(lost.size - 1, 0.975)) * float(lost.std(ddof=1)) / math.sqrt(lost.size)
    return float(lost.mean()), float(lost.mean()) - half, float(lost.mean()) + half


def tables(found: Found) -> list[Table]:
    """Table 3 next to our values."""
    title = "Accuracy in per cent, ours / the paper's; the cost is in points, with a 95 % interval over seeds"
    return [Table(title, COLUMNS, tuple(_rows(found, ACCURACY)))]


def tables_of_ours(found: Found) -> list[Table]:
    """The same for an experiment that is not in the paper."""
    title = "Accuracy in per cent; the cost is in points, with a 95 % interval over seeds"
    return [Table(title, COLUMNS, tuple(_rows(found, {})))]


def _rows(found: Found, paper: Mapping[float, tuple[float, float, float]]) -> Iterator[tuple[str, ...]]:
    kept = learnt(found)
    for noise in ACCURACY:
        chosen = [pair for pair in found["pairs"] if pair["noise_multiplier"] == noise]
        if not chosen:
            continue
        ours = (
            float(mechanism_epsilon(noise, delta=found["delta"])),
            100 * float(np.mean([pair["without"] for pair in chosen])),
            100 * float(np.mean([pair["with"] for pair in chosen])),
        )
        mean, low, high = cost(found, noise)
        lost = "-" if math.isnan(mean) else f"{mean:.2f}"
        lost += f" ({low:.2f} … {high:.2f})" if math.isfinite(low) else ""
        counted = sum(pair["noise_multiplier"] == noise for pair in kept)
        pairs_shown = str(counted) if counted == len(chosen) else f"{counted} of {len(chosen)}"
        if noise in paper:
            lost += f" / {paper[noise][1] - paper[noise][2]:.1f}"
            yield (f"{noise:g}", *(beside(*both) for both in zip(ours, paper[noise], strict=True)), lost, pairs_shown)
        else:
            yield (f"{noise:g}", *(shown(value) for value in ours), lost, pairs_shown)


def checks(found: Found) -> list[PaperCheck]:
    """The cost of canaries."""
    mean, low, high = cost(found)
    share = 100 * max((pair["share"] for pair in found["pairs"]), default=math.nan)
    claim = f"canaries as {MOST_SHARE:g} % of client slots cost at most {MOST_POINTS:g} points of accuracy"
    detail = f"{shown(mean, 2)} points, 95 % interval {low:.2f} … {high:.2f} over {len(learnt(found))} pairs; "
    detail += f"{shown(share, 2)} % of the slots"
    holds = None if share > MOST_SHARE * 1.05 or low <= MOST_POINTS < high or math.isnan(mean) else high <= MOST_POINTS
    return [PaperCheck(claim, holds, detail)]


def draw(figure: "Figure", found: Found) -> None:
    """Plot accuracy against noise, with and without canaries."""
    ax = figure.add_subplot()
    for key, label, colour in (("without", "without canaries", "#5f6b7a"), ("with", "with canaries", "#1d63b8")):
        pairs_found = found["pairs"]
        ax.plot([pair["noise_multiplier"] for pair in pairs_found], [100 * pair[key] for pair in pairs_found], "o",
                color=colour, mfc="none" if key == "with" else colour, label=label)  # fmt: skip
    ax.set_xlabel("noise multiplier")
    ax.set_ylabel("accuracy in per cent")
    figure.legend(loc="outside right center")


def conclusion(found: Found) -> str:
    """The conclusion as text, with the paper's numbers."""
    worst = max(before - after for _, before, after in ACCURACY.values())
    text = (
        f"In the paper canaries cost at most {worst:.1f} points. Its accuracies are for another data set and cannot be "
        "compared with these."
    )
    return f"{conclusion_of_ours(found)} {text}" if found["pairs"] else conclusion_of_ours(found)


def conclusion_of_ours(found: Found) -> str:
    """The conclusion as text."""
    if not found["pairs"]:
        return "No run is finished yet."
    mean, low, high = cost(found)
    absent = [pair for pair in found["pairs"] if pair["absent_epsilon"] is not None]
    quiet = sum(pair["absent_epsilon"] <= pair["absent_floor"] for pair in absent)
    text = (
        f"Trained on {found['data']} ({found['dim']:,} parameters, {found['rounds']:,} rounds). Both runs of a pair have "
        f"the same clients in the same rounds, the same initial model and the same noise. Canaries cost {mean:.2f} points "
        f"(95 % interval {low:.2f} … {high:.2f}). In the runs without canaries, the audit looked for canaries that never "
        f"took part: its estimate was at most the floor in {quiet} of {len(absent)} runs."
    )
    kept = learnt(found)
    apart = [pair for pair in found["pairs"] if pair not in kept]
    if apart:
        named = ", ".join(
            f"{pair['without']:.1%} without canaries and {pair['with']:.1%} with them at noise "
            f"{pair['noise_multiplier']:g}"
            for pair in apart
        )
        text += (
            f" Excluded from the cost, because training diverged in one run of the pair or in both: {named}. "
            + FELL_APART
        )
    return text


EXPERIMENT = Experiment(
    name="accuracy",
    title="The cost of canaries in accuracy (Table 3)",
    takes=(*RUNS, "seeds"),
    plan=plan,
    gather=gather,
    account=Account(tables, checks, conclusion, draw),
)
