"""Unpacking of untrusted archives: no path outside the folder, no links, and a limit on the bytes written."""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

CHUNK = 1 << 20
ENTRIES = 100_000  # most entries of an archive

Progress = Callable[[int], None]  # bytes written so far


def unpack(
    archive: Path, folder: Path, *, wanted: tuple[str, ...], limit: int, progress: Progress = lambda done: None
) -> None:
    """Put the files `wanted` from a .tar.bz2 archive into `folder`: all of them, or none.

    An archive with a path that leads outside, a link or a device is rejected as a whole, even if that entry is not
    wanted. So is an archive whose files have more than `limit` bytes in total.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as draft, _named_errors(archive):
        unpacked, written = set(), 0
        for name, content in _files(archive, limit):
            if name in wanted:
                written = _write(Path(draft) / name, content, written, progress)
                unpacked.add(name)
        missing = [name for name in wanted if name not in unpacked]
        if missing:
            raise ValueError(f"{archive.name} does not hold {missing[0]}")
        for name in wanted:
            (Path(draft) / name).replace(folder / name)


def _files(archive: Path, limit: int) -> Iterator[tuple[str, IO[bytes]]]:
    """The base name and the content of each regular file. No content is longer than its entry states."""
    total = 0
    with tarfile.open(archive, "r|bz2") as tar:
        for number, member in enumerate(tar):
            name = _safe_name(archive, member.name, number)
            if not member.isfile() and not member.isdir():
                raise ValueError(
                    f"{archive.name} holds {member.name!r}, which is neither a file nor a folder, so it is rejected"
                )
            total += member.size
            if total > limit:
                raise ValueError(f"{archive.name} unpacks to more than {limit:,} bytes, so it is rejected")
            if (content := tar.extractfile(member)) is not None:
                yield name, content


def _safe_name(archive: Path, path: str, number: int) -> str:
    """A member's base name; ValueError if its path leads outside the folder on any system."""
    if number >= ENTRIES:
        raise ValueError(f"{archive.name} holds more than {ENTRIES:,} entries, so it is rejected")
    posix, windows = PurePosixPath(path), PureWindowsPath(path)
    if posix.is_absolute() or windows.anchor or ".." in posix.parts or ".." in windows.parts or "\0" in path:
        raise ValueError(f"{archive.name} holds a path that leads outside, {path!r}, so it is rejected")
    return posix.name


def _write(path: Path, content: IO[bytes], written: int, progress: Progress) -> int:
    """Copy the content; returns the bytes written so far, over all files."""
    with path.open("wb") as output:
        while chunk := content.read(CHUNK):
            output.write(chunk)
            written += len(chunk)
            progress(written)
        output.flush()
        os.fsync(output.fileno())
    return written


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
