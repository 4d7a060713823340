"""Broken privacy, on purpose: the faults that `coalmine selftest` puts into the training loop, and what catches each.

A fault replaces one of the loop's `Steps`; the loop itself has no branch for faults. `coalmine.audit.signatures` lists what
each fault moves, so that a report can say what is likely wrong.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coalmine.audit.claim import Claim
from coalmine.audit.derivation import derive_result
from coalmine.audit.gauge import Gauge
from coalmine.audit.result import AuditResult
from coalmine.audit.signatures import SIGNATURES, Signature, likely_faults
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.simulation.config import CanarySettings, ParticipationSettings, PrivacySettings, RunConfig
from coalmine.simulation.dp_fedavg import Steps, clients_part
from coalmine.simulation.engines import ClientSettings
from coalmine.simulation.noise_addition import gaussian_noise, noised_average
from coalmine.simulation.training_run import prepared
from coalmine.storage.rounds_file import WithoutOthers


@dataclass(frozen=True)
class Trial:
    """One run with a fault: what the audit says against the analytical claim, with `others` known and without."""

    fault: Signature
    seed: int
    claim: float
    result: AuditResult
    blind: AuditResult  # the same run seen by somebody who does not know the others
    signal: tuple[float, ...]  # in each round: length of the real clients' part over that of the claimed noise

    @property
    def outcome(self) -> str:
        return self.result.verdict.outcome if self.result.verdict else ""

    @property
    def caught(self) -> bool:
        return is_caught(self.result)

    @property
    def named(self) -> bool:
        """Whether the likely faults of the result include this one, or one that means the same."""
        return self.fault.meaning in [fault.meaning for fault in likely_faults(self.result)]


@dataclass(frozen=True, kw_only=True)
class Margin:
    """What one rung or gauge reads, and the limit that an honest run keeps to: of a rung, epsilon and the claim.

    `pooled`: no round is outside of the limit by itself, only all of them together are.
    """

    by: str
    reading: float
    limit: float
    pooled: bool = False

    @property
    def times(self) -> float:
        """How many times the limit the reading is, or the limit the reading."""
        if self.pooled:
            return 1.0
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
    """The gauge's reading outside of its limits; of a ratio that is too low and too high, the low one is the proof.

    All rounds together can prove that noise is missing where no round by itself does. Then the margin is what the gauge
    leaves of the stated noise, for all of it.
    """
    low, high = gauge.limits
    by = f"{gauge.name} gauge"
    smallest, largest = gauge.smallest, gauge.largest
    if gauge.noise_left is None and low <= smallest <= largest <= high:  # one round is outside, not their mean
        smallest, largest = float(gauge.values.min()), float(gauge.values.max())
    if smallest < low and (low >= 0 or low - smallest >= largest - high):
        return Margin(by=by, reading=smallest, limit=low)
    if largest > high or gauge.noise_left is None:
        return Margin(by=by, reading=largest, limit=high, pooled=largest <= high)
    return Margin(by=by, reading=gauge.noise_left, limit=1.0)


def is_caught(result: AuditResult) -> bool:
    """Whether a rung or a gauge speaks against the claim, and the verdict is not PASS."""
    return bool(evidence(result)) and (result.verdict is None or result.verdict.outcome != "PASS")


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
    if fault.name in CONFIGS:
        config = CONFIGS[fault.name](config)
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
    """The same steps; each round adds to `signal` the length of the clients' part over that of the claimed noise.

    The clients' part is as long as the audit is told, as an optimiser may have scaled it, or as it was sent if that is
    longer, as the audit may be told too little.
    """

    def others(clients: Tensor, count: float) -> Tensor:
        told = steps.others(clients, count)
        noise_length = privacy.noise_multiplier * privacy.clip_norm / count * math.sqrt(len(clients))
        longer = max(float(torch.linalg.vector_norm(part)) for part in (told, clients_part(clients, count)))
        signal.append(longer / noise_length)
        return told

    return replace(steps, others=others)


def _noise(change: Callable[[Tensor], Tensor]) -> Callable[[], Steps]:
    """Standard normal numbers are changed before they are scaled to the claimed std."""
    return lambda: Steps(noise=lambda std, like, generator: std * change(gaussian_noise(1.0, like, generator)))


def _silenced(noise: Tensor, keep: slice) -> Tensor:
    quiet = torch.zeros_like(noise)
    quiet[keep] = noise[keep]
    return quiet


def _reused() -> Steps:
    def noise(std: float, like: Tensor, generator: torch.Generator) -> Tensor:
        return gaussian_noise(std, like, torch.Generator(device=like.device).manual_seed(1))

    return Steps(noise=noise)


def _uniform(normal: Tensor) -> Tensor:
    """Between -√3 and √3."""
    return math.sqrt(3) * torch.erf(normal / math.sqrt(2))


def _truncated(normal: Tensor) -> Tensor:
    """A Gaussian within ±1, rescaled to variance 1."""
    inside = math.erf(1 / math.sqrt(2))
    values = math.sqrt(2) * torch.erfinv(inside * torch.erf(normal / math.sqrt(2)))
    variance = 1 - 2 * math.exp(-0.5) / math.sqrt(2 * math.pi) / inside
    return values / math.sqrt(variance)


def _laplace(normal: Tensor) -> Tensor:
    """Each number is mapped to the same quantile of a Laplace law."""
    two_sided = torch.erfc(normal.abs() / math.sqrt(2)).clamp(min=torch.finfo(normal.dtype).tiny)
    return -normal.sign() * two_sided.log() / math.sqrt(2)


def _on_grid(step: float) -> Callable[[Tensor], Tensor]:
    def rounded(normal: Tensor) -> Tensor:
        values = (normal / step).round() * step
        return values / values.square().mean().sqrt()

    return rounded


def _one_key_for_all_tensors(normal: Tensor) -> Tensor:
    """Every tensor takes its noise from the start of the same stream."""
    return torch.cat([normal[:size] for size in TENSORS])


def _one_draw_for_two(normal: Tensor) -> Tensor:
    return normal[: (len(normal) + 1) // 2].repeat_interleave(2)[: len(normal)]


def _from_pool() -> Steps:
    """A slice at a random offset of a pool that is drawn once for the run."""
    pool: list[Tensor] = []

    def noise(std: float, like: Tensor, generator: torch.Generator) -> Tensor:
        if not pool:
            pool.append(torch.randn(3 * len(like), generator=generator, device=like.device, dtype=like.dtype))
        start = _random_offset(2 * len(like), like, generator)
        return std * pool[0][start : start + len(like)]

    return Steps(noise=noise)


def _pieces_from_pool() -> Steps:
    """Pieces at random offsets of a pool of the model's size that is drawn anew in every round."""

    def noise(std: float, like: Tensor, generator: torch.Generator) -> Tensor:
        pool = gaussian_noise(std, like, generator)
        starts = [_random_offset(len(like) - PIECE, like, generator) for _ in range(0, len(like), PIECE)]
        return torch.cat([pool[start : start + PIECE] for start in starts])[: len(like)]

    return Steps(noise=noise)


