"""What the audit adds to a step of a small model in Opacus, on a CPU: the first thing that a user tries.

Two loops train the same model, one of them audited. Stretches of their steps alternate, in changing order, so that a machine
that slows down affects both. Time is the processor's, of all threads: other load on the machine does not count. `finish()`
is timed once, at the end of a short run.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from coalmine.integrations.opacus import audited

ROWS, BATCH, CANARIES = 4_000, 128, 1_000
FINISH_BAR = 0.5  # seconds
BARS = {"mlp": 0.25, "mnist-cnn": 0.10, "wide-mlp": 0.03}  # of a step


def models() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """The networks by name, with the shape of an example."""
    return {
        "mlp": (lambda: nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)), (784,)),
        "mnist-cnn": (_mnist_cnn, (1, 28, 28)),
        "wide-mlp": (
            lambda: nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)),
            (784,),
        ),
    }


def _mnist_cnn() -> nn.Module:
    """The network of Opacus' example for MNIST."""
    layers = [nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))


class Loop:
    """One training loop."""

    def __init__(self, name: str, *, audit: bool, **options: Any) -> None:
        make, shape = models()[name]
        torch.manual_seed(1)
        model, data = make(), TensorDataset(torch.randn(ROWS, *shape), torch.randint(0, 10, (ROWS,)))
        self.model, self.optimizer, self.loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
            data_loader=DataLoader(data, batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        if audit:
            self.optimizer = audited(self.optimizer, self.model, data_loader=self.loader, **options)
        self._batches = self._forever()

    def _forever(self) -> Any:
        while True:
            yield from self.loader

    def steps(self, count: int) -> float:
        """Seconds of the processor, for each of this many steps."""
        start = time.process_time()
        for _ in range(count):
            features, labels = next(self._batches)
            self.optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(self.model(features), labels)
            loss.backward()
            self.optimizer.step()
        return (time.process_time() - start) / count


def measure(name: str, *, pairs: int, stretch: int, **options: Any) -> tuple[float, float, float]:
    """Median seconds of a step without and with the audit, and the seconds of `finish`."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"canaries": CANARIES, "seed": b"a benchmark's seed", "delta": 1e-5, "claim": 8.0} | options
        loops = {False: Loop(name, audit=False), True: Loop(name, audit=True, directory=folder, **settings)}
        taken: dict[bool, list[float]] = {False: [], True: []}
        for loop in loops.values():
            loop.steps(stretch)
        for pair in range(pairs):
            for audit in (False, True) if pair % 2 else (True, False):
                taken[audit].append(loops[audit].steps(stretch))
        start = time.process_time()
        loops[True].optimizer.audit.finish()
        finish = time.process_time() - start
        loops[True].optimizer.audit.close()
    return statistics.median(taken[False]), statistics.median(taken[True]), finish


def main(arguments: list[str] | None = None) -> int:
    """Print the shares next to their bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(BARS), choices=list(BARS))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--stretch", type=int, default=10)
    parser.add_argument("--canaries", type=int, default=CANARIES)
    given = parser.parse_args([] if arguments is None else arguments)
    missed = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in given.models:
            size = sum(p.numel() for p in models()[name][0]().parameters())
            plain, whole, finish = measure(name, pairs=given.pairs, stretch=given.stretch, canaries=given.canaries)
            share = whole / plain - 1
            missed |= share > BARS[name] or finish > FINISH_BAR
            print(
                f"{name} ({size:,} parameters): step {1e3 * plain:.2f} ms, audited {1e3 * whole:.2f} ms, {share:.0%} more "
                f"(bar {BARS[name]:.0%}); finish {finish:.2f} s (bar {FINISH_BAR} s)",
                flush=True,
            )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
