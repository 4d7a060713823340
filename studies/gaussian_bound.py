"""Coverage of the bound and the interval that assume Gaussian noise: the study behind docs/evidence/bounds.md.

    python -m studies.gaussian_bound                     every row; 400 runs each
    python -m studies.gaussian_bound --only '^scores'    rows whose name matches
    python -m studies.gaussian_bound --write-docs        write the tables from finished runs

Rows named "scores" draw scores from their exact law, with no vector behind them. Rows named "run" are whole runs with all
gauges, so they measure the gate too. A batch of runs is one line of studies/out/gaussian_bound.jsonl, and a row that has
its runs is not run again.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri
from scipy.stats import logistic, norm, t

from coalmine import Audit, Poisson, TreeNoise, amplified_epsilon, mechanism_epsilon, mechanism_noise
from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.gaussian_fit import epsilon_estimate
from coalmine.estimators.gaussians import Gaussian, gaussian_delta, gaussian_epsilon
from coalmine.estimators.sampler_tests import read_sampler
from coalmine.evidence.gaussian_bound import GaussianBound, fitted_bound, known_rounds_bound, scores_bound
from coalmine.evidence.gaussian_gate import GaussianGate
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_signal import NoiseSignal
from studies.pipelines import Noise, Pipeline, bfloat16
from studies.results import Record, main_of, markdown_table, most_errors, read_records, run_batches

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "gaussian_bound.jsonl"
DOCS = ROOT / "docs" / "evidence" / "bounds.md"
DELTA, RUNS, BATCH = 1e-6, 400, 50
MISSES, MISSED, OFFERED = 0.05, 0.05, 0.98  # most bounds above the truth, most intervals that miss it, fewest offers
WIDE, HALF_WIDE = (
    math.sqrt(0.98 + 0.02 * 4),
    math.sqrt(3) / math.pi,
)  # stds: of the mixture, 1 / that of the logistic law
LAWS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "logistic": (
        lambda rng, size: rng.logistic(size=size) * HALF_WIDE,
        lambda x: logistic.pdf(x, scale=HALF_WIDE),
    ),
    "mixture .98": (
        lambda rng, size: rng.standard_normal(size) * np.where(rng.random(size) < 0.02, 2.0, 1.0) / WIDE,
        lambda x: 0.98 * norm.pdf(x, scale=1 / WIDE) + 0.02 * norm.pdf(x, scale=2 / WIDE),
    ),
} | {
    f"t, {dof} df": (
        lambda rng, size, dof=dof: rng.standard_t(dof, size) * math.sqrt((dof - 2) / dof),
        lambda x, dof=dof: t.pdf(x, dof, scale=math.sqrt((dof - 2) / dof)),
    )
    for dof in (5, 10, 20, 50)
}
SIZES = (50, 200, 500, 1_000)  # of both samples of nearly normal scores
OPEN = GaussianGate(noise="", sampler="")
EPSILONS, COUNTS, FREE, TIMES = (0.1, 1.0, 4.0, 8.0, 30.0), (50, 100, 1_000, 10_000), (20, 1_000, 1_000_000), (1, 4, 50)
COLUMN = {  # the column: epsilon at the true mean less 1.645/√k, for a null that is known
    (1.0, 1_000): 0.76,
    (4.0, 100): 3.12,
    (4.0, 1_000): 3.72,
    (8.0, 1_000): 7.67,
    (8.0, 10_000): 7.90,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case: one run of a seed gives the bound, and the true epsilon. `honest` rows must be offered."""

    name: str
    run: Callable[[int], tuple[GaussianBound, float, float]]  # bound, true epsilon, bound for any law
    honest: bool = True


def known_scores(canaries: int, free: int, epsilon: float, times: int, seed: int) -> tuple[GaussianBound, float, float]:
    """Scores of known-others in `times` rounds in which every canary takes part; every round's scale is estimated."""
    rng = np.random.default_rng(seed)
    signal = 1 / float(mechanism_noise(epsilon, delta=DELTA, participations=times))
    scales = np.sqrt(rng.chisquare(free, times) / free)  # of the noise, as measured off the canaries
    center, spread = signal * np.sum(1 / scales), math.sqrt(float(np.sum(scales**-2.0)))
    drawn = (center + spread * rng.standard_normal(canaries)) / math.sqrt(times)
    group = Scores(
        rung="known-others",
        observed=drawn,
        unobserved=np.zeros(0),
        null=Gaussian(0.0, 1.0),
        null_dof=float(free * times),
        round_dof=float(free),
        presentations=times,
    )
    bound = known_rounds_bound([group], float(times), OPEN, DELTA)
    any_law = epsilon_lower_bound(drawn, null=Gaussian(0, 1), delta=DELTA) if free > 10**5 and times == 1 else math.nan
    return bound, epsilon, any_law


