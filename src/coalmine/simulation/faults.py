"""Broken privacy, on purpose: the faults that `coalmine selftest` puts into the training loop, and what catches each.

A fault replaces one of the loop's `Steps`; the loop itself knows nothing of faults. What each fault moves stands in
`coalmine.audit.signatures`, so that a report can say what is likely wrong.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coalmine.audit.audit import derive_result
from coalmine.audit.gauge import Gauge
from coalmine.audit.result import AuditResult
from coalmine.audit.rounds import WithoutOthers
from coalmine.audit.signatures import SIGNATURES, Signature
from coalmine.audit.verdict import Claim
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.simulation.config import CanarySettings, ParticipationSettings, PrivacySettings, RunConfig
from coalmine.simulation.engines import ClientSettings
from coalmine.simulation.run import prepared
from coalmine.simulation.training import Steps, average, gaussian_noise


@dataclass(frozen=True)
class Trial:
    """One run with a fault: what the audit says against the analytical claim, with `others` known and without."""

    fault: Signature
    seed: int
    claim: float
    result: AuditResult
    blind: AuditResult  # the same run seen by somebody who does not know the others
    signal: tuple[float, ...]  # of each round: length of the real clients' part over that of the claimed noise

    @property
    def outcome(self) -> str:
        return self.result.verdict.outcome if self.result.verdict else ""

    @property
    def caught(self) -> bool:
        return bool(evidence(self.result))


@dataclass(frozen=True, kw_only=True)
class Margin:
    """What one rung or gauge reads, and the limit that an honest run keeps to: of a rung, epsilon and the claim."""

    by: str
    reading: float
    limit: float

    @property
    def times(self) -> float:
        """How many times the limit the reading is, or the limit the reading."""
        small, large = sorted((abs(self.reading), abs(self.limit)))
        return large / small if small else math.inf


def margins(result: AuditResult) -> list[Margin]:
    """What speaks against the claim, and by how much: rungs that refute it, gauges outside of their limits."""
    claim = result.claim.epsilon if result.claim else math.nan
    rungs = [
        Margin(by=name, reading=float(rung.headline.estimate.epsilon), limit=claim)
        for name, rung in result.adversaries.items()
        if rung.verdict and rung.verdict.outcome == "VIOLATION"
    ]
    return rungs + [_gauge_margin(gauge) for gauge in result.gauges if gauge.status != "ok"]


def _gauge_margin(gauge: Gauge) -> Margin:
    """The gauge's reading that is furthest outside; of a ratio that was too low and too high, the low one is the proof."""
    low, high = gauge.limits
    below = low - gauge.smallest > gauge.largest - high or (low >= 0 and gauge.status == "low")
    reading, limit = (gauge.smallest, low) if below else (gauge.largest, high)
    return Margin(by=f"{gauge.name} gauge", reading=reading, limit=limit)


def evidence(result: AuditResult) -> list[str]:
    """What speaks against the claim: rungs that refute it, gauges outside of their limits."""
    return [margin.by for margin in margins(result)]


def selftest_config(seed: int) -> RunConfig:
    """A run of a second: all 200 clients of the digits in each of 10 rounds.

    They train until their updates point much the same way and are several times the clip norm: so their sum is longer
    than the noise, and an average of unclipped updates longer than the clip norm.
    """
    return RunConfig(
        rounds=10,
        seed=seed,
        evaluate_every=10,
        participation=ParticipationSettings(clients_per_round=200),
        client=ClientSettings(epochs=4, learning_rate=0.3),
        privacy=PrivacySettings(noise_multiplier=0.8, clip_norm=0.2),
        canaries=CanarySettings(count=1000),
    )


def try_fault(fault: Signature, seed: int) -> Trial:
    """Train with the fault, and let the audit judge the analytical claim."""
    config = selftest_config(seed)
    config = replace(config, engine=config.engine.resolved())
    if fault.name in SCALES:
        config = replace(config, canaries=replace(config.canaries, scale=SCALES[fault.name]))
    signal: list[float] = []
    with prepared(config, None, _measured(STEPS[fault.name](), config.privacy, signal)) as training:
        state = training.initial_state()
        for _ in training.rounds(state):
            pass
        training.audit.observe_final(state.model_vector, initial=training.initial_vector())
        epsilon = float(mechanism_epsilon(config.privacy.noise_multiplier, delta=config.privacy.delta))
        claim = Claim(epsilon=epsilon, participations=1)
        log, settings = training.audit.log, training.audit.settings
        return Trial(
            fault,
            seed,
            epsilon,
            derive_result(log, settings, claim=claim, analytical_epsilon=epsilon),
            derive_result(WithoutOthers(log), settings, claim=claim, analytical_epsilon=epsilon),
            tuple(signal),
        )


