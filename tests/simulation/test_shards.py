"""Sweeps in several processes: every run is trained once, even if a process is killed."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from commands import command, lines_of

from coalmine.log import files
from coalmine.log.run_directory import RunDirectory
from coalmine.simulation.sweep import FAILURE, Shard, make_points, run_sweep
from resumed import comparable

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork server")
TINY = {"rounds": 2, "evaluate_every": 2, "canaries": {"count": 20}, "participation": {"clients_per_round": 10}}
GRID = """
rounds = {rounds}
evaluate_every = 100
checkpoint_every = 5
[canaries]
count = 20
[participation]
clients_per_round = 10
[engine]
threads = 1
jobs = 1
[sweep]
"seed" = {seeds}
"""
SAME = ("result.json", "model.npy", "audit/rounds.log")


def sweep_by_shards(folder, out, *, shards, seeds, rounds, killed):
    """Run a grid in parallel shards, kill one of them during its second run, and return the outputs of the others."""
    (folder / "grid.toml").write_text(GRID.format(rounds=rounds, seeds=list(range(1, seeds + 1))))
    going = [
        command(
            folder / f"shard{number}.json",
            *("sweep", folder / "grid.toml", "--out", out, "--shard", f"{number}/{shards}", "--json"),
        )
        for number in range(1, shards + 1)
    ]
    if killed is not None:
        second = out / f"seed={killed + shards}" / "metrics.jsonl"
        going[killed - 1].wait_for(lambda: 2 < lines_of(second) < rounds)
        going[killed - 1].process.kill()
        assert not (second.parent / "result.json").exists()
    codes = [shard.wait(500) for shard in going]
    assert codes == [-9 if number == killed else 0 for number in range(1, shards + 1)], [one.errors for one in going]
    return [json.loads(shard.text) for number, shard in enumerate(going, 1) if number != killed]


def assert_every_run_was_trained_once(outputs, out, *, seeds, rounds, killed, shards):
    """The outputs of the shards and the rounds on disk both show that each run was trained once."""
    trained = sorted(run["run"] for found in outputs for run in found["runs"] if run["trained"])
    assert len(trained) == len(set(trained))
    missing = {f"seed={seed}" for seed in range(1, seeds + 1)} - set(trained)
    assert f"seed={killed + shards}" not in missing  # another shard took over the interrupted run
    assert missing <= {f"seed={seed}" for seed in range(killed, seeds + 1, shards)}  # finished before the kill
    for seed in range(1, seeds + 1):
        lines = [json.loads(line) for line in (out / f"seed={seed}" / "metrics.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == list(range(1, rounds + 1))
        assert (out / f"seed={seed}" / "result.json").exists()


@pytest.mark.full
def test_three_shards_train_every_run_once_after_one_is_killed(tmp_path):
    rounds, seeds, shards, killed = 40, 6, 3, 2
    out = tmp_path / "out"
    outputs = sweep_by_shards(tmp_path, out, shards=shards, seeds=seeds, rounds=rounds, killed=killed)
    assert_every_run_was_trained_once(outputs, out, seeds=seeds, rounds=rounds, killed=killed, shards=shards)
    again = command(tmp_path / "again.txt", "sweep", tmp_path / "grid.toml", "--out", out, "--shard", "1/1")
    written = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
    assert again.wait() == 0
    assert f"shard 1/1: 0 runs trained here, {seeds} of {seeds} finished" in " ".join(again.text.split())
    assert written == {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
    compared = command(tmp_path / "compared.json", "compare", out, "--json")
    assert compared.wait() == 0
    assert [Path(run["run"]).name for run in json.loads(compared.text)] == [f"seed={s}" for s in range(1, seeds + 1)]
    interrupted = out / f"seed={killed + shards}"
    shutil.copytree(interrupted, tmp_path / "taken-over")
    shutil.rmtree(interrupted)
    alone = command(tmp_path / "alone.txt", "sweep", tmp_path / "grid.toml", "--out", out)
    assert alone.wait() == 0
    for name in SAME:
        assert comparable(tmp_path / "taken-over" / name) == comparable(interrupted / name)


@pytest.mark.slow
def test_four_shards_train_forty_runs_after_one_is_killed(tmp_path):
    rounds, seeds, shards, killed = 60, 40, 4, 3
    out = tmp_path / "out"
    outputs = sweep_by_shards(tmp_path, out, shards=shards, seeds=seeds, rounds=rounds, killed=killed)
    assert_every_run_was_trained_once(outputs, out, seeds=seeds, rounds=rounds, killed=killed, shards=shards)


def test_shards_partition_the_grid():
    points = make_points(TINY, {"seed": list(range(1, 11))})
    for count in (1, 3, 4, 12):
        parts = [list(Shard(number, count).own(points)) for number in range(1, count + 1)]
        assert sorted(point.name for part in parts for point in part) == sorted(point.name for point in points)
        for number, part in enumerate(parts, 1):
            others = Shard(number, count).others(points)
            assert {point.name for point in others} == {point.name for point in points if point not in part}
            assert len(others) + len(part) == len(points)


@pytest.mark.parametrize(
    "text", ["0/4", "5/4", "-1/4", "1/0", "3", "a/b", "1/4/4", "1 / 4", "1.5/4", "", "1/1000000000000"]
)
def test_invalid_shard_gives_a_one_line_error(text):
    with pytest.raises(ValueError, match=r"shard|at least 1") as error:
        Shard.parse(text)
    assert "\n" not in str(error.value)


def test_invalid_shard_is_rejected_before_anything_starts(tmp_path):
    (tmp_path / "grid.toml").write_text(GRID.format(rounds=2, seeds=[1]))
    done = command(tmp_path / "o.txt", "sweep", tmp_path / "grid.toml", "--out", tmp_path / "out", "--shard", "5/4")
    assert done.wait() == 2
    assert done.errors == "coalmine: a shard must lie between 1 and the number of shards, at most 10,000, got 5/4\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_run_locked_by_another_process_is_skipped(tmp_path):
    """It is trained once the lock is released, although the lock file still exists."""
    points = make_points(TINY, {"seed": [1, 2]})
    holder = RunDirectory(tmp_path / "seed=1")
    holder.lock()
    held, trained = run_sweep(points, tmp_path, shard=Shard(1, 1))
    assert (held.held, held.trained, held.error) == (True, False, None)
    assert (trained.held, trained.trained, trained.error) == (False, True, None)
    alone, _ = run_sweep(points, tmp_path)
    assert "is being written by another process; wait for it" in alone.error
    holder.close()
    assert (tmp_path / "seed=1" / ".lock").exists()
    first, second = run_sweep(points, tmp_path, shard=Shard(2, 2))  # its own run is finished; it takes over the other
    assert (first.point.name, first.trained) == ("seed=1", True)
    assert (second.point.name, second.trained) == ("seed=2", False)


@pytest.mark.full
def test_a_failed_run_is_not_repeated_by_other_shards(tmp_path):
    points = make_points(TINY, {"client.learning_rate": [1e30, 0.1]})
    [failed, other] = run_sweep(points, tmp_path, shard=Shard(1, 2))
    assert "training has diverged" in failed.error
    assert other.trained
    note = tmp_path / points[0].name / FAILURE
    assert "training has diverged" in note.read_text()
    written = note.stat().st_mtime_ns
    [finished] = run_sweep(points, tmp_path, shard=Shard(2, 2))
    assert (finished.point.name, finished.error) == (points[1].name, None)
    assert note.stat().st_mtime_ns == written
    [again, _] = run_sweep(points, tmp_path)  # without shards, a failed run is repeated
    assert "training has diverged" in again.error
    assert not note.exists()


def test_a_file_system_without_locks_gives_an_error(tmp_path, monkeypatch):
    """The error is not mistaken for a lock of another process; otherwise no process would train the run."""

    def refuse(handle, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="this file system has no locks"):
        RunDirectory(tmp_path / "run").lock()
    [run] = run_sweep(make_points(TINY, {"seed": [1]}), tmp_path, shard=Shard(1, 1))
    assert "this file system has no locks" in run.error


@pytest.mark.full
def test_the_lock_of_a_killed_process_is_released(tmp_path):
    """The kernel releases it, so the user need not clean up."""
    (tmp_path / "grid.toml").write_text(GRID.format(rounds=10_000, seeds=[1]))
    going = command(tmp_path / "o.txt", "sweep", tmp_path / "grid.toml", "--out", tmp_path / "out", "--shard", "1/2")
    going.wait_for(lambda: lines_of(tmp_path / "out" / "seed=1" / "metrics.jsonl") > 0)
    directory = RunDirectory(tmp_path / "out" / "seed=1")
    assert not directory.try_lock()
    going.process.kill()
    going.wait()
    end = time.monotonic() + 400
    while not directory.try_lock():
        assert time.monotonic() < end
    directory.close()
