"""Which rows of the data set are in a step, as the data loader's own sampler picks them.

A loader with workers picks batches well before the loop gets them. A loop may leave early, skip batches or gather several in
one step. So picking, delivery and use are three events, and `PickedRows` matches them. It never guesses: if the batches that
the loop was given do not add up to the examples in a step, that step is an error.
"""

from collections import deque
from collections.abc import Callable, Iterator
from types import new_class
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset

from coalmine.checks import count_of, shown

Rows = npt.NDArray[np.int64]


class _Batch(NamedTuple):
    rows: Rows
    examples: int  # how many gradients it gives


class _Pass:
    """One pass over the loader: the batches that its sampler picked and the loop has not got yet."""

    def __init__(self) -> None:
        self.picked: deque[_Batch] = deque()


class PickedRows:
    """The rows that `loader` gave to each step of an optimizer.

    The loader and its batch sampler stay the same objects, with a subclass of their class; `release` undoes it.
    BatchMemoryManager splits a batch into smaller ones for a loader of its own. It tells the optimizer which of them end a
    step, so `note_signal` takes the same messages.
    """

    def __init__(self, loader: Any, signals_waiting: Callable[[], int]) -> None:
        check_loader(loader)
        self.count = len(loader.dataset)
        self._loader, self._signals_waiting = loader, signals_waiting
        self._fills_empty = bool(getattr(loader.collate_fn, "rand_on_empty", False))
        self._delivered: list[tuple[_Pass, _Batch]] = []  # since the last step
        self._whole: deque[_Batch] = deque()  # batches that BatchMemoryManager has split
        self._opening: _Pass | None = None
        self._foreign: _Pass | None = None  # a pass of another loader over the same sampler
        _extend(loader.batch_sampler, self._pick)
        _extend(loader, self._deliver)

    def release(self) -> None:
        """Give the loader and its batch sampler their own classes back."""
        for thing in (self._loader, self._loader.batch_sampler):
            if _is_watched(thing):
                thing.__class__ = type(thing).__mro__[1]

    def note_signal(self, *, ends_step: bool) -> None:
        """Take the message that the batch just picked by BatchMemoryManager ends a step, or does not."""
        if self._foreign is None:
            return  # the loop's own message, about batches that this loader delivers
        ahead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        if self._signals_waiting() > ahead + 1:
            raise ValueError(
                "BatchMemoryManager gave a batch without a step for the one before it; call optimizer.step() for every "
                "batch, also for an empty one"
            )
        if ends_step:
            self._whole.append(self._foreign.picked.popleft())

    def of_step(self, examples: int) -> Rows:
        """The rows in the step that holds the gradients of so many examples; a row picked twice is there twice."""
        if self._whole:
            batch = self._whole.popleft()
            if batch.examples != examples:
                raise self._out_of_step([batch], examples)
            return batch.rows
        delivered, self._delivered = self._delivered, []
        if not delivered:
            raise self._nothing_delivered()
        used = self._used(delivered, examples)
        return np.concatenate([batch.rows for batch in used])

    def _used(self, delivered: list[tuple[_Pass, _Batch]], examples: int) -> list[_Batch]:
        """The batches whose gradients are in the step: all since the last step, or the last ones where that is certain."""
        every = [batch for _, batch in delivered]
        if _total(every) == examples:
            return every
        recent = [batch for taken, batch in delivered if taken is delivered[-1][0]]  # the loop started anew
        if _total(recent) == examples:
            return recent
        last = [recent[i:] for i in range(len(recent)) if _total(recent[i:]) == examples]
        first = any(_total(recent[:i]) == examples for i in range(1, len(recent)))
        if not last or first:  # the loop may have skipped batches, or fetched some in advance
            raise self._out_of_step(recent, examples)
        return last[0]

    def _deliver(self, start: Callable[[], Iterator[Any]]) -> "_Deliveries":
        """A pass of the loader itself."""
        self._start_anew()
        self._foreign, self._opening = None, _Pass()
        try:
            return _Deliveries(start(), self._opening, self._delivered_one)
        finally:
            self._opening = None

    def _delivered_one(self, taken: _Pass) -> None:
        if not taken.picked:
            raise ValueError("the data loader gave a batch that its batch sampler did not pick; leave data_loader out")
        self._delivered.append((taken, taken.picked.popleft()))

    def _pick(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """A pass of the batch sampler."""
        taken = self._opening
        if taken is None:
            self._start_anew()
            taken = self._foreign = _Pass()
        return self._picked(start(), taken)

    def _picked(self, batches: Iterator[Any], taken: _Pass) -> Iterator[Any]:
        for batch in batches:
            rows = self._checked_rows(batch)
            taken.picked.append(_Batch(rows, max(rows.size, 1) if self._fills_empty else rows.size))
            yield batch

    def _start_anew(self) -> None:
        """Forget the batches of a pass that the loop left early. Opacus does not forget its own messages about them."""
        if self._foreign is not None and self._signals_waiting():
            raise ValueError(
                "the loop left BatchMemoryManager early, when workers had fetched more batches, so Opacus would mix the "
                "batches of different steps; go through BatchMemoryManager to its end, or use a loader without workers"
            )
        self._whole.clear()

    def _checked_rows(self, batch: Any) -> Rows:
        rows = np.asarray(batch.tolist() if hasattr(batch, "tolist") else list(batch))
        if not rows.size:
            return np.zeros(0, dtype=np.int64)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= self.count:
            raise ValueError(f"the batch sampler must pick rows among 0..{self.count - 1}, got {shown(batch)}")
        return rows.astype(np.int64)

    def _nothing_delivered(self) -> ValueError:
        if self._foreign is not None and self._foreign.picked:
            return ValueError(
                "another loader than data_loader gives the batches, so nobody knows which of them is in a step; loop over "
                "data_loader itself or over BatchMemoryManager's"
            )
        return ValueError(
            "data_loader gave no batch for this step; it must be the loader that make_private returned and that the loop "
            "uses, and every step needs a batch of its own"
        )

    def _out_of_step(self, batches: list[_Batch], examples: int) -> ValueError:
        sizes = ", ".join(str(batch.examples) for batch in batches)
        return ValueError(
            f"a step holds the gradients of {count_of(examples, 'example')}, but the data loader gave it batches of "
            f"{sizes}; take a step for every batch before you fetch the next one, or leave data_loader out"
        )


class _Deliveries:
    """A loader's iterator that tells of every batch that it gives."""

    def __init__(self, batches: Iterator[Any], taken: _Pass, tell: Callable[[_Pass], None]) -> None:
        self._batches, self._taken, self._tell = batches, taken, tell

    def __iter__(self) -> "_Deliveries":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._tell(self._taken)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def check_loader(loader: Any) -> None:
    """Reject a loader whose rows cannot be followed into the steps."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"data_loader must be the torch DataLoader that make_private returned, got {shown(loader)}")
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "data_loader must have a data set with rows, but an iterable one has none; leave data_loader out"
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "data_loader must make batches itself, but its batch_size is None; give DataLoader(batch_size=)"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ValueError("data_loader must give batches in the order of its sampler; give DataLoader(in_order=True)")
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ValueError(
            f"data_loader picks rows for one of {torch.distributed.get_world_size()} processes, and nobody observes the "
            "others' rows; train in one process, or leave data_loader out"
        )
    if not hasattr(loader.batch_sampler, "__dict__"):
        raise ValueError(f"data_loader must have a torch Sampler as batch_sampler, got {shown(loader.batch_sampler)}")
    if _is_watched(loader) or _is_watched(loader.batch_sampler):
        raise ValueError("this data loader is observed by another audit: unaudited(optimizer) takes that one out")


def _extend(thing: Any, passing: Callable[[Callable[[], Iterator[Any]]], Any]) -> None:
    """Put `passing` in the place of `__iter__`; it takes a function that starts the thing's own pass."""
    base = type(thing)

    def start_pass(self: Any) -> Any:
        return passing(lambda: base.__iter__(self))

    body = {"__iter__": start_pass, "_picked_rows": True, "__module__": base.__module__, "__doc__": base.__doc__}
    thing.__class__ = new_class(base.__name__, (base,), exec_body=lambda members: members.update(body))


def _is_watched(thing: Any) -> bool:
    return "_picked_rows" in vars(type(thing))


def _total(batches: list[_Batch]) -> int:
    return sum(batch.examples for batch in batches)
