"""Beyond the paper: other kinds of noise, check-ins, rungs, numbers of canaries, and amplification by random rounds."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coalmine.estimators.amplification import amplified_epsilon
from coalmine.estimators.correlated import BandedNoise, CorrelatedNoise, TreeNoise
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampling import RandomAllocation, Shuffled
from coalmine.simulation.clipping import AdaptiveClipping
from coalmine.simulation.config import RunConfig
from reproduction import paper_claims
from reproduction import table_5_emnist as emnist
from reproduction.epsilon_table import about, missing
from reproduction.experiment import Account, Experiment, Found, PaperCheck, Table, all_of, interval_shown, shown
from reproduction.experiment_options import RUNS, Options
from reproduction.paper import STACK_OVERFLOW
from reproduction.run_grid import Follow, PlannedRun, carry_out, distinct
from reproduction.run_numbers import RunNumbers, not_learnt, read_finished, rung
from reproduction.training_configs import WORDS_DELTA, with_canaries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISE = 0.16
BANDS = 16
WORD_ROUNDS = 2048


def base(options: Options) -> RunConfig:
    """The run of the handwriting table with the least noise; the others are variations of it."""
    return next(run.config for run in emnist.EXPERIMENT.plan(options) if run.noise_multiplier == NOISE)


def noise_runs(options: Options) -> dict[str, PlannedRun]:
    """Independent, tree and banded noise at the same analytical ε for a client who takes part once."""
    config = base(options)
    tree = TreeNoise(rounds=config.rounds)
    banded = BandedNoise.for_prefix_sums(config.rounds, bands=BANDS, momentum=config.server.momentum)
    return {
        "gaussian": PlannedRun(config=config),
        "tree": PlannedRun(config=_with_noise_of(config, tree.worst_strength(1, 1), noise="tree"), asked_as=NOISE),
        "banded": PlannedRun(
            config=_with_noise_of(config, banded.worst_strength(1, 1), noise="banded", bands=BANDS), asked_as=NOISE
        ),
    }


def _with_noise_of(config: RunConfig, strength: float, **changes: Any) -> RunConfig:
    """More noise on the updates, to compensate for ‖Cu‖² = `strength`; the noise on the clip's count is unchanged."""
    clipping = config.privacy.clipping_of(config.participation.clients_per_round)
    updates = clipping.update_noise_multiplier * math.sqrt(strength)
    count = clipping.count_noise_multiplier if isinstance(clipping, AdaptiveClipping) else math.inf
    total = (updates**-2 + count**-2) ** -0.5
    return replace(config, privacy=replace(config.privacy, noise_multiplier=total, **changes))


def check_in_runs(options: Options) -> dict[str, PlannedRun]:
    """Canaries that take part like clients: sampled independently in every round, or with a pause."""
    config = base(options)
    canaries, pauses = (60, (8, 20)) if options.small else (100, (8, 15))
    config = replace(config, canaries=replace(config.canaries, count=canaries, pattern="clients"))
    found = {"any round": replace(config, participation=replace(config.participation, kind="fixed"))}
    for pause in pauses:
        limited = replace(config.participation, kind="limited", separation=pause)
        found[f"{pause} rounds apart"] = replace(config, participation=limited)
    return {name: PlannedRun(config=changed) for name, changed in found.items()}


def canary_runs(options: Options) -> dict[str, PlannedRun]:
    """The same run with increasing numbers of canaries, and without canaries."""
    config = base(options)
    counts = (30, 100, 300, 1_000) if options.small else (100, 300, 1_000, 3_000)
    found = {str(count): PlannedRun(config=with_canaries(config, count)) for count in counts}
    return found | {"none": PlannedRun(config=config, without_canaries=True)}


def plan(options: Options) -> list[PlannedRun]:
    """All runs; those of the handwriting table are shared with it."""
    parts = (noise_runs(options), check_in_runs(options), canary_runs(options))
    return distinct([*emnist.EXPERIMENT.plan(options), *(run for part in parts for run in part.values())])