def _measured(steps: Steps, privacy: PrivacySettings, signal: list[float]) -> Steps:
    """The same steps; each round adds to `signal` how long the others' part is, in lengths of the claimed noise."""

    def others(clients: Tensor, count: float) -> Tensor:
        part = steps.others(clients, count)
        noise_length = privacy.noise_multiplier * privacy.clip_norm / count * math.sqrt(len(part))
        signal.append(float(torch.linalg.vector_norm(part)) / noise_length)
        return part

    return replace(steps, others=others)


def _noise(change: Callable[[Tensor], Tensor]) -> Callable[[], Steps]:
    return lambda: Steps(noise=lambda std, like, generator: change(gaussian_noise(std, like, generator)))


def _silenced(noise: Tensor, keep: slice) -> Tensor:
    quiet = torch.zeros_like(noise)
    quiet[keep] = noise[keep]
    return quiet


def _reused() -> Steps:
    def noise(std: float, like: Tensor, generator: torch.Generator) -> Tensor:
        return gaussian_noise(std, like, torch.Generator(device=like.device).manual_seed(1))

    return Steps(noise=noise)


def _unclipped(norms: Tensor, clip_norm: float) -> Tensor:
    return torch.ones_like(norms)


def _clip_after_averaging() -> Steps:
    """Noise for clipped updates on an average that was clipped as a whole; the others are known as they were sent."""

    def aggregate(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
        mean = (clients + canaries) / count
        return mean * torch.clamp(clip_norm / torch.linalg.vector_norm(mean), max=1.0) + noise / count

    return Steps(clip=_unclipped, aggregate=aggregate)


def _noise_after_adam() -> Steps:
    """An adaptive optimiser scales every coordinate up first; the noise was sized for the average.

    The attacker who knows the others knows what the optimiser made of them, too.
    """
    moments: dict[str, Tensor] = {}

    def moved(name: str, value: Tensor, decay: float) -> Tensor:
        moments[name] = decay * moments.get(name, torch.zeros_like(value)) + (1 - decay) * value
        return moments[name]

    def scaled(first: Tensor) -> Tensor:
        return 0.1 * first / (moments["second"].sqrt() + 1e-3)

    def aggregate(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
        mean = (clients + canaries) / count
        moved("second", mean * mean, 0.99)
        return scaled(moved("first", mean, 0.9)) + noise / count

    def others(clients: Tensor, count: float) -> Tensor:
        return scaled(moved("others", clients / count, 0.9))

    return Steps(aggregate=aggregate, others=others)


def _canaries_twice() -> Steps:
    return Steps(aggregate=lambda clients, canaries, *rest: average(clients, 2 * canaries, *rest))


def _by_examples() -> Steps:
    return Steps(weigh=lambda examples: examples.float() / MEAN_EXAMPLES)


def _mean_declared() -> Steps:
    def weigh(examples: Tensor) -> Tensor:
        declared = examples if len(examples) == CLIENTS else torch.full_like(examples, MEAN_EXAMPLES)
        return declared.float() / MEAN_EXAMPLES

    return Steps(weigh=weigh)


def _one_client_twice() -> Steps:
    def weigh(examples: Tensor) -> Tensor:
        weights = torch.ones_like(examples, dtype=torch.float32)
        if len(weights) == CLIENTS:  # the canaries are weighed apart
            weights[0] = 2
        return weights

    return Steps(weigh=weigh)


CLIENTS, MEAN_EXAMPLES = 200, 1500 / 200  # of the digits
LAST_WEIGHT, LAST_BIAS = 128 * 10, 10  # numbers in the last layer of their model
SCALES = {"clip-forgotten-at-scale-1": 1.0}  # what canaries send, in clip norms, where it is not the default

STEPS: dict[str, Callable[[], Steps]] = {
    "honest": Steps,
    "clip-forgotten": lambda: Steps(clip=_unclipped),
    "clip-after-averaging": _clip_after_averaging,
    "noise-over-n": _noise(lambda noise: noise / CLIENTS),
    "noise-over-2": _noise(lambda noise: noise / 2),
    "noise-over-root-2": _noise(lambda noise: noise / math.sqrt(2)),
    "noise-times-n": _noise(lambda noise: noise * CLIENTS),
    "noise-reused": _reused,
    "noise-on-half": _noise(lambda noise: _silenced(noise, slice(len(noise) // 2))),
    "noise-on-90-percent": _noise(lambda noise: _silenced(noise, slice(len(noise) // 10, None))),
    "noise-on-one-layer": _noise(lambda noise: _silenced(noise, slice(-LAST_WEIGHT - LAST_BIAS, -LAST_BIAS))),
    "small-tensor-without-noise": _noise(lambda noise: _silenced(noise, slice(-LAST_BIAS))),
    "noise-after-adam": _noise_after_adam,
    "canaries-twice": _canaries_twice,
    "weighted-by-examples": _by_examples,
    "one-client-twice": _one_client_twice,
    "clip-forgotten-at-scale-1": lambda: Steps(clip=_unclipped),
    "weighted-mean-declared": _mean_declared,
}
assert set(STEPS) == {signature.name for signature in SIGNATURES}
