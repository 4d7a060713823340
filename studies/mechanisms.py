"""Error rates of the privacy unit test: correct aggregators must pass it, faulty ones must fail.

    python -m studies.mechanisms                  every row, about 45 minutes on one core
    python -m studies.mechanisms --seeds 5        at most five seeds in each row
    python -m studies.mechanisms --only 'clip'    only the rows whose name matches this regular expression
    python -m studies.mechanisms --write-docs     write the tables of docs/evidence/mechanisms.md from finished runs

Every run is one `coalmine.testing.check_private`. A finished run is one line of studies/out/mechanisms.jsonl and is not run
again; `--fresh` starts over, which is necessary after a change of the check. The study fails if a correct aggregator passes
in fewer than 99.5 % of the runs of a row, or if a faulty one fails in fewer than 95 %, except in rows whose fault cannot be
detected. It also fails if the median check of a plain row takes 2 seconds.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coalmine import AuditResult, BandedNoise, TreeNoise, mechanism_noise
from coalmine.testing import check_private
from studies.results import Record, main_of, markdown_table, read_records, run_batches

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "mechanisms.jsonl"
DOCS = ROOT / "docs" / "evidence" / "mechanisms.md"
DELTA, DIM = 1e-5, 5_000
PLAIN_SEEDS, SEEDS, FEWER_SEEDS = 1_000, 100, 10
PASSING, FAILING, SECONDS = 0.995, 0.95, 2.0
BATCH = 10
OUTCOMES = ("PASS", "VIOLATION", "UNDERPOWERED")

COMPARED = {"shrunk": "length beside long updates", "noise follows data": "noise at other lengths"}

Array = np.ndarray
Release = Callable[..., Any]
Kind = Literal["correct", "faulty", "unseen"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """An aggregator made from a seed, its claim, and whether it satisfies the claim."""

    make: Callable[[np.random.Generator], Release]
    kind: Kind
    seeds: int = SEEDS
    settings: dict[str, Any] = field(default_factory=dict)


def clip(updates: Array, norm: float = 1.0) -> Array:
    """Each row scaled to at most this norm."""
    return updates / np.maximum(1.0, np.linalg.norm(updates, axis=-1, keepdims=True) / norm)


def needed(epsilon: float = 3.0) -> float:
    """The noise multiplier that a claim requires."""
    return float(mechanism_noise(epsilon, delta=DELTA))


def noised(
    rng: np.random.Generator,
    *,
    std: float,
    clipped: Callable[[Array], Array] = clip,
    draw: Callable[[np.random.Generator, int], Array] = lambda rng, size: rng.standard_normal(size),
) -> Release:
    """The noised sum of clipped updates; a fault replaces the clip or the law of the noise."""
    return lambda updates: clipped(updates).sum(axis=0) + std * draw(rng, updates.shape[1])


def noised_mean(rng: np.random.Generator, *, std: float, clients: int | None = None) -> Release:
    """The mean of clipped updates, its noise divided by the number of clients."""

    def release(updates: Array) -> Array:
        count = clients or len(updates)
        return (clip(updates).sum(axis=0) + std * rng.standard_normal(updates.shape[1])) / count

    return release


def clipped_mean(rng: np.random.Generator) -> Release:
    """The mean is clipped, not the updates."""

    def release(updates: Array) -> Array:
        noise = rng.standard_normal(updates.shape[1])
        return clip(updates.mean(axis=0)[None])[0] + needed() / len(updates) * noise

    return release


def weighted_mean(rng: np.random.Generator, *, largest: float) -> Release:
    """The mean weighted by examples, with noise for a client of weight `largest`."""

    def release(updates: Array, weights: Array) -> Array:
        noise = rng.standard_normal(updates.shape[1])
        return ((clip(updates) * weights[:, None]).sum(axis=0) + needed() * largest * noise) / weights.sum()

    return release


def weighted_with_noise_of_the_mean(rng: np.random.Generator) -> Release:
    """The mean weighted by examples, with noise for a plain mean."""

    def release(updates: Array, weights: Array) -> Array:
        noise = rng.standard_normal(updates.shape[1])
        mean = (clip(updates) * weights[:, None]).sum(axis=0) / weights.sum()
        return mean + needed() / len(updates) * noise

    return release


def seeded_again(rng: np.random.Generator) -> Release:
    """The generator is seeded again in every call."""
    seed = int(rng.integers(2**32))
    return lambda updates: noised(np.random.default_rng(seed), std=needed())(updates)


def reused_every_second(rng: np.random.Generator) -> Release:
    """Every second call uses the noise of the first."""
    kept: list[Array] = []
    calls = iter(range(10**9))

    def release(updates: Array) -> Array:
        noise = needed() * rng.standard_normal(updates.shape[1])
        kept.append(noise)
        return clip(updates).sum(axis=0) + (kept[0] if next(calls) % 2 == 0 else noise)

    return release


def noise_before_clip(rng: np.random.Generator) -> Release:
    """Every client adds its noise before the clip, which shrinks both."""
    return lambda updates: clip(updates + needed() * rng.standard_normal(updates.shape)).sum(axis=0)


def noise_by_norms(rng: np.random.Generator) -> Release:
    """The noise is proportional to the mean norm of the clipped updates."""

    def release(updates: Array) -> Array:
        size = np.minimum(np.linalg.norm(updates, axis=1), 1.0).mean()
        return clip(updates).sum(axis=0) + needed() * size * rng.standard_normal(updates.shape[1])

    return release


def noise_by_sum(rng: np.random.Generator) -> Release:
    """The noise is proportional to the sum in each coordinate."""

    def release(updates: Array) -> Array:
        total = clip(updates).sum(axis=0)
        size = np.abs(total) / np.abs(total).mean()
        return total + needed() * size * rng.standard_normal(updates.shape[1])

    return release


def median_clip(rng: np.random.Generator, *, scaled: bool) -> Release:
    """The clip norm is the median of the norms, and the noise scales with it or does not."""

    def release(updates: Array) -> Array:
        norm = float(np.median(np.linalg.norm(updates, axis=1)))
        std = needed() * (norm if scaled else 1.0)
        return clip(updates, norm).sum(axis=0) + std * rng.standard_normal(updates.shape[1])

    return release


def by_layer(updates: Array, parts: int = 4) -> Array:
    """Each of four layers is clipped to the whole clip norm."""
    return np.concatenate([clip(part) for part in np.split(updates, parts, axis=1)], axis=1)


def clipped_sum(rng: np.random.Generator) -> Release:
    """The sum is clipped, not the updates."""
    return lambda updates: clip(updates.sum(axis=0)[None])[0] + needed() * rng.standard_normal(updates.shape[1])


class AdaptiveClip:
    """The clip norm follows the median of the norms, and the noise scales with the clip norm."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self._norm = rng, 0.1

    def __call__(self, updates: Array) -> Array:
        noise = needed() * self._norm * self._rng.standard_normal(updates.shape[1])
        released = clip(updates, self._norm).sum(axis=0) + noise
        below = float((np.linalg.norm(updates, axis=1) <= self._norm).mean())
        self._norm *= float(np.exp(-0.2 * (below - 0.5)))
        return released


