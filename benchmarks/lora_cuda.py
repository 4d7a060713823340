"""What an audit costs when a language model is fine-tuned on a GPU: a step of Opacus with and without the audit.

    python -m benchmarks.lora_cuda --output benchmarks/results/lora_cuda.json
    python -m benchmarks.lora_cuda --tiny        small models, to try the script on a CPU

(a) A Llama of 777 M random parameters in bfloat16 with LoRA of rank 16 on every linear layer, hooks mode. (b) A GPT-2
with the shape of the 124 M model, all of its weights trained, ghost clipping. Its head is not tied to its embedding, as
ghost clipping needs, so 163 M parameters are trained. Both have 1,000 canaries, each in a step with probability 0.02.

Steps with and without the audit take turns, in one process, ten at a stretch, and the GPU is waited for before and after
each stretch. Which way comes first changes from pair to pair. An audit measures the law of the noise in steps of such
models that its seed draws, at least one of every fifty, so the mean over all stretches is the figure to go by. Its
standard error comes from the differences within the pairs, and the median of the pairs is beside it. Python collects
garbage between stretches, not in them: a full collection takes long, and whichever stretch it fell into would look
expensive.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coalmine import Audit
from coalmine.integrations.opacus import audited, named_layers, unaudited

BARS = {"lora": 0.01, "full": 0.03}
CANARIES, RATE, DELTA = 1_000, 0.02, 1e-5
WAYS = ("without", "audit")


@dataclass(frozen=True)
class Size:
    """How large a case is."""

    hidden: int
    wide: int
    layers: int
    heads: int
    vocabulary: int
    rows: int
    tokens: int


SIZES = {
    "lora": Size(hidden=1536, wide=4096, layers=24, heads=16, vocabulary=32_000, rows=64, tokens=512),
    "full": Size(hidden=768, wide=3072, layers=12, heads=12, vocabulary=50_257, rows=32, tokens=1024),
}
TINY = {
    "lora": Size(hidden=64, wide=128, layers=2, heads=4, vocabulary=100, rows=4, tokens=16),
    "full": Size(hidden=32, wide=128, layers=2, heads=4, vocabulary=100, rows=4, tokens=16),
}


@dataclass
class Case:
    """A model, its private optimizer, and a step of training."""

    model: Any
    optimizer: Any
    step: Callable[[], None]
    all_parameters: int


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="File that the figures are written to.")
    parser.add_argument("--tiny", action="store_true", help="Small models, on whatever device there is.")
    parser.add_argument("--steps", type=int, default=100, help="Steps of each way.")
    parser.add_argument("--stretch", type=int, default=10, help="Steps in a row.")
    parser.add_argument("--only", choices=["lora", "full"], help="One case alone.")
    parser.add_argument("--profile", action="store_true", help="Also list the dearest operations of an audited step.")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device; --tiny tries it without")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, **_versions()}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    warnings.filterwarnings("ignore")
    for kind, make in (("lora", lora_case), ("full", full_case)):
        if options.only in (None, kind):
            started = time.perf_counter()
            size = (TINY if options.tiny else SIZES)[kind]
            results[kind] = measure(make(size, device), size, device, options) | {"bar": BARS[kind]}
            results[kind]["seconds"] = time.perf_counter() - started
            print(json.dumps({kind: results[kind]}, indent=1), flush=True)
            if options.output:
                options.output.write_text(json.dumps(results, indent=1) + "\n")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return results


def lora_case(size: Size, device: torch.device) -> Case:
    """A random Llama in bfloat16, with adapters of rank 16 in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.wide,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.tokens,
        use_cache=False,
    )
    with torch.device(device):
        base = LlamaForCausalLM(config).to(torch.bfloat16)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear"))
    return _case(model, size, device, mode="hooks")


