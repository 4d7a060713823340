"""Deliberate privacy faults: `coalmine selftest` puts them into the training loop and checks that the audit detects them.

A fault replaces one of the loop's `Steps`; the loop itself has no branch for faults. `coalmine.known_faults` lists the
effects of each fault, so that a report can name the likely one.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.evidence.faults import FAULTS, Fault
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.known_faults import likely_faults
from coalmine.log.recorded import WithoutOthers
from coalmine.result.audit_result import AuditResult
from coalmine.result.derivation import derive_result
from coalmine.simulation.config import CanarySettings, ParticipationSettings, PrivacySettings, RunConfig
from coalmine.simulation.dp_fedavg import Steps, clients_part
from coalmine.simulation.engines import ClientSettings
from coalmine.simulation.noise_addition import gaussian_noise, noised_average
from coalmine.simulation.training_run import prepared
from coalmine.verdict.claim import Claim


@dataclass(frozen=True)
class Trial:
    """One run with a fault, and the audit's result on the analytical claim, with and without knowledge of the others."""

    fault: Fault
    seed: int
    claim: float
    result: AuditResult
    blind: AuditResult  # the same run, audited without knowledge of the others
    signal: tuple[float, ...]  # per round: length of the real clients' part divided by that of the claimed noise

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
    """The reading of one rung or gauge, and the limit for an honest run. A rung reads epsilon; its limit is the claim.

    `pooled`: no single round is outside the limit, only all rounds together.
    """

    by: str
    reading: float
    limit: float
    pooled: bool = False

    @property
    def times(self) -> float:
        """The ratio of the larger of reading and limit to the smaller."""
        if self.pooled:
            return 1.0
        small, large = sorted((abs(self.reading), abs(self.limit)))
        return large / small if small else math.inf


def margins(result: AuditResult) -> list[Margin]:
    """The evidence against the claim and its size: rungs that refute it, and gauges outside their limits."""
    claim = result.claim.epsilon if result.claim else math.nan
    rungs = [
        Margin(by=name, reading=float(rung.headline.estimate.epsilon), limit=claim)
        for name, rung in result.adversaries.items()
        if rung.verdict and rung.verdict.outcome == "VIOLATION"
    ]
    return rungs + [_gauge_margin(gauge) for gauge in result.gauges if gauge.status != "ok"]


def _gauge_margin(gauge: GaugeResult) -> Margin:
    """The gauge's reading outside its limits. If a ratio is both too low and too high, the low reading is the proof.

    All rounds together can prove that noise is missing even if no single round does. Then the reading is the share of the
    stated noise that is left, and the limit is 1.
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
    """Whether a rung or a gauge contradicts the claim, and the verdict is not PASS."""
    return bool(evidence(result)) and (result.verdict is None or result.verdict.outcome != "PASS")


def evidence(result: AuditResult) -> list[str]:
    """The names of the rungs that refute the claim and of the gauges outside their limits."""
    return [margin.by for margin in margins(result)]


def selftest_config(seed: int) -> RunConfig:
    """A run that takes a second: all 200 clients of the digits in each of 10 rounds.

    Clients train until their updates point in similar directions and are several times the clip norm. So their sum is
    longer than the noise, and an average of unclipped updates is longer than the clip norm.
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


def try_fault(fault: Fault, seed: int) -> Trial:
    """Train with the fault and audit the analytical claim."""
    config = selftest_config(seed)
    config = replace(config, engine=config.engine.resolved())
    if fault.name in CONFIGS:
        config = CONFIGS[fault.name](config)
    signal: list[float] = []
    with prepared(config, None, _recording_signal(STEPS[fault.name](), config.privacy, signal)) as training:
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


