"""The table in docs/evidence/clip.md: how soon a faulty clip is seen, with four canaries of a step through it and with all.

    python -m studies.clip_faults                  takes some minutes
    python -m studies.clip_faults --write-docs     also writes the table into docs/evidence/clip.md

Opacus trains 9,648 parameters on 1,000 rows, 100 in an average step, with 300 canaries, and claims its accountant's epsilon.
Runs of 2, 5, 10, 20 and 40 steps have a fault each. The table has the fewest steps of a run that does not pass, and of one
that is a VIOLATION, the median of the seeds. The study fails if an honest run does not pass, or if a fault passes after 40
steps with all canaries through the clip.
"""

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "evidence" / "clip.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
STEPS = (2, 5, 10, 20, 40)
NEVER = 10**6
WAYS = {"4": True, "all": "all"}
SETTINGS = {"examples": 1_000, "batch": 100, "canaries": 300, "observe": True}


def longer(factor: float, every: int = 1) -> Callable[[Any], None]:
    """A clip at `factor` times its norm, in one of `every` steps."""

    def fault(optimizer: Any) -> None:
        real, calls = optimizer.clip_and_accumulate, [0]

        def clip() -> None:
            norm = optimizer.max_grad_norm
            if optimizer.params[0].summed_grad is None:  # the first batch of a step
                calls[0] += 1
            optimizer.max_grad_norm = norm * (factor if calls[0] % every == 0 else 1)
            real()
            optimizer.max_grad_norm = norm

        optimizer.clip_and_accumulate = clip

    return fault


def by_tensor(optimizer: Any) -> None:
    """Clip each tensor of an example by itself, at the norm of the whole."""

    def clip() -> None:
        for p in optimizer.params:
            rows = p.grad_sample.reshape(len(p.grad_sample), -1)
            factors = (optimizer.max_grad_norm / (rows.norm(dim=1) + 1e-6)).clamp(max=1.0)
            total = (factors @ rows).view_as(p)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total

    optimizer.clip_and_accumulate = clip


def by_batch(optimizer: Any) -> None:
    """Clip the mean of a batch instead of its examples."""

    def clip() -> None:
        rows = [p.grad_sample.reshape(len(p.grad_sample), -1) for p in optimizer.params]
        count = max(len(rows[0]), 1)
        length = sum(float(part.sum(0).square().sum()) for part in rows) ** 0.5 / count
        factor = min(1.0, float(optimizer.max_grad_norm) / max(length, 1e-9))
        for p, part in zip(optimizer.params, rows, strict=True):
            total = (factor * part.sum(0)).view_as(p)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total

    optimizer.clip_and_accumulate = clip


FAULTS: dict[str, Callable[[Any], None] | None] = {
    "none": None,
    "no clip": longer(1e9),
    "clip at twice the norm": longer(2.0),
    "clip at 1.3 times the norm": longer(1.3),
    "no clip in one step of five": longer(1e9, every=5),
    "each tensor clipped by itself": by_tensor,
    "the batch's mean clipped, not its examples": by_batch,
}


def soonest(fault: Callable[[Any], None] | None, through_clip: Any, seed: int) -> tuple[int, int]:
    """The fewest steps of a run that does not pass, and of one that is a VIOLATION."""
    from opacus_training import train

    doubted = NEVER
    for steps in STEPS:
        outcome = train(fault=fault, through_clip=through_clip, steps=steps, seed=seed, **SETTINGS)[1].verdict.outcome
        if outcome == "VIOLATION" or (outcome != "PASS" and steps > STEPS[0]):
            doubted = min(doubted, steps)
        if outcome == "VIOLATION":
            return doubted, steps
    return doubted, NEVER


def table(seeds: int) -> tuple[str, bool]:
    """The table in Markdown, and whether all is as it should be."""
    lines = ["| fault | 4: not PASS | 4: VIOLATION | all: not PASS | all: VIOLATION |", "|---|---|---|---|---|"]
    good = True
    for name, fault in FAULTS.items():
        cells = []
        for way, through_clip in WAYS.items():
            found = [soonest(fault, through_clip, seed) for seed in range(seeds)]
            doubted, refuted = (int(statistics.median_high(column)) for column in zip(*found, strict=True))
            cells += [_steps(doubted), _steps(refuted)]
            good &= doubted == NEVER if fault is None else (way != "all" or doubted < NEVER)
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines), good


def _steps(steps: int) -> str:
    return "–" if steps == NEVER else str(steps)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a run was judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/evidence/clip.md")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT / "tests" / "integrations"))
    warnings.simplefilter("ignore")
    found, good = table(options.seeds)
    if options.write_docs:
        text = DOCS.read_text()
        before, rest = text.split(BEGIN)
        DOCS.write_text(before + BEGIN + "\n" + found + "\n" + END + rest.split(END)[1])
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