def final_scores(canaries: int, epsilon: float, std: float, seed: int) -> tuple[GaussianBound, float, float]:
    """Normal scores of a final model, whose spread is not that of absent canaries."""
    rng = np.random.default_rng(seed)
    null = Gaussian(0.0, 1.0)
    mean = float(brentq(lambda m: float(gaussian_epsilon(null, Gaussian(m, std), delta=DELTA)) - epsilon, 0, 60))
    scores = mean + std * rng.standard_normal(canaries)
    estimate = epsilon_estimate(scores, null=null, delta=DELTA)
    return fitted_bound(estimate), epsilon, epsilon_lower_bound(scores, null=null, delta=DELTA)


def two_samples(
    canaries: int, unobserved: int, epsilon: float, std: float, seed: int
) -> tuple[GaussianBound, float, float]:
    """Normal scores with this spread against unobserved ones, as `coalmine estimate` has them."""
    rng, null = np.random.default_rng(seed), Gaussian(0.0, 1.0)
    mean = float(brentq(lambda m: float(gaussian_epsilon(null, Gaussian(m, std), delta=DELTA)) - epsilon, 0, 60))
    scores, absent = mean + std * rng.standard_normal(canaries), rng.standard_normal(unobserved)
    return _compared(scores, absent, epsilon)


def near_normal(law: str, size: int, shift: float, seed: int) -> tuple[GaussianBound, float, float]:
    """Two samples of a law that is not normal, shifted by so many standard deviations."""
    rng, draw = np.random.default_rng(seed), LAWS[law][0]
    return _compared(draw(rng, size) + shift, draw(rng, size), shifted_epsilon(law, shift))


def randomized_response(
    observed: int, unobserved: int, epsilon: float, seed: int
) -> tuple[GaussianBound, float, float]:
    """The law with the most right guesses at this ε: a coin of these odds, and a score that orders its sides at random."""
    rng, right = np.random.default_rng(seed), 1 / (1 + math.exp(-epsilon))
    sides = [rng.random(observed) < right, rng.random(unobserved) >= right]
    present, absent = (side + 0.9 * rng.random(side.size) for side in sides)
    return GaussianBound(withheld=""), epsilon, epsilon_lower_bound(present, null=absent, delta=DELTA, method="ranks")


def _compared(scores: np.ndarray, absent: np.ndarray, epsilon: float) -> tuple[GaussianBound, float, float]:
    estimate = epsilon_estimate(scores, null=absent, delta=DELTA)
    bound = scores_bound(estimate, scores, absent, math.inf, delta=DELTA, confidence=0.95)
    return bound, epsilon, epsilon_lower_bound(scores, null=absent, delta=DELTA, method="ranks")


@cache
def shifted_epsilon(law: str, shift: float) -> float:
    """The ε of a law with standard deviation 1 against itself shifted, by quadrature."""
    x = np.concatenate([-np.geomspace(1e3, 1e-4, 60_000), np.geomspace(1e-4, 1e3, 60_000)])
    absent, present = (LAWS[law][1](x - move) for move in (0.0, shift))
    return float(
        brentq(lambda e: np.trapezoid(np.maximum(present - math.exp(e) * absent, 0), x) - DELTA, 0, 60, xtol=1e-6)
    )


def unknown_scores(
    canaries: int, noise: float, rate: float, rounds: int, seed: int
) -> tuple[GaussianBound, float, float]:
    """Picks of a Poisson sampler and the scores in these rounds: epsilon of the accountant at the limit of the noise."""
    rng, scheme = np.random.default_rng(seed), Poisson(rate, rounds=rounds)
    picks = rng.random((rounds, canaries)) < rate
    present = [np.flatnonzero(row) for row in picks]
    if not read_sampler(present, range(1, rounds + 1), canaries, scheme).passed:
        return GaussianBound(withheld="sampler"), math.nan, math.nan
    times = picks.sum(axis=0)
    groups = [
        Scores(
            rung="known-others",
            observed=math.sqrt(number) / noise + rng.standard_normal(int(np.sum(times == number))),
            unobserved=np.zeros(0),
            presentations=int(number),
        )
        for number in np.unique(times[times > 0])
    ]
    withheld = OPEN.unknown_rounds(groups)
    if withheld:
        return GaussianBound(withheld=withheld), math.nan, math.nan
    signal = NoiseSignal.of(groups)
    least, (low, high) = signal.lower_limit(0.95), signal.interval(0.95)
    bound, first, last = (
        amplified_epsilon(1 / end, scheme, DELTA) if end > 1e-4 else 0.0 for end in (least, low, high)
    )
    ends = (getattr(first, "low", 0.0), float(last))
    true = float(amplified_epsilon(noise, scheme, DELTA))
    return GaussianBound(lower_bound=getattr(bound, "low", 0.0), interval=ends), true, math.nan


