"""Fetching a data set from a local server into its task's folder, and checks of the catalogue."""

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from server import serving

from coalmine.data import DATASETS, cache_folder, data_folder, fetch
from coalmine.data import download as download_module
from coalmine.data.catalogue import Dataset, Download
from coalmine.data.fetch import RECORD

DATA = os.environ.get("COALMINE_DATA_DIR")
PLAIN = gzip.compress(b"plain")


def tarred(**files: bytes) -> bytes:
    """An archive of NAME.h5 for each file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:bz2") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{name}.h5")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


PACKED = tarred(word=b"database")


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setattr(download_module, "WAIT", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(
        {"plain.gz": PLAIN, "word.tar.bz2": PACKED, "data.tar.bz2": tarred(train=b"train", test=b"test")}
    ) as running:
        yield running


def tiny(url: str, *downloads: Download) -> Dataset:
    if not downloads:
        sha256 = hashlib.sha256(PLAIN).hexdigest()
        downloads = (
            Download(url=url + "plain.gz", size=len(PLAIN), sha256=sha256, checksum_from="us"),
            Download(url=url + "word.tar.bz2", unpacked=("word.h5",), unpacked_limit=1000),
            Download(url=url + "data.tar.bz2", unpacked=("train.h5", "test.h5"), unpacked_limit=1000),
        )
    return Dataset(
        name="tiny",
        task="digits",
        title="Tiny",
        what="a test",
        users=3,
        examples=4,
        licence="none",
        source="here",
        folder="tiny",
        downloads=downloads,
    )


def test_fetched_files_are_unpacked_into_the_tasks_folder(site, tmp_path):
    dataset = tiny(site.url)
    assert not dataset.is_in(tmp_path)
    told = []
    fetched = fetch(dataset, tmp_path, follow=lambda doing, name: told.append((doing, name)) or (lambda *_: None))
    folder = tmp_path / "tiny"
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != RECORD}
    assert contents == {"plain.gz": PLAIN, "word.h5": b"database", "train.h5": b"train", "test.h5": b"test"}
    assert dataset.is_in(tmp_path)
    assert [(file.name, file.checked) for file in fetched][:2] == [("plain.gz", "sha256 of us"), ("word.h5", "")]
    assert ("unpacking", "data.tar.bz2") in told
    recorded = {entry["name"]: entry for entry in json.loads((folder / RECORD).read_text())["files"]}
    assert recorded["word.h5"]["sha256"] == hashlib.sha256(PACKED).hexdigest()  # recorded, although none was published
    assert recorded["word.h5"]["url"] == site.url + "word.tar.bz2"


def test_existing_files_are_left_alone(site, tmp_path):
    fetch(tiny(site.url), tmp_path)
    (tmp_path / "tiny" / "plain.gz").write_bytes(b"mine")
    site.asked.clear()
    again = fetch(tiny(site.url), tmp_path)
    assert site.asked == []
    assert all(file.here_before for file in again)
    assert (tmp_path / "tiny" / "plain.gz").read_bytes() == b"mine"
    (tmp_path / "tiny" / "test.h5").unlink()
    fetch(tiny(site.url), tmp_path)
    assert (tmp_path / "tiny" / "test.h5").read_bytes() == b"test"
    assert len(site.asked) == 1


def test_damaged_record_is_rewritten(site, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / RECORD).write_text("{")
    fetch(tiny(site.url), tmp_path)
    assert len(json.loads((tmp_path / "tiny" / RECORD).read_text())["files"]) == 4


def test_rejected_archive_leaves_no_data(site, tmp_path):
    file = Download(url=site.url + "data.tar.bz2", unpacked=("train.h5", "test.h5"), unpacked_limit=3)
    with pytest.raises(ValueError, match="unpacks to more than 3 bytes"):
        fetch(tiny(site.url, file), tmp_path)
    assert not list((tmp_path / "tiny").glob("*.h5"))


def test_archive_left_by_an_interrupted_unpacking_is_reused(site, tmp_path):
    """A run killed while unpacking does not repeat hours of downloading."""
    sha256 = hashlib.sha256(PACKED).hexdigest()
    file = Download(url=site.url + "word.tar.bz2", sha256=sha256, unpacked=("word.h5",), unpacked_limit=1000)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "word.tar.bz2").write_bytes(PACKED)
    fetch(tiny(site.url, file), tmp_path)
    assert site.asked == []
    assert (tmp_path / "tiny" / "word.h5").read_bytes() == b"database"
    (tmp_path / "tiny" / "word.h5").unlink()
    (tmp_path / "tiny" / "word.tar.bz2").write_bytes(b"another")
    fetch(tiny(site.url, file), tmp_path)
    assert len(site.asked) == 1
    assert (tmp_path / "tiny" / "word.h5").read_bytes() == b"database"


def test_a_damaged_archive_is_deleted(site, tmp_path):
    site.files["word.tar.bz2"] = PACKED[: len(PACKED) // 2]
    file = Download(url=site.url + "word.tar.bz2", unpacked=("word.h5",), unpacked_limit=1000)
    with pytest.raises(ValueError, match=r"cannot be unpacked .*; fetch it again"):
        fetch(tiny(site.url, file), tmp_path)
    assert list((tmp_path / "tiny").iterdir()) == []


def test_unwritable_folder_is_reported(site, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r"writing .* failed: Not a directory; choose another folder with --data-dir"):
        fetch(tiny(site.url), tmp_path / "file")


def test_unfetchable_data_set_says_why(tmp_path):
    with pytest.raises(ValueError, match="stackexchange cannot be fetched: no download is known"):
        fetch(DATASETS["stackexchange"], tmp_path)


def test_every_data_set_can_be_read_after_it_was_fetched(tmp_path):
    """The downloaded files are one of the sets of files that the task reads."""
    for dataset in DATASETS.values():
        folder = tmp_path / dataset.name / dataset.folder
        folder.mkdir(parents=True)
        for file in dataset.downloads:
            for name in file.results:
                (folder / name).write_bytes(b"")
            assert file.url.startswith("https://") or file.sha256 or file.md5  # HTTP only with a checksum
            assert bool(file.unpacked) == bool(file.unpacked_limit)
            assert bool(file.checksum_from) == bool(file.sha256 or file.md5)
        assert dataset.is_in(tmp_path / dataset.name) == bool(dataset.downloads)
        assert bool(dataset.note) != bool(dataset.downloads)


def test_stand_in_data_sets_have_their_own_titles():
    assert DATASETS["mnist-by-writer"].title == "MNIST by NIST writer"
    assert DATASETS["stackexchange"].title == "Stack Exchange, 15 sites"


@pytest.mark.skipif(not DATA, reason="COALMINE_DATA_DIR names no folder with the real data")
@pytest.mark.parametrize("name", ["fashion-mnist", "mnist-by-writer"])
def test_the_published_checksums_match_the_real_files(name):
    dataset = DATASETS[name]
    assert dataset.is_in(Path(str(DATA)))
    for file in dataset.downloads:
        if file.sha256:  # MNIST's images may be packed differently there; the task checks their contents
            content = (Path(str(DATA)) / dataset.folder / file.name).read_bytes()
            assert (hashlib.sha256(content).hexdigest(), len(content)) == (file.sha256, file.size)


def test_folders_follow_the_environment(monkeypatch, tmp_path):
    for name in ("COALMINE_DATA_DIR", "COALMINE_CACHE_DIR", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".local/share/coalmine"
    assert cache_folder() == tmp_path / ".cache/coalmine"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("COALMINE_DATA_DIR", "/data")
    assert (data_folder(), cache_folder()) == (Path("/data"), Path("/x/coalmine"))
    monkeypatch.setenv("COALMINE_CACHE_DIR", "/cache")
    assert (data_folder(Path("/mine")), cache_folder()) == (Path("/mine"), Path("/cache"))
