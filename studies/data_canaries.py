"""The tables in docs/evidence/outputs.md: how often bounds from outputs err, and what they see of broken trainings.

    python -m studies.data_canaries --only mechanism      bounds on mechanisms with a known ε: two minutes on two cores
    python -m studies.data_canaries --jobs 6              with trainings on Fashion-MNIST and Shakespeare: needs a GPU
    python -m studies.data_canaries --only LoRA --jobs 1  what text canaries cost a model of 10^8 parameters

A mechanism is tight: it gives away as much as its ε allows, so a wrong bound shows. Trainings are DP-SGD with Poisson
sampling on 2,000 rows and 1,000 canaries, and plain or broken training. COALMINE_DATA_DIR names the folder of the data.
"""

import gzip
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coalmine import data_canaries
from coalmine.estimators.amplification import amplified_noise
from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.literature.steinke import METHOD as STEINKE
from coalmine.estimators.literature.xiang import xiang_row
from coalmine.estimators.sampling import Poisson
from coalmine.verdict.scored_records import BLACK_BOX, RecordRung
from studies.results import Record, main_of, markdown_table, most_errors, read_records, run_batches

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "outputs.md"
RESULTS = ROOT / "studies" / "out" / "data_canaries.jsonl"
DELTA, CANARIES, STRICT = 1e-5, 1_000, 0.9995
RATE, STEPS, ROWS, CLIP = 0.1, 100, 2_000, 1.0
BATCH = 10  # seeds of one row that one process runs
SMALL = 64  # rows of a batch of images without DP
FORGOTTEN = 0.1  # the clip norm for which a broken pipeline has its noise
LARGE = (896, 12, 14)  # dimensions, layers and heads of the model that LoRA adapts: 1.2 · 10^8 parameters
LONGER = 5  # times as many steps without DP
PRETRAINING = 400  # its steps before
LARGE_DELTA = 0.002  # so that a leak of everything happens in some runs


def coins(rng: np.random.Generator) -> np.ndarray:
    """A fair coin for each canary."""
    return rng.random(CANARIES) < 0.5


def responses(truth: np.ndarray, epsilon: np.ndarray | float, rng: np.random.Generator) -> np.ndarray:
    """Randomised response: each coin, or the other one with probability 1 / (1 + e^ε). Ties are broken at random."""
    lies = rng.random(truth.size) < 1 / (1 + np.exp(epsilon))
    return (truth ^ lies) + 1e-6 * rng.random(truth.size)


def independent(truth: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Each canary by itself."""
    return responses(truth, epsilon, rng)


def switched(truth: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """One switch for all canaries: everybody answers at ε, or nobody says anything."""
    return responses(truth, epsilon if rng.random() < 0.5 else 0.0, rng)


def leaked(truth: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Everything leaks with probability δ, otherwise randomised response at ε."""
    return truth + 1e-6 * rng.random(truth.size) if rng.random() < LARGE_DELTA else responses(truth, epsilon, rng)


def shared(truth: np.ndarray, mu: float, rng: np.random.Generator) -> np.ndarray:
    """Every coin with the same draw of a Gaussian mechanism's loss: each canary has μ-GDP, and all err together."""
    loss = abs(mu * (rng.normal() + mu * (rng.random() < 0.5) - mu / 2))
    return responses(truth, loss, rng)


def gaussian(truth: np.ndarray, mu: float, rng: np.random.Generator) -> np.ndarray:
    """A Gaussian mechanism for each canary."""
    return mu * truth + rng.normal(size=truth.size)


MECHANISMS: dict[str, tuple[Callable[..., np.ndarray], float, float, bool]] = {
    **{f"mechanism: randomised response, ε {e:g}": (independent, e, DELTA, False) for e in (1.0, 2.0, 4.0)},
    **{f"mechanism: one switch for all, ε {e:g}": (switched, e, DELTA, False) for e in (1.0, 2.0, 4.0)},
    **{f"mechanism: all leaks with probability δ, ε {e:g}": (leaked, e, LARGE_DELTA, False) for e in (1.0, 4.0)},
    **{f"mechanism: Gaussian, μ {m:g}": (gaussian, m, DELTA, True) for m in (0.5, 2.0)},
    **{f"mechanism: one Gaussian loss for all, μ {m:g}": (shared, m, DELTA, True) for m in (0.5, 2.0)},
}
HONEST = {"honest DP-SGD, ε 1": 1.0, "honest DP-SGD, ε 2": 2.0, "honest DP-SGD, ε 4": 4.0, "honest DP-SGD, ε 8": 8.0}
LEAKS = ("without DP: CNN on Fashion-MNIST", "without DP: tiny GPT on Shakespeare")
BROKEN = {"no clip, noise/10, claim 1": 1.0, "no clip, noise/10, claim 4": 4.0}
LORA = "LoRA of 10^8 parameters, 1,000 text canaries"
SEEDS = {
    **dict.fromkeys(MECHANISMS, 1_000),
    **dict.fromkeys(HONEST, 200),
    **dict.fromkeys(LEAKS, 3),
    **dict.fromkeys(BROKEN, 3),
    LORA: 1,
}


def truth_of(row: str) -> float:
    """The ε of a mechanism at its δ, or the claimed one of a training."""
    if row in MECHANISMS:
        _, parameter, delta, normal = MECHANISMS[row]
        return (
            float(gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(parameter, 1.0), delta=delta)) if normal else parameter
        )
    return HONEST.get(row, BROKEN.get(row, math.inf))


