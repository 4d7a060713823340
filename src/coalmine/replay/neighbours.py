"""Batches and their neighbours: the same batch with one row left out, blanked, or replaced.

A batch is an array, or a tuple, list or dictionary of arrays whose first axis counts the rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from coalmine.argument_checks import WrongTypeError, short_repr
from coalmine.canaries.array_types import is_jax, is_tensor

Adjacency = Literal["zero-out", "add-remove", "replace-one"]
MOVES = {"zero-out": 1, "add-remove": 1, "replace-one": 2}  # clip norms by which one row may move the sum
LOUD = 100.0  # factor of an extreme row
FAINT = 1e-9  # factor of a row where zeros cannot be computed with


def row_count(batch: Any) -> int:
    """Number of rows: the length of the first axis that all arrays share."""
    counts = {int(leaf.shape[0]) for leaf in leaves(batch) if _has_rows(leaf)}
    if len(counts) != 1:
        found = f"axes of {sorted(counts)}" if counts else f"no array in {short_repr(batch)}"
        raise ValueError(f"batch must hold arrays whose first axis counts the rows, equally many in each, got {found}")
    return counts.pop()


def leaves(batch: Any) -> list[Any]:
    """The arrays of a batch, and whatever else is in it, in order."""
    found: list[Any] = []
    mapped(batch, lambda leaf: found.append(leaf))
    return found


def mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with each leaf changed."""
    if isinstance(batch, Mapping):
        changed = {name: mapped(value, change) for name, value in batch.items()}
        return changed if type(batch) is dict else _rebuilt(batch, changed)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(value, change) for value in batch)
    return change(batch)


def without_row(batch: Any, row: int) -> Any:
    """The batch with one row fewer."""
    return mapped(batch, lambda leaf: _concatenated(leaf[:row], leaf[row + 1 :]) if _has_rows(leaf) else leaf)


def reordered(batch: Any, order: Sequence[int]) -> Any:
    """The batch with its rows in another order."""
    return mapped(batch, lambda leaf: _taken(leaf, order) if _has_rows(leaf) else leaf)


def with_row(batch: Any, row: int, make: Callable[[Any], Any]) -> Any:
    """The batch with the content of one row replaced: `make` turns a leaf's row into another one."""
    return mapped(batch, lambda leaf: _set_row(leaf, row, make(leaf[row])) if _has_rows(leaf) else leaf)


def with_row_of(batch: Any, row: int, other: int) -> Any:
    """The batch in which one row has the content of another."""
    return mapped(batch, lambda leaf: _set_row(leaf, row, leaf[other]) if _has_rows(leaf) else leaf)


def blank(part: Any) -> Any:
    """Zeros: no content, or padding."""
    return part * 0 if not _is_floating(part) else _zeros(part)


def faint(part: Any) -> Any:
    """Almost zeros, with a direction; whole numbers become 0."""
    return part * FAINT if _is_floating(part) else part * 0


def loud(part: Any) -> Any:
    """A row 100 times as large; whole numbers, such as labels and tokens, stay."""
    return part * LOUD if _is_floating(part) else part


def quiet(part: Any) -> Any:
    """A row of zeros; whole numbers stay."""
    return _zeros(part) if _is_floating(part) else part


def longest_row(batch: Any) -> int | None:
    """The row with the most tokens that are no padding; None if the batch holds no sequences of whole numbers."""
    for leaf in leaves(batch):
        if _has_rows(leaf) and not _is_floating(leaf) and len(leaf.shape) >= 2:
            counts = (_as_numpy(leaf) != 0).reshape(leaf.shape[0], -1).sum(axis=1)
            return int(counts.argmax())
    return None


def rarest_label(batch: Any) -> int | None:
    """A row whose label is the rarest of the batch; None without a vector of whole numbers."""
    for leaf in leaves(batch):
        if _has_rows(leaf) and not _is_floating(leaf) and len(leaf.shape) == 1:
            _, first, counts = np.unique(_as_numpy(leaf), return_index=True, return_counts=True)
            return int(first[counts.argmin()])
    return None


def has_tokens(batch: Any) -> bool:
    """Whether some rows are sequences of whole numbers."""
    return longest_row(batch) is not None


def has_floats(batch: Any) -> bool:
    """Whether some rows hold floating-point numbers."""
    return any(_has_rows(leaf) and _is_floating(leaf) for leaf in leaves(batch))


def ones_like_rows(batch: Any) -> Any:
    """A weight of 1 for each row, in the library and on the device of the batch's first array."""
    first, count = next(leaf for leaf in leaves(batch) if _has_rows(leaf)), row_count(batch)
    if is_tensor(first):
        import torch

        return torch.ones(count, device=first.device)
    if is_jax(first):
        import jax.numpy as jnp

        return jnp.ones(count)
    return np.ones(count)


def weight_without(weights: Any, row: int) -> Any:
    """Weights in which one row counts 0."""
    return _set_row(weights, row, 0.0)


def copied(batch: Any) -> Any:
    """A copy, so that a step that changes its batch in place does not change the next run's."""
    return mapped(
        batch, lambda leaf: leaf.clone() if is_tensor(leaf) else np.copy(leaf) if isinstance(leaf, np.ndarray) else leaf
    )


def _has_rows(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and len(leaf.shape) >= 1


def _is_floating(part: Any) -> bool:
    if is_tensor(part):
        return bool(part.is_floating_point() or part.is_complex())
    return np.dtype(part.dtype).kind in "fcV"


def _zeros(part: Any) -> Any:
    """Zeros of the same kind, also where the row holds NaN or infinity."""
    if is_tensor(part):
        return part.new_zeros(part.shape)
    return part * 0 if is_jax(part) else np.zeros_like(part)


def _as_numpy(leaf: Any) -> "np.ndarray[Any, np.dtype[Any]]":
    return np.asarray(leaf.detach().cpu() if is_tensor(leaf) else leaf)


def _set_row(leaf: Any, row: int, value: Any) -> Any:
    if is_jax(leaf):
        return leaf.at[row].set(value)
    changed = leaf.clone() if is_tensor(leaf) else np.array(leaf)
    changed[row] = value
    return changed


def _taken(leaf: Any, order: Sequence[int]) -> Any:
    if is_tensor(leaf):
        return leaf[list(order)]
    return leaf[np.asarray(order)]


def _concatenated(first: Any, second: Any) -> Any:
    if is_tensor(first):
        import torch

        return torch.cat([first, second])
    if is_jax(first):
        import jax.numpy as jnp

        return jnp.concatenate([first, second])
    return np.concatenate([first, second])


def _rebuilt(batch: Any, changed: dict[Any, Any]) -> Any:
    try:
        return type(batch)(changed)
    except (TypeError, ValueError):
        raise WrongTypeError(
            f"batch must be made of arrays, tuples, lists and dictionaries, got {short_repr(batch)}"
        ) from None
