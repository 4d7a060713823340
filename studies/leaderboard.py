"""A leaderboard of estimators on scores with a known truth, with coverage beside tightness: docs/evidence/leaderboard.md.

    python -m studies.leaderboard                 100 seeds of each set of scores
    python -m studies.leaderboard --write-docs    write the tables from finished runs

A set of scores is a pair of laws and two sample sizes; its ε is the one of these laws, by quadrature. The files of scores
follow from a seed. A finished seed is one line of studies/out/leaderboard.jsonl, and is not run again.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import norm, t

from coalmine import compare_estimators, epsilon_lower_bound
from coalmine.argument_checks import Floats
from coalmine.estimators.gaussian_fit import epsilon_estimate
from coalmine.evidence.gaussian_bound import scores_bound
from studies.results import Record, main_of, markdown_table, most_errors, read_records, run_batches

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "leaderboard.jsonl"
DOCS = ROOT / "docs" / "evidence" / "leaderboard.md"
SEEDS, DELTA = 100, 1e-5
SHIFT, DEGREES, RATE, STRETCH = 1.0, 4, 0.5, 1.05
OURS = "coalmine's lower bound if scores are nearly normal"
BY_RANKS = "coalmine's lower bound by ranks"
ODDS = 2.0  # log odds of the coins

Draw = Callable[[np.random.Generator, int], Floats]
Density = Callable[[Floats], Floats]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A set of scores: how to draw observed and unobserved ones, their densities, and how many there are of each."""

    name: str
    draw: Draw
    draw_absent: Draw
    density: Density
    density_absent: Density
    observed: int
    unobserved: int

    @property
    def epsilon(self) -> float:
        """The true ε of a threshold-free attacker: the larger of both directions, by quadrature."""
        return _epsilon(self.name)


def _normal(rng: np.random.Generator, size: int) -> Floats:
    return rng.standard_normal(size)


def _shifted(rng: np.random.Generator, size: int) -> Floats:
    return rng.standard_normal(size) + SHIFT


def _mixed(rng: np.random.Generator, size: int) -> Floats:
    return rng.standard_normal(size) + 2 * SHIFT * (rng.random(size) < RATE)


def _wider(rng: np.random.Generator, size: int) -> Floats:
    return STRETCH * rng.standard_normal(size) + SHIFT


def _student(rng: np.random.Generator, size: int, shift: float = 0.0) -> Floats:
    return rng.standard_t(DEGREES, size) + shift


def _coins(rng: np.random.Generator, size: int, odds: float) -> Floats:
    return (rng.random(size) < expit(odds)) + 0.9 * rng.random(size)


def _coin_density(x: Floats, odds: float) -> Floats:
    low, high = (x >= 0) & (x < 0.9), (x >= 1) & (x < 1.9)
    return np.asarray((expit(-odds) * low + expit(odds) * high) / 0.9)


def _mixture(x: Floats) -> Floats:
    return np.asarray((1 - RATE) * norm.pdf(x) + RATE * norm.pdf(x, 2 * SHIFT))


GAUSSIAN = {
    "draw": _shifted,
    "draw_absent": _normal,
    "density": partial(norm.pdf, loc=SHIFT),
    "density_absent": norm.pdf,
}
SETS = (
    Scored(name="Gaussian", **GAUSSIAN, observed=1_000, unobserved=1_000),
    Scored(name="Gaussian, many unobserved", **GAUSSIAN, observed=1_000, unobserved=10_000),
    Scored(name="Gaussian, tiny", **GAUSSIAN, observed=50, unobserved=50),
    Scored(
        name="wider by 5 %",
        draw=_wider,
        draw_absent=_normal,
        density=partial(norm.pdf, loc=SHIFT, scale=STRETCH),
        density_absent=norm.pdf,
        observed=1_000,
        unobserved=1_000,
    ),
    Scored(
        name="subsampled by half",
        draw=_mixed,
        draw_absent=_normal,
        density=_mixture,
        density_absent=norm.pdf,
        observed=1_000,
        unobserved=1_000,
    ),
    Scored(
        name="heavy tails, t with 4 df",
        draw=partial(_student, shift=2 * SHIFT),
        draw_absent=_student,
        density=partial(t.pdf, df=DEGREES, loc=2 * SHIFT),
        density_absent=partial(t.pdf, df=DEGREES),
        observed=1_000,
        unobserved=1_000,
    ),
    Scored(
        name="nearly normal, t with 50 df",
        draw=lambda rng, size: rng.standard_t(50, size) + SHIFT,
        draw_absent=lambda rng, size: rng.standard_t(50, size),
        density=partial(t.pdf, df=50, loc=SHIFT),
        density_absent=partial(t.pdf, df=50),
        observed=1_000,
        unobserved=1_000,
    ),
    Scored(
        name="coins",
        draw=partial(_coins, odds=ODDS),
        draw_absent=partial(_coins, odds=-ODDS),
        density=partial(_coin_density, odds=ODDS),
        density_absent=partial(_coin_density, odds=-ODDS),
        observed=1_000,
        unobserved=1_000,
    ),
)


