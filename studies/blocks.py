"""Laws of canaries in blocks compared with those of one vector: scores, intervals, bounds, tails and gauges.

    python -m studies.blocks --jobs 2           every row: about an hour on two cores
    python -m studies.blocks --only "^tail"     the rows whose name matches
    python -m studies.blocks --write-docs       write the tables of finished rows into docs/evidence/blocks.md

Every audit is made with `Audit.for_model` and observes rounds like those of a training loop. A finished part of a row is
stored in studies/out/blocks.jsonl and is not run again.
"""

import argparse
import itertools
import json
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_ndtr, logsumexp
from scipy.stats import binom, kstest

from coalmine import Audit, mechanism_epsilon
from coalmine.canaries.rotation_numpy import stay_in_one_thread
from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.intervals import epsilon_interval
from coalmine.estimators.null import CosineNull
from coalmine.estimators.variance import Sample, point_epsilon
from coalmine.evidence.gauges.gauge_reader import read_gauges
from coalmine.evidence.ladder import exact_bound, ladder, unit_null
from coalmine.evidence.views import views
from coalmine.measure.scale import block_scale
from coalmine.measure.settings import checked_settings
from studies.results import put_between_markers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "blocks.jsonl"
DOCS = ROOT / "docs" / "evidence" / "blocks.md"
DELTA, CONFIDENCE = 1e-5, 0.95
RARE = 1e-4  # p-value below which one of about 130 tests of a law fails
HONEST = 0.005  # largest share of runs with an alarm: about 25 gauges at 1e-4 each, all layers as one, and rank at 2e-3
PARTS = 10  # parts of a row, run and stored one by one


@dataclass(frozen=True)
class Layout:
    """How a model is split: layers in their order, and blocks whose ends need not match those of layers."""

    name: str
    layers: tuple[int, ...]
    blocks: tuple[int, ...]
    canaries: int

    @property
    def dim(self) -> int:
        return sum(self.blocks)

    @property
    def edges(self) -> list[int]:
        """Where each block begins, and the end of the last."""
        return [0, *itertools.accumulate(self.blocks)]

    @property
    def smallest(self) -> int:
        """The index of the smallest block."""
        return int(np.argmin(self.blocks))

    def model(self) -> dict[str, np.ndarray]:
        """Parameters to make an audit for."""
        return self.tree(np.zeros(self.dim))

    def tree(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """One vector as a dict of layers."""
        pieces = np.split(vector.astype(np.float32), np.cumsum(self.layers)[:-1])
        return {f"layer{place}": piece for place, piece in enumerate(pieces)}

    def vector(self, tree: dict[str, np.ndarray]) -> np.ndarray:
        """The inverse of `tree`."""
        return np.concatenate(list(tree.values())).astype(np.float64)


def merged_layout(blocks: int = 300, canaries: int = 16) -> Layout:
    """Layers of 3 to 2,000 numbers, merged until each block holds 8 coordinates for each canary."""
    rng = np.random.default_rng(17)
    layers: list[int] = []
    sizes: list[int] = []
    open_block = 0
    while len(sizes) < blocks:
        layer = int(np.exp(rng.uniform(math.log(3), math.log(2_001))))
        layers.append(layer)
        open_block += layer
        if open_block >= 8 * canaries:
            sizes.append(open_block)
            open_block = 0
    return Layout(f"{blocks} merged", tuple(layers), tuple(sizes), canaries)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one", (60, 940, 3_000), (4_000,), 500),
        Layout("three", (500, 1_500, 40, 4_960, 12_000, 8_000), (2_000, 5_000, 20_000), 200),
        Layout("eighth", (100, 700, 800, 3_000, 3_400), (800, 800, 6_400), 100),
        Layout("ranks", (1_200, 8, 4_400), (801, 801, 801, 801, 801, 1_603), 100),
        merged_layout(),
    )
}
VECTORS_OF_ONE = ("white", "one layer", "one coordinate", "sign")  # with one block, all other kinds are white
VECTORS = ("white", "smallest block", "one layer", "one coordinate", "last block", "30:1", "sign")
STRONG, KNOWN = 0.2, "known-others"  # noise at which the error of the null's scale matters most
SHAPES = ("white", "smallest block", "last block", "30:1")


