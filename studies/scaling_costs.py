"""The cost of an audit on more GPUs and larger models than were measured: a cost model and its tables.

    python -m studies.scaling_costs                  print the tables of docs/evidence/scaling.md
    python -m studies.scaling_costs --write-docs     write them into the page
    python -m studies.scaling_costs --measure        time sums over local processes: results/reduce.json

The measurements are of models of 10^9 and 8·10^9 parameters on one H200 (benchmarks/results/blocked_cuda.json). A line
through the two gives a fixed cost and a cost per parameter on a GPU. Ranks work in parallel, so a round on R GPUs costs as
much as its largest shard. Scratch memory is as large as the largest block. The line of `updates` goes through 10^9 and
4·10^6 parameters (benchmarks/results/canaries_cuda.json). The code that sends numbers over the network also counts them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.canaries.blocked import LARGEST_BLOCK, cut_into_blocks
from coalmine.measure.coordinate_sums import QUANTILES, CoordinateSums
from coalmine.measure.noise_law import NoiseParts, block_sizes, summed_sizes
from coalmine.measure.settings import BLOCK_EACH, Settings, checked_settings

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "evidence" / "scaling.md"
END = "<!-- end of table -->"
CANARIES, LAYERS = 1_000, 300
GPUS = (1, 8, 64, 1_024)
SIZES = tuple(10**power for power in range(6, 12))
GPU_BYTES = 139 * 2**30
SMALL = 4_050_748  # parameters of the model in canaries_cuda.json
STATE = 3  # extra numbers of each rank in a sum
SUMS, PROCESSES = 30, (2, 4, 8)
GROWING = {
    "coordinates": "coordinates",
    "canaries": "canaries (10^6 coordinates)",
    "layers": "layers (10^6 coordinates)",
    "rounds": "rounds before (2,000 coordinates)",
    "result": "rounds of a result",
}

CHILD = """
import statistics, sys, time
import numpy as np
from torch import distributed
from coalmine.integrations.torch_distributed import reduce_over

folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
distributed.init_process_group("gloo", store=distributed.FileStore(folder + "/store", size), rank=rank, world_size=size)
reduce, taken = reduce_over(), []
for _ in range({sums}):
    start = time.perf_counter()
    reduce(np.ones({numbers}))
    taken.append(time.perf_counter() - start)
if rank == 0:
    print(1e3 * statistics.median(taken))
