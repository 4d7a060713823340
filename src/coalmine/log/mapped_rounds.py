"""The rounds of a finished log file, mapped into memory: decoded and checked once, however often they are looked at."""

import dataclasses
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coalmine.log.files import open_regular
from coalmine.log.rounds_file import MAGIC, Entry, check_magic, scan_records
from coalmine.measure.round import Final, Round
from coalmine.measure.settings import Settings


@dataclass(frozen=True)
class LogReader:
    """Rounds and final model, each array a view of the file; a result is derived from it as from a log."""

    kept: tuple[Round, ...]
    final: Final | None
    numbers: tuple[int, ...]  # skipped rounds included
    outcome: dict[str, Any] | None  # the trainer's own entries of the result
    digest: str  # of the last record
    left_over: int = 0  # bytes after the last whole record
    opening: str = ""  # digest of the first record

    def rounds(self) -> Iterator[Round]:
        return iter(self.kept)

    @cached_property
    def observed(self) -> list[Entry]:
        return [Entry.of(item) for item in self.kept]

    def thinned(self, settings: Settings, *, most: int, least: int | None = None) -> tuple["LogReader", Settings]:
        """With fewer unobserved canaries, so that a pass over the rounds reads about `most` numbers.

        At least `least` stay, by default as many as there are observed ones. Use the rest for plots, not for results.
        """
        least = settings.canaries if least is None else least
        keep = max(least, most // max(len(self.kept), 1) - settings.canaries)
        if keep >= settings.unobserved:
            return self, settings
        end = settings.canaries + keep

        def cut(item: Any) -> Any:
            arrays = {name: getattr(item, name) for name in ("cosines", "residual_cosines", "update_cosines")
                      if getattr(item, name, None) is not None}  # fmt: skip
            changes: dict[str, Any] = {name: array[:end] for name, array in arrays.items()}
            if isinstance(item, Round):
                changes["scores"] = {name: own[:end] for name, own in item.scores.items()}
            return dataclasses.replace(item, **changes)

        fewer = dataclasses.replace(settings, unobserved=keep)
        final = None if self.final is None else cut(self.final)
        return dataclasses.replace(self, kept=tuple(cut(item) for item in self.kept), final=final), fewer


def map_rounds(path: Path, *, checked: bool = True) -> LogReader:
    """The rounds in a log file, skipped ones left out, up to a torn last record; ValueError if it is not a log.

    Without `checked` digests are not compared: no result may be computed from such rounds.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = file.seek(0, 2)
        if size < len(MAGIC):
            raise ValueError(f"{path} is empty or truncated")
        window = _Window(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    start = window.read(len(MAGIC))
    if start != MAGIC:
        check_magic(bytes(start), bytes(window.read(size)), path)
        window.rewind_to(len(MAGIC))
    items, final, outcome, digest, end, opening = [], None, None, b"", len(MAGIC), b""
    for kind, item, end, digest in scan_records(window, size, path, checked=checked):  # noqa: B007 the last one is kept
        opening = opening or digest
        if kind == "final":
            final = item
        elif kind == "round":
            items.append(item)
        else:
            outcome = item.values
    kept = tuple(item for item in items if not item.skipped)
    return LogReader(
        kept, final, tuple(item.number for item in items), outcome, digest.hex(), size - end, opening.hex()
    )


class _Window:
    """A file in memory, read in pieces that are views of it."""

    def __init__(self, mapped: memoryview) -> None:
        self._mapped, self._place = mapped, 0

    def tell(self) -> int:
        return self._place

    def rewind_to(self, place: int) -> None:
        self._place = place

    def read(self, size: int) -> memoryview:
        piece = self._mapped[self._place : self._place + size]
        self._place += len(piece)
        return piece
