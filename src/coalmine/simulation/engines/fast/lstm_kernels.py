# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The cell of an LSTM, forward and backward, each as one Triton kernel instead of a dozen passes over memory."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    square = x * x  # near 0 a series, since there 2 · sigmoid − 1 cancels
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835)))))
    return tl.where(square < 0.0625, series, 2 * _sigmoid(2 * x) - 1)


@triton.jit
def _row(row, per_group, group_stride, stride):
    """Where a row begins, in rows that come in groups."""
    return (row // per_group).to(tl.int64) * group_stride + (row % per_group) * stride


# These differ between positions; kernels are not recompiled for them.
_VARYING = ["per_group", "ended", "gates_group", "cells_group", "hidden_group", "slopes_group"]
_MOVING = ["gates", "before", "cells", "hidden", "slopes", "handed"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_MOVING)
def _forward(gates, before, cells, hidden, per_group, gates_group, gates_row, cells_group, cells_row,
             hidden_group, hidden_row, width: tl.constexpr, first: tl.constexpr, block: tl.constexpr):  # fmt: skip
    row, j = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    there = j < width
    gates += _row(row, per_group, gates_group, gates_row) + j
    at = _row(row, per_group, cells_group, cells_row) + j
    opened = _sigmoid(tl.load(gates, mask=there))
    kept = _sigmoid(tl.load(gates + width, mask=there))
    fresh = _tanh(tl.load(gates + 2 * width, mask=there))
    shown = _sigmoid(tl.load(gates + 3 * width, mask=there))
    cell = opened * fresh
    if not first:
        cell += kept * tl.load(before + at, mask=there)
    tl.store(gates, opened, mask=there)
    tl.store(gates + width, kept, mask=there)
    tl.store(gates + 2 * width, fresh, mask=there)
    tl.store(gates + 3 * width, shown, mask=there)
    tl.store(cells + at, cell, mask=there)
    tl.store(hidden + _row(row, per_group, hidden_group, hidden_row) + j, shown * _tanh(cell), mask=there)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_MOVING)
def _backward(gates, slopes, cells, before, handed, per_group, ended, gates_group, gates_row, slopes_group, slopes_row,
              cells_group, cells_row, width: tl.constexpr, first: tl.constexpr, block: tl.constexpr):  # fmt: skip
    row, j = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    there = j < width
    gates += _row(row, per_group, gates_group, gates_row) + j
    at = _row(row, per_group, cells_group, cells_row) + j
    opened, kept = tl.load(gates, mask=there), tl.load(gates + width, mask=there)
    fresh, shown = tl.load(gates + 2 * width, mask=there), tl.load(gates + 3 * width, mask=there)
    slope = tl.load(slopes + _row(row, per_group, slopes_group, slopes_row) + j, mask=there)
    bent = _tanh(tl.load(cells + at, mask=there))
    handed += row.to(tl.int64) * width + j
    cell = slope * shown * (1 - bent * bent) + tl.load(handed, mask=there & (row < ended), other=0.0)
    tl.store(handed, cell * kept, mask=there)
    tl.store(gates, cell * fresh * opened * (1 - opened), mask=there)
    last = tl.zeros((block,), tl.float32) if first else tl.load(before + at, mask=there)
    tl.store(gates + width, cell * last * kept * (1 - kept), mask=there)
    tl.store(gates + 2 * width, cell * opened * (1 - fresh * fresh), mask=there)
    tl.store(gates + 3 * width, slope * bent * shown * (1 - shown), mask=there)


def forward(gate: Tensor, before: Tensor | None, cell: Tensor, hidden: Tensor) -> None:
    """Activate the gates of one position, in place, and fill its cells and hidden states."""
    width = cell.shape[-1]
    rows, per_group = _rows(gate)
    strides = (*_strides(gate), *_strides(cell), *_strides(hidden))
    grid = (rows, triton.cdiv(width, _BLOCK))
    _forward[grid](
        gate, cell if before is None else before, cell, hidden, per_group, *strides, width, before is None, _BLOCK
    )


def backward(gate: Tensor, slope: Tensor, cell: Tensor, before: Tensor | None, handed: Tensor, going_on: int) -> None:
    """Turn the activated gates of one position into their gradients.

    `handed` holds the cells' gradients from the next position, for the first `going_on` rows, and receives those for the
    previous position.
    """
    width = cell.shape[-1]
    rows, per_group = _rows(gate)
    strides = (*_strides(gate), *_strides(slope), *_strides(cell))
    grid = (rows, triton.cdiv(width, _BLOCK))
    last = cell if before is None else before
    _backward[grid](gate, slope, cell, last, handed, per_group, going_on, *strides, width, before is None, _BLOCK)


def _rows(tensor: Tensor) -> tuple[int, int]:
    """The number of rows, and of rows in a group."""
    per_group = tensor.shape[-2]
    return (per_group, per_group) if tensor.ndim == 2 else (per_group * tensor.shape[0], per_group)


def _strides(tensor: Tensor) -> tuple[int, int]:
    return (0 if tensor.ndim == 2 else tensor.stride(0)), tensor.stride(-2)
