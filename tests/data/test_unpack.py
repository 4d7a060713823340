"""Archives that are what they should be, and archives that are out to harm."""

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile

import pytest

from coalmine.data import unpack as module
from coalmine.data.unpack import unpack

LIMIT = 1 << 20


def tar(path, *members, mode="w:bz2"):
    """Members are (name, content), or TarInfo without content."""
    with tarfile.open(path, mode) as archive:
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


@pytest.mark.parametrize("name", ["a.tar.bz2", "a.tar.gz", "a.zip"])
def test_the_wanted_files_come_out(tmp_path, name):
    members = (("train.h5", b"train" * 1000), ("folder/test.h5", b"test"), ("folder/readme", b"hello"))
    if name.endswith(".zip"):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.mkdir("folder")
            for member in members:
                archive.writestr(*member)
    else:
        tar(tmp_path / name, special("folder", tarfile.DIRTYPE), *members, mode=f"w:{name[-3:].strip('.')}")
    seen = []
    unpack(tmp_path / name, tmp_path / "out", wanted=("train.h5", "test.h5"), limit=LIMIT, progress=seen.append)
    assert files_in(tmp_path / "out") == ["test.h5", "train.h5"]
    assert (tmp_path / "out" / "train.h5").read_bytes() == b"train" * 1000
    assert seen[-1] == 5004


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.sqlite.lzma", lzma.compress(b"content" * 100_000, format=lzma.FORMAT_ALONE)),
        ("a.xz", lzma.compress(b"content" * 100_000)),
        ("a.gz", gzip.compress(b"content" * 100_000)),
    ],
)
def test_single_files_come_out(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    unpack(tmp_path / name, tmp_path, wanted=("a.sqlite",), limit=LIMIT)
    assert (tmp_path / "a.sqlite").read_bytes() == b"content" * 100_000
    assert files_in(tmp_path) == sorted([name, "a.sqlite"])


@pytest.mark.parametrize(
    "path", ["../evil", "/tmp/evil", "folder/../../evil", "C:\\evil", "..\\evil", "\\\\host\\evil", "a/../../b"]
)
@pytest.mark.parametrize("kind", ["tar.bz2", "zip"])
def test_paths_that_lead_outside_are_refused(tmp_path, path, kind):
    archive = tmp_path / "in" / f"a.{kind}"
    archive.parent.mkdir()
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as packed:
            packed.writestr("good.h5", b"good")
            packed.writestr(zipfile.ZipInfo(path), b"evil")
    else:
        tar(archive, ("good.h5", b"good"), (path, b"evil"))
    with pytest.raises(ValueError, match=r"holds a path that leads outside, .*; refused"):
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
def test_links_and_devices_are_refused(tmp_path, kind, target):
    archive = tar(tmp_path / "a.tar.bz2", ("good.h5", b"good"), special("other", kind, target))
    with pytest.raises(ValueError, match="holds 'other', which is neither a file nor a folder; refused"):
        unpack(archive, tmp_path / "out", wanted=("good.h5",), limit=LIMIT)
    assert files_in(tmp_path / "out") == []


def test_a_link_in_a_zip_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        link = zipfile.ZipInfo("good.h5")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        packed.writestr(link, "/etc/passwd")
    with pytest.raises(ValueError, match="neither a file nor a folder; refused"):
        unpack(tmp_path / "a.zip", tmp_path / "out", wanted=("good.h5",), limit=LIMIT)


def bomb(path):
    """A few kilobytes that unpack to 30 MB."""
    content = bytes(30 << 20)
    if path.name.endswith(".tar.bz2"):
        tar(path, ("good.h5", content))
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("good.h5", content)
    else:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else lzma.compress(content))
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("name", ["a.tar.bz2", "a.zip", "a.gz", "a.xz"])
def test_bombs_are_stopped_at_the_limit(tmp_path, name):
    bomb(tmp_path / name)
    written = []
    with pytest.raises(ValueError, match=f"{name} unpacks to more than 1,048,576 bytes"):
        unpack(tmp_path / name, tmp_path / "out", wanted=("good.h5",), limit=LIMIT, progress=written.append)
    assert files_in(tmp_path / "out") == []
    assert max(written, default=0) <= LIMIT


def test_a_bomb_that_nobody_wants_is_stopped_too(tmp_path):
    archive = tar(tmp_path / "a.tar.bz2", ("zeros", bytes(30 << 20)), ("good.h5", b"good"))
    with pytest.raises(ValueError, match="unpacks to more than"):
        unpack(archive, tmp_path / "out", wanted=("good.h5",), limit=LIMIT)


def test_a_zip_that_lies_about_its_size_is_stopped(tmp_path):
    path = tmp_path / "a.zip"
    bomb(path)
    size = (30 << 20).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(size, (10).to_bytes(4, "little")))
    with pytest.raises(ValueError, match=r"unpacks to more than|cannot be unpacked"):
        unpack(path, tmp_path / "out", wanted=("good.h5",), limit=LIMIT)
    assert files_in(tmp_path / "out") == []


def test_lzma_may_not_take_all_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MEMORY", 1 << 20)
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"content", preset=9))  # asks for 64 MiB
    with pytest.raises(ValueError, match=r"cannot be unpacked \(Memory usage limit exceeded\)"):
        unpack(tmp_path / "a.xz", tmp_path / "out", wanted=("a",), limit=LIMIT)


def test_too_many_entries_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ENTRIES", 5)
    archive = tar(tmp_path / "a.tar.bz2", *((f"file{number}", b"") for number in range(6)))
    with pytest.raises(ValueError, match="holds more than 5 entries; refused"):
        unpack(archive, tmp_path / "out", wanted=("file0",), limit=LIMIT)


@pytest.mark.parametrize("name", ["a.tar.bz2", "a.tar.gz", "a.zip", "a.xz", "a.gz"])
def test_damaged_archives_say_so(tmp_path, name):
    path = tmp_path / name
    if ".tar." in name:
        tar(path, ("good.h5", bytes(range(256)) * 4000), mode=f"w:{name[-3:].strip('.')}")
    elif name == "a.zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("good.h5", bytes(range(256)) * 4000)
    else:
        path.write_bytes((lzma if name == "a.xz" else gzip).compress(bytes(range(256)) * 4000))
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"hello", b"", whole[:100] + b"\0" * 40 + whole[140:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"cannot be unpacked \(.*\); fetch it again|does not hold good.h5"):
            unpack(path, tmp_path / "out", wanted=("good.h5",), limit=1 << 30)
        assert files_in(tmp_path / "out") == []


def test_archives_without_what_is_wanted_or_of_another_kind(tmp_path):
    archive = tar(tmp_path / "a.tar.bz2", ("good.h5", b"good"))
    with pytest.raises(ValueError, match=r"a.tar.bz2 does not hold other.h5"):
        unpack(archive, tmp_path / "out", wanted=("good.h5", "other.h5"), limit=LIMIT)
    assert files_in(tmp_path / "out") == []  # all or none
    (tmp_path / "a.rar").write_bytes(bz2.compress(b""))
    with pytest.raises(ValueError, match=r"a.rar is no archive of a kind that is known"):
        unpack(tmp_path / "a.rar", tmp_path / "out", wanted=("a",), limit=LIMIT)


def test_an_encrypted_zip_is_refused(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("good.h5", b"good")
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1  # the flag in the directory
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"holds 'good.h5', which is encrypted; refused"):
        unpack(path, tmp_path / "out", wanted=("good.h5",), limit=LIMIT)
