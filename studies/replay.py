"""The tables in docs/explanation/replay.md: clips of public code, written anew and replayed, and what replays cost.

    python -m studies.replay                  takes some ten seconds
    python -m studies.replay --write-docs     also writes tables and pictures into docs/explanation

Each step is DP-SGD on 32 rows of random data with a linear model. A claim is the accountant's ε for noise multiplier 1 and
Poisson sampling. Four steps of the run have a row that moves as far as the replay measured. The study fails if a fault is no
VIOLATION, or if an honest twin has an alarm.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.estimators.amplification import amplified_epsilon
from coalmine.estimators.sampling import Poisson
from coalmine.testing import Replay, replay
from coalmine.verdict.claim_context import ROUNDED
from coalmine.verdict.round_limits import composed_epsilon
from studies.results import markdown_table, put_between_markers

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "replay.md"
PICTURES = ROOT / "docs" / "explanation" / "replay"
ROWS, WIDTH, CLASSES, CLIP, DELTA = 32, 20, 4, 1.0, 1e-5
SAMPLING, NOISE, WITNESSED = Poisson(0.05, 100), 1.0, 4
Step = Callable[[Any], Any]


def gradients(batch: Any) -> Any:
    """The gradient of a softmax regression for each row, whose last columns are its label."""
    rows, labels = batch[:, :WIDTH], batch[:, WIDTH:]
    weights = np.random.default_rng(7).normal(size=(WIDTH, CLASSES))
    logits = rows @ weights
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return ((shares - labels)[:, None, :] * rows[:, :, None]).reshape(len(batch), -1)


def clipped(vectors: Any, norm: float = CLIP) -> Any:
    """Each vector, no longer than the clip norm."""
    return vectors * np.minimum(1, norm / (np.linalg.norm(vectors, axis=1, keepdims=True) + 1e-12))


def per_row(batch: Any) -> Any:
    """What all of these should do: clip each row, then add up."""
    return clipped(gradients(batch)).sum(axis=0)


def whole_batch(batch: Any) -> Any:
    """One microbatch, as TF Privacy with num_microbatches=1 and pyvacy: the batch's mean is clipped, not each row."""
    return clipped(gradients(batch).mean(axis=0, keepdims=True))[0]


def microbatches(batch: Any) -> Any:
    """Microbatches of four rows, each clipped as one: a row can turn the mean of its microbatch around."""
    parts = [gradients(batch[start : start + 4]).mean(axis=0) for start in range(0, len(batch), 4)]
    return clipped(np.array(parts)).sum(axis=0)


def never_cleared(batch: Any) -> Any:
    """Three steps, as deepee: the gradients of old rows stay, so a row is in every later sum too."""
    own, sums = clipped(gradients(batch)), []
    for number in range(3):
        later = np.random.default_rng(number).normal(size=(ROWS, WIDTH + CLASSES))
        sums.append(own.sum(axis=0) + (clipped(gradients(later)).sum(axis=0) if number else 0))
    return sums


def cleared(batch: Any) -> Any:
    """The same three steps with cleared gradients."""
    return [per_row(batch), *(per_row(np.random.default_rng(n).normal(size=(ROWS, WIDTH + CLASSES))) for n in (1, 2))]


def by_own_median(batch: Any) -> Any:
    """Each tensor at the median of the row's own norms, as clips like DP-FedSAM's do with a client's layers."""
    tensors = np.stack(np.split(gradients(batch), CLASSES, axis=1), axis=1)
    norms = np.linalg.norm(tensors, axis=2, keepdims=True)
    limit = np.median(norms, axis=1, keepdims=True)
    return (tensors * np.minimum(1, limit / (norms + 1e-12))).sum(axis=0).reshape(-1)


def by_tensor(batch: Any) -> Any:
    """Each of four tensors at the clip norm that the claim is for."""
    tensors = np.split(gradients(batch), CLASSES, axis=1)
    return np.concatenate([clipped(each).sum(axis=0) for each in tensors])