def whole_run(pipeline: Pipeline, rung: str, true: float, seed: int) -> tuple[GaussianBound, float, float]:
    """One run with all its gauges, and its first row."""
    row = pipeline.result(seed)[rung].headline
    return row.gaussian, true, row.lower_bound


def blocked_run(epsilon: float, seed: int) -> tuple[GaussianBound, float, float]:
    """A model in three blocks, ten rounds."""
    rng, sizes, canaries, rounds = np.random.default_rng(seed), (800, 1_000, 2_200), 100, 10
    model = {f"layer{number}": np.zeros(size, np.float32) for number, size in enumerate(sizes)}
    audit = Audit.for_model(
        model, canaries=canaries, unobserved=100, seed=seed, delta=DELTA, blocks=sizes, rounds=rounds
    )
    noise = float(mechanism_noise(epsilon, delta=DELTA))
    zeros = {name: np.zeros_like(part) for name, part in model.items()}
    for number in range(1, rounds + 1):
        present = audit.canaries_in_round(number)
        added = audit.updates(present, 1.0)
        delta = {
            name: (added[name] + noise * rng.standard_normal(part.shape)).astype(np.float32)
            for name, part in model.items()
        }
        audit.observe_round(number, delta, present=present, others=zeros, noise_std=noise, clip_norm=1.0)
    row = audit.result()["known-others"].headline
    return row.gaussian, epsilon, row.lower_bound


def student(noise: Noise) -> np.ndarray:
    """Student's t with 50 degrees of freedom, in each coordinate."""
    return noise.rng.standard_t(50, noise.dim) * math.sqrt(48 / 50)


def shared_student(noise: Noise) -> np.ndarray:
    """The same with one scale for all coordinates of a round."""
    return noise.normal() * math.sqrt(48 / noise.rng.chisquare(50))


def mixed_epsilon(noise: float) -> float:
    """The ε of one round whose noise has such a scale: the attacker sees the scale, and δ is its mean over scales."""
    scales = np.sqrt(48 / chdtri(50, (np.arange(4_000) + 0.5) / 4_000))
    means, null = Gaussian(1 / (noise * scales), 1.0), Gaussian(0.0, 1.0)
    return float(brentq(lambda x: float(np.mean(gaussian_delta(null, means, epsilon=x))) - DELTA, 0.1, 60))


def mixture(noise: Noise) -> np.ndarray:
    """98 % of the coordinates from a Gaussian, 2 % from one twice as wide."""
    wide = np.where(noise.rng.random(noise.dim) < 0.02, 2.0, 1.0)
    return noise.normal() * wide / math.sqrt(0.98 + 0.02 * 4)


def in_turn(factors: tuple[float, ...]) -> dict[str, Any]:
    """A schedule of stated noise: the multipliers of the rounds take turns, relative to the pipeline's."""

    def draw(noise: Noise) -> np.ndarray:
        return factors[noise.number % len(factors)] * noise.normal()

    def tell(told: dict[str, Any], noise: Noise) -> dict[str, Any]:
        return told | {"noise_std": told["noise_std"] * factors[noise.number % len(factors)]}

    return {"draw": draw, "tell": tell}


