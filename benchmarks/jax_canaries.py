"""Rotated canaries by jax against numpy on the CPU, at the paper's size, after compilation.

On a CPU coalmine uses numpy for jax arrays, except inside jit, where only jax works. This measures the cost of tracing.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from coalmine.canaries import rotation_jax, rotation_numpy
from coalmine.canaries.rotation import draw_rotation

DIM, CANARIES = 4_050_748, 2_000
BAR = 4.0  # times numpy's time


def median_seconds(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median time of each; they alternate, so that other load on the machine affects all of them equally."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            jax.block_until_ready(work())
            taken[name].append(time.perf_counter() - start)
    return {name: float(np.median(times[1:])) for name, times in taken.items()}  # the first one compiles


def main(arguments: list[str] | None = None) -> int:
    """Print the ratios next to the bar; 1 if one misses it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--canaries", type=int, default=CANARIES)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args(arguments)
    rotation = draw_rotation(given.dim, 1)
    vector = np.random.default_rng(0).standard_normal(given.dim, dtype=np.float32)
    present = list(range(0, given.canaries, 100))
    weights = np.zeros(given.canaries, np.float32)
    weights[present] = 1.0
    tables, array = rotation_jax.tables_on(rotation, None), jax.device_put(vector)
    seconds = median_seconds(
        {
            "numpy products": lambda: rotation_numpy.products(rotation, vector, given.canaries),
            "jax products": lambda: rotation_jax.products(tables, array, count=given.canaries),
            "numpy combine": lambda: rotation_numpy.combine(rotation, present, np.float32),
            "jax combine": lambda: rotation_jax.combine(tables, weights, dim=given.dim),
        },
        given.repeats,
    )
    missed = False
    for what in ("products", "combine"):
        ratio = seconds[f"jax {what}"] / seconds[f"numpy {what}"]
        missed |= ratio > BAR
        print(
            f"{what}: numpy {1e3 * seconds[f'numpy {what}']:.1f} ms, jax {1e3 * seconds[f'jax {what}']:.1f} ms, "
            f"{ratio:.2f} times (bar: at most {BAR:g})"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
