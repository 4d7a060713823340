"""The log of an audit: one record per round, in an append-only file that survives kill -9.

A log file is a magic line, then records. A record is a tag, the lengths of header and body, a JSON header, the arrays'
bytes, and a digest chained to the previous record. A kill may leave a record without its end; such a record is dropped. A
power cut may leave a damaged end of the file, which is dropped when the file is opened for writing. Any other damage is an
error.
"""

import hashlib
import json
import logging
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import one_line
from coalmine.log.files import BINARY, check_depth, open_regular, overwrite_at, read_at, sync_directory, write_at
from coalmine.log.round_schema import check_types, check_values
from coalmine.log.single_writer import SingleWriterLock, refuse_copy
from coalmine.measure.round import Final, Round

MAGIC = b"coalmine rounds 1\n"
VERSION = re.compile(rb"coalmine rounds \d+\n")
TAG = b"REC\n"
LENGTHS = struct.Struct("<QQ")
DIGEST = 16
LARGEST_HEADER = 1 << 24

logger = logging.getLogger("coalmine")
Size = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class TrainerRecord:
    """The trainer's own entries of the result, such as the accuracy; the last record."""

    values: dict[str, Any]


class Entry(NamedTuple):
    """The part of a round that stays in memory: its number, its canaries, the caller's statements, and its record's end."""

    number: int
    skipped: bool
    present: npt.NDArray[np.int32]
    states_noise: bool
    multiplier: float | None  # the stated noise over the clip norm, if both are stated in the units of the release
    has_others: bool
    participants: int | None
    end: int

    @classmethod
    def of(cls, item: Round, end: int = 0) -> "Entry":
        present, declared = np.array(item.present), item.clip_declared  # a copy, not a view of the record
        return cls(
            number=item.number,
            skipped=item.skipped,
            present=present,
            states_noise=item.noise_std is not None,
            multiplier=item.noise_std / item.clip_norm if item.noise_std is not None and declared else None,
            has_others=item.residual_cosines is not None,
            participants=item.participants,
            end=end,
        )


