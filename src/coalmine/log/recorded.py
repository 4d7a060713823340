"""What evidence reads of a log: one that is being written, and a finished file, have it alike."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

from coalmine.log.rounds_file import Entry
from coalmine.measure.round import Final, Round


class RecordedRounds(Protocol):
    """Rounds in order, then perhaps the final model."""

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the rounds, skipped ones included."""

    @property
    def observed(self) -> Sequence[Entry]:
        """The rounds that were not skipped, without their arrays."""

    @property
    def final(self) -> Final | None: ...

    @property
    def digest(self) -> str: ...

    def rounds(self) -> Iterator[Round]:
        """Every round that was not skipped, in order."""


class WithoutOthers:
    """Rounds as seen by an attacker who does not know the other updates."""

    def __init__(self, log: RecordedRounds) -> None:
        self.numbers, self.final, self.digest = log.numbers, log.final, log.digest
        self.observed = [entry._replace(has_others=False) for entry in log.observed]
        self._whole = log

    def rounds(self) -> Iterator[Round]:
        """Every round that was not skipped, without what was measured with the other updates."""
        known = ("residual_", "layer_", "law_", "chunk_", "block_sk")
        unseen: dict[str, Any] = dict.fromkeys(part.name for part in fields(Round) if part.name.startswith(known))
        return (replace(item, **unseen) for item in self._whole.rounds())
