"""Calibration of published estimators: the study behind docs/evidence/estimators.md.

    python -m studies.literature_calibration                 every cell, 1,000 runs each: 7 minutes of processor time
    python -m studies.literature_calibration --write-docs    write docs/evidence/estimators.md and its plot

A cell is one line of studies/out/literature_calibration.jsonl and is not run again. A run samples 1,000 observed and 1,000
unobserved scores whose true epsilon is known, and evaluates every estimator. Methods that need several runs get the same
number of scores as 100 runs of 10 canaries on each side. Those that need checkpoints get 10, between which scores drift and
each canary rises once. CANIFE gets 10 rounds with 100 scores on each side, which together have the true epsilon.

Then rows are compared with those of public packages (studies/literature_packages.py). The study fails if one differs, or if
a "valid bound" whose assumptions hold exceeds the true epsilon in more than 5 % of runs, beyond chance.
"""

import argparse
import json
import math
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from coalmine import Gaussian, compare_estimators
from coalmine.argument_checks import Floats
from coalmine.estimators.literature.all_estimators import own_rows
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.mechanism import mechanism_noise
from studies import literature_packages
from studies.calibration import read_results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "literature_calibration.jsonl"
DOCS, PICTURE = ROOT / "docs" / "evidence" / "estimators.md", ROOT / "docs" / "evidence" / "estimators.png"
DELTA, CANARIES, RUNS = 1e-6, 1_000, 1_000
EPSILONS = (0.0, 0.8, 2.3, 4.9)
MECHANISMS = ("gaussian", "laplace")
CHECKPOINTS, ROUNDS, PER_RUN = 10, 10, 10
KNOWN = ("coalmine's lower bound", "paper's ε_lo")  # also shown with the null in closed form
CHANCE = 1e-3  # probability that a true rate of 5 % exceeds the allowed rate

Result = dict[str, Any]


def all_cells() -> dict[str, tuple[str, float]]:
    """Every cell by its name; without a leak both mechanisms have the same scores, so one of them is enough."""
    return {
        f"{mechanism}/eps={epsilon}": (mechanism, epsilon)
        for mechanism in MECHANISMS
        for epsilon in EPSILONS
        if epsilon or mechanism == "gaussian"
    }


