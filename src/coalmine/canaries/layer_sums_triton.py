# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Sums over parts of a round's vectors on a CUDA device: a few launches, however many layers there are."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl

_SPAN = 4096  # coordinates per program; a stretch is cut into chunks of this size
_BATCH = 1024  # sums that are added at a time
_PLANS = 1024  # most NoiseSums that are kept: a model in blocks has one for each block

Stretch = tuple[int, int]


@triton.jit
def _chunk_sums(vector, others, total, rest, starts, ends, sums, chunks,
                span: tl.constexpr, with_total: tl.constexpr, aligned: tl.constexpr):  # fmt: skip
    """Five sums of each chunk: of vector², rest², others², rest·total and total². Writes rest = vector - others."""
    chunk = tl.program_id(0)
    start, end = tl.load(starts + chunk), tl.load(ends + chunk)
    if aligned:
        start = tl.multiple_of(start, 4)
    i = start + tl.arange(0, span)
    inside = i < end
    whole = tl.load(vector + i, mask=inside, other=0.0)
    known = tl.load(others + i, mask=inside, other=0.0)
    left = whole - known
    tl.store(rest + i, left, mask=inside)
    tl.store(sums + chunk, tl.sum(whole * whole).to(tl.float64))
    tl.store(sums + chunks + chunk, tl.sum(left * left).to(tl.float64))
    tl.store(sums + 2 * chunks + chunk, tl.sum(known * known).to(tl.float64))
    if with_total:
        added = tl.load(total + i, mask=inside, other=0.0)
        tl.store(sums + 3 * chunks + chunk, tl.sum(left * added).to(tl.float64))
        tl.store(sums + 4 * chunks + chunk, tl.sum(added * added).to(tl.float64))


@triton.jit
def _chunk_moments(vector, starts, ends, sums, chunks, span: tl.constexpr):
    """Three sums of each chunk: of |x|, x² and x⁴."""
    chunk = tl.program_id(0)
    i = tl.load(starts + chunk) + tl.arange(0, span)
    x = tl.load(vector + i, mask=i < tl.load(ends + chunk), other=0.0)
    square = x * x
    tl.store(sums + chunk, tl.sum(tl.abs(x)).to(tl.float64))
    tl.store(sums + chunks + chunk, tl.sum(square).to(tl.float64))
    tl.store(sums + 2 * chunks + chunk, tl.sum(square * square).to(tl.float64))


@triton.jit
def _chunk_products(vector, starts, ends, shifts, sums, chunks, span: tl.constexpr):
    """Three sums of each chunk: of x·y, x² and y², where y lies `shifts` before x."""
    chunk = tl.program_id(0)
    i = tl.load(starts + chunk) + tl.arange(0, span)
    inside = i < tl.load(ends + chunk)
    x = tl.load(vector + i, mask=inside, other=0.0)
    y = tl.load(vector + i - tl.load(shifts + chunk), mask=inside, other=0.0)
    tl.store(sums + chunk, tl.sum(x * y).to(tl.float64))
    tl.store(sums + chunks + chunk, tl.sum(x * x).to(tl.float64))
    tl.store(sums + 2 * chunks + chunk, tl.sum(y * y).to(tl.float64))


@triton.jit
def _stretch_sums(sums, firsts, found, chunks, stretches, batch: tl.constexpr):
    """The sums of the chunks of each stretch, always in the same order."""
    stretch, which = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(firsts + stretch), tl.load(firsts + stretch + 1)
    total = tl.zeros((batch,), tl.float64)
    for start in range(first, last, batch):
        i = start + tl.arange(0, batch)
        total += tl.load(sums + which.to(tl.int64) * chunks + i, mask=i < last, other=0.0)
    tl.store(found + which * stretches + stretch, tl.sum(total))