def rows() -> Iterator[Row]:
    """All rows; their functions take the seed."""
    for count in COUNTS:
        for free in FREE:
            for times in TIMES:
                for epsilon in EPSILONS:
                    yield Row(
                        name=f"scores, k = {count}, d − k = {free}, R = {times}, ε = {epsilon:g}",
                        run=partial(known_scores, count, free, epsilon, times),
                    )
    for count in (100, 1_000):
        for std in (0.97, 1.0, 1.03):
            for epsilon in (2.0, 4.0):
                yield Row(
                    name=f"final scores, k = {count}, spread {std:g}, ε = {epsilon:g}",
                    run=partial(final_scores, count, epsilon, std),
                )
    yield from _two_sample_rows()
    for count, noise, rate, rounds in ((100, 1.0, 0.1, 100), (1_000, 1.0, 0.02, 200), (1_000, 0.7, 0.05, 40)):
        yield Row(
            name=f"picks, k = {count}, z = {noise:g}, q = {rate:g}, T = {rounds}",
            run=partial(unknown_scores, count, noise, rate, rounds),
        )
    plain = Pipeline(dim=2_000, canaries=200, rounds=8)
    small = Pipeline(dim=600, canaries=100, rounds=1)
    often = {"presentations": 4}
    uneven = (0.8, 1.0, 1.25)
    cases: list[tuple[str, Pipeline, bool]] = [
        ("plain", plain, True),
        ("R = 4", plain.but(**often), True),
        ("ε = 30", plain.but(noise_multiplier=float(mechanism_noise(30.0, delta=DELTA))), True),
        ("bfloat16 release", plain.but(release=bfloat16), True),
        ("momentum", plain.but(momentum=0.9), True),
        ("t, 50 df", plain.but(draw=student), False),
        ("t, 50 df, one round", small.but(draw=student), False),
        ("t, 50 df, scale shared by a round", plain.but(draw=shared_student), False),
        ("mixture .98", plain.but(draw=mixture), False),
        ("mixture .98, one round", small.but(draw=mixture), False),
        ("rounded to σ/2", plain.but(draw=lambda noise: np.round(noise.normal() * 2) / 2), False),
        ("rounded to σ/2, one round", small.but(draw=lambda noise: np.round(noise.normal() * 2) / 2), False),
        ("half the noise in every other round", plain.but(draw=_quieter), False),
    ]
    for name, pipeline, honest in cases:
        for rung in ("known-others", "known-round"):
            noise = pipeline.noise_multiplier / (2 if pipeline.draw is _quieter else 1)
            true = float(mechanism_epsilon(noise, delta=DELTA, participations=pipeline.presentations))
            if pipeline.draw is shared_student:
                true = mixed_epsilon(noise)
            yield Row(
                name=f"run, {name}, {rung}",
                run=partial(whole_run, pipeline, rung, true),
                honest=honest,
            )
    exposure = float(np.sum(np.array(uneven) ** -2.0))  # of three rounds
    schedule = plain.but(canaries=100, rounds=9, presentations=9, **in_turn(uneven))
    scheduled = float(mechanism_epsilon(1 / math.sqrt(3 * exposure), delta=DELTA))
    yield Row(name="run, schedule, R = 9", run=lambda seed: whole_run(schedule, "known-others", scheduled, seed))
    tree = plain.but(rounds=8, correlated=TreeNoise(rounds=8), noise_multiplier=2.0)
    yield Row(name="run, tree", run=lambda seed: tree_run(tree, seed))
    yield Row(name="run, blocks", run=lambda seed: blocked_run(4.0, seed))


def _two_sample_rows() -> Iterator[Row]:
    """Scores against unobserved ones: normal, nearly normal, and coins."""
    for count, size in ((50, 50), (300, 1_000), (1_000, 1_000), (1_000, 10_000)):
        for std in (0.97, 1.0, 1.05):
            for epsilon in (4.0, 8.0):
                yield Row(
                    name=f"two samples, k = {count}, m = {size}, spread {std:g}, ε = {epsilon:g}",
                    run=partial(two_samples, count, size, epsilon, std),
                    honest=False,  # a test of normality at 1 % for each sample
                )
    for law in LAWS:
        for size in SIZES:
            for shift in (1.0, 2.0):
                yield Row(
                    name=f"near normal, {law}, k = m = {size}, shift {shift:g}",
                    run=partial(near_normal, law, size, shift),
                    honest=False,
                )
    for count, size in ((50, 50), (50, 1_000), (1_000, 1_000), (1_000, 10_000), (1_000, 50)):
        for epsilon in (1.0, 3.0):
            yield Row(
                name=f"coins, k = {count}, m = {size}, ε = {epsilon:g}",
                run=partial(randomized_response, count, size, epsilon),
                honest=False,
            )


