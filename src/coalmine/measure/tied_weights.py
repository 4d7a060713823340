"""Parameters that share memory: a canary in one of them would be in the other, too."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from coalmine.canaries.array_types import is_tensor


@dataclass(frozen=True)
class Memory:
    """The memory of a leaf: the addresses of its first and last number, and whether it owns all numbers between them."""

    name: str
    space: str
    low: int
    high: int
    dense: bool

    def shares(self, other: "Memory") -> bool:
        """Whether two leaves share a number. Also False where the strides make that hard to decide."""
        if self.space != other.space or self.high < other.low or other.high < self.low:
            return False
        if self.low == other.low or self.high == other.high or (self.dense and other.dense):
            return True
        return self._surrounds(other) or other._surrounds(self)

    def _surrounds(self, other: "Memory") -> bool:
        return self.dense and (self.low <= other.low <= self.high or self.low <= other.high <= self.high)


def memory_of(name: str, value: Any) -> Memory | None:
    """The memory of a tensor or numpy array. None for jax arrays: they are immutable, so no two names share a parameter."""
    if is_tensor(value):
        local = value.to_local() if hasattr(value, "to_local") else value
        width, space = local.element_size(), str(local.device)
        steps = [width * step * (size - 1) for size, step in zip(local.shape, local.stride(), strict=True)]
        start, count = local.data_ptr(), local.numel()
    elif isinstance(value, np.ndarray):
        width, space, count = value.itemsize, "host", value.size
        steps = [step * (size - 1) for size, step in zip(value.shape, value.strides, strict=True)]
        start = value.__array_interface__["data"][0]
    else:
        return None
    low = start + sum(step for step in steps if step < 0)
    high = start + sum(step for step in steps if step > 0)
    return Memory(name, space, low, high, high - low + width <= count * width)


def check_tied_weights(leaves: list[Memory]) -> None:
    """Raise ValueError if two names share a parameter."""
    candidates: list[Memory] = []  # earlier leaves that may overlap the current one
    for leaf in sorted(leaves, key=lambda leaf: (leaf.space, leaf.low)):
        candidates = [other for other in candidates if other.space == leaf.space and other.high >= leaf.low]
        for other in candidates:
            if leaf.shares(other):
                one, two = sorted((leaf, other), key=leaves.index)
                raise ValueError(
                    f"parameters must not share memory, but {one.name} and {two.name} do (tied weights): "
                    "leave one of them out"
                )
        candidates.append(leaf)
