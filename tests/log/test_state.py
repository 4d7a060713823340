"""Persistent state: the run directory, kill -9, and the verifiable record."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from in_process import called
from training import train

from coalmine import Audit, RunDirectory
from coalmine.log.files import write_atomically
from coalmine.log.rounds_file import LENGTHS, TAG, RoundLog
from resumed import comparable, comparable_result

SMALL = {"dim": 400, "canaries": 40, "rounds": 6, "noise_multiplier": 0.5}


def deltas(count, dim=400, seed=0):
    return np.random.default_rng(seed).normal(size=(count, dim))


def observed(audit, rows, start=1):
    for t, row in enumerate(rows, start=start):
        audit.observe_round(t, row, present=audit.canaries_in_round(t), others=0.1 * row, noise_std=1.0)
    return audit


def new_audit(directory=None):
    layers = [("first", 150), ("second", 250)]
    return Audit(400, canaries=40, seed=7, delta=1e-5, rounds=6, presentations=2, layers=layers, directory=directory)


def result_of(audit):
    return json.dumps(comparable_result(audit.result(claim=5.0).to_dict()), sort_keys=True)


def test_a_directory_resumes_after_its_last_round(tmp_path):
    rows = deltas(6)
    audit = observed(new_audit(tmp_path / "run"), rows[:4])
    audit.directory.close()
    again = new_audit(tmp_path / "run")
    assert again.last_round == 4
    observed(again, rows[4:], start=5)
    whole = observed(new_audit(), rows)
    assert result_of(again) == result_of(whole)
    assert [item.cosines.tobytes() for item in again.log.rounds()] == [
        item.cosines.tobytes() for item in whole.log.rounds()
    ]


def test_rewinding_drops_later_rounds(tmp_path):
    rows = deltas(6)
    for audit in (new_audit(tmp_path / "run"), new_audit()):
        observed(audit, rows[:5])
        audit.observe_final(rows[0])
        audit.rewind_to(2)
        assert audit.last_round == 2
        observed(audit, rows[2:], start=3)
        assert result_of(audit) == result_of(observed(new_audit(), rows))


def test_a_torn_record_is_dropped_and_reported(tmp_path, caplog):
    observed(new_audit(tmp_path / "run"), deltas(3)).directory.close()
    log = tmp_path / "run" / "audit" / "rounds.log"
    size = log.stat().st_size
    with log.open("r+b") as file:
        file.truncate(size - 20)
    audit = new_audit(tmp_path / "run")
    assert audit.last_round == 2
    assert "torn last record" in caplog.text
    audit.directory.close()
    log.write_bytes(log.read_bytes() + b"REC\n\x00\x01")
    assert new_audit(tmp_path / "run").last_round == 2


def test_damage_in_the_middle_is_rejected(tmp_path):
    observed(new_audit(tmp_path / "run"), deltas(3)).directory.close()
    log = tmp_path / "run" / "audit" / "rounds.log"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 4
    log.write_bytes(data)
    with pytest.raises(ValueError, match="record 2 is damaged; restore the file from a copy"):
        new_audit(tmp_path / "run")


def test_a_wrong_length_is_damage_and_not_a_torn_end(tmp_path):
    """No digest covers lengths. A record that seems to end beyond the file, but is followed by another, is damaged."""
    observed(new_audit(tmp_path / "run"), deltas(3)).directory.close()
    log = tmp_path / "run" / "audit" / "rounds.log"
    whole = log.read_bytes()
    first = whole.index(TAG) + len(TAG)
    for place in range(first, first + LENGTHS.size):
        data = bytearray(whole)
        data[place] ^= 0x40
        log.write_bytes(data)
        with pytest.raises(ValueError, match="record 1 is damaged"):
            new_audit(tmp_path / "run")
        assert log.read_bytes() == data


SECRET = "hunter2-the-secret"


@pytest.mark.parametrize("seed", [SECRET, 0.123456789, -123456789, b"", 2**129])
def test_a_rejected_seed_is_neither_printed_nor_stored(tmp_path, seed):
    with pytest.raises(ValueError, match="seed must") as refused:
        Audit(400, canaries=40, seed=seed, delta=1e-5, directory=tmp_path / "run")
    assert not any(part in str(refused.value) for part in (SECRET, "123456789"))
    assert not (tmp_path / "run" / "audit" / "record.json").exists()


@pytest.mark.parametrize(
    ("presentations", "message"), [(7, "at most rounds = 6"), ([], "1 to 40 groups"), ([1] * 41, "1 to 40 groups")]
)
def test_invalid_presentations_are_rejected_before_the_directory_is_created(tmp_path, presentations, message):
    with pytest.raises(ValueError, match=message):
        Audit(400, canaries=40, seed=7, delta=1e-5, rounds=6, presentations=presentations, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("layers", [5, [3], [("one", 200), ("one", 200)]])
def test_invalid_layers_are_rejected(layers):
    with pytest.raises(ValueError, match="layers must"):
        Audit(400, canaries=40, seed=7, delta=1e-5, layers=layers)


def test_other_settings_or_another_seed_are_rejected(tmp_path):
    new_audit(tmp_path / "run").directory.close()
    with pytest.raises(ValueError, match=r"other settings \(it differs in canaries, unobserved"):
        Audit(400, canaries=39, seed=7, delta=1e-5, rounds=6, presentations=2, directory=tmp_path / "run",
              layers=[("first", 150), ("second", 250)])  # fmt: skip
    with pytest.raises(ValueError, match="a different seed"):
        Audit(400, canaries=40, seed=8, delta=1e-5, rounds=6, presentations=2, directory=tmp_path / "run",
              layers=[("first", 150), ("second", 250)])  # fmt: skip


@pytest.mark.full
def test_only_one_process_writes_and_readers_never_wait(tmp_path):
    audit = observed(new_audit(tmp_path / "run"), deltas(2))
    code = f"import coalmine; coalmine.RunDirectory({str(tmp_path / 'run')!r}).lock()"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is being written by another process" in second.stderr
    reader = RunDirectory(tmp_path / "run")
    assert reader.read_log().numbers == [1, 2]
    observed(audit, deltas(1), start=3)
    assert reader.read_log().numbers == [1, 2, 3]
    audit.directory.close()
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_metrics_config_and_result_are_stored_and_checked(tmp_path, caplog):
    run = RunDirectory(tmp_path / "run")
    run.write_config({"task": "digits", "noise": {"multiplier": 1.5}})
    run.write_config({"task": "digits", "noise": {"multiplier": 1.5}})
    with pytest.raises(ValueError, match=r"another config \(it differs in task"):
        run.write_config({"task": "emnist", "noise": {"multiplier": 1.5}})
    for t in (1, 2, 3):
        run.append_metrics({"round": t, "loss": float("inf") if t == 1 else float("nan")})
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"round": 4, "lo')
    assert [line["loss"] for line in run.read_metrics()] == ["inf", None, None]
    assert "skipped line 4, damaged or torn" in caplog.text
    run.append_metrics({"round": 5, "loss": 1.0})
    assert [line["round"] for line in run.read_metrics()] == [1, 2, 3, 5]
    run.rewind_metrics_to(2)
    assert [line["round"] for line in run.read_metrics()] == [1, 2]
    run.write_result(train(**SMALL).result().with_entries(accuracy=0.5))
    found = run.read_result()
    assert (found["schema_version"], found["accuracy"], found["dim"]) == (1, 0.5, 400)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", "{", "is not JSON"),
        ("result.json", "[]", "must hold an object, got list"),
        ("result.json", '{"schema_version": 99}', "has schema version 99, this coalmine reads 1"),
        ("config.toml", "= nonsense", "is not TOML"),
        ("audit/record.json", '{"schema_version": 1}', "is not a record of an audit"),
    ],
)
def test_invalid_files_are_rejected_with_one_line(tmp_path, name, content, message):
    (tmp_path / "audit").mkdir()
    (tmp_path / name).write_text(content)
    run = RunDirectory(tmp_path)
    read = {"result.json": run.read_result, "config.toml": run.read_config, "audit/record.json": run.read_record}[name]
    with pytest.raises(ValueError, match=message) as error:
        read()
    assert "\n" not in str(error.value)


OBSERVER = """
import os, sys, time
import numpy as np
import coalmine

