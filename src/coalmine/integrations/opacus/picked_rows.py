"""Which rows of the data set are in a step, as the data loader's own sampler picks them.

A loader with workers picks batches well before the loop gets them. A loop may leave early, skip batches or accumulate
several in one step. So picking, delivery and use are three separate events, and `PickedRows` matches them. It never guesses:
if the delivered batches do not add up to the examples in a step, it raises an error.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sized
from types import new_class
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset

from coalmine.argument_checks import count_of, short_repr

Rows = npt.NDArray[np.int64]
MOST_NAMED = 8  # batch sizes that an error lists


class _Batch(NamedTuple):
    rows: Rows
    examples: int  # number of per-example gradients it produces


class _Pass:
    """One pass over the loader: the batches that its sampler picked and the loop has not received yet.

    It is `open` until it ends or its iterator is deleted. It is `used` once a step has taken one of its batches.
    """

    def __init__(self) -> None:
        self.picked: deque[_Batch] = deque()
        self.open = True
        self.used = False


class PickedRows:
    """The rows that `loader` delivered for each step of an optimizer.

    The loader and its batch sampler stay the same objects, but their class becomes a subclass; `release` undoes this.
    BatchMemoryManager splits a batch into smaller ones for its own loader. It signals to the optimizer which of them end a
    step, and `on_skip_signal` takes the same signals.
    """

    def __init__(self, loader: Any, signals_waiting: Callable[[], int], *, every_rank: bool = False) -> None:
        check_loader(loader, every_rank=every_rank)
        self.count = len(loader.dataset)
        self._dropped = 0
        self.loader, self._signals_waiting = loader, signals_waiting
        self._fills_empty = bool(getattr(loader.collate_fn, "rand_on_empty", False))
        self._delivered: list[tuple[_Pass, _Batch]] = []  # since the last step
        self._split: deque[_Batch] = deque()  # batches that BatchMemoryManager has split
        self._starting_pass: _Pass | None = None
        self._other_pass: _Pass | None = None  # a pass of another loader over the same sampler
        _extend(loader.batch_sampler, self._pick)
        _extend(loader, self._deliver)

    def release(self) -> None:
        """Give the loader and its batch sampler their own classes back."""
        for each in (self.loader, self.loader.batch_sampler):
            if _is_watched(each):
                each.__class__ = type(each).__mro__[1]

    def take_dropped(self) -> int:
        """Number of batches with rows that the loop left out in the middle of a pass, since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def fetch(self, count: int) -> Any:
        """The last `count` rows that were picked for the current step, fetched again as one batch of the loader."""
        batches = list(self._split)[:1] or [batch for _, batch in self._delivered[-1:]]
        rows = [int(row) for batch in batches for row in batch.rows[-count:]]
        if not rows:
            raise ValueError("data_loader gave no batch for this step")
        return self.loader.collate_fn([self.loader.dataset[row] for row in rows])

    def on_skip_signal(self, *, ends_step: bool) -> None:
        """Take the signal whether the batch that BatchMemoryManager just picked ends a step."""
        if self._other_pass is None or not self._other_pass.open:
            return  # a signal of the loop itself, about batches that this loader delivers
        ahead = self.loader.num_workers * (self.loader.prefetch_factor or 0)
        if self._signals_waiting() > ahead + 1:
            raise ValueError(
                "BatchMemoryManager gave a batch without a step for the one before it; call optimizer.step() for every "
                "batch, even an empty one"
            )
        if ends_step and self._other_pass.picked:
            self._split.append(self._other_pass.picked.popleft())

    def rows_in_step(self, examples: int) -> Rows:
        """The rows in a step with this many per-example gradients; a row picked twice is listed twice."""
        delivered, self._delivered = self._delivered, []
        if self._split:
            batch = self._split.popleft()
            concurrent = [other for source, other in delivered if source.open]  # besides BatchMemoryManager's
            if batch.examples != examples or concurrent:
                raise _mismatch_error([batch, *concurrent], examples)
            return batch.rows
        if self._other_pass is not None and self._other_pass.open and self._other_pass.picked:
            raise ValueError(
                "a loader other than data_loader gives the batches, so the audit cannot know which of them is in a step; "
                "loop over data_loader itself or over BatchMemoryManager's"
            )
        if not delivered:
            raise ValueError(
                "data_loader gave no batch for this step; it must be the loader that make_private returned and that the "
                "loop uses, and every step needs its own batch"
            )
        used = _batches_in_step(delivered, examples)
        self._count_dropped(delivered, used)
        return np.concatenate([batch.rows for batch in used])

    def _count_dropped(self, delivered: list[tuple[_Pass, _Batch]], used: list[_Batch]) -> None:
        """Count the batches between two steps of one pass. A loop may begin late, leave early, or take no step at all."""
        in_step = {id(batch) for batch in used}
        for source, batch in delivered:
            if id(batch) in in_step:
                source.used = True
            elif source.used and source.open and batch.rows.size:
                self._dropped += 1

    def _deliver(self, start: Callable[[], Iterator[Any]]) -> "_Deliveries":
        """Start a pass of the loader itself."""
        if self._other_pass is not None and not self._other_pass.open:
            self._check_left_early()
        self._starting_pass = _Pass()
        try:
            return _Deliveries(start(), self._starting_pass, self._note_delivery)
        finally:
            self._starting_pass = None

    def _note_delivery(self, source: _Pass) -> None:
        if not source.picked:
            raise ValueError("the data loader gave a batch that its batch sampler did not pick; omit data_loader")
        self._delivered.append((source, source.picked.popleft()))

    def _pick(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Start a pass of the batch sampler, for this loader or for another one."""
        source = self._starting_pass
        if source is None:
            self._check_left_early()
            source = self._other_pass = _Pass()
            self._split.clear()
        return self._note_picks(start(), source)

    def _note_picks(self, batches: Iterator[Any], source: _Pass) -> Iterator[Any]:
        try:
            for batch in batches:
                rows = self._checked_rows(batch)
                source.picked.append(_Batch(rows, max(rows.size, 1) if self._fills_empty else rows.size))
                yield batch
        finally:
            if source is self._other_pass:
                source.open = False

    def _check_left_early(self) -> None:
        """Reject a loop that left early while Opacus still holds signals about batches that workers had fetched."""
        if self._other_pass is not None and self._signals_waiting():
            raise ValueError(
                "the loop left BatchMemoryManager early, when workers had already fetched more batches, so Opacus would mix "
                "the batches of different steps; iterate to BatchMemoryManager's end, or use a loader without workers"
            )

    def _checked_rows(self, batch: Any) -> Rows:
        rows = np.asarray(batch.tolist() if hasattr(batch, "tolist") else list(batch))
        if not rows.size:
            return np.zeros(0, dtype=np.int64)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= self.count:
            raise ValueError(f"the batch sampler must pick rows in 0..{self.count - 1}, got {short_repr(batch)}")
        return rows.astype(np.int64)


class _Deliveries:
    """A loader's iterator that calls `note` for every batch."""

    def __init__(self, batches: Iterator[Any], source: _Pass, note: Callable[[_Pass], None]) -> None:
        self._batches, self._source, self._note = batches, source, note

    def __iter__(self) -> "_Deliveries":
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except BaseException:
            self._source.open = False
            raise
        self._note(self._source)
        return batch

    def __del__(self) -> None:
        self._source.open = False

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))


