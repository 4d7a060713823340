"""Which steps of a run are replayed, and how many rows of each: the first, some that the secret key draws, the last."""

import hashlib
from dataclasses import dataclass

import numpy as np

STEPS, ROWS = 4, 8  # most steps of a run, and rows of each
FEWEST_ROWS = 4
SHARE = 0.01  # of the planned steps' passes that replays may take, beyond those of the fewest rows
OF_A_STEP = 5  # passes of a step besides one for each row: the step itself, a second time, and extreme rows
LATER = 1024  # where the number of steps is unknown, a step is drawn from here to twice as far, and so on


@dataclass(frozen=True)
class ReplayPlan:
    """The numbers of the replayed steps, in order, and how many rows of each are tried, extreme ones included."""

    steps: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, planned: int | None, key: bytes, *, share: float = SHARE, later: int = LATER) -> "ReplayPlan":
        """The plan of a run with this many steps; None if their number is not known.

        Replays take at most this share of the steps' passes, but at least 4 rows of the first step are tried. If the number
        of steps is not known, a step is drawn from `later` to twice as far, and so on.
        """
        if planned is None:
            later_steps = [(later << power, later << power) for power in range(STEPS - 1)]
            return cls((1, *(start + _drawn(key, start, size) for start, size in later_steps)), FEWEST_ROWS)
        budget = int(share * planned)
        steps = max(min(budget // (ROWS + OF_A_STEP), STEPS, planned), 1)
        rows = min(max(budget // steps - OF_A_STEP, FEWEST_ROWS), ROWS)
        if steps == 1:
            return cls((1,), rows)
        between = [
            2 + part * (planned - 2) // (steps - 2) + _drawn(key, part, max((planned - 2) // (steps - 2), 1))
            for part in range(steps - 2)
        ]
        return cls((1, *between, planned), rows)

    def is_due(self, step: int, done: int) -> bool:
        """Whether this step is replayed if `done` was the last one that was: a planned step may be too small."""
        return any(done < planned <= step for planned in self.steps)


def rows_of(step: int, count: int, rows: int, key: bytes) -> list[int]:
    """The rows of a step that are tried, as the key draws them."""
    return sorted(_generator(key, b"rows", step).permutation(count)[:rows].tolist())


def _drawn(key: bytes, part: int, size: int) -> int:
    return int(_generator(key, b"steps", part).integers(size))


def _generator(key: bytes, what: bytes, number: int) -> np.random.Generator:
    digest = hashlib.blake2b(what + number.to_bytes(8, "little"), key=bytes(key)[:64], digest_size=16, person=b"replay")
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))