def observe(directory):
    audit = coalmine.Audit(600, canaries=60, seed=7, delta=1e-5, rounds=60, presentations=2, directory=directory)
    for t in range(audit.last_round + 1, 61):
        row = np.random.default_rng(t).normal(size=600)
        audit.observe_round(t, row, present=audit.canaries_in_round(t), others=0.1 * row, noise_std=1.0)
        time.sleep(0.0005)
    audit.directory.write_result(audit.result(claim=5.0))

if __name__ == "__main__":
    for line in sys.stdin:  # fork a child for each line, so that imports happen once
        child = os.fork()
        if child == 0:
            observe(line.strip())
            os._exit(0)
        print(child, flush=True)
        status = os.waitpid(child, 0)[1]
        print(status, flush=True)
"""


@pytest.mark.full
def test_resume_after_fifty_random_kills_gives_identical_results(tmp_path):
    """A process that observes rounds gets SIGKILL 50 times and ends with the result of an undisturbed one."""
    script = tmp_path / "observer.py"
    script.write_text(OBSERVER)
    server = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )

    def observe(directory, after=None):
        server.stdin.write(f"{directory}\n")
        child = int(server.stdout.readline())
        if after is not None:
            time.sleep(after)
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(child, signal.SIGKILL)
        return int(server.stdout.readline())

    assert observe(tmp_path / "whole") == 0
    rng, kills, runs = random.Random(1), 0, 0
    while kills < 50:
        runs += 1
        directory = tmp_path / f"run{runs}"
        while observe(directory, after=rng.uniform(0, 0.06)) != 0 and kills < 50:
            kills += 1
        observe(directory)
        for name in ("audit/rounds.log", "result.json"):
            assert comparable(directory / name) == comparable(tmp_path / "whole" / name)
    server.communicate()
    assert RoundLog(tmp_path / "whole" / "audit" / "rounds.log", read_only=True).numbers == list(range(1, 61))


def test_memory_does_not_grow_with_rounds():
    """400 rounds of 11,000 canaries are 18 MB of cosines; the audit keeps less than 1 MB of them in memory."""
    import tracemalloc

    audit = Audit(12_000, canaries=1_000, seed=7, delta=1e-5)
    row = deltas(1, dim=12_000)[0]
    audit.observe_round(1, row, present=[])
    tracemalloc.start()
    for t in range(2, 402):
        audit.observe_round(t, row, present=[t])
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 1_000_000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_leaves_no_partial_record(tmp_path, monkeypatch):
    audit = observed(new_audit(tmp_path / "run"), deltas(2))
    full = os.open("/dev/full", os.O_WRONLY)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, place: write(full, data, place))
    with pytest.raises(OSError, match="No space left"):
        observed(audit, deltas(1), start=3)
    monkeypatch.undo()
    assert audit.last_round == 2
    observed(audit, deltas(4)[2:], start=3)
    assert RunDirectory(tmp_path / "run").read_log().numbers == [1, 2, 3, 4]
    os.close(full)


def test_verify_command_accepts_honest_runs_and_rejects_changes(tmp_path):
    seed_file = tmp_path / "seed"

    assert called("seed", str(seed_file)).returncode == 0
    assert called("seed", str(seed_file)).returncode == 2
    assert oct(seed_file.stat().st_mode & 0o777) == "0o600"
    seed = seed_file.read_bytes().strip()
    audit = Audit(400, canaries=40, seed=seed, delta=1e-5, rounds=4, directory=tmp_path / "run")
    observed(audit, deltas(4))
    model = deltas(1)[0]
    audit.observe_final(model)
    np.save(tmp_path / "model.npy", model)
    audit.directory.write_result(audit.result(claim=3.0, analytical_epsilon=3.0))
    audit.directory.close()
    run = str(tmp_path / "run")

    good = called("verify", run, "--seed-file", str(seed_file), "--model", str(tmp_path / "model.npy"), "--json")
    assert good.returncode == 3, good.stderr  # nobody noted the digests elsewhere
    held = {name: check["held"] for name, check in json.loads(good.stdout).items()}
    assert held["commitment"]
    assert held["cosines"]
    assert held["result"]
    assert False not in held.values()
    other = tmp_path / "other"
    other.write_text("12345\n")
    wrong = called("verify", run, "--seed-file", str(other), "--model", str(tmp_path / "model.npy"), "--json")
    assert wrong.returncode == 1
    assert not json.loads(wrong.stdout)["commitment"]["held"]
    assert not json.loads(wrong.stdout)["cosines"]["held"]

    path = tmp_path / "run" / "result.json"
    path.write_text(path.read_text().replace('"rounds": 4', '"rounds": 5'))
    forged = called("verify", run, "--seed-file", str(seed_file))
    assert forged.returncode == 1
    assert "rounds" in forged.stdout.partition("differs in")[2]
    assert seed.decode() not in path.read_text() + (tmp_path / "run" / "audit" / "record.json").read_text()

    record = tmp_path / "run" / "audit" / "record.json"
    published = json.loads(record.read_text())
    for name, value in (("canaries", 300), ("unobserved", 5)):  # values that no audit can have
        record.write_text(json.dumps(published | {"settings": published["settings"] | {name: value}}))
        impossible = called("verify", run, "--seed-file", str(seed_file))
        assert impossible.returncode == 2
        assert "is not a record of an audit" in impossible.stderr
    for name, value in (("canaries", 30), ("canaries", 10), ("unobserved", 50)):
        record.write_text(json.dumps(published | {"settings": published["settings"] | {name: value}}))
        tampered = called(
            "verify", run, "--seed-file", str(seed_file), "--model", str(tmp_path / "model.npy"), "--json"
        )
        assert tampered.returncode == 1, tampered.stderr
        assert not json.loads(tampered.stdout)["commitment"]["held"]
    record.write_text(json.dumps(published))
    for damage in ({"claimed_epsilon": [1]}, {"analytical_epsilon": {}}, {"claim_accounting": None}):
        path.write_text(json.dumps(json.loads(path.read_text()) | damage))
        tampered = called("verify", run, "--seed-file", str(seed_file))
        assert tampered.returncode == 1, tampered.stderr
        assert "nothing follows from" in tampered.stdout

    for arguments in (["verify", str(tmp_path / "nothing"), "--seed-file", str(seed_file)],
                      ["verify", run, "--seed-file", str(tmp_path / "none")],
                      ["verify", str(tmp_path), "--seed-file", str(seed_file)]):  # fmt: skip
        bad = called(*arguments)
        assert (bad.returncode, bad.stderr.count("\n")) == (2, 1), bad.stderr


def test_files_are_written_through_links_and_into_pipes(tmp_path):
    """A link stays a link, and a device or a pipe is not replaced by a file."""
    (tmp_path / "file").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomically(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"after"
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE)
    write_atomically(tmp_path / "pipe", b"through")
    assert reader.communicate()[0] == b"through"
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(IsADirectoryError, match="is a directory: name a file"):
        write_atomically(tmp_path, b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]