def check_loader(loader: Any, *, every_rank: bool = False) -> None:
    """Reject a loader whose rows cannot be matched to steps. With `every_rank`, each rank watches its own loader."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"data_loader must be the torch DataLoader that make_private returned, got {short_repr(loader)}"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError("data_loader must have a data set with rows, but an iterable one has none; omit data_loader")
    if loader.batch_sampler is None:
        raise ValueError(
            "data_loader must make batches itself, but its batch_size is None; give DataLoader(batch_size=)"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ValueError("data_loader must give batches in the order of its sampler; give DataLoader(in_order=True)")
    if (
        not every_rank
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ValueError(
            f"data_loader picks rows for one of {torch.distributed.get_world_size()} processes, and the rows of the others "
            "are not observed; train in one process, or omit data_loader"
        )
    if not hasattr(loader.batch_sampler, "__dict__"):
        raise ValueError(
            f"data_loader must have a torch Sampler as batch_sampler, got {short_repr(loader.batch_sampler)}"
        )
    if _is_watched(loader) or _is_watched(loader.batch_sampler):
        raise ValueError("this data loader is observed by another audit: unaudited(optimizer) takes that one out")


def _extend(iterable: Any, new_iter: Callable[[Callable[[], Iterator[Any]]], Any]) -> None:
    """Replace `__iter__` of a loader or sampler by `new_iter`, which takes a function that starts the original pass."""
    base = type(iterable)

    def start_pass(self: Any) -> Any:
        return new_iter(lambda: base.__iter__(self))

    body = {"__iter__": start_pass, "_picked_rows": True, "__module__": base.__module__, "__doc__": base.__doc__}
    iterable.__class__ = new_class(base.__name__, (base,), exec_body=lambda members: members.update(body))


def _is_watched(iterable: Any) -> bool:
    return "_picked_rows" in vars(type(iterable))


def _batches_in_step(delivered: list[tuple[_Pass, _Batch]], examples: int) -> list[_Batch]:
    """The batches whose gradients are in the step: all since the last step, or the only ones that can be.

    The loop did not train on batches of a pass that is over. In an open pass it may have skipped the first batches. But if
    it may equally have fetched the last ones in advance, the match is ambiguous, which is an error.
    """
    every = [batch for _, batch in delivered]
    if _total(every) == examples:
        return every
    still_open = [(source, batch) for source, batch in delivered if source.open]
    batches = [batch for _, batch in still_open]
    last = [batches[i:] for i in range(len(batches)) if _total(batches[i:]) == examples]
    first = any(_total(batches[:i]) == examples for i in range(1, len(batches)))
    passes = {id(source) for source, _ in still_open}
    if not last or (_total(batches) != examples and (first or len(passes) > 1)):
        raise _mismatch_error(every, examples)
    return last[0]


def _mismatch_error(batches: list[_Batch], examples: int) -> ValueError:
    sizes = ", ".join(str(batch.examples) for batch in batches[-MOST_NAMED:])
    before = "… " if len(batches) > MOST_NAMED else ""
    return ValueError(
        f"a step holds the gradients of {count_of(examples, 'example')}, but the data loader gave it batches of "
        f"{before}{sizes}; take a step for every batch before you fetch the next one, or omit data_loader"
    )


def _total(batches: list[_Batch]) -> int:
    return sum(batch.examples for batch in batches)
