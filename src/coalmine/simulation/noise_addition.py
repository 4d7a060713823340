"""The noise that the server adds in each round: independent Gaussian, DP-FTRL's tree, or banded matrix factorisation.

All noise is made from normal numbers that are a function of (seed, index). So noise is never saved, and a resumed run adds
the same noise as a run that was never stopped.
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
    """Z(t): independent normal numbers of this std, one for each parameter."""
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype).mul_(std)


def noised_average(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
    """ρ̄: the clipped sums of clients and canaries plus noise, divided by the number of participants (Algorithm 3)."""
    return (clients + canaries + noise) / count


class Noise(Protocol):
    """The noise of a run."""

    @property
    def law(self) -> CorrelatedNoise | None:
        """The correlation across rounds; None for independent noise."""
        ...

    def of_round(self, round_number: int, std: float, draw: Draw) -> Tensor:
        """The noise for a round's sum; `std` is noise multiplier times clip norm."""
        ...


class IndependentNoise:
    """Gaussian noise, independent in every round."""

    law = None

    def of_round(self, round_number: int, std: float, draw: Draw) -> Tensor:
        return draw(std, round_number)


class TreeNoiseSource:
    """N_t − N_{t−1}: the noise of node t minus that of its children.

    A round takes two draws on average, and none is kept.
    """

    def __init__(self, law: TreeNoise) -> None:
        self.law = law

    def of_round(self, round_number: int, std: float, draw: Draw) -> Tensor:
        noise = draw(std, round_number)
        for node in self.law.children(round_number):
            noise -= draw(std, node)
        return noise


class BandedNoiseSource:
    """C⁻¹ζ, row by row: ζ_t minus the bands times the noise of the last rounds.

    C⁻¹ is not banded, so this noise depends on every ζ so far. With b bands, b − 1 tensors of the model's size stay in
    memory; checkpoints do not store them. After a resume, or for a round that does not follow the last one, the noise of
    earlier rounds is drawn again, bit for bit.
    """

    def __init__(self, law: BandedNoise) -> None:
        self.law = law
        self._unit = [float(value) for value in law.unit]
        self._recent: deque[Tensor] = deque(maxlen=max(law.bands - 1, 1))  # last round first
        self._last = 0

    def of_round(self, round_number: int, std: float, draw: Draw) -> Tensor:
        if round_number <= self._last:
            self._recent.clear()
            self._last = 0
        for number in range(self._last + 1, round_number + 1):
            row = draw(1.0, number)
            for previous, coefficient in zip(self._recent, self._unit[1:], strict=False):
                row.sub_(previous, alpha=coefficient)
            row.div_(self._unit[0])
            self._recent.appendleft(row)
        self._last = round_number
        return self._recent[0] * (std * self.law.column_norm(round_number))


def noise_law(
    kind: str, *, rounds: int, bands: int | None, restart: int | None, momentum: float
) -> CorrelatedNoise | None:
    """The correlation of the noise across rounds; bands are optimised for this server momentum."""
    if kind == "tree":
        return TreeNoise(rounds=rounds, restart=restart)
    if kind == "banded":
        return BandedNoise.for_prefix_sums(rounds, bands=1 if bands is None else bands, momentum=momentum)
    return None


def noise_spread(law: CorrelatedNoise | None, round_number: int) -> float:
    """The std of a round's noise divided by noise multiplier times clip norm."""
    return 1.0 if law is None else law.std(round_number)


def noise_of(law: CorrelatedNoise | None) -> Noise:
    """The noise with this correlation."""
    if law is None:
        return IndependentNoise()
    return TreeNoiseSource(law) if isinstance(law, TreeNoise) else BandedNoiseSource(law)
