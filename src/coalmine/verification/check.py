"""One check of a finished audit, and the evidence that checks read."""

from dataclasses import dataclass
from typing import Any

from coalmine.log.commitment import Precommitment
from coalmine.log.mapped_rounds import LogReader
from coalmine.measure.settings import Settings


@dataclass(frozen=True)
class Check:
    """One check: `held` is None if it could not be made; `detail` says what was compared, and the outcome.

    `possible` is False if no further input could make it, as the committed config shows.
    """

    name: str
    held: bool | None
    detail: str
    possible: bool = True


@dataclass(frozen=True)
class Evidence:
    """The content of the directory, read once."""

    settings: Settings
    statement: Precommitment
    log: LogReader
    stored: dict[str, Any]
    config: dict[str, Any] | None  # None unless it was committed to
    config_sha256: str | None
    seed: int | bytes