"""


@dataclass(frozen=True)
class Line:
    """A cost that is linear in the parameters on a GPU, fitted to the measurements."""

    fixed: float
    each: float

    @classmethod
    def through(cls, points: list[tuple[float, float]]) -> "Line":
        (one, first), (two, second) = points
        each = (second - first) / (two - one)
        return cls(first - each * one, each)

    def at(self, parameters: float) -> float:
        return self.fixed + self.each * parameters


def read_lines() -> dict[str, Line]:
    """Milliseconds of a round with and without `others` and of `updates`, and bytes of extra memory, on an H200."""
    figures = json.loads((RESULTS / "blocked_cuda.json").read_text())
    small = json.loads((RESULTS / "canaries_cuda.json").read_text())["times"]["combine_500_ms"]
    models = [figures["models"][name] for name in ("1e9", "8e9")]

    def line(way: str, field: str) -> Line:
        return Line.through([(model["parameters"], model[way][field]) for model in models])

    return {
        "round": line("audited round", "wall_ms"),
        "others": line("audited round with others", "wall_ms"),
        "bytes": line("audited round with others", "extra_bytes"),
        "updates": Line.through([(SMALL, small), (models[0]["parameters"], figures["combine"]["wall_ms"])]),
    }


def settings_of(dim: int, gpus: int) -> Settings:
    """The settings of an audit of 300 equal layers, each split evenly over the GPUs."""
    sizes = _shares(dim, LAYERS)
    shards = [[_share(size, gpus, rank) for size in sizes] for rank in range(gpus)]
    return checked_settings(
        dim,
        canaries=CANARIES,
        unobserved=None,
        delta=1e-6,
        kind="rotated",
        rounds=None,
        presentations=1,
        momentum=0.0,
        layers=[(f"layers.{number}.weight", size) for number, size in enumerate(sizes)],
        blocks=[block for held in shards for block in cut_into_blocks(sum(held))],
        processes=gpus,
        shards=shards if gpus > 1 else (),
    )


def _shares(whole: int, count: int) -> list[int]:
    return [_share(whole, count, number) for number in range(count)]


def _share(whole: int, count: int, number: int) -> int:
    return whole // count + (number < whole % count)


def numbers_in_a_round(settings: Settings) -> int:
    """The number of values summed over the ranks in every round."""
    vectors = 2 * (settings.total + 2 * len(settings.block_sizes))
    return vectors + 2 * len(settings.layers) + _parts(settings) + STATE * settings.processes


def _parts(settings: Settings) -> int:
    """The number of lengths of block parts and of block sketches."""
    return len(settings.block_sizes) * (settings.chunks + settings.sketch) if settings.in_blocks else 0


def numbers_of_the_law(settings: Settings) -> int:
    """The number of additional values in a round that measures the noise law."""
    places, parts = settings.law_stretches, NoiseParts.of_blocks(settings)
    slots = [
        block_sizes(part, dim=place.stop - place.start, number=number, blocks=len(places), full=True)
        for number, (part, place) in enumerate(zip(parts, places, strict=True))
    ]
    together = sum(summed_sizes(full=True, sizes=2).values())
    own = sum(sum(sizes.values()) for sizes in slots)
    return len(settings.layers) + _parts(settings) + 2 + together + own + STATE * settings.processes


def numbers_of_the_coordinates(settings: Settings) -> int:
    """The number of additional values in a round after which the sums of each coordinate are read."""
    extremes = (CoordinateSums.EXTREMES + STATE) * settings.processes
    return extremes + 1 + len(QUANTILES) + len(settings.layers)


def row_of(dim: int, gpus: int, lines: dict[str, Line]) -> list[str]:
    """One row of the table."""
    held = -(-dim // gpus)
    start = [_power(dim), f"{gpus:,}"]
    if held < BLOCK_EACH * CANARIES:
        return [*start, f"too small: at most {held // BLOCK_EACH} canaries", *[""] * 6]
    if 4 * held > GPU_BYTES:  # the release and the other clients' sum, two bytes per number each
        return [*start, "too large for one GPU", *[""] * 6]
    settings = settings_of(dim, gpus)
    largest = max(settings.block_sizes)
    extra = lines["bytes"].fixed * largest / LARGEST_BLOCK + lines["bytes"].each * held
    crossing = ["0", "0"] if gpus == 1 else [_kilobytes(count) for count in _crossing(settings)]
    return [
        *start,
        f"{len(settings.block_sizes):,}",
        _milliseconds(lines["updates"].at(held)),
        _milliseconds(lines["round"].at(held)),
        _milliseconds(lines["others"].at(held)),
        f"{extra / 1e6:,.0f}",
        *crossing,
    ]


def _crossing(settings: Settings) -> tuple[int, int]:
    return numbers_in_a_round(settings), numbers_of_the_law(settings)


def _power(number: int) -> str:
    return f"10^{len(str(number)) - 1}"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def _kilobytes(count: int) -> str:
    return f"{8 * count / 1e3:,.0f}"


def tables() -> dict[str, str]:
    """The tables of docs/evidence/scaling.md, by their names there."""
    return {
        "sums": sums_table(),
        "H200": gpu_table(),
        "CPU": cpu_table(),
        "growth": growth_table(),
        "steps": steps_table(),
        "ranks": ranks_table(),
        "federation": federation_table(),
        "computed": computed_table(),
    }


def computed_table() -> str:
    """Every size on every number of GPUs."""
    lines = read_lines()
    head = [
        "parameters",
        "GPUs",
        "blocks",
        "`updates`, ms",
        "round, ms",
        "round with `others`, ms",
        "extra MB on a GPU",
    ]
    head += ["kB summed in a round", "kB more with the noise's law"]
    return _markdown(head, [row_of(dim, gpus, lines) for dim in SIZES for gpus in GPUS])


def gpu_table() -> str:
    """The measurements on one H200."""
    figures = json.loads((RESULTS / "blocked_cuda.json").read_text())
    models = list(figures["models"].values())
    ways = {
        "cosines alone": "block by block",
        "a round": "audited round",
        "a round with `others`": "audited round with others",
    }
    rows = [["blocks", *(str(model["blocks"]) for model in models)]]
    for name, way in ways.items():
        rows.append([name, *(f"{model[way]['wall_ms']:.0f} ms" for model in models)])
    last = [model["audited round with others"] for model in models]
    rows.append(
        ["extra memory, with `others`"]
        + [f"{row['extra_bytes'] / 1e6:.0f} MB, {row['extra_share']:.3f} of the model" for row in last]
    )
    rows.append(["500 canaries added to the model", f"{figures['combine']['wall_ms']:.0f} ms", "not measured"])
    return _markdown(["", *(f"{model['parameters']:,} parameters" for model in models)], rows)


def cpu_table() -> str:
    """What benchmarks/blocked.py measured."""
    calls = json.loads((RESULTS / "blocked.json").read_text())["calls"]
    rows = []
    for name, row in calls.items():
        seconds, vectors = row["seconds"], row["extra_vectors"]
        times = [f"{seconds[form]:.1f} s" for form in ("flat", "dict")]
        memory = [f"{vectors[form]:.2f}" for form in ("flat", "dict")]
        rows.append([name, *times, f"{row['time_ratio']:.2f}", *memory, f"{row['memory_ratio']:.2f}"])
    head = ["", "flat", "dict", "ratio", "extra vectors, flat", "dict", "ratio"]
    return _markdown(head, rows)


def growth_table() -> str:
    """What benchmarks/round_costs.py measured: milliseconds by size, their floor, and the exponent of a power law."""
    figures = json.loads((RESULTS / "round_costs.json").read_text())
    rows = [_growth_row(what, figures[name]) for name, what in GROWING.items()]
    return _markdown(["what grows", "from … to", "ms", "floor, ms", "exponent"], rows)


def steps_table() -> str:
    """What benchmarks/opacus_small.py measured."""
    rows = []
    for row in json.loads((RESULTS / "opacus_small.json").read_text()):
        more = [row["mode"]] * (row["mode"] != "hooks") + ["split batches"] * (row["physical"] is not None)
        more += ["all through the clip"] * row["all_through_clip"]
        name = ", ".join([row["model"], f"{row['canaries']:,} canaries", *more])
        times = [_milliseconds(1e3 * row[kind]) for kind in ("plain_wall", "audited_wall")]
        rows.append([name, *times, f"{row['share_wall']:.0%}", f"{row['finish']['wall']:.1f}"])
    return _markdown(["training", "step, ms", "audited, ms", "more", "`finish`, s"], rows)


def _growth_row(what: str, points: list[dict[str, float]]) -> list[str]:
    times = [
        ", ".join(_milliseconds(1e3 * row[kind]) for row in points if kind in row) for kind in ("seconds", "floor")
    ]
    logs = np.log([(row["size"], row["seconds"]) for row in points])
    exponent = float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])  # of seconds ~ size^exponent
    ends = [f"{points[place]['size']:,.0f}" for place in (0, -1)]
    return [what, " … ".join(ends), times[0], times[1] or "–", f"{exponent:.2f}"]


def ranks_table() -> str:
    """What benchmarks/ranks.py measured."""
    figures = json.loads((RESULTS / "ranks.json").read_text())
    rows = [
        [name, f"{figures[key]['one process']:.2f}", f"{figures[key]['ranks']:.2f}"]
        for name, key in (("seconds of a round", "seconds"), ("processor seconds of a round", "processor_seconds"))
    ]
    rows.append(["median of the ratios of turns", f"{figures['ratio']:.2f}", "1"])
    return _markdown(["", "one process", f"{figures['ranks']} ranks"], rows)


def federation_table() -> str:
    """What benchmarks/flower_federation.py measured."""
    figures = json.loads((RESULTS / "flower_federation.json").read_text())
    seconds, more = figures["seconds"], figures["audit_seconds"]
    rows = [
        ["the server without an audit", f"{seconds['plain']:.2f}"],
        ["more with the audit", f"{more['audited']:.2f}"],
        ["more with the audit, without `known_others`", f"{more['without known others']:.2f}"],
        ["1,000 clients that do not train", f"{seconds['clients']:.2f}"],
    ]
    return _markdown(["in a round", "processor seconds"], rows)


def sums_table() -> str:
    """What `--measure` measured."""
    figures = json.loads((RESULTS / "reduce.json").read_text())["milliseconds"]
    return _markdown(
        ["processes", *figures], [["one sum of a round, ms", *(_milliseconds(value) for value in figures.values())]]
    )


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def measure_sums() -> dict[str, Any]:
    """Milliseconds of one sum over local processes with gloo."""
    numbers = numbers_in_a_round(settings_of(10**9, 8))
    found: dict[str, Any] = {"numbers": numbers, "sums": SUMS, "milliseconds": {}}
    for size in PROCESSES:
        found["milliseconds"][str(size)] = _sum_over(size, numbers)
    return found


def _sum_over(size: int, numbers: int) -> float:
    code = CHILD.format(sums=SUMS, numbers=numbers)
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code, folder, str(rank), str(size)], stdout=subprocess.PIPE, text=True
            )
            for rank in range(size)
        ]
        printed = [child.communicate(timeout=300)[0] for child in started]
        if any(child.returncode for child in started):
            raise RuntimeError("a process of the measurement failed; its message is above")
    return float(printed[0])


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Costs of an audit on many GPUs, computed from measured ones.")
    parser.add_argument("--write-docs", action="store_true", help="Write the tables into docs/evidence/scaling.md.")
    parser.add_argument("--measure", action="store_true", help="First time sums over local processes.")
    options = parser.parse_args(arguments)
    if options.measure:
        (RESULTS / "reduce.json").write_text(json.dumps(measure_sums(), indent=1) + "\n")
    for name, made in tables().items():
        print(f"{name}\n{made}\n")
        if options.write_docs:
            before, begin, rest = DOCS.read_text().partition(f"<!-- table: {name} -->")
            DOCS.write_text(f"{before}{begin}\n{made}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
