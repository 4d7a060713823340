"""A training run stops in the round that refutes its claim; an honest run does not."""

import json
import shutil
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from coalmine.report import write_report
from coalmine.simulation.config import CanarySettings, ClaimSettings, ParticipationSettings, PrivacySettings, RunConfig
from coalmine.simulation.dp_fedavg import Steps
from coalmine.simulation.noise_addition import gaussian_noise
from coalmine.simulation.training_run import resume, simulate, start
from coalmine.verification import verify_run

ROUNDS = 60
CONFIG = RunConfig(
    rounds=ROUNDS,
    checkpoint_every=10,
    privacy=PrivacySettings(noise_multiplier=1.0),
    canaries=CanarySettings(count=600),
    claim=ClaimSettings(analytical=True, stop_on_violation=True),
)


def halved(std, like, generator):
    return gaussian_noise(std, like, generator) / 2


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    home = tmp_path_factory.mktemp("stopped") / "run"
    return home, start(CONFIG, home, steps=Steps(noise=halved))


def test_half_the_noise_stops_the_run_within_a_twentieth_of_its_rounds(stopped):
    home, outcome = stopped
    assert outcome.rounds <= ROUNDS // 20
    assert outcome.verdict.outcome == "VIOLATION"
    assert outcome.alarm.round <= outcome.rounds
    stored = json.loads((home / "result.json").read_text())
    assert stored["alarm"]["round"] == outcome.alarm.round
    assert f"alarm in round {outcome.alarm.round}" in " ".join(str(outcome).split())


def test_the_directory_of_a_stopped_run_is_complete(stopped):
    home, outcome = stopped
    names = {path.name for path in home.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "result.json", "checkpoint.safetensors", "model.npy", "audit"}
    assert len((home / "metrics.jsonl").read_text().splitlines()) == outcome.rounds
    checks = verify_run(home, CONFIG.canary_seed(), model=home / "model.npy")
    assert [check.name for check in checks if check.held is False] == []
    assert next(check.held for check in checks if check.name == "rounds") is True
    page = write_report([home], home / "page.md", kind="md").read_text()
    assert "VIOLATION" in page
    assert "alarm in round" in page


def test_verification_rejects_a_result_without_its_alarm(stopped, tmp_path):
    home, _ = stopped
    copy = shutil.copytree(home, tmp_path / "run")
    stored = json.loads((copy / "result.json").read_text())
    del stored["alarm"]
    (copy / "result.json").write_text(json.dumps(stored))
    checks = {check.name: check.held for check in verify_run(copy, CONFIG.canary_seed())}
    assert (checks["rounds"], checks["result"]) == (False, False)


def test_a_stopped_run_stays_stopped_when_resumed(stopped):
    home, outcome = stopped
    before = (home / "result.json").read_bytes()
    again = resume(home)
    assert again.rounds == outcome.rounds
    assert (home / "result.json").read_bytes() == before


def test_an_honest_run_is_not_stopped():
    watched = simulate(CONFIG)
    plain = simulate(replace(CONFIG, claim=ClaimSettings(analytical=True)))
    assert watched.verdict.outcome == "PASS"
    told = watched.to_dict()
    assert told.pop("alarm") is None
    assert told == plain.to_dict()


@pytest.mark.full
def test_correlated_noise_and_an_amplified_claim_can_be_watched():
    tree = replace(CONFIG, privacy=PrivacySettings(noise_multiplier=1.0, noise="tree"), rounds=32)
    assert simulate(tree).alarm is None
    assert simulate(tree, steps=Steps(noise=halved)).alarm.round <= 3
    sampled = replace(
        CONFIG,
        rounds=20,
        participation=ParticipationSettings(kind="poisson"),
        claim=ClaimSettings(accountant=True, stop_on_violation=True),
        canaries=CanarySettings(count=600, pattern="clients"),
    )
    assert simulate(sampled).alarm is None
    assert simulate(sampled, steps=Steps(noise=halved)).alarm.round <= 3


def test_stopping_requires_a_claim():
    with pytest.raises(ValueError, match="stop_on_violation needs a claim"):
        ClaimSettings(stop_on_violation=True)
