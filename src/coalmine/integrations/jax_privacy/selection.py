"""Which canaries are in a step of jax_privacy: those whose examples the batch selection picks, or a random draw."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jax_privacy.batch_selection import BatchSelectionStrategy

from coalmine.argument_checks import short_repr, whole_number
from coalmine.audit import Audit
from coalmine.integrations.row_pairing import USUAL_CANARIES, RowPairing, checked_probability, present
from coalmine.measure.schedule import Indices


class SeedSelection:
    """Each canary is in a step with a fixed probability, drawn from the audit's seed."""

    observed = False
    participants: int | None = None
    repeats: Sequence[Indices] = ()
    rows: int | None = None

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def attach(self, audit: Audit) -> None:
        self._audit = audit

    def canaries(self, step: int, indices: Any) -> Indices:
        if indices is not None:
            raise ValueError("next_step takes the batch's indices only if audited() was given num_examples")
        return self._audit.sampled_canaries(step, self.probability)


class ExampleSelection:
    """Each canary is paired with one example of the data set: it is in a step whenever that example is in the batch.

    `repeats` lists the canaries whose examples are in the batch at least twice, three times and so on: they join as often.
    `participants` is the number of examples in the batch: canaries do not count.
    """

    observed = True
    participants: int | None = None
    repeats: Sequence[Indices] = ()

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.most_times = 1

    def attach(self, audit: Audit) -> None:
        count = audit.settings.canaries
        if count > self.rows:
            raise ValueError(
                f"canaries must be at most the {self.rows} examples of the data set, one for each, got {count}"
            )
        self._pairing = RowPairing(audit, self.rows)

    def canaries(self, step: int, indices: Any) -> Indices:
        if indices is None:
            raise TypeError(
                "next_step needs the indices of the batch: take batches from privatizer.watched(strategy), or pass them"
            )
        picked = np.asarray(indices).reshape(-1)
        if picked.size and picked.dtype.kind not in "iu":
            raise ValueError(f"indices must be whole numbers, got {short_repr(indices)}")
        rows = picked[picked >= 0].astype(np.int64)  # negative ones pad a batch
        if rows.size and rows.max() >= self.rows:
            raise ValueError(f"indices must lie in 0..{self.rows - 1}, got {rows.max()}")
        self.participants = rows.size
        self.most_times = max(self.most_times, int(np.bincount(rows, minlength=1).max()))
        once, self.repeats = present(self._pairing.times(rows))
        return once


Selection = SeedSelection | ExampleSelection


def new_selection(num_examples: int | None, sampling_probability: float | None, settings: Any) -> Selection:
    """The selection for the size of the data set, or for a probability; it sets a default number of canaries."""
    if (num_examples is None) == (sampling_probability is None):
        raise TypeError("audited() needs either num_examples, the size of the data set, or a sampling_probability")
    if num_examples is not None:
        rows = whole_number("num_examples", num_examples, minimum=1)
        if settings.get("audit") is None and settings.get("canaries") is None:
            settings["canaries"] = min(USUAL_CANARIES, rows)
        return ExampleSelection(rows)
    assert sampling_probability is not None
    return SeedSelection(checked_probability(sampling_probability))


class BatchWatcher(Protocol):
    """What hears of the batches of a watched strategy."""

    def expect_batches(self, num_examples: int) -> None: ...

    def add_batch(self, indices: Any) -> None: ...


class Watched(BatchSelectionStrategy):  # type: ignore[misc]
    """A batch selection strategy that also passes each batch to the audit."""

    def __init__(self, strategy: Any, steps: BatchWatcher) -> None:
        if not isinstance(strategy, BatchSelectionStrategy):
            raise TypeError(
                "watched() takes a strategy of jax_privacy.batch_selection that selects examples, got "
                f"{short_repr(strategy)}"
            )
        self._strategy, self._steps = strategy, steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._strategy, name)

    def __repr__(self) -> str:
        return f"watched({self._strategy!r})"

    def batch_iterator(self, num_examples: int, rng: Any = None) -> Iterator[Any]:
        """The batches of the strategy, unchanged."""
        self._steps.expect_batches(num_examples)
        for indices in self._strategy.batch_iterator(num_examples, rng):
            self._steps.add_batch(indices)
            yield indices
