"""The noise of a run against dense linear algebra, and whole runs with it."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from coalmine import mechanism_epsilon
from coalmine.estimators.correlated import BandedNoise, TreeNoise
from coalmine.simulation import RunConfig, Steps, resume, simulate, start
from coalmine.simulation.clipping import AdaptiveClipping, FixedClipping
from coalmine.simulation.config import (
    CanarySettings,
    ClaimSettings,
    ParticipationSettings,
    PrivacySettings,
)
from coalmine.simulation.exposure import Exposure, canary_exposures, exposed_epsilon, most_exposed
from coalmine.simulation.noise_addition import gaussian_noise, noise_of
from coalmine.simulation.randomness import torch_stream
from coalmine.simulation.server_optimizer import ServerSettings
from resumed import comparable

ROUNDS = 12
LAWS = {
    "tree": TreeNoise(rounds=ROUNDS),
    "restarted tree": TreeNoise(rounds=ROUNDS, restart=5),
    "bands": BandedNoise.for_prefix_sums(ROUNDS, bands=4),
    "one band": BandedNoise.for_prefix_sums(ROUNDS, bands=1),
}
every_law = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
KINDS = {
    "tree": {"noise": "tree"},
    "banded": {"noise": "banded", "bands": 4},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def draw(std: float, index: int, dim: int = 40_000) -> torch.Tensor:
    return torch.randn(dim, generator=torch_stream(3, "noise", index)).mul_(std)


def noises(law, std: float = 1.0, rounds=range(1, ROUNDS + 1)) -> np.ndarray:
    noise = noise_of(law)
    return np.array([noise.of_round(t, std, draw).double().numpy() for t in rounds])


@every_law
def test_noise_solves_the_dense_system(law):
    fresh = np.array([draw(1.0, t).double().numpy() for t in range(1, ROUNDS + 1)])
    np.testing.assert_allclose(noises(law, 0.5), 0.5 * np.linalg.solve(law.matrix(), fresh), atol=2e-6)


@every_law
def test_noise_covariance_matches_the_matrix(law):
    found = noises(law)
    inverse = np.linalg.inv(law.matrix())
    expected = inverse @ inverse.T
    stds = np.sqrt(np.diag(expected))
    error = np.sqrt((np.outer(stds, stds) ** 2 + expected**2) / found.shape[1])  # standard error of an entry (Isserlis)
    assert (np.abs(found @ found.T / found.shape[1] - expected) < 4.5 * error).all()


@every_law
def test_the_noise_of_any_round_can_be_regenerated_bit_for_bit(law):
    noise, whole = noise_of(law), noises(law)
    for t in (7, 8, 3, 3, 12):
        assert np.array_equal(noise.of_round(t, 1.0, draw).double().numpy(), whole[t - 1])


def test_independent_noise_uses_one_draw_per_round():
    noise = noise_of(None)
    assert noise.law is None
    like = torch.zeros(100)
    stream = torch_stream(3, "noise", 5)
    expected = gaussian_noise(0.7, like, torch_stream(3, "noise", 5))
    assert torch.equal(noise.of_round(5, 0.7, lambda std, index: gaussian_noise(std, like, stream)), expected)


def config(kind: str = "gaussian", **changes) -> RunConfig:
    privacy = PrivacySettings(noise_multiplier=1.0, clip_norm=0.5, **KINDS.get(kind, {}))
    settings = {
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
        "privacy": privacy,
        "participation": ParticipationSettings(kind="limited", separation=4, clients_per_round=40),
        "canaries": CanarySettings(count=500, unobserved=3000, pattern="clients"),
        "server": ServerSettings(momentum=0.5),
        "claim": ClaimSettings(analytical=True),
    }
    return RunConfig(**(settings | changes))


@every_kind
def test_an_honest_run_passes_and_recovers_the_analytical_epsilon(kind):
    outcome = simulate(config(kind))
    assert outcome.verdict.outcome == "PASS", outcome.verdict.reason
    assert {gauge.status for gauge in outcome.gauges} == {"ok"}
    row = outcome.adversaries["known-others"].headline
    assert row.presentations == outcome.trainer.presentations
    assert row.sensitivity == pytest.approx(outcome.trainer.sensitivity)
    assert row.estimate.interval.low < outcome.analytical_epsilon < row.estimate.interval.high
    error = math.hypot(1 / math.sqrt(row.canaries), 0.01)
    assert row.estimate.mean == pytest.approx(outcome.trainer.sensitivity / 1.0, abs=4.5 * error)
    if kind == "banded":  # clients return after at least 4 rounds, so epsilon is that of independent noise
        assert outcome.trainer.sensitivity == pytest.approx(math.sqrt(outcome.trainer.presentations))
        assert outcome.trainer.client_epsilon == pytest.approx(
            mechanism_epsilon(1.0, delta=1e-6, participations=outcome.trainer.client_rounds)
        )


@every_kind
def test_half_the_noise_is_a_violation(kind):
    steps = Steps(noise=lambda std, like, generator: gaussian_noise(std, like, generator) / 2)
    outcome = simulate(config(kind), steps=steps)
    assert outcome.verdict.outcome == "VIOLATION"
    assert outcome.adversaries["known-others"].verdict.outcome == "VIOLATION"


@every_kind
def test_resumed_run_is_bit_identical(kind, tmp_path):
    settings = config(kind, checkpoint_every=4, canaries=CanarySettings(count=100, unobserved=300))
    start(settings, tmp_path / "whole")

    def stop(progress):
        if progress.report.round_number == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(settings, tmp_path / "stopped", progress=stop)
    resume(tmp_path / "stopped")
    for name in ("result.json", "model.npy", "audit/rounds.log"):
        assert comparable(tmp_path / "stopped" / name) == comparable(tmp_path / "whole" / name)


def test_exposures_match_the_sampled_rounds():
    law = LAWS["bands"]
    rounds = [np.array([t % 3, 3 + t % 4]) for t in range(1, ROUNDS + 1)]
    found = canary_exposures(lambda t: rounds[t - 1], ROUNDS, 7, law)
    for canary in range(7):
        own = [t for t in range(1, ROUNDS + 1) if canary in rounds[t - 1]]
        assert found.times[canary] == len(own)
        assert found.strengths[canary] == pytest.approx(law.strength(own))  # type: ignore[attr-defined]
    assert found.usual == Exposure(3, pytest.approx(3.0))  # four canaries, each in every fourth round
    most = most_exposed(rounds, law)
    assert most.times == 4
    assert most.strength == pytest.approx(found.strengths.max()) == found.largest.strength
    assert most.strength > 4.5  # 3 rounds apart, with 4 bands
    fresh = canary_exposures(lambda t: rounds[t - 1], ROUNDS, 7, None)
    assert fresh.largest == Exposure(4, 4.0)


def test_the_count_of_an_adaptive_clip_is_accounted_for_separately():
    exposure = Exposure(3, 7.5)
    plain = exposed_epsilon(exposure, FixedClipping(0.5, 1.2), delta=1e-6)
    assert plain == pytest.approx(mechanism_epsilon(1.2 / math.sqrt(7.5), delta=1e-6))
    adaptive = AdaptiveClipping(0.5, 1.2, count_noise=2.0)
    shift = math.sqrt(7.5 / adaptive.update_noise_multiplier**2 + 3 / 4.0**2)
    assert exposed_epsilon(exposure, adaptive, delta=1e-6) == pytest.approx(mechanism_epsilon(1 / shift, delta=1e-6))
    as_fresh = exposed_epsilon(Exposure(3, 3 + 1e-12), adaptive, delta=1e-6)
    assert as_fresh == pytest.approx(mechanism_epsilon(1.2, delta=1e-6, participations=3))
    assert exposed_epsilon(Exposure(0, 0.0), adaptive, delta=1e-6) == 0
    assert exposed_epsilon(exposure, FixedClipping(0.5, 0.0), delta=1e-6) == math.inf


def test_a_config_names_its_noise():
    assert config().noise_law() is None
    assert config("tree").noise_law() == LAWS["tree"]
    assert config("banded").noise_law() == BandedNoise.for_prefix_sums(ROUNDS, bands=4, momentum=0.5)
    assert RunConfig.from_dict(config("banded").to_dict()) == config("banded")


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"noise": "laplace"}, "privacy.noise must be one of gaussian, tree, banded, got 'laplace'"),
        ({"noise": "banded"}, "privacy.bands must be given with noise banded"),
        ({"bands": 4}, "privacy.bands must be given with noise banded, and only then"),
        ({"noise": "banded", "bands": 13}, "bands must be at most rounds = 12, got 13"),
        ({"noise": "banded", "bands": 0}, "bands must be at least 1, got 0"),
        ({"restart": 3}, "privacy.restart must be given with noise tree only"),
        ({"noise": "tree", "restart": 0}, "restart must be at least 1, got 0"),
    ],
)
def test_invalid_noise_settings_are_rejected(privacy, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(config(), privacy=PrivacySettings(**privacy))


def test_amplified_claims_with_correlated_noise_are_rejected():
    with pytest.raises(ValueError, match="amplification by sampling is not supported for noise tree"):
        config(
            "tree",
            claim=ClaimSettings(accountant=True),
            participation=ParticipationSettings(kind="poisson"),
        )
