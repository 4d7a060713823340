"""The noise of each round: fresh Gaussian noise, DP-FTRL's tree, or banded matrix factorisation, behind one protocol.

All of it is made of normal numbers that are a function of (seed, index), so nothing need be saved and a run that was killed
goes on with the noise it would have had.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from coalmine.estimators.correlated import BandedNoise, CorrelatedNoise, TreeNoise

NOISES = ("gaussian", "tree", "banded")
Draw = Callable[[float, int], Tensor]  # normal numbers of this std, the same for the same index


def gaussian_noise(std: float, like: Tensor, generator: torch.Generator) -> Tensor:
    """Z(t): new normal numbers of this std, one for each parameter."""
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype).mul_(std)


def noised_average(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
    """ρ̄: the clipped sums of the clients and of the canaries, and the noise, over their number (Algorithm 3)."""
    return (clients + canaries + noise) / count


class Noise(Protocol):
    """The noise of a run."""

    @property
    def law(self) -> CorrelatedNoise | None:
        """How its rounds hang together, None where each is fresh."""
        ...

    def of_round(self, round_number: int, std: float, draw: Draw) -> Tensor:
        """The noise of a round's sum where noise multiplier times clip norm is `std`."""
        ...


class FreshNoise:
    """Gaussian noise, new in every round."""

    law = None

    def of_round(self, round_number: int, std: float, draw: Draw) -> Tensor:
        return draw(std, round_number)


class DrawnTreeNoise:
    """N_t − N_{t−1}: the noise of node t less that of the nodes it takes in. Two draws a round on average, none kept."""

    def __init__(self, law: TreeNoise) -> None:
        self.law = law

    def of_round(self, round_number: int, std: float, draw: Draw) -> Tensor:
        noise = draw(std, round_number)
        for node in self.law.children(round_number):
            noise -= draw(std, node)
        return noise


class DrawnBandedNoise:
    """C⁻¹ζ, row by row: ζ_t less the bands of the last rounds' noises, which are kept.

    C⁻¹ has no bands, so these noises rest on every ζ so far. As many tensors of the model's size stay in memory as there are
    bands, less one; the checkpoint has none of them. Asked for a round that does not follow the last one, as after a
    resumption, it goes through the rounds again: one draw each, with the same bits.
    """

    def __init__(self, law: BandedNoise) -> None:
        self.law = law
        self._unit = [float(value) for value in law.unit]
        self._recent: deque[Tensor] = deque(maxlen=max(law.bands - 1, 1))  # the last round's first
        self._last = 0

    def of_round(self, round_number: int, std: float, draw: Draw) -> Tensor:
        if round_number <= self._last:
            self._recent.clear()
            self._last = 0
        for number in range(self._last + 1, round_number + 1):
            row = draw(1.0, number)
            for before, coefficient in zip(self._recent, self._unit[1:], strict=False):
                row.sub_(before, alpha=coefficient)
            row.div_(self._unit[0])
            self._recent.appendleft(row)
        self._last = round_number
        return self._recent[0] * (std * self.law.column_norm(round_number))


def noise_law(
    kind: str, *, rounds: int, bands: int | None, restart: int | None, momentum: float
) -> CorrelatedNoise | None:
    """How the noise of rounds hangs together; bands are those for a server of this momentum."""
    if kind == "tree":
        return TreeNoise(rounds=rounds, restart=restart)
    if kind == "banded":
        return BandedNoise.for_prefix_sums(rounds, bands=1 if bands is None else bands, momentum=momentum)
    return None


def noise_spread(law: CorrelatedNoise | None, round_number: int) -> float:
    """The std of a round's noise over noise multiplier times clip norm."""
    return 1.0 if law is None else law.std(round_number)


def drawn(law: CorrelatedNoise | None) -> Noise:
    """The noise of this law."""
    if law is None:
        return FreshNoise()
    return DrawnTreeNoise(law) if isinstance(law, TreeNoise) else DrawnBandedNoise(law)
