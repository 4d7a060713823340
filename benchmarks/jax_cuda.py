"""Cosines of rotated canaries on one CUDA device: jax against the Triton kernels, at the paper's size, after compilation.

Both take a float32 vector that is on the device, and read its length on the host. The third figure is the device's own
time for the cosines where they are part of a longer function that jax has compiled.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the device

import jax
import numpy as np
import torch

from coalmine.canaries import RotatedCanaries

DIM, CANARIES = 4_050_748, 2_000
BAR = 2.0  # times the Triton path's


def median_ms(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median time of each, measured in turns; the first calls compile and are left out."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 3):
        for name, work in works.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: float(np.median(times[3:])) for name, times in taken.items()}


def ms_inside_jit(canaries: RotatedCanaries, array: Any, calls: int = 20) -> float:
    """Time of one call among several in one compiled function, each of which needs the one before."""

    def repeated(number: int) -> Callable[[], Any]:
        def call(_: Any, found: Any) -> Any:
            return canaries.cosines(array + found[0])

        loop = jax.jit(lambda start: jax.lax.fori_loop(0, number, call, start))
        start = jax.numpy.zeros(CANARIES, array.dtype)
        return lambda: jax.block_until_ready(loop(start))

    taken = median_ms({"one": repeated(1), "more": repeated(calls + 1)}, 20)
    return (taken["more"] - taken["one"]) / calls


def main(arguments: list[str] | None = None) -> int:
    """Print the ratio beside its bar; 1 if it is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="File that the figures are written to.")
    parser.add_argument("--repeats", type=int, default=50)
    given = parser.parse_args(arguments)
    device = jax.devices()[0]
    if not torch.cuda.is_available() or device.platform != "gpu":
        sys.exit("this benchmark needs a CUDA device that torch and jax can use")
    vector = np.random.default_rng(0).standard_normal(DIM, dtype=np.float32)
    canaries = RotatedCanaries(CANARIES, DIM, seed=1)
    tensor, array = torch.from_numpy(vector).cuda(), jax.device_put(vector, device)
    expected = canaries.cosines(vector)
    error = float(np.abs(canaries.cosines(array) - expected).max())
    seconds = median_ms(
        {"triton": lambda: canaries.cosines(tensor), "jax": lambda: canaries.cosines(array)}, given.repeats
    )
    ratio = seconds["jax"] / seconds["triton"]
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "jax": jax.__version__,
    }
    figures |= {"triton_ms": seconds["triton"], "jax_ms": seconds["jax"], "ratio": ratio, "largest_error": error}
    figures["jax_in_step_ms"] = ms_inside_jit(canaries, array)
    print(
        f"cosines: Triton {seconds['triton']:.3f} ms, jax {seconds['jax']:.3f} ms, {ratio:.2f} times (at most {BAR:g})"
    )
    print(f"inside of a compiled function: {figures['jax_in_step_ms']:.3f} ms")
    print(f"largest error of a cosine by jax: {error:.1e}")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(ratio > BAR or error > 1e-6)


if __name__ == "__main__":
    sys.exit(main())