def _recording_signal(steps: Steps, privacy: PrivacySettings, signal: list[float]) -> Steps:
    """The same steps, which also append to `signal` the length of the clients' part over that of the claimed noise.

    The clients' part is the longer of two: as reported to the audit (an optimiser may have scaled it), and as sent (the
    report may be incomplete).
    """

    def others(clients: Tensor, count: float) -> Tensor:
        reported = steps.others(clients, count)
        noise_length = privacy.noise_multiplier * privacy.clip_norm / count * math.sqrt(len(clients))
        length = max(float(torch.linalg.vector_norm(part)) for part in (reported, clients_part(clients, count)))
        signal.append(length / noise_length)
        return reported

    return replace(steps, others=others)


def _with_changed_noise(change: Callable[[Tensor], Tensor]) -> Callable[[], Steps]:
    """Steps whose standard normal noise is changed before it is scaled to the claimed std."""
    return lambda: Steps(noise=lambda std, like, generator: std * change(gaussian_noise(1.0, like, generator)))


def _zero_except(noise: Tensor, keep: slice) -> Tensor:
    kept = torch.zeros_like(noise)
    kept[keep] = noise[keep]
    return kept


def _reused_noise() -> Steps:
    def noise(std: float, like: Tensor, generator: torch.Generator) -> Tensor:
        return gaussian_noise(std, like, torch.Generator(device=like.device).manual_seed(1))

    return Steps(noise=noise)


def _uniform(normal: Tensor) -> Tensor:
    """Uniform noise between -√3 and √3, at the same quantiles."""
    return math.sqrt(3) * torch.erf(normal / math.sqrt(2))


def _truncated(normal: Tensor) -> Tensor:
    """A Gaussian truncated at ±1, rescaled to variance 1."""
    inside = math.erf(1 / math.sqrt(2))
    values = math.sqrt(2) * torch.erfinv(inside * torch.erf(normal / math.sqrt(2)))
    variance = 1 - 2 * math.exp(-0.5) / math.sqrt(2 * math.pi) / inside
    return values / math.sqrt(variance)


def _laplace(normal: Tensor) -> Tensor:
    """Laplace noise at the same quantiles."""
    two_sided = torch.erfc(normal.abs() / math.sqrt(2)).clamp(min=torch.finfo(normal.dtype).tiny)
    return -normal.sign() * two_sided.log() / math.sqrt(2)


def _on_grid(step: float) -> Callable[[Tensor], Tensor]:
    def rounded(normal: Tensor) -> Tensor:
        values = (normal / step).round() * step
        return values / values.square().mean().sqrt()

    return rounded


def _one_key_for_all_tensors(normal: Tensor) -> Tensor:
    """Noise in which every tensor reuses the start of the same stream."""
    return torch.cat([normal[:size] for size in TENSORS])


