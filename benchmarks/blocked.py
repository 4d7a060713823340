"""A model as a dict of 200 arrays against the same numbers as one flat vector, on the CPU: time and memory of a round.

Floor of the time: both need one transform for `updates` and two to observe a round, of the release and of the residual. A
transform moves 75 bytes per number in one vector of 10^8, and 66 in a block of a sixth of it (`moved_bytes` of
benchmarks/canaries.py). The dict adds a copy of each block, gathered from its arrays, 8 bytes, and generates the signs of
a block again for each transform, 0.6 bytes. So both move equally many bytes, and the floor of the ratio is 1.

Floor of the memory: two vectors of scratch for the transform of a block, and the block itself. With six blocks that is
half a vector. A round that measures the noise law does so on 2^20 numbers of each block, which adds little.

Times are medians over alternating rounds. Memory is the peak of a separate process, beyond its memory before the call.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coalmine import Audit
from coalmine.canaries.array_types import cores
from coalmine.canaries.blocked import cut_into_blocks

TIME_BAR, MEMORY_BAR = 1.2, 0.25
DIM, ARRAYS, CANARIES, PRESENT, REPEATS = 10**8, 200, 1_000, 10, 5
UPDATES, OBSERVE, LAW = "updates", "a round", "a round with the noise's law"
CALLS = (UPDATES, OBSERVE, LAW)

MEMORY = """
from benchmarks.blocked import Round, kilobytes, reset_peak
given = Round({form!r}, {dim})
given.warm_up()
{before}
reset_peak()
before = kilobytes("VmRSS")
given.{what}()
print(1024 * (kilobytes("VmHWM") - before))
"""


def sizes(dim: int) -> list[tuple[str, int]]:
    """Names and sizes of arrays as uneven as a network's: every second one is a tenth as large as its neighbour."""
    pairs = ARRAYS // 2
    small = dim // (11 * pairs)
    large = [(dim - pairs * small) // pairs + (number < (dim - pairs * small) % pairs) for number in range(pairs)]
    return [
        (f"layers.{number}.{kind}", size)
        for number in range(pairs)
        for kind, size in (("weight", large[number]), ("bias", small))
    ]


class Round:
    """An audit of a model in one form, flat or a dict, and a round's vectors in that form."""

    def __init__(self, form: str, dim: int) -> None:
        rng, self.layers = np.random.default_rng(0), sizes(dim)
        self.form, self.number = form, 0
        self.delta: Any
        self.others: Any
        settings: Any = {"canaries": CANARIES, "seed": b"a benchmark", "delta": 1e-6, "rounds": 100}
        if form == "flat":
            self.audit = Audit(dim, layers=self.layers, **settings)
            self.delta = rng.standard_normal(dim, dtype=np.float32)
            self.others = rng.standard_normal(dim, dtype=np.float32)
        else:
            self.delta = {name: rng.standard_normal(size, dtype=np.float32) for name, size in self.layers}
            self.others = {name: rng.standard_normal(size, dtype=np.float32) for name, size in self.layers}
            self.audit = Audit.for_model(self.delta, **settings)
        self.present = list(range(PRESENT))

    def warm_up(self) -> None:
        """Make BLAS allocate its buffers, and a small audit import its modules."""
        small = Audit(2_000, canaries=20, seed=b"small", delta=1e-6)
        small.observe_round(1, np.ones(2_000), present=[], others=np.zeros(2_000))

    def updates(self) -> Any:
        """The sum of the present canaries."""
        return self.audit.updates(self.present, 1.0, like=self.delta if self.form == "flat" else None)

    def observe(self) -> None:
        """The next round: eight of 100, drawn by the seed, measure the noise law in full."""
        self.number += 1
        self.audit.observe_round(
            self.number, self.delta, present=self.present, others=self.others, noise_std=1.4, clip_norm=1.0
        )

    def observe_release(self) -> None:
        """The next round without the other clients' sum: the noise law is not measured."""
        self.number += 1
        self.audit.observe_round(self.number, self.delta, present=self.present)


def kilobytes(field: str) -> int:
    """One memory figure of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def reset_peak() -> None:
    """Reset the peak to the current memory."""
    Path("/proc/self/clear_refs").write_text("5")


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def times(dim: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each call in each form, alternating between the two."""
    forms = [Round("flat", dim), Round("dict", dim)]
    found: dict[str, dict[str, list[float]]] = {name: {"flat": [], "dict": []} for name in CALLS}
    for given in forms:
        given.warm_up()
        found[LAW][given.form].append(seconds(given.observe))
    for turn in range(repeats):
        for given in forms if turn % 2 else forms[::-1]:
            found[UPDATES][given.form].append(seconds(given.updates))
            found[OBSERVE][given.form].append(seconds(given.observe))
    return found


def extra_memory(form: str, dim: int, call: str) -> float:
    """Peak bytes of one call, beyond the memory before it."""
    before = "given.observe_release()" if call == OBSERVE else ""
    what = "updates" if call == UPDATES else "observe"
    code = MEMORY.format(form=form, dim=dim, what=what, before=before)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def measure(dim: int, repeats: int) -> dict[str, Any]:
    """Each call's median seconds and extra vectors of memory in both forms."""
    taken = times(dim, repeats)
    calls: dict[str, Any] = {}
    for call in CALLS:
        pairs = [one / two for one, two in zip(taken[call]["dict"], taken[call]["flat"], strict=True)]
        vectors = {form: extra_memory(form, dim, call) / (4 * dim) for form in ("flat", "dict")}
        calls[call] = {
            "seconds": {form: statistics.median(values) for form, values in taken[call].items()},
            "time_ratio": statistics.median(taken[call]["dict"]) / statistics.median(taken[call]["flat"]),
            "time_ratios": sorted(pairs),
            "extra_vectors": vectors,
            "memory_ratio": vectors["dict"] / vectors["flat"],
        }
    blocks = len(cut_into_blocks(dim))
    return {"dim": dim, "arrays": ARRAYS, "blocks": blocks, "canaries": CANARIES, "cores": cores(), "calls": calls}


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="A model as a dict of arrays against a flat vector, on the CPU.")
    parser.add_argument("--dim", type=int, default=DIM, help="Number of coordinates.")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="Number of rounds that are timed.")
    parser.add_argument("--json", type=Path, help="File that the figures are written to.")
    options = parser.parse_args(arguments or [])
    results = measure(options.dim, options.repeats)
    print(f"{options.dim:,} float32 numbers in {ARRAYS} arrays, {results['blocks']} blocks, {CANARIES:,} canaries")
    missed = False
    for call, row in results["calls"].items():
        seconds_of, vectors = row["seconds"], row["extra_vectors"]
        low, high = row["time_ratios"][0], row["time_ratios"][-1]
        print(f"{call}: flat {seconds_of['flat']:.2f} s, dict {seconds_of['dict']:.2f} s")
        missed |= failed("time", row["time_ratio"], TIME_BAR, f"pairs {low:.2f} … {high:.2f}")
        detail = f"{vectors['dict']:.2f} of {vectors['flat']:.2f} vectors"
        if call == UPDATES:
            print(f"  memory, the returned sum included: {detail}")
        else:
            missed |= failed("memory", row["memory_ratio"], MEMORY_BAR, detail)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(missed)


def failed(what: str, ratio: float, bar: float, detail: str) -> bool:
    """Print a ratio next to its bar and return whether it is missed."""
    print(f"  {what} ratio {ratio:.2f} ({detail}), at most {bar:g}: {'pass' if ratio <= bar else 'FAIL'}")
    return ratio > bar


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
