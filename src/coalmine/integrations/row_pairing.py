"""Which canaries are in a step: those whose rows of the data set are in its batch, or a random draw."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import one_number
from coalmine.audit import Audit
from coalmine.measure.schedule import Indices

USUAL_CANARIES = 1_000  # default number, if the data set has as many rows


class RowPairing:
    """Each canary is paired with one row of the data set: it is in a step whenever that row is."""

    def __init__(self, audit: Audit, rows: int) -> None:
        self.rows, self._count = rows, audit.settings.canaries
        self._canary_of_row = np.full(rows, -1, dtype=np.int32)
        self._canary_of_row[audit.schedule.rows(rows)] = np.arange(self._count)

    def times(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How often each canary is in a step with these rows; a row that is picked twice is listed twice."""
        canaries = self._canary_of_row[rows]
        return np.bincount(canaries[canaries >= 0], minlength=self._count)


def present(times: npt.NDArray[np.int64]) -> tuple[Indices, Sequence[Indices]]:
    """The canaries in a step, and those in it at least twice, three times and so on: they join as often."""
    once, *more = (
        np.flatnonzero(times >= number).astype(np.int32) for number in range(1, int(times.max(initial=1)) + 1)
    )
    return once, more


def checked_probability(value: float) -> float:
    """A sampling probability in (0, 1]."""
    probability = one_number("sampling_probability", value)
    if not 0 < probability <= 1:
        raise ValueError(f"sampling_probability must lie in (0, 1], got {probability}")
    return probability
