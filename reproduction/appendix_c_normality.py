"""Appendix C: normality of the cosines. Anderson-Darling for 15 sets of them, and for a million of the exact null."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import binom

from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.normality import anderson_darling
from coalmine.estimators.null import CosineNull
from reproduction import epsilon_table
from reproduction.experiment import Account, Experiment, Found, PaperCheck, Table, beside, shown
from reproduction.experiment_options import RUNS, Options
from reproduction.paper import CRITICAL_1, CRITICAL_15, NORMALITY, NORMALITY_TIMES
from reproduction.run_grid import Follow, PlannedRun
from reproduction.run_numbers import RunNumbers, not_learnt
from reproduction.training_configs import CANARIES, longer, with_groups, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIM, SAMPLES, DRAWS = 1_000, 1_000_000, 20
SMALL_CANARIES = 100


def plan(options: Options) -> list[PlannedRun]:
    """A run for each noise multiplier, with a group of canaries for each number of presentations."""
    each = SMALL_CANARIES if options.small else CANARIES
    return epsilon_table.grid(
        with_groups(longer(words(options), options), NORMALITY_TIMES, each=each), tuple(NORMALITY)
    )


def gather(options: Options, follow: Follow) -> Found:
    """The numbers of the runs, and the exact null."""
    return epsilon_table.gather(plan(options), options, follow) | {"null": exact_null(3 if options.small else DRAWS)}


def exact_null(draws: int, *, seed: int = 1) -> list[dict[str, float]]:
    """Anderson-Darling of a million cosines of the exact null at d = 1000, against a fitted normal and N(0, 1/d)."""
    found = []
    for number in range(draws):
        sample = CosineNull(DIM).sample(np.random.default_rng([seed, number]), SAMPLES)
        fitted = anderson_darling(sample)
        given = anderson_darling(sample, normal=Gaussian(0.0, 1 / math.sqrt(DIM)))
        found.append({"statistic": fitted.statistic, "p_value": fitted.p_value, "given_p_value": given.p_value})
    return found


def sets(found: Found) -> list[dict[str, Any]]:
    """Every set of cosines with the final model."""
    return [
        {"noise_multiplier": reading["noise_multiplier"], "presentations": row["presentations"]}
        | row["anderson_darling"]
        for reading in found["readings"]
        for row in _groups(reading)
    ]


def _groups(reading: RunNumbers) -> list[dict[str, Any]]:
    rows = [row for row in reading["rows"] if row["rung"] == "final" and row["presentations"]]
    return sorted(rows, key=lambda row: row["presentations"])


def tables(found: Found) -> list[Table]:
    """Tables of the statistics (ours / the paper's), the p-values, and the exact null."""
    statistics, chances = [], []
    for reading in found["readings"]:
        theirs = NORMALITY[reading["noise_multiplier"]]
        groups = _groups(reading)
        noise = f"{reading['noise_multiplier']:g}"
        cells = [
            beside(row["anderson_darling"]["statistic"], theirs[NORMALITY_TIMES.index(row["presentations"])])
            for row in groups
        ]
        statistics.append((noise, *cells))
        chances.append((noise, *(shown(row["anderson_darling"]["p_value"], 2) for row in groups)))
    columns = ("noise", *(f"{number}×" for number in NORMALITY_TIMES))
    drawn = tuple(
        (str(place), shown(item["statistic"]), shown(item["p_value"], 2), shown(item["given_p_value"], 2))
        for place, item in enumerate(found["null"], start=1)
    )
    return [
        Table("Anderson-Darling of the cosines with the final model, ours / the paper's", columns, tuple(statistics)),
        Table("p-values of ours", columns, tuple(chances)),
        Table(
            f"{SAMPLES:,} cosines of the exact null, d = {DIM:,}",
            ("sample", "statistic", "p, fitted normal", "p, N(0, 1/d)"),
            drawn,
        ),
    ]


def checks(found: Found) -> list[PaperCheck]:
    """There are no more small p-values than expected by chance."""
    chances = [item["p_value"] for item in sets(found)]
    rejected = sum(value < 0.05 for value in chances)
    likely = float(binom.sf(rejected - 1, len(chances), 0.05)) if chances else math.nan
    claim = "the normality of the sets is rejected at 5 % no more often than chance explains (at 1 %)"
    detail = f"{rejected} of {len(chances)}; by chance at least as many in {likely:.0%} of cases"
    above = sum(item["p_value"] < 0.15 for item in found["null"])
    share = float(binom.sf(above - 1, len(found["null"]), 0.15))
    null = (
        f"at 15 % Anderson-Darling cannot distinguish {SAMPLES:,} cosines of the exact null at d = {DIM:,} from normals"
    )
    seen = f"rejected in {above} of {len(found['null'])} samples; by chance at least as many in {share:.0%} of cases"
    return [PaperCheck(claim, likely > 0.01 if chances else None, detail), PaperCheck(null, share > 0.01, seen)]


def draw(figure: "Figure", found: Found) -> None:
    """Plot our statistics and the paper's for each set."""
    ax = figure.add_subplot()
    for place, item in enumerate(sets(found)):
        theirs = NORMALITY[item["noise_multiplier"]][NORMALITY_TIMES.index(item["presentations"])]
        ax.plot(place, item["statistic"], "o", color="#1d63b8", label="ours" if place == 0 else None)
        ax.plot(place, theirs, "x", color="#b45309", label="the paper's" if place == 0 else None)
    for value, share in ((0.561, "15 %"), (1.034, "1 %")):
        ax.axhline(value, color="0.5", lw=0.8)
        ax.text(0, value, share, fontsize=8, va="bottom")
    for value in (CRITICAL_15, CRITICAL_1):
        ax.axhline(value, color="0.7", lw=0.8, ls=":")
    labels = [f"{item['noise_multiplier']:g}\n{item['presentations']}×" for item in sets(found)]
    ax.set_xticks(range(len(labels)), labels, fontsize=7)
    ax.set_ylabel("Anderson-Darling statistic")
    ax.set_xlabel("noise multiplier, presentations")
    figure.legend(loc="outside right center")


def conclusion(found: Found) -> str:
    """The conclusion as text."""
    values = sets(found)
    null = [item["p_value"] for item in found["null"]]
    low = sum(value < 0.15 for value in null)
    start = "No run is finished yet. " if not values else ""
    if values:
        over = sum(item["statistic"] > CRITICAL_15 for item in values)
        its = sum(value > CRITICAL_15 for row in NORMALITY.values() for value in row)
        start = (
            f"The statistic exceeds {CRITICAL_15}, the paper's critical value at 15 %, in {over} of our {len(values)} sets "
            f"and in {its} of the paper's {sum(len(row) for row in NORMALITY.values())}. "
        )
    return (
        f"{start}Of {len(null)} samples of {SAMPLES:,} cosines from the exact null at d = {DIM:,}, normality is "
        f"rejected for {low} at 15 % (p-values {shown(min(null), 2)} to {shown(max(null), 2)}); for the paper's single "
        "sample it is not. The "
        f"exact null has kurtosis 3 − 6/(d + 2), {6 / (DIM + 2) / math.sqrt(24 / SAMPLES):.1f} standard errors below a "
        f"normal's at this size. {not_learnt(found['readings'])}".rstrip()
    )


EXPERIMENT = Experiment(
    name="normality",
    title="Are the cosines normal? (Appendix C)",
    takes=RUNS,
    plan=plan,
    gather=gather,
    account=Account(tables, checks, conclusion, draw),
)
