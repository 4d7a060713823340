"""The rounds of a file for drawing: mapped into memory, not copied, and read as far as a picture needs them."""

import dataclasses
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from coalmine.storage.files import open_regular
from coalmine.storage.record import Settings
from coalmine.storage.rounds_file import MAGIC, Entry, Final, Round, RoundLog, scan_records


@dataclass(frozen=True)
class Rounds:
    """Rounds and final model, each array a window into the file.

    What `ladder`, `views` and `read_gauges` ask of a log is `rounds` and `final`, so this stands in for one (`as_log`).
    """

    kept: tuple[Round, ...]
    final: Final | None
    numbers: tuple[int, ...]  # skipped rounds included

    def rounds(self) -> Iterator[Round]:
        return iter(self.kept)

    @property
    def observed(self) -> list[Entry]:
        return [Entry.of(item) for item in self.kept]

    @property
    def as_log(self) -> RoundLog:
        return cast(RoundLog, self)

    def thinned(self, settings: Settings, *, most: int, least: int | None = None) -> tuple["Rounds", Settings]:
        """With fewer unobserved canaries, so that a pass over the rounds reads about `most` numbers.

        `least` stay, by default as many as there are observed ones: pictures, not results, are drawn from what is left.
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
        return Rounds(tuple(cut(item) for item in self.kept), final, self.numbers), fewer


def map_rounds(path: Path, *, checked: bool = True) -> Rounds:
    """The rounds in a log file, skipped ones left out, up to a torn last record; ValueError where it is no log.

    Without `checked` no digest is compared: numbers must not rest on such rounds.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = file.seek(0, 2)
        if size < len(MAGIC):
            raise ValueError(f"{path} is empty or cut short")
        window = _Window(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    if window.read(len(MAGIC)) != MAGIC:
        raise ValueError(f"{path} is not a log of rounds; was it written by another program or a newer coalmine?")
    found, final = [], None
    for kind, item, _, _ in scan_records(window, size, path, checked=checked):
        if kind == "final":
            final = item
        elif kind == "round":
            found.append(item)
    kept = tuple(item for item in found if not item.skipped)
    return Rounds(kept, final, tuple(item.number for item in found))


class _Window:
    """A file in memory, read in pieces that are windows into it."""

    def __init__(self, mapped: memoryview) -> None:
        self._mapped, self._place = mapped, 0

    def tell(self) -> int:
        return self._place

    def read(self, size: int) -> memoryview:
        piece = self._mapped[self._place : self._place + size]
        self._place += len(piece)
        return piece
