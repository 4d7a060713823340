"""Grids of runs: shared, resumed and read back, also without tomli_w."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from coalmine.log.run_directory import RunDirectory
from coalmine.simulation.config import (
    CanarySettings,
    EngineSettings,
    ParticipationSettings,
    PrivacySettings,
    RunConfig,
    TaskSettings,
)
from reproduction import beyond_the_paper as beyond
from reproduction import run_grid
from reproduction import table_3_accuracy as accuracy
from reproduction import table_4_stackoverflow as stackoverflow
from reproduction import table_5_emnist as emnist
from reproduction.experiment_options import Options
from reproduction.run_grid import ROUNDS_FILE, OutOfTimeError, PlannedRun, carry_out
from resumed import comparable_result

TINY = RunConfig(
    rounds=6,
    evaluate_every=6,
    checkpoint_every=2,
    participation=ParticipationSettings(clients_per_round=5),
    privacy=PrivacySettings(noise_multiplier=0.5, clipping="adaptive", count_noise=0.5),
    canaries=CanarySettings(count=20, unobserved=50),
    engine=EngineSettings(device="cpu", threads=1),
)


def options(tmp_path, **changes) -> Options:
    return Options(out=tmp_path, **changes)


def test_a_run_stopped_by_the_time_limit_gives_identical_results(tmp_path):
    planned = PlannedRun(config=TINY)
    with pytest.raises(OutOfTimeError, match="after round 2"):
        carry_out([planned], options(tmp_path / "cut", ends=0.0))
    assert not planned.finished(tmp_path / "cut")
    assert planned.rounds_done(tmp_path / "cut") == 2
    seen = []
    cut = carry_out([planned], options(tmp_path / "cut"), follow=lambda _, p: seen.append(p.report.round_number))
    whole = carry_out([planned], options(tmp_path / "whole"))
    assert seen == [3, 4, 5, 6]
    found = [comparable_result(RunDirectory(done[planned.name]).read_result()) for done in (cut, whole)]
    assert found[0] == found[1]


def test_after_the_time_limit_no_run_is_started(tmp_path):
    """The runs' only checkpoint is at their end. The first run finishes regardless, so that every call makes progress."""
    whole = replace(TINY, checkpoint_every=TINY.rounds)
    first, second = (PlannedRun(config=replace(whole, seed=seed)) for seed in (1, 2))
    with pytest.raises(OutOfTimeError, match=f"{second.name} was not started"):
        carry_out([first, second], options(tmp_path, ends=0.0))
    assert first.finished(tmp_path)
    assert not second.directory(tmp_path).exists()
    assert list(carry_out([first, second], options(tmp_path, ends=0.0))) == [first.name, second.name]


def test_only_requested_and_unfinished_runs_are_trained(tmp_path, monkeypatch):
    noisy = PlannedRun(config=TINY)
    quiet = PlannedRun(config=replace(TINY, privacy=replace(TINY.privacy, noise_multiplier=0.25)))
    done = carry_out([noisy, quiet, noisy], options(tmp_path, only=(0.5,)))
    assert list(done) == [noisy.name]
    monkeypatch.setattr(run_grid, "start", lambda *_, **__: pytest.fail("trained again"))
    assert carry_out([noisy, quiet], options(tmp_path, only=(0.5,))) == done


def test_without_canaries_the_same_clients_train_in_the_same_rounds(tmp_path):
    mixed, without = PlannedRun(config=TINY), PlannedRun(config=TINY, without_canaries=True)
    done = carry_out([mixed, without], options(tmp_path))
    clients = [[line["clients"] for line in RunDirectory(done[run.name]).read_metrics()] for run in (mixed, without)]
    assert clients[0] == clients[1]
    assert [line["canaries"] for line in RunDirectory(done[without.name]).read_metrics()] == [0] * TINY.rounds
    assert sum(line["canaries"] for line in RunDirectory(done[mixed.name]).read_metrics()) == TINY.canaries.count
    rows = (done[without.name] / ROUNDS_FILE).read_text().splitlines()
    assert len(rows) == TINY.rounds
    everybody = np.concatenate([np.array(row.split(), dtype=int) for row in rows])
    assert len(set(everybody.tolist())) == len(everybody) == 30  # shuffled epochs: 30 of 200 clients, each once