class RoundLog:
    """Rounds in order, then perhaps the final model: in the file at `path`, or in a temporary one that ends with the log.

    Only a few numbers per round stay in memory; the records are read again, one at a time, when they are needed.
    """

    def __init__(self, path: Path | None = None, *, read_only: bool = False) -> None:
        self._handle: int | None = None
        self._writer = SingleWriterLock(f"the log {path}" if path else "the audit")
        self._path = path
        self._read_only = read_only
        self._final: Final | None = None
        self._outcome: TrainerRecord | None = None
        self._entries: list[Entry] = []
        self._skipped = 0  # rounds among the entries
        self._digests: list[bytes] = []
        self._end = len(MAGIC)
        # The next round, already encoded: it, the digest that it follows, its bytes and its digest.
        self._prepared: tuple[Round, bytes, tuple[bytes, bytes]] | None = None
        self._handle = _temporary_file() if path is None else _named_file(path, read_only)
        self._read_back()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the rounds so far, including skipped ones."""
        return [entry.number for entry in self._entries]

    @property
    def last_number(self) -> int:
        """The number of the last round, 0 before the first; as cheap after many rounds as after one."""
        return self._entries[-1].number if self._entries else 0

    @property
    def observed(self) -> list[Entry]:
        """The rounds that were not skipped, without their arrays."""
        return [entry for entry in self._entries if not entry.skipped]

    @property
    def observed_count(self) -> int:
        """How many rounds were not skipped."""
        return len(self._entries) - self._skipped

    @property
    def final(self) -> Final | None:
        return self._final

    @property
    def outcome(self) -> dict[str, Any] | None:
        """The trainer's own entries of the result; None before they are written."""
        return None if self._outcome is None else self._outcome.values

    @property
    def digest(self) -> str:
        """A digest of everything observed, chained record by record."""
        return self._digests[-1].hex() if self._digests else ""

    def rounds(self) -> Iterator[Round]:
        """Every round that was not skipped, in order."""
        for kind, item in self.records():
            if kind == "round" and not item.skipped:
                yield item

    def rounds_after(self, number: int) -> Iterator[Round]:
        """As `rounds`, from the round after `number` on; earlier ones are not read, and digests are not compared again."""
        start = max((entry.end for entry in self._entries if entry.number <= number), default=len(MAGIC))
        reader = _Reader(self._open_handle(), start)
        for kind, item, _, _ in scan_records(reader, self._end, self._path, checked=False, trusted=True):
            if kind == "round" and not item.skipped:
                yield item

    def records(self) -> Iterator[tuple[str, Any]]:
        """Every record in order, including skipped rounds and the final model. Digests were compared when it was opened."""
        for kind, item, _, _ in scan_records(
            _Reader(self._open_handle()), self._end, self._path, checked=False, trusted=True
        ):
            yield kind, item

    def prepare(self, item: Round) -> None:
        """Check and encode a round that `append` will get; any thread may do it, for one round at a time."""
        previous = self._last_digest
        self._prepared = (item, previous, framed(*checked_parts("round", item), previous))

    def append(self, item: Round) -> None:
        self._write("round", item)
        self._enter(item, self._end)

    def finish(self, item: Final) -> None:
        self._write("final", item)
        self._final = item

    def close_run(self, values: dict[str, Any]) -> None:
        """Record the trainer's own entries of the result, so that they can be verified. Does nothing if unchanged."""
        if self.outcome != values:
            outcome = TrainerRecord(values)
            self._write("outcome", outcome)
            self._outcome = outcome

    def rewind_to(self, number: int) -> None:
        """Remove the rounds after `number`, and the final model."""
        with self._writer:
            keep = sum(1 for entry in self._entries if entry.number <= number)
            end = self._entries[keep - 1].end if keep else len(MAGIC)
            os.ftruncate(self._open_handle(), end)
            self._end = end
            self._final = self._outcome = None
            del self._entries[keep:], self._digests[keep:]
            self._skipped = sum(entry.skipped for entry in self._entries)

    def sync(self) -> None:
        """Return once every record is on disk, so that a power cut loses none of them."""
        if self._path is None or self._read_only:
            return
        with self._writer:
            try:
                os.fsync(self._open_handle())
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None

    def close(self) -> None:
        """Close the file. Does nothing in a forked process, which does not own it."""
        if self._handle is not None and self._writer.is_here:
            os.close(self._handle)
            self._handle = None

    def __reduce__(self) -> NoReturn:
        refuse_copy("a RoundLog", "read the file with RunDirectory(…).read_log()")

    def __del__(self) -> None:
        self.close()

    @property
    def _last_digest(self) -> bytes:
        return self._digests[-1] if self._digests else b""

    def _open_handle(self) -> int:
        if self._handle is None:
            raise ValueError(f"the log {self._path} is closed")
        return self._handle

    def _write(self, kind: str, item: Round | Final | TrainerRecord) -> None:
        if self._read_only:
            raise ValueError(f"the log {self._path} is open for reading only")
        with self._writer:
            handle = self._open_handle()
            prepared, self._prepared = self._prepared, None
            if prepared is not None and prepared[0] is item and prepared[1] == self._last_digest:
                data, digest = prepared[2]
            else:
                data, digest = framed(*checked_parts(kind, item), self._last_digest)
            try:
                write_at(handle, data, self._end)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            self._end += len(data)
            self._digests.append(digest)

    def _enter(self, item: Round, end: int) -> None:
        self._entries.append(Entry.of(item, end))
        self._skipped += item.skipped

    def _read_back(self) -> None:
        handle = self._open_handle()
        size = os.fstat(handle).st_size
        reader = _Reader(handle, start=0)
        start = reader.read(len(MAGIC))
        if start != MAGIC:
            check_magic(start, reader.read(size), self._path)
            if not self._read_only:
                overwrite_at(handle, MAGIC, 0)
            reader = _Reader(handle)
        for kind, item, end, digest in scan_records(reader, size, self._path, lost_end=not self._read_only):
            self._end = end
            self._digests.append(digest)
            if kind == "round":
                self._enter(item, end)
            elif kind == "final":
                self._final = item
            else:
                self._outcome = item
        if size > self._end and not self._read_only:  # a reader may see a record that is being written
            logger.warning("%s: dropped %d bytes of a torn last record", self._path, size - self._end)
            os.ftruncate(handle, self._end)


