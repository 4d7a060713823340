"""The clip norm S(t) of a round: fixed, or adapted to a quantile of the clients' norms (Andrew et al. 2021)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coalmine.argument_checks import one_number, unit_interval

CLIPPINGS = ("fixed", "adaptive")


def clip_factors(norms: Tensor, clip_norm: float) -> Tensor:
    """The factor for each update that brings its norm to at most `clip_norm` (Clip in Algorithm 2)."""
    return (clip_norm / norms).clamp(max=1.0)  # norm 0 gives inf, which the clamp makes 1


@dataclass(frozen=True)
class FixedClipping:
    """The same clip norm in every round; all noise goes to the updates."""

    clip_norm: float
    noise_multiplier: float

    @property
    def update_noise_multiplier(self) -> float:
        return self.noise_multiplier

    @property
    def count_noise_multiplier(self) -> float:
        """Infinite: no count is released."""
        return math.inf

    def next_norm(self, clip_norm: float, below: float, participants: float, generator: torch.Generator) -> float:
        return clip_norm


@dataclass(frozen=True)
class AdaptiveClipping:
    """The clip norm follows the `quantile` of the norms: C ← C · exp(−rate · (share of norms ≤ C − quantile)).

    The share is a noised count divided by the same n as the updates. Each participant adds ½ or −½ to the centred count,
    so a count with noise std σ_b = `count_noise` has noise multiplier 2σ_b. The updates get the rest of the budget,
    z_Δ = (z⁻² − (2σ_b)⁻²)^−½. Together they are one Gaussian mechanism with noise multiplier z.
    """

    clip_norm: float  # of the first round
    noise_multiplier: float
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float = 1.0

    def __post_init__(self) -> None:
        unit_interval("privacy.quantile", self.quantile)
        one_number("privacy.clip_rate", self.rate)
        if self.count_noise < 0 or (self.noise_multiplier and 2 * self.count_noise <= self.noise_multiplier):
            raise ValueError(
                f"the noise of the count must be above half of the noise multiplier, {self.noise_multiplier / 2:g}, "
                f"got {self.count_noise:g}: nothing would be left for the updates"
            )

    @property
    def update_noise_multiplier(self) -> float:
        """z_Δ, a little above the total noise multiplier z."""
        if not self.noise_multiplier:
            return 0.0
        return float((self.noise_multiplier**-2 - (2 * self.count_noise) ** -2) ** -0.5)

    @property
    def count_noise_multiplier(self) -> float:
        """2σ_b, or 0 without noise."""
        return 2 * self.count_noise if self.noise_multiplier else 0.0

    def next_norm(self, clip_norm: float, below: float, participants: float, generator: torch.Generator) -> float:
        """The next clip norm, from the number of norms `below` the current one; canaries count like clients."""
        noise = float(torch.randn((), generator=generator, dtype=torch.float64)) * self.count_noise
        share = (below + noise * bool(self.noise_multiplier)) / participants
        return clip_norm * math.exp(-self.rate * (share - self.quantile))


Clipping = FixedClipping | AdaptiveClipping