def block_stds(layout: Layout, shape: str) -> np.ndarray:
    """The noise's std in each block, so that its projection on any canary has std 1."""
    stds = np.ones(len(layout.blocks))
    if shape == "smallest block":
        stds[:] = np.arange(stds.size) == layout.smallest
    elif shape == "last block":
        stds[:-1] = 0.0
    elif shape == "30:1":
        stds[::2] = 30.0
    shares = np.array(layout.blocks) / layout.dim
    return np.asarray(stds / math.sqrt(float(shares @ stds**2)))


def noise(layout: Layout, shape: str, rng: np.random.Generator) -> np.ndarray:
    """Gaussian noise with these stds."""
    return np.repeat(block_stds(layout, shape), layout.blocks) * rng.normal(size=layout.dim)


def made_vector(layout: Layout, kind: str, rng: np.random.Generator) -> np.ndarray:
    """A vector that is independent of the canaries."""
    if kind in ("white", "sign"):
        return rng.normal(size=layout.dim)
    if kind == "one layer":
        vector = np.zeros(layout.dim)
        vector[layout.layers[0] : layout.layers[0] + layout.layers[1]] = 1.0
        return vector
    if kind == "one coordinate":
        return np.asarray(np.eye(1, layout.dim, layout.edges[layout.smallest] + 17)[0])
    return noise(layout, kind, rng)


# -------------------------------------------------------------------------------------------------------- unobserved scores