def full_case(size: Size, device: torch.device) -> Case:
    """A random GPT-2, all of it trained."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=size.tokens,
        use_cache=False,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with torch.device(device):
        model = GPT2LMHeadModel(config)
    return _case(model, size, device, mode="ghost")


class _Loss(torch.nn.Module):
    """The next token's cross entropy, a mean over each row's tokens."""

    reduction = "mean"

    def forward(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        given, wanted = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        each = torch.nn.functional.cross_entropy(given.float(), wanted, reduction="none").view(len(tokens), -1).mean(1)
        return each if self.reduction == "none" else each.mean()


def _case(model: Any, size: Size, device: torch.device, *, mode: str) -> Case:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(1)
    model.train()
    rows = int(size.rows / RATE)
    loss: Any = _Loss()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4),
        criterion=loss,
        data_loader=DataLoader(TensorDataset(torch.zeros(rows, 1)), batch_size=size.rows),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    private, optimizer, *changed, _ = made
    loss = changed[0] if changed else loss
    tokens = torch.randint(size.vocabulary, (size.rows, size.tokens), device=device)
    places = torch.arange(size.tokens, device=device).repeat(size.rows, 1)  # Opacus wants them for each row

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(private(input_ids=tokens, position_ids=places).logits, tokens).backward()
        optimizer.step()

    return Case(private, optimizer, step, sum(p.numel() for p in model.parameters()))


def measure(case: Case, size: Size, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Times of stretches of steps, each way in its turn, and the peak of the GPU's memory."""
    canaries = 10 if options.tiny and device.type == "cpu" else CANARIES
    layers = named_layers(case.optimizer, case.model)
    dim = sum(count for _, count in layers)
    settings: dict[str, Any] = {"canaries": canaries, "seed": b"a secret of its own", "delta": DELTA, "layers": layers}
    audits = {"audit": Audit(dim, **settings, deferred=True)}  # as `audited` makes it on a GPU
    found: dict[str, Any] = {
        "parameters": case.all_parameters,
        "trained": dim,
        "tensors": len(layers),
        "rows": size.rows,
        "tokens": size.tokens,
        "canaries": canaries,
        "steps": options.steps,
    }
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    peaks: dict[str, int] = dict.fromkeys(WAYS, 0)
    for way in WAYS:  # kernels are compiled, and memory is laid out
        _stretch(case, audits.get(way), device, 3)
    for pair in range(max(options.steps // options.stretch, 1)):
        for way in WAYS if pair % 2 == 0 else reversed(WAYS):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken[way].append(_stretch(case, audits.get(way), device, options.stretch))
            if device.type == "cuda":
                peaks[way] = max(peaks[way], torch.cuda.max_memory_allocated())
    mean = {way: statistics.mean(times) for way, times in taken.items()}
    median = {way: statistics.median(times) for way, times in taken.items()}
    for way in WAYS:
        found[way] = {"mean_ms": mean[way], "median_ms": median[way], "peak_bytes": peaks[way], "stretches": taken[way]}
        if way != "without":
            shares = [one / other - 1 for one, other in zip(taken[way], taken["without"], strict=True)]
            found[way]["share"] = mean[way] / mean["without"] - 1
            found[way]["standard_error"] = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else None
            found[way]["median_share"] = statistics.median(shares)
            found[way]["verdict"] = str(audits[way].result(claim=100.0).rounds) + " rounds observed"
    if options.profile:
        found["profile"] = {way: _profile(case, audits.get(way), device) for way in WAYS}
    return found


def _stretch(case: Case, audit: Audit | None, device: torch.device, steps: int) -> float:
    """Milliseconds of a step."""
    if audit is not None:
        audited(case.optimizer, audit=audit, sampling_probability=RATE)
    gc.collect()
    gc.disable()
    try:
        _wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            case.step()
        if audit is not None:
            audit.flush()
        _wait(device)
        found = 1e3 * (time.perf_counter() - start) / steps
    finally:
        gc.enable()
    unaudited(case.optimizer)
    return found


def _profile(case: Case, audit: Audit | None, device: torch.device) -> list[list[Any]]:
    """The operations that take most time, on the host and on the device, in two steps."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    if audit is not None:
        audited(case.optimizer, audit=audit, sampling_probability=RATE)
    case.step()
    with profile(activities=kinds) as seen:
        case.step()
        case.step()
        _wait(device)
    unaudited(case.optimizer)
    rows = [
        (row.key, row.count, row.self_cpu_time_total / 1e3, getattr(row, "self_device_time_total", 0.0) / 1e3)
        for row in seen.key_averages()
    ]
    rows.sort(key=lambda row: -max(row[2], row[3]))
    return [[name, count, round(host, 3), round(there, 3)] for name, count, host, there in rows[:25]]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("transformers", "peft", "opacus")}


if __name__ == "__main__":
    main()
