"""An audit in one file: a JSON header, the records of its rounds, and a digest of everything at the end."""

import hashlib
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from coalmine.argument_checks import one_line, shown
from coalmine.log.commitment import SCHEMA_VERSION, Commitment, Statement
from coalmine.log.files import parse_json, read_regular, write_atomically
from coalmine.log.round_schema import check_fit
from coalmine.log.rounds_file import RoundLog, encode, scan_records
from coalmine.measure.settings import Settings

MAGIC = b"coalmine audit 1\n"
DIGEST = 32
LARGEST = 1 << 36  # bytes


def save(path: Path, settings: Settings, statement: Statement, commitment: Commitment, log: RoundLog) -> None:
    """Write an audit, whole or not at all."""
    head: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "settings": settings.to_dict(),
        "statement": vars(statement),
        "commitment": vars(commitment),
    }
    records, digest = [], b""
    for kind, item in log.records():
        if kind == "outcome":
            continue  # it belongs to a run, not to the audit
        data, digest = encode(kind, item, digest)
        records.append(data)
    text = json.dumps(head, sort_keys=True).encode()
    content = MAGIC + len(text).to_bytes(8, "little") + text + b"".join(records)
    write_atomically(path, content + hashlib.blake2b(content, digest_size=DIGEST).digest())


def load(path: Path) -> tuple[Settings, Statement, Commitment, RoundLog]:
    """The inverse of `save`; a corrupt or truncated file, or one of another program, is rejected."""
    data = read_regular(path, most=LARGEST)
    if not data.startswith(MAGIC):
        raise ValueError(f"{path} is not a saved audit; was it written by another program or a newer coalmine?")
    content, digest = data[:-DIGEST], data[-DIGEST:]
    if hashlib.blake2b(content, digest_size=DIGEST).digest() != digest:
        raise ValueError(f"{path} is damaged or truncated; restore it from a copy")
    start = len(MAGIC) + 8
    size = int.from_bytes(data[len(MAGIC) : start], "little")
    settings, statement, commitment = _read_head(path, data[start : start + size])
    log = RoundLog()
    file = io.BytesIO(content)
    file.seek(start + size)
    for kind, item, _, _ in scan_records(file, len(content), path):
        try:
            check_fit(item, settings)
        except ValueError as error:
            raise ValueError(f"{path} holds rounds of another audit: {error}") from None
        if log.final is not None or (kind == "round" and item.number <= max(log.numbers, default=0)):
            raise ValueError(f"{path} holds rounds that are not in order")
        if kind == "round":
            log.append(item)
        elif kind == "final":
            log.finish(item)
    return settings, statement, commitment, log


def _read_head(path: Path, text: bytes) -> tuple[Settings, Statement, Commitment]:
    try:
        head = msgspec.convert(parse_json(text), dict[str, Any])
        if head.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"schema version {shown(head.get('schema_version'))}, this coalmine reads {SCHEMA_VERSION}"
            )
        statement = msgspec.convert(head["statement"], Statement)
        asdict(statement)  # rejects a claim that is nested too deeply
        return Settings.from_dict(head["settings"]), statement, Commitment.from_dict(head["commitment"])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a saved audit of this version ({one_line(str(error))})") from None