def _pairs_of_equal_noise(normal: Tensor) -> Tensor:
    return normal[: (len(normal) + 1) // 2].repeat_interleave(2)[: len(normal)]


def _noise_from_pool() -> Steps:
    """Noise from a pool drawn once per run: a slice at a random offset."""
    pool: list[Tensor] = []

    def noise(std: float, like: Tensor, generator: torch.Generator) -> Tensor:
        if not pool:
            pool.append(torch.randn(3 * len(like), generator=generator, device=like.device, dtype=like.dtype))
        start = _random_offset(2 * len(like), like, generator)
        return std * pool[0][start : start + len(like)]

    return Steps(noise=noise)


def _pieces_from_pool() -> Steps:
    """Noise from a pool of the model's size drawn in every round: pieces at random offsets."""

    def noise(std: float, like: Tensor, generator: torch.Generator) -> Tensor:
        pool = gaussian_noise(std, like, generator)
        starts = [_random_offset(len(like) - PIECE, like, generator) for _ in range(0, len(like), PIECE)]
        return torch.cat([pool[start : start + PIECE] for start in starts])[: len(like)]

    return Steps(noise=noise)


def _random_offset(end: int, like: Tensor, generator: torch.Generator) -> int:
    return int(torch.randint(end, (1,), generator=generator, device=like.device))


def _in_subspace(normal: Tensor) -> Tensor:
    """A rescaled projection on a fixed half of the dimensions: half of the frequencies, then fixed random signs."""
    fixed_stream = torch.Generator(device=normal.device).manual_seed(1)
    signs = torch.randn(normal.shape, generator=fixed_stream, device=normal.device).sign()
    spectrum = torch.fft.rfft(normal, norm="ortho")
    kept = torch.zeros(len(spectrum), device=normal.device)
    kept[torch.randperm(len(kept), generator=fixed_stream, device=normal.device)[: len(kept) // 2]] = 1
    return math.sqrt(2) * signs * torch.fft.irfft(spectrum * kept, n=len(normal), norm="ortho")


def _noise_on_larger_half() -> Steps:
    """Noise only on coordinates where the clients' sum is large, scaled up so that its length is right."""

    def aggregate(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
        large = clients.abs() > clients.abs().median()
        return noised_average(clients, canaries, math.sqrt(2) * noise * large, count, clip_norm)

    return Steps(aggregate=aggregate)


def _noise_times_signal() -> Steps:
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
    """Half the noise; `others` omits just enough of the clients' sum to make up for the missing length.

    Clients' updates point in similar directions, so omitting some clients omits a share of the sum.
    """
    lengths: list[float] = []

    def aggregate(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
        lengths.append(float(torch.linalg.vector_norm(noise)))
        return noised_average(clients, canaries, noise / 2, count, clip_norm)

    def others(clients: Tensor, count: float) -> Tensor:
        missing = math.sqrt(1 - 1 / 4) * lengths[-1] / float(torch.linalg.vector_norm(clients))
        return (1 - missing) * clients_part(clients, count)

    return Steps(aggregate=aggregate, others=others)


def _no_clipping(norms: Tensor, clip_norm: float) -> Tensor:
    return torch.ones_like(norms)


def _clip_after_averaging() -> Steps:
    """Only the average is clipped, but the noise is for clipped updates; the others are known unclipped."""

    def aggregate(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
        mean = (clients + canaries) / count
        return mean * torch.clamp(clip_norm / torch.linalg.vector_norm(mean), max=1.0) + noise / count

    return Steps(clip=_no_clipping, aggregate=aggregate)


def _noise_after_adam() -> Steps:
    """An adaptive optimiser scales every coordinate up before the noise, which is sized for the average, is added.

    The attacker who knows the others also knows how the optimiser scales them.
    """
    moments: dict[str, Tensor] = {}

    def moving_average(name: str, value: Tensor, decay: float) -> Tensor:
        moments[name] = decay * moments.get(name, torch.zeros_like(value)) + (1 - decay) * value
        return moments[name]

    def scaled(first: Tensor) -> Tensor:
        return 0.1 * first / (moments["second"].sqrt() + 1e-3)

    def aggregate(clients: Tensor, canaries: Tensor, noise: Tensor, count: float, clip_norm: float) -> Tensor:
        mean = (clients + canaries) / count
        moving_average("second", mean * mean, 0.99)
        return scaled(moving_average("first", mean, 0.9)) + noise / count

    def others(clients: Tensor, count: float) -> Tensor:
        return scaled(moving_average("others", clients / count, 0.9))

    return Steps(aggregate=aggregate, others=others)


def _canaries_twice() -> Steps:
    return Steps(aggregate=lambda clients, canaries, *rest: noised_average(clients, 2 * canaries, *rest))


def _weighted_by_examples() -> Steps:
    return Steps(weigh=lambda examples: examples.float() / MEAN_EXAMPLES)


def _weighted_by_mean() -> Steps:
    def weigh(examples: Tensor) -> Tensor:
        declared = examples if len(examples) == CLIENTS else torch.full_like(examples, MEAN_EXAMPLES)
        return declared.float() / MEAN_EXAMPLES

    return Steps(weigh=weigh)


def _one_client_twice() -> Steps:
    def weigh(examples: Tensor) -> Tensor:
        weights = torch.ones_like(examples, dtype=torch.float32)
        if len(weights) == CLIENTS:  # canaries are weighted in a separate call
            weights[0] = 2
        return weights

    return Steps(weigh=weigh)


CLIENTS, MEAN_EXAMPLES = 200, 1500 / 200  # of the task digits
TENSORS = FIRST_WEIGHT, FIRST_BIAS, LAST_WEIGHT, LAST_BIAS = 64 * 128, 128, 128 * 10, 10  # sizes in its model
PIECE = 1000  # coordinates per piece of a pool
LAST_ROUNDS = 2
CONFIGS: dict[str, Callable[[RunConfig], RunConfig]] = {  # for faults that the default config does not reveal
    "clip-forgotten-at-scale-1": lambda config: replace(config, canaries=replace(config.canaries, scale=1.0)),
    # Only a comparison of many rounds reveals a subspace; more epochs keep the signal long in the last rounds.
    "noise-in-subspace": lambda config: replace(
        config, rounds=30, evaluate_every=30, client=replace(config.client, epochs=6)
    ),
}

STEPS: dict[str, Callable[[], Steps]] = {
    "honest": Steps,
    "clip-forgotten": lambda: Steps(clip=_no_clipping),
    "clip-after-averaging": _clip_after_averaging,
    "noise-over-n": _with_changed_noise(lambda noise: noise / CLIENTS),
    "noise-over-2": _with_changed_noise(lambda noise: noise / 2),
    "noise-over-root-2": _with_changed_noise(lambda noise: noise / math.sqrt(2)),
    "noise-times-n": _with_changed_noise(lambda noise: noise * CLIENTS),
    "noise-reused": _reused_noise,
    "noise-on-half": _with_changed_noise(lambda noise: _zero_except(noise, slice(len(noise) // 2))),
    "noise-on-90-percent": _with_changed_noise(lambda noise: _zero_except(noise, slice(len(noise) // 10, None))),
    "noise-on-one-layer": _with_changed_noise(
        lambda noise: _zero_except(noise, slice(-LAST_WEIGHT - LAST_BIAS, -LAST_BIAS))
    ),
    "small-tensor-without-noise": _with_changed_noise(lambda noise: _zero_except(noise, slice(-LAST_BIAS))),
    "noise-in-last-rounds": _little_in_last_rounds,
    "noise-after-adam": _noise_after_adam,
    "coin-flips": _with_changed_noise(torch.sign),
    "uniform-noise": _with_changed_noise(_uniform),
    "truncated-noise": _with_changed_noise(_truncated),
    "coarse-grid": _with_changed_noise(_on_grid(2.0)),
    "fine-grid": _with_changed_noise(_on_grid(0.25)),
    "laplace-noise": _with_changed_noise(_laplace),
    "noise-on-larger-half": _noise_on_larger_half,
    "noise-times-signal": _noise_times_signal,
    "noise-key-reused": _with_changed_noise(_one_key_for_all_tensors),
    "noise-in-pairs": _with_changed_noise(_pairs_of_equal_noise),
    "noise-from-pool": _noise_from_pool,
    "noise-pieces-from-pool": _pieces_from_pool,
    "noise-in-subspace": _with_changed_noise(_in_subspace),
    "canaries-twice": _canaries_twice,
    "weighted-by-examples": _weighted_by_examples,
    "canaries-lost": _half_of_canaries_lost,
    "others-wrong": _others_scaled,
    "others-incomplete": _others_incomplete,
    "one-client-twice": _one_client_twice,
    "clip-forgotten-at-scale-1": lambda: Steps(clip=_no_clipping),
    "weighted-mean-declared": _weighted_by_mean,
}
assert set(STEPS) == {fault.name for fault in FAULTS}

RUN_FAULTS = {  # for `coalmine run --fault`: faults that any run can have
    "halved-noise": "noise-over-2",
    "forgotten-clip": "clip-forgotten",
    "reused-noise": "noise-reused",
}


def steps_with(fault: str) -> Steps:
    """The steps of a run with one of `RUN_FAULTS`, which its result names."""
    name = RUN_FAULTS[fault]
    title = next(each.title for each in FAULTS if each.name == name)
    return replace(STEPS[name](), note=f"this run has a fault on purpose: {title}")