@cache
def _epsilon(name: str) -> float:
    scored = next(each for each in SETS if each.name == name)
    x = np.concatenate([-np.geomspace(60.0, 1e-6, 200_000), np.geomspace(1e-6, 60.0, 200_000)])
    present, absent = scored.density(x), scored.density_absent(x)

    def gap(epsilon: float, first: Floats, second: Floats) -> float:
        return float(np.trapezoid(np.maximum(first - math.exp(epsilon) * second, 0), x)) - DELTA

    pairs = ((present, absent), (absent, present))
    return max(float(brentq(gap, 0, 60, args=pair)) if gap(0, *pair) > 0 else 0.0 for pair in pairs)


def work(name: str, seed: int) -> list[Record]:
    """All estimators on one file of scores."""
    scored = next(each for each in SETS if each.name == name)
    rng = np.random.default_rng(zlib.crc32(f"{name}, {seed}".encode()))
    observed, absent = scored.draw(rng, scored.observed), scored.draw_absent(rng, scored.unobserved)
    estimate = epsilon_estimate(observed, null=absent, delta=DELTA)
    ours = scores_bound(estimate, observed, absent, math.inf, delta=DELTA, confidence=0.95)
    rows = {row.name: [row.kind, row.value] for row in compare_estimators(observed, absent, delta=DELTA)}
    by_ranks = epsilon_lower_bound(observed, null=absent, delta=DELTA, method="ranks")
    rows |= {OURS: ["valid bound", ours.lower_bound], BY_RANKS: ["valid bound", by_ranks]}
    return [
        {"row": name, "seed": seed, "values": {each: found for each, found in rows.items() if found[1] is not None}}
    ]


def _records() -> list[Record]:
    return read_records(RESULTS, {each.name for each in SETS}, lambda record: (record["row"], record["seed"]))


def run(names: list[str], seeds: int, jobs: int) -> None:
    """Run what is missing."""
    done = {(each["row"], each["seed"]) for each in _records()}
    wanted = [(name, seed) for seed in range(min(seeds, SEEDS)) for name in names if (name, seed) not in done]
    run_batches(RESULTS, work, wanted, jobs)


def failures(names: list[str], seeds: int) -> list[str]:
    """The sets that are not complete, and those on which one of coalmine's bounds exceeds the truth too often."""
    bad = []
    for name in names:
        found = [each["values"] for each in _records() if each["row"] == name]
        if len(found) < min(seeds, SEEDS):
            bad.append(f"{name}: {len(found)} of {SEEDS} seeds")
        for method in ("coalmine's lower bound", BY_RANKS, OURS):
            above = sum(values[method][1] > _epsilon(name) for values in found if method in values)
            if above > most_errors(len(found), 0.05):
                bad.append(f"{name}: {method} exceeds ε in {above} of {len(found)} runs")
    return bad


def tables() -> dict[str, str]:
    """One table: a line for each method; first the bounds that keep their level on every set, best first on the first."""
    found = {each.name: [record["values"] for record in _records() if record["row"] == each.name] for each in SETS}
    methods = {name: kind for records in found.values() for values in records for name, (kind, _) in values.items()}

    def cell(method: str, name: str) -> str:
        given = [values[method][1] for values in found[name] if method in values]
        if not given:
            return "withheld"
        above = sum(value > _epsilon(name) for value in given) / len(found[name])
        share = "" if len(given) == len(found[name]) else f", offered {len(given) / len(found[name]):.0%}"
        return f"{np.mean(given):.2f} ({above:.0%}{share})"

    def tightness(method: str) -> float:
        given = [values[method][1] for values in found[SETS[0].name] if method in values]
        return float(np.mean(given)) if given else 0.0

    def held(method: str) -> bool:
        above = {name: sum(v[method][1] > _epsilon(name) for v in found[name] if method in v) for name in found}
        return all(above[name] <= most_errors(len(found[name]), 0.05) for name in found)

    order = {"valid bound": 0, "heuristic": 1, "estimate": 2}
    heads = ["method", "kind", "level kept on every set", *(f"{each.name}: ε {each.epsilon:.2f}" for each in SETS)]
    ranked = sorted(methods, key=lambda name: (order[methods[name]], not held(name), -tightness(name)))
    kept = {name: "yes" if held(name) else "no" for name in methods}
    lines = [heads, *([name, methods[name], kept[name], *(cell(name, each.name) for each in SETS)] for name in ranked)]
    return {"leaderboard": markdown_table(lines)}


if __name__ == "__main__":
    raise SystemExit(
        main_of(
            __doc__,
            results=RESULTS,
            page=DOCS,
            rows=[each.name for each in SETS],
            run=run,
            tables=tables,
            failures=failures,
        )
    )
