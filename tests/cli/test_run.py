"""`coalmine run`, `resume` and `compare` as a user calls them, with real processes that are really killed."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import called

from coalmine import Poisson, amplified_epsilon, mechanism_epsilon
from coalmine.cli import main as cli
from resumed import comparable

pytest.importorskip("torch")

SHORT = ("--rounds", "30", "--canaries", "200")
CONFIG = "checkpoint_every = 4\n[engine]\nthreads = 1\njobs = 1\n"
# One thread: with other tests running, two would wait for each other. No .pyc files: the file size limit is not for them.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def pageless(*arguments: object) -> list[str]:
    """The arguments, without the report unless a test requests it: drawing it takes as long as the run."""
    drawn = {"--page", "--no-page"} & set(arguments) or arguments[0] not in ("run", "resume")
    return [*map(str, arguments), *([] if drawn else ["--no-page"])]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "coalmine", *pageless(*arguments)]


def coalmine(*arguments: object) -> subprocess.CompletedProcess[str]:
    return called(*pageless(*arguments))


def in_a_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=ENVIRONMENT, **options)


def started(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)


KILLED = """
import os, runpy, signal, sys

metrics, rounds, write = sys.argv[1], int(sys.argv[2]), os.pwrite

def killed_after(*arguments):
    done = write(*arguments)
    if os.path.exists(metrics):
        with open(metrics, "rb") as lines:
            if lines.read().count(b"\\n") >= rounds:
                os.kill(os.getpid(), signal.SIGKILL)
    return done

os.pwrite = killed_after
sys.argv = ["coalmine", *sys.argv[3:]]
runpy.run_module("coalmine", run_name="__main__")
"""


def killed_after(rounds: int, folder: Path, *arguments: object) -> int:
    """The exit code of a command that is killed as soon as so many rounds are on disk, however fast the machine is."""
    program = [sys.executable, "-c", KILLED, str(folder / "metrics.jsonl"), str(rounds)]
    return subprocess.run([*program, *pageless(*arguments)], stdout=subprocess.DEVNULL, env=ENVIRONMENT).returncode


def failed_with(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr, exit code 2, nothing on stdout."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run without interruptions."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "short.toml").write_text(CONFIG)
    done = coalmine("run", "--config", folder / "short.toml", *SHORT, "--out", folder / "run", "--page")
    assert done.returncode == 0, done.stderr
    (folder / "shown.txt").write_text(done.stdout)
    return folder / "run"


def test_a_run_without_a_claim_prints_what_it_measured_and_how_to_claim(finished):
    lines = (finished.parent / "shown.txt").read_text().splitlines()
    assert lines[0] == "NO VERDICT: nothing was claimed for the run"
    assert [line[2:15].strip() for line in lines[1:]] == [
        "measured", "lower bound", "accuracy", "checked", "not checked", "next", "more",
    ]  # fmt: skip
    assert "an attacker who knows everything but this client" in lines[1]
    assert "State the ε before training" in lines[-2]
    assert lines[-1].endswith("/run/report.html")


def test_details_show_every_attacker_and_gauge(finished, capsys):
    """The measured epsilon, a client's and the analytical one stand below the table."""
    ends_with(0, "run", "--resume", finished, "--no-page", "--details")
    out = capsys.readouterr().out
    result = json.loads((finished / "result.json").read_text())
    for rung in result["adversaries"]:
        assert sum(line.split()[:1] == [rung] for line in out.splitlines()) == 1
    for gauge in result["gauges"]:
        assert f"gauge {gauge}: " in out
    assert f"client's ε {result['client_epsilon']:.4g}: analytical, for a client, in about" in out
    assert "sampler: not checked (" in out
    assert "public demo seed" in out


def test_a_fault_is_found_and_named_in_the_result(tmp_path, capsys):
    config = ("--rounds", "12", "--canaries", "100", "--claim", "analytical", "--no-page")
    ends_with(1, "run", *config, "--fault", "halved-noise", "--out", tmp_path / "run")
    assert capsys.readouterr().out.startswith("VIOLATION: the run gives away more than")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "this run has a fault on purpose: half the noise" in result["trainer_notes"]


def test_a_run_records_what_was_audited(finished):
    audited = json.loads((finished / "result.json").read_text())["audited"]
    assert {name: audited[name]["status"] for name in ("weights", "clipping", "sampler", "participations")} == {
        "weights": "checked", "clipping": "checked", "sampler": "not checked", "participations": "not checked",
    }  # fmt: skip
    assert "each client in about 8" in audited["participations"]["detail"]


