"""Options of an experiment: its scale, its folder, and which part of it to run."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from coalmine.argument_checks import short_repr, whole_number

RUNS = ("device", "data_dir", "only", "rounds", "max_examples", "originals", "minutes")  # options of grids of runs

Scale = Literal["small", "paper"]
PAPER_ONLY = ("max_examples", "originals")  # scale small has a fixed, small number of examples


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `python -m reproduction`. None or empty means the default of the scale.

    `only` are the noise multipliers to train with; finished runs of others are still read. `max_examples` is the
    largest number of examples that a client trains on in a round. `originals` selects the paper's data instead of their
    substitutes. After `ends`, no further run is started, and the current one stops at its next checkpoint.
    """

    out: Path
    scale: Scale = "small"
    device: str = "auto"
    data_dir: str | None = None
    only: tuple[float, ...] = ()
    rounds: int | None = None
    seeds: int | None = None
    max_examples: int | None = None
    originals: bool = False
    jobs: int = 1
    ends: float = math.inf  # in time.monotonic() seconds

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise ValueError(f"scale must be small or paper, got {short_repr(self.scale)}")
        for name in ("rounds", "seeds", "max_examples"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), minimum=1)
        whole_number("jobs", self.jobs, minimum=1)
        for name in PAPER_ONLY:
            if self.small and getattr(self, name):
                raise ValueError(f"{name} is for scale paper only, got scale small")

    @property
    def small(self) -> bool:
        return self.scale == "small"

    @property
    def over(self) -> bool:
        """Whether the time limit is over."""
        return time.monotonic() > self.ends

    def wanted(self, noise_multiplier: float) -> bool:
        """Whether to train runs with this noise."""
        return not self.only or any(abs(noise_multiplier - asked) < 1e-9 for asked in self.only)

    def file(self, name: str, suffix: str) -> Path:
        """The file of an experiment's numbers or plot; changed options give other file names."""
        parts = [name, self.scale]
        if self.max_examples is not None:
            parts.append(f"{self.max_examples}-examples")
        if self.rounds is not None:
            parts.append(f"{self.rounds}-rounds")
        if self.originals:
            parts.append("originals")
        return self.out / f"{'-'.join(parts)}.{suffix}"