class _Chunks:
    """Stretches of a vector, cut into chunks: tables on a device."""

    def __init__(self, stretches: Sequence[Stretch], device: torch.device) -> None:
        pieces = [np.arange(first, last, _SPAN) for first, last in stretches]
        starts = np.concatenate(pieces)
        ends = np.concatenate(
            [np.minimum(piece + _SPAN, last) for piece, (_, last) in zip(pieces, stretches, strict=True)]
        )
        self.lengths = [len(piece) for piece in pieces]
        self.starts, self.ends, self._firsts = (
            torch.from_numpy(each.astype(np.int64)).to(device) for each in (starts, ends, np.cumsum([0, *self.lengths]))
        )
        self.aligned = bool((starts % 4 == 0).all())
        self.count, self._stretches = len(starts), len(stretches)

    def room(self, rows: int) -> torch.Tensor:
        """Room for `rows` sums of each chunk."""
        return torch.empty((rows, self.count), dtype=torch.float64, device=self.starts.device)

    def added(self, sums: torch.Tensor) -> torch.Tensor:
        """The sums of each stretch, from those of its chunks: a column for each stretch."""
        found = torch.empty((len(sums), self._stretches), dtype=torch.float64, device=sums.device)
        grid = (self._stretches, len(sums))
        _stretch_sums[grid](sums, self._firsts, found, self.count, self._stretches, batch=_BATCH)
        return found


class LayerSums:
    """Squares and products of a round's vectors, layer by layer: each vector is read once."""

    def __init__(self, layers: Sequence[int], device: torch.device) -> None:
        self._chunks = _Chunks(list(pairwise(np.cumsum([0, *layers]).tolist())), device)

    def __call__(
        self, vector: torch.Tensor, others: torch.Tensor, total: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest, vector - others, and a column of sums for each layer.

        The rows are of vector², rest², others² and, with a total, of rest·total and total².
        """
        chunks, rest = self._chunks, torch.empty_like(vector)
        sums = chunks.room(3 if total is None else 5)
        added = vector if total is None else total
        aligned = chunks.aligned and all(each.data_ptr() % 16 == 0 for each in (vector, others, added, rest))
        how = {"span": _SPAN, "with_total": total is not None, "aligned": aligned}
        _chunk_sums[(chunks.count,)](vector, others, added, rest, chunks.starts, chunks.ends, sums, chunks.count, **how)
        return rest, chunks.added(sums)


class NoiseSums:
    """The sums that `noise_law` needs in every round that it measures."""

    def __init__(
        self, groups: Sequence[Stretch], pairs: Sequence[tuple[Stretch, Stretch]], dim: int, device: torch.device
    ) -> None:
        lags = [((lag, dim), (0, dim - lag)) for lag in (1, 2)]
        # A product is of a stretch and of the one that lies so many coordinates before it.
        both = [*lags, *((two, one) for one, two in pairs)]
        self._groups = _Chunks(groups, device)
        self._products = _Chunks([later for later, _ in both], device)
        shifts = np.repeat([later[0] - earlier[0] for later, earlier in both], self._products.lengths)
        self._shifts = torch.from_numpy(shifts.astype(np.int64)).to(device)

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        """|x|, x² and x⁴ of each group; products of neighbours at lags 1 and 2; x·y, x² and y² of each pair."""
        groups, products = self._groups, self._products
        moments, found = groups.room(3), products.room(3)
        _chunk_moments[(groups.count,)](vector, groups.starts, groups.ends, moments, groups.count, span=_SPAN)
        given = (vector, products.starts, products.ends, self._shifts)
        _chunk_products[(products.count,)](*given, found, products.count, span=_SPAN)
        pairs = products.added(found)
        # A pair's stretch is later in the vector than its partner, so x is the second of the two.
        ordered = torch.stack([pairs[0, 2:], pairs[2, 2:], pairs[1, 2:]])
        return torch.cat([groups.added(moments).T.flatten(), pairs[0, :2], ordered.T.flatten()])


@lru_cache(_PLANS)
def noise_sums(
    groups: tuple[Stretch, ...], pairs: tuple[tuple[Stretch, Stretch], ...], dim: int, device: torch.device
) -> NoiseSums:
    """The NoiseSums of these parts of a vector, with its tables on the device."""
    return NoiseSums(groups, pairs, dim, device)
