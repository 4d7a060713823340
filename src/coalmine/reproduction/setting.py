"""How an experiment is to be run: at which scale, where, and which part of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from coalmine.checks import shown, whole_number

Scale = Literal["small", "paper"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What `coalmine reproduce` was asked for. None or empty means: as the scale has it.

    `only` are the noise multipliers to train with; what other runs have finished is still read. `max_examples` is the
    most that a client trains on in a round. `originals` asks for the paper's own data in the place of what stands in.
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
    processes: int = 1

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise ValueError(f"scale must be small or paper, got {shown(self.scale)}")
        for name in ("rounds", "seeds", "max_examples"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), minimum=1)
        whole_number("processes", self.processes, minimum=1)
        if self.originals and self.scale == "small":
            raise ValueError("originals are read at scale paper only, got scale small")

    @property
    def small(self) -> bool:
        return self.scale == "small"

    def wanted(self, noise_multiplier: float) -> bool:
        """Whether runs of this noise are to be trained."""
        return not self.only or any(abs(noise_multiplier - asked) < 1e-9 for asked in self.only)

    def file(self, name: str, suffix: str) -> Path:
        """Where the experiment of this name puts its numbers and its picture."""
        return self.out / f"{name}-{self.scale}.{suffix}"
