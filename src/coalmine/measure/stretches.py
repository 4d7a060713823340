"""Blocks as stretches of a model's rows: how a block's vector is gathered from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coalmine.canaries.array_types import is_tensor
from coalmine.measure.arrays import arrays_of, is_device_jax
from coalmine.measure.arrays.on_numpy import is_wide
from coalmine.measure.settings import Settings


@dataclass(frozen=True)
class Stretch:
    """A contiguous range of one leaf's row, and its offset in its block."""

    name: str
    layer: int
    start: int
    stop: int
    offset: int

    @property
    def in_leaf(self) -> slice:
        """The range in the leaf's row."""
        return slice(self.start, self.stop)

    @property
    def in_block(self) -> slice:
        """The range in the block."""
        return slice(self.offset, self.offset + self.stop - self.start)


def gather_block(rows: dict[str, Any], stretches: Sequence[Stretch], *, own: bool = False, into: Any = None) -> Any:
    """One block's vector in working precision.

    It is a view if the block is one stretch that already has this precision; with `own`, it is always a copy. The copy is
    written to `into` if that has the same dtype and device.
    """
    pieces = [rows[part.name][part.in_leaf] for part in stretches]
    like = empty_working_array(pieces)
    first = pieces[0]
    if (
        not own
        and into is None
        and len(pieces) == 1
        and first.dtype == like.dtype
        and arrays_of(first).is_contiguous(first)
    ):
        return first
    return arrays_of(like).joined(pieces, [part.in_block for part in stretches], like, into)


def empty_working_array(pieces: Sequence[Any]) -> Any:
    """An empty array of the type and precision for computing with these pieces: torch if any is, double if any is wide."""
    kinds = sorted(pieces, key=lambda piece: 0 if is_tensor(piece) else 1 if is_device_jax(piece) else 2)
    return arrays_of(kinds[0]).empty(kinds[0], double=any(is_wide(piece) for piece in pieces))


def subtract_piece(vector: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """Subtract `factor` times a piece from the vector at `place`, in the vector's precision, and return the vector.

    It is changed in place, except for a jax array, of which a new one is returned.
    """
    return arrays_of(vector).subtract(vector, place, piece, factor)


def write_piece(row: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """Write `factor` times a piece into the row at `place`, whatever types both have, and return the row.

    It is changed in place, except for a jax array, of which a new one is returned.
    """
    return arrays_of(row).put(row, place, piece, factor)


def clip_stretches(stretches: Sequence[Stretch], place: slice) -> Iterator[Stretch]:
    """The stretches inside the range `place` of a block, with offsets from the start of that range."""
    for part in stretches:
        first, last = max(part.in_block.start, place.start), min(part.in_block.stop, place.stop)
        if first < last:
            shift = first - part.in_block.start
            yield Stretch(
                part.name, part.layer, part.start + shift, part.start + shift + last - first, first - place.start
            )


def block_stretches(settings: Settings, leaf_sizes: Sequence[int], sizes: Sequence[int]) -> list[tuple[Stretch, ...]]:
    """For each block of a process, the stretches of leaves that make it up."""
    edges = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    blocks: list[list[Stretch]] = [[] for _ in sizes]
    place = 0
    for layer, ((name, _), size) in enumerate(zip(settings.layers, leaf_sizes, strict=True)):
        start = 0
        while start < size:
            block = int(np.searchsorted(edges, place, side="right")) - 1
            length = min(size - start, int(edges[block + 1]) - place)
            blocks[block].append(Stretch(name, layer, start, start + length, place - int(edges[block])))
            start, place = start + length, place + length
    return [tuple(parts) for parts in blocks]