def gather(options: Options, follow: Follow) -> Found:
    """The numbers of the runs by question, and the analytical ε of random rounds."""
    asked = plan(options)
    done = carry_out(asked, options, follow=follow)
    read = {name: read_finished(directory) | {"densities": []} for name, directory in done.items()}

    def part(runs: dict[str, PlannedRun]) -> dict[str, str]:
        return {label: run.name for label, run in runs.items() if run.name in read}

    ladder = {f"{run.noise_multiplier:g}": run for run in emnist.EXPERIMENT.plan(options)}
    return about(options, list(read.values()), missing(asked, done)) | {
        "parts": {
            "noises": part(noise_runs(options)),
            "check_ins": part(check_in_runs(options)),
            "canaries": part(canary_runs(options)),
            "ladder": part(ladder),
        },
        "random_rounds": random_rounds(),
        "limited_noise": limited_noise(),
    }


def _part(found: Found, name: str) -> dict[str, RunNumbers]:
    """The readings of one question, by their names in its tables."""
    by_name = {reading["run"]: reading for reading in found["readings"]}
    return {label: by_name[run] for label, run in found["parts"][name].items()}


def _ladder(found: Found) -> list[RunNumbers]:
    return list(_part(found, "ladder").values())


def random_rounds() -> list[dict[str, float]]:
    """Analytical ε at Stack Overflow's noise levels: known round, round sampled by each client, fixed shuffled cohorts.

    Shuffling has a range: its upper end is no amplification, its lower end a proven attack.
    """
    found = []
    for noise in (*(noise for noise in STACK_OVERFLOW if noise), 0.5, 1.0):
        allocated = amplified_epsilon(noise, RandomAllocation(WORD_ROUNDS), WORDS_DELTA)
        shuffled = amplified_epsilon(noise, Shuffled(WORD_ROUNDS), WORDS_DELTA)
        found.append(
            {
                "noise_multiplier": noise,
                "unamplified": shuffled.high,
                "allocated": allocated.high,
                "shuffled_at_least": shuffled.low,
            }
        )
    return found


def limited_noise() -> list[dict[str, Any]]:
    """The effect of a pause between check-ins under correlated noise: analytical ε of five participations in 500 rounds."""
    rounds, times = 500, 5
    laws: dict[str, CorrelatedNoise] = {
        "tree": TreeNoise(rounds=rounds),
        "banded": BandedNoise.for_prefix_sums(rounds, bands=BANDS),
    }
    return [
        {
            "noise": name,
            "separation": separation,
            "sensitivity": math.sqrt(law.worst_strength(times, separation)),
            "once": math.sqrt(law.worst_strength(1, 1)),
        }
        for name, law in laws.items()
        for separation in (1, 16, 100)
    ]


def tables(found: Found) -> list[Table]:
    """One table for each question."""
    return [
        _noises(_part(found, "noises")),
        _limited_noise(found["limited_noise"]),
        _check_ins(_part(found, "check_ins")),
        _finals(_ladder(found)),
        _canaries(_part(found, "canaries")),
        _misleading(_ladder(found)),
        _random_rounds(found["random_rounds"]),
    ]


def _noises(readings: dict[str, RunNumbers]) -> Table:
    rows = []
    for name, reading in readings.items():
        others = rung(reading, "known-others")
        cells = [shown(row["epsilon"]) if (row := rung(reading, part)) else "-" for part in ("final", "known-round")]
        met = [shown(others["epsilon"]), interval_shown(others["interval"])] if others else ["-", "-"]
        analytical = shown(others["analytical"]) if others else "-"
        client = f"{shown(reading['client_epsilon'])} ({reading['client_rounds']} rounds)"
        accuracy = f"{reading['accuracy']:.1%}"
        rows.append((name, f"{reading['noise_multiplier']:.3g}", accuracy, *cells, *met, analytical, client))
    columns = ("noise", "multiplier", "accuracy", "final ε", "known-round ε", "known-others ε", "95 % interval",
               "its analytical ε", "analytical ε of a client")  # fmt: skip
    return Table(
        "Fresh, tree and banded noise, at equal analytical ε for one participation", columns, tuple(rows), left=1
    )


