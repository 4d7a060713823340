"""Unpacking of untrusted archives: no path outside the folder, no links, and a limit on the bytes written."""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Protocol

CHUNK = 1 << 20
ENTRIES = 100_000  # that an archive may have

Progress = Callable[[int], None]  # bytes written so far


class Content(Protocol):
    """What a file in an archive holds, piece by piece."""

    def read(self, size: int = ..., /) -> bytes: ...


def unpack(
    archive: Path, folder: Path, *, wanted: tuple[str, ...], limit: int, progress: Progress = lambda done: None
) -> None:
    """Put the files `wanted` from a .tar.bz2 archive into `folder`: all of them, or none.

    An archive with a path that leads outside, a link or a device is rejected as a whole, even where that entry is not
    wanted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as draft, _named_errors(archive):
        found = set()
        budget = _Budget(archive.name, limit, progress)
        for name, size, content in _members(archive):
            budget.announce(size)
            if name in wanted and content is not None:
                _write(Path(draft) / name, content, budget)
                found.add(name)
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ValueError(f"{archive.name} does not hold {missing[0]}")
        for name in wanted:
            (Path(draft) / name).replace(folder / name)


class _Budget:
    """The limit on an archive's bytes, both as announced and as written."""

    def __init__(self, archive: str, limit: int, progress: Progress) -> None:
        self.archive, self.limit, self.progress = archive, limit, progress
        self.announced = self.written = 0

    def announce(self, size: int) -> None:
        self.announced += size
        self._check(self.announced)

    def write(self, size: int) -> None:
        self.written += size
        self._check(self.written)
        self.progress(self.written)

    def _check(self, total: int) -> None:
        if total > self.limit:
            raise ValueError(f"{self.archive} unpacks to more than {self.limit:,} bytes, so it is rejected")


def _members(archive: Path) -> Iterator[tuple[str, int, Content | None]]:
    """Each regular file of an archive: its own name, the size that the archive states, its content."""
    with tarfile.open(archive, "r|bz2") as tar:
        for number, member in enumerate(tar):
            name = _safe_name(archive, member.name, number)
            if not member.isfile() and not member.isdir():
                raise ValueError(f"{archive.name} holds {member.name!r}, which is neither a file nor a folder; refused")
            if member.isfile():
                yield name, member.size, tar.extractfile(member)


def _safe_name(archive: Path, path: str, number: int) -> str:
    """A member's base name; ValueError if its path leads out of the folder on any system."""
    if number >= ENTRIES:
        raise ValueError(f"{archive.name} holds more than {ENTRIES:,} entries; refused")
    posix, windows = PurePosixPath(path), PureWindowsPath(path)
    if posix.is_absolute() or windows.anchor or ".." in posix.parts or ".." in windows.parts or "\0" in path:
        raise ValueError(f"{archive.name} holds a path that leads outside, {path!r}; refused")
    return posix.name


def _write(path: Path, content: Content, budget: _Budget) -> None:
    with path.open("wb") as output:
        while chunk := content.read(CHUNK):
            budget.write(len(chunk))
            output.write(chunk)
        output.flush()
        os.fsync(output.fileno())


@contextmanager
def _named_errors(archive: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, tarfile.TarError) as error:
        raise ValueError(f"{archive} cannot be unpacked ({error}); fetch it again") from None
    except OSError as error:
        if error.errno is None:  # bz2 raises a plain OSError
            raise ValueError(f"{archive} cannot be unpacked ({error}); fetch it again") from None
        free = shutil.disk_usage(archive.parent).free
        raise OSError(f"unpacking {archive} failed: {error.strerror}; {free:,} bytes are free there") from None
