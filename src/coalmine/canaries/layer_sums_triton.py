# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Squares and products of a round's vectors, layer by layer, on a CUDA device: each vector is read once."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl

_SPAN = 4096  # coordinates per program; a layer is cut into chunks of this size
_BATCH = 1024  # sums that are added at a time


@triton.jit
def _chunk_sums(vector, others, total, starts, ends, sums, chunks,
                span: tl.constexpr, with_total: tl.constexpr, aligned: tl.constexpr):  # fmt: skip
    """Five sums of each chunk: of vector², rest², others², rest·total and total², where rest = vector - others."""
    chunk = tl.program_id(0)
    start, end = tl.load(starts + chunk), tl.load(ends + chunk)
    if aligned:
        start = tl.multiple_of(start, 4)
    i = start + tl.arange(0, span)
    inside = i < end
    whole = tl.load(vector + i, mask=inside, other=0.0)
    known = tl.load(others + i, mask=inside, other=0.0)
    rest = whole - known
    tl.store(sums + chunk, tl.sum(whole * whole).to(tl.float64))
    tl.store(sums + chunks + chunk, tl.sum(rest * rest).to(tl.float64))
    tl.store(sums + 2 * chunks + chunk, tl.sum(known * known).to(tl.float64))
    if with_total:
        added = tl.load(total + i, mask=inside, other=0.0)
        tl.store(sums + 3 * chunks + chunk, tl.sum(rest * added).to(tl.float64))
        tl.store(sums + 4 * chunks + chunk, tl.sum(added * added).to(tl.float64))


@triton.jit
def _layer_sums(sums, firsts, found, chunks, layers, batch: tl.constexpr):
    """The sums of the chunks of each layer, always in the same order."""
    layer, which = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(firsts + layer), tl.load(firsts + layer + 1)
    total = tl.zeros((batch,), tl.float64)
    for start in range(first, last, batch):
        i = start + tl.arange(0, batch)
        total += tl.load(sums + which.to(tl.int64) * chunks + i, mask=i < last, other=0.0)
    tl.store(found + which * layers + layer, tl.sum(total))


class LayerSums:
    """The sums of vectors that are cut into layers of these sizes."""

    def __init__(self, layers: Sequence[int], device: torch.device) -> None:
        offsets = np.concatenate([[0], np.cumsum(layers)])
        pieces = [np.arange(first, last, _SPAN) for first, last in pairwise(offsets)]
        starts = np.concatenate(pieces)
        ends = np.concatenate(
            [np.minimum(piece + _SPAN, last) for piece, last in zip(pieces, offsets[1:], strict=True)]
        )
        firsts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
        self._starts, self._ends, self._firsts = (
            torch.from_numpy(each.astype(np.int64)).to(device) for each in (starts, ends, firsts)
        )
        self._aligned = bool((starts % 4 == 0).all())
        self._layers, self._chunks = len(layers), len(starts)

    def __call__(self, vector: torch.Tensor, others: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        """Rows of vector², rest², others² and, with a total, of rest·total and total²: a column for each layer."""
        rows = 3 if total is None else 5
        sums = torch.empty((rows, self._chunks), dtype=torch.float64, device=vector.device)
        found = torch.empty((rows, self._layers), dtype=torch.float64, device=vector.device)
        aligned = self._aligned and all(
            each.data_ptr() % 16 == 0 for each in (vector, others, vector if total is None else total)
        )
        how = {"span": _SPAN, "with_total": total is not None, "aligned": aligned}
        given = (vector, others, vector if total is None else total, self._starts, self._ends, sums)
        _chunk_sums[(self._chunks,)](*given, self._chunks, **how)
        _layer_sums[(self._layers, rows)](sums, self._firsts, found, self._chunks, self._layers, batch=_BATCH)
        return found
