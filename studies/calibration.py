"""Calibration of coalmine's bounds and intervals: the study behind docs/evidence/calibration.md.

    python studies/calibration.py                        every cell, 10,000 runs each
    python studies/calibration.py --cells 'interval/k=300' --runs 1000
    python studies/calibration.py --write-docs           write docs/evidence/calibration.md from finished cells

A cell is one row of studies/out/calibration.jsonl. A cell that is stored with at least as many runs is not run again, so an
interrupted study resumes. Each cell has its own seed, derived from its name.
"""

import argparse
import json
import math
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import chdtri, log_ndtr, ndtr

from coalmine.argument_checks import Floats
from coalmine.estimators.bounds import BANDS, log_rates, one_of_two
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.intervals import region_image
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.estimators.rates import epsilon_from_rates
from coalmine.estimators.variance import Sample, point_epsilon

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "calibration.jsonl"
DOCS = ROOT / "docs" / "evidence" / "calibration.md"
CHUNK = 100_000  # scores at a time: temporaries stay in the cache
RATIOS = (0.8, 0.9, 1.0, 1.05, 1.25)  # ratios of the alternative's std to the null's
AUTO_RATIOS = (0.8, 0.9, 0.93, 0.95, 0.97, 1.0, 1.03, 1.05, 1.07, 1.1, 1.25)
MEANS = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
EPSILONS = (0.0, 0.2, 0.8, 2.3, 4.9, 10.0, 25.0)
STACK_OVERFLOW_DELTA = 341_000**-1.1  # as in the paper (Section 5)

Result = dict[str, Any]


@dataclass(frozen=True)
class Alternative:
    """A law of observed scores against N(0, 1): its sampler, log density and cdf."""

    draw: Callable[[np.random.Generator, tuple[int, int]], Floats]
    log_density: Callable[[Floats], Floats]
    cdf: Callable[[Floats], Floats]


def normal(size: float) -> Alternative:
    """N(size, 1)."""
    return Alternative(
        lambda rng, shape: rng.standard_normal(shape) + size,
        lambda x: _log_normal(x - size),
        lambda x: ndtr(x - size),
    )


def skewed(size: float) -> Alternative:
    """N(0, 1) plus an exponential of mean `size`: a long upper tail."""
    if size == 0:
        return normal(0)

    def log_weighted_tail(x: Floats) -> Any:
        """log of e^(1/(2·size²) - x/size)·Pr(Z < x - 1/size)."""
        return 1 / (2 * size * size) - x / size + log_ndtr(x - 1 / size)

    return Alternative(
        lambda rng, shape: rng.standard_normal(shape) + size * rng.standard_exponential(shape),
        lambda x: log_weighted_tail(x) - math.log(size),
        lambda x: ndtr(x) - np.exp(log_weighted_tail(x)),
    )


def mixture(size: float) -> Alternative:
    """Half N(size, 1), half N(3·size, 1): canaries that took part once and three times."""
    return Alternative(
        lambda rng, shape: rng.standard_normal(shape) + size * rng.choice([1.0, 3.0], shape),
        lambda x: np.logaddexp(_log_normal(x - size), _log_normal(x - 3 * size)) - math.log(2),
        lambda x: (ndtr(x - size) + ndtr(x - 3 * size)) / 2,
    )


FAMILIES: dict[str, Callable[[float], Alternative]] = {"normal": normal, "skewed": skewed, "mixture": mixture}
GRID = np.linspace(-15, 60, 15_001)


def true_epsilon(alternative: Alternative, delta: float) -> float:
    """The epsilon of N(0, 1) against the alternative, over all events: bisection on integrals over a grid."""
    log_p, log_q = _log_normal(GRID), alternative.log_density(GRID)

    def delta_at(epsilon: float) -> float:
        step = GRID[1] - GRID[0]
        return max(
            float(np.maximum(np.exp(a) - np.exp(b + epsilon), 0).sum() * step)
            for a, b in ((log_p, log_q), (log_q, log_p))
        )

    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


def best_threshold_epsilon(alternative: Alternative, delta: float) -> float:
    """The largest epsilon of any threshold test (Eq. 1): the most that a bound from thresholds can reach."""
    with np.errstate(divide="ignore"):
        log_fnr = np.log(np.clip(alternative.cdf(GRID), 0, 1))
    return float(epsilon_from_rates(log_ndtr(-GRID), log_fnr, delta=delta)[log_fnr > -600].max())


