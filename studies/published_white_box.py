"""Training runs in the settings of published white-box audits: the second table of docs/evidence/published.md.

    python -m studies.published_white_box                  every row, on a GPU if there is one; minutes on an H200
    python -m studies.published_white_box --size tiny      the same code on small nets and few pictures: seconds
    python -m studies.published_white_box --write-docs     write the table from finished runs

The folder COALMINE_DATA_DIR holds Fashion-MNIST and MNIST (`coalmine data get`). Rows with Opacus sample by Poisson and
bound what its accountant quotes; a row "final" takes every record in every step. A finished run is one line of
studies/out/published_white_box.jsonl, and is not run again.
"""

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, Dataset

from coalmine import Audit, Poisson, amplified_epsilon, amplified_noise, mechanism_noise
from coalmine.integrations.opacus import audited
from coalmine.simulation.engines import Examples
from coalmine.simulation.tasks.image_tasks import FASHION, mnist_by_writer, read_idx
from studies.results import Record, markdown_table, read_records, write_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "published_white_box.jsonl"
DOCS = ROOT / "docs" / "evidence" / "published.md"
FASHION_TRAINED = 50_000
DELTA, SEED = 1e-5, b"for studies only"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Tensors = dict[str, torch.Tensor]


class Pictures(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pictures and classes on the device; a batch is read at once."""

    def __init__(self, examples: Examples, first: int, last: int) -> None:
        self.pixels = examples.inputs[first:last].reshape(-1, 1, 28, 28).to(DEVICE) * 2 - 1
        self.classes = examples.labels[first:last].to(DEVICE)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pixels[index], self.classes[index]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.as_tensor(indices, device=DEVICE)
        return self.pixels[chosen], self.classes[chosen]


def convolutional(width: int, hidden: int) -> nn.Module:
    """Two convolutions and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, width, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(width, 2 * width, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(2 * width * 16, hidden),
        nn.Tanh(),
        nn.Linear(hidden, 10),
    )


class Block(nn.Module):
    """Two convolutions of a wide residual net, with group norms in the place of batch norms."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(16, inside), nn.GroupNorm(16, outside)
        self.into = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.out = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.short = None if inside == outside else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        beside = x if self.short is None else self.short(y)
        return self.out(torch.relu(self.second(self.into(y)))) + beside


def wide_residual(blocks: int = 2, width: int = 4) -> nn.Module:
    """WRN-16-4: three groups of two blocks, for pictures of one channel."""
    widths = [16, 16 * width, 32 * width, 64 * width]
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1, bias=False)]
    for group in range(3):
        for number in range(blocks):
            inside = widths[group] if number == 0 else widths[group + 1]
            layers.append(Block(inside, widths[group + 1], 2 if group and number == 0 else 1))
    ends = (nn.GroupNorm(16, widths[3]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[3], 10))
    return nn.Sequential(*layers, *ends)


def accuracy(predict: Callable[[torch.Tensor], torch.Tensor], test: Pictures) -> float:
    """The share of test pictures that are classified correctly."""
    with torch.no_grad():
        right = sum(
            int((predict(pixels).argmax(dim=1) == classes).sum())
            for pixels, classes in zip(test.pixels.split(1_000), test.classes.split(1_000), strict=True)
        )
    return right / len(test)


def sampled(
    *,
    net: Callable[[], nn.Module],
    rows: int,
    rate: float,
    canaries: int,
    rate_of_learning: float,
    rounds: tuple[int, ...],
    seconds: float,
    epsilon: float | None = None,
    noise: float | None = None,
) -> Record:
    """DP-SGD by Opacus on Fashion-MNIST: the most of `rounds` that fit into these seconds, by ten timed steps."""
    everything = _fashion()
    data, test = Pictures(everything, 0, rows), Pictures(everything, FASHION_TRAINED, len(everything))

    def train(steps: int, std: float, *, audit: bool) -> Record:
        torch.manual_seed(1)
        model = net().to(DEVICE)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate_of_learning)
        loader: Any = DataLoader(data, batch_size=round(rows * rate), collate_fn=lambda batch: batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, optimizer, loader = PrivacyEngine().make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=std, max_grad_norm=1.0
            )
        scheme = Poisson(loader.sample_rate, rounds=steps)
        claim = float(amplified_epsilon(std, scheme, DELTA))
        if audit:
            options = {"canaries": canaries, "seed": SEED, "delta": DELTA, "claim": claim, "steps": steps}
            optimizer = audited(optimizer, model, data_loader=loader, **options)
        done = 0
        while done < steps:
            for pixels, classes in loader:
                optimizer.zero_grad()
                if len(classes):
                    nn.functional.cross_entropy(model(pixels), classes).backward()
                optimizer.step()
                done += 1
                if done == steps:
                    break
        if not audit:
            return {}
        result = optimizer.audit.finish(task="fashion-mnist")
        unknown = result["unknown-round"].headline
        model.eval()
        return {
            "true": claim,
            "any": unknown.lower_bound,
            "gaussian": unknown.lower_bound_gaussian,
            "withheld": unknown.gaussian.withheld,
            "estimate": unknown.estimate.epsilon if unknown.estimate is not None else math.nan,
            "rung": "unknown-round",
            "verdict": f"{result.verdict.outcome} ({result.verdict.code})",
            "accuracy": accuracy(model, test),
            "setting": f"z = {std:.3g}, q = {loader.sample_rate:.3g}, T = {steps:,}",
            "parameters": sum(each.numel() for each in model.parameters()),
        }

    std = noise or 1.0
    train(3, std, audit=False)
    start = time.perf_counter()
    train(10, std, audit=False)
    _wait()
    each = (time.perf_counter() - start) / 10
    steps = max([number for number in rounds if number * each < seconds] or [min(rounds)])
    if epsilon is not None:
        std = float(amplified_noise(epsilon, Poisson(rate, rounds=steps), DELTA))
    return train(steps, std, audit=True) | {"canaries": canaries, "step": each}


def final_model(
    *, net: Callable[[], nn.Module], rows: int, steps: int, canaries: int, epsilon: float, rate_of_learning: float
) -> Record:
    """DP-SGD on MNIST with every record and every canary in every step; the attacker sees the last model only."""
    task = mnist_by_writer(_folder("mnist-by-writer"))
    data, test = Pictures(task.train, 0, rows), Pictures(task.test, 0, len(task.test))
    torch.manual_seed(1)
    model = net().to(DEVICE)
    parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
    initial = {name: each.clone() for name, each in parameters.items()}
    noise = float(mechanism_noise(epsilon, delta=DELTA, participations=steps))
    audit = Audit.for_model(
        parameters, canaries=canaries, seed=SEED, delta=DELTA, rounds=steps, presentations=steps, claim=epsilon
    )

    def loss(values: Tensors, pixels: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, values, (pixels.unsqueeze(0),)), label.unsqueeze(0))

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def clipped_sum() -> Tensors:  # downhill, as canaries move the model
        total = {name: torch.zeros_like(each) for name, each in parameters.items()}
        for pixels, classes in zip(data.pixels.split(1_000), data.classes.split(1_000), strict=True):
            found = gradients(parameters, pixels, classes)
            lengths = torch.sqrt(sum(each.flatten(1).square().sum(1) for each in found.values()))  # type: ignore[arg-type]
            shrink = torch.clamp(1 / lengths, max=1.0)
            for name, each in found.items():
                total[name] -= torch.einsum("b...,b->...", each, shrink)
        return total

    for number in range(1, steps + 1):
        others, present = clipped_sum(), audit.canaries_in_round(number)
        added = audit.updates(present, 1.0)
        release = {
            name: each + added[name] + noise * torch.randn_like(each, dtype=torch.float32)
            for name, each in others.items()
        }
        audit.observe_round(number, release, present=present, others=others, noise_std=noise, clip_norm=1.0)
        for name, each in release.items():
            parameters[name] += rate_of_learning / rows * each
    audit.observe_final(parameters, initial=initial)
    result = audit.finish()
    row = result["final-update"].headline
    known = result["known-others"].headline
    return {
        "true": epsilon,
        "any": row.lower_bound,
        "gaussian": row.lower_bound_gaussian,
        "withheld": row.gaussian.withheld,
        "estimate": row.estimate.epsilon,
        "rung": "final-update",
        "known": [known.lower_bound, known.lower_bound_gaussian],
        "verdict": f"{result.verdict.outcome} ({result.verdict.code})",
        "accuracy": accuracy(lambda pixels: functional_call(model, parameters, (pixels,)), test),
        "setting": f"z = {noise:.3g}, all {rows:,} records in each of {steps} steps",
        "parameters": sum(each.numel() for each in parameters.values()),
        "canaries": canaries,
    }


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run, its published figures, and the same run in small."""

    name: str
    theirs: str
    source: str
    run: Callable[[], Record]
    tiny: Callable[[], Record]


TINY_NET = {"net": lambda: convolutional(4, 64), "canaries": 100}
ROWS = (
    Row(
        name="white box in one run, ε = 4: a CNN on Fashion-MNIST",
        theirs="1.8 by Steinke (WRN-16 on CIFAR-10)",
        source="arXiv 2305.08846",
        run=lambda: sampled(
            net=lambda: convolutional(32, 512),
            rows=FASHION_TRAINED,
            rate=0.05,
            canaries=2_500,
            rate_of_learning=1.0,
            epsilon=4.0,
            rounds=(200, 400),
            seconds=60,
        ),
        tiny=lambda: sampled(
            **TINY_NET, rows=2_000, rate=0.05, rate_of_learning=1.0, epsilon=4.0, rounds=(20,), seconds=60
        ),
    ),
    Row(
        name="final model, ε = 10, 1,000 records of MNIST",
        theirs="7.21 in black box, from many runs",
        source="arXiv 2405.14457",
        run=lambda: final_model(
            net=lambda: convolutional(64, 1_024),
            rows=1_000,
            steps=100,
            canaries=1_000,
            epsilon=10.0,
            rate_of_learning=2.0,
        ),
        tiny=lambda: final_model(**TINY_NET, rows=100, steps=5, epsilon=10.0, rate_of_learning=2.0),
    ),
    Row(
        name="WRN-16-4, ε = 6.9, on Fashion-MNIST",
        theirs="2.63 by its Gaussian fit (CIFAR-10, T = 2,200)",
        source="auditbench, arXiv 2606.12733",
        run=lambda: sampled(
            net=wide_residual,
            rows=11_000,
            rate=1 / 11,
            canaries=2_500,
            rate_of_learning=2.0,
            epsilon=6.904,
            rounds=(110, 220, 440, 880, 2_200),
            seconds=170,
        ),
        tiny=lambda: sampled(
            net=lambda: wide_residual(1, 1),
            rows=550,
            rate=1 / 11,
            canaries=100,
            rate_of_learning=2.0,
            epsilon=6.904,
            rounds=(5, 2_200),
            seconds=1,
        ),
    ),
    Row(
        name="final model, ε = 10, all of MNIST",
        theirs="6.48 in black box, from many runs",
        source="arXiv 2405.14457",
        run=lambda: final_model(
            net=lambda: convolutional(64, 1_024),
            rows=60_000,
            steps=100,
            canaries=1_000,
            epsilon=10.0,
            rate_of_learning=2.0,
        ),
        tiny=lambda: final_model(**TINY_NET, rows=2_000, steps=3, epsilon=10.0, rate_of_learning=2.0),
    ),
)


def _fashion() -> Examples:
    """The training pictures of Fashion-MNIST; those after FASHION_TRAINED are kept for testing."""
    names = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
    images, classes = (read_idx(_folder("fashion-mnist") / name, sha256=FASHION[name]) for name in names)
    return Examples(torch.tensor(images, dtype=torch.float32) / 255, torch.tensor(classes.astype("int64")))


def _folder(name: str) -> Path:
    return Path(os.environ["COALMINE_DATA_DIR"]) / name


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def table() -> str:
    """The finished runs as a table."""
    heads = [
        "audit",
        "setting",
        "parameters; canaries",
        "true ε",
        "published",
        "ours if Gaussian",
        "ours for any law",
        "accuracy",
    ]
    lines = [heads]
    found = {each["row"]: each for each in read_records(RESULTS, {row.name for row in ROWS}, lambda each: each["row"])}
    for row in ROWS:
        if row.name in found:
            each = found[row.name]
            gaussian = f"withheld: {each['withheld']}" if each["gaussian"] is None else f"{each['gaussian']:.2f}"
            lines.append(
                [
                    *(
                        row.name,
                        each["setting"],
                        f"{each['parameters']:,}; {each['canaries']:,}",
                        f"{each['true']:.2f}",
                    ),
                    *(f"{row.theirs} ({row.source})", gaussian, f"{each['any']:.2f}", f"{each['accuracy']:.0%}"),
                ]
            )
    return markdown_table(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/evidence/published.md")
    options = parser.parse_args()
    if options.write_docs:
        write_tables(DOCS, {"trained": table()})
        return 0
    done = {each["row"] for each in read_records(RESULTS, {row.name for row in ROWS}, lambda each: each["row"])}
    for row in ROWS:
        if options.only not in row.name or (row.name in done and options.size == "full"):
            continue
        start = time.perf_counter()
        record = (row.run if options.size == "full" else row.tiny)()
        record |= {"row": row.name, "seconds": time.perf_counter() - start}
        print(json.dumps(record), flush=True)
        if options.size == "full":
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            with RESULTS.open("a") as out:
                out.write(json.dumps(record) + "\n")
    print(table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
