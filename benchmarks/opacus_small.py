"""What the audit adds to a step of a small model in Opacus, on a CPU: the first thing that a user tries.

Two loops train the same model, one of them audited. Stretches of their steps alternate, in changing order, so that a machine
that slows down affects both. Three times are taken: the wall's, the processor's for the training thread alone, and for all
threads. The bars are for the wall on two idle cores. On a busy machine the training thread's own time says more: it has
the canaries, and what is measured beside it is in the third. The floor is the work that no audit avoids: the clipped sum of
the examples, two transforms, and the canaries' sum. `finish()` is timed once.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from coalmine.canaries import RotatedCanaries
from coalmine.integrations.opacus import audited

ROWS, BATCH, CANARIES = 4_000, 128, 1_000
FINISH_BAR = 0.5  # seconds
WARM_UP = 60  # steps, in which a small model's canaries are made


class Case(NamedTuple):
    """A training to measure; the bar is a share of its step."""

    model: str
    bar: float | None = None
    mode: str = "hooks"
    physical: int | None = None  # BatchMemoryManager's max_physical_batch_size
    canaries: int = CANARIES
    all_through_clip: bool = False
    progress: bool = True  # the bar in the terminal

    def __str__(self) -> str:
        more = [self.mode] * (self.mode != "hooks") + ["split batches"] * (self.physical is not None)
        more += ["all through the clip"] * self.all_through_clip
        return ", ".join([self.model, f"{self.canaries:,} canaries", *more])


CASES = (
    Case("mlp", 0.25),
    Case("mnist-cnn", 0.10),
    Case("wide-mlp", 0.03),
    Case("mlp", 0.25, canaries=100),
    Case("mlp", 0.25, mode="functorch"),
    Case("mlp", 0.25, mode="ghost"),
    Case("mlp", 0.25, physical=32),
    Case("mlp", all_through_clip=True),
    Case("mnist-cnn", 0.10, canaries=100),
    Case("mnist-cnn", 0.10, mode="functorch"),
    Case("mnist-cnn", 0.10, mode="ghost"),
    Case("mnist-cnn", 0.10, physical=32),
    Case("mnist-cnn", all_through_clip=True),
)


class Times(NamedTuple):
    """Seconds: of the wall, of the processor for this thread, and for all threads of the process."""

    wall: float
    own: float
    all: float

    @classmethod
    def now(cls) -> "Times":
        return cls(time.perf_counter(), time.thread_time(), time.process_time())

    def until_now(self, count: int) -> "Times":
        """The time since then, over a count."""
        return Times(*((now - then) / count for now, then in zip(Times.now(), self, strict=True)))


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
    """One training loop. With `physical`, BatchMemoryManager splits its batches into ones of that size."""

    def __init__(
        self,
        name: str,
        *,
        audit: bool,
        mode: str = "hooks",
        physical: int | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        make, shape = models()[name]
        torch.manual_seed(1)
        features, labels = torch.randn(ROWS, *shape), torch.randint(0, 10, (ROWS,))
        model, data = make().to(device), TensorDataset(features, labels)
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
            data_loader=DataLoader(data, batch_size=BATCH),
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
        )
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.loss: Any = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
        if audit:
            self.optimizer = audited(self.optimizer, self.model, data_loader=self.loader, **options)
        self._physical, self._device = physical, device
        self._batches = self._forever()

    def _forever(self) -> Any:
        while True:
            if self._physical is None:
                yield from self.loader
                continue
            with BatchMemoryManager(
                data_loader=self.loader, max_physical_batch_size=self._physical, optimizer=self.optimizer
            ) as smaller:
                yield from smaller

    def steps(self, count: int) -> Times:
        """Seconds for each of this many steps."""
        start, done = Times.now(), 0
        while done < count:
            features, labels = (part.to(self._device) for part in next(self._batches))
            self.optimizer.zero_grad()
            self.loss(self.model(features), labels).backward()
            self.optimizer.step()
            done += not self.optimizer._is_last_step_skipped
        if self._device != "cpu":
            torch.cuda.synchronize()
        return start.until_now(count)

    def floor(self) -> float:
        """Seconds of the processor for what no audit of this step avoids."""
        dim = sum(p.numel() for p in self.optimizer.params)
        rows = [torch.randn(BATCH, p.numel()) for p in self.optimizer.params]
        canaries = RotatedCanaries(1, dim, seed=1)
        vectors, kept = np.ones((2, dim), np.float32), np.ones((BATCH // 4, dim), np.float32)
        taken = []
        for _ in range(5):
            start = time.thread_time()
            factors = (1 / torch.stack([row.norm(2, dim=1) for row in rows]).norm(2, dim=0)).clamp(max=1.0)
            _ = [factors @ row for row in rows]
            _ = [canaries.cosines(vector) for vector in vectors]
            _ = kept.sum(axis=0)
            taken.append(time.thread_time() - start)
        return statistics.median(taken)


def measure(case: Case, *, pairs: int, stretch: int, **options: Any) -> dict[str, Any]:
    """Median seconds of a step without and with the audit, their shares, the floor, and the seconds of `finish`."""
    loop: dict[str, Any] = {"mode": case.mode, "physical": case.physical}
    if "device" in options:
        loop["device"] = options.pop("device")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        settings: dict[str, Any] = {
            "canaries": case.canaries,
            "seed": b"a benchmark's seed",
            "delta": 1e-5,
            "claim": 8.0,
            "progress": case.progress,
        } | options
        if case.all_through_clip:
            settings["through_clip"] = "all"
        loops = {
            False: Loop(case.model, audit=False, **loop),
            True: Loop(case.model, audit=True, directory=folder, **loop, **settings),
        }
        taken: dict[bool, list[Times]] = {False: [], True: []}
        for each in loops.values():
            each.steps(WARM_UP)
        for pair in range(pairs):
            for audit in (False, True) if pair % 2 else (True, False):
                taken[audit].append(loops[audit].steps(stretch))
        start = Times.now()
        loops[True].optimizer.audit.finish()
        finish = start.until_now(1)
        loops[True].optimizer.audit.close()
        row: dict[str, Any] = case._asdict() | {
            "parameters": sum(p.numel() for p in loops[False].model.parameters()),
            "floor": 0.0 if "device" in loop else loops[False].floor(),
            "finish": finish._asdict(),
        }
    for kind in Times._fields:
        plain, whole = (statistics.median(getattr(times, kind) for times in taken[audit]) for audit in (False, True))
        row |= {f"plain_{kind}": plain, f"audited_{kind}": whole, f"share_{kind}": whole / plain - 1}
    return row


def main(arguments: list[str] | None = None) -> int:
    """Print the shares next to their bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["mlp", "mnist-cnn", "wide-mlp"])
    parser.add_argument("--first", type=int, default=len(CASES), help="only the first cases of the list")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--stretch", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write all rows into this file")
    given = parser.parse_args([] if arguments is None else arguments)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in CASES[: given.first]:
            if case.model in given.models:
                stretch = max(given.stretch // 5, 1) if case.model == "wide-mlp" else given.stretch
                rows.append(measure(case, pairs=given.pairs, stretch=stretch))
                print(_line(case, rows[-1]), flush=True)
                if given.json:
                    given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["bar"] is not None and _misses(row) for row in rows))


def _misses(row: dict[str, Any]) -> bool:
    return bool(row["share_wall"] > row["bar"] or row["finish"]["wall"] > FINISH_BAR)


def _line(case: Case, row: dict[str, Any]) -> str:
    finish, bar = row["finish"], "no bar" if case.bar is None else f"bar {case.bar:.0%}"
    plain, audited, every, floor = (1e3 * row[name] for name in ("plain_wall", "audited_wall", "plain_all", "floor"))
    return (
        f"{case}: step {plain:.2f} ms, audited {audited:.2f} ms, {row['share_wall']:.0%} more ({bar}); "
        f"its own thread {row['share_own']:.0%}, all {row['share_all']:.0%} of {every:.2f} ms, floor {floor:.2f} ms; "
        f"finish {finish['wall']:.2f} s, {finish['all']:.2f} s of the processor (bar {FINISH_BAR} s)"
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