def _limited_noise(items: Sequence[dict[str, Any]]) -> Table:
    rows = tuple(
        (item["noise"], str(item["separation"]), shown(item["sensitivity"]), shown(item["sensitivity"] / item["once"]))
        for item in items
    )
    columns = ("noise", "rounds apart", "sensitivity of five participations", "over that of one")
    return Table("The effect of a pause between check-ins under correlated noise, 500 rounds", columns, rows, left=1)


def _check_ins(readings: dict[str, RunNumbers]) -> Table:
    rows = []
    for name, reading in readings.items():
        least, most = reading["canary_rounds"]
        worst = mechanism_epsilon(reading["update_noise_multiplier"], delta=reading["delta"], participations=most)
        final, every = rung(reading, "final"), rung(reading, "all-iterates")
        cells = [shown(row["epsilon"]) if row else "-" for row in (final, every)]
        rows.append((name, f"{least} to {most}", shown(float(worst)), *cells, f"{reading['accuracy']:.1%}"))
    columns = (
        "check-ins",
        "rounds of a canary",
        "analytical ε of the most exposed",
        "final ε",
        "all-iterates ε",
        "accuracy",
    )
    return Table("Limited check-ins: canaries that take part like clients", columns, tuple(rows), left=1)


def _finals(readings: Sequence[RunNumbers]) -> Table:
    rows = []
    for reading in readings:
        pair = [rung(reading, name) for name in ("final", "final-update")]
        cells = [
            cell
            for row in pair
            for cell in ((shown(row["epsilon"]), interval_shown(row["interval"])) if row else ("-", "-"))
        ]
        floor = shown(pair[0]["floor"]) if pair[0] else "-"
        rows.append((f"{reading['noise_multiplier']:g}", *cells, floor))
    columns = ("noise", "final ε", "95 % interval", "final-update ε", "95 % interval", "floor")
    return Table("An attacker who also knows the initial model: final against final-update", columns, tuple(rows))


def _canaries(readings: dict[str, RunNumbers]) -> Table:
    rows = []
    baseline = readings.get("none")
    for name, reading in readings.items():
        if name == "none":
            continue
        share = reading["canary_slots"] / (reading["canary_slots"] + reading["client_slots"])
        cost = shown(100 * (baseline["accuracy"] - reading["accuracy"]), 2) if baseline else "-"
        widths = [shown(width(rung(reading, part)), 2) for part in ("final", "known-others")]
        rows.append((name, f"{share:.1%}", f"{reading['accuracy']:.1%}", cost, *widths))
    columns = (
        "canaries",
        "of all slots",
        "accuracy",
        "cost in points",
        "width of final's interval",
        "of known-others'",
    )
    return Table("Cost and benefit of more canaries", columns, tuple(rows))


def width(row: dict[str, Any] | None) -> float:
    """Width of the 95 % interval."""
    return math.nan if row is None or row["interval"] is None else float(row["interval"][1] - row["interval"][0])


def _misleading(readings: Sequence[RunNumbers]) -> Table:
    rows = []
    for reading in readings:
        every, known = rung(reading, "all-iterates"), rung(reading, "known-round")
        if not every or not known:
            continue
        rows.append(
            (
                f"{reading['noise_multiplier']:g}",
                shown(reading["update_epsilon"]),
                shown(every["epsilon"]),
                shown(every["anderson_darling"]["p_value"], 2),
                shown(every["lower_bound"]),
                shown(known["epsilon"]),
                interval_shown(known["interval"]),
                shown(known["lower_bound"]),
            )
        )
    columns = ("noise", "analytical ε", "all-iterates ε", "AD p", "its valid bound", "known-round ε", "95 % interval",
               "its valid bound")  # fmt: skip
    return Table("The maximum over rounds is misleading, and known-round is not", columns, tuple(rows))


