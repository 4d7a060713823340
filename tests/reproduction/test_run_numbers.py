"""Numbers read from a run directory and from JSON."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("torch")

from coalmine.log.files import json_ready
from coalmine.log.run_directory import RunDirectory
from coalmine.simulation.config import (
    CanarySettings,
    EngineSettings,
    ParticipationSettings,
    PrivacySettings,
    RunConfig,
)
from reproduction.experiment_options import Options
from reproduction.run_grid import PlannedRun, carry_out
from reproduction.run_numbers import read_finished, read_json, rung, training_seconds


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    config = RunConfig(
        rounds=12,
        evaluate_every=12,
        participation=ParticipationSettings(clients_per_round=5),
        privacy=PrivacySettings(noise_multiplier=0.5, clipping="adaptive", count_noise=0.5),
        canaries=CanarySettings(count=80, unobserved=50, presentations=(1, 4)),
        engine=EngineSettings(device="cpu", threads=1),
    )
    out = tmp_path_factory.mktemp("readings")
    planned = PlannedRun(config=config)
    return read_finished(carry_out([planned], Options(out=out))[planned.name])


def test_known_others_is_compared_with_the_epsilon_of_its_presentations(reading):
    """Oracle: Balle and Wang's δ = Φ(1/2s - εs) - e^ε Φ(-1/2s - εs) at s = z/√R."""
    from scipy.special import ndtr

    for times in (1, 4):
        row = rung(reading, "known-others", times)
        s = reading["update_noise_multiplier"] / math.sqrt(times)
        epsilon = row["analytical"]
        delta = ndtr(1 / (2 * s) - epsilon * s) - math.exp(epsilon) * ndtr(-1 / (2 * s) - epsilon * s)
        assert delta == pytest.approx(reading["delta"], rel=1e-6)
        low, high = row["interval_99"]
        assert low <= row["interval"][0] <= row["interval"][1] <= high


def test_slots_are_counted(reading):
    assert reading["canary_slots"] == 40 + 4 * 40
    assert reading["canary_rounds"] == [1, 4]
    assert reading["client_slots"] == 12 * 5


def test_densities_integrate_to_one(reading):
    assert [item["presentations"] for item in reading["densities"]] == [1, 4]
    for item in reading["densities"]:
        assert np.trapezoid(item["density"], item["x"]) == pytest.approx(1.0, abs=0.05)


def test_the_times_of_a_resumed_run_are_added_up(tmp_path):
    home = RunDirectory(tmp_path)
    for number, seconds in enumerate([1.0, 2.0, 3.0, 0.5, 1.5, 0.25], start=1):
        home.append_metrics({"round": number, "seconds": seconds})
    home.close()
    assert training_seconds(RunDirectory(tmp_path)) == pytest.approx(3.0 + 1.5 + 0.25)


def test_numbers_survive_json(tmp_path, reading):
    path = tmp_path / "found.json"
    path.write_text(json.dumps(json_ready({"reading": reading, "most": math.inf})))
    assert read_json(path) == {"reading": reading, "most": math.inf}
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="must hold an object"):
        read_json(path)
