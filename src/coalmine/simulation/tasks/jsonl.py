"""Files with a JSON object in each line, packed by gzip."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's object, and where it stands, for errors."""
    try:
        with gzip.open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{path}, line {number}", _object(line, f"{path}, line {number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no whole gzip file ({error})") from None


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get("client_id"), str):
        raise ValueError(f"{where} must be an object with a client_id")
    return found


def texts(values: Any, where: str) -> list[bytes]:
    """A list of texts as bytes."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{where} must have a list of texts")
    return [value.encode() for value in values]


def title_of(path: Path, title: str, *, sha256: str) -> str:
    """The title of the file with this checksum; another file of the format is called by its own."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    return title if found == sha256 else f"{path.name} with sha256 {found[:12]}…"