class TreeSum:
    """Tree noise, for clients who take part in one call."""

    def __init__(self, rng: np.random.Generator, noise: TreeNoise, std: float) -> None:
        self._rng, self._noise, self._std = rng, noise, std
        self._nodes: list[Array] = []

    def __call__(self, updates: Array) -> Array:
        self._nodes.append(self._std * self._rng.standard_normal(updates.shape[1]))
        children = self._noise.children(len(self._nodes))
        return clip(updates).sum(axis=0) + self._nodes[-1] - sum(self._nodes[child - 1] for child in children)


class BandedSum:
    """Noise C⁻¹ζ of a banded factorisation, for clients who take part in one call."""

    def __init__(self, rng: np.random.Generator, noise: BandedNoise, std: float) -> None:
        self._rows = np.linalg.inv(noise.matrix())
        self._fresh: list[Array] = []
        self._rng, self._std = rng, std

    def __call__(self, updates: Array) -> Array:
        self._fresh.append(self._std * self._rng.standard_normal(updates.shape[1]))
        row = self._rows[len(self._fresh) - 1, : len(self._fresh)]
        return clip(updates).sum(axis=0) + row @ np.stack(self._fresh)


def fixed_point(rng: np.random.Generator) -> Release:
    """Every client rounds its update and its share of the noise to integers, as for secure aggregation."""

    def release(updates: Array) -> Array:
        share = needed() / np.sqrt(len(updates)) * rng.standard_normal(updates.shape)
        return np.rint((clip(updates) + share) * 256).astype(np.int64).sum(axis=0)

    return release