def bounds(inside: np.ndarray, outside: np.ndarray, delta: float) -> Record:
    """Every bound on the same scores."""
    rung = RecordRung.of(BLACK_BOX, inside, outside, delta)
    return {
        "any law": rung.lower_bound,
        "if Gaussian": rung.lower_bound_gaussian,
        "verdict": rung.bound(STRICT),
        "steinke": STEINKE.best(rung.games, delta=delta, confidence=0.95),
        "xiang": xiang_row(inside, outside, delta=delta).value,
        "independent": epsilon_lower_bound(inside, null=outside, delta=delta, confidence=0.95),
        "area": rung.area,
    }


def run_mechanism(row: str, seed: int) -> Record:
    """The bounds on one draw of a mechanism."""
    mechanism, parameter, delta, _ = MECHANISMS[row]
    rng = np.random.default_rng([seed, *row.encode()])
    truth = coins(rng)
    scores = mechanism(truth, parameter, rng)
    return bounds(scores[truth], scores[~truth], delta)


def fashion(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first rows of Fashion-MNIST."""
    folder = Path(os.environ["COALMINE_DATA_DIR"]) / "fashion-mnist"
    parts = (("train-images-idx3-ubyte.gz", 16), ("train-labels-idx1-ubyte.gz", 8))
    pixels, labels = (
        np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=start) for name, start in parts
    )
    images = pixels.reshape(-1, 1, 28, 28)[:count].astype(np.float32) / 255
    return images, labels[:count].astype(np.int64)


def plays(width: int) -> np.ndarray:
    """Shakespeare in windows of that many characters, as tokens below 128."""
    file = Path(os.environ["COALMINE_DATA_DIR"]) / "shakespeare" / "shakespeare_by_role.jsonl.gz"
    with gzip.open(file, "rt") as lines:
        text = "\n".join(snippet for line in lines for snippet in json.loads(line)["snippets"])
    tokens = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    return tokens[: tokens.size // width * width].reshape(-1, width)


def cnn(seed: int) -> Any:
    """A small convolutional network."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32 * 25, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def device() -> str:
    """The GPU, if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_honest(row: str, seed: int) -> Record:
    """DP-SGD as it should be, on images and patterns as canaries."""
    import torch
    from torch.func import functional_call, grad, vmap

    images, labels = fashion(ROWS)
    canaries = data_canaries.patterns(images, count=CANARIES, classes=10, seed=f"outputs, {row}, {seed}".encode())
    inputs, targets = (torch.tensor(part, device=device()) for part in canaries.insert((images, labels)))
    model = cnn(seed).to(device())
    noise = amplified_noise(HONEST[row], Poisson(RATE, STEPS), DELTA)
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(now: Any, image: Any, label: Any) -> Any:
        return torch.nn.functional.cross_entropy(functional_call(model, now, (image[None],)), label[None])

    per_row = vmap(grad(loss), in_dims=(None, 0, 0))
    divisor, velocity = RATE * len(inputs), {name: torch.zeros_like(value) for name, value in weights.items()}
    for _ in range(STEPS):
        picked = torch.rand(len(inputs), device=inputs.device) < RATE
        found = per_row(weights, inputs[picked], targets[picked])
        length = torch.sqrt(sum((g.flatten(1) ** 2).sum(1) for g in found.values()))
        factor = (CLIP / length.clamp(min=1e-12)).clamp(max=1.0)
        for name, value in weights.items():
            total = torch.einsum("n,n...->...", factor, found[name])
            velocity[name] = 0.9 * velocity[name] + total + noise * CLIP * torch.randn_like(value)
            weights[name] = value - 0.25 * velocity[name] / divisor
    model.load_state_dict(weights)
    scores = canaries.score(model)
    return bounds(scores[canaries.coins], scores[~canaries.coins], DELTA)


def run_leak(row: str, seed: int) -> Record:
    """Training without DP: a CNN on images, or a tiny GPT on text."""
    if "GPT" in row:
        return _leak_of_text(seed)
    return _leak_of_images(row, seed, claim=None, count=CANARIES, epochs=60)


def run_broken(row: str, seed: int) -> Record:
    """DP-SGD whose clip was forgotten, with a tenth of the noise, under the claim of the honest one."""
    return _leak_of_images(row, seed, claim=BROKEN[row], count=2 * CANARIES, epochs=150)


def _leak_of_images(row: str, seed: int, *, claim: float | None, count: int, epochs: int) -> Record:
    import torch

    images, labels = fashion(ROWS)
    canaries = data_canaries.patterns(images, count=count, classes=10, seed=f"outputs, {row}, {seed}".encode())
    inputs, targets = (torch.tensor(part, device=device()) for part in canaries.insert((images, labels)))
    model, noise = cnn(seed).to(device()), 0.0
    if claim is not None:
        rate = SMALL / len(inputs)
        noise = FORGOTTEN / 10 * amplified_noise(claim, Poisson(rate, round(epochs / rate)), DELTA)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - epoch / epochs)
        for picked in torch.randperm(len(inputs), device=inputs.device).split(SMALL):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[picked]), targets[picked]).backward()
            for parameter in model.parameters() if noise else ():
                parameter.grad += noise / SMALL * torch.randn_like(parameter)
            optimizer.step()
    scores = canaries.score(model)
    found = bounds(scores[canaries.coins], scores[~canaries.coins], DELTA)
    if claim is not None:
        found["outcome"] = str(canaries.result(scores, delta=DELTA, claim=claim).verdict.outcome)
    return found


def gpt(width: int, dim: int, layers: int, heads: int, seed: int, *, rank: int = 0) -> Any:
    """A small GPT over characters; with a rank, only adapters of that rank in its attention are trained."""
    import torch
    from torch import nn

    torch.manual_seed(seed)

    class Adapted(nn.Module):
        """A frozen linear layer with a trained one of low rank beside it."""

        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner, self.on = inner, True
            self.down, self.up = nn.Linear(inner.in_features, rank, bias=False), nn.Linear(rank, inner.out_features)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Any) -> Any:
            return self.inner(x) + self.up(self.down(x)) if self.on else self.inner(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def forward(self, x: Any) -> Any:
            size, length = x.shape[:2]
            parts = self.qkv(self.first(x)).view(size, length, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(size, length, dim))
            return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.place = nn.Embedding(128, dim), nn.Embedding(width, dim)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 128)

        def forward(self, tokens: Any) -> Any:
            x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

        def adapt(self) -> None:
            """Freeze the model, and put adapters into its attention."""
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            for block in self.blocks:
                block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)

    return Model()


def token_loss(logits: Any, labels: Any) -> Any:
    """The mean over rows of the mean loss of a row's tokens."""
    import torch

    targets = labels[:, 1:]
    each = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    return (each.sum(1) / (targets != -100).sum(1).clamp(min=1)).mean()


def _leak_of_text(seed: int) -> Record:
    import torch

    width = 64
    windows = plays(width)[:6_000]
    canaries = data_canaries.secrets(
        "The code of {name} is {secret}.",
        lambda text: list(text.encode()),
        count=CANARIES,
        width=width,
        seed=f"outputs, text, {seed}".encode(),
    )
    inputs, targets = (torch.tensor(part, device=device()) for part in canaries.insert((windows, windows)))
    model = gpt(width, 192, 4, 6, seed).to(device())
    optimizer, before = torch.optim.AdamW(model.parameters(), 1e-3), canaries.score(model)
    for _ in range(40):  # epochs
        for picked in torch.randperm(len(inputs), device=inputs.device).split(128):
            optimizer.zero_grad()
            token_loss(model(inputs[picked]), targets[picked]).backward()
            optimizer.step()
    scores = canaries.score(model, reference=before)
    found = bounds(scores[canaries.coins], scores[~canaries.coins], DELTA)
    extraction = canaries.extraction(model)
    return found | {"extraction": str(extraction)}


def run_lora(row: str, seed: int) -> Record:
    """DP-LoRA with and without text canaries: seconds, and accuracy on held-out text."""
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_float32_matmul_precision("high")
    width, steps, batch = 128, 60, 256
    windows = plays(width)
    held, tuned, first = windows[:500], windows[500:4_500], windows[4_500:]
    base = gpt(width, *LARGE, seed, rank=8).to(device())
    optimizer = torch.optim.AdamW(base.parameters(), 2e-4)
    for _ in range(PRETRAINING):
        rows = torch.tensor(first[np.random.default_rng().integers(len(first), size=128)], device=device())
        optimizer.zero_grad()
        with torch.autocast(device(), torch.bfloat16):
            loss = token_loss(base(rows), rows)
        loss.backward()
        optimizer.step()
    state = {name: value.clone() for name, value in base.state_dict().items()}
    canaries = data_canaries.secrets(
        "The code of {name} is {secret}.",
        lambda text: list(text.encode()),
        count=CANARIES,
        width=width,
        seed=f"outputs, LoRA, {seed}".encode(),
    )
    found: Record = {"parameters": sum(value.numel() for value in base.parameters())}

    def accuracy(model: Any) -> float:
        tokens = torch.tensor(held, device=device())
        with torch.no_grad():
            right = [(model(part)[:, :-1].argmax(-1) == part[:, 1:]).float().mean() for part in tokens.split(100)]
        return float(torch.stack(right).mean())

    for name, private, inserted in (("bare", True, False), ("with", True, True), ("no DP", False, True)):
        model = gpt(width, *LARGE, seed, rank=8)
        model.load_state_dict(state)
        model.adapt()
        model = model.to(device())
        arrays = canaries.insert((tuned, tuned)) if inserted else (tuned, tuned)
        started = time.perf_counter()
        before = canaries.score(model) if inserted else None
        scored = time.perf_counter() - started
        loader = DataLoader(TensorDataset(*map(torch.tensor, arrays)), batch_size=batch, shuffle=True)
        tuner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-3)
        trained, loss_of = model, token_loss
        if private:
            q = batch / len(arrays[0])
            noise = amplified_noise(8.0, Poisson(q, steps), DELTA)
            trained, tuner, loader = PrivacyEngine().make_private(
                module=model, optimizer=tuner, data_loader=loader, noise_multiplier=noise, max_grad_norm=1.0
            )
        synchronize()
        begun, done = time.perf_counter(), 0
        while done < steps * (1 if private else LONGER):
            for inputs, targets in loader:
                tuner.zero_grad()
                loss_of(trained(inputs.to(device())), targets.to(device())).backward()
                tuner.step()
                done += 1
                if done >= steps * (1 if private else LONGER):
                    break
        synchronize()
        found[f"{name}: seconds"] = time.perf_counter() - begun
        found[f"{name}: accuracy"] = accuracy(model)
        if inserted:
            started = time.perf_counter()
            scores = canaries.score(model, reference=before)
            found[f"{name}: scoring seconds"] = scored + time.perf_counter() - started
            bound = bounds(scores[canaries.coins], scores[~canaries.coins], DELTA)
            found |= {f"{name}: {key}": value for key, value in bound.items()}
            found[f"{name}: extraction"] = str(canaries.extraction(model))
    return found


