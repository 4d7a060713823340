"""Damaged or hostile downloaded archives: nothing is written outside the folder, and an error is one line."""

import bz2
import io
import lzma
import random
import tarfile
from pathlib import Path

from coalmine.data.unpack import unpack
from fuzz.cases import Case, FaultError, allow
from fuzz.values import damaged, safe_text

LIMIT = 1 << 20
NAMES = (
    "data.bin",
    "other.bin",
    "../escaped",
    "/tmp/escaped",
    "a/../../escaped",
    "C:\\escaped",
    "..\\escaped",
    "a/data.bin",
)

LINKS_AND_DEVICES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
TYPES = (*[tarfile.REGTYPE] * 6, *LINKS_AND_DEVICES, tarfile.DIRTYPE)


def make_case(rng: random.Random, folder: Path) -> Case:
    """An archive of one of the two downloaded kinds, with hostile names, links, bombs or damage."""
    tar = rng.random() < 0.7
    content, said = _tar(rng) if tar else _lzma(rng)
    if rng.random() < 0.5:
        content, said = damaged(content, rng), said + ", damaged"
    archive = folder / ("archive.tar.bz2" if tar else "archive.lzma")
    archive.write_bytes(content)
    return Case(said, lambda: _check(archive, folder))


def _check(archive: Path, folder: Path) -> None:
    target = folder / "target"
    with allow(ValueError, OSError):
        unpack(archive, target, wanted=("data.bin",), limit=LIMIT)
        if not (target / "data.bin").is_file() or (target / "data.bin").is_symlink():
            raise FaultError("nothing was unpacked, and no error was raised")
    outside = {path.name for path in folder.rglob("*")} - {archive.name, "target", "data.bin"}
    if outside or Path("/tmp/escaped").exists() or (folder.parent / "escaped").exists():
        raise FaultError(f"files beside the wanted one: {sorted(outside)}")
    if (target / "data.bin").exists() and (target / "data.bin").stat().st_size > LIMIT:
        raise FaultError("more bytes than the limit")


def _tar(rng: random.Random) -> tuple[bytes, str]:
    buffer, said = io.BytesIO(), []
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for _ in range(rng.randint(0, 4)):
            name = rng.choice((*NAMES, "data.bin", safe_text(rng) or "x"))
            entry = tarfile.TarInfo(name.replace("\0", ""))
            entry.type = rng.choice(TYPES)
            entry.linkname = rng.choice(("/etc/passwd", "data.bin", "../x"))
            size = rng.choice((0, 10, 5_000, LIMIT + 1)) if entry.isreg() else 0
            entry.size = size
            tar.addfile(entry, io.BytesIO(bytes(size)))
            said.append(f"{name!r} type {entry.type!r} size {size}")
    return bz2.compress(buffer.getvalue()), "tar of " + ", ".join(said)


def _lzma(rng: random.Random) -> tuple[bytes, str]:
    size = rng.choice((0, 10, 5_000, LIMIT, LIMIT + 1, 20 * LIMIT))
    kind = rng.choice((lzma.FORMAT_ALONE, lzma.FORMAT_XZ))
    return lzma.compress(bytes(size), format=kind, preset=0), f"lzma of {size} bytes"
