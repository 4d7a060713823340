"""Regression tests for faults in commands' input and output, found by fuzzing and by hostile use."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import coalmine
from coalmine import Claim, RunDirectory
from coalmine.cli.main import app, main
from coalmine.cli.program import _message
from coalmine.log import files
from coalmine.log.files import json_ready, write_atomically
from coalmine.log.seed_file import read_seed, write_seed
from coalmine.result.derivation import derive_result

STORED = Path(__file__).parents[1] / "golden" / "stored"
PROGRAM = [sys.executable, "-m", "coalmine"]
ESCAPE = "\x1b[31mred"


def answer(capsys, *arguments):
    """The exit code and the output of a command called in this process."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code, *capsys.readouterr()


def copied_run(folder, *, called="run"):
    """Copy a stored run and write the result that follows from its log."""
    run = Path(shutil.copytree(STORED / "digits", folder / called, dirs_exist_ok=True))
    stored = json.loads((run / "result.json").read_text())
    settings, _ = RunDirectory(run).read_record()
    claim = Claim(epsilon=stored["claimed_epsilon"], participations=stored["claim_participations"])
    found = derive_result(RunDirectory(run).read_log(), settings, claim=claim, clients=stored["clients"])
    (run / "result.json").write_text(json.dumps(json_ready(stored | found.to_dict())))
    return run


@pytest.mark.parametrize("name", ["d[/b]", "[red]x", ESCAPE, "a\u202eb"])
@pytest.mark.parametrize("command", ["compare", "verdict", "watch", "report --format md"])
def test_run_names_are_printed_without_markup_or_control_characters(command, name, tmp_path, capsys):
    run = copied_run(tmp_path, called=name)
    code, out, err = answer(capsys, *command.split(), str(run))
    assert code in (0, 1, 3), err
    assert "\x1b" not in out + err
    assert "\u202e" not in out + err
    if name == "d[/b]" and "report" not in command:
        assert "d[/b]" in out


def test_control_characters_in_the_task_and_in_an_error_are_replaced(tmp_path, capsys):
    run = copied_run(tmp_path)
    values = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(values | {"task": ESCAPE}))
    code, out, _ = answer(capsys, "compare", str(run))
    assert (code, "\x1b" in out, "[31mred" in out) == (0, False, True)
    code, _, err = answer(capsys, "verdict", f"{ESCAPE}\nrun")
    assert (code, len(err.splitlines()), "\x1b" in err) == (2, 1, False)


@pytest.mark.parametrize("name", ["result.json", "audit/record.json", "config.toml", "audit/rounds.log"])
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero"])
@pytest.mark.parametrize("command", ["verdict", "compare", "watch", "report --format md"])
def test_pipes_and_devices_in_a_run_directory_are_rejected(command, kind, name, tmp_path, capsys):
    run = copied_run(tmp_path)
    (run / name).unlink()
    if kind == "fifo":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to(kind)
    code, _, err = answer(capsys, *command.split(), str(run))
    assert code in (0, 1, 2, 3)
    if name == "result.json" and command in ("verdict", "compare"):
        assert code == 2
        assert "must be an ordinary file" in err


def test_an_endless_seed_file_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="ordinary file"):
            read_seed(path)


def test_deep_nesting_and_huge_numbers_in_files_are_one_line_errors(tmp_path, capsys):
    run = copied_run(tmp_path)
    for text in ("[" * 100_000, '{"schema_version": ' + "9" * 5_000 + "}", '{"a":' * 3_000):
        (run / "result.json").write_text(text)
        code, _, err = answer(capsys, "compare", str(run))
        assert (code, len(err.splitlines())) == (2, 1)


def test_a_damaged_record_is_a_one_line_error(tmp_path, capsys):
    run = copied_run(tmp_path)
    record = json.loads((run / "audit/record.json").read_text())
    write_seed(tmp_path / "seed")
    for settings in (3, {}, {"dim": "x"}, record["settings"] | {"dim": 10**30}, record["settings"] | {"noise": 3}):
        (run / "audit/record.json").write_text(json.dumps(record | {"settings": settings}))
        code, _, err = answer(capsys, "verify", str(run), "--seed-file", str(tmp_path / "seed"))
        assert (code, len(err.splitlines())) == (2, 1), settings


@pytest.mark.full
@pytest.mark.parametrize("stream", ["stdout", "stderr", "both"])
def test_a_full_disk_never_exits_with_the_code_of_a_verdict(stream, tmp_path):
    with Path("/dev/full").open("w") as full:
        streams = {name: full if stream in (name, "both") else subprocess.PIPE for name in ("stdout", "stderr")}
        found = subprocess.run([*PROGRAM, "verdict", str(tmp_path / "none")], **streams)
        assert found.returncode == 2
        found = subprocess.run([*PROGRAM, "epsilon", "--epsilon", "3", "--delta", "1e-6"], **streams)
    assert found.returncode == (0 if stream == "stderr" else 2)


@pytest.mark.full
def test_streams_closed_by_the_parent_never_give_the_code_of_a_verdict(tmp_path):
    for closed in ("2>&-", ">&-", ">&- 2>&-"):
        words = f"{sys.executable} -m coalmine verdict {tmp_path / 'none'} {closed}"
        assert subprocess.run(["bash", "-c", words], capture_output=True).returncode == 2


