"""The directory of a run: a trainer writes it during training, and report, compare and verify read it.

    config.toml         the trainer's settings
    metrics.jsonl       one line per round
    audit/record.json   commitment and settings of the audit, before round 1
    audit/rounds.log    the audit's rounds, appended one by one
    result.json         the result of the audit

One writer at a time holds the lock; readers need none. Every file is complete at any time, except that a kill may tear the
last line or record of metrics.jsonl and rounds.log. Readers drop a torn one.
"""

import hashlib
import json
import logging
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import msgspec
import tomli_w

from coalmine.argument_checks import short_repr
from coalmine.canaries.seeds import is_guessable
from coalmine.log.commitment import COMMITMENT_VERSION, SCHEMA_VERSION, Commitment, Precommitment, json_equal
from coalmine.log.files import (
    BINARY,
    FileLock,
    json_ready,
    lock_file,
    parse_json,
    read_at,
    read_regular,
    remove_drafts,
    sync_file,
    write_at,
    write_atomically,
)
from coalmine.log.mapped_rounds import LogReader, map_rounds
from coalmine.log.result_file import Writable, write_result_file
from coalmine.log.rounds_file import RoundLog
from coalmine.log.single_writer import refuse_copy
from coalmine.measure.settings import Settings

logger = logging.getLogger("coalmine")
LARGEST = 1 << 30  # bytes of a file that is read whole
FILES = (
    "config.toml", "metrics.jsonl", "result.json", "audit/record.json", "audit/rounds.log", "initial.npy", "model.npy",
    "checkpoint.safetensors", "checkpoint.previous.safetensors", "rounds.sha256", "report.html",
)  # fmt: skip


def runs_in(directory: Path) -> list[Path]:
    """The runs in a directory, sorted by name with numbers in numeric order; the directory itself if it holds none."""
    if is_run(directory) or not directory.is_dir():
        return [directory]
    runs = [path for path in directory.iterdir() if path.is_dir() and is_run(path)]
    return sorted(runs, key=lambda path: _natural(path.name)) or [directory]


def is_run(path: Path) -> bool:
    """Whether a directory holds a run, finished or not."""
    return any((path / name).exists() for name in ("config.toml", "result.json", "audit/record.json"))


def _natural(name: str) -> list[tuple[float, str]]:
    parts = re.findall(r"\d+(?:\.\d+)?|\D+", name)
    return [(float(part), "") if part[0].isdigit() else (-1.0, part) for part in parts]


