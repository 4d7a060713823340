"""`coalmine sweep` as a user calls it, with real processes that are killed; `compare` and `report` on its directory."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coalmine.cli import main as cli
from resumed import comparable

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

TINY = """
rounds = 30
checkpoint_every = 4
[canaries]
count = 40
[engine]
threads = 1
jobs = 1
[sweep]
"privacy.noise_multiplier" = [0.5, 1.0]
"""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
NAMES = ("noise_multiplier=0.5", "noise_multiplier=1.0")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "coalmine", *map(str, arguments)]


def coalmine(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=ENVIRONMENT, **options)


def here(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A sweep without interruptions."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny.toml").write_text(TINY)
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit) as stop:
        cli.main(["sweep", str(folder / "tiny.toml"), "--out", str(folder / "whole")])
    assert not stop.value.code
    (folder / "shown.txt").write_text(shown.getvalue())
    return folder / "whole"


def test_a_sweep_ends_with_the_table_of_its_runs(swept):
    shown = (swept.parent / "shown.txt").read_text()
    assert "known-others" in shown
    assert "2 of 2 runs finished" in shown
    assert all((swept / name / "result.json").exists() for name in NAMES)
    assert (swept / "sweep.toml").read_text() == TINY


@pytest.mark.full
@pytest.mark.parametrize(("jobs", "killed"), [(1, NAMES[0]), pytest.param(2, NAMES[1], marks=pytest.mark.slow)])
def test_restart_after_kill_gives_identical_results(swept, tmp_path, jobs, killed):
    """Killed by kill -9 during training: the same command continues, whatever the processes left behind."""
    arguments = ("sweep", swept.parent / "tiny.toml", "--out", tmp_path, "--jobs", jobs)
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    metrics = tmp_path / killed / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 6):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / killed / "result.json").exists()
    time.sleep(0.5 * (jobs > 1))  # time for its workers to notice
    done = coalmine(*arguments)
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        for file in ("result.json", "model.npy", "audit/rounds.log"):
            assert comparable(tmp_path / name / file) == comparable(swept / name / file)


def test_a_failed_run_gives_exit_code_2_and_the_others_finish(tmp_path, capsys):
    (tmp_path / "s.toml").write_text(
        "rounds = 2\n[canaries]\ncount = 20\n[sweep]\nclient.learning_rate = [1e30, 0.1]\n"
    )
    code, out, err = here(capsys, "sweep", tmp_path / "s.toml", "--out", tmp_path / "out", "--json")
    assert code == 2
    assert err.count("\n") == 1
    assert "learning_rate=1e+30 failed: " in err
    failed, finished = json.loads(out)["runs"]
    assert "training has diverged" in failed["error"]
    assert finished["error"] is None
    assert finished["settings"] == {"client.learning_rate": 0.1}
    assert "known-others" in finished["adversaries"]


def test_a_damaged_result_does_not_affect_other_runs(swept, tmp_path, capsys):
    shutil.copytree(swept, tmp_path / "whole")
    damaged = tmp_path / "whole" / NAMES[0] / "result.json"
    damaged.write_text("{")
    code, out, err = here(capsys, "sweep", swept.parent / "tiny.toml", "--out", tmp_path / "whole")
    assert code == 2
    assert "1 of 2 runs finished" in out
    assert "known-others" in out
    assert f"{damaged} is not JSON" in " ".join(err.split())


def test_a_bad_grid_is_one_line_before_anything_starts(tmp_path, capsys):
    (tmp_path / "s.toml").write_text("[sweep]\nprivacy.noise = [[]]\n")
    code, out, err = here(capsys, "sweep", tmp_path / "s.toml", "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "privacy.noise must be str" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_invalid_run_is_named_before_anything_starts(tmp_path, capsys, jobs):
    (tmp_path / "s.toml").write_text("rounds = 2\n[sweep]\nparticipation.clients_per_round = [5, 5000]\n")
    code, out, err = here(capsys, "sweep", tmp_path / "s.toml", "--out", tmp_path / "out", "--jobs", jobs)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        "clients_per_round=5000 cannot be run: participation.clients_per_round must be at most the population, 200"
        in err
    )
    assert not (tmp_path / "out").exists()


def test_the_exit_code_is_the_worst_verdict(tmp_path, capsys):
    (tmp_path / "s.toml").write_text("rounds = 4\n[canaries]\ncount = 200\n[sweep]\nclaim.epsilon = [2.0, 30.0]\n")
    code, out, _ = here(capsys, "sweep", tmp_path / "s.toml", "--out", tmp_path / "out", "--json")
    assert [run["verdict"] for run in json.loads(out)["runs"]] == ["VIOLATION", "PASS"]
    assert code == 1


def test_compare_and_report_read_the_directory_of_a_sweep(swept, tmp_path, capsys):
    code, out, _ = here(capsys, "compare", swept, "--json")
    assert code == 0
    assert [Path(run["run"]).name for run in json.loads(out)] == list(NAMES)
    code, out, _ = here(capsys, "report", swept, "--out", tmp_path / "page.html")
    assert code == 0
    page = (tmp_path / "page.html").read_text()
    assert all(name in page for name in NAMES)
    code, out, _ = here(capsys, "report", swept, "--format", "json")
    assert len(json.loads(out)["runs"]) == 2


def test_a_run_that_is_not_finished_is_left_out_of_the_comparison(swept, tmp_path, capsys):
    begun = tmp_path / "a"
    begun.mkdir()
    (begun / "config.toml").write_text("schema_version = 1\n")
    (tmp_path / "b").symlink_to(swept / NAMES[0])
    code, out, err = here(capsys, "compare", tmp_path, "--json")
    assert code == 0
    assert [Path(run["run"]).name for run in json.loads(out)] == ["b"]
    assert "not finished" in " ".join(err.split())


def test_a_number_in_place_of_a_section_is_rejected(tmp_path, capsys):
    (tmp_path / "grid.toml").write_text('privacy = 1\n[sweep]\n"privacy.noise_multiplier" = [0.5]\n')
    code, _, err = here(capsys, "sweep", tmp_path / "grid.toml", "--out", tmp_path / "runs")
    assert code == 2
    assert "privacy must be a section, since the sweep names privacy.noise_multiplier; got 1" in err
    assert not (tmp_path / "runs").exists()