def check_magic(start: bytes, rest: bytes, path: Path | None) -> None:
    """ValueError for a file that is no log. A whole first record shows that only its first line is damaged."""
    other_version = VERSION.fullmatch(start) is not None
    if len(start) < len(MAGIC) or other_version or not _starts_with_record(rest):
        raise ValueError(f"{path} is not a log of rounds; was it written by another program or a newer coalmine?")
    logger.warning("%s: its first line is damaged, but the records after it are whole", path)


def _starts_with_record(rest: bytes) -> bool:
    """Whether the bytes start with a whole first record."""
    first = len(TAG) + LENGTHS.size
    if rest[: len(TAG)] != TAG or len(rest) < first:
        return False
    end = first + sum(LENGTHS.unpack(rest[len(TAG) : first]))
    return _chained(b"", rest[first:end]) == rest[end : end + DIGEST]


def _temporary_file() -> int:
    with tempfile.TemporaryFile(prefix="coalmine-") as file:
        handle = os.dup(file.fileno())  # the file lasts as long as the handle, and a kill removes it too
    write_at(handle, MAGIC, 0)
    return handle


def _named_file(path: Path, read_only: bool) -> int:
    if read_only:
        return open_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o644)
    try:
        if os.fstat(handle).st_size < len(MAGIC):
            os.ftruncate(handle, 0)
            write_at(handle, MAGIC, 0)
            os.fsync(handle)
            sync_directory(path.parent)
    except OSError as error:
        os.close(handle)
        raise OSError(error.errno, error.strerror, str(path)) from None
    return handle


class _Reader:
    """Reads a file at its own offset, without moving that of the handle."""

    def __init__(self, handle: int, start: int = len(MAGIC)) -> None:
        self._handle, self._place = handle, start

    def tell(self) -> int:
        return self._place

    def read(self, size: int) -> bytes:
        data = read_at(self._handle, size, self._place)
        self._place += len(data)
        return data


def encode(kind: str, item: Round | Final | TrainerRecord, previous: bytes) -> tuple[bytes, bytes]:
    """A record as bytes, and its digest, chained to the `previous` one."""
    return framed(*_parts(kind, item), previous)


def checked_parts(kind: str, item: Round | Final | TrainerRecord) -> tuple[bytes, bytes]:
    """The header and the arrays of a record, or an error: a record that cannot be read again must not be written."""
    check_types(item)
    check_values(item)
    if isinstance(item, TrainerRecord):
        check_depth(item.values)
    return _parts(kind, item)


def _parts(kind: str, item: Round | Final | TrainerRecord) -> tuple[bytes, bytes]:
    header: dict[str, Any] = {"kind": kind, "arrays": []}
    body = []
    for name, value in _flat(item):
        if isinstance(value, np.ndarray):
            plain = np.ascontiguousarray(value)
            header["arrays"].append([name, plain.dtype.str, plain.size])
            body.append(plain.tobytes())
        else:
            header[name] = value
    return json.dumps(header, separators=(",", ":")).encode(), b"".join(body)


def framed(head: bytes, arrays: bytes, previous: bytes) -> tuple[bytes, bytes]:
    """A record's header and arrays as it is written, and its digest, chained to the `previous` one."""
    digest = _chained(previous, head, arrays)
    return TAG + LENGTHS.pack(len(head), len(arrays)) + head + arrays + digest, digest


def _chained(*parts: bytes) -> bytes:
    """The digest of a record after the digest of the previous one; the parts are not copied into one."""
    digest = hashlib.blake2b(digest_size=DIGEST)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _flat(item: Round | Final | TrainerRecord) -> Iterator[tuple[str, Any]]:
    for part in fields(item):
        value = getattr(item, part.name)
        if part.name == "scores":
            yield from ((f"scores/{name}", array) for name, array in value.items())
        elif value is not None:
            yield part.name, value


