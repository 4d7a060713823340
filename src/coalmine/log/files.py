"""Atomic writes, file locks, and JSON with the numbers that it cannot represent."""

import errno
import json
import math
import os
import secrets
import stat
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NoReturn
from weakref import WeakSet

from coalmine.argument_checks import short_repr

fcntl: Any
msvcrt: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
try:
    import msvcrt
except ImportError:  # everywhere else
    msvcrt = None

BINARY = getattr(os, "O_BINARY", 0)  # Windows translates line ends without it

PIECE = 1 << 24  # bytes read at a time
MOST_DIGITS = 300  # of a whole number; floats end at 1.8e308
DEEPEST = 64  # levels of a JSON value that is read; a result has 8
HELD = (errno.EWOULDBLOCK, errno.EACCES)  # what flock says of a lock that another process holds


def write_atomically(path: Path, data: bytes | Iterable[bytes], *, keep: Path | None = None) -> None:
    """Write `data` to `path`, whole or not at all, even in a crash. Follows links, and writes to pipes and devices.

    Large data may come in pieces. An existing file is moved to `keep`, if that is given.
    """
    pieces = [data] if isinstance(data, bytes) else data
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name a file")
    if path.exists() and not path.is_file():
        path.write_bytes(b"".join(pieces))
        return
    given, path = path, Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    # a new file, and not through a link that somebody put there
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | BINARY
    try:
        handle = os.open(draft, flags, 0o666)
        try:
            place = 0
            for piece in pieces:
                write_at(handle, piece, place)
                place += len(piece)
            os.fsync(handle)
        finally:
            os.close(handle)
        if keep is not None and path.exists():
            path.replace(keep)
        draft.replace(path)
        sync_directory(path.parent)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(given)) from None
        raise


def remove_drafts(path: Path) -> None:
    """Remove the drafts of `path` that killed processes left behind; only its one writer may call this."""
    for draft in path.parent.glob(f".{path.name}.*.new"):
        draft.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Return once a file that was appended to is on disk."""
    handle = os.open(path, os.O_RDWR | BINARY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut, if the system supports it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # unsupported by some network file systems
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)


class FileLock:
    """The lock of a file, held by the process that took it. A forked process neither holds nor releases it."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle
        self._process = os.getpid()
        _held.add(self)

    @property
    def is_here(self) -> bool:
        """Whether this process took it."""
        return self._process == os.getpid()

    def release(self) -> None:
        if self._handle is not None and self.is_here:
            os.close(self._handle)
            self._handle = None

    def _close_copy(self) -> None:
        """Close a forked process's copy, which would keep the lock after the process that took it has ended."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


_held: "WeakSet[FileLock]" = WeakSet()


def _after_fork() -> None:
    for lock in list(_held):
        lock._close_copy()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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
    """The whole content of a stream; ValueError if it is more than `most` bytes."""
    pieces, size = [], 0
    while piece := stream.read(PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise ValueError(f"{name} must hold at most {most:,} bytes, got more")
    return b"".join(pieces)


def check_archive(name: str, file: IO[bytes], *, most: int) -> None:
    """ValueError if the members of a zip archive unpack to more than `most` bytes; it reads on at the start of the file."""
    with zipfile.ZipFile(file) as archive:
        size = sum(member.file_size for member in archive.infolist())
    file.seek(0)
    if size > most:
        raise ValueError(f"{name} must unpack to at most {most:,} bytes, got {size:,}")


def read_toml(path: Path, *, most: int = 1 << 20) -> dict[str, Any]:
    """The tables of a TOML file of at most `most` bytes; ValueError for anything else."""
    content = read_regular(path, most=most)
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a config") from None
    except ValueError as error:  # also whole numbers of thousands of digits
        raise ValueError(f"{path} is not TOML: {error}") from None


def lock_file(path: Path) -> FileLock | None:
    """The lock of this file until it is released; None if another process, or this one, holds it.

    On a system with neither fcntl nor msvcrt nothing is locked.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif msvcrt is not None:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        os.close(handle)
        if fcntl is None or error.errno in HELD:
            return None
        raise OSError(error.errno, f"{error.strerror}: this file system has no locks", str(path)) from None
    return FileLock(handle)


def read_at(handle: int, size: int, place: int) -> bytes:
    """`size` bytes of a file from offset `place` on, or as many as there are, regardless of the file's position."""
    data = _read_once(handle, size, place)
    while data and len(data) < size and (more := _read_once(handle, size - len(data), place + len(data))):
        data += more
    return data


def _read_once(handle: int, size: int, place: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(handle, size, place)
    os.lseek(handle, place, os.SEEK_SET)
    return os.read(handle, size)


def write_at(handle: int, data: bytes, place: int) -> None:
    """Write all of `data` at offset `place`, in order, so that a kill leaves a prefix. If not all fits, it is removed."""
    try:
        done = 0
        while done < len(data):
            written = _write_once(handle, data[done:] if done else data, place + done)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += written
    except OSError:
        os.ftruncate(handle, place)  # a full disk must not leave half a record
        raise


def overwrite_at(handle: int, data: bytes, place: int) -> None:
    """Write a few bytes over those at offset `place`; what follows them stays."""
    _write_once(handle, data, place)


def _write_once(handle: int, data: bytes, place: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(handle, data, place)
    os.lseek(handle, place, os.SEEK_SET)
    return os.write(handle, data)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError unless it is plain: finite numbers, no key twice, no deep nesting."""
    try:
        value = json.loads(
            text,
            parse_constant=_reject_constant,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_unique_keys,
        )
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """ValueError if lists and dicts of JSON are nested so deeply that recursive functions may fail."""
    level, depth = [value], 0
    while level := [item for holder in level for item in _items(holder)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _reject_constant(constant: str) -> NoReturn:
    """Reject NaN and infinities, which are not JSON."""
    raise ValueError("a number in it is not finite")


def _finite(text: str) -> float:
    """A number; 1e999 is valid JSON, but infinite as a float."""
    if math.isinf(number := float(text)):
        _reject_constant(text)
    return number


def _whole(text: str) -> int:
    """A whole number that fits into a float."""
    if len(text) > MOST_DIGITS:
        _reject_constant(text)
    return int(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are unique: of two, each reader might take another."""
    values = dict(pairs)
    if len(values) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {short_repr(repeated)} occurs twice")
    return values


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def json_ready(value: Any) -> Any:
    """`value` with inf as the string "inf" and NaN as null, since JSON has neither."""
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