def law_run(layout: Layout, kind: str, present: bool, seed: int) -> dict[str, Any]:
    """The unobserved scores of one audit of one round, transformed to quantiles of the package's null.

    They are few compared with the smallest block, so they are almost independent.
    """
    rng = np.random.default_rng([seed, zlib.crc32(f"{layout.name}, {kind}, {present}".encode())])
    few = max(min(layout.blocks) // 16, 10)
    audit = Audit.for_model(
        layout.model(),
        canaries=layout.canaries,
        unobserved=few,
        seed=seed + 10_000 * present,  # with the same vector, adding a canary would not change the scores
        delta=DELTA,
        blocks=layout.blocks,
    )
    vector, members = made_vector(layout, kind, rng), list(range(0, layout.canaries, 2)) if present else []
    if members:  # each canary's projection has a mean of two stds
        total = layout.vector(audit.updates(members, 1.0))
        vector += 2 * float(np.linalg.norm(vector)) / math.sqrt(layout.dim) * total
    if kind == "sign":
        vector = np.sign(vector)
    audit.observe_round(1, layout.tree(vector), present=members)
    (view,) = views(audit.log, audit.settings)
    uniforms = unit_null(audit.settings, view.dof).cdf(view.unobserved)
    return {"p": float(kstest(uniforms, "uniform").pvalue), "scores": view.unobserved.tolist(), "dof": view.dof}


# ------------------------------------------------------------------------------------------------------------------ coverage


def coverage_run(layout: Layout, shape: str, rounds: int, rung: str, std: float, seed: int) -> dict[str, Any]:
    """Whether one audit's interval covers the true epsilon, and whether its lower bound holds.

    The noise has this std along every canary. With known-others a real signal three times as long is in `others`.
    """
    rng = np.random.default_rng([seed, zlib.crc32(f"{layout.name}, {shape}, {rounds}, {rung}, {std}".encode())])
    audit = Audit.for_model(
        layout.model(),
        canaries=layout.canaries,
        unobserved=10,
        seed=seed,
        delta=DELTA,
        blocks=layout.blocks,
        rounds=rounds,
    )
    steady = 3 * rng.normal(size=layout.dim)
    for number in range(1, rounds + 1):
        present = audit.canaries_in_round(number)
        release = layout.vector(audit.updates(present, 1.0)) + std * noise(layout, shape, rng)
        others = None
        if rung == KNOWN:
            signal = layout.tree(steady + rng.normal(size=layout.dim))
            release, others = release + layout.vector(signal), signal
        audit.observe_round(number, layout.tree(release), present=present, others=others, clip_norm=1.0)
    scores = next(found for found in ladder(audit.log, audit.settings) if found.rung == rung)
    truth, told = float(mechanism_epsilon(std, delta=DELTA)), {"delta": DELTA, "confidence": CONFIDENCE}
    mean, spread = float(scores.observed.mean()), float(scores.observed.std())
    assert isinstance(scores.null, CosineNull)
    sample = Sample(scores.observed.size, null_dof=min(scores.null_dof, scores.null.dof))
    low, high = epsilon_interval(mean, spread, sample=sample, **told)
    bound = epsilon_lower_bound(scores.bounded, null=scores.bound_null, **told)
    if seed % 100 == 1:  # the whole result takes much longer and says the same
        row = audit.result().adversaries[rung].headline
        assert row.estimate.interval is not None
        assert np.allclose([low, high, bound], [*row.estimate.interval, row.lower_bound], rtol=1e-9)
    return {
        "covers": bool(low <= truth <= high),
        "holds": bool(bound <= truth),
        "epsilon": point_epsilon(mean, spread, sample=sample, delta=DELTA, variance="auto"),
        "bound": bound,
        "dof": scores.round_dof,
    }


# ----------------------------------------------------------------------------------------------------------------- far tails


@dataclass(frozen=True)
class Tail:
    """Blocks and their noise stds, for the score of an absent observed canary."""

    name: str
    blocks: tuple[int, ...]
    stds: tuple[float, ...]
    canaries: int


TAILS = {
    tail.name: tail
    for tail in (
        Tail("one block of 4,000", (4_000,), (1.0,), 500),
        Tail("all in a block of 80", (80, 1_000, 100_000), (1.0, 0.0, 0.0), 10),
        Tail("100:1 in a block of 80", (80, 1_000, 100_000), (100.0, 1.0, 1.0), 10),
        Tail("half in a block of 80", (80, 100_000), (math.sqrt(100_000 / 80), 1.0), 10),
        Tail("two blocks of 80", (80, 80), (1.0, 1.0), 10),
        Tail("three blocks, white", (2_000, 5_000, 20_000), (1.0, 1.0, 1.0), 200),
        Tail("three blocks, all in the smallest", (2_000, 5_000, 20_000), (1.0, 0.0, 0.0), 200),
        Tail("five of 801 and one of 1,603, white", (801,) * 5 + (1_603,), (1.0,) * 6, 100),
        Tail("300 blocks of 800, white", (800,) * 300, (1.0,) * 300, 100),
    )
}
LEVELS = (-3.0, -10.0, -25.0)  # log false positive rates as the bound computes them
DRAWS = 20_000


def tail_excess(tail: Tail, level: float) -> dict[str, float]:
    """The true log probability that an absent canary exceeds the score whose tail is `level` according to the bound.

    Given the blocks' lengths orthogonal to the canaries, the score's numerator is normal, so the probability is
    E Φ(-x√V), V = Σ p_b·χ²_b/ν_b. x is the package's score for this level, which depends on the lengths through
    `tail_dof`. The lengths are importance sampled where e^(-x²V/2), nearly the averaged function, has its mass.
    """
    settings = checked_settings(
        sum(tail.blocks), canaries=tail.canaries, unobserved=None, delta=DELTA, kind="rotated", rounds=None,
        presentations=1, momentum=0.0, layers=None, blocks=tail.blocks,
    )  # fmt: skip
    rng, stds = np.random.default_rng(8), np.array(tail.stds)
    free = np.array(settings.block_sizes) - tail.canaries
    parts = np.array(settings.block_sizes) / settings.dim * stds**2
    shares = parts / parts.sum()
    usual = _threshold(float((free[shares > 0] / shares[shares > 0]).min()), level)
    rates = 1 + usual**2 * shares / free
    squares = rng.gamma(free / 2, 2 / (free * rates), (DRAWS, free.size))  # χ²_b/ν_b, tilted
    weights = np.sum(free / 2 * ((rates - 1) * squares - np.log(rates)), axis=1)
    read = np.array([block_scale(lengths, settings)[2] for lengths in stds * np.sqrt(squares * free)])
    nodes = np.unique(np.floor(1 / np.linspace(1 / read.min(), 1 / read.max(), 100)))
    scores = np.interp(-1 / read, -1 / nodes, [_threshold(node, level) for node in nodes])
    logs = weights + log_ndtr(-scores * np.sqrt(squares @ shares))
    truth = float(logsumexp(logs)) - math.log(DRAWS)
    error = float(np.std(np.exp(logs - truth))) / math.sqrt(DRAWS)
    return {"level": level, "truth": truth, "error": error, "normal": float(log_ndtr(-usual))}


def _threshold(tail_dof: float, level: float) -> float:
    """The score whose tail is `level` under the bound's null."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        bound = exact_bound(np.array([middle]), tail_dof)
        reached = float(bound["bound_null"].logsf(bound["bound_observed"][0]))
        low, high = (middle, high) if reached > level else (low, middle)
    return (low + high) / 2


# -------------------------------------------------------------------------------------------------------------------- gauges

Noise = Callable[[Layout, np.random.Generator, int, int], np.ndarray]


def _same_in_blocks(layout: Layout, rng: np.random.Generator, number: int, seed: int) -> np.ndarray:
    """Every block generates its noise from the same seed."""
    return np.concatenate([np.random.default_rng([seed, number]).normal(size=size) for size in layout.blocks])


def _part(layout: Layout, rng: np.random.Generator, start: int, size: int, factor: float) -> np.ndarray:
    found = rng.normal(size=layout.dim)
    found[start : start + size] *= factor
    return found


NOISES: dict[str, Noise] = {
    "honest": lambda layout, rng, number, seed: rng.normal(size=layout.dim),
    "none in one layer": lambda layout, rng, number, seed: _part(layout, rng, layout.layers[0], layout.layers[1], 0.0),
    "half in one block": lambda layout, rng, number, seed: _part(layout, rng, 0, layout.blocks[0], 0.5),
    "Laplace": lambda layout, rng, number, seed: rng.laplace(size=layout.dim) / math.sqrt(2),
    "one draw for two rounds": lambda layout, rng, number, seed: np.random.default_rng(
        [seed, (number + 1) // 2]
    ).normal(size=layout.dim),
    "on a grid": lambda layout, rng, number, seed: np.round(rng.normal(size=layout.dim) * 8) / 8,
    "one draw for all blocks": _same_in_blocks,
}


def gauge_run(layout: Layout, law: str, rounds: int, seed: int) -> dict[str, Any]:
    """The gauges that are not "ok", with their status, in one loop with a heavy real signal in `others`."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{layout.name}, {law}".encode())])
    audit = Audit.for_model(
        layout.model(), canaries=layout.canaries, seed=seed, delta=DELTA, blocks=layout.blocks, rounds=rounds
    )
    steady = 3 * rng.normal(size=layout.dim) * np.repeat(rng.uniform(0.1, 10, len(layout.blocks)), layout.blocks)
    for number in range(1, rounds + 1):
        present = audit.canaries_in_round(number)
        others = layout.tree(steady + rng.normal(size=layout.dim))
        release = layout.vector(audit.updates(present, 1.0)) + layout.vector(others)
        release += NOISES[law](layout, rng, number, seed)
        audit.observe_round(number, layout.tree(release), present=present, others=others, clip_norm=1.0, noise_std=1.0)
    found = read_gauges(audit.log, audit.settings)
    return {"gauges": len(found), "alarms": [(gauge.name, gauge.status) for gauge in found if gauge.status != "ok"]}


