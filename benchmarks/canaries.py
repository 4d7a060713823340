"""Rotated canaries on the CPU against generating every canary in every round, at the paper's size.

The floor of one transform is the bytes that it moves. In each stage, the shuffle reads and writes the vector once, the
signs its tail once, and the transforms its first and its last 2^m coordinates twice each. Their operations are too few to
matter (21 sums and differences per number and transform). The last of three stages only needs the shuffle and one read of
2^m coordinates. Bandwidth is measured in the same run.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from coalmine.canaries import RotatedCanaries, SphereCanaries
from coalmine.canaries.array_types import Array

DIM = 4_050_748
CANARIES = 2_000
DRAWN = 40  # number that is generated and timed; the rest would take proportionally longer

MEMORY = """
import numpy as np
from pathlib import Path
from time import perf_counter
from coalmine.canaries import RotatedCanaries

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

vector = np.random.default_rng(0).standard_normal({dim}, dtype=np.float32)
RotatedCanaries(10, 1000, seed=1).cosines(vector[:1000])  # BLAS allocates its buffers
before = kilobytes("VmRSS")
start = perf_counter()
canaries = RotatedCanaries({count}, {dim}, seed=1)
made = perf_counter()
canaries.cosines(vector)
done = perf_counter()
canaries.combine(range(5), like=vector)
print(1024 * (kilobytes("VmHWM") - before) / vector.nbytes, made - start, done - made)
"""


@dataclass(frozen=True)
class Row:
    """One measured ratio with its bar."""

    what: str
    measured: float
    bar: float
    at_least: bool  # otherwise at most

    @property
    def passed(self) -> bool:
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar


def draw_and_dot(count: int, vector: Array) -> float:
    """Seconds to generate `count` canaries on two threads and take the dot product of each with the vector."""
    buffers = [np.empty_like(vector) for _ in range(2)]

    def half(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(count // 2):
            rng.standard_normal(dtype=np.float32, out=buffers[number])
            np.einsum("i,i->", buffers[number], vector)  # dot would start more threads in each of the two

    with ThreadPoolExecutor(2) as pool:
        return seconds(lambda: list(pool.map(half, range(2))))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(*calls: Callable[[], object], repeats: int = 9) -> list[float]:
    """The best time of each call; the calls alternate, so that a noisy machine affects all of them."""
    times = [[seconds(call) for call in calls] for _ in range(repeats)]
    return [min(column) for column in zip(*times, strict=True)]


def moved_bytes(dim: int, itemsize: int) -> int:
    size = 1 << (dim.bit_length() - 1)
    whole_stages = 2 * 2 * (dim + (dim - size) + 4 * size)
    return itemsize * (whole_stages + 2 * dim + size)


def memory(dim: int, count: int) -> tuple[float, float, float]:
    """Peak extra memory in vectors, and seconds to make canaries and for one call, in a separate process."""
    code = MEMORY.format(dim=dim, count=count)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    extra, making, call = map(float, done.stdout.split())
    return extra, making, call


def measure() -> tuple[list[Row], dict[str, float]]:
    vector = np.random.default_rng(0).standard_normal(DIM, dtype=np.float32)
    canaries = RotatedCanaries(CANARIES, DIM, seed=1)
    few, many = RotatedCanaries(10, DIM, seed=1), RotatedCanaries(100_000, DIM, seed=1)
    target, double = np.empty_like(vector), vector.astype(np.float64)
    canaries.cosines(vector)

    drawing = min(draw_and_dot(DRAWN // 2, vector) for _ in range(2)) * 2 * CANARIES / DRAWN
    cosines, combine, of_few, of_many, in_double, copy = interleaved(
        lambda: canaries.cosines(vector),
        lambda: canaries.combine(range(500), like=vector),
        lambda: few.cosines(vector),
        lambda: many.cosines(vector),
        lambda: canaries.cosines(double),
        lambda: np.copyto(target, vector),
    )
    sphere = seconds(lambda: SphereCanaries(8, DIM, seed=1).cosines(vector)) / 8
    extra, _, _ = memory(DIM, CANARIES)
    large_extra, large_making, large_call = memory(10**8, CANARIES)

    bandwidth = 2 * vector.nbytes / copy
    rows = [
        Row("cosines, times faster than drawing 2,000 canaries", drawing / cosines, 300, True),
        Row("cosines of 100,000 canaries over those of 10", of_many / of_few, 1.2, False),
        Row("combine of 500 over cosines", combine / cosines, 1.3, False),
        Row("peak extra memory, vectors", extra, 8, False),
        Row("memory at dim 10^8 with the vector itself, vectors", large_extra + 1, 10, False),
    ]
    figures = {
        "drawing 2,000 canaries, s": drawing,
        "cosines, ms": 1e3 * cosines,
        "cosines in float64, ms": 1e3 * in_double,
        "combine of 500, ms": 1e3 * combine,
        "sphere canaries, ms each": 1e3 * sphere,
        "copy of a vector, GB/s": 1e-9 * bandwidth,
        "floor of cosines, ms": 1e3 * moved_bytes(DIM, 4) / bandwidth,
        "cosines over its floor": cosines * bandwidth / moved_bytes(DIM, 4),
        "dim 10^8: making canaries, s": large_making,
        "dim 10^8: cosines, s": large_call,
    }
    return rows, figures


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="Rotated canaries on the CPU, at the paper's size.")
    parser.add_argument("--json", type=Path, help="Also write the figures to this file.")
    options = parser.parse_args(arguments or [])
    rows, figures = measure()
    for row in rows:
        bar = f"{'at least' if row.at_least else 'at most'} {row.bar:g}"
        print(f"{row.what:52} {row.measured:8.2f}  {bar:14} {'pass' if row.passed else 'FAIL'}")
    for what, value in figures.items():
        print(f"{what:52} {value:8.2f}")
    if options.json:
        table = [asdict(row) | {"passed": row.passed} for row in rows]
        options.json.write_text(json.dumps({"rows": table, "figures": figures}, indent=1))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
