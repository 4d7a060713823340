"""How the cost of a round grows with coordinates, canaries, layers and rounds before it, and that of a result with rounds.

A round is the canaries' sum, and the record of a release whose other updates are known. It is measured on one core (or with
`--device cuda` on a GPU, where it is waited for), in the time of the wall; the median of several. The floor beside it is the
work that no audit avoids: the three transforms of the canaries for one round, or for layers and rounds the cost of a round
with one layer, and of the first ones.

    python -m benchmarks.round_costs --json benchmarks/results/round_costs.json
    python -m studies.scaling_costs --write-docs       fits exponents, and writes the table into docs/evidence/scaling.md
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coalmine import Audit
from coalmine.canaries.rotation_numpy import stay_in_one_thread

COORDINATES = tuple(10**power for power in range(3, 9))
CANARIES, LAYERS, ROUNDS = (10, 100, 1_000, 10_000, 100_000), (1, 10, 100, 1_000, 10_000), (10, 100, 1_000, 10_000)
DIM, FEW = 1_000_000, 100
TURNS, SECONDS = 15, 6.0  # at most this many rounds, and about this long for a point


class Rounds:
    """An audit whose rounds are timed, one after another."""

    def __init__(self, dim: int, canaries: int, *, layers: int = 1, device: str = "cpu") -> None:
        each = dim // layers
        sizes = [("rest", dim - each * (layers - 1)), *((f"layer {n}", each) for n in range(1, layers))]
        self.audit = Audit(
            dim,
            canaries=canaries,
            unobserved=min(1_000, dim // 4),
            seed=b"a benchmark's seed",
            delta=1e-5,
            layers=sizes,
            deferred=device != "cpu",
        )
        rng = torch.Generator(device).manual_seed(0)
        self._others, self._noise = (torch.randn(dim, generator=rng, device=device) * 0.01 for _ in range(2))
        self._present = list(range(0, canaries, max(canaries // 30, 1)))
        self._number, self._device = 0, device

    def one(self) -> float:
        """Seconds of the next round."""
        self._number += 1
        noise = self._noise.roll(self._number)
        start = self._now()
        total = self.audit.updates(self._present, 0.01, like=noise)
        between = self._now()
        release = self._others + noise + total
        middle = self._now()
        self.audit.observe_round(
            self._number, release, present=self._present, others=self._others, noise_std=0.01, clip_norm=0.01
        )
        self.audit.flush()
        return self._now() - middle + between - start

    def transforms(self) -> float:
        """Seconds of three transforms: the canaries' sum, and two vectors' cosines."""
        canaries, start = self.audit.measurer.canaries, self._now()
        canaries.combine(self._present, like=self._noise)
        canaries.cosines_of_each([self._noise, self._others])
        return self._now() - start

    def _now(self) -> float:
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()


def median(measure: Callable[[], float]) -> float:
    """The median of several measurements; the first two warm up, unless they take long."""
    taken = [measure()]
    while len(taken) < TURNS and sum(taken) < SECONDS:
        taken.append(measure())
    return statistics.median(taken[2:] or taken)


def by_size(sizes: tuple[int, ...], make: Callable[[int], Rounds]) -> list[dict[str, float]]:
    """A round and its floor for each size."""
    rows = []
    for size in sizes:
        rounds = make(size)
        rows.append({"size": size, "seconds": median(rounds.one), "floor": median(rounds.transforms)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def by_layers() -> list[dict[str, float]]:
    """A round of one model in more and more layers, beside one layer."""
    rows: list[dict[str, float]] = []
    for count in LAYERS:
        seconds = median(Rounds(DIM, FEW, layers=count).one)
        rows.append({"size": count, "seconds": seconds, "floor": rows[0]["seconds"] if rows else seconds})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def by_rounds(most: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The last ten rounds of a small model's long run, beside its first; and the result after them."""
    rounds, taken = Rounds(2_000, FEW), list[float]()
    each, results = list[dict[str, float]](), list[dict[str, float]]()
    for count in ROUNDS:
        if count > most:
            break
        taken += [rounds.one() for _ in range(count - len(taken))]
        first = statistics.median(taken[:10])
        each.append({"size": count, "seconds": statistics.median(taken[-10:]), "floor": first})
        start = time.perf_counter()
        rounds.audit.result()
        results.append({"size": count, "seconds": time.perf_counter() - start})
        print(json.dumps([each[-1], results[-1]]), flush=True)
    return each, results


def main(arguments: list[str] | None = None) -> int:
    """Print the costs, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--largest", type=int, default=10**8, help="most coordinates")
    parser.add_argument("--rounds", type=int, default=10_000, help="most rounds of a run")
    parser.add_argument("--json", type=Path, help="file that the figures are written to")
    given = parser.parse_args([] if arguments is None else arguments)
    stay_in_one_thread()
    if given.device == "cpu":
        torch.set_num_threads(1)
    found: dict[str, Any] = {"device": given.device if given.device == "cpu" else torch.cuda.get_device_name()}
    coordinates = tuple(size for size in COORDINATES if size <= given.largest)
    found["coordinates"] = by_size(coordinates, lambda dim: Rounds(dim, FEW, device=given.device))
    if given.device == "cpu":
        found["canaries"] = by_size(CANARIES, lambda count: Rounds(DIM, count))
        found["layers"] = by_layers()
        found["rounds"], found["result"] = by_rounds(given.rounds)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
