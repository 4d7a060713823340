# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Forward and backward pass of an LSTM cell, each as one Triton kernel instead of a dozen passes over memory."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    square = x * x  # use a series near 0, where 2 · sigmoid − 1 cancels
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835)))))
    return tl.where(square < 0.0625, series, 2 * _sigmoid(2 * x) - 1)


@triton.jit
def _row(row, per_group, group_stride, stride):
    """The offset of a row, for rows that come in groups."""
    return (row // per_group).to(tl.int64) * group_stride + (row % per_group) * stride


# These differ between positions, so kernels must not be specialised for them.
_VARYING = ["per_group", "continuing", "gates_group", "cells_group", "hidden_group", "grads_group"]
_POINTERS = ["gates", "previous", "cells", "hidden", "grads", "cell_grads"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_POINTERS)
def _forward(gates, previous, cells, hidden, per_group, gates_group, gates_row, cells_group, cells_row,
             hidden_group, hidden_row, width: tl.constexpr, first: tl.constexpr, block: tl.constexpr):  # fmt: skip
    row, j = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    valid = j < width
    gates += _row(row, per_group, gates_group, gates_row) + j
    offset = _row(row, per_group, cells_group, cells_row) + j
    input_gate = _sigmoid(tl.load(gates, mask=valid))
    forget_gate = _sigmoid(tl.load(gates + width, mask=valid))
    candidate = _tanh(tl.load(gates + 2 * width, mask=valid))
    output_gate = _sigmoid(tl.load(gates + 3 * width, mask=valid))
    cell = input_gate * candidate
    if not first:
        cell += forget_gate * tl.load(previous + offset, mask=valid)
    tl.store(gates, input_gate, mask=valid)
    tl.store(gates + width, forget_gate, mask=valid)
    tl.store(gates + 2 * width, candidate, mask=valid)
    tl.store(gates + 3 * width, output_gate, mask=valid)
    tl.store(cells + offset, cell, mask=valid)
    tl.store(hidden + _row(row, per_group, hidden_group, hidden_row) + j, output_gate * _tanh(cell), mask=valid)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_POINTERS)
def _backward(gates, grads, cells, previous, cell_grads, per_group, continuing, gates_group, gates_row, grads_group,
              grads_row, cells_group, cells_row, width: tl.constexpr, first: tl.constexpr, block: tl.constexpr):  # fmt: skip
    row, j = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    valid = j < width
    gates += _row(row, per_group, gates_group, gates_row) + j
    offset = _row(row, per_group, cells_group, cells_row) + j
    input_gate, forget_gate = tl.load(gates, mask=valid), tl.load(gates + width, mask=valid)
    candidate, output_gate = tl.load(gates + 2 * width, mask=valid), tl.load(gates + 3 * width, mask=valid)
    grad = tl.load(grads + _row(row, per_group, grads_group, grads_row) + j, mask=valid)
    tanh_cell = _tanh(tl.load(cells + offset, mask=valid))
    cell_grads += row.to(tl.int64) * width + j
    cell_grad = grad * output_gate * (1 - tanh_cell * tanh_cell) + tl.load(
        cell_grads, mask=valid & (row < continuing), other=0.0
    )
    tl.store(cell_grads, cell_grad * forget_gate, mask=valid)
    tl.store(gates, cell_grad * candidate * input_gate * (1 - input_gate), mask=valid)
    previous_cell = tl.zeros((block,), tl.float32) if first else tl.load(previous + offset, mask=valid)
    tl.store(gates + width, cell_grad * previous_cell * forget_gate * (1 - forget_gate), mask=valid)
    tl.store(gates + 2 * width, cell_grad * input_gate * (1 - candidate * candidate), mask=valid)
    tl.store(gates + 3 * width, grad * tanh_cell * output_gate * (1 - output_gate), mask=valid)


def forward(gate: Tensor, previous: Tensor | None, cell: Tensor, hidden: Tensor) -> None:
    """Activate the gates of one position, in place, and fill its cells and hidden states."""
    width = cell.shape[-1]
    rows, per_group = _rows(gate)
    strides = (*_strides(gate), *_strides(cell), *_strides(hidden))
    grid = (rows, triton.cdiv(width, _BLOCK))
    _forward[grid](
        gate, cell if previous is None else previous, cell, hidden, per_group, *strides, width, previous is None, _BLOCK
    )


def backward(
    gate: Tensor, grad: Tensor, cell: Tensor, previous: Tensor | None, cell_grads: Tensor, continuing: int
) -> None:
    """Replace the activated gates of one position by their gradients.

    `cell_grads` holds the cells' gradients from the next position for the first `continuing` rows. It receives those for
    the previous position.
    """
    width = cell.shape[-1]
    rows, per_group = _rows(gate)
    strides = (*_strides(gate), *_strides(grad), *_strides(cell))
    grid = (rows, triton.cdiv(width, _BLOCK))
    previous_cells = cell if previous is None else previous
    _backward[grid](
        gate, grad, cell, previous_cells, cell_grads, per_group, continuing, *strides, width, previous is None, _BLOCK
    )


def _rows(tensor: Tensor) -> tuple[int, int]:
    """The number of rows, and of rows in a group."""
    per_group = tensor.shape[-2]
    return (per_group, per_group) if tensor.ndim == 2 else (per_group * tensor.shape[0], per_group)


def _strides(tensor: Tensor) -> tuple[int, int]:
    return (0 if tensor.ndim == 2 else tensor.stride(0)), tensor.stride(-2)