def tree_run(pipeline: Pipeline, seed: int) -> tuple[GaussianBound, float, float]:
    """A run with correlated noise: the row names the sensitivity of its client."""
    row = pipeline.result(seed)["known-others"].headline
    assert row.sensitivity is not None
    true = float(mechanism_epsilon(pipeline.noise_multiplier / row.sensitivity, delta=DELTA))
    return row.gaussian, true, row.lower_bound


def _quieter(noise: Noise) -> np.ndarray:
    """Half the noise in every other round, so that half of the canaries have larger scores."""
    return noise.normal() * (0.5 if noise.number % 2 else 1.0)


def work(name: str, first: int, count: int) -> list[Record]:
    """A batch of runs of one row."""
    row = next(row for row in rows() if row.name == name)
    found: list[dict[str, Any]] = []
    for seed in range(first, first + count):
        bound, true, any_law = row.run(zlib.crc32(f"{name}, {seed}".encode()))
        low, high = bound.interval or (math.nan, math.nan)
        found.append(
            {
                "offered": not bound.withheld,
                "bound": bound.lower_bound or 0.0,
                "above": bool((bound.lower_bound or 0.0) > true),
                "covers": bool(bound.withheld or low <= true <= high),
                "true": true,
                "any": any_law,
                "any_above": bool(any_law > true),
                "why": bound.withheld,
            }
        )
    offered = [each for each in found if each["offered"]]
    return [
        {
            "row": name,
            "first": first,
            "runs": count,
            "offered": len(offered),
            "above": sum(each["above"] for each in offered),
            "missed": sum(not each["covers"] for each in offered),
            "bounds": sum(each["bound"] for each in offered),
            "true": next((each["true"] for each in offered), math.nan),
            "any": sum(each["any"] for each in found) / count,
            "any_above": sum(each["any_above"] for each in found),
            "why": sorted({each["why"] for each in found} - {""}),
        }
    ]


def summaries() -> dict[str, Record]:
    """The finished runs of each row, added up."""
    names = [row.name for row in rows()]
    found: dict[str, Record] = {}
    for each in read_records(RESULTS, names, lambda record: (record["row"], record["first"])):
        total = found.setdefault(
            each["row"], {"runs": 0, "offered": 0, "above": 0, "missed": 0, "bounds": 0.0, "any_above": 0}
        )
        for field in ("runs", "offered", "above", "missed", "bounds", "any_above"):
            total[field] += each[field]
        total["any"] = total.get("any", 0.0) + each["any"] * each["runs"]
        total["true"] = each["true"]
        total["why"] = sorted({*total.get("why", []), *each["why"]})
    for total in found.values():
        total["any"] /= total["runs"]
    return found


def run(names: list[str], seeds: int, jobs: int) -> None:
    """Run what is missing of these rows."""
    done = {(each["row"], each["first"]) for each in read_records(RESULTS, names, lambda r: (r["row"], r["first"]))}
    batches = [
        (name, first, BATCH)
        for first in range(0, min(seeds, RUNS), BATCH)
        for name in names
        if (name, first) not in done
    ]
    run_batches(RESULTS, work, batches, jobs)


def failures(names: list[str], seeds: int) -> list[str]:
    """The rows that miss a bar: too many bounds above the truth, intervals that miss it, or too few offers."""
    found, honest, bad = summaries(), {row.name: row.honest for row in rows()}, []
    for name in names:
        total = found.get(name)
        if total is None or total["runs"] < min(seeds, RUNS):
            bad.append(f"{name}: {0 if total is None else total['runs']} of {RUNS} runs")
            continue
        if total["above"] > most_errors(total["runs"], MISSES):
            bad.append(f"{name}: the bound exceeds the truth in {total['above']} of {total['runs']} runs")
        if total["any_above"] > most_errors(total["runs"], MISSES):
            bad.append(
                f"{name}: the bound for any law exceeds the truth in {total['any_above']} of {total['runs']} runs"
            )
        if honest[name] and "known-round" not in name and total["missed"] > most_errors(total["runs"], MISSED):
            bad.append(f"{name}: the interval misses the truth in {total['missed']} of {total['runs']} runs")
        if honest[name] and total["runs"] - total["offered"] > most_errors(total["runs"], 1 - OFFERED):
            bad.append(f"{name}: offered in {total['offered']} of {total['runs']} runs")
    for (epsilon, count), mean in COLUMN.items():
        total = found.get(f"scores, k = {count}, d − k = 1000000, R = 1, ε = {epsilon:g}")
        if total is not None and total["bounds"] < 0.97 * mean * total["offered"]:
            bad.append(f"ε = {epsilon:g}, k = {count}: mean bound {total['bounds'] / total['offered']:.3f} for {mean}")
    return bad