def test_rows_per_number_of_presentations_are_folded(tmp_path, capsys):
    drawn = ("--participation", "poisson", "--pattern", "clients", "--canaries", "200", "--no-page")
    ends_with(0, "run", "--rounds", "20", *drawn, "--details", "--out", tmp_path / "run")
    out = capsys.readouterr().out
    assert "more rows, one for each number of presentations" in out
    assert sum(line.split()[:1] == ["known-others"] for line in out.splitlines()) == 1


def test_a_run_writes_its_directory(finished):
    result = json.loads((finished / "result.json").read_text())
    assert result["accuracy"] > 0.5
    assert result["reason_code"] == "no claim"
    low, high = result["adversaries"]["known-others"]["interval"]
    assert low < result["analytical_epsilon"] < high
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, 31))
    names = {path.name for path in finished.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "result.json", "checkpoint.safetensors", "model.npy", "audit"}


def test_a_run_can_be_verified(finished):
    from coalmine.log.seed_file import DEMO_SEED

    seed = finished.parent / "seed"
    seed.write_text(str(DEMO_SEED + 1))
    done = coalmine("verify", finished, "--seed-file", seed, "--model", finished / "model.npy", "--json")
    held = {name: check["held"] for name, check in json.loads(done.stdout).items()}
    assert done.returncode == 3  # a demonstration, and nobody noted its digests elsewhere
    assert {name for name, value in held.items() if value is not True} == {"seed", "commitment date", "log date"}
    assert False not in held.values()
    np.savez(finished.parent / "model.npz", model=np.zeros(3))
    refused = coalmine("verify", finished, "--seed-file", seed, "--model", finished.parent / "model.npz")
    assert refused.returncode == 2
    assert "got an archive of several arrays" in refused.stderr


@pytest.mark.full
def test_resume_after_kill_gives_identical_results(finished, tmp_path):
    """Killed during training, as soon as this many rounds are on disk."""
    for wanted in (2, 17):
        folder = tmp_path / str(wanted)
        arguments = ("run", "--config", finished.parent / "short.toml", *SHORT, "--out", folder)
        assert killed_after(wanted, folder, *arguments) == -signal.SIGKILL
        assert not (folder / "result.json").exists()
        done = in_a_process("run", "--resume", folder)
        assert done.returncode == 0, done.stderr
        for name in ("result.json", "model.npy", "audit/rounds.log"):
            assert comparable(folder / name) == comparable(finished / name)


