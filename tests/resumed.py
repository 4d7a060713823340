"""The files of a run as far as a restart must not change them.

The sums that follow each coordinate over the rounds are in memory only, so a restart begins them anew: their readings, the
two gauges of coordinates, their notes, and the digest of the log may differ.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from coalmine.log.rounds_file import RoundLog, encode

GAUGES = ("coordinates", "weak coordinates")


def comparable(path: Path) -> Any:
    """The content of a file, without what a restart may change."""
    if path.name == "rounds.log":
        return [_record(kind, item) for kind, item in RoundLog(path, read_only=True).records()]
    if path.name != "result.json":
        return path.read_bytes()
    return comparable_result(json.loads(path.read_text()))


def comparable_result(values: dict[str, Any]) -> dict[str, Any]:
    """The entries of a result, without what a restart may change."""
    kept = {name: value for name, value in values.items() if name != "log_digest"}
    kept["gauges"] = {name: one for name, one in statistics_of(values).items() if name not in GAUGES}
    kept["notes"] = [note for note in values["notes"] if not note.startswith("coordinates: ")]
    return kept


def statistics_of(values: dict[str, Any]) -> dict[str, Any]:
    """The statistics of all gauges in a stored result, by name."""
    return {name: one for gauge in values["gauges"].values() for name, one in gauge["statistics"].items()}


def _record(kind: str, item: Any) -> bytes:
    plain = replace(item, law_coordinates=None) if hasattr(item, "law_coordinates") else item
    return encode(kind, plain, b"")[0]