def _random_rounds(items: Sequence[dict[str, float]]) -> Table:
    rows = tuple(
        (
            f"{item['noise_multiplier']:g}",
            shown(item["unamplified"], 4),
            shown(item["allocated"], 4),
            f"{1 - item['allocated'] / item['unamplified']:.0%}",
            shown(item["shuffled_at_least"], 4),
        )
        for item in items
    )
    title = f"Analytical ε, each client once in one of {WORD_ROUNDS:,} rounds, delta {WORDS_DELTA:.3g}"
    return Table(
        title, ("noise", "round known", "random allocation, at most", "less by", "shuffled cohorts, at least"), rows
    )


def checks(found: Found) -> list[PaperCheck]:
    """The audit's claims under every kind of noise, and a check for each question."""
    noises = list(_part(found, "noises").values())
    wide = [
        (name, width(rung(reading, "known-others")))
        for name, reading in _part(found, "canaries").items()
        if name != "none"
    ]
    narrower = []
    if len(wide) > 1:
        (fewest, before), (most, after) = wide[0], wide[-1]
        narrower = [(f"{fewest} canaries: {shown(before, 2)}, {most}: {shown(after, 2)}", after < before)]
    above, known = [], []
    for reading in _ladder(found):
        every, row = rung(reading, "all-iterates"), rung(reading, "known-round")
        if reading["noise_multiplier"] > 0 and every and row and row["interval"]:
            name = f"noise {reading['noise_multiplier']:g}"
            above.append((f"{name}: {shown(every['epsilon'])}", every["epsilon"] > reading["update_epsilon"]))
            known.append(
                (f"{name}: {interval_shown(row['interval'])}", row["interval"][0] <= reading["update_epsilon"])
            )
    some = PaperCheck(
        "the estimate from the maximum over rounds exceeds the analytical ε at some noise level",
        any(holds for _, holds in above) if above else None,
        "; ".join(name for name, holds in above if holds) or "nowhere",
    )
    exposed = _most_exposed(_part(found, "check_ins"))
    return [
        paper_claims.covers_analytical(noises),
        paper_claims.bounds_hold(noises),
        all_of(
            "known-others has a narrower interval with the most canaries than with the fewest",
            narrower,
            nothing="nothing is finished",
        ),
        some,
        all_of("known-round's 95 % interval never lies above the analytical ε", known, nothing="nothing is finished"),
        all_of(
            "with a longer pause between check-ins, the most exposed canary takes part in fewer rounds",
            exposed,
            nothing="nothing is finished",
        ),
        all_of(
            "random allocation's ε is at most shuffling's lower end, and that at most the unamplified ε",
            [
                (f"noise {i['noise_multiplier']:g}", i["allocated"] <= i["shuffled_at_least"] <= i["unamplified"])
                for i in found["random_rounds"]
            ],
            nothing="",
        ),
    ]


def _most_exposed(readings: dict[str, RunNumbers]) -> list[tuple[str, bool]]:
    most = [(name, reading["canary_rounds"][1]) for name, reading in readings.items()]
    return [(f"{name}: {times}", times <= before) for (_, before), (name, times) in itertools.pairwise(most)]


def draw(figure: "Figure", found: Found) -> None:
    """Four plots: kinds of noise, canaries, maximum against known-round, random rounds."""
    axes = figure.subplots(1, 4)
    _draw_noises(axes[0], _part(found, "noises"))
    _draw_canaries(axes[1], _part(found, "canaries"))
    _draw_misleading(axes[2], _ladder(found))
    items = found["random_rounds"]
    for key, mark in (("unamplified", "o-"), ("shuffled_at_least", "^:"), ("allocated", "s--")):
        axes[3].loglog(
            [item["noise_multiplier"] for item in items],
            [item[key] for item in items],
            mark,
            ms=4,
            label=key.replace("_", " "),
        )
    axes[3].set_title("random rounds", fontsize=9)
    axes[3].set_xlabel("noise multiplier")
    axes[3].legend(fontsize=7)