@pytest.mark.slow
def test_resume_after_kills_at_random_instants(tmp_path):
    """Killed at any instant, from before the first round to after the last, every resumed run ends the same."""
    arguments = ("run", "--rounds", "400", "--canaries", "400", "--out")
    assert started(*arguments, tmp_path / "whole").wait() == 0
    instants, caught = random.Random(1), 0
    for number in range(20):
        folder = tmp_path / str(number)
        process = started(*arguments, folder)
        after, metrics = instants.randrange(-40, 400), folder / "metrics.jsonl"  # the round after which the kill comes
        while (
            after >= 0
            and process.poll() is None
            and (not metrics.exists() or metrics.read_bytes().count(b"\n") < after)
        ):
            time.sleep(0.001)
        time.sleep(instants.uniform(0, 0.02) if after >= 0 else instants.uniform(0, 3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        caught += (folder / "config.toml").exists() and not (folder / "result.json").exists()
        # A run killed before there was anything to resume starts again.
        done = (
            in_a_process("run", "--resume", folder)
            if (folder / "config.toml").exists()
            else in_a_process(*arguments, folder)
        )
        assert done.returncode == 0, done.stderr
        for name in ("result.json", "model.npy", "audit/rounds.log"):
            assert comparable(folder / name) == comparable(tmp_path / "whole" / name)
    assert caught >= 10  # otherwise the kills missed the training


def test_resuming_a_finished_run_changes_nothing(finished):
    before = (finished / "result.json").read_bytes()
    done = coalmine("run", "--resume", finished, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads(before)
    assert (finished / "result.json").read_bytes() == before


@pytest.mark.parametrize(("claim", "code", "verdict"), [("analytical", 0, "PASS"), ("2", 1, "VIOLATION")])
def test_the_exit_code_is_the_verdict(tmp_path, claim, code, verdict):
    done = coalmine("run", *SHORT, "--claim", claim, "--out", tmp_path / "run")
    assert done.returncode == code, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["verdict"] == verdict
    assert verdict in done.stdout


def test_too_few_canaries_are_underpowered(tmp_path):
    done = coalmine(
        "run",
        "--rounds",
        "10",
        "--canaries",
        "10",
        "--noise-multiplier",
        "4",
        "--claim",
        "analytical",
        "--out",
        tmp_path,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.startswith("UNDERPOWERED: ")
    assert "canaries" in done.stdout[done.stdout.index("  next  ") :]


def test_another_config_in_the_same_directory_is_rejected_without_changes(finished, capsys):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    said = fails_here(capsys, "run", *SHORT, "--noise-multiplier", "2", "--out", finished)
    assert "holds a run with another config" in said
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_damaged_checkpoints_are_rejected_and_training_can_restart(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    checkpoints = [folder / "checkpoint.safetensors", folder / "checkpoint.previous.safetensors"]
    for checkpoint in checkpoints:
        content = bytearray(checkpoint.read_bytes())
        content[-1] ^= 1
        checkpoint.write_bytes(content)
    failed_with(coalmine("run", "--resume", folder), "checkpoint.safetensors is damaged", "delete it to train again")
    for checkpoint in checkpoints:
        checkpoint.unlink()
    assert coalmine("run", "--resume", folder).returncode == 0
    assert comparable(folder / "result.json") == comparable(finished / "result.json")


@pytest.mark.full
def test_a_full_disk_is_one_line_and_the_run_can_be_resumed(finished, tmp_path):
    """A limit on the file size stands in for the full disk: the write that exceeds it fails."""
    folder = tmp_path / "run"
    arguments = ("run", "--config", finished.parent / "short.toml", *SHORT, "--out", folder)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    done = in_a_process(*arguments, preexec_fn=limited)
    failed_with(done, f"writing {folder} failed", f"`coalmine run --resume {folder}` continues the run")
    assert not (folder / "result.json").exists()
    assert coalmine("run", "--resume", folder).returncode == 0
    assert comparable(folder / "result.json") == comparable(finished / "result.json")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files that this process can write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def ends_with(code: int, *arguments: object) -> None:
    """Check the exit code of a command called in this process."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    assert stop.value.code == code


@pytest.mark.full
def test_a_page_that_cannot_be_written_does_not_hide_the_verdict(tmp_path, capsys):
    """The page is the largest file of such a short run: a limit below its size affects only the page."""
    folder, config = tmp_path / "run", tmp_path / "few.toml"
    config.write_text("rounds = 8\n[canaries]\ncount = 30\nunobserved = 30\n[privacy]\nnoise_multiplier = 0.2\n")
    with largest_file(200_000):
        ends_with(1, "run", "--config", config, "--claim", "2", "--out", folder)
    out, err = capsys.readouterr()
    assert out.startswith("VIOLATION: the run gives away more than")
    assert err == (
        f"coalmine: report.html could not be written (File too large); `coalmine report {folder}` writes it later\n"
    )
    assert not list(folder.glob("*report.html*"))
    ends_with(0, "report", folder)
    assert (folder / "report.html").stat().st_size > 200_000


@pytest.mark.parametrize("lines", [None, 0, 20])
def test_lost_metrics_do_not_change_the_result(finished, tmp_path, capsys, lines):
    """The checkpoint is at the last round, so nothing is left to train; round 20 had a different accuracy."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").unlink()
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(metrics[:lines]))
        assert json.loads(metrics[19])["accuracy"] != json.loads(metrics[-1])["accuracy"]
    (folder / "result.json").unlink()
    ends_with(0, "run", "--resume", folder, "--no-page")
    assert comparable(folder / "result.json") == comparable(finished / "result.json")


@pytest.fixture
def stopped(tmp_path) -> Path:
    """A run with a rounds file, stopped after 12 of 14 rounds."""
    from coalmine.simulation.config import CanarySettings, EngineSettings, ParticipationSettings, RunConfig
    from coalmine.simulation.training_run import Progress, start

    (tmp_path / "rounds.txt").write_text("".join(f"{number} {number + 50} 7\n" for number in range(20, 34)))
    named = ParticipationSettings(kind="file", rounds_file=str(tmp_path / "rounds.txt"))
    settings = RunConfig(
        rounds=14,
        checkpoint_every=4,
        participation=named,
        canaries=CanarySettings(count=40, unobserved=40),
        engine=EngineSettings(threads=1),
    )

    def stop(seen: Progress) -> None:
        if seen.report.round_number == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(settings, tmp_path / "run", progress=stop)
    start(settings, tmp_path / "whole")
    return tmp_path / "run"


def test_a_changed_rounds_file_is_rejected(stopped, capsys):
    rounds = stopped.parent / "rounds.txt"
    text = rounds.read_text()
    rounds.write_text(text.replace("30 80 7", "30 80 8"))
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    said = fails_here(capsys, "run", "--resume", stopped)
    assert f"the rounds file {rounds} must be the one that {stopped} started with" in said
    rounds.unlink()
    assert f"{rounds} must be readable (No such file or directory)" in fails_here(capsys, "run", "--resume", stopped)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before
    rounds.write_text(text)
    ends_with(0, "run", "--resume", stopped, "--no-page", "--details")
    assert "analytical, for the most frequent client, in 14 rounds" in capsys.readouterr().out
    for name in ("result.json", "model.npy", "audit/rounds.log"):
        assert comparable(stopped / name) == comparable(stopped.parent / "whole" / name)


def test_a_run_with_a_rounds_file_can_be_repeated_and_resumed(stopped):
    (stopped / "rounds.sha256").unlink()  # as in a run that began before coalmine stored this digest
    ends_with(0, "run", "--resume", stopped, "--no-page")
    ends_with(0, "run", "--config", stopped / "config.toml", "--out", stopped.parent / "again", "--no-page")
    for folder in (stopped, stopped.parent / "again"):
        assert comparable(folder / "result.json") == comparable(stopped.parent / "whole" / "result.json")
        assert (folder / "rounds.sha256").is_file()


def test_a_bad_rounds_file_can_be_corrected(tmp_path, capsys):
    """A rounds file that was rejected is not stored."""
    rounds = tmp_path / "rounds.txt"
    rounds.write_text("1 2\n1 x\n")
    few = ("run", "--rounds", "2", "--canaries", "20", "--participation", "file")
    few = (*few, "--set", f"participation.rounds_file={rounds}")
    assert "line 2: 'x' is not one of the 200 clients" in fails_here(capsys, *few, "--out", tmp_path / "run")
    rounds.write_text("1 2\n1 3\n")
    ends_with(0, *few, "--out", tmp_path / "run", "--no-page")


def test_canaries_replace_a_tenth_of_the_clients_or_the_given_fraction(tmp_path, capsys):
    for given, number in (
        (["--pattern", "replace"], 20),
        (["--pattern", "replace", "--set", "canaries.replace_fraction=0.3"], 60),
    ):
        folder = tmp_path / str(number)
        ends_with(0, "run", "--rounds", "4", "--pattern", "replace", *given, "--no-page", "--out", folder)
        assert capsys.readouterr().out.startswith("NO VERDICT: ")
        assert json.loads((folder / "result.json").read_text())["canaries"] == number
    few = ("--pattern", "replace", "--set", "canaries.replace_fraction=0.04")
    said = fails_here(capsys, "run", *few, "--out", tmp_path / "few")
    assert "canaries.replace_fraction 0.04 of 200 clients must be at least 10 canaries, got 8" in said
    assert not (tmp_path / "few").exists()


def test_the_noise_split_of_adaptive_clipping_is_printed(tmp_path, capsys):
    settings = ("--set", "privacy.clipping=adaptive", "--noise-multiplier", "4", "--rounds", "4", "--canaries", "40")
    ends_with(0, "run", *settings, "--clients-per-round", "50", "--no-page", "--details", "--out", tmp_path / "run")
    # 60 per round: the count has std 3 and a client changes it by ½, a multiplier of 6; updates get 1/√(4⁻² − 6⁻²) = 5.367.
    said = capsys.readouterr().out
    assert "adaptive clipping spends ε 0.6858 on its count (noise multiplier 6), so the updates have" in said
    assert "noise multiplier 5.367 and known-others is compared with" in said


def fails_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on stderr of a command that ends with exit code 2, run in this process."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    return err


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "must be a directory, got a file" in fails_here(capsys, "run", *SHORT, "--out", tmp_path / "file")
    assert "/proc/coalmine" in fails_here(capsys, "run", *SHORT, "--out", "/proc/coalmine")
    if os.geteuid():  # root can write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        assert "Permission denied" in fails_here(capsys, "run", *SHORT, "--out", tmp_path / "closed" / "run")


@pytest.mark.full
def test_a_second_process_cannot_write_to_the_run(finished):
    from coalmine.log.run_directory import RunDirectory

    home = RunDirectory(finished)
    home.lock()
    try:
        failed_with(in_a_process("run", "--resume", finished), "is being written by another process")
    finally:
        home.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--rounds", "0"], "rounds must be at least 1, got 0"),
        (
            ["run", "--task", "cifar"],
            "task.name must be one of digits, mnist-by-writer",
        ),
        (["run", "--claim", "low"], "must be a number, `mechanism:E`, `analytical` or `accountant`, got 'low'"),
        (
            ["run", "--pattern", "replace", "--set", "canaries.replace_fraction=0.2", "--canaries", "50"],
            "give either canaries.count or canaries.replace_fraction, not both, got 50 and 0.2",
        ),
        (
            ["run", "--set", "canaries.replace_fraction=0.2", "--pattern", "clients"],
            "canaries.replace_fraction must be given with pattern replace only, got pattern clients",
        ),
        (["run", "--set", "canaries.presentations=1,x"], "canaries.presentations must be int, got '1,x'"),
        (["run", "--set", "privacy.clip_norm"], "must be like privacy.clip_norm=0.3, got 'privacy.clip_norm'"),
        (["run", "--set", "privacy.clip.norm=1"], "must be like privacy.clip_norm=0.3"),
        (["run", "--set", "privacy.noise=brown"], "privacy.noise must be one of gaussian, tree, banded, got 'brown'"),
        (["run", "--set", "privacy=3"], "privacy must be a section, got 3"),
        (["run", "--set", "privacy=3", "--set", "privacy.delta=0.1"], "privacy is a section, got privacy=3"),
        (["run", "--set", "rounds=" + 2000 * "["], "rounds must be int"),
        (["run", "--resume", "{tmp}/nowhere", "--rounds", "3"], "with its own settings: omit --rounds"),
        (["run", "--resume", "{tmp}/nowhere", "--set", "rounds=3"], "with its own settings: omit --set"),
        (["run", "--resume", "{tmp}/nowhere", "--out", "{tmp}/run"], "with its own settings: omit --out"),
        (
            ["run", "--claim", "analytical", "--noise-multiplier", "0"],
            "without noise the computed epsilon is infinite",
        ),
        (["run", "--canaries", "9700", "--out", "{tmp}/run"], "dimension 9610"),
        (["run", "--clients-per-round", "300", "--out", "{tmp}/run"], "must be at most the population, 200, got 300"),
        (["run", "--config", "{tmp}/absent.toml"], "absent.toml"),
        (["run", "--config", "{tmp}/bad.toml"], "is not TOML"),
        (["run", "--config", "{tmp}/typo.toml"], "a config has no privacy.noise_multiplyer"),
        (["run", "--seed-file", "{tmp}/empty", "--out", "{tmp}/run"], "is empty"),
        (["run", "--task", "fashion-mnist", "--data-dir", "{tmp}", "--out", "{tmp}/run"], "train-images-idx3-ubyte.gz"),
        (["run", "--device", "meta", "--out", "{tmp}/run"], "engine.device must be auto, cpu or cuda, got 'meta'"),
        (
            ["run", "--set", "privacy.clip_norm=1e300", "--out", "{tmp}/run"],
            "must be above 0 and at most 1e+30, got 1e+300",
        ),
        (
            ["run", "--set", "privacy.clipping=adaptive", "--noise-multiplier", "100", "--out", "{tmp}/run"],
            "the noise of the count must be above half of the noise multiplier",
        ),
        (["run", "--config", "{tmp}/nan.toml", "--out", "{tmp}/run"], "privacy.count_noise must be finite, got nan"),
        (["run", "--config", "{tmp}/threads.toml", "--out", "{tmp}/run"], "engine.threads must be at most 1,024"),
        (["run", "--config", "{tmp}/adam.toml", "--out", "{tmp}/run"], "server.epsilon must be above 0, got -1.0"),
        (["run", "--resume", "{tmp}/nowhere"], "is not a run directory"),
        (["run", "--resume", "{tmp}/deep/odd"], "rounds"),
        (["compare", "{tmp}/nowhere"], "does not exist: name the directory of a run"),
        (["compare", "{tmp}"], "config.toml, result.json and audit/record.json are all missing"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, message):
    (tmp_path / "bad.toml").write_text("rounds = \n")
    (tmp_path / "typo.toml").write_text("[privacy]\nnoise_multiplyer = 1\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "nan.toml").write_text("[privacy]\nclipping = 'adaptive'\ncount_noise = nan\n")
    (tmp_path / "threads.toml").write_text("[engine]\nthreads = 100000\n")
    (tmp_path / "adam.toml").write_text("[server]\nepsilon = -1.0\n")
    (tmp_path / "deep" / "odd").mkdir(parents=True)
    (tmp_path / "deep" / "odd" / "config.toml").write_text("schema_version = 1\nrounds = [3]\n")
    assert message in fails_here(capsys, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_without_torch_the_extra_is_named():
    code = "import sys; sys.modules['torch'] = None; from coalmine.cli.main import main; main(['run'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    failed_with(done, "training needs: pip install 'coalmine[simulation]'")


SAMPLED = ("--participation", "poisson", "--clients-per-round", "20", "--noise-multiplier", "1", "--no-page")


def test_the_accountants_epsilon_passes_and_is_verified(tmp_path, capsys):
    """30 rounds at q = 0.1: three legs pass, and the analytical epsilon is printed next to the claim."""
    from coalmine.log.seed_file import DEMO_SEED

    run = tmp_path / "run"
    ends_with(0, "run", *SHORT, *SAMPLED, "--claim", "accountant", "--out", run)  # samples canaries as clients
    assert capsys.readouterr().out.startswith("PASS: the run keeps ε ≤ ")
    result = json.loads((run / "result.json").read_text())
    scheme = Poisson(0.1, rounds=30)
    assert result["claimed_epsilon"] == pytest.approx(amplified_epsilon(1.0, scheme, 1e-6), rel=1e-9)
    assert {name: leg["verdict"] for name, leg in result["legs"].items()} == {
        "accounting": "PASS", "noise": "PASS", "sampling": "PASS",
    }  # fmt: skip
    assert result["analytical_epsilon"] == mechanism_epsilon(1.0, delta=1e-6, participations=result["presentations"])
    (tmp_path / "seed").write_text(str(DEMO_SEED + 1))
    ends_with(3, "verify", run, "--seed-file", tmp_path / "seed", "--model", run / "model.npy", "--json")
    checks = json.loads(capsys.readouterr().out)
    assert {name for name, check in checks.items() if check["held"] is not True} == {
        "seed", "commitment date", "log date",
    }  # fmt: skip


def test_planned_canaries_do_not_observe_the_sampler(tmp_path, capsys):
    spread = ("--pattern", "spread", "--claim", "accountant", "--details")
    ends_with(3, "run", *SHORT, *SAMPLED, *spread, "--out", tmp_path / "run")
    out = " ".join(capsys.readouterr().out.split())
    assert "the pipeline's own sampler was not observed" in out
    assert "--pattern clients or --pattern replace lets it pick the canaries" in out


def test_compare_lists_runs_side_by_side(finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    table = coalmine("compare", finished, copy, finished).stdout  # a run that is named twice has one row
    assert table.count(str(finished)[:20]) == 2
    result = json.loads((finished / "result.json").read_text())
    [run] = json.loads(coalmine("compare", finished, "--json").stdout)
    assert run["adversaries"]["final"]["epsilon"] == result["adversaries"]["final"]["epsilon"]
    assert run["adversaries"]["known-others"]["interval"] == result["adversaries"]["known-others"]["interval"]
    assert run["accuracy"] == result["accuracy"]


def test_missing_data_is_reported_before_the_directory_is_created(tmp_path):
    """Otherwise the same command with the right folder would be rejected."""
    done = coalmine("run", "--task", "stackexchange", "--data-dir", tmp_path / "nowhere", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "does not exist" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--clients-per-round", 5000), "must be at most the population, 200, got 5000"),
        (("--canaries", 100_000), "got 100000 canaries in dimension 9610"),
        (("--seed", 10**44), "seed must be an integer"),
        (("--participation", "limited", "--set", "participation.separation=1000"), "need 50000 clients, got 200"),
        (("--set", "participation.separation=3"), "participation.separation must be given with kind limited only"),
        (("--claim", "magic"), "must be a number, `mechanism:E`, `analytical` or `accountant`, got 'magic'"),
        (("--set", "claim.amplified=true"), "claim.amplified belongs to a claimed number"),
        (("--stop-on-violation",), "claim.stop_on_violation needs a claim that a round can refute"),
        (("--claim", 1, "--set", "claim.amplified=true", "--rounds", 6), "whole epochs of 4 rounds"),
    ],
)
def test_settings_are_validated_before_the_directory_is_created(tmp_path, capsys, arguments, said):
    """Otherwise the corrected command would be rejected."""
    assert said in fails_here(capsys, "run", *arguments, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_diverged_training_names_the_setting_to_lower(tmp_path, capsys):
    said = fails_here(capsys, "run", "--rounds", 3, "--set", "client.learning_rate=1e30", "--out", tmp_path / "run")
    assert "training has diverged: the release of round 1 is not finite; lower client.learning_rate" in said


def test_a_misspelt_key_is_reported_with_the_known_keys(tmp_path, capsys):
    (tmp_path / "c.toml").write_text("[privacy]\nnoise_multiplir = 1\n")
    said = fails_here(capsys, "run", "--config", tmp_path / "c.toml", "--out", tmp_path / "run")
    assert "a config has no privacy.noise_multiplir; privacy has noise_multiplier, " in said


def test_nothing_to_resume_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert "holds no run: config.toml is missing" in fails_here(capsys, "run", "--resume", tmp_path / "empty")
    assert "is not a run directory" in fails_here(capsys, "run", "--resume", tmp_path / "missing")


def test_quiet_prints_the_result_only(tmp_path, capsys):
    few = ["--rounds", "4", "--canaries", "60", "--set", "canaries.presentations=[1, 2]"]
    arguments = ["run", *few, "--no-page", "--out"]
    with pytest.raises(SystemExit):
        cli.main(["-q", *arguments, str(tmp_path / "run")])
    out = capsys.readouterr().out
    assert out.startswith("NO VERDICT: ")
    assert len(out.splitlines()) <= 10
    assert "coalmine report" in out[out.index("  more  ") :]


CLAIMED = "[claim]\nanalytical = true\n"
REPLACED = '[canaries]\nreplace_fraction = 0.1\npattern = "replace"\n[claim]\nepsilon = 3.0\n'


@pytest.mark.parametrize(
    ("config", "options", "wanted"),
    [
        (CLAIMED, ["--claim", 5], {"claim": {"epsilon": 5.0}}),
        (REPLACED, ["--claim", "analytical"], {"claim": {"analytical": True}}),
        (
            CLAIMED,
            ["--pattern", "replace", "--set", "canaries.replace_fraction=0.1"],
            {"canaries": {"replace_fraction": 0.1}},
        ),
        (REPLACED, ["--canaries", 30], {"canaries": {"count": 30}}),
        (
            "[server]\nmomentum = 0.9\n",
            ["--set", "server.optimizer=adam"],
            {"server": {"optimizer": "adam", "momentum": 0.0}},
        ),
    ],
)
def test_options_override_conflicting_config_settings(tmp_path, config, options, wanted):
    (tmp_path / "run.toml").write_text("rounds = 2\n" + config)
    if "canaries" not in wanted and "[canaries]" not in config:
        options = [*options, "--canaries", 20]
    coalmine("run", "--config", tmp_path / "run.toml", *options, "--no-page", "--out", tmp_path / "run")
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    for section, values in wanted.items():
        assert written[section] | values == written[section]


def test_an_analytical_epsilon_of_zero_cannot_be_claimed(tmp_path):
    settings = ("--noise-multiplier", 50, "--delta", 0.01, "--rounds", 3, "--canaries", 20, "--no-page")
    for claim in ([], ["--claim", "analytical"]):
        done = coalmine("run", *settings, *claim, "--out", tmp_path / str(len(claim)), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["reason_code"] == "no claim"
        assert ("there is no claim to judge" in " ".join(done.stderr.split())) == bool(claim)


@pytest.mark.full
def test_quiet_prints_the_verdict_in_any_encoding(tmp_path):
    settings = ("--rounds", 3, "--canaries", 20, "--claim", 1, "--no-page", "--out", tmp_path / "run")
    poor = ENVIRONMENT | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command("-q", "run", *settings), capture_output=True, encoding="latin-1", env=poor)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("VIOLATION: the run gives away more than")
