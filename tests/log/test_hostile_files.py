"""Files that were damaged, or made to do harm: each is mended with a warning, or refused in one line."""

import io
import logging
import os
import pickle
import zipfile
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from requires import require

from coalmine import Audit, RunDirectory, read_seed, write_seed
from coalmine.log import score_files
from coalmine.log.rounds_file import MAGIC
from coalmine.log.score_files import read_scores
from coalmine.verification import verify_run

SEED = b"a seed of sixteen"


@pytest.fixture
def run(tmp_path):
    rng, model = np.random.default_rng(0), np.ones(500)
    with Audit(500, canaries=20, seed=SEED, delta=1e-5, rounds=3, claim=5.0, directory=tmp_path / "run") as audit:
        audit.commit_to(initial=model)
        for number in (1, 2, 3):
            present = audit.canaries_in_round(number)
            delta = audit.updates(present, 1.0) + rng.normal(size=500)
            audit.observe_round(number, delta, present=present)
            model = model + delta
        audit.observe_final(model)
        audit.finish()
    return tmp_path / "run"


def failed(run):
    return {check.name: check.detail for check in verify_run(run, SEED) if check.held is False}


def test_bytes_after_the_end_of_a_finished_log_are_named(run):
    assert failed(run) == {}
    with (run / "audit" / "rounds.log").open("ab") as log:
        log.write(b"REC\n and more")
    assert failed(run) == {"log": "13 bytes follow the end of the finished log: they were added later"}


@pytest.mark.parametrize("start", [b"coalmine rounds x\n", b"\0" * len(MAGIC)])
def test_a_damaged_first_line_is_mended(run, start, caplog):
    path = run / "audit" / "rounds.log"
    whole = path.read_bytes()
    path.write_bytes(start + whole[len(MAGIC) :])
    with caplog.at_level(logging.WARNING):
        assert failed(run) == {}
        assert RunDirectory(run).read_log().numbers == [1, 2, 3]
    assert path.read_bytes() != whole
    assert all("its first line is damaged, but the records after it are whole" in text for text in caplog.messages)
    home = RunDirectory(run)
    assert home.open_log().numbers == [1, 2, 3]
    home.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("start", [b"coalmine rounds 2\n", b"another file 12345"])
def test_another_file_is_not_mended(run, start):
    path = run / "audit" / "rounds.log"
    content = path.read_bytes()
    path.write_bytes(start + (content[len(MAGIC) :] if start.startswith(b"coalmine") else b"no records"))
    for read in (RunDirectory(run).read_log, RunDirectory(run).map_rounds, RunDirectory(run).open_log):
        with pytest.raises(ValueError, match="is not a log of rounds"):
            read()


def test_metrics_are_on_disk_before_a_checkpoint(run, monkeypatch, tmp_path):
    handles = Path("/proc/self/fd")
    if not handles.is_dir():
        pytest.skip("needs /proc")
    synced, real = [], os.fsync

    def sync(handle):
        synced.append((handles / str(handle)).readlink().name)
        real(handle)

    monkeypatch.setattr(os, "fsync", sync)
    with Audit(500, canaries=20, seed=SEED, delta=1e-5, directory=tmp_path / "other") as audit:
        audit.directory.append_metrics({"round": 1})
        synced.clear()
        audit.flush(sync=True)
    assert {"rounds.log", "metrics.jsonl"} <= set(synced)


def test_limits_count_unpacked_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(score_files, "LARGEST_UNPACKED", 80_000)
    path = tmp_path / "scores.npz"
    np.savez_compressed(path, observed=np.zeros(2_000), unobserved=np.ones(2_000))
    assert read_scores(str(path)).observed.size == 2_000
    np.savez_compressed(path, observed=np.zeros(10_000), unobserved=np.ones(10_000))
    assert path.stat().st_size < 2_000
    with pytest.raises(ValueError, match=r"must unpack to at most 80,000 bytes, got 160,\d+"):
        read_scores(str(path))


def test_limits_count_unpacked_bytes_of_parquet(tmp_path, monkeypatch):
    pyarrow = require("pyarrow")
    parquet = require("pyarrow.parquet")
    monkeypatch.setattr(score_files, "LARGEST_UNPACKED", 80_000)
    for size, fits in ((2_000, True), (20_000, False)):
        parquet.write_table(pyarrow.table({"score": np.zeros(size)}), tmp_path / "scores.parquet")
        if fits:
            assert read_scores(str(tmp_path / "scores.parquet")).observed.size == size
            continue
        with pytest.raises(ValueError, match=r"must unpack to at most 80,000 bytes, got 160,000"):
            read_scores(str(tmp_path / "scores.parquet"))


def test_a_flower_checkpoint_that_unpacks_to_more_is_refused(tmp_path):
    require("flwr")
    from coalmine.integrations.flower.server_checkpoint import load_checkpoint

    with zipfile.ZipFile(tmp_path / "checkpoint.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        content = io.BytesIO()
        np.save(content, np.zeros(100_000))
        archive.writestr("model/w.npy", content.getvalue())
    with pytest.raises(ValueError, match=r"must unpack to at most .* bytes, got 800,128"):
        load_checkpoint(tmp_path, recorded_rounds=3)


def test_a_header_cannot_ask_for_memory(run):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    (run / "model.npy").write_bytes(content.getvalue())
    with pytest.raises(ValueError, match=r"one .npy row of 500 numbers, got float64 of shape \(1099511627776,\)"):
        verify_run(run, SEED)


def test_a_seed_is_never_pickled(tmp_path):
    write_seed(tmp_path / "seed")
    (tmp_path / "digits").write_text("1234567890123456789012345678\n")
    for name in ("seed", "digits"):
        seed = read_seed(tmp_path / name)
        assert deepcopy(seed) is seed
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match="a seed cannot be pickled"):
                pickle.dumps(seed, protocol=protocol)


def test_a_full_disk_names_the_seed_file(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_seed(tmp_path / "seed")
    assert error.value.filename == str(tmp_path / "seed")
    assert not (tmp_path / "seed").exists()
