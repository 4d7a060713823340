"""What the audit adds on a machine with a GPU: small models in Opacus, a whole round, GPT-2, and 10^9 parameters.

    python -m benchmarks.opacus_small_cuda --json benchmarks/results/opacus_small_cuda.json
    python -m benchmarks.opacus_small_cuda --tiny        small models and few steps, to try the script on a CPU

The rows: (1) the MNIST CNN and the MLP of `opacus_small` on the GPU. (2) A round of 4.05 million coordinates with updates,
others and the law of the noise, beside the cosines alone. (3) The same models as (1) on two cores of the host, in a process
of its own that may use no others: two idle cores. (4) A round of 10^9 parameters in bfloat16 with others, and its memory.
(5) A transformer with the shape of GPT-2, all of its weights trained with ghost clipping, in plain torch.

A row that fails leaves its error in the file, and the others run. No row starts after `--minutes`.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import opacus_small
from coalmine import Audit

PAPER_DIM = 4_050_748
BARS = {
    "mnist-cnn share": 0.15,
    "mlp share": 0.10,
    "round ms": 0.6,
    "1e9 ms": 45.0,
    "1e9 memory over the model's": 0.12,
    "gpt-2 share": 0.015,
}


def small_models(tiny: bool) -> list[dict[str, Any]]:
    """The models of `opacus_small` on the GPU."""
    pairs, stretch, device = (2, 2, "cpu") if tiny else (11, 20, "cuda")
    return [
        opacus_small.measure(opacus_small.Case(name), pairs=pairs, stretch=stretch, device=device)
        for name in ("mnist-cnn", "mlp", "wide-mlp")
    ]


def whole_round(tiny: bool) -> dict[str, float]:
    """Milliseconds of a deferred round of one vector: updates, residual, cosines, lengths and law; and of its parts."""
    dim, device, rounds = (5_000, "cpu", 4) if tiny else (PAPER_DIM, "cuda", 60)
    third = dim // 3
    layers = [("one", third), ("two", third), ("three", dim - 2 * third)]
    audit = Audit(dim, canaries=1_000, seed=b"a benchmark's seed", delta=1e-5, layers=layers, deferred=True)
    others, noise = torch.randn(dim, device=device), torch.randn(dim, device=device)
    taken: dict[str, list[float]] = {"round": [], "updates": [], "cosines": []}
    for number in range(1, rounds + 1):
        present = list(range(number % 10, 1_000, 33))
        _wait()
        start = time.perf_counter()
        total = audit.updates(present, 1.0, like=noise)
        _wait()
        middle = time.perf_counter()
        release = others + noise + total
        _wait()
        stop = time.perf_counter()
        audit.observe_round(number, release, present=present, others=others, noise_std=1.0, clip_norm=1.0, copy=False)
        audit.flush()
        _wait()
        taken["updates"].append(middle - start)
        taken["round"].append(middle - start + time.perf_counter() - stop)
        start = time.perf_counter()
        audit.measurer.canaries.cosines(release)
        _wait()
        taken["cosines"].append(time.perf_counter() - start)
    found = {f"{name}_ms": 1e3 * statistics.median(times[2:]) for name, times in taken.items()}
    return found | {f"{name}_mean_ms": 1e3 * statistics.mean(times[2:]) for name, times in taken.items()} | {"dim": dim}


def on_two_cores(tiny: bool) -> list[dict[str, Any]]:
    """The rows of `opacus_small`, in a process that may use two cores."""
    code = (
        "import os, sys; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]); "
        "from benchmarks.opacus_small import main; main(sys.argv[1:])"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        few = ["--first", "1", "--pairs", "2", "--stretch", "3"] if tiny else []
        done = subprocess.run(
            [sys.executable, "-c", code, *few, "--json", str(file)],
            env=os.environ | {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else [{"error": done.stderr[-500:]}]
        return rows


def billion(tiny: bool) -> dict[str, Any]:
    """A round of 10^9 parameters in bfloat16 with others: time, and memory over the model's."""
    if tiny:
        return {}
    from benchmarks import blocked_cuda

    model = blocked_cuda.llama(layers=12, hidden=2048, narrow=512, wide=8192, heads=1, total=10**9)
    return blocked_cuda.measure(model)


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        parts = self.attention(self.norm1(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Gpt2(nn.Module):
    """GPT-2 with a head of its own, as ghost clipping needs: 163 million parameters."""

    def __init__(self, *, width: int, depth: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.words(words) + self.places(places))))
        return logits


def gpt2(tiny: bool) -> dict[str, Any]:
    """Steps of GPT-2 with and without the audit in turns, as `lora_cuda` times them."""
    from benchmarks import lora_cuda

    size = lora_cuda.TINY["full"] if tiny else lora_cuda.SIZES["full"]
    device = torch.device("cpu" if tiny else "cuda")
    model = Gpt2(
        width=size.hidden, depth=size.layers, heads=size.heads, vocabulary=size.vocabulary, tokens=size.tokens
    ).to(device)
    options = argparse.Namespace(tiny=tiny, steps=4 if tiny else 60, stretch=2 if tiny else 5, profile=False)
    return lora_cuda.measure(_case(model, size, device), size, device, options)


def _case(model: nn.Module, size: Any, device: torch.device) -> Any:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    from benchmarks import lora_cuda

    criterion: Any = lora_cuda._Loss()
    private, optimizer, loss, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(torch.zeros(int(size.rows / lora_cuda.RATE), 1)), batch_size=size.rows),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    tokens = torch.randint(size.vocabulary, (size.rows, size.tokens), device=device)
    places = torch.arange(size.tokens, device=device).repeat(size.rows, 1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(private(tokens, places), tokens).backward()
        optimizer.step()

    return lora_cuda.Case(private, optimizer, step, sum(p.numel() for p in model.parameters()))


ROWS: dict[str, Callable[[bool], Any]] = {
    "small models on the GPU": small_models,
    "round of 4 million": whole_round,
    "two cores of the host": on_two_cores,
    "round of 10^9 in bf16": billion,
    "gpt-2": gpt2,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="File that the figures are written to.")
    parser.add_argument("--tiny", action="store_true", help="Small models and few steps, on a CPU.")
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--minutes", type=float, default=6.0, help="No row starts later than this.")
    given = parser.parse_args(arguments)
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device; --tiny tries it without")
    warnings.filterwarnings("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    name = "cpu" if given.tiny else torch.cuda.get_device_name()
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, "numpy": np.__version__, "bars": BARS}
    began = time.perf_counter()
    for row in given.only:
        start = time.perf_counter()
        if start - began > 60 * given.minutes:
            results[row] = {"error": "left out: no time"}
            continue
        try:
            found = ROWS[row](given.tiny)
        except Exception:
            found = {"error": traceback.format_exc()[-1500:]}
        results[row] = {"found": found, "seconds": time.perf_counter() - start}
        print(json.dumps({row: results[row]}, indent=1), flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