# ---------------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, kw_only=True)
class Row:
    """Runs of one kind: `run` gets the arguments and a seed, starting at 1."""

    name: str
    kind: str
    arguments: tuple[Any, ...]
    runs: int


def rows() -> list[Row]:
    """Every row of the study."""
    found = [
        Row(name=f"tail, {name}, {level:g}", kind="tail", arguments=(name, level), runs=1)
        for name in TAILS
        for level in LEVELS
    ]
    for layout in LAYOUTS.values():
        large = len(layout.blocks) > 100
        for kind, present in itertools.product(VECTORS, (False, True)):
            if (kind != "sign" or present) and (len(layout.blocks) > 1 or kind in VECTORS_OF_ONE):
                held = "canaries in it" if present else "no canary in it"
                name = f"law, {layout.name}, {kind}, {held}"
                found.append(
                    Row(name=name, kind="law", arguments=(layout.name, kind, present), runs=60 if large else 200)
                )
        shapes = ("white",) if len(layout.blocks) == 1 else SHAPES[:2] + SHAPES[3:] if large else SHAPES
        cells = [(shape, 1, "known-round", 1.0) for shape in shapes]
        if layout.name in ("one", "three", "ranks"):
            cells += [(shape, 1, "known-round", STRONG) for shape in shapes[:2]]
            cells += [("white", rounds, rung, 1.0) for rounds, rung in ((1, KNOWN), (5, "known-round"), (5, KNOWN))]
        if layout.name == "three":
            cells.append(("30:1", 5, "known-round", 1.0))
        for shape, rounds, rung, std in cells:
            name = f"coverage, {layout.name}, {shape}, {rounds} rounds, {rung}" + f", noise {std:g}" * (std != 1)
            arguments = (layout.name, shape, rounds, rung, std)
            found.append(Row(name=name, kind="coverage", arguments=arguments, runs=1_000))
        for law in list(NOISES)[: None if len(layout.blocks) > 1 else -1]:
            runs = (30 if large else 300) if law == "honest" else 3 if large else 20
            arguments = (layout.name, law, 3 if large else 10)
            found.append(Row(name=f"gauges, {layout.name}, {law}", kind="gauges", arguments=arguments, runs=runs))
    return sorted(found, key=lambda row: ("merged" in row.name, row.kind != "tail", row.kind))