def in_layers(rng: np.random.Generator, *, bare: bool) -> Release:
    """A list of layers for each client and for the sum; a bare bias has no noise."""

    def release(updates: list[list[Array]]) -> list[Array]:
        rows = np.stack([np.concatenate([part.ravel() for part in update]) for update in updates])
        noise = needed() * rng.standard_normal(rows.shape[1])
        noise[4_000:] *= not bare
        total = clip(rows).sum(axis=0) + noise
        return [total[:4_000].reshape(50, 80), total[4_000:]]

    return release


def laplace(rng: np.random.Generator, size: int) -> Array:
    """Laplace noise of std 1."""
    return rng.laplace(size=size) / np.sqrt(2)


def on_half(rng: np.random.Generator, size: int) -> Array:
    """Noise on the first half of the coordinates."""
    return rng.standard_normal(size) * (np.arange(size) < size // 2)


def coarse(rng: np.random.Generator, size: int) -> Array:
    """Noise on a grid of one half standard deviation."""
    return np.round(rng.standard_normal(size) * 2) / 2


def halves(rng: np.random.Generator, size: int) -> Array:
    """Noise in half precision."""
    return rng.standard_normal(size).astype(np.float16)


def in_pairs(rng: np.random.Generator, size: int) -> Array:
    """One draw for two neighbouring coordinates."""
    return np.repeat(rng.standard_normal(size // 2), 2)


def uniform(rng: np.random.Generator, size: int) -> Array:
    """Uniform noise of std 1."""
    return rng.uniform(-np.sqrt(3), np.sqrt(3), size)


def coins(rng: np.random.Generator, size: int) -> Array:
    """Plus or minus one."""
    return rng.choice([-1.0, 1.0], size)


WEIGHTS = np.array([5.0] + [1.0] * 99)
LAYERS = {"dim": None, "shapes": [(50, 80), (1_000,)]}
TREE, BANDED = TreeNoise(rounds=16), BandedNoise.for_prefix_sums(16, bands=4)
TREE_STD = needed() * max(TREE.strength([number]) for number in range(1, 17)) ** 0.5


def truncated(rng: np.random.Generator, size: int) -> Array:
    """Gaussian noise cut at 3.5 standard deviations."""
    return np.clip(rng.standard_normal(size), -3.5, 3.5)


def ramp(rng: np.random.Generator, size: int) -> Array:
    """Noise whose std rises from four fifths at the first coordinate to six fifths at the last."""
    return rng.standard_normal(size) * np.linspace(0.8, 1.2, size)


def all_but_one(rng: np.random.Generator, size: int) -> Array:
    """Noise on all coordinates except the last."""
    return rng.standard_normal(size) * (np.arange(size) < size - 1)


def all_clipped_but_one(updates: Array) -> Array:
    """The clip does not change the last coordinate."""
    return np.hstack([clip(updates[:, :-1]), updates[:, -1:]])


def sampled_inside(rng: np.random.Generator) -> Release:
    """Each client is in the sum with probability 0.8, and then counts 1.25 times."""

    def release(updates: Array) -> Array:
        included = rng.random(len(updates)) < 0.8
        return np.asarray(clip(updates)[included].sum(axis=0) / 0.8 + needed() * rng.standard_normal(updates.shape[1]))

    return release


class Reused:
    """Noise that is sampled in every second call and reused in the next, with opposite sign if `sign` is -1."""

    def __init__(self, rng: np.random.Generator, sign: float = 1.0) -> None:
        self._rng, self._sign, self._noise = rng, sign, np.zeros(0)
        self._calls = 0

    def __call__(self, updates: Array) -> Array:
        fresh = self._calls % 2 == 0
        self._noise = self._rng.standard_normal(updates.shape[1]) if fresh else self._sign * self._noise
        self._calls += 1
        return np.asarray(clip(updates).sum(axis=0) + needed() * self._noise)


def norms(updates: Array) -> Array:
    """The norm of each row, as a column."""
    return np.asarray(np.linalg.norm(updates, axis=1, keepdims=True))


def by_largest(updates: Array) -> Array:
    """All rows divided by the largest norm."""
    return np.asarray(updates * min(1.0, 1 / norms(updates).max()))


def from_two_on(updates: Array) -> Array:
    """Rows are clipped only if they are longer than twice the clip norm."""
    return np.where(norms(updates) > 2, updates / norms(updates), updates)


def if_most_are_long(updates: Array) -> Array:
    """Rows are clipped only if their mean norm is above the clip norm."""
    return clip(updates) if norms(updates).mean() > 1 else updates


def noise_by_largest(rng: np.random.Generator) -> Release:
    """Noise proportional to the longest clipped update."""

    def release(updates: Array) -> Array:
        noise = needed() * norms(clip(updates)).max() * rng.standard_normal(updates.shape[1])
        return np.asarray(clip(updates).sum(axis=0) + noise)

    return release


def first_five_times(updates: Array) -> Array:
    """The first client counts five times."""
    return np.vstack([clip(updates), np.repeat(clip(updates)[:1], 4, axis=0)])


def by_scaled_l1(updates: Array) -> Array:
    """A clip by the L1 norm, scaled so that it agrees with the L2 norm on Gaussian vectors."""
    size = np.abs(updates).sum(axis=1, keepdims=True) * np.sqrt(np.pi / 2 / updates.shape[1])
    return np.asarray(updates / np.maximum(size, 1.0))


def by_largest_value(updates: Array) -> Array:
    """A clip by the largest value, scaled so that dense updates are clipped to about 1."""
    return np.asarray(
        updates / np.maximum(np.abs(updates).max(axis=1, keepdims=True) * np.sqrt(updates.shape[1]) / 4, 1.0)
    )


def by_most_coordinates(updates: Array) -> Array:
    """A clip by the norm of the first 95 % of the coordinates."""
    return np.asarray(updates / np.maximum(norms(updates[:, : int(0.95 * updates.shape[1])]), 1.0))


def noise_where_touched(rng: np.random.Generator) -> Release:
    """Noise only on coordinates where the sum is not 0."""

    def release(updates: Array) -> Array:
        total = clip(updates).sum(axis=0)
        return np.asarray(total + needed() * rng.standard_normal(total.size) * (total != 0))

    return release


def without_mean(rng: np.random.Generator, size: int) -> Array:
    """Noise whose mean is subtracted."""
    noise = rng.standard_normal(size)
    return np.asarray(noise - noise.mean())


def rows() -> dict[str, Row]:
    """Every row by its name."""
    found: dict[str, Row] = {}

    def add(
        name: str, kind: Kind, make: Callable[[np.random.Generator], Release], seeds: int = FEWER_SEEDS, **settings: Any
    ) -> None:
        found[name] = Row(make=make, kind=kind, seeds=seeds, settings=settings)

    z = needed()
    for epsilon in (1.0, 3.0, 10.0):
        add(
            f"noised sum, claim {epsilon:g}",
            "correct",
            lambda rng, epsilon=epsilon: noised(rng, std=needed(epsilon)),
            seeds=PLAIN_SEEDS,
            epsilon=epsilon,
        )
    add("no clip", "faulty", lambda rng: noised(rng, std=z, clipped=lambda u: u), seeds=SEEDS)
    add("clip of the mean", "faulty", clipped_mean, seeds=SEEDS)
    add("noise over 2", "faulty", lambda rng: noised(rng, std=z / 2), seeds=SEEDS)
    add("noise over n", "faulty", lambda rng: noised_mean(rng, std=z / 100), seeds=SEEDS)
    add("Laplace noise of the same std", "faulty", lambda rng: noised(rng, std=z, draw=laplace), seeds=SEEDS)
    add("noise on half of the coordinates", "faulty", lambda rng: noised(rng, std=z, draw=on_half), seeds=SEEDS)
    add("weighted by examples", "faulty", weighted_with_noise_of_the_mean, weights=WEIGHTS, seeds=SEEDS)
    add("noise from a fixed seed", "faulty", seeded_again, seeds=SEEDS)
    add("noise on a coarse grid", "faulty", lambda rng: noised(rng, std=z, draw=coarse), seeds=SEEDS)
    add(
        "clip by coordinate", "faulty", lambda rng: noised(rng, std=z, clipped=lambda u: np.clip(u, -1, 1)), seeds=SEEDS
    )

    add("noise over √2", "faulty", lambda rng: noised(rng, std=z / 2**0.5))
    add("noise over √2, aggregate declared", "faulty", lambda rng: noised(rng, std=z / 2**0.5), aggregate="sum")
    add("noise × 0.9, aggregate declared", "faulty", lambda rng: noised(rng, std=0.9 * z), aggregate="sum")
    add("no noise", "faulty", lambda rng: noised(rng, std=0.0))
    add("each layer clipped by itself", "faulty", lambda rng: noised(rng, std=z, clipped=by_layer))
    add("median of the norms as clip norm", "faulty", lambda rng: median_clip(rng, scaled=False))
    add("clip of the sum, aggregate declared", "faulty", clipped_sum, aggregate="sum")
    add("noise added before the clip", "faulty", noise_before_clip)
    add("noise sized by the mean norm", "faulty", noise_by_norms)
    add("noise in proportion to the sum", "faulty", noise_by_sum)
    add("one draw for two coordinates", "faulty", lambda rng: noised(rng, std=z, draw=in_pairs))
    add("uniform noise", "faulty", lambda rng: noised(rng, std=z, draw=uniform))
    add("coin flips as noise", "faulty", lambda rng: noised(rng, std=z, draw=coins))
    add("first noise again in every second call", "faulty", reused_every_second)
    add("noise again in the next call", "faulty", Reused)
    add("noise turned around in the next call", "faulty", lambda rng: Reused(rng, -1.0))
    add("scaled by the largest norm", "faulty", lambda rng: noised(rng, std=z, clipped=by_largest))
    add("clipped from twice the clip norm on", "faulty", lambda rng: noised(rng, std=z, clipped=from_two_on))
    add("clipped only if most are long", "faulty", lambda rng: noised(rng, std=z, clipped=if_most_are_long))
    add("noise by the longest update", "faulty", noise_by_largest)
    add("a layer without noise", "faulty", lambda rng: in_layers(rng, bare=True), **LAYERS)
    add(
        "replace-one claim, half the noise",
        "faulty",
        lambda rng: noised_mean(rng, std=z),
        adjacency="replace-one",
        seeds=SEEDS,
    )
    add("tree noise, half of it", "faulty", lambda rng: TreeSum(rng, TREE, TREE_STD / 2), noise=TREE, clients=50)
    add("half the noise, claim 0.3", "faulty", lambda rng: noised(rng, std=needed(0.3) / 2), epsilon=0.3)
    add("half the noise, claim 50", "faulty", lambda rng: noised(rng, std=needed(50.0) / 2), epsilon=50.0)
    add("half the noise, 50 dimensions", "faulty", lambda rng: noised(rng, std=z / 2), dim=50, clients=20)
    add("half the noise, one client", "faulty", lambda rng: noised(rng, std=z / 2), clients=1)

    add("clip of the sum", "faulty", clipped_sum)
    add("median of the norms as clip norm, noise too", "faulty", lambda rng: median_clip(rng, scaled=True))
    add("variance taken for a standard deviation", "faulty", lambda rng: noised(rng, std=z**0.5), seeds=SEEDS)
    add("noise where the sum is not 0", "faulty", noise_where_touched, seeds=SEEDS)
    add("clip by a scaled L1 norm", "faulty", lambda rng: noised(rng, std=z, clipped=by_scaled_l1), seeds=SEEDS)
    add("clip by the largest value", "faulty", lambda rng: noised(rng, std=z, clipped=by_largest_value))
    add(
        "clip by the norm of 95 % of the coordinates",
        "faulty",
        lambda rng: noised(rng, std=z, clipped=by_most_coordinates),
    )
    add(
        "one client counts twice",
        "faulty",
        lambda rng: noised(rng, std=z, clipped=lambda u: clip(np.vstack([u, u[:1]]))),
    )
    add("noise without its mean", "unseen", lambda rng: noised(rng, std=z, draw=without_mean))
    add("one client counts five times", "faulty", lambda rng: noised(rng, std=z, clipped=first_five_times))
    add("the last coordinate is not clipped", "faulty", lambda rng: noised(rng, std=z, clipped=all_clipped_but_one))
    add("the last coordinate has no noise", "faulty", lambda rng: noised(rng, std=z, draw=all_but_one))
    add("Laplace noise, 50 dimensions", "unseen", lambda rng: noised(rng, std=z, draw=laplace), dim=50, clients=20)
    add("noise cut at 3.5 std", "faulty", lambda rng: noised(rng, std=z, draw=truncated))
    add("a std of 0.8 to 1.2", "faulty", lambda rng: noised(rng, std=z, draw=ramp))
    add("clients sampled inside, 0.8 of them", "faulty", sampled_inside)
    add("twenty times the noise", "unseen", lambda rng: noised(rng, std=20 * z))
    add("noise × 0.9", "faulty", lambda rng: noised(rng, std=0.9 * z))

    add("noised mean", "correct", lambda rng: noised_mean(rng, std=z))
    add("noised sum, aggregate declared", "correct", lambda rng: noised(rng, std=z), aggregate="sum")
    add("mean over a fixed number", "correct", lambda rng: noised_mean(rng, std=z, clients=128))
    add("three times the noise", "correct", lambda rng: noised(rng, std=3 * z))
    add("noise in half precision", "correct", lambda rng: noised(rng, std=z, draw=halves), seeds=SEEDS)
    add(
        "release in half precision",
        "correct",
        lambda rng: lambda u: noised(rng, std=z)(u).astype(np.float16),
    )
    add("fixed point, noise shared by the clients", "correct", fixed_point)
    add(
        "weighted by examples, noise for the largest",
        "correct",
        lambda rng: weighted_mean(rng, largest=5.0),
        weights=WEIGHTS,
    )
    add(
        "replace-one claim, noise 2zC/n",
        "correct",
        lambda rng: noised_mean(rng, std=2 * z),
        adjacency="replace-one",
        seeds=SEEDS,
    )
    add("adaptive clip", "correct", AdaptiveClip)
    add("release in whole numbers", "correct", lambda rng: lambda u: np.rint(noised(rng, std=z)(u)))
    add("list of layers", "correct", lambda rng: in_layers(rng, bare=False), **LAYERS)
    add("tree noise", "correct", lambda rng: TreeSum(rng, TREE, TREE_STD), noise=TREE, clients=50)
    add("banded noise", "correct", lambda rng: BandedSum(rng, BANDED, z), noise=BANDED, clients=50)
    add("noised sum, claim 0.3", "correct", lambda rng: noised(rng, std=needed(0.3)), epsilon=0.3)
    add("noised sum, claim 50", "correct", lambda rng: noised(rng, std=needed(50.0)), epsilon=50.0)
    add("noised sum, 50 dimensions", "correct", lambda rng: noised(rng, std=z), dim=50, clients=20)
    add("noised sum, one client", "correct", lambda rng: noised(rng, std=z), clients=1)
    return found


def checked(row: Row, seed: int) -> AuditResult:
    """The result of one check."""
    release = row.make(np.random.default_rng([seed, 22]))
    return check_private(release, **{"epsilon": 3.0, "delta": DELTA, "dim": DIM, "seed": seed, **row.settings})


def check(name: str, seed: int) -> Record:
    """One run, as a record of the results."""
    start = time.perf_counter()
    result = checked(rows()[name], seed)
    taken = time.perf_counter() - start
    assert result.verdict is not None
    return {
        "row": name,
        "seed": seed,
        "outcome": str(result.verdict.outcome),
        "code": result.verdict.code,
        "gauge": result.verdict.facts.get("gauge"),
        "epsilon": result.epsilon,
        "seconds": taken,
        "notes": len(result.notes),
        "decided_by": result.trainer.check.decided_by,
        "fault": result.trainer.check.likely_fault,
    }


def check_batch(name: str, seeds: list[int]) -> list[Record]:
    """Several runs in one process."""
    return [check(name, seed) for seed in seeds]


def finished() -> dict[str, list[Record]]:
    """Finished runs by row."""
    found: dict[str, list[Record]] = {}
    for record in read_records(RESULTS, rows(), lambda record: (record["row"], record["seed"])):
        found.setdefault(record["row"], []).append(record)
    return found


def run(names: Iterable[str], most: int, jobs: int) -> None:
    """Run the missing seeds."""
    done, every = finished(), rows()
    batches = []
    for name in names:
        seeds = {record["seed"] for record in done.get(name, ())}
        missing = [seed for seed in range(min(every[name].seeds, most)) if seed not in seeds]
        batches += [(name, missing[start : start + BATCH]) for start in range(0, len(missing), BATCH)]
    run_batches(RESULTS, check_batch, batches, jobs)


def failures(names: Iterable[str]) -> list[str]:
    """The missed bars."""
    records, bad = finished(), []
    for name in names:
        row, found = rows()[name], records.get(name, [])
        if not found or row.kind == "unseen":
            continue
        passed = sum(record["outcome"] == "PASS" for record in found) / len(found)
        if row.kind == "correct" and passed < (PASSING if len(found) >= PLAIN_SEEDS else 0.97):
            bad.append(f"{name}: {passed:.1%} of {len(found)} runs passed")
        if row.kind == "faulty" and 1 - passed < FAILING:
            bad.append(f"{name}: only {1 - passed:.1%} of {len(found)} runs failed")
        taken = statistics.median(record["seconds"] for record in found)
        if row.seeds == PLAIN_SEEDS and taken > SECONDS:
            bad.append(f"{name}: a check takes {taken:.1f} s")
    return bad


def tables() -> dict[str, str]:
    """The tables of docs/evidence/mechanisms.md by the names of their markers."""
    titles = {"correct": "correct aggregator", "faulty": "faulty aggregator", "unseen": "seldom seen"}
    return {kind: _table(title, kind) for kind, title in titles.items()}


def _table(title: str, kind: str) -> str:
    records = finished()
    lines = [[title, "runs", *OUTCOMES, "median ε", "seconds", "seen by"]]
    for name, row in rows().items():
        found = records.get(name)
        if row.kind != kind or not found:
            continue
        outcomes = Counter(record["outcome"] for record in found)
        epsilons = [record["epsilon"] for record in found if record["epsilon"] is not None]
        epsilon = statistics.median(epsilons)
        taken = statistics.median(record["seconds"] for record in found)
        lines.append(
            [
                name,
                f"{len(found):,}",
                *(str(outcomes[outcome]) for outcome in OUTCOMES),
                f"{epsilon:.3g}" if epsilon < 1e6 else "> 10⁶",
                f"{taken:.2f}",
                _seen_by(found),
            ]
        )
    if kind == "correct":
        lines = [line[:-1] for line in lines]
    return markdown_table(lines)


def _seen_by(found: list[Record]) -> str:
    """What detected most of the failures: the scores of a pattern, a gauge, or a comparison of the calls."""
    failed = [record for record in found if record["outcome"] != "PASS"]
    if not failed:
        return "–"
    words = Counter(
        f"{record['gauge']} gauge"
        if record["code"] == "gauge"
        else COMPARED.get(record["code"], f"scores, {record['decided_by']}")
        for record in failed
    )
    return words.most_common(1)[0][0]


def main() -> int:
    """Command line."""
    return main_of(
        __doc__,
        results=RESULTS,
        page=DOCS,
        rows=rows(),
        run=run,
        tables=tables,
        failures=lambda names, limit: failures(names),
    )


if __name__ == "__main__":
    sys.exit(main())