def alternative_at(family: str, epsilon: float, delta: float) -> Alternative:
    """The member of the family whose true epsilon is `epsilon`."""
    low, high = 0.0, 10.0
    for _ in range(35 if epsilon else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if true_epsilon(FAMILIES[family](middle), delta) > epsilon else (middle, high)
    return FAMILIES[family](low)


def bound_cell(
    rng: np.random.Generator, runs: int, *, family: str, epsilon: float, count: int, unobserved: int, delta: float,
    methods: tuple[str, ...] = ("simultaneous", "paper"),
) -> Result:  # fmt: skip
    """How often each bound exceeds the true epsilon, and its mean; `unobserved` 0 means a null in closed form."""
    alternative = alternative_at(family, epsilon, delta)
    bands = {}
    for method in methods:
        failing = 0.05 if method == "paper" or not unobserved else one_of_two(0.05)
        bands[method] = [log_rates(BANDS[method], np.arange(n + 1), n, failing) for n in (count, unobserved or 1)]
    bounds: dict[str, list[Floats]] = {method: [] for method in methods}
    for rows in chunks(runs, max(count, unobserved)):
        observed = np.sort(alternative.draw(rng, (rows, count)))
        if unobserved:
            false_positives = count_at_least(rng.standard_normal((rows, unobserved)), observed)
        else:
            tail = log_ndtr(-observed)
        for method, (fnr_band, fpr_band) in bands.items():
            log_fpr = fpr_band[false_positives] if unobserved else tail
            bounds[method].append(epsilon_from_rates(log_fpr, fnr_band[:count], delta=delta).max(axis=1))
    result: Result = {"best_threshold": best_threshold_epsilon(alternative, delta)}
    for method in methods:
        values = np.concatenate(bounds[method])
        result[method] = {"above": float(np.mean(values > epsilon)), "mean": float(values.mean())}
    return result


def interval_cell(
    rng: np.random.Generator, runs: int, *, ratio: float, mean: float, count: int, null_dof: float, delta: float
) -> Result:
    """Coverage and mean width of the interval, and of the usual profile likelihood interval."""
    truth = gaussian_epsilon(Gaussian(0, 1), Gaussian(mean, ratio), delta=delta)
    sample = Sample(count, null_dof=null_dof)
    means, stds = fitted_scores(rng, runs, mean, ratio, sample)
    result: Result = {"epsilon": truth}
    for name, dof in (("joint", 2), ("profile", 1)):
        low, high = region_image(means, stds, sample=sample, delta=delta, threshold=float(chdtri(dof, 0.05)))
        result[name] = {"covers": float(np.mean((low <= truth) & (truth <= high))), "width": float(np.mean(high - low))}
    return result


def auto_cell(rng: np.random.Generator, runs: int, *, ratio: float, mean: float, count: int, delta: float) -> Result:
    """The root mean square error of each choice of variance."""
    truth = gaussian_epsilon(Gaussian(0, 1), Gaussian(mean, ratio), delta=delta)
    sample = Sample(count)
    means, stds = fitted_scores(rng, runs, mean, ratio, sample)

    def error(variance: str) -> float:
        estimates = point_epsilon(means, stds, sample=sample, delta=delta, variance=variance)
        return math.sqrt(np.mean((estimates - truth) ** 2))

    return {"epsilon": truth} | {variance: error(variance) for variance in ("auto", "fitted", "null")}


CELLS: dict[str, Callable[..., Result]] = {"bound": bound_cell, "interval": interval_cell, "auto": auto_cell}


def bound_cells() -> dict[str, dict[str, Any]]:
    """The cells of lower bounds by their names."""
    cells: dict[str, dict[str, Any]] = {}
    for unobserved_per_canary in (0, 1):
        for family in FAMILIES:
            for count in (100, 1_000, 5_000):
                for epsilon in EPSILONS:
                    if epsilon or family == "normal":
                        setting = {"family": family, "epsilon": epsilon, "count": count, "delta": 1e-6}
                        null = "two-sample" if unobserved_per_canary else "closed"
                        name = f"bound/{null}/{family}/k={count}/eps={epsilon}"
                        cells[name] = setting | {"unobserved": unobserved_per_canary * count}
    every = tuple(BANDS)
    for epsilon in (2.28, 4.93, 10.08):
        setting = {
            "family": "normal",
            "epsilon": epsilon,
            "count": 1_000,
            "delta": STACK_OVERFLOW_DELTA,
            "unobserved": 0,
        }
        cells[f"bound/closed/mean/eps={epsilon}"] = setting | {"methods": every}
    for unobserved in (1_000, 10_000):
        for epsilon in (2.25, 4.89, 11.0, 26.4):
            setting = {"family": "normal", "epsilon": epsilon, "count": 1_000, "delta": 1e-6, "unobserved": unobserved}
            cells[f"bound/two-sample/mean/m={unobserved}/eps={epsilon}"] = setting | {"methods": every}
    return cells


def all_cells() -> dict[str, dict[str, Any]]:
    """Every cell by its name."""
    cells = bound_cells()
    for ratio in RATIOS:
        for mean in MEANS:
            for count in (300, 1_000, 5_000):
                setting = {"ratio": ratio, "mean": mean, "count": count, "null_dof": math.inf, "delta": 1e-6}
                cells[f"interval/k={count}/ratio={ratio}/mean={mean}"] = setting
    for ratio in AUTO_RATIOS:
        for mean in MEANS:
            setting = {"ratio": ratio, "mean": mean, "count": 1_000, "delta": STACK_OVERFLOW_DELTA}
            cells[f"auto/ratio={ratio}/mean={mean}"] = setting
    for count in (1_000, 5_000):
        for epsilon in (3.0, 10.0, 30.0):
            mean = 1 / float(mechanism_noise(epsilon, delta=1e-6))
            setting = {"ratio": 1.0, "mean": mean, "count": count, "null_dof": 10_000.0 - count, "delta": 1e-6}
            cells[f"interval/estimated-null/k={count}/eps={epsilon}"] = setting
    return cells


def run_cell(name: str, runs: int) -> Result:
    """One cell, with the seed derived from its name."""
    started = time.monotonic()
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    result = CELLS[name.split("/")[0]](rng, runs, **all_cells()[name])
    return {"cell": name, "runs": runs, "seconds": round(time.monotonic() - started, 1)} | result


def fitted_scores(
    rng: np.random.Generator, runs: int, mean: float, ratio: float, sample: Sample
) -> tuple[Floats, Floats]:
    """Fitted means and stds of normal scores, divided by a null std estimated with the sample's degrees of freedom."""
    means = mean + ratio * rng.standard_normal(runs) / math.sqrt(sample.count)
    stds = ratio * np.sqrt(rng.chisquare(sample.count - 1, runs) / sample.count)
    if math.isinf(sample.null_dof):
        return means, stds
    null_stds = np.sqrt(rng.chisquare(sample.null_dof, runs) / sample.null_dof)
    return means / null_stds, stds / null_stds


def count_at_least(scores: Floats, thresholds: Floats) -> Any:
    """In each row, how many scores are at least each of the sorted thresholds."""
    scores.sort(axis=1)
    below = [np.searchsorted(row, at) for row, at in zip(scores, thresholds, strict=True)]
    return scores.shape[1] - np.array(below)


def chunks(runs: int, width: int) -> Iterator[int]:
    """Numbers of runs that add up to `runs`, each with about CHUNK scores."""
    rows = max(CHUNK // width, 1)
    for start in range(0, runs, rows):
        yield min(rows, runs - start)


def read_results(path: Path = RESULTS) -> dict[str, Result]:
    """The result with the most runs for each cell."""
    results: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        result = json.loads(line)
        if result["runs"] >= results.get(result["cell"], result)["runs"]:
            results[result["cell"]] = result
    return results


def write_docs(results: dict[str, Result]) -> str:
    """The whole of docs/evidence/calibration.md."""
    runs = sorted({result["runs"] for result in results.values()})
    if len(results) < len(all_cells()) or len(runs) > 1:
        print(f"note: {len(results)} of {len(all_cells())} cells, with {runs} runs", file=sys.stderr)
    figures = {
        "runs": f"{runs[0]:,}",
        "error": f"{100 * math.sqrt(0.05 * 0.95 / runs[0]):.2f}",
        "worst_bound": _percent(max(result["simultaneous"]["above"] for result in _of(results, "bound"))),
        "closed": _bound_table(results, "closed"),
        "two_sample": _bound_table(results, "two-sample"),
        "paper": _paper_table(results),
        "closed_means": _mean_table(results, "bound/closed/mean/eps={}", (2.28, 4.93, 10.08)),
        "means_1000": _mean_table(results, "bound/two-sample/mean/m=1000/eps={}", (2.25, 4.89, 11.0, 26.4)),
        "means_10000": _mean_table(results, "bound/two-sample/mean/m=10000/eps={}", (2.25, 4.89, 11.0, 26.4)),
        "lowest_cover": _percent(min(result["joint"]["covers"] for result in _of(results, "interval"))),
        "lowest_profile": _percent(min(result["profile"]["covers"] for result in _of(results, "interval"))),
        "widest": f"{max(_width_ratio(result) for result in _of(results, 'interval')):.2f}",
        "covers": _interval_table(results, lambda result: _percent(result["joint"]["covers"])),
        "profile_covers": _interval_table(results, lambda result: _percent(result["profile"]["covers"])),
        "widths": _interval_table(results, lambda result: f"{_width_ratio(result):.2f}"),
        "estimated": _estimated_table(results),
        "auto": _auto_table(results),
        "minutes": f"{sum(result['seconds'] for result in results.values()) / 60:.0f}",
    }
    return TEMPLATE.format(**figures)


TEMPLATE = """# Calibration

Do bounds and intervals hold as often as they say? This page tests every one of them on simulated scores whose true ε
is known.

{runs} runs per cell, with a fixed seed for each cell. So a rate of 5 % is known to ± {error} % (one
standard deviation). The second command only writes this page.

    python studies/calibration.py --jobs 2      # {minutes} minutes of processor time
    python studies/calibration.py --write-docs

δ = 1e-6 unless stated otherwise. k is the number of observed canaries, m that of unobserved ones. Scores are in units
of the null's standard deviation.

## The lower bound

How often does `epsilon_lower_bound` (method "simultaneous", 95 %) exceed the true ε? It may do so
in at most 5 % of runs (5.7 % with sampling error).

Three laws of observed scores. One is normal. One is skewed: a normal plus an exponential. One is a
mixture: half at one mean, half at three times that mean. The true ε is over all events, by quadrature.

The share of runs in which the bound exceeds the true ε. The largest is {worst_bound}. With the
null in closed form:

{closed}

With two samples, m = k. Here a bound exceeds the true ε only if the bounds on both rates nearly fail at the same
threshold, so errors are much rarer than allowed:

{two_sample}

The bound held as often as it says, for each of the three laws.

### The paper's ε_lo

The same of the paper's ε_lo, in the same runs (normal law).

{paper}

ε_lo is not a 95 % bound. [Why the paper's bound is not a bound](../explanation/paper-bound.md)
explains it.

### How large the bounds are

How much does each method show on average?

k = 1,000, normal law. "paper" and "clopper-pearson" are valid only at a single threshold and are
not bounds.

With the null in closed form, δ = 341000^-1.1:

{closed_means}

With two samples, first m = 1,000, then m = 10,000:

{means_1000}

{means_10000}

Of the methods that are bounds, "simultaneous" shows most. A null in closed form, or more
unobserved canaries, raises it.

## The interval

How often does `epsilon_estimate(...).interval` (95 %) cover the true ε? At least 94 % is required
everywhere.

The share of runs at k = 300 / 1,000 / 5,000, by the ratio of the alternative's std to the null's
and by its mean. The lowest is {lowest_cover}.

{covers}

The coverage of the usual interval (profile likelihood, χ² with one degree of freedom) falls to {lowest_profile}:

{profile_covers}

Mean width relative to the usual interval. At most 1.3 is required; the largest is {widest}.

{widths}

With the null's std estimated from the d - k directions without a canary, d = 10,000:

{estimated}

The interval covers the truth as often as it should, at the price of some width. The usual one does
not.

## "auto"

`variance="auto"` chooses between the null's std and a fitted one. How large is its error relative
to "fitted", the paper's choice? The ratio must be at most 0.7 if the stds are equal, and at most 1.7 otherwise.

The ratio of root mean square errors, k = 1,000, δ = 341000^-1.1:

{auto}

"auto" is clearly better where the stds are equal, as in an honest run. Elsewhere it loses a
limited amount.
"""


def _bound_table(results: dict[str, Result], null: str) -> str:
    columns = [(family, count) for family in FAMILIES for count in (100, 1_000, 5_000)]
    rows = []
    for epsilon in EPSILONS:
        cells = [results.get(f"bound/{null}/{family}/k={count}/eps={epsilon}") for family, count in columns]
        rows.append([f"{epsilon:g}", *(_percent(cell["simultaneous"]["above"]) if cell else "" for cell in cells)])
    return _table(["true ε", *(f"{family} k = {count:,}" for family, count in columns)], rows)


def _paper_table(results: dict[str, Result]) -> str:
    columns = [(null, count) for null in ("closed", "two-sample") for count in (100, 1_000, 5_000)]
    rows = []
    for epsilon in EPSILONS:
        cells = [results[f"bound/{null}/normal/k={count}/eps={epsilon}"] for null, count in columns]
        rows.append([f"{epsilon:g}", *(_percent(cell["paper"]["above"]) for cell in cells)])
    return _table(["true ε", *(f"{null} k = {count:,}" for null, count in columns)], rows)


def _mean_table(results: dict[str, Result], pattern: str, epsilons: tuple[float, ...]) -> str:
    cells = [results[pattern.format(epsilon)] for epsilon in epsilons]
    rows = [[method, *(f"{cell[method]['mean']:.2f}" for cell in cells)] for method in BANDS]
    return _table(["method", *(f"ε = {epsilon:g}" for epsilon in epsilons)], rows)


def _interval_table(results: dict[str, Result], show: Callable[[Result], str]) -> str:
    rows = []
    for ratio in RATIOS:
        row = [f"{ratio:g}"]
        for mean in MEANS:
            shown = [show(results[f"interval/k={k}/ratio={ratio}/mean={mean}"]) for k in (300, 1_000, 5_000)]
            row.append(" / ".join(shown).replace(" %", ""))
        rows.append(row)
    return _table(["std ratio", *(f"mean {mean:g}" for mean in MEANS)], rows)


def _estimated_table(results: dict[str, Result]) -> str:
    rows = []
    for count in (1_000, 5_000):
        for epsilon in (3.0, 10.0, 30.0):
            cell = results[f"interval/estimated-null/k={count}/eps={epsilon}"]
            rows.append([f"{count:,}", f"{epsilon:g}", _percent(cell["joint"]["covers"]), f"{_width_ratio(cell):.2f}"])
    return _table(["k", "true ε", "covers", "width over the profile's"], rows)


def _auto_table(results: dict[str, Result]) -> str:
    rows = []
    for ratio in AUTO_RATIOS:
        cells = [results[f"auto/ratio={ratio}/mean={mean}"] for mean in MEANS]
        rows.append([f"{ratio:g}", *(f"{cell['auto'] / cell['fitted']:.2f}" for cell in cells)])
    return _table(["std ratio", *(f"mean {mean:g}" for mean in MEANS)], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _of(results: dict[str, Result], kind: str) -> list[Result]:
    return [result for name, result in results.items() if name.startswith(kind)]


def _width_ratio(result: Result) -> float:
    return float(result["joint"]["width"] / result["profile"]["width"])


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def _log_normal(x: Floats) -> Floats:
    return -x * x / 2 - math.log(2 * math.pi) / 2


def missed(results: dict[str, Result]) -> list[str]:
    """A line for each cell that misses its requirement; 5 % and 94 % have a tolerance of four standard errors."""

    def room(rate: float, runs: int) -> float:
        return 4 * math.sqrt(rate * (1 - rate) / runs)

    found = []
    for name, result in results.items():
        kind, runs = name.split("/")[0], result["runs"]
        if kind == "bound" and result["simultaneous"]["above"] > 0.05 + room(0.05, runs):
            found.append(f"{name}: the bound lies above the truth in {_percent(result['simultaneous']['above'])}")
        if kind == "interval" and result["joint"]["covers"] < 0.94 - room(0.06, runs):
            found.append(f"{name}: the interval covers the truth in {_percent(result['joint']['covers'])}")
        if kind == "interval" and _width_ratio(result) > 1.3:
            found.append(f"{name}: the interval is {_width_ratio(result):.2f} times as wide as the usual one")
        equal = kind == "auto" and "/ratio=1.0/" in name
        if kind == "auto" and result["auto"] > (0.7 if equal else 1.7) * result["fitted"]:
            found.append(f"{name}: the error of auto is {result['auto'] / result['fitted']:.2f} times that of fitted")
    return found


def main() -> int:
    """Run the selected cells that are not finished, or write the page. 1 if a cell misses its requirement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="Number of simulated audits in each cell.")
    parser.add_argument("--cells", default="", help="Run only the cells whose name matches this regular expression.")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--write-docs", action="store_true", help="Write docs/evidence/calibration.md from the results."
    )
    options = parser.parse_args()
    results = read_results()
    if options.write_docs:
        DOCS.write_text(write_docs({name: results[name] for name in all_cells() if name in results}))
        return 0
    done = {name for name, result in results.items() if result["runs"] >= options.runs}
    todo = [name for name in all_cells() if re.search(options.cells, name) and name not in done]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.jobs) as pool, RESULTS.open("a") as out:
        futures = [pool.submit(run_cell, name, options.runs) for name in todo]
        for number, future in enumerate(as_completed(futures), start=1):
            result = future.result()
            out.write(json.dumps(result) + "\n")
            out.flush()
            print(f"{number}/{len(todo)} {result['cell']} {result['seconds']} s", flush=True)
    asked = {name: result for name, result in read_results().items() if re.search(options.cells, name)}
    wrong = missed({name: result for name, result in asked.items() if name in all_cells()})
    print("\n".join(wrong) or f"all of {len(asked)} cells are as they should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