def decode(head: bytes, body: bytes) -> tuple[str, Round | Final | TrainerRecord]:
    """The inverse of `checked_parts`, for bytes whose digest is correct.

    The digest covers header and arrays, not where one ends and the other begins. So the header must be one JSON object
    and nothing more, and the arrays must fill the rest: then no other record has the same bytes.
    """
    if head[:1] != b"{" or head[-1:] != b"}":
        raise ValueError("its header must be one object of JSON, without spaces around it")
    header = msgspec.convert(json.loads(head), dict[str, Any])
    kind, start = header.pop("kind"), 0
    values: dict[str, Any] = {}
    scores = {}
    for name, dtype, size in msgspec.convert(header.pop("arrays"), list[tuple[str, str, Size]]):
        array = np.frombuffer(body, dtype=dtype, count=size, offset=start)
        start += array.nbytes
        if name.startswith("scores/"):
            scores[name.removeprefix("scores/")] = array
        else:
            values[name] = array
    if start != len(body):
        raise ValueError(f"its arrays must fill its {len(body)} bytes, got {start}")
    if kind == "round":
        return kind, Round(**header, **values, scores=scores)
    if kind == "final":
        return kind, Final(**header, **values)
    if kind == "outcome":
        check_depth(header)
        return kind, TrainerRecord(**header)
    raise ValueError(f"unknown record {kind!r}; was this file written by a newer coalmine?")


def scan_records(
    file: Any, size: int, path: Path | None, *, checked: bool = True, lost_end: bool = False, trusted: bool = False
) -> Iterator[tuple[str, Any, int, bytes]]:
    """Kind, record, offset after it and digest, for each whole record up to offset `size`; stops before a torn one.

    Without `checked` digests are not compared, for a file whose digests were checked before. If it is `trusted`, because
    this process has checked or written every record, types are not looked at either. With `lost_end` it also stops
    before a damaged record that no whole one follows: a power cut may keep a file's length and lose its end.
    """
    digest, number = b"", 0
    while True:
        number += 1
        start = file.read(min(len(TAG) + LENGTHS.size, size - file.tell()))
        if len(start) < len(TAG) + LENGTHS.size:
            return
        head_size, body_size = LENGTHS.unpack(start[len(TAG) :])
        is_record = start[: len(TAG)] == TAG and head_size <= LARGEST_HEADER
        torn = is_record and file.tell() + head_size + body_size + DIGEST > size
        if not is_record or torn:
            rest = b"".join((start, file.read(size - file.tell())))
            if (torn or lost_end) and not _record_follows(rest):  # otherwise the lengths are wrong
                return
            raise ValueError(f"{path}: record {number} is damaged; restore the file from a copy")
        head, body, stored = file.read(head_size), file.read(body_size), file.read(DIGEST)
        digest = _chained(digest, head, body) if checked else bytes(stored)
        if digest != stored:
            rest = b"".join((head, body, stored, file.read(size - file.tell())))
            if lost_end and not _record_follows(rest):
                return
            raise ValueError(f"{path}: record {number} is damaged; restore the file from a copy")
        try:
            kind, item = decode(bytes(head), body)
            if not trusted:
                check_types(item)
            if checked:
                check_values(item)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: record {number} cannot be read ({one_line(str(error))})") from None
        yield kind, item, file.tell(), digest


def _record_follows(rest: bytes) -> bool:
    """Whether `rest` contains a whole record, preceded by the digest of the previous one."""
    at = rest.find(TAG, DIGEST)
    while at >= 0:
        first = at + len(TAG) + LENGTHS.size
        if first <= len(rest):
            end = first + sum(LENGTHS.unpack(rest[first - LENGTHS.size : first]))
            digest = _chained(rest[at - DIGEST : at], rest[first:end])
            if digest == rest[end : end + DIGEST]:
                return True
        at = rest.find(TAG, at + 1)
    return False
