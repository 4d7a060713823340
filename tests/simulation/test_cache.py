"""Cached arrays are rebuilt when necessary, never incomplete, and never built twice at once."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from coalmine.simulation.tasks import cache
from coalmine.simulation.tasks.cache import cached_arrays, fingerprint, tensor


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COALMINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(b"first")
    return path


class Build:
    """Counts its calls."""

    def __init__(self):
        self.times = 0

    def __call__(self, writer):
        self.times += 1
        writer.append("rows", np.arange(6, dtype=np.int16).reshape(3, 2))
        writer.append("rows", np.arange(2, dtype=np.int16).reshape(1, 2))
        writer.append("starts", np.array([0, 3, 4]))
        writer.append("nothing", np.zeros((0, 5), dtype=np.float32))


def entries(folder):
    return [path for path in folder.iterdir() if path.is_dir()]


def test_arrays_are_built_once(folder, source):
    build = Build()
    for _ in range(2):
        arrays = cached_arrays("rows", [source], build)
        assert arrays["rows"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
        assert arrays["rows"].dtype == np.int16
        assert arrays["starts"].tolist() == [0, 3, 4]
        assert arrays["nothing"].shape == (0, 5)
    assert build.times == 1
    assert len(entries(folder)) == 1


def test_arrays_are_rebuilt_for_another_content_date_recipe_or_version(folder, source, monkeypatch):
    build = Build()
    cached_arrays("rows", [source], build)
    source.write_bytes(b"other")  # as long as before
    cached_arrays("rows", [source], build)
    assert build.times == 2
    os.utime(source, ns=(1, 1))
    cached_arrays("rows", [source], build)
    assert build.times == 3
    cached_arrays("columns", [source], build)
    assert build.times == 4
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    cached_arrays("rows", [source], build)
    assert build.times == 5


def test_large_files_are_distinguished_by_their_ends(source, monkeypatch):
    monkeypatch.setattr(cache, "HASHED", 3 << 20)
    content = bytearray(4 << 20)
    prints = set()
    for place in (None, 0, -1):
        if place is not None:
            content[place] = 1
        source.write_bytes(content)
        os.utime(source, ns=(1, 1))
        prints.add(fingerprint(source))
    assert len(prints) == 3


def test_a_failed_build_leaves_nothing_behind(folder, source):
    def fails(writer):
        writer.append("rows", np.zeros(3))
        raise ValueError("no more rows")

    with pytest.raises(ValueError, match="no more rows"):
        cached_arrays("rows", [source], fails)
    assert not entries(folder)
    build = Build()
    cached_arrays("rows", [source], build)
    assert build.times == 1


@pytest.mark.full
def test_leftovers_of_a_killed_process_are_removed(folder, source):
    code = f"""
import os, signal, numpy as np
from pathlib import Path
from coalmine.simulation.tasks.cache import cached_arrays
def build(writer):
    writer.append("rows", np.zeros(1000))
    os.kill(os.getpid(), signal.SIGKILL)
cached_arrays("rows", [Path({str(source)!r})], build)
"""
    killed = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert killed.returncode == -9
    assert [path.name.startswith(".") for path in entries(folder)] == [True]
    build = Build()
    assert len(cached_arrays("rows", [source], build)["rows"]) == 4
    assert [path.name.startswith(".") for path in entries(folder)] == [False]


@pytest.mark.parametrize("damage", ["short", "changed", "no index", "bad index"])
def test_damaged_entries_are_rebuilt(folder, source, damage, caplog):
    build = Build()
    cached_arrays("rows", [source], build)
    (entry,) = entries(folder)
    if damage == "short":
        (entry / "rows.bin").write_bytes(b"12")
    elif damage == "changed":
        (entry / "rows.bin").write_bytes(b"\1" * 16)
    elif damage == "no index":
        (entry / "index.json").unlink()
    else:
        (entry / "index.json").write_text("[1]")
    assert cached_arrays("rows", [source], build)["rows"][0].tolist() == [0, 1]
    assert build.times == 2
    assert "is damaged" in caplog.text


def test_rows_of_another_shape_are_rejected(folder, source):
    def build(writer):
        writer.append("rows", np.zeros((1, 2)))
        writer.append("rows", np.zeros((1, 3)))

    with pytest.raises(ValueError, match=r"rows of rows must be float64 of shape \(2,\), got float64 of shape \(3,\)"):
        cached_arrays("rows", [source], build)


def test_an_unwritable_cache_is_reported(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("COALMINE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot be written .*choose another folder with COALMINE_CACHE_DIR"):
        cached_arrays("rows", [source], Build())


def test_second_process_waits_and_reuses_the_arrays(folder, source):
    """Two threads, each with its own lock like two processes."""
    builds = []

    def build(writer):
        builds.append(threading.get_ident())
        time.sleep(0.3)
        writer.append("rows", np.arange(3))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: cached_arrays("rows", [source], build)["rows"].tolist(), range(2)))
    assert found == [[0, 1, 2]] * 2
    assert len(builds) == 1


def test_tensor_shares_the_memory_of_the_map(folder, source):
    rows = cached_arrays("rows", [source], Build())["rows"]
    found = tensor(rows)
    assert found.dtype == torch.int16
    assert found.data_ptr() == rows.ctypes.data
    assert found[torch.tensor([3, 1])].tolist() == [[0, 1], [2, 3]]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what a process holds of its own")
def test_unread_arrays_take_no_memory(folder, source):
    def build(writer):
        for part in range(16):
            writer.append("rows", np.full((200_000, 21), part, dtype=np.int16))

    before = own_memory()
    rows = cached_arrays("rows", [source], build)["rows"]
    found = tensor(rows)[:, :-1][torch.arange(0, len(rows), 50_000)]
    assert found[:, 0].tolist() == [row // 4 for row in range(64)]
    assert rows.nbytes > 130_000_000
    assert own_memory() - before < 30_000_000


def own_memory():
    """Bytes of this process that are not backed by a file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])
