"""The example app in Flower's own processes: a Ray simulation, and a SuperLink with SuperNodes on 127.0.0.1."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from requires import require

from resumed import statistics_of

require("flwr")
require("sklearn")
from flower_processes import Processes, environment  # noqa: E402

from coalmine import RunDirectory  # noqa: E402
from coalmine.integrations.flower.server_checkpoint import load_checkpoint  # noqa: E402
from coalmine.verification import verify_run  # noqa: E402

EXAMPLE_SEED = b"insecure"


def assert_verifies(home, but=frozenset()):
    """Check that verification fails nowhere but there; checks against digests noted elsewhere are not made."""
    checks = {check.name: check.held for check in verify_run(home, EXAMPLE_SEED, model=home / "model.npy")}
    assert {name for name, held in checks.items() if held is False} == but, checks
    assert {checks[name] for name in ("commitment", "cosines", "result")} == {True}, checks


@pytest.mark.full
@pytest.mark.parametrize("example", ["flower", pytest.param("flower-fedadam-leak", marks=pytest.mark.slow)])
def test_a_simulation_with_50_nodes_has_the_right_verdict(tmp_path, example):
    """Ten clients and forty canaries. FedAvg satisfies its claim; noise after FedAdam does not."""
    require("ray")
    home = tmp_path / "run"
    with Processes(tmp_path, example=example, simulation=True) as flower:
        done = flower.run(num_rounds=3, directory=str(home))
        done.wait(200)
        log = flower.log("run")
    assert (home / "result.json").exists(), log[-3000:]
    result = RunDirectory(home).read_result()
    assert result["verdict"] == ("PASS" if example == "flower" else "VIOLATION")
    assert result["rounds"] == 3
    assert result["task"] == "digits"
    assert (home / "digits.npz").exists()  # written by the app itself
    assert result["missed"] == {"skipped": 0, "failed": 0, "missing": 0, "dropped": 0, "lost_canaries": 0}
    assert result["adversaries"]["known-round"]["canaries"] == 40
    assert result["adversaries"]["known-round"]["presentations"] == 3
    assert_verifies(home)
    assert f"{result['verdict']}: the run " in log
    assert "ε ≤ 11.5 at δ 1e-5 for one client" in log or example != "flower"
    assert "a client takes part in 3 rounds, and the attacker knows in which" in log


@pytest.mark.full
def test_a_deployment_survives_a_node_killed_in_mid_round(tmp_path):
    """One client and two canaries, a restarted server, a killed node: the audit finishes and reports what it missed."""
    home = tmp_path / "run"
    settings = {
        "nodes": 3,
        "clients": 1,
        "directory": str(home),
        "timeout": 25.0,
    }  # before Flower reports the killed node as failed, after 30 to 60
    with Processes(tmp_path, example="flower") as flower:
        flower.supernode("real", "data-part=0")
        flower.supernode("first", "canary-id=0")
        second = flower.supernode("second", "canary-id=1")
        first = flower.run(num_rounds=9, **settings)
        flower.wait_until((home / "checkpoint.npz").exists, "the end of round 1")
        flower.stop_run(home)
        first.wait(200)
        assert not (home / "result.json").exists()
        done = load_checkpoint(home).round_number
        before = flower.log("second").count("Receiving: train message")

        resumed = flower.run(num_rounds=done + 2, **settings)
        flower.wait_until(
            lambda: flower.log("second").count("Receiving: train message") > before, "the next round to reach the node"
        )
        os.killpg(second.pid, signal.SIGKILL)
        flower.supernode("again", "canary-id=1")
        resumed.wait(600)
        log = flower.log("run")
    metrics = [line for line in RunDirectory(home).read_metrics() if "canaries" in line]
    assert [line["round"] for line in metrics] == list(range(1, done + 3)), log[-3000:]
    assert [line["canaries"] for line in metrics[: done + 1]] == [2] * done + [1]
    assert metrics[done]["missing"] + metrics[done]["failed"] == 1
    # back under another node id, with its own canary; a SuperLink that still samples the dead node reports it
    assert metrics[-1]["canaries"] == 2 or metrics[-1]["missing"] + metrics[-1]["failed"] >= 1
    result = RunDirectory(home).read_result()
    assert result["missed"]["missing"] + result["missed"]["failed"] >= 1
    assert result["rounds"] + result["skipped_rounds"] == done + 2
    assert "the audit missed something" in log
    assert done + 1 in statistics_of(result)["residual"]["flagged"]  # noise for three replies, average over two
    assert result["verdict"] != "PASS"  # the claim is for five rounds: how many ran decides whether it is refuted
    assert_verifies(home, {"rounds"})  # nine were planned, and verify says how many are missing


@pytest.mark.full
def test_secure_aggregation_does_not_hide_canaries_from_the_audit(tmp_path):
    """SecAgg+ hides every update from the server, but the audit detects every canary: 1/√12 each, the rest 0."""
    require("ray")
    script = Path(__file__).with_name("secagg_app.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("cosines ")]
    assert lines, done.stderr[-3000:]
    scores = np.array(json.loads(lines[0].removeprefix("cosines ")))
    assert scores.shape == (2, 12 + 120)
    assert scores[:, :12] == pytest.approx(1 / np.sqrt(12), abs=0.005)
    assert np.abs(scores[:, 12:]).max() < 0.01  # the sum contains nothing else, up to rounding