def _draw_noises(ax: Any, readings: dict[str, RunNumbers]) -> None:
    names = list(readings)
    ax.bar(range(len(names)), [100 * readings[name]["accuracy"] for name in names], color="#1d63b8", width=0.6)
    ax.set_xticks(range(len(names)), names, fontsize=8)
    ax.set_ylabel("accuracy in per cent")
    if names:
        ax.set_ylim(bottom=100 * min(reading["accuracy"] for reading in readings.values()) - 5)
    ax.set_title("noise at equal analytical ε", fontsize=9)


def _draw_canaries(ax: Any, readings: dict[str, RunNumbers]) -> None:
    counted = [(int(name), reading) for name, reading in readings.items() if name != "none"]
    ax.loglog([k for k, _ in counted], [width(rung(r, "known-others")) for _, r in counted], "o-", label="known-others")
    ax.loglog([k for k, _ in counted], [width(rung(r, "final")) for _, r in counted], "s--", label="final")
    ax.set_xlabel("canaries")
    ax.set_title("width of the 95 % interval", fontsize=9)
    ax.legend(fontsize=7)


def _draw_misleading(ax: Any, readings: Sequence[RunNumbers]) -> None:
    noisy = [reading for reading in readings if reading["noise_multiplier"] > 0]
    xs = [reading["noise_multiplier"] for reading in noisy]
    for name, mark in (("all-iterates", "o-"), ("known-round", "s-")):
        ax.semilogy(
            xs, [(rung(reading, name) or {"epsilon": math.nan})["epsilon"] for reading in noisy], mark, label=name
        )
    ax.semilogy(xs, [reading["update_epsilon"] for reading in noisy], "k--", lw=1, label="analytical")
    ax.set_xlabel("noise multiplier")
    ax.set_title("ε", fontsize=9)
    ax.legend(fontsize=7)


def conclusion(found: Found) -> str:
    """The conclusion as text, question by question."""
    lines = []
    noises = _part(found, "noises")
    if len(noises) > 1:
        values = ", ".join(f"{name} {reading['accuracy']:.1%}" for name, reading in noises.items())
        lines.append(f"At the same analytical ε for one participation the accuracies are: {values}.")
    check_ins = _part(found, "check_ins")
    if len(check_ins) > 1:
        first, *_, last = check_ins.items()
        lines.append(
            f"Sampled independently in every round, a canary takes part up to {first[1]['canary_rounds'][1]} times; "
            f"{last[0]}, up to {last[1]['canary_rounds'][1]} times."
        )
    gained = [item for item in found["random_rounds"] if item["allocated"] < 0.999 * item["unamplified"]]
    if gained:
        most = max(gained, key=lambda item: 1 - item["allocated"] / item["unamplified"])
        own = [
            1 - item["allocated"] / item["unamplified"] for item in gained if item["noise_multiplier"] in STACK_OVERFLOW
        ]
        lines.append(
            f"Random allocation reduces ε from {shown(most['unamplified'])} to {shown(most['allocated'])} at noise "
            f"{most['noise_multiplier']:g}; at the paper's noise levels it reduces ε by {min(own):.0%} to {max(own):.0%}. "
            f"With fixed shuffled cohorts, ε is at least {shown(most['shuffled_at_least'])} at noise "
            f"{most['noise_multiplier']:g}."
        )
    if lost := not_learnt(found["readings"]):
        lines.append(lost)
    return " ".join(lines) or "No run is finished yet."


EXPERIMENT = Experiment(
    name="beyond",
    title="Beyond the paper",
    takes=RUNS,
    plan=plan,
    gather=gather,
    size=(15.0, 3.6),
    account=Account(tables, checks, conclusion, draw),
)
