"""Canaries of a model in blocks on a CUDA device: time and memory of all products with a dict of bf16 tensors.

The models have the shapes of Llama: 10^9 parameters (a 1 B model with twelve layers, padded) and 8.03 * 10^9. They are
split into the fewest nearly equal blocks of at most 2^24 - 1 coordinates. Each block is gathered into float32; then its
norm and its products with all canaries are computed.

Floor, for a block of d numbers, 2^23 < d < 2^24: two of three stages are two transforms of 2^23 numbers in float32, each
of at least two passes that read and write, 8 * 67 MB. The last stage is one read of half the vector, 34 MB. Gathering
reads 2 and writes 4 bytes a number, 101 MB, and the norm reads 67 MB. Signs are 9 MB, written and read. That is 0.76 GB
a block and 46 GB for 60 blocks of 10^9 parameters: 10.6 ms at 4.3 TB/s, less what stays in the cache (60 MB) between
passes. Three shorter passes move 12 * 67 MB, 14.3 ms in all, yet take less time than two long ones (`--tune`).
Scratch is two vectors of 67 MB and signs of 13 MB, 0.074 of the model, and shuffles of 0.4 MB a block, 0.012.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coalmine import Audit
from coalmine.canaries import rotation_numpy, rotation_triton
from coalmine.canaries.rotation import Rotation, draw_rotation
from coalmine.canaries.rotation_torch import BlockRotations

LARGEST = 2**24 - 1
COUNT = 11_000
BAR_MS, BAR_MEMORY, BAR_ERROR = 60.0, 0.15, 1e-6
BAR_LAW = 0.2  # memory in rounds that measure the noise law and sum the canaries of a block

Model = dict[str, torch.Tensor]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="File that the figures are written to.")
    parser.add_argument("--tune", action="store_true", help="Time other shapes of the kernels as well.")
    parser.add_argument("--small", action="store_true", help="Leave out the model of 8 * 10^9 parameters.")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results["copy_tb_per_s"] = copy_bandwidth()
    model = llama(layers=12, hidden=2048, narrow=512, wide=8192, heads=1, total=10**9)
    if options.tune:
        results["tuning"] = tune(model)
    results["models"] = {"1e9": measure(model)}
    results["errors"] = errors(model)
    results["combine"] = measure_sums(model)
    if not options.small:
        del model
        model = llama(layers=32, hidden=4096, narrow=1024, wide=14336, heads=2)
        results["models"]["8e9"] = measure(model)
    _print(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


class BlockByBlock:
    """All products of a model with its blocks' canaries: the least that a round needs.

    The same functions measure another way to compute them (canaries that own their blocks). Each way is constructed
    from a model and called with a model.
    """

    def __init__(self, model: Model) -> None:
        sizes = block_sizes(sum(leaf.numel() for leaf in model.values()))
        self.blocks = [draw_rotation(size, 12345 + (number << 64)) for number, size in enumerate(sizes)]
        self.rotations = BlockRotations(torch.device("cuda"))

    def __call__(self, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
        """Products (blocks, canaries) and norms (blocks)."""
        products, norms = [], []
        for rotation, pieces in self.pieces(model):
            room = self.rotations.room(rotation)
            gather(pieces, room)
            norms.append(torch.linalg.vector_norm(room))
            products.append(self.rotations.products(rotation, room, COUNT))
        return torch.stack(products), torch.stack(norms)

    def add(self, model: Model, indices: list[int]) -> None:
        """Add the sum of some canaries to a model in place."""
        for rotation, pieces in self.pieces(model):
            total = self.rotations.combine(rotation, indices, torch.float32)
            start = 0
            for piece in pieces:
                piece += total[start : start + len(piece)]
                start += len(piece)

    def pieces(self, model: Model) -> Iterator[tuple[Rotation, list[torch.Tensor]]]:
        """Each block's rotation, with the pieces of the tensors in the block."""
        leaves = iter(model.values())
        leaf = next(leaves).reshape(-1)
        for rotation in self.blocks:
            pieces, missing = [], rotation.dim
            while missing:
                if not len(leaf):
                    leaf = next(leaves).reshape(-1)
                taken = leaf[:missing]
                pieces.append(taken)
                leaf, missing = leaf[len(taken) :], missing - len(taken)
            yield rotation, pieces


