"""Which rows of the data set are in a step, as the data loader's own sampler picks them.

A loader with workers picks batches well before the loop gets them. A loop may leave early, skip batches or gather several in
one step. So picking, delivery and use are three events, and `PickedRows` matches them. It never guesses: if the batches that
the loop was given do not add up to the examples in a step, that step is an error.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sized
from types import new_class
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset

from coalmine.argument_checks import count_of, shown

Rows = npt.NDArray[np.int64]
MOST_NAMED = 8  # batch sizes in an error


class _Batch(NamedTuple):
    rows: Rows
    examples: int  # how many gradients it gives


class _Pass:
    """One pass over the loader: the batches that its sampler picked and the loop has not got yet.

    It is `open` until it ends or nobody holds it any more.
    """

    def __init__(self) -> None:
        self.picked: deque[_Batch] = deque()
        self.open = True


class PickedRows:
    """The rows that `loader` gave to each step of an optimizer.

    The loader and its batch sampler stay the same objects, with a subclass of their class; `release` undoes it.
    BatchMemoryManager splits a batch into smaller ones for a loader of its own. It tells the optimizer which of them end a
    step, so `note_signal` takes the same messages.
    """

    def __init__(self, loader: Any, signals_waiting: Callable[[], int], *, every_rank: bool = False) -> None:
        check_loader(loader, every_rank=every_rank)
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
        if self._foreign is None or not self._foreign.open:
            return  # the loop's own message, about batches that this loader delivers
        ahead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        if self._signals_waiting() > ahead + 1:
            raise ValueError(
                "BatchMemoryManager gave a batch without a step for the one before it; call optimizer.step() for every "
                "batch, also for an empty one"
            )
        if ends_step and self._foreign.picked:
            self._whole.append(self._foreign.picked.popleft())

    def of_step(self, examples: int) -> Rows:
        """The rows in the step that holds the gradients of so many examples; a row picked twice is there twice."""
        delivered, self._delivered = self._delivered, []
        if self._whole:
            batch = self._whole.popleft()
            rivals = [other for taken, other in delivered if taken.open]  # of a pass beside BatchMemoryManager's
            if batch.examples != examples or rivals:
                raise _out_of_step([batch, *rivals], examples)
            return batch.rows
        if self._foreign is not None and self._foreign.open and self._foreign.picked:
            raise ValueError(
                "another loader than data_loader gives the batches, so nobody knows which of them is in a step; loop over "
                "data_loader itself or over BatchMemoryManager's"
            )
        if not delivered:
            raise ValueError(
                "data_loader gave no batch for this step; it must be the loader that make_private returned and that the "
                "loop uses, and every step needs a batch of its own"
            )
        return np.concatenate([batch.rows for batch in _used(delivered, examples)])

    def _deliver(self, start: Callable[[], Iterator[Any]]) -> "_Deliveries":
        """A pass of the loader itself."""
        if self._foreign is not None and not self._foreign.open:
            self._check_left_early()
        self._opening = _Pass()
        try:
            return _Deliveries(start(), self._opening, self._delivered_one)
        finally:
            self._opening = None

    def _delivered_one(self, taken: _Pass) -> None:
        if not taken.picked:
            raise ValueError("the data loader gave a batch that its batch sampler did not pick; leave data_loader out")
        self._delivered.append((taken, taken.picked.popleft()))

    def _pick(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """A pass of the batch sampler, for this loader or for another one."""
        taken = self._opening
        if taken is None:
            self._check_left_early()
            taken = self._foreign = _Pass()
            self._whole.clear()
        return self._picked(start(), taken)

    def _picked(self, batches: Iterator[Any], taken: _Pass) -> Iterator[Any]:
        try:
            for batch in batches:
                rows = self._checked_rows(batch)
                taken.picked.append(_Batch(rows, max(rows.size, 1) if self._fills_empty else rows.size))
                yield batch
        finally:
            if taken is self._foreign:
                taken.open = False

    def _check_left_early(self) -> None:
        """A loop may leave early; but Opacus does not forget the messages about batches that workers had fetched."""
        if self._foreign is not None and self._signals_waiting():
            raise ValueError(
                "the loop left BatchMemoryManager early, when workers had fetched more batches, so Opacus would mix the "
                "batches of different steps; go through BatchMemoryManager to its end, or use a loader without workers"
            )

    def _checked_rows(self, batch: Any) -> Rows:
        rows = np.asarray(batch.tolist() if hasattr(batch, "tolist") else list(batch))
        if not rows.size:
            return np.zeros(0, dtype=np.int64)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= self.count:
            raise ValueError(f"the batch sampler must pick rows among 0..{self.count - 1}, got {shown(batch)}")
        return rows.astype(np.int64)


class _Deliveries:
    """A loader's iterator that tells of every batch that it gives."""

    def __init__(self, batches: Iterator[Any], taken: _Pass, tell: Callable[[_Pass], None]) -> None:
        self._batches, self._taken, self._tell = batches, taken, tell

    def __iter__(self) -> "_Deliveries":
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except BaseException:
            self._taken.open = False
            raise
        self._tell(self._taken)
        return batch

    def __del__(self) -> None:
        self._taken.open = False

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))


def check_loader(loader: Any, *, every_rank: bool = False) -> None:
    """Reject a loader whose rows cannot be followed into the steps; `every_rank` says that each rank follows its own."""
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
        not every_rank
        and torch.distributed.is_available()
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


def _used(delivered: list[tuple[_Pass, _Batch]], examples: int) -> list[_Batch]:
    """The batches whose gradients are in the step: all since the last step, or those that are certain.

    Batches of a pass that is over were looked at and not trained on. In the pass that goes on, the loop may have left out
    the first ones. But if it may as well have fetched the last ones in advance, nothing is certain.
    """
    every = [batch for _, batch in delivered]
    if _total(every) == examples:
        return every
    going_on = [(taken, batch) for taken, batch in delivered if taken.open]
    batches = [batch for _, batch in going_on]
    last = [batches[i:] for i in range(len(batches)) if _total(batches[i:]) == examples]
    first = any(_total(batches[:i]) == examples for i in range(1, len(batches)))
    passes = {id(taken) for taken, _ in going_on}
    if not last or (_total(batches) != examples and (first or len(passes) > 1)):
        raise _out_of_step(every, examples)
    return last[0]


def _out_of_step(batches: list[_Batch], examples: int) -> ValueError:
    sizes = ", ".join(str(batch.examples) for batch in batches[-MOST_NAMED:])
    before = "… " if len(batches) > MOST_NAMED else ""
    return ValueError(
        f"a step holds the gradients of {count_of(examples, 'example')}, but the data loader gave it batches of "
        f"{before}{sizes}; take a step for every batch before you fetch the next one, or leave data_loader out"
    )


def _total(batches: list[_Batch]) -> int:
    return sum(batch.examples for batch in batches)