def centred(batch: Any) -> Any:
    """A model that subtracts the mean of the batch from its input: rows see each other."""
    rows, labels = batch[:, :WIDTH], batch[:, WIDTH:]
    return per_row(np.concatenate([rows - rows.mean(axis=0), labels], axis=1))


def silent(batch: Any) -> Any:
    """Noise only where the sum is not 0: an empty coordinate tells that nobody was there."""
    total = clipped(np.maximum(gradients(batch), 0)).sum(axis=0)
    return np.where(total != 0, total + np.random.default_rng(3).normal(size=total.shape), 0)


def noisy(batch: Any) -> Any:
    """Noise everywhere."""
    total = clipped(np.maximum(gradients(batch), 0)).sum(axis=0)
    return total + np.random.default_rng(3).normal(size=total.shape)


@dataclass(frozen=True)
class Case:
    """A fault, its honest twin, the batches that are tried, and the mean length of a row."""

    name: str
    fault: Step
    twin: Step
    scale: float = 3.0
    sparse: bool = False


CASES = (
    Case("clip of the whole batch (TF Privacy with `num_microbatches=1`, pyvacy)", whole_batch, per_row),
    Case("clip by microbatches of four", microbatches, per_row),
    Case("gradients never cleared (deepee), over three steps", never_cleared, cleared),
    Case("clip at the client's own median (DP-FedSAM-like)", by_own_median, per_row),
    Case("clip by tensor under a claim for the whole", by_tensor, per_row),
    Case("batch mean subtracted", centred, per_row),
    Case("noise only where the sum is not 0", silent, noisy, sparse=True),
)


def batch_of(case: Case) -> Any:
    """Rows and labels of a step."""
    rng = np.random.default_rng(1)
    rows = case.scale * rng.normal(size=(ROWS, WIDTH))
    if case.sparse:  # the last row alone has the last column
        rows[:-1, -1] = 0
    return np.concatenate([rows, np.eye(CLASSES)[rng.integers(CLASSES, size=ROWS)]], axis=1)


def measured(step: Step, batch: Any) -> Replay:
    """What each row of a batch moves."""
    return replay(step, batch, rows=range(ROWS), clip_norm=CLIP)


def epsilon_with(factor: float, steps: int) -> float:
    """The run's ε if a row moves the sum by this many clip norms in so many steps."""
    inverse = np.full(SAMPLING.total_rounds, 1 / NOISE)
    inverse[:steps] *= factor
    return composed_epsilon(inverse, delta=DELTA, times=1, exposure=1.0, sampling=SAMPLING)


def table() -> tuple[str, list[str]]:
    """The table of faults, and what is wrong with it."""
    claim = amplified_epsilon(NOISE, SAMPLING, DELTA).high
    lines = [
        (
            "step",
            "factor",
            f"ε with {WITNESSED} such steps of {SAMPLING.total_rounds}",
            "if every step",
            "verdict",
            "honest twin",
        )
    ]
    wrong = []
    for case in CASES:
        batch = batch_of(case)
        found, twin = measured(case.fault, batch), measured(case.twin, batch)
        some = epsilon_with(found.factor, WITNESSED)
        refuted = found.is_counterexample and some > ROUNDED * claim
        lines.append(
            (
                case.name,
                f"{found.factor:.2f}",
                f"{some:.3g}",
                f"{epsilon_with(found.factor, SAMPLING.total_rounds):.3g}",
                "VIOLATION" if refuted else "no PASS" if not found.ok else "PASS",
                f"{twin.factor:.3f}",
            )
        )
        if not refuted:
            wrong.append(f"{case.name}: no VIOLATION, factor {found.factor:.3g}")
        if not twin.ok:
            wrong.append(f"{case.name}: the honest twin has an alarm: {twin.problems()}")
    caption = (
        f"The claim is ε = {claim:.3g}: noise multiplier {NOISE:g}, {SAMPLING}, δ = 10⁻⁵. All {ROWS} rows were tried, and "
        "extreme ones made of them."
    )
    return f"{markdown_table(lines)}\n\n{caption}", wrong


