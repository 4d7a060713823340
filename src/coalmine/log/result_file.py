"""result.json: the result of an audit, with the trainer's own entries and the digest of the log it was derived from."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from coalmine.log.files import json_ready, write_atomically
from coalmine.log.rounds_file import RoundLog

STATED = (
    "analytical_epsilon",
    "claimed_epsilon",
    "clients",
    "alarm",
)  # entries that do not follow from the rounds alone
PIPELINE_ITEMS = "audited_by_pipeline"  # in the log: the items that the pipeline says were checked, or were not


class HasDict(Protocol):
    """An object that can be written as JSON."""

    def to_dict(self) -> dict[str, Any]: ...


class Writable(HasDict, Protocol):
    """A result whose trainer has a section of its own."""

    @property
    def trainer(self) -> HasDict: ...


def write_result_file(path: Path, result: Writable, log: RoundLog | None) -> str | None:
    """Write a result, whole or not at all, and return the log's digest.

    The trainer's entries go into the log first, and the digest into the result.
    """
    values = result.to_dict()
    if log is not None:
        log.close_run(json_ready(logged_entries(values, [*STATED, *result.trainer.to_dict()])))
        values["log_digest"] = log.digest
        log.sync()  # the result must not outlive the rounds it was derived from
    text = json.dumps(json_ready(values), indent=2, allow_nan=False) + "\n"
    write_atomically(path, text.encode())
    return None if log is None else log.digest


def logged_entries(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The entries of a result that go into the log: those with these names, and the pipeline's own items."""
    items = values.get("audited")
    stated = {
        name: item
        for name, item in (items.items() if isinstance(items, dict) else ())
        if isinstance(item, dict) and item.get("source") == "pipeline"
    }
    return {name: values[name] for name in names if name in values} | {PIPELINE_ITEMS: stated}