class RunDirectory:
    """A run's directory, created when it is first written. Writing takes its lock, until `close` or the process's end."""

    def __init__(self, path: Path | str) -> None:
        self._lock: FileLock | None = None
        self._log: RoundLog | None = None
        self._metrics: int | None = None  # the handle of metrics.jsonl, and where the last line that was written ends
        self._metrics_end = 0
        self.path = Path(path)

    # Writing

    def lock(self) -> None:
        """Become the only writer; an error if another process is, or if this process was forked by the writer."""
        if not self.try_lock():
            raise ValueError(
                f"{self.path} is being written by another process, or by another audit of this one; wait for it, close() "
                "its directory, or choose another"
            )

    def try_lock(self) -> bool:
        """Become the only writer, unless another process is; returns whether this one has the lock."""
        if self._lock is not None and self._lock.is_here:
            return True
        if self._lock is not None:
            raise RuntimeError(
                f"{self.path} is locked by the process that this one was forked from, and may only be read here; write "
                "there, or make a RunDirectory of another directory in this process"
            )
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} must be a directory, got a file; choose another")
        self.path.mkdir(parents=True, exist_ok=True)
        for file in (self.path / name for name in FILES):
            if file.exists() and not file.is_file() and not file.is_dir():  # a pipe would wait for ever
                raise ValueError(f"{file} must be an ordinary file, got a pipe, a socket or a device; remove it")
        lock = lock_file(self.path / ".lock")
        if lock is None:
            return False
        self._lock = lock
        for name in ("config.toml", "metrics.jsonl", "result.json", "audit/record.json"):
            remove_drafts(self.path / name)
        return True

    def close(self) -> None:
        """Release the lock. A forked process leaves it, and the log, to the process it was forked from."""
        if self._lock is not None and not self._lock.is_here:
            return
        if self._log is not None:
            self._log.close()
            self._log = None
        self._close_metrics()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        refuse_copy("a RunDirectory", "make another one with the same path to read it, or with another path to write")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the trainer's settings; an error if the directory holds different ones."""
        self.lock()
        new = {"schema_version": SCHEMA_VERSION} | dict(config)
        if (self.path / "config.toml").exists():
            old = self.read_config()
            changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
            if changed:
                raise ValueError(
                    f"{self.path} holds a run with another config (it differs in {', '.join(changed)}); "
                    "resume it as it was, or choose another directory"
                )
            return
        write_atomically(self.path / "config.toml", tomli_w.dumps(new).encode())

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        """Append one line of metrics."""
        self.lock()
        line = json.dumps(json_ready({"schema_version": SCHEMA_VERSION} | dict(values)), allow_nan=False) + "\n"
        path = self.path / "metrics.jsonl"
        if self._metrics is None:  # kept open: this is called in every round
            self._metrics = os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o644)
        try:
            size = os.fstat(self._metrics).st_size
            torn = size not in (0, self._metrics_end) and read_at(self._metrics, 1, size - 1) != b"\n"
            data = ("\n" * torn + line).encode()
            write_at(self._metrics, data, size)
            self._metrics_end = size + len(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None

    def sync_metrics(self) -> None:
        """Return once the lines of metrics are on disk, so that no checkpoint is ahead of them after a power cut."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            sync_file(path)

    def rewind_metrics_to(self, round_number: int) -> None:
        """Remove the metrics of later rounds, and damaged lines."""
        self.lock()
        self._close_metrics()
        kept = [line for line in self.read_metrics() if line.get("round", 0) <= round_number]
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in kept)
        write_atomically(self.path / "metrics.jsonl", text.encode())

    def commit(
        self, seed: SupportsIndex | bytes, settings: Settings, statement: Precommitment | None = None
    ) -> Commitment:
        """Publish the commitment before round 1; an existing one must match seed, settings and statement.

        The directory itself adds to the statement whether the seed can be guessed, and the digest of config.toml.
        """
        given = statement or Precommitment()
        self.lock()
        path = self.path / "audit" / "record.json"
        if path.exists():
            stored, commitment = self.read_record()
            if commitment.version != COMMITMENT_VERSION:
                raise ValueError(
                    f"{self.path} holds {commitment.other_version}; finish it with that version, or choose another directory"
                )
            statement = self.read_statement()
            if stored != settings:
                old, new = stored.to_dict(), settings.to_dict()
                if stored.processes != settings.processes:
                    raise ValueError(
                        f"{self.path} holds an audit with {stored.processes} processes, which cannot be resumed with "
                        f"{settings.processes}; use the same number, or another directory"
                    )
                changed = [name for name in old | new if old.get(name) != new.get(name)]
                raise ValueError(f"{self.path} holds an audit with other settings (it differs in {', '.join(changed)})")
            if given.claim is not None and not json_equal(statement.claim, given.claim):
                raise ValueError(
                    f"{self.path} holds an audit that started with another claim: {_claim_text(statement.claim)}, not "
                    f"{_claim_text(given.claim)}; omit claim= to resume it, or choose another directory"
                )
            if given.initial_sha256 is not None and statement.initial_sha256 != given.initial_sha256:
                raise ValueError(
                    f"{self.path} holds an audit that started with another model; choose another directory"
                )
            if not commitment.opens_to(seed, settings, statement):
                raise ValueError(f"{self.path} holds an audit with a different seed")
            return commitment
        return self._publish(seed, settings, given)

    def amend(
        self, seed: SupportsIndex | bytes, settings: Settings, statement: Precommitment, *, salt: str
    ) -> Commitment:
        """Publish a commitment to more in the place of the first one, before round 1. The salt stays the same."""
        self.lock()
        return self._publish(seed, settings, statement, salt=salt)

    def _publish(
        self, seed: SupportsIndex | bytes, settings: Settings, given: Precommitment, *, salt: str | None = None
    ) -> Commitment:
        statement = replace(given, config_sha256=self.config_sha256(), demonstration=is_guessable(seed))
        commitment = Commitment.to(seed, settings, statement, salt=salt)
        record = {
            "schema_version": SCHEMA_VERSION,
            "settings": settings.to_dict(),
            "statement": vars(statement),
            "commitment": vars(commitment),
        }
        write_atomically(self.path / "audit" / "record.json", (json.dumps(record, indent=2) + "\n").encode())
        return commitment

    @property
    def has_record(self) -> bool:
        """Whether an audit has committed to its seed and settings in this directory."""
        return (self.path / "audit" / "record.json").exists()

    def config_sha256(self) -> str | None:
        """The SHA-256 of config.toml; None if there is none."""
        path = self.path / "config.toml"
        return hashlib.sha256(read_regular(path, most=LARGEST)).hexdigest() if path.exists() else None

    def open_log(self) -> RoundLog:
        """The log of rounds, to append to."""
        self.lock()
        if self._log is None:
            self._log = RoundLog(self.path / "audit" / "rounds.log")
        return self._log

    def write_result(self, result: Writable) -> str | None:
        """Write an AuditResult, whole or not at all, and return the log's digest.

        The trainer's entries, and those it passed to the audit, go into the log first, and its digest into the result.
        """
        self.lock()
        log = self.open_log() if (self.path / "audit" / "rounds.log").exists() else self._log
        return write_result_file(self.path / "result.json", result, log)

    # Reading

    def read_config(self) -> dict[str, Any]:
        try:
            return self._checked_version(tomllib.loads(self._text("config.toml")), "config.toml")
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ValueError(f"{self.path / 'config.toml'} is not TOML ({error}); restore it from a copy") from None

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every complete line. A warning counts damaged lines, which a kill or a power cut may leave."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        lines = [
            (number, _metrics(line))
            for number, line in enumerate(read_regular(path, most=LARGEST).split(b"\n"), 1)
            if line
        ]
        damaged = [number for number, values in lines if values is None]
        if damaged:
            which = (
                f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first of them {damaged[0]}"
            )
            logger.warning("%s: skipped %s, damaged or torn; the audit does not need it", path, which)
        return [values for _, values in lines if values is not None]

    def read_record(self) -> tuple[Settings, Commitment]:
        record = self._json("audit/record.json")
        try:
            return Settings.from_dict(record["settings"]), Commitment.from_dict(record["commitment"])
        except (KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.path / 'audit/record.json'} is not a record of an audit ({error})") from None

    def read_statement(self) -> Precommitment:
        """The statement that was committed to before round 1, besides seed and settings."""
        record = self._json("audit/record.json")
        try:
            return msgspec.convert(record["statement"], Precommitment)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.path / 'audit/record.json'} is not a record of an audit ({error})") from None

    def read_log(self) -> RoundLog:
        """The log of rounds, read-only."""
        return RoundLog(self._log_file(), read_only=True)

    def map_rounds(self) -> LogReader:
        """The rounds of a finished run, mapped into memory."""
        return map_rounds(self._log_file())

    def _log_file(self) -> Path:
        path = self.path / "audit" / "rounds.log"
        if not path.exists():
            raise ValueError(f"{self.path} holds no audit: {path.relative_to(self.path)} is missing")
        return path

    def read_result(self) -> dict[str, Any]:
        return self._json("result.json")

    def _text(self, name: str) -> str:
        try:
            return read_regular(self.path / name, most=LARGEST).decode()
        except FileNotFoundError:
            raise ValueError(f"{self.path} is not a finished run: {name} is missing") from None
        except UnicodeDecodeError:
            raise ValueError(f"{self.path / name} is not text; restore it from a copy") from None

    def _json(self, name: str) -> dict[str, Any]:
        text = self._text(name)
        try:
            values = parse_json(text)
        except ValueError as error:  # also whole numbers of thousands of digits
            raise ValueError(f"{self.path / name} is not JSON ({error}); restore it from a copy") from None
        if not isinstance(values, dict):
            raise ValueError(f"{self.path / name} must hold an object, got {type(values).__name__}")
        return self._checked_version(values, name)

    def _checked_version(self, values: dict[str, Any], name: str) -> dict[str, Any]:
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{self.path / name} has schema version {short_repr(version)}, this coalmine reads {SCHEMA_VERSION}"
            )
        return values


def _claim_text(claim: Mapping[str, Any] | None) -> str:
    """A claim's fields in a message."""
    known = {name: value for name, value in (claim or {}).items() if value not in (None, False)}
    return ", ".join(f"{name} {short_repr(value)}" for name, value in known.items()) or "none"


def _metrics(line: bytes) -> dict[str, Any] | None:
    """A line of metrics; None if it is damaged."""
    try:
        values = parse_json(line)
    except ValueError:
        return None
    number = values.get("round", 0) if isinstance(values, dict) else None
    return values if isinstance(number, int | float) else None