def tables() -> dict[str, str]:
    """The tables of the page."""
    found = summaries()

    def share(total: Record, field: str) -> str:
        return f"{total[field] / max(total['offered'], 1):.1%}"

    heads = [
        "k",
        "d − k",
        "runs",
        "offered",
        "bound above ε",
        "in the worst row",
        "interval misses ε",
        "in the worst row",
    ]
    worst: list[list[str]] = [heads]
    for count in COUNTS:
        for free in FREE:
            group = [t for n, t in found.items() if n.startswith(f"scores, k = {count}, d − k = {free},")]
            if group:
                worst.append(
                    [
                        f"{count:,}",
                        f"{free:,}",
                        f"{len(group)} × {min(t['runs'] for t in group)}",
                        f"{min(t['offered'] / t['runs'] for t in group):.1%}",
                        *_pooled_and_worst(group, "above"),
                        *_pooled_and_worst(group, "missed"),
                    ]
                )
    means = [["true ε", "k", "for any law", "if the noise is Gaussian", "ε at mean − 1.645/√k"]]
    for (epsilon, count), mean in COLUMN.items():
        total = found.get(f"scores, k = {count}, d − k = 1000000, R = 1, ε = {epsilon:g}")
        if total is not None:
            means.append(
                [
                    f"{epsilon:g}",
                    f"{count:,}",
                    f"{total['any']:.2f}",
                    f"{total['bounds'] / max(total['offered'], 1):.2f}",
                    f"{mean:.2f}",
                ]
            )
    rest = [
        ["row", "true ε", "runs", "offered", "mean bound", "bound above ε", "interval misses ε", "withheld because"]
    ]
    for name, total in found.items():
        if not name.startswith(("scores", "near normal", "coins")):
            given = total["offered"] > 0
            rest.append(
                [
                    name,
                    f"{total['true']:.2f}" if given else "–",
                    str(total["runs"]),
                    f"{total['offered'] / total['runs']:.1%}",
                    f"{total['bounds'] / total['offered']:.2f}" if given else "–",
                    share(total, "above") if given else "–",
                    share(total, "missed") if given and "known-round" not in name else "–",
                    "; ".join(sorted({reason.partition(" (")[0] for reason in total["why"]})) or "–",
                ]
            )
    named = (("means", means), ("scores", worst), ("near", _near(found)), ("coins", _coins(found)), ("runs", rest))
    return {name: markdown_table(lines) for name, lines in named}


def _near(found: dict[str, Record]) -> list[list[str]]:
    """A line for each law that is nearly normal: offers, and bounds above ε, in the worse of both shifts."""
    lines = [["law", *(f"{size:,} scores of each kind" for size in SIZES)]]
    for law in LAWS:
        cells = []
        for size in SIZES:
            group = [t for n, t in found.items() if n.startswith(f"near normal, {law}, k = m = {size},")]
            if group:
                above, offered = (max(t[kind] / t["runs"] for t in group) for kind in ("above", "offered"))
                cells.append(f"{above:.1%} of {min(t['runs'] for t in group)}, offered {offered:.0%}")
        if cells:
            lines.append([law, *cells])
    return lines


def _coins(found: dict[str, Record]) -> list[list[str]]:
    """A line for each pair of sizes under randomized response."""
    lines = [["observed", "unobserved", "true ε", "mean bound", "above ε"]]
    for name, total in found.items():
        if match := re.fullmatch(r"coins, k = (\d+), m = (\d+), ε = (\d+)", name):
            mean, above = f"{total['any']:.2f}", f"{total['any_above'] / total['runs']:.1%}"
            lines.append([*(f"{int(number):,}" for number in match.groups()), mean, above])
    return lines


def _pooled_and_worst(group: list[Record], field: str) -> tuple[str, str]:
    """The share over all rows, and that of the worst."""
    pooled = sum(total[field] for total in group) / sum(total["offered"] for total in group)
    return f"{pooled:.1%}", f"{max(total[field] / max(total['offered'], 1) for total in group):.1%}"


if __name__ == "__main__":
    raise SystemExit(
        main_of(
            __doc__,
            results=RESULTS,
            page=DOCS,
            rows=[row.name for row in rows()],
            run=run,
            tables=tables,
            failures=failures,
        )
    )
