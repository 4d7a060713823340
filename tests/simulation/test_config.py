import dataclasses
import math
import tomllib
from decimal import Decimal

import pytest
import tomli_w

from coalmine.simulation.config import CanarySettings, EngineSettings, RunConfig
from coalmine.simulation.config_sources import merged, task_defaults
from coalmine.simulation.tasks import TASKS


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("level", ["client", "example"])
def test_config_round_trips_through_toml(task, level):
    config = RunConfig.from_dict(task_defaults(task, level))
    assert RunConfig.from_dict(tomllib.loads(tomli_w.dumps(config.to_dict()))) == config


def test_groups_and_optional_values_survive_toml():
    canaries = CanarySettings(count=50, unobserved=20, presentations=(1, 2, 4))
    config = dataclasses.replace(RunConfig(), canaries=canaries)
    again = RunConfig.from_dict(tomllib.loads(tomli_w.dumps(config.to_dict())))
    assert again.canaries == canaries
    assert again.task.clients is None


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ({}, 1000),
        ({"pattern": "clients"}, 1000),
        ({"pattern": "replace"}, 20),
        ({"pattern": "replace", "replace_fraction": 0.29}, 58),
        ({"pattern": "replace", "replace_fraction": 0.999}, 199),
        ({"pattern": "replace", "count": 30}, 30),
    ],
)
def test_canaries_are_a_number_or_a_fraction_of_the_clients(given, number):
    config = RunConfig.from_dict(merged(task_defaults("digits"), {"canaries": given}))
    again = RunConfig.from_dict(tomllib.loads(tomli_w.dumps(config.to_dict())))
    assert again == config
    assert again.canaries.with_count(200).count == number


def test_fraction_of_clients_is_rounded_down_in_decimal():
    """0.29 · 100 is 28.999… in binary; in decimals it is 29."""
    for hundredths in range(10, 100):
        settings = CanarySettings(pattern="replace", replace_fraction=hundredths / 100)
        for clients in (100, 133, 539):
            assert settings.with_count(clients).count == math.floor(Decimal(hundredths) / 100 * clients)


def test_a_fraction_of_too_few_clients_is_rejected():
    with pytest.raises(
        ValueError, match=r"canaries.replace_fraction 0.1 of 99 clients must be at least 10 canaries, got 9; use a"
    ):
        CanarySettings(pattern="replace").with_count(99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"task": {"max_examples_per_client": 0}}, "task.max_examples_per_client must be at least 1, got 0"),
        ({"task": {"max_examples_per_client": 9, "level": "example"}}, "has no meaning at level example"),
        ({"rounds": "many"}, "rounds must be int, got 'many'"),
        ({"rounds": True}, "rounds must be int, got True"),
        ({"privacy": {"noises": 1.0}}, r"a config has no privacy.noises; privacy.has noise_multiplier, "),
        ({"model": "x"}, "a config has no model; it has rounds, "),
        ({"privacy": 3}, "privacy must be a section, got 3"),
        ({"privacy": {"noise_multiplier": -1}}, "privacy.noise_multiplier must be at least 0, got -1.0"),
        ({"privacy": {"noise_multiplier": float("nan")}}, "privacy.noise_multiplier must be finite"),
        ({"privacy": {"delta": 1.0}}, r"delta must lie in \(0, 1\), got 1.0"),
        ({"privacy": {"clip_norm": 0}}, "privacy.clip_norm must be above 0"),
        ({"canaries": {"count": 9}}, "canaries.count must be at least 10, got 9"),
        ({"canaries": {"scale": 0.5}}, "canaries.scale must be at least 1"),
        ({"canaries": {"presentations": [101]}}, "canaries.presentations must be at most rounds = 100, got 101"),
        ({"canaries": {"presentations": [2], "pattern": "clients"}}, "presentations follow from the clients' pattern"),
        (
            {"canaries": {"pattern": "replace", "replace_fraction": 0.2}},
            "give either canaries.count or canaries.replace_fraction, not both, got 1000 and 0.2",
        ),
        ({"participation": {"kind": "file"}}, "participation.rounds_file must be given with kind file"),
        ({"task": {"clients": 2**64}}, "task.clients must be at most 100,000,000"),
        ({"task": {"level": "example", "clients": 5}}, "task.clients has no meaning at level example"),
        ({"claim": {"epsilon": 1.0, "analytical": True}}, "claim one of: an epsilon, the analytical one, the"),
        (
            {"claim": {"analytical": True}, "privacy": {"noise_multiplier": 0}},
            "without noise the computed epsilon is infinite",
        ),
        ({"claim": {"amplified": True}}, "claim.amplified belongs to a claimed number"),
        (
            {"claim": {"accountant": True}, "participation": {"kind": "limited"}},
            "amplification is not supported for participation limited",
        ),
        (
            {
                "claim": {"accountant": True},
                "participation": {"kind": "poisson"},
                "privacy": {"divide_by": "actual"},
            },
            "must hide how many take part, got privacy.divide_by = actual",
        ),
        ({"client": {"momentum": 1.0}}, r"client.momentum must lie in \[0, 1\)"),
        ({"engine": {"memory_limit": 0}}, "engine.memory_limit must be above 0"),
    ],
)
def test_invalid_settings_are_rejected_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.from_dict(merged(RunConfig().to_dict(), changes))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_fraction_outside_the_unit_interval_is_rejected(fraction):
    with pytest.raises(ValueError, match=r"canaries.replace_fraction must (lie in \(0, 1\)|be finite), got"):
        CanarySettings(pattern="replace", replace_fraction=fraction)


def test_fraction_requires_pattern_replace():
    with pytest.raises(
        ValueError, match=r"canaries.replace_fraction must be given with pattern replace only, got pattern spread"
    ):
        CanarySettings(replace_fraction=0.2)


def test_unavailable_device_is_rejected():
    with pytest.raises(ValueError, match=r"engine.device 'nonsense' is not available; use auto or cpu"):
        EngineSettings(device="nonsense").resolved()
    assert EngineSettings(jobs=3).resolved().jobs == 3


def test_a_secret_seed_is_not_copied_from_its_file(tmp_path):
    secret = "0123456789abcdef0123456789abcdeX"
    path = tmp_path / "seed"
    path.write_text(secret + "\n")
    config = dataclasses.replace(RunConfig(), canaries=CanarySettings(seed_file=str(path)))
    assert config.canary_seed() == secret.encode()
    assert secret not in tomli_w.dumps(config.to_dict())
    assert RunConfig(seed=3).canary_seed() != RunConfig(seed=4).canary_seed()