@pytest.mark.full
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_run_stopped_by_a_signal_prints_how_to_resume(name, tmp_path):
    pytest.importorskip("torch")
    run = tmp_path / "run"
    words = [*PROGRAM, "run", "--rounds", "5000", "--canaries", "20", "--out", str(run), "-q"]
    heard = {
        "preexec_fn": lambda: signal.signal(getattr(signal, name), signal.SIG_DFL)
    }  # the tests may run under nohup
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **heard)
    deadline = time.monotonic() + 400
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    number = getattr(signal, name)
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 128 + number, err
    assert err.strip().splitlines()[-1].endswith(f"continue with: coalmine run --resume {run}")


def test_ignored_signals_stay_ignored(tmp_path):
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from coalmine.cli.interruption import stopping_signals\n"
        "with stopping_signals(): sys.exit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_new_seed_leaves_nothing_on_a_full_disk(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coalmine.log.seed_file.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_seed(tmp_path / "seed")
    assert not (tmp_path / "seed").exists()


def test_a_symlink_in_place_of_the_temporary_file_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "victim").write_text("untouched")
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")  # type: ignore[attr-defined]
    (tmp_path / ".result.json.guessed.new").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "result.json", b"new")
    monkeypatch.undo()
    write_atomically(tmp_path / "result.json", b"new")
    assert (tmp_path / "victim").read_text() == "untouched"
    assert (tmp_path / "result.json").read_bytes() == b"new"


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_commands_work_for_a_user_without_a_home(tmp_path):
    tmp_path.chmod(0o777)
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "COALMINE_DATA_DIR")}
    environment["PYTHONPATH"] = str(Path(coalmine.__file__).parents[1])
    words = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", *PROGRAM]
    found = subprocess.run(
        [*words, "epsilon", "--epsilon", "3", "--delta", "1e-6"],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
    )
    if "Permission denied" in found.stderr or "No module named" in found.stderr:
        pytest.skip("the interpreter is not readable by other users")
    assert found.returncode == 0, found.stderr
    found = subprocess.run([*words, "data"], env=environment, cwd="/", capture_output=True, text=True)
    assert (found.returncode, "COALMINE_DATA_DIR" in found.stderr) == (2, True)


def test_a_relative_seed_file_is_resolved_from_its_config(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from coalmine.simulation.config_sources import read_config

    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "run.toml"
    path.write_text('[canaries]\nseed_file = "seed"\n[participation]\nrounds_file = "/absolute"\n')
    monkeypatch.chdir(tmp_path)
    found = read_config(Path("configs/run.toml"))
    assert found["canaries"]["seed_file"] == str(tmp_path / "configs" / "seed")
    assert found["participation"]["rounds_file"] == "/absolute"


@pytest.mark.parametrize(
    "text", ["rounds = " + "[" * 5_000, "rounds = " + "9" * 400, "[privacy]\ndelta = 1" + "0" * 400]
)
def test_malformed_configs_are_one_line_errors(text, tmp_path, capsys):
    pytest.importorskip("torch")
    (tmp_path / "run.toml").write_text(text)
    code, _, err = answer(capsys, "run", "--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"))
    assert (code, len(err.splitlines())) == (2, 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("spread", [0.4, 1.0, 2.5])
def test_the_interval_of_the_null_variance_contains_its_estimate(spread, tmp_path):
    scores = np.random.default_rng(1).normal(size=200) * spread + 1.0
    np.save(tmp_path / "scores.npy", scores)
    words = [
        "estimate",
        str(tmp_path / "scores.npy"),
        "--null-std",
        "1",
        "--delta",
        "1e-5",
        "--variance",
        "null",
        "--json",
    ]
    found = json.loads(CliRunner().invoke(app, words, standalone_mode=False).stdout)
    low, high = found["interval"]
    assert low < found["epsilon"] < high


def test_not_enough_memory_is_bad_input(monkeypatch, capsys):
    def exhausted(*_, **__):
        raise MemoryError

    monkeypatch.setattr(app, "main", exhausted)
    code, _, err = answer(capsys, "plan")
    assert (code, len(err.splitlines())) == (2, 1)


def test_a_run_of_an_integration_is_not_resumed_by_coalmine(tmp_path, capsys):
    with closing(RunDirectory(tmp_path / "run")) as directory:
        directory.write_config({"trainer": "opacus", "privacy": {"clip_norm": 1.0}})
    code, out, err = answer(capsys, "run", "--resume", str(tmp_path / "run"))
    assert (code, out) == (2, "")
    assert "by the integration of 'opacus': run your training script again, with this directory" in " ".join(
        err.split()
    )


def test_a_package_that_cannot_be_loaded_is_not_called_missing():
    """As under `ulimit -v`, where torch is there but its libraries cannot be mapped."""
    error = ImportError("training needs: pip install 'coalmine[simulation]'")
    error.__cause__ = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    assert _message(error) == (
        "a package is installed but cannot be loaded: libtorch_cpu.so: failed to map segment from shared object; "
        "is there enough memory (ulimit -v)?"
    )
    error.__cause__ = ModuleNotFoundError("No module named 'torch'")
    assert _message(error) == "training needs: pip install 'coalmine[simulation]'"


def test_the_page_of_a_comparison_holds_no_escape_of_a_directorys_name(tmp_path):
    for name in (ESCAPE, "plain"):
        shutil.copytree(STORED / "poisson", tmp_path / name)
    page = tmp_path / "page.html"
    answered = CliRunner().invoke(app, ["report", str(tmp_path / ESCAPE), str(tmp_path / "plain"), "--out", str(page)])
    assert answered.exit_code == 0, answered.output
    assert "\x1b" not in page.read_text(encoding="utf-8")
