"""Which of two checkpoints a run resumes from: the newest one, or the one before it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from coalmine.log.files import remove_drafts


class HasRound(Protocol):
    """What was saved after a round."""

    @property
    def round_number(self) -> int: ...


Saved = TypeVar("Saved", bound=HasRound)


def load_newest(
    newest: Path,
    previous: Path,
    read: Callable[[Path], Saved],
    logger: logging.Logger,
    *,
    recorded_rounds: int | None = None,
) -> Saved | None:
    """The newest checkpoint that `read` accepts and that is no further than the recorded rounds, or None if there is none.

    The previous one takes the place of a newer one that is damaged or ahead of the rounds. If none is usable and one is
    damaged, its ValueError is raised.
    """
    remove_drafts(newest)
    failure: ValueError | None = None
    ahead: Path | None = None
    for path in (newest, previous):
        if not path.exists():
            continue
        try:
            found = read(path)
        except ValueError as error:
            failure = failure or error
            continue
        if recorded_rounds is not None and found.round_number > recorded_rounds:
            ahead = path
            continue
        if path == previous:
            reason = failure or (f"{ahead} is ahead of the recorded rounds" if ahead else f"{newest} is missing")
            logger.warning("%s; training continues from the previous checkpoint, round %d", reason, found.round_number)
            path.replace(newest)
        return found
    if failure is not None:
        raise failure
    if ahead is not None:
        logger.warning(
            "%s: the recorded rounds end before every checkpoint, so training starts again from round 1", newest.parent
        )
    return None