def run_batch(row: str, seeds: list[int]) -> list[Record]:
    """Some seeds of a row."""
    work: Any = run_mechanism if row in MECHANISMS else run_honest if row in HONEST else run_leak
    work = run_broken if row in BROKEN else run_lora if row == LORA else work
    records = []
    for seed in seeds:
        started = time.perf_counter()
        found = work(row, seed)
        records.append({"row": row, "seed": seed, "seconds": time.perf_counter() - started} | found)
    return records


def finished() -> list[Record]:
    """Every finished run."""
    return read_records(RESULTS, SEEDS, lambda record: (record["row"], record["seed"]))


def run(names: list[str], seeds: int, jobs: int) -> None:
    """Run what is missing, the longest runs first, and seeds of all rows side by side."""
    done = {(record["row"], record["seed"]) for record in finished()}
    batches = []
    for row in names:
        left = [seed for seed in range(min(seeds, SEEDS[row])) if (row, seed) not in done]
        size = 250 if row in MECHANISMS else BATCH if row in HONEST else 1
        batches += [(row, left[start : start + size]) for start in range(0, len(left), size)]
    batches.sort(key=lambda batch: (batch[0] in MECHANISMS, batch[0] in HONEST, batch[1][0]))
    if batches:
        run_batches(RESULTS, run_batch, batches, jobs)


