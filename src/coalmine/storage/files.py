"""Files that are whole or not there, one writer at a time, and numbers that JSON has no words for."""

import errno
import math
import os
import stat
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
    import msvcrt


PIECE = 1 << 24  # bytes read at a time


def write_atomically(path: Path, data: bytes) -> None:
    """`data` at `path`, whole or not at all, also across a crash; through a link, and into a pipe or a device."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name a file")
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with os.fdopen(_new_file(draft), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _new_file(path: Path) -> int:
    """A handle of a file that is made here: a link that somebody put in its place is removed, never followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    path.unlink(missing_ok=True)  # left by a process of the same number that was killed
    return os.open(path, flags, 0o666)


def open_regular(path: Path) -> int:
    """A handle to read an ordinary file. A FIFO or a device, which might never end, is a ValueError."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} must be an ordinary file, got a pipe, a socket or a device")
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_regular(path: Path, *, most: int) -> bytes:
    """The content of an ordinary file of at most `most` bytes; ValueError for anything else."""
    with os.fdopen(open_regular(path), "rb") as file:
        return read_stream(str(path), file, most=most)


def read_stream(name: str, stream: IO[bytes], *, most: int) -> bytes:
    """Everything that a stream holds; ValueError if that is more than `most` bytes."""
    pieces, size = [], 0
    while piece := stream.read(PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise ValueError(f"{name} must hold at most {most:,} bytes, got more")
    return b"".join(pieces)


def lock_file(path: Path) -> int | None:
    """A handle that holds the lock of this file until it is closed; None where another process, or this one, holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    except OSError:
        os.close(handle)
        return None
    return handle


def read_at(handle: int, size: int, place: int) -> bytes:
    """Up to `size` bytes from a place of a file, whatever its own position."""
    if hasattr(os, "pread"):
        return os.pread(handle, size, place)
    os.lseek(handle, place, os.SEEK_SET)
    return os.read(handle, size)


def write_at(handle: int, data: bytes, place: int) -> None:
    """All of `data` at a place of a file in one write, so that a kill leaves a prefix of it; what does not fit is undone."""
    try:
        if hasattr(os, "pwrite"):
            written = os.pwrite(handle, data, place)
        else:
            os.lseek(handle, place, os.SEEK_SET)
            written = os.write(handle, data)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(handle, place)  # a full disk must not leave half a record
        raise


def json_ready(value: Any) -> Any:
    """`value` with inf as the string "inf" and NaN as null, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return float(value)
    return value