RUN: dict[str, Callable[..., dict[str, Any]]] = {
    "law": lambda layout, *rest: law_run(LAYOUTS[layout], *rest),
    "coverage": lambda layout, *rest: coverage_run(LAYOUTS[layout], *rest),
    "gauges": lambda layout, *rest: gauge_run(LAYOUTS[layout], *rest),
    "tail": lambda name, level, seed: tail_excess(TAILS[name], level),
}


def run_part(name: str, part: int) -> dict[str, Any]:
    """A part of a row's runs."""
    stay_in_one_thread()
    row = next(row for row in rows() if row.name == name)
    seeds = range(1 + part, row.runs + 1, PARTS)
    return {"row": name, "part": part, "runs": [RUN[row.kind](*row.arguments, seed) for seed in seeds]}


def read() -> dict[str, list[dict[str, Any]]]:
    """The finished runs of each row."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else []:
        told = json.loads(line)
        found[told["row"], told["part"]] = told["runs"]
    whole: dict[str, list[dict[str, Any]]] = {}
    for (name, _), runs in found.items():
        whole.setdefault(name, []).extend(runs)
    return whole


def failures(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The missed bars, each with an allowance for the sampling error that occurs once in about ten thousand."""
    bad = []
    for row in rows():
        runs = found.get(row.name)
        if not runs:
            continue
        if row.kind == "law":
            told = law_figures(runs)
            off = max(abs(told["mean"]), abs(told["std"] - 1) * math.sqrt(2)) * math.sqrt(told["count"])
            if min(told["pooled"], told["uniform"]) < RARE or off > 4:
                bad.append(f"{row.name}: {told}")
        elif row.kind == "coverage":
            least = int(binom.ppf(RARE, len(runs), CONFIDENCE))
            bad += [
                f"{row.name}: {key} in {sum(run[key] for run in runs)} of {len(runs)}, at least {least} must"
                for key in ("covers", "holds")
                if sum(run[key] for run in runs) < least
            ]
        elif row.kind == "tail":
            bad += [f"{row.name}: {run}" for run in runs if run["truth"] > run["level"] + 4 * run["error"] + 1e-9]
        elif row.arguments[1] == "honest":
            alarmed = sum(bool(run["alarms"]) for run in runs)
            most = int(binom.ppf(1 - RARE, len(runs), HONEST))
            if alarmed > most:
                bad.append(f"{row.name}: a gauge alarmed in {alarmed} runs, at most {most} may")
    return bad


