"""result.json: the result of an audit, with the trainer's own entries and the digest of the log it was derived from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from coalmine.storage.files import json_ready, write_atomically
from coalmine.storage.rounds_file import RoundLog

STATED = ("analytical_epsilon", "claimed_epsilon", "clients")  # entries that the trainer passed to the audit


class HasDict(Protocol):
    """An object that can be written as JSON."""

    def to_dict(self) -> dict[str, Any]: ...


def write_result_file(path: Path, result: HasDict, trainer: Mapping[str, Any], log: RoundLog | None) -> None:
    """Write a result, whole or not at all. The trainer's entries go into the log first, and its digest into the result."""
    values = result.to_dict() | dict(trainer)
    if log is not None:
        log.close_run(json_ready({name: values.get(name) for name in STATED} | dict(trainer)))
        values["log_digest"] = log.digest
        log.sync()  # the result must not outlive the rounds it was derived from
    text = json.dumps(json_ready(values), indent=2, allow_nan=False) + "\n"
    write_atomically(path, text.encode())
