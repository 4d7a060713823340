"""Which canaries are in a step: those whose rows the loader's sampler picks, or a random draw."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from opacus.optimizers import DPOptimizer

from coalmine.argument_checks import Floats
from coalmine.audit import Audit
from coalmine.integrations.opacus.gradients import OneProcess
from coalmine.integrations.opacus.picked_rows import PickedRows
from coalmine.integrations.opacus.ranks import on_every_rank, own_slot
from coalmine.integrations.row_pairing import RowPairing, present
from coalmine.measure.schedule import Indices

DRAWN_AHEAD = 64  # steps whose canaries are drawn at once, if they are not those of the loader's rows


class SeedSelection:
    """Each canary is in a step with a fixed probability, drawn from the audit's seed or from `rng`."""

    participants: int | None = None
    repeats: Sequence[Indices] = ()

    def __init__(self, audit: Audit, probability: float, rng: np.random.Generator | None) -> None:
        self._audit, self._probability, self._rng = audit, probability, rng
        self._drawn: dict[int, Indices] = {}  # for the next steps: drawn at once, they take a tenth of the time

    def canaries(self, _examples: int) -> Indices:
        if self._rng is None:
            number = self._audit.last_round + 1
            if number not in self._drawn:
                numbers = range(number, number + DRAWN_AHEAD)
                self._drawn = {n: self._audit.sampled_canaries(n, self._probability) for n in numbers}
            return self._drawn[number]
        is_present = self._rng.random(self._audit.settings.canaries) < self._probability
        return np.flatnonzero(is_present).astype(np.int32)


class RowSelection:
    """Each canary is in a step whenever its row of the data set is.

    Of several ranks, each picks its own rows of the same data set, and a canary is in the step if any rank picks its row.
    `repeats` lists the canaries whose rows are in the step at least twice, three times and so on: they join as often.
    `participants` is the number of rows in the last step, as the accountant counts them: canaries do not count.
    """

    participants: int | None = None
    repeats: Sequence[Indices] = ()

    def __init__(self, audit: Audit, gradients: OneProcess, optimizer: DPOptimizer, loader: Any) -> None:
        self._audit, self._ranks = audit, gradients.ranks
        self.picked = on_every_rank(
            self._ranks,
            lambda: PickedRows(loader, lambda: len(optimizer._step_skip_queue), every_rank=self._ranks.several),
        )
        counts = self._ranks.sum(own_slot(self._ranks, self.picked.count))
        if (counts != self.picked.count).any():
            raise ValueError(
                "data_loader must have the whole data set on every rank, but the ranks' data sets have "
                f"{', '.join(f'{count:.0f}' for count in counts)} rows"
            )
        self._pairing = RowPairing(audit, self.picked.count)
        self.most_times, self.steps_with_repeats, self.last_has_repeats = 1, 0, False

    def canaries(self, examples: int) -> Indices:
        count, size = self._audit.settings.canaries, self._ranks.size
        if not self._ranks.several:
            rows = self.picked.rows_in_step(examples)
            self.participants = rows.size
            return self._present(self._pairing.times(rows), _most_picks(rows))

        def count_picks() -> Floats:
            """How often each canary's row was picked, the number of rows, and the picks of the most frequent row."""
            rows = self.picked.rows_in_step(examples)
            slots = (own_slot(self._ranks, rows.size), own_slot(self._ranks, _most_picks(rows)))
            return np.concatenate([self._pairing.times(rows), *slots])

        total = self._ranks.sum_of(count + 2 * size, count_picks, number=self._audit.last_round + 1, arguments={})
        times, sizes, most = total[:count].astype(np.int64), total[count:-size], total[-size:]
        self.participants = int(sizes.sum())
        return self._present(times, int(most.max()))

    def _present(self, times: npt.NDArray[np.int64], most: int) -> Indices:
        """The canaries in a step, from how often each row was picked; and `repeats`."""
        most_picks = max(most, int(times.max(initial=1)))
        self.most_times = max(self.most_times, most_picks)
        self.last_has_repeats = most_picks > 1
        self.steps_with_repeats += self.last_has_repeats
        once, self.repeats = present(times)
        return once


def _most_picks(rows: npt.NDArray[np.int64]) -> int:
    """How often the most frequent row was picked, at least once."""
    return int(np.unique(rows, return_counts=True)[1].max()) if len(set(rows.tolist())) < rows.size else 1


Selection = SeedSelection | RowSelection