def run_cell(name: str, runs: int) -> Result:
    """How often each estimator exceeds the true epsilon, and its mean; the seed is derived from the cell's name."""
    started = time.process_time()
    mechanism, epsilon = all_cells()[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values: dict[str, list[float]] = {}
    for _ in range(runs):
        for row in one_run(rng, mechanism, epsilon):
            values.setdefault(row.name, []).append(math.nan if row.value is None else row.value)
    rows = {
        method: {"above": float(np.mean(np.array(found) > epsilon)), "mean": float(np.mean(found))}
        for method, found in values.items()
    }
    return {"cell": name, "runs": runs, "seconds": round(time.process_time() - started, 1), "rows": rows}


def one_run(rng: np.random.Generator, mechanism: str, epsilon: float) -> Iterator[LiteratureRow]:
    """Every estimator that applies, on scores of one run."""
    if mechanism == "laplace":
        observed, unobserved = laplace_scores(rng, epsilon)
        tables = observed.reshape(-1, PER_RUN), unobserved.reshape(-1, PER_RUN)
        rows = compare_estimators(observed, unobserved, delta=DELTA, trials=tables)
    else:
        shift = 1 / float(mechanism_noise(epsilon, delta=DELTA)) if epsilon else 0.0
        observed, unobserved = rng.normal(shift, 1, CANARIES), rng.normal(size=CANARIES)
        tables = observed.reshape(-1, PER_RUN), unobserved.reshape(-1, PER_RUN)
        rows = compare_estimators(
            observed,
            unobserved,
            delta=DELTA,
            trials=tables,
            checkpoints=(checkpoints(rng, shift), checkpoints(rng, 0.0)),
            audited_rounds=(rounds(rng, shift), rounds(rng, 0.0)),
            sampling_probability=1.0,
        )
        for row in own_rows(observed, Gaussian(0.0, 1.0), delta=DELTA):
            if row.name in KNOWN:
                yield named(row, f"{row.name}, null known")
    yield from (row for row in rows if row.value is not None)


def laplace_scores(rng: np.random.Generator, epsilon: float) -> tuple[Floats, Floats]:
    """Scores of a Laplace mechanism: its privacy loss is bounded, so its epsilon at delta is s + 2 log(1 - delta)."""
    shift = epsilon - 2 * math.log1p(-DELTA)
    return rng.laplace(shift, 1, CANARIES), rng.laplace(size=CANARIES)


def checkpoints(rng: np.random.Generator, shift: float) -> Floats:
    """Scores that change by N(0, 1) from checkpoint to checkpoint; each canary rises by `shift` once."""
    steps = rng.normal(size=(CHECKPOINTS, CANARIES))
    steps[rng.integers(1, CHECKPOINTS, CANARIES), np.arange(CANARIES)] += shift
    return np.cumsum(steps, axis=0)


def rounds(rng: np.random.Generator, shift: float) -> Floats:
    """Scores of rounds with full participation, which together form one Gaussian mechanism with `shift`."""
    return rng.normal(shift / math.sqrt(ROUNDS), 1, (ROUNDS, CANARIES // ROUNDS))


def named(row: LiteratureRow, name: str) -> LiteratureRow:
    """The row under another name."""
    return LiteratureRow(**vars(row) | {"name": name})


def allowed_rate(runs: int) -> float:
    """The largest allowed rate of a 95 % bound: one that errs in 5 % of runs exceeds it with probability 0.1 %."""
    return float(binom.isf(CHANCE, runs, 0.05)) / runs


def failures(results: dict[str, Result]) -> list[str]:
    """A line for each valid bound that lacks its stated coverage in a cell where its assumptions hold."""
    bad, gaussian_only = [], if_gaussian()
    listed = {mechanism: methods(results, mechanism) for mechanism in MECHANISMS}
    for name, cell in results.items():
        mechanism = name.split("/")[0]
        for method, kind in listed[mechanism]:
            if kind != "valid bound" or (mechanism != "gaussian" and method in gaussian_only):
                continue
            rate, allowed = cell["rows"][method]["above"], allowed_rate(cell["runs"])
            if not rate <= allowed:
                bad.append(
                    f"{name}: {method} lies above the truth in {percent(rate)} of runs, {percent(allowed)} it may"
                )
    return bad


def if_gaussian() -> set[str]:
    """The bounds that are valid only if the mechanism is Gaussian or its scores are normal."""
    return {
        row.name
        for row in compare_estimators(np.arange(20.0), np.arange(20.0), delta=DELTA)
        if row.kind == "valid bound"
        and any(words in row.assumptions for words in ("a Gaussian mechanism", "normal scores"))
    }


def main() -> int:
    """Run the remaining cells, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help="Number of simulated audits in each cell.")
    parser.add_argument("--write-docs", action="store_true", help="Write docs/evidence/estimators.md and its plot.")
    options = parser.parse_args()
    results = read_results(RESULTS)
    if options.write_docs:
        compared = literature_packages.read_found()
        missing = [name for name in all_cells() if name not in results]
        missing += [] if compared else [literature_packages.FOUND.name]
        if missing or compared is None:
            print(f"run the study first: {', '.join(missing)} missing", file=sys.stderr)
            return 1
        DOCS.write_text(page(results, compared))
        draw(results)
        return 0
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as out:
        for name in all_cells():
            if results.get(name, {"runs": 0})["runs"] < options.runs:
                result = run_cell(name, options.runs)
                out.write(json.dumps(result) + "\n")
                out.flush()
                print(f"{name} {result['seconds']} s", flush=True)
    bad = failures(read_results(RESULTS))
    print("\n".join(bad) or "every valid bound holds where what it assumes is so", flush=True)
    return int(bool(literature_packages.main() or bad))


def page(results: dict[str, Result], compared: Result) -> str:
    """The whole of docs/evidence/estimators.md."""
    runs = min(result["runs"] for result in results.values())
    figures = {
        "runs": f"{runs:,}",
        "error": f"{100 * math.sqrt(0.05 * 0.95 / runs):.1f}",
        "minutes": f"{sum(result['seconds'] for result in results.values()) / 60:.0f}",
        "methods": methods_table(),
        "gaussian": rates_table(results, "gaussian"),
        "laplace": rates_table(results, "laplace"),
        "means": means_table(results),
        "allowed": percent(allowed_rate(runs)),
        "packages": packages_table(compared),
        "figures": figures_table(compared),
        "named": " and ".join(name.replace("==", " ") for name in compared["packages"]),
        "numbers": str(len(compared["rows"])),
    } | spoken(results)
    return TEMPLATE.format(**figures)


TEMPLATE = """# Every published estimator on the same scores

Many methods turn scores into an ε. Which of them exceed the true ε more often than they say? And
how close do the others come to it?

Every method on the same simulated scores, whose true ε is known: {runs} runs per cell, with a fixed
seed for each cell. There are 1,000 observed and 1,000 unobserved scores, and δ = 1e-6. One mechanism is Gaussian, one
is Laplace.

    python -m studies.literature_calibration                 # {minutes} minutes of processor time, and the packages
    python -m studies.literature_calibration --write-docs
    python -m studies.literature_packages                    # the packages alone

The second command only writes this page. The first and the last exit with 1 if a bar is missed or a package cannot be
installed.

The picture shows how often each method exceeds the true ε, and its mean value. The
[tables](#how-often-each-exceeds-the-true-ε) below have the numbers.

![How often each exceeds the true ε, and its mean value](estimators.png)

A label "valid bound" is only valid under the assumptions of its row. The next section sorts the
methods by what they assume.

To get this table for scores of your own:

    coalmine estimate scores.npz --delta 1e-6 --all    # a table; --json has every column
    coalmine report runs/digits-1                      # the page of a run has them too

```python
rows = coalmine.compare_estimators(observed, unobserved, delta=1e-6)
```

Each row has a value, its kind, what its auditor controls and receives (the paper's Table 1), its assumptions, and the
origin of its threshold. A method that needs more than the scores of one run says so. In Python, give it the missing
input: `trials=` (several runs), `checkpoints=` (several models of one run), or `audited_rounds=` with
`sampling_probability=` and `rounds=`.

## Which of them have their stated coverage

- **For every mechanism**: coalmine's lower bound, Jagielski 2020 split, and Steinke 2023 with fixed guesses. In no
  cell below does one of them exceed the true ε in more than {worst} of runs. A 95 % bound may err in 5 % ± {error} %.
  For a true ε of 4.9 their means are {mean_known} (coalmine, null known), {mean_steinke} (Steinke), {mean_bound}
  (coalmine with as many unobserved scores) and {mean_split} (split).
- **Only if the mechanism is Gaussian**: Xiang 2025, Nasr 2023 over all thresholds, Agrawal 2026 and Mahloujifar 2024
  with fixed guesses. Then they are bounds, and the tightest ones: {mean_xiang}, {mean_nasr}, {mean_agrawal} and
  {mean_mahloujifar} for 4.9. On a Laplace mechanism of true ε 2.3 they give {laplace_xiang}, {laplace_nasr},
  {laplace_agrawal} and {laplace_mahloujifar} on average, and exceed the truth in at least {least_laplace} of runs.
  They refute a claim of Gaussian noise with a given standard deviation. They bound nothing else.
- **Not at 95 %**: every method that takes the best threshold of the same scores without correction. Without a leak,
  the paper's ε_lo exceeds 0 in {lo_known} of runs (null known; {lo_two} with unobserved scores). Zanella-Béguelin
  2023 does in {zb_zero}, Jagielski 2020 in {best_jagielski}. For a Gaussian mechanism of 4.9, a threshold test shows
  much less than the true ε, so most of them lie below it again. For a Laplace mechanism, a threshold test shows the
  whole ε. There they exceed it in up to {laplace_lo}, {laplace_zb} and {laplace_jagielski} of runs. Nasr 2023 errs in
  {best_nasr} even for a Gaussian mechanism.
- **Not bounds at all**: the estimates. coalmine's exceeds the true ε in about half of the runs ({estimate_rates}), as
  an estimate should. The paper's fits the scores' std, and exceeds it in {paper_rates}. Both assume normal scores, so
  on Laplace noise both give {laplace_estimate} or more for 2.3. CANIFE's composes lower bounds of single rounds and
  gives {mean_canife} for 4.9.

## How often each exceeds the true ε

A 95 % lower bound may exceed the true ε in 5 % of runs. With {runs} runs per cell, 5 % is known to ± {error} % (one
standard deviation). Estimates should exceed it in about half of the runs. Without a leak, every value above 0 does.

Bold means more than {allowed}. A method that errs in 5 % of runs reaches that with probability at most 0.1 %. The
study fails if a valid bound is bold although its assumptions hold.

A Gaussian mechanism:

{gaussian}

A Laplace mechanism, whose privacy loss is bounded. The bulk of its scores says nothing about a Gaussian tail, because
there is none:

{laplace}

## Mean values

Mean value over the same runs. The closer a bound comes to the true ε from below, the better it is:

{means}

**"null known"**: the law of an unobserved score is known in closed form, as for cosines. **Pillutla 2023** has the
same number of scores, as 100 runs of 10 canaries on each side. **Jagielski 2023** has ten checkpoints, and **CANIFE
2022** ten audited rounds with 100 scores on each side; the true ε is that of all together.

## The methods

{methods}

- **Jagielski 2020**: Clopper–Pearson bounds on the two error rates of a threshold test, then Eq. 1. As published, one
  batch of models chooses the threshold and another tests it ("split": halves of the scores). Most users of the
  method, including the paper, take the best threshold of the same scores.
- **Zanella-Béguelin 2023**: the joint posterior of the two rates under Jeffreys' prior, converted to ε by quadrature.
  The value is the lower end of a one-sided credible interval. A test worse than chance also counts as a leak, so the
  interval never reaches 0.
- **Steinke 2023**, **Mahloujifar 2024**, **Xiang 2025**: one run, a fair coin for each canary, and the number of
  correct guesses of the coins. With "fixed guesses", the number of
  guesses is fixed in advance.
- **Nasr 2023**: the two rates are converted to Gaussian differential privacy, μ = Φ⁻¹(1 − FPR) − Φ⁻¹(FNR), then to ε
  at δ. "All thresholds" uses coalmine's bounds, which hold simultaneously at every threshold.
- **Agrawal 2026** ("Let's Ask Gauss"): one Gaussian is fitted to the observed scores and one to the unobserved
  scores. The two means get t intervals and the two stds χ² intervals, each at 98.75 %, so that all four hold at 95 %.
  The value is the smallest ε of any pair of Gaussians in that box. It relies on normal scores, and those of a
  mechanism with Poisson sampling are not.
- **Pillutla 2023**: several canaries in each of several runs; Wilson intervals from moments of order 1, 2 and 4 of
  exchangeable outcomes.
- **Jagielski 2023**: each canary's largest rise from one checkpoint to the next ("delta"), or its rise from the first
  to the last ("back-front"). ε is computed as in Jagielski 2020.
- **CANIFE 2022**: each audited round's ε gives a noise multiplier σ̂, and an accountant composes the rounds.

## Against public packages

Do our versions of these methods give the same numbers as public packages?

`python -m studies.literature_packages`. It gives {named}, in a separate environment, the same
scores or the same counts of errors: {numbers} numbers.

| coalmine | package | cases | largest difference | may differ by |
| --- | --- | --- | --- | --- |
{packages}

The packages were run at their own precision, and at levels that match ours.

At 10,000 normal quantiles (i + ½)/n on each side, δ = 1e-6, significance 0.05:

{figures}

Our numbers are those of the packages, to within their own precision. The tests compare
what neither has with brute force, quadrature, linear programming or simulation.
"""


def spoken(results: dict[str, Result]) -> dict[str, str]:
    """The figures quoted in the text."""

    def mean(name: str, cell: str = "gaussian/eps=4.9") -> str:
        return f"{results[cell]['rows'][name]['mean']:.2f}"

    def rate(name: str, cell: str = "gaussian/eps=0.0") -> str:
        return percent(results[cell]["rows"][name]["above"])

    def rates(name: str) -> str:
        return " to ".join(percent(f(_rates(results, name)[1:])) for f in (min, max))

    def most(name: str) -> str:
        return percent(max(cell["rows"][name]["above"] for cell in laplace))

    gaussian_only = if_gaussian()
    anywhere = [f"coalmine's lower bound{known}" for known in ("", ", null known")]
    anywhere += ["Jagielski 2020, split", "Steinke 2023, fixed guesses"]
    laplace = [cell for name, cell in results.items() if name.startswith("laplace")]
    return {
        "worst": percent(
            max(row["above"] for cell in results.values() for name, row in cell["rows"].items() if name in anywhere)
        ),
        "mean_known": mean("coalmine's lower bound, null known"),
        "mean_bound": mean("coalmine's lower bound"),
        "mean_steinke": mean("Steinke 2023, fixed guesses"),
        "mean_split": mean("Jagielski 2020, split"),
        "mean_xiang": mean("Xiang 2025"),
        "mean_nasr": mean("Nasr 2023, all thresholds"),
        "mean_mahloujifar": mean("Mahloujifar 2024, fixed guesses"),
        "mean_agrawal": mean("Agrawal 2026, Bonferroni box"),
        "mean_canife": mean("CANIFE 2022"),
        "laplace_xiang": mean("Xiang 2025", "laplace/eps=2.3"),
        "laplace_nasr": mean("Nasr 2023, all thresholds", "laplace/eps=2.3"),
        "laplace_mahloujifar": mean("Mahloujifar 2024, fixed guesses", "laplace/eps=2.3"),
        "laplace_agrawal": mean("Agrawal 2026, Bonferroni box", "laplace/eps=2.3"),
        "laplace_estimate": mean("coalmine's estimate", "laplace/eps=2.3"),
        "least_laplace": percent(min(cell["rows"][name]["above"] for cell in laplace for name in gaussian_only)),
        "lo_known": rate("paper's ε_lo, null known"),
        "lo_two": rate("paper's ε_lo"),
        "zb_zero": rate("Zanella-Béguelin 2023, best threshold"),
        "best_jagielski": rate("Jagielski 2020, best threshold"),
        "best_nasr": " to ".join(percent(f(_rates(results, "Nasr 2023, best threshold"))) for f in (min, max)),
        "laplace_lo": most("paper's ε_lo"),
        "laplace_zb": most("Zanella-Béguelin 2023, best threshold"),
        "laplace_jagielski": most("Jagielski 2020, best threshold"),
        "estimate_rates": rates("coalmine's estimate"),
        "paper_rates": rates("paper's ε"),
    }


def _rates(results: dict[str, Result], name: str) -> list[float]:
    """Rates at each true epsilon of the Gaussian mechanism."""
    return [float(results[f"gaussian/eps={epsilon}"]["rows"][name]["above"]) for epsilon in EPSILONS]


def packages_table(compared: Result) -> str:
    """The comparisons and the differences of their numbers."""
    lines = [
        [row, method, str(count), f"{largest:.0e}", f"{tolerance:g}"]
        for row, method, count, largest, tolerance in literature_packages.grouped(compared)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figures_table(compared: Result) -> str:
    """Our and the packages' numbers at the deterministic quantiles."""
    lines = []
    for name in ("Steinke 2023, ROC hull", "Mahloujifar 2024, ROC hull"):
        for whose in ("ours", "theirs"):
            values = {row["scores"]: row[whose] for row in compared["rows"] if row["row"] == name}
            shifts = [f"{values[f'{literature_packages.QUANTILES} {n}']:.6f}" for n in literature_packages.FIGURES]
            lines.append([name, "coalmine" if whose == "ours" else "jax-privacy", *shifts])
    return table(["estimator", "by", *(f"shift {n}" for n in literature_packages.FIGURES)], lines)


def methods_table() -> str:
    """Every row without its value."""
    scores = np.arange(20.0)
    lines = [
        [row.name, row.kind, row.controls, row.receives, row.threshold, row.assumptions]
        for row in compare_estimators(scores, scores, delta=DELTA)
    ]
    return table(["estimator", "kind", "auditor controls", "auditor receives", "threshold", "assumes"], lines)


def rates_table(results: dict[str, Result], mechanism: str) -> str:
    """The share of runs in which each exceeds the true epsilon."""
    epsilons = [epsilon for epsilon in EPSILONS if f"{mechanism}/eps={epsilon}" in results]
    lines = []
    for name, kind in methods(results, mechanism):
        cells = [results[f"{mechanism}/eps={epsilon}"] for epsilon in epsilons]
        lines.append([name, kind, *(shown_rate(cell, name, kind) for cell in cells)])
    return table(["estimator", "kind", *(f"ε = {epsilon:g}" for epsilon in epsilons)], lines)


def means_table(results: dict[str, Result]) -> str:
    """The mean value of each, for both mechanisms."""
    columns = list(all_cells())
    lines = []
    for name, kind in methods(results, "gaussian"):
        rows = [results[cell]["rows"].get(name) for cell in columns]
        lines.append([name, kind, *("" if row is None else f"{row['mean']:.2f}" for row in rows)])
    heads = [f"{mechanism.capitalize()}, ε = {epsilon:g}" for mechanism, epsilon in all_cells().values()]
    return table(["estimator", "kind", *heads], lines)


def methods(results: dict[str, Result], mechanism: str) -> list[tuple[str, str]]:
    """Names and kinds in the order of the rows, each "null known" after its counterpart."""
    kinds = {row.name: row.kind for row in compare_estimators(np.arange(20.0), np.arange(20.0), delta=DELTA)}
    found = results[f"{mechanism}/eps={EPSILONS[-1]}"]["rows"]
    names = [each for name in kinds for each in (name, f"{name}, null known") if each in found]
    return [(name, kinds[name.removesuffix(", null known")]) for name in names]


def shown_rate(cell: Result, name: str, kind: str) -> str:
    """A rate in percent, in bold if a number with a confidence level violates it."""
    rate = cell["rows"][name]["above"]
    text = percent(rate)
    return f"**{text}**" if kind != "estimate" and rate > allowed_rate(cell["runs"]) else text


def percent(rate: float) -> str:
    """A rate as the page shows it."""
    return f"{100 * rate:.1f} %"


def table(heads: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines])


def draw(results: dict[str, Result]) -> None:
    """Draw the plot: rates above the truth for both mechanisms, and mean values divided by the truth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    listed = methods(results, "gaussian")[::-1]
    colours = {"estimate": "#1f5fae", "heuristic": "#b5651d", "valid bound": "#1a7f37"}
    markers = dict(zip(EPSILONS, ("o", "s", "D", "^"), strict=True))
    gaussian_only = if_gaussian()

    def style(name: str, kind: str) -> dict[str, Any]:
        fill = "white" if name in gaussian_only else colours[kind]
        return {"mec": colours[kind], "mfc": fill, "ms": 6, "mew": 1.2, "ls": "", "clip_on": False, "zorder": 3}

    figure, panels = plt.subplots(1, 3, figsize=(12.8, 7.4), sharey=True, width_ratios=[1.2, 1.2, 1])
    for panel, mechanism in zip(panels[:2], MECHANISMS, strict=True):
        panel.set_title(f"{mechanism.capitalize()} mechanism:\nshare of runs above the true ε", fontsize=10)
        panel.axvspan(0, 0.05, color="#1a7f37", alpha=0.10, lw=0)
        panel.axvline(0.05, color="#1a7f37", lw=1)
        for place, (name, kind) in enumerate(listed):
            for epsilon in EPSILONS:
                row = results.get(f"{mechanism}/eps={epsilon}", {"rows": {}})["rows"].get(name)
                if row is not None:
                    panel.plot(row["above"], place, markers[epsilon], **style(name, kind))
        panel.set_xscale("function", functions=(np.sqrt, np.square))
        panel.set_xlim(0, 1)
        panel.set_xticks([0, 0.05, 0.2, 0.5, 1.0])
        panel.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel = panels[2]
    panel.set_title("Gaussian mechanism:\nmean value over the true ε", fontsize=10)
    panel.axvline(1, color="#444444", lw=1)
    for place, (name, kind) in enumerate(listed):
        for epsilon in EPSILONS[2:]:
            mean = results[f"gaussian/eps={epsilon}"]["rows"][name]["mean"]
            panel.plot(mean / epsilon, place, markers[epsilon], **style(name, kind))
    panel.set_xlim(0, 1.35)
    for panel in panels:
        panel.grid(axis="y", color="#dddddd", lw=0.6)
        panel.tick_params(axis="y", length=0, pad=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(listed)), [name for name, _ in listed], fontsize=9)
    for label, (_, kind) in zip(panels[0].get_yticklabels(), listed, strict=True):
        label.set_color(colours[kind])
    handles = [Line2D([], [], marker=mark, ls="", color="#555555", label=f"ε = {e:g}") for e, mark in markers.items()]
    handles += [Line2D([], [], marker="o", label=kind, **style("", kind)) for kind in colours]
    some = next(iter(gaussian_only))
    handles.append(Line2D([], [], marker="o", label="valid if the mechanism is Gaussian", **style(some, "valid bound")))
    figure.legend(handles=handles, loc="lower center", ncols=8, frameon=False, fontsize=9, columnspacing=1.2)
    figure.tight_layout(rect=(0, 0.045, 1, 1))
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