class AuditedRounds:
    """Whole rounds of an audit without `others`: cosines, lengths and the log.

    With `others` there are also cosines of the residual, lengths by layer and, in rounds 1, 21 and 41, the noise law.
    """

    others: Model | None = None

    def __init__(self, model: Model) -> None:
        self.audit = Audit.for_model(model, canaries=1_000, unobserved=COUNT - 1_000, seed=12345, delta=1e-5)

    def __call__(self, model: Model) -> None:
        number = self.audit.last_round + 1
        self.audit.observe_round(number, model, present=range(10), others=self.others, noise_std=1.0, clip_norm=1.0)

    @property
    def inputs(self) -> int:
        """Bytes of the observed vectors besides the model."""
        return sum(2 * leaf.numel() for leaf in (self.others or {}).values())


class AuditedResiduals(AuditedRounds):
    """Rounds with `others`."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.others = {name: torch.randn_like(leaf) * 0.1 for name, leaf in model.items()}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


WAYS: dict[str, Callable[[Model], Any]] = {
    "block by block": BlockByBlock,
    "audited round": AuditedRounds,
    "audited round with others": AuditedResiduals,
}


def block_sizes(dim: int) -> list[int]:
    """The fewest nearly equal sizes of at most 2^24 - 1."""
    count = math.ceil(dim / LARGEST)
    return [dim // count + (number < dim % count) for number in range(count)]


def gather(pieces: list[torch.Tensor], room: torch.Tensor) -> None:
    start = 0
    for piece in pieces:
        room[start : start + len(piece)].copy_(piece)
        start += len(piece)


def llama(*, layers: int, hidden: int, narrow: int, wide: int, heads: int, total: int | None = None) -> Model:
    """Random bf16 tensors with the shapes of a Llama, padded to `total` numbers."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (128256, hidden)}
    for number in range(layers):
        for name, shape in {
            "q_proj": (hidden, hidden),
            "k_proj": (narrow, hidden),
            "v_proj": (narrow, hidden),
            "o_proj": (hidden, hidden),
            "gate_proj": (wide, hidden),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"layers.{number}.{name}"] = shape
    shapes["norm"] = (hidden,)
    if heads > 1:
        shapes["lm_head"] = (128256, hidden)
    if total is not None:
        shapes["padding"] = (total - sum(math.prod(shape) for shape in shapes.values()),)
    generator = torch.Generator("cuda").manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }


def measure(model: Model) -> dict[str, Any]:
    """Time of each way, and its peak memory beyond the model, including the first call."""
    dim = sum(leaf.numel() for leaf in model.values())
    results: dict[str, Any] = {"parameters": dim, "blocks": len(block_sizes(dim)), "canaries": COUNT}
    for name, way in WAYS.items():
        gc.collect()  # frees the previous way's memory
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        call = way(model)
        call(model)
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        wall, host, device = _times(partial(call, model))
        extra = torch.cuda.max_memory_allocated() - before - getattr(call, "inputs", 0)
        results[name] = {
            "wall_ms": wall,
            "host_ms": host,
            "device_ms": device,
            "first_call_s": first,
            "extra_bytes": extra,
            "extra_share": extra / (2 * dim),
        }
        del call
        torch.cuda.empty_cache()
    return results


def measure_sums(model: Model) -> dict[str, float]:
    call = BlockByBlock(model)
    wall, host, device = _times(lambda: call.add(model, list(range(0, COUNT, 22))))
    return {"wall_ms": wall, "host_ms": host, "device_ms": device}