def costs() -> str:
    """The forward and backward passes that replays really took, for several numbers of planned steps."""
    import torch
    from opacus import PrivacyEngine
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from coalmine.integrations.opacus import audited

    torch.set_num_threads(1)
    lines = [("planned steps", "replayed steps", "rows tried", "passes", "of the planned passes")]
    for planned in (100, 1_000, 3_000, 10_000):
        torch.manual_seed(2**40)
        net = nn.Sequential(nn.Linear(50, 80), nn.ReLU(), nn.Linear(80, 10))
        data = TensorDataset(torch.randn(640, 50), torch.randint(0, 10, (640,)))
        made = PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=64),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        model, optimizer, loader = made[0], made[1], made[2]
        settings: dict[str, Any] = {"canaries": 40, "seed": b"studies", "delta": 1e-5, "through_clip": False}
        optimizer = audited(optimizer, model, data_loader=loader, steps=planned, **settings)
        rows, labels = next((rows, labels) for rows, labels in loader if len(rows) > 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        replays = optimizer.audit.replays
        steps, once = len(replays.plan.steps), replays.passes
        share = f"{steps * once / planned:.1%}"
        lines.append((f"{planned:,}", str(steps), str(steps * replays.plan.rows), str(steps * once), share))
    return markdown_table(lines)


def pictures() -> None:
    """What a canary sees, what replay sees, and what neither sees: one picture each."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    parts = (
        "choice of data\nand settings",
        "loader and\nsampler",
        "model and\nloss",
        "gradient of\neach row",
        "clip",
        "sum",
        "noise",
        "weights",
    )
    seen = {
        "canary": ("What a canary sees", {1, 4, 5, 6, 7}, "canaries enter here", 4),
        "replay": ("What replay sees", {2, 3, 4, 5}, "one row less", 2),
        "neither": ("What neither sees", {0}, "before training", 0),
    }
    PICTURES.mkdir(exist_ok=True)
    for name, (title, lit, words, place) in seen.items():
        figure, axes = plt.subplots(figsize=(9.6, 2.1))
        for index, part in enumerate(parts):
            colour = "#f2b84b" if index in lit else "#e6e6e6"
            axes.add_patch(
                FancyBboxPatch((index * 1.25, 0), 1, 0.8, boxstyle="round,pad=0.02", fc=colour, ec="#555555")
            )
            axes.text(index * 1.25 + 0.5, 0.4, part, ha="center", va="center", fontsize=8, color="#111111")
            if index:
                axes.annotate(
                    "", (index * 1.25 - 0.03, 0.4), (index * 1.25 - 0.22, 0.4), arrowprops={"arrowstyle": "->"}
                )
        at = place * 1.25 + 0.5
        axes.annotate(
            words,
            (at, -0.03),
            (at, -0.55),
            ha="center",
            fontsize=8,
            arrowprops={"arrowstyle": "->", "color": "#a03020"},
        )
        axes.set(xlim=(-0.15, len(parts) * 1.25), ylim=(-0.7, 1.25))
        axes.set_title(title, loc="left", fontsize=11)
        axes.axis("off")
        figure.savefig(PICTURES / f"{name}.png", dpi=110, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Print both tables; exit code 1 if a fault is missed or an honest step has an alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-docs", action="store_true", help="write tables and pictures into docs/explanation")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    faults, wrong = table()
    cost = costs()
    print(faults, cost, sep="\n\n")
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    if options.write_docs:
        pictures()
        text = PAGE.read_text(encoding="utf-8")
        for name, part in (("faults", faults), ("costs", cost)):
            text = put_between_markers(text, name, part)
        PAGE.write_text(text, encoding="utf-8")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