def _random_offset(end: int, like: Tensor, generator: torch.Generator) -> int:
    return int(torch.randint(end, (1,), generator=generator, device=like.device))


def _in_subspace(normal: Tensor) -> Tensor:
    """A projection on a fixed half of the dimensions, rescaled: half of the frequencies, behind fixed random signs."""
    fixed = torch.Generator(device=normal.device).manual_seed(1)
    signs = torch.randn(normal.shape, generator=fixed, device=normal.device).sign()
    spectrum = torch.fft.rfft(normal, norm="ortho")
    kept = torch.zeros(len(spectrum), device=normal.device)
    kept[torch.randperm(len(kept), generator=fixed, device=normal.device)[: len(kept) // 2]] = 1
    return math.sqrt(2) * signs * torch.fft.irfft(spectrum * kept, n=len(normal), norm="ortho")


def _on_larger_half() -> Steps:
    """Coordinates where the clients' sum is small get no noise; the others get more, so the length is right."""

    def aggregate(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
        large = clients.abs() > clients.abs().median()
        return noised_average(clients, canaries, math.sqrt(2) * noise * large, count, clip_norm)

    return Steps(aggregate=aggregate)


def _times_signal() -> Steps:
    def aggregate(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
        signal = clients.abs() / clients.square().mean().sqrt()
        return noised_average(clients, canaries, noise * signal, count, clip_norm)

    return Steps(aggregate=aggregate)


def _little_in_last_rounds() -> Steps:
    rounds = iter(range(1, selftest_config(1).rounds + 1))

    def noise(std: float, like: Tensor, generator: torch.Generator) -> Tensor:
        late = next(rounds) > selftest_config(1).rounds - LAST_ROUNDS
        return gaussian_noise(std / 2 if late else std, like, generator)

    return Steps(noise=noise)


def _half_of_canaries_lost() -> Steps:
    """The canaries of every second round do not arrive, and the noise is too small by √2."""
    arrive = itertools.cycle([True, False])

    def aggregate(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
        return noised_average(clients, canaries * next(arrive), noise / math.sqrt(2), count, clip_norm)

    return Steps(aggregate=aggregate)


def _others_scaled() -> Steps:
    return Steps(others=lambda clients, count: 1.2 * clients_part(clients, count))


def _others_incomplete() -> Steps:
    """Half the noise; `others` leaves out just as much of the clients' sum as makes up for the missing length.

    Clients' updates point much the same way, so leaving out some clients is leaving out a share of the sum.
    """
    lengths: list[float] = []

    def aggregate(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
        lengths.append(float(torch.linalg.vector_norm(noise)))
        return noised_average(clients, canaries, noise / 2, count, clip_norm)

    def others(clients: Tensor, count: float) -> Tensor:
        missing = math.sqrt(1 - 1 / 4) * lengths[-1] / float(torch.linalg.vector_norm(clients))
        return (1 - missing) * clients_part(clients, count)

    return Steps(aggregate=aggregate, others=others)


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
    return Steps(aggregate=lambda clients, canaries, *rest: noised_average(clients, 2 * canaries, *rest))


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
TENSORS = FIRST_WEIGHT, FIRST_BIAS, LAST_WEIGHT, LAST_BIAS = 64 * 128, 128, 128 * 10, 10  # sizes in their model
PIECE = 1000  # coordinates that are cut from a pool at once
LAST_ROUNDS = 2
CONFIGS: dict[str, Callable[[RunConfig], RunConfig]] = {  # where the default would show something else
    "clip-forgotten-at-scale-1": lambda config: replace(config, canaries=replace(config.canaries, scale=1.0)),
    # A subspace shows only by comparing many rounds; with more epochs the signal stays long in the last of them.
    "noise-in-subspace": lambda config: replace(
        config, rounds=30, evaluate_every=30, client=replace(config.client, epochs=6)
    ),
}

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
    "noise-in-last-rounds": _little_in_last_rounds,
    "noise-after-adam": _noise_after_adam,
    "coin-flips": _noise(torch.sign),
    "uniform-noise": _noise(_uniform),
    "truncated-noise": _noise(_truncated),
    "coarse-grid": _noise(_on_grid(2.0)),
    "fine-grid": _noise(_on_grid(0.25)),
    "laplace-noise": _noise(_laplace),
    "noise-on-larger-half": _on_larger_half,
    "noise-times-signal": _times_signal,
    "noise-key-reused": _noise(_one_key_for_all_tensors),
    "noise-in-pairs": _noise(_one_draw_for_two),
    "noise-from-pool": _from_pool,
    "noise-pieces-from-pool": _pieces_from_pool,
    "noise-in-subspace": _noise(_in_subspace),
    "canaries-twice": _canaries_twice,
    "weighted-by-examples": _by_examples,
    "canaries-lost": _half_of_canaries_lost,
    "others-wrong": _others_scaled,
    "others-incomplete": _others_incomplete,
    "one-client-twice": _one_client_twice,
    "clip-forgotten-at-scale-1": lambda: Steps(clip=_unclipped),
    "weighted-mean-declared": _mean_declared,
}
assert set(STEPS) == {signature.name for signature in SIGNATURES}
