"""Valid, damaged and malicious archives."""

import bz2
import io
import tarfile

import pytest

from coalmine.data import unpack as module
from coalmine.data.unpack import unpack

LIMIT = 1 << 20


def tar(path, *members):
    """Members are (name, content), or TarInfo without content."""
    with tarfile.open(path, "w:bz2") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return path


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_wanted_files_are_unpacked_from_a_tar(tmp_path):
    members = (("train.h5", b"train" * 1000), ("folder/test.h5", b"test"), ("folder/readme", b"hello"))
    archive = tar(tmp_path / "a.tar.bz2", special("folder", tarfile.DIRTYPE), *members)
    seen = []
    unpack(archive, tmp_path / "out", wanted=("train.h5", "test.h5"), limit=LIMIT, progress=seen.append)
    assert files_in(tmp_path / "out") == ["test.h5", "train.h5"]
    assert (tmp_path / "out" / "train.h5").read_bytes() == b"train" * 1000
    assert seen[-1] == 5004


@pytest.mark.parametrize(
    "path", ["../evil", "/tmp/evil", "folder/../../evil", "C:\\evil", "..\\evil", "\\\\host\\evil", "a/../../b"]
)
def test_paths_that_lead_outside_are_rejected(tmp_path, path):
    archive = tmp_path / "in" / "a.tar.bz2"
    archive.parent.mkdir()
    tar(archive, ("good.h5", b"good"), (path, b"evil"))
    with pytest.raises(ValueError, match=r"holds a path that leads outside, .*, so it is rejected"):
        unpack(archive, tmp_path / "out", wanted=("good.h5", "evil"), limit=LIMIT)
    assert files_in(tmp_path / "out") == []
    assert files_in(tmp_path) == ["in", "out"]


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (tarfile.SYMTYPE, "/etc/passwd"),
        (tarfile.LNKTYPE, "good.h5"),
        (tarfile.FIFOTYPE, ""),
        (tarfile.CHRTYPE, ""),
        (tarfile.BLKTYPE, ""),
    ],
)
def test_links_and_devices_are_rejected(tmp_path, kind, target):
    archive = tar(tmp_path / "a.tar.bz2", ("good.h5", b"good"), special("other", kind, target))
    with pytest.raises(ValueError, match="holds 'other', which is neither a file nor a folder, so it is rejected"):
        unpack(archive, tmp_path / "out", wanted=("good.h5",), limit=LIMIT)
    assert files_in(tmp_path / "out") == []


def test_decompression_bombs_are_stopped_at_the_limit(tmp_path):
    archive = tar(tmp_path / "a.tar.bz2", ("good.h5", bytes(30 << 20)))
    assert archive.stat().st_size < 200_000
    written = []
    with pytest.raises(ValueError, match=r"a.tar.bz2 unpacks to more than 1,048,576 bytes"):
        unpack(archive, tmp_path / "out", wanted=("good.h5",), limit=LIMIT, progress=written.append)
    assert files_in(tmp_path / "out") == []
    assert max(written, default=0) <= LIMIT


def test_a_decompression_bomb_next_to_the_wanted_files_is_stopped(tmp_path):
    archive = tar(tmp_path / "a.tar.bz2", ("zeros", bytes(30 << 20)), ("good.h5", b"good"))
    with pytest.raises(ValueError, match="unpacks to more than"):
        unpack(archive, tmp_path / "out", wanted=("good.h5",), limit=LIMIT)


def test_too_many_entries_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ENTRIES", 5)
    archive = tar(tmp_path / "a.tar.bz2", *((f"file{number}", b"") for number in range(6)))
    with pytest.raises(ValueError, match="holds more than 5 entries, so it is rejected"):
        unpack(archive, tmp_path / "out", wanted=("file0",), limit=LIMIT)


def test_damaged_archives_are_reported(tmp_path):
    path = tar(tmp_path / "a.tar.bz2", ("good.h5", bytes(range(256)) * 4000))
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"hello", b"", whole[:100] + b"\0" * 40 + whole[140:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"cannot be unpacked \(.*\); fetch it again|does not hold good.h5"):
            unpack(path, tmp_path / "out", wanted=("good.h5",), limit=1 << 30)
        assert files_in(tmp_path / "out") == []


def test_missing_members_and_unsupported_formats_are_reported(tmp_path):
    archive = tar(tmp_path / "a.tar.bz2", ("good.h5", b"good"))
    with pytest.raises(ValueError, match=r"a.tar.bz2 does not hold other.h5"):
        unpack(archive, tmp_path / "out", wanted=("good.h5", "other.h5"), limit=LIMIT)
    assert files_in(tmp_path / "out") == []  # all or none
    (tmp_path / "a.rar").write_bytes(bz2.compress(b""))
    with pytest.raises(ValueError, match=r"a.rar cannot be unpacked|a.rar does not hold a"):
        unpack(tmp_path / "a.rar", tmp_path / "out", wanted=("a",), limit=LIMIT)