def errors(model: Model) -> dict[str, float]:
    """Errors of a block's products and of its part of a sum, against float64 on the CPU, relative to a typical entry."""
    call = BlockByBlock(model)
    products, norms = call(model)
    products, norms = call(model)  # replayed
    results = {}
    for number, (rotation, pieces) in enumerate(call.pieces(model)):
        if number not in (0, len(call.blocks) - 1):
            continue
        vector = torch.cat([piece.float() for piece in pieces]).cpu().double().numpy()
        exact = rotation_numpy.products(rotation, vector, COUNT)
        results[f"products of block {number}"] = _relative(products[number], exact)
        results[f"norm of block {number}"] = abs(float(norms[number]) / float(np.linalg.norm(vector)) - 1)
        indices = [0, 5, COUNT - 1]
        total = rotation_numpy.combine(rotation, indices, np.float64)
        results[f"sum of block {number}"] = _relative(call.rotations.combine(rotation, indices, torch.float32), total)
    return results


def tune(model: Model) -> dict[str, float]:
    """Device time by steps within tiles, steps between rows in one pass, and warps for a tile."""
    names = ("_BLOCK_TILE_LEVELS", "_BLOCK_ROW_LEVELS", "_BLOCK_TILE_WARPS")
    kept = [getattr(rotation_triton, name) for name in names]
    results = {}
    for shape in ((14, 9, 16), (14, 5, 16), (12, 6, 4), (11, 6, 4), (10, 7, 4), (9, 7, 4)):
        for name, value in zip(names, shape, strict=True):
            setattr(rotation_triton, name, value)
        call = BlockByBlock(model)
        results[str(shape)] = _times(partial(call, model), 5)[2]
        print("tile levels, row levels, tile warps", shape, f"{results[str(shape)]:.2f} ms")
        del call
    for name, value in zip(names, kept, strict=True):
        setattr(rotation_triton, name, value)
    return results


def copy_bandwidth() -> float:
    """TB/s of a copy from device to device, counting bytes read and written."""
    given = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    result = torch.empty_like(given)
    return 8 * 2**30 / _times(lambda: result.copy_(given))[2] / 1e9


def _times(call: Callable[[], Any], repeats: int = 20) -> tuple[float, float, float]:
    """Medians in ms: until the device has finished, until the call returns, and between device events."""
    event: Any = torch.cuda.Event
    for _ in range(3):
        call()
    wall, host, device = [], [], []
    for _ in range(repeats):
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        start.record()
        call()
        end.record()
        host.append(1e3 * (time.perf_counter() - started))
        torch.cuda.synchronize()
        wall.append(1e3 * (time.perf_counter() - started))
        device.append(start.elapsed_time(end))
    return statistics.median(wall), statistics.median(host), statistics.median(device)


def _relative(result: torch.Tensor, exact: np.ndarray) -> float:
    return float(np.linalg.norm(result.cpu().double().numpy() - exact) / np.linalg.norm(exact))


def _print(results: dict[str, Any]) -> None:
    print(f"{results['device']}, torch {results['torch']}, copies at {results['copy_tb_per_s']:.2f} TB/s")
    header = ("parameters", "blocks", "way", "wall ms", "host ms", "device ms", "first call s", "extra MB", "of model")
    print(" | ".join(header))
    for figures in results["models"].values():
        for way in WAYS:
            row = figures[way]
            times = f"{row['wall_ms']:.1f} | {row['host_ms']:.1f} | {row['device_ms']:.1f} | {row['first_call_s']:.2f}"
            memory = f"{row['extra_bytes'] / 1e6:.0f} | {row['extra_share']:.3f}"
            print(f"{figures['parameters']:,} | {figures['blocks']} | {way} | {times} | {memory}")
    print("sums of 500 canaries added to the model: {wall_ms:.1f} ms".format(**results["combine"]))
    for name, error in results["errors"].items():
        print(f"relative error, {name}: {error:.1e}")
    for way in WAYS:
        row = results["models"]["1e9"][way]
        for what, value, bar in (
            ("time in ms", row["wall_ms"], BAR_MS * (2 if way.endswith("others") else 1)),  # cosines of two vectors
            ("memory over the model's", row["extra_share"], BAR_LAW if way.endswith("others") else BAR_MEMORY),
            ("largest error", max(results["errors"].values()), BAR_ERROR),
        ):
            print(
                f"{way}, 10^9 parameters, {what}: {value:.3g} (at most {bar:g}): {'pass' if value <= bar else 'FAIL'}"
            )


if __name__ == "__main__":
    main()