def law_figures(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Mean and std of all scores, the p-value of all scores pooled, and that of the seeds' p-values being uniform."""
    scores = np.concatenate([run["scores"] for run in runs])
    settings = checked_settings(
        10**6, canaries=10, unobserved=10, delta=DELTA, kind="rotated", rounds=None, presentations=1, momentum=0.0,
        layers=None,
    )  # fmt: skip
    points = np.concatenate([unit_null(settings, run["dof"]).cdf(np.array(run["scores"])) for run in runs])
    return {
        "count": scores.size,
        "mean": float(scores.mean()),
        "std": float(scores.std()),
        "pooled": float(kstest(points, "uniform").pvalue),
        "uniform": float(kstest([run["p"] for run in runs], "uniform").pvalue),
    }


def tables(found: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """The results as Markdown, by the name of the marker."""
    lines: dict[str, list[str]] = {
        "layouts": ["| layout | blocks | coordinates | layers | observed canaries |", "|---|---|---|---|---|"],
        "law": [
            "| layout | vector | canaries in it | runs | scores | mean | std | KS p, all scores | KS p, p-values of runs |",
            "|---|---|---|---|---|---|---|---|---|",
        ],
        "coverage": [
            "| layout | noise | rounds | rung | directions | runs | interval covers | bound holds | true ε | mean estimate "
            "| mean bound |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ],
        "tail": [
            "| noise | "
            + " | ".join(f"the bound says {level:g}" for level in LEVELS)
            + " | a normal null at the last |",
            "|---|" + "---|" * (len(LEVELS) + 1),
        ],
        "gauges": ["| layout | noise | runs | runs with an alarm | gauges that alarm |", "|---|---|---|---|---|"],
    }
    for layout in LAYOUTS.values():
        sizes = ", ".join(f"{size:,}" for size in layout.blocks)
        if len(layout.blocks) > 10:
            sizes = f"{len(layout.blocks)} of {min(layout.blocks):,} to {max(layout.blocks):,}"
        lines["layouts"].append(
            f"| {layout.name} | {sizes} | {layout.dim:,} | {len(layout.layers)} | {layout.canaries} |"
        )
    tails: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows(), key=lambda row: "merged" in row.name):
        runs = found.get(row.name)
        if not runs:
            continue
        if row.kind == "law":
            told = law_figures(runs)
            layout, kind, present = row.arguments
            lines["law"].append(
                f"| {layout} | {kind} | {'yes' if present else 'no'} | {len(runs)} | {told['count']:,} "
                f"| {told['mean']:.4f} | {told['std']:.4f} | {told['pooled']:.2g} | {told['uniform']:.2g} |"
            )
        elif row.kind == "coverage":
            layout, shape, rounds, rung, std = row.arguments
            truth = float(mechanism_epsilon(std, delta=DELTA))
            estimate, bound = (float(np.mean([run[key] for run in runs])) for key in ("epsilon", "bound"))
            directions = float(np.median([run["dof"] for run in runs]))
            lines["coverage"].append(
                f"| {layout} | {shape} | {rounds} | {rung} | {directions:,.0f} | {len(runs):,} "
                f"| {_share(runs, 'covers')} | {_share(runs, 'holds')} | {truth:.2f} | {estimate:.2f} | {bound:.2f} |"
            )
        elif row.kind == "tail":
            tails.setdefault(row.arguments[0], []).extend(runs)
        else:
            layout, law, rounds = row.arguments
            alarmed = sum(bool(run["alarms"]) for run in runs)
            names = Counter(
                re.sub(r"^layer .*", "layer", name)
                for run in runs
                for name in dict.fromkeys(n for n, _ in run["alarms"])
            )
            by = ", ".join(f"{name} {count}" for name, count in names.most_common(6))
            lines["gauges"].append(f"| {layout} | {law} | {len(runs)} | {alarmed} | {by or '–'} |")
    for name, runs in tails.items():
        by_level = {run["level"]: run for run in runs}
        if all(level in by_level for level in LEVELS):
            truths = " | ".join(f"{by_level[level]['truth']:.2f}" for level in LEVELS)
            lines["tail"].append(f"| {name} | {truths} | {by_level[LEVELS[-1]]['normal']:.2f} |")
    return {name: "\n".join(table) for name, table in lines.items()}


def _share(runs: list[dict[str, Any]], key: str) -> str:
    """A share with its binomial error."""
    share = float(np.mean([run[key] for run in runs]))
    return f"{share:.1%} ± {math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / len(runs)):.1%}"


def main() -> int:
    """Run the remaining rows and compare all of them with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", default="", help="Regular expression for the rows to run.")
    parser.add_argument("--parts", type=int, default=PARTS, help=f"Number of the {PARTS} parts of each row to run.")
    parser.add_argument("--write-docs", action="store_true", help="Write the tables into docs/evidence/blocks.md.")
    options = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    if not options.write_docs:
        lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
        done = {(told["row"], told["part"]) for told in map(json.loads, lines)}
        todo = [
            (row.name, part)
            for merged in (False, True)
            for part in range(options.parts)
            for row in rows()
            if ("merged" in row.name) == merged
            and re.search(options.only, row.name)
            and (row.name, part) not in done
            and part < row.runs
        ]
        with ProcessPoolExecutor(options.jobs) as pool, RESULTS.open("a") as out:
            for future in as_completed([pool.submit(run_part, *task) for task in todo]):
                out.write(json.dumps(future.result()) + "\n")
                out.flush()
    found = read()
    made = tables(found)
    print("\n\n".join(made.values()))
    bad = failures(found)
    print("\n".join(bad) if bad else "every bar is met")
    if options.write_docs:
        text = DOCS.read_text()
        for name, table in made.items():
            text = put_between_markers(text, name, table)
        DOCS.write_text(text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
