"""A run resumed after a kill, a full disk or a power cut gives the same result as an undisturbed one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors

from coalmine.log.rounds_file import MAGIC, RoundLog
from coalmine.log.seed_file import DEMO_SEED
from coalmine.simulation.training_checkpoint import NAME, PREVIOUS
from resumed import comparable

pytest.importorskip("sklearn")
pytestmark = [pytest.mark.full, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

CONFIG = """
rounds = 24
checkpoint_every = 3
[canaries]
count = 30
[engine]
threads = 1
jobs = 1
"""
SWEEP = CONFIG + '[sweep]\n"privacy.noise_multiplier" = [0.5, 1.0]\n'
SAME = ("result.json", "model.npy", "audit/rounds.log")
FAULTS = ("full", "half", "broken", "power", "short")


class Commands:
    """Runs commands one after another, each in its own process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "run.toml").write_text(CONFIG)
        (folder / "sweep.toml").write_text(SWEEP)
        (folder / "seed").write_text(str(DEMO_SEED + 1))
        self._server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("command_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def __call__(self, *arguments, kill_after=None, fault=None) -> int:
        """Run a command and return its exit code, negative if a signal ended it."""
        request = [[str(argument) for argument in arguments], str(self.folder / "output.txt"), fault, kill_after]
        self._server.stdin.write(json.dumps(request) + "\n")
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def train(self, folder: Path, **options) -> int:
        """Start a run, or resume the existing one."""
        if (folder / "config.toml").exists():
            return self("run", "--resume", folder, "--no-page", **options)
        return self("run", "--config", self.folder / "run.toml", "--out", folder, "--no-page", **options)

    def sweep(self, folder: Path, **options) -> int:
        return self("sweep", self.folder / "sweep.toml", "--out", folder, "--jobs", "1", **options)

    def verify(self, folder: Path, **options) -> int:
        model = folder / "model.npy"
        return self("verify", folder, "--seed-file", self.folder / "seed", "--model", model, **options)

    def report(self, folder: Path, **options) -> int:
        return self("report", folder, "--format", "md", "--out", folder / "report.md", **options)


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    server = Commands(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def whole(commands) -> Path:
    """A run without interruptions."""
    assert commands.train(commands.folder / "whole") == 0, commands.output
    return commands.folder / "whole"


@pytest.fixture(scope="module")
def whole_sweep(commands) -> Path:
    assert commands.sweep(commands.folder / "whole-sweep") == 0, commands.output
    return commands.folder / "whole-sweep"


def assert_same(folder: Path, whole: Path) -> None:
    assert folder.is_dir()
    for path in [path for path in whole.rglob("*") if str(path).endswith(SAME)]:
        assert comparable(folder / path.relative_to(whole)) == comparable(path), path
    assert not [
        path for path in folder.rglob(".*.new") if "report" not in path.name
    ]  # a report does not lock the directory


def seconds_of(action) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_resume_after_random_kills_gives_identical_results(commands, whole, tmp_path, kills):
    """SIGKILL during training, resuming or evaluation, several times in one run."""
    length = seconds_of(lambda: commands.train(tmp_path / "timed"))
    instants, killed, runs = random.Random(1), 0, 0
    while killed < kills:
        runs += 1
        folder = tmp_path / str(runs)
        for _ in range(instants.randint(1, 4)):
            code = commands.train(folder, kill_after=instants.uniform(0, length))
            assert code in (0, -signal.SIGKILL), commands.output
            killed += code != 0
        assert commands.train(folder) == 0, commands.output
        assert_same(folder, whole)
        shutil.rmtree(folder)
    print(f"{killed} kills in {runs} runs")


def disturb(commands, command, folder: Path, chance: random.Random, calls: int) -> str:
    """Run a command on a failing disk and return the kind of fault, or "" if the command ended before it."""
    kind = chance.choice(FAULTS)
    number = chance.choice((7, 100, 1000)) if kind == "short" else chance.randint(1, calls)
    code = command(folder, fault=(kind, number))
    if kind == "short":  # slow, but not a failure
        assert code in (0, 3), commands.output
        return kind
    assert code in (0, 2, 3, -signal.SIGKILL), commands.output
    if code == 2:
        assert "Traceback" not in commands.output
        assert commands.output.splitlines()[-1].startswith("coalmine: ") or command == commands.sweep
    if code == -signal.SIGKILL:
        lose_what_was_not_synced(folder, chance)
    return "" if code in (0, 3) else kind


def lose_what_was_not_synced(folder: Path, chance: random.Random) -> None:
    """Simulate a power cut: the end of growing files is lost or filled with zeros."""
    for path in [*folder.rglob("rounds.log"), *folder.rglob("metrics.jsonl")]:
        content = path.read_bytes()
        covered = synced_length(path) if path.name == "rounds.log" else 0
        kept = chance.randint(covered, len(content))
        lost = len(content) - kept
        path.write_bytes(content[:kept] + chance.choice((b"", bytes(lost))))


def synced_length(log: Path) -> int:
    """The synced length of the log: up to the newest checkpoint's round, or all of it if there is a result."""
    home = log.parents[1]
    if (home / "result.json").exists():
        return log.stat().st_size
    found = [home / name for name in (NAME, PREVIOUS) if (home / name).exists()]
    if not found:
        return min(len(MAGIC), log.stat().st_size)
    with safetensors.safe_open(found[0], framework="pt") as file:
        round_number = int(file.metadata()["round_number"])
    return next(entry.end for entry in RoundLog(log, read_only=True).observed if entry.number == round_number)


@pytest.mark.parametrize(
    ("failures", "seed"),
    [(12, 2), pytest.param(100, 3, marks=pytest.mark.slow), pytest.param(100, 4, marks=pytest.mark.slow)],
)
def test_resume_after_write_failures_gives_identical_results(commands, whole, tmp_path, failures, seed):
    """After full disks, short writes and power cuts, run, resume, report and verify can be repeated."""
    chance, seen, runs = random.Random(seed), [], 0
    while len(seen) < failures:
        runs += 1
        folder = tmp_path / str(runs)
        times = chance.randint(1, 4)
        seen += [disturb(commands, commands.train, folder, chance, 110) for _ in range(times)]
        assert commands.train(folder) == 0, commands.output
        for command, calls in ((commands.report, 4), (commands.verify, 4)):
            if runs % 4 == 0:
                seen.append(disturb(commands, command, folder, chance, calls))
                assert command(folder) in (0, 3), commands.output
        assert_same(folder, whole)
        shutil.rmtree(folder)
        seen = [kind for kind in seen if kind]
    print({kind: seen.count(kind) for kind in FAULTS}, "in", runs, "runs")


@pytest.mark.slow
def test_sweeps_resume_after_kills_and_write_failures(commands, whole_sweep, tmp_path):
    length = seconds_of(lambda: commands.sweep(tmp_path / "timed"))
    chance, seen = random.Random(3), 0
    for number in range(20):
        folder = tmp_path / str(number)
        seen += commands.sweep(folder, kill_after=chance.uniform(0, length)) != 0
        seen += bool(disturb(commands, commands.sweep, folder, chance, 220))
        assert commands.sweep(folder) == 0, commands.output
        assert_same(folder, whole_sweep)
    assert seen > 20


@pytest.fixture
def stopped(commands, whole, tmp_path) -> Path:
    """A copy of the finished run without its results, as if it had been killed at the end of the last round."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "model.npy").unlink()
    return tmp_path / "run"


def cut_log(folder: Path, rounds: int) -> None:
    """Truncate the log to this many rounds."""
    log = folder / "audit" / "rounds.log"
    end = next(entry.end for entry in RoundLog(log, read_only=True).observed if entry.number == rounds)
    os.truncate(log, end)


@pytest.mark.parametrize(("left", "resumed_after"), [(23, 21), (21, 21)])
def test_a_truncated_log_resumes_from_the_previous_checkpoint(commands, stopped, whole, left, resumed_after):
    """Checkpoints are at rounds 24 and 21; the log lost its end despite syncing."""
    cut_log(stopped, left)
    assert commands("-v", "run", "--resume", stopped, "--no-page") == 0, commands.output
    said = " ".join(commands.output.split())
    assert f"training continues from the previous checkpoint, round {resumed_after}" in said
    assert f"resuming after round {resumed_after}" in said
    assert_same(stopped, whole)


def test_a_log_shorter_than_both_checkpoints_restarts_with_identical_results(commands, stopped, whole):
    cut_log(stopped, 5)
    assert commands.train(stopped) == 0
    assert "training starts again from round 1" in " ".join(commands.output.split())
    assert_same(stopped, whole)


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "missing"])
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(commands, stopped, whole, harm):
    path = stopped / NAME
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"flip": content, "cut": content[:1000], "empty": b"", "missing": b""}[harm])
    if harm == "missing":
        path.unlink()
    assert commands.train(stopped) == 0, commands.output
    assert "training continues from the previous checkpoint, round 21" in " ".join(commands.output.split())
    assert_same(stopped, whole)
    assert (stopped / NAME).stat().st_size == (stopped / PREVIOUS).stat().st_size == (whole / NAME).stat().st_size


@pytest.mark.parametrize("end", [b"\0" * 5_000, os.urandom(5_000), b"REC\n" + b"\0" * 300])
def test_a_lost_end_of_the_log_is_dropped(commands, stopped, whole, end):
    """A power cut can keep the length of a file and lose its content."""
    cut_log(stopped, 23)
    log = stopped / "audit" / "rounds.log"
    log.write_bytes(log.read_bytes() + end)
    assert commands.train(stopped) == 0, commands.output
    assert "torn last record" in " ".join(commands.output.split())
    assert_same(stopped, whole)


def test_a_damaged_line_of_metrics_is_skipped(commands, stopped, whole):
    path = stopped / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"\xff\0 damaged\n", b'{"round": "x"}\n', b"[" * 9000 + b"\n", *lines[6:]]))
    assert commands.train(stopped) == 0, commands.output
    assert "skipped 3 lines, the first of them 6" in " ".join(commands.output.split())
    assert_same(stopped, whole)
    assert b"damaged" not in path.read_bytes()