def test_a_runs_name_depends_on_its_config_and_not_on_the_machine():
    moved = replace(TINY, engine=EngineSettings(device="auto", threads=7), task=TaskSettings(data_dir="/elsewhere"))
    assert PlannedRun(config=moved).name == PlannedRun(config=TINY).name
    assert PlannedRun(config=replace(TINY, seed=2)).name != PlannedRun(config=TINY).name
    assert PlannedRun(config=TINY, without_canaries=True).name != PlannedRun(config=TINY).name


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_experiments_share_identical_runs(tmp_path, scale):
    asked = options(tmp_path, scale=scale)
    tables = {run.name for run in emnist.EXPERIMENT.plan(asked)}
    assert tables < {run.name for run in beyond.plan(asked)}
    if scale == "paper":
        shared = {run.name for run in stackoverflow.EXPERIMENT.plan(asked)} & {run.name for run in accuracy.plan(asked)}
        assert len(shared) == 1  # without noise, with canaries


def test_the_papers_runs_have_the_papers_sizes(tmp_path):
    words, characters = (module.EXPERIMENT.plan(options(tmp_path, scale="paper")) for module in (stackoverflow, emnist))
    assert [run.noise_multiplier for run in words] == [0, 0.0496, 0.0986, 0.2317]
    assert [run.noise_multiplier for run in characters] == [0, 0.16, 0.18, 0.195, 0.25, 0.315]
    config = words[0].config
    assert (config.rounds, config.participation.clients_per_round, config.canaries.count) == (2048, 167, 1000)
    assert (config.client.learning_rate, config.server.learning_rate, config.server.momentum) == (1.0, 0.56, 0.9)
    config = characters[0].config
    assert (config.rounds, config.participation.clients_per_round, config.client.learning_rate) == (500, 34, 0.031)
    assert config.privacy.delta == pytest.approx(1.3115e-4, rel=1e-3)


def test_other_noise_kinds_have_the_same_analytical_epsilon(tmp_path):
    """‖Cu‖/z of the worst single round equals 1/z of independent noise; the count of the adaptive clip is excluded."""
    for kind, run in beyond.noise_runs(options(tmp_path)).items():
        config = run.config
        law = config.noise_law()
        z = config.privacy.clipping_of(10).update_noise_multiplier
        worst = 1.0 if law is None else np.linalg.norm(law.matrix(), axis=0).max()
        base = beyond.base(options(tmp_path)).privacy.clipping_of(10).update_noise_multiplier
        assert z / worst == pytest.approx(base, rel=1e-6), kind


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": "large"}, "scale must be small or paper"),
        ({"rounds": 0}, "rounds must be"),
        ({"originals": True}, "originals is for scale paper only"),
        ({"max_examples": 4}, "max_examples is for scale paper only"),
    ],
)
def test_invalid_settings_are_rejected(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        options(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"scale": "paper"}, "emnist-paper.json"),
        ({"seeds": 7, "only": (0.16,)}, "emnist-small.json"),  # more seeds or a part of the same experiment
        ({"rounds": 20}, "emnist-small-20-rounds.json"),
        ({"scale": "paper", "max_examples": 64}, "emnist-paper-64-examples.json"),
        (
            {"scale": "paper", "originals": True, "rounds": 9, "max_examples": 8},
            "emnist-paper-8-examples-9-rounds-originals.json",
        ),
    ],
)
def test_changed_experiments_have_their_own_file(tmp_path, changes, name):
    assert options(tmp_path, **changes).file("emnist", "json") == tmp_path / name


def test_other_noise_kinds_are_selected_by_the_base_noise(tmp_path):
    asked = options(tmp_path, only=(beyond.NOISE,))
    assert all(asked.wanted(run.asked_noise) for run in beyond.noise_runs(asked).values())
    assert not asked.wanted(beyond.noise_runs(asked)["tree"].noise_multiplier)
