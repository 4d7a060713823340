"""Small honest and broken training loops, as a user would write them, to test verdicts on.

A pipeline is DP-FedAvg on a drifting real signal. A fault replaces the noise or the loop's inputs to the audit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coalmine import Audit, AuditResult, Claim, mechanism_epsilon

Draw = Callable[["Noise"], np.ndarray]


@dataclass
class Noise:
    """Inputs for a fault that generates the noise of one round, with standard deviation 1; the loop scales it."""

    rng: np.random.Generator
    dim: int
    number: int
    rounds: int
    signal: np.ndarray
    kept: dict[str, Any]

    def normal(self, size: int | None = None) -> np.ndarray:
        return self.rng.standard_normal(self.dim if size is None else size)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One loop. `noise` generates the noise, `release` rounds the output, `tell` changes the audit's inputs."""

    dim: int = 4096
    canaries: int = 400
    rounds: int = 20
    presentations: int = 1
    noise_multiplier: float = 1.0
    clients: int = 100
    clip_norm: float = 1.0
    signal: float = 1.0
    law: str = "normal"  # law of the real signal: normal, heavy, sparse
    missing: float = 0.0  # share of the clients, with their own signals, missing from `others`
    layers: int = 2  # declared to the audit; a single one is not
    momentum: float = 0.0
    draw: Draw = field(default=lambda noise: noise.normal())
    release: Callable[[np.ndarray], np.ndarray] = field(default=lambda delta: delta)
    tell: Callable[[dict[str, Any], Noise], dict[str, Any]] = field(default=lambda told, noise: told)
    sample: Callable[[Audit, int, np.random.Generator], Any] | None = None
    size: Callable[[int], int] | None = None  # divisor, by the number of present canaries
    lost: float = 0.0  # share of the canaries that never arrive
    declared: bool = True
    correlated: Any = None
    observed: Callable[[int], bool] = field(default=lambda number: True)

    def audit(self, seed: int) -> Audit:
        """The finished audit of one run."""
        rng = np.random.default_rng([seed, 12])
        planned = self.rounds if self.sample is None else None
        sizes = [self.dim // self.layers] * self.layers
        sizes[-1] += self.dim - sum(sizes)
        audit = Audit(
            self.dim, canaries=self.canaries, seed=seed, delta=1e-6, rounds=planned, momentum=self.momentum,
            presentations=self.presentations if self.sample is None else 1, noise=self.correlated,
            layers=[(f"layer{i}", size) for i, size in enumerate(sizes)] if self.layers > 1 else None,
        )  # fmt: skip
        gone = set(np.flatnonzero(rng.random(self.canaries) < self.lost).tolist())
        drift, velocity, kept = self._signal(rng), np.zeros(self.dim), {}
        absent = self._signal(rng) if self.missing else np.zeros(self.dim)
        generator = None if self.correlated is None else _CorrelatedDraws(self.correlated)
        for number in range(1, self.rounds + 1):
            drift = 0.9 * drift + np.sqrt(1 - 0.81) * self._signal(rng)
            if self.missing:
                absent = 0.9 * absent + np.sqrt(1 - 0.81) * self._signal(rng)
            present = self.sample(audit, number, rng) if self.sample else audit.canaries_in_round(number)
            n = self.clients + len(present)
            std = self.noise_multiplier * self.clip_norm
            known = self.signal * std * np.sqrt(1 - self.missing) * drift
            clients = known + self.signal * std * np.sqrt(self.missing) * absent
            noise = Noise(rng, self.dim, number, self.rounds, drift, kept)
            spread = 1.0
            if generator is None:
                drawn = self.draw(noise)
            else:
                drawn, spread = generator.draw(number, noise.normal), self.correlated.std(number)
            arrived = [i for i in present if int(i) not in gone]
            canaries = audit.updates(arrived, self.clip_norm)
            delta = self.release((clients + canaries + std * drawn) / n)
            velocity = self.momentum * velocity + delta
            told = {
                "model_delta": velocity if self.momentum else delta,
                "others": known / n,
                "noise_std": std * spread / n,
                "clip_norm": self.clip_norm / n if self.declared else None,
            }
            told = self.tell(told, noise)
            if self.observed(number):
                audit.observe_round(number, present=present, **told)
        return audit

    def claim(self) -> Claim:
        """The true claim of an honest run; under correlated noise, for a client who moves CX by one clip norm."""
        if self.correlated is not None:
            return Claim(epsilon=float(mechanism_epsilon(self.noise_multiplier, delta=1e-6)), sensitivity=1.0)
        epsilon = mechanism_epsilon(self.noise_multiplier, delta=1e-6, participations=self.presentations)
        return Claim(epsilon=float(epsilon), participations=self.presentations)

    def result(self, seed: int, claim: Claim | float | None = None) -> AuditResult:
        return self.audit(seed).result(claim=self.claim() if claim is None else claim)

    def but(self, **changes: Any) -> "Pipeline":
        return replace(self, **changes)

    def _signal(self, rng: np.random.Generator) -> np.ndarray:
        if self.law == "heavy":
            return np.clip(rng.standard_t(1.5, self.dim), -1e3, 1e3)
        if self.law == "sparse":
            return rng.standard_normal(self.dim) * (rng.random(self.dim) < 0.01) * 10
        return rng.standard_normal(self.dim)


def half_precision(values: np.ndarray) -> np.ndarray:
    """Rounded to IEEE half precision."""
    return values.astype(np.float16).astype(np.float64)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16: the upper half of a single-precision number, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def fixed_point(step: float) -> Callable[[np.ndarray], np.ndarray]:
    """Rounded to multiples of `step`, like an aggregate in integers."""
    return lambda values: np.round(values / step) * step


def discrete_gaussian(step: float) -> Draw:
    """Multiples of `step` with probabilities proportional to a Gaussian density (Canonne et al. 2020)."""
    values = np.arange(-round(9 / step), round(9 / step) + 1) * step
    cumulative = np.cumsum(np.exp(-0.5 * values**2))
    cumulative /= cumulative[-1]
    return lambda noise: values[np.searchsorted(cumulative, noise.rng.random(noise.dim))]


class _CorrelatedDraws:
    """The noise of a TreeNoise or a BandedNoise, generated by the simulation's code."""

    def __init__(self, law: Any) -> None:
        from coalmine.simulation.noise_addition import noise_of

        self._noise = noise_of(law)

    def draw(self, number: int, normal: Callable[[], np.ndarray]) -> np.ndarray:
        import torch

        made = self._noise.of_round(
            number, 1.0, lambda size, index: torch.from_numpy(size * self._stream(index, normal))
        )
        return np.asarray(made)

    def _stream(self, index: int, normal: Callable[[], np.ndarray]) -> np.ndarray:
        self._kept = getattr(self, "_kept", {})
        if index not in self._kept:
            self._kept[index] = normal()
        return self._kept[index]