METHODS = ("any law", "if Gaussian", "verdict", "steinke", "xiang", "independent")


def tables() -> dict[str, str]:
    """How often each bound lies above the true ε, and what is seen of trainings that leak."""
    by_row: dict[str, list[Record]] = {row: [] for row in SEEDS}
    for record in finished():
        by_row[record["row"]].append(record)
    heads = (
        "",
        "runs",
        "ε",
        "mean bound",
        "above ε: any law",
        "if Gaussian",
        "99.95 %",
        "Steinke",
        "Xiang",
        "independent",
    )
    lines = [heads]
    for row in (*MECHANISMS, *HONEST):
        if runs := by_row[row]:
            true = truth_of(row)
            share = [f"{np.mean([run[name] > true for run in runs]):.1%}" for name in METHODS]
            mean = np.mean([run["any law"] for run in runs])
            lines.append((row.removeprefix("mechanism: "), str(len(runs)), f"{true:.2f}", f"{mean:.2f}", *share))
    seen = [("", "runs", "bound", "at 99.95 %", "area under ROC", "verdict")]
    for row in (*LEAKS, *BROKEN):
        if runs := by_row[row]:
            ends = [f"{min(run[key] for run in runs):.2f}" for key in ("any law", "verdict", "area")]
            outcomes = {run.get("outcome", "–") for run in runs}
            seen.append((row, str(len(runs)), *ends, ", ".join(sorted(outcomes))))
    found = {"bounds": markdown_table(lines), "leaks": markdown_table(seen)}
    costs = [("", "without canaries", "with canaries", f"without DP, {LONGER} times the steps")]
    for record in by_row[LORA]:
        costs += [
            (what, *(f"{record[f'{name}: {key}']:{shown}}" if f"{name}: {key}" in record else "–" for name in names))
            for names in (("bare", "with", "no DP"),)
            for what, key, shown in (
                ("seconds of training", "seconds", ".1f"),
                ("seconds of scoring", "scoring seconds", ".1f"),
                ("accuracy on held-out text", "accuracy", ".1%"),
                ("secrets", "extraction", ""),
            )
        ]
    return found | {"lora": markdown_table(costs)}


def failures(names: list[str], seeds: int) -> list[str]:
    """The bars that were missed: bounds above the true ε too often, and leaks that were not seen."""
    bad = []
    for row in names:
        runs, true = [record for record in finished() if record["row"] == row], truth_of(row)
        if row in MECHANISMS or row in HONEST:
            gaussian_too = row in HONEST or MECHANISMS[row][3]
            for name, level in (("any law", 0.05), ("verdict", 0.0005), *([("if Gaussian", 0.05)] * gaussian_too)):
                errors = sum(run[name] > true for run in runs)
                if errors > most_errors(len(runs), level):
                    bad.append(f"{row}: the bound {name} is above ε in {errors} of {len(runs)} runs")
        elif row in LEAKS and any(run["any law"] <= 3 for run in runs):
            bad.append(f"{row}: a bound is at most 3")
        elif row in BROKEN and any(run["outcome"] != "VIOLATION" for run in runs):
            bad.append(f"{row}: not every run is a VIOLATION")
    return bad


if __name__ == "__main__":
    sys.exit(
        main_of(__doc__, results=RESULTS, page=PAGE, rows=SEEDS, run=run, tables=tables, failures=failures, jobs=2)
    )
