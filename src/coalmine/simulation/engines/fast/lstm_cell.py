"""Forward and backward pass of an LSTM layer, position by position, for one model or a batch of models.

Every list is over positions. Its tensors are rows × values if all rows share one model, and clients × rows × values if each
client has its own. If a position has fewer rows than the previous one, the last rows have ended.
"""

from typing import Any

import torch
from torch import Tensor


def forward(gates: list[Tensor], recurrent: Tensor, hidden: list[Tensor], cells: list[Tensor]) -> None:
    """Fill `hidden` and `cells`. `gates` hold the inputs' part at first and the activations at the end.

    `recurrent` is the model's matrix, 4H × H. It and the hidden states may be padded with zeros to more than H columns.
    """
    transposed, cell_forward = recurrent.transpose(-1, -2), _cells(gates[0].device).forward
    for position, gate in enumerate(gates):
        rows = gate.shape[0]
        if position:
            accumulate(gate, hidden[position - 1][:rows], transposed)
        cell_forward(gate, cells[position - 1][:rows] if position else None, cells[position], hidden[position])


def backward(gates: list[Tensor], recurrent: Tensor, grads: list[Tensor], cells: list[Tensor]) -> None:
    """Replace the activations in `gates` by their gradients; `grads` of the hidden states are overwritten."""
    cell_backward = _cells(gates[0].device).backward
    cell_grads = torch.empty_like(cells[0], memory_format=torch.contiguous_format)
    continuing = 0
    for position in range(len(gates) - 1, -1, -1):
        gate, grad = gates[position], grads[position]
        if position + 1 < len(gates):
            later = gates[position + 1]
            accumulate(grad[: later.shape[0]], later, recurrent)
        previous = cells[position - 1][: gate.shape[0]] if position else None
        cell_backward(gate, grad, cells[position], previous, cell_grads, continuing)
        continuing = gate.shape[:-1].numel()


def accumulate(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left @ right, for one model or a batch of models."""
    if out.ndim == 2:
        out.addmm_(left, right)
    else:
        out.baddbmm_(left, right)


class PlainCells:
    """The cell in plain torch; lstm_kernels has the same functions."""

    @staticmethod
    def forward(gate: Tensor, previous: Tensor | None, cell: Tensor, hidden: Tensor) -> None:
        width = cell.shape[-1]
        gate[..., : 2 * width].sigmoid_()
        gate[..., 2 * width : 3 * width].tanh_()
        gate[..., 3 * width :].sigmoid_()
        input_gate, forget_gate, candidate, output_gate = gate.chunk(4, dim=-1)
        torch.mul(input_gate, candidate, out=cell)
        if previous is not None:
            cell.addcmul_(forget_gate, previous)
        torch.mul(output_gate, cell.tanh(), out=hidden[..., :width])

    @staticmethod
    def backward(
        gate: Tensor, grad: Tensor, cell: Tensor, previous: Tensor | None, cell_grads: Tensor, continuing: int
    ) -> None:
        width = cell.shape[-1]
        input_gate, forget_gate, candidate, output_gate = gate.chunk(4, dim=-1)
        grad = grad[..., :width]
        tanh_cell = cell.tanh()
        cell_grad = grad * output_gate * (1 - tanh_cell * tanh_cell)
        cell_grad.view(-1, width)[:continuing] += cell_grads.view(-1, width)[:continuing]
        cell_grads.view(-1, width)[: cell_grad[..., 0].numel()] = (cell_grad * forget_gate).view(-1, width)
        output_grad = grad * tanh_cell * output_gate * (1 - output_gate)
        forget_grad = (
            torch.zeros_like(forget_gate)
            if previous is None
            else cell_grad * previous * forget_gate * (1 - forget_gate)
        )
        candidate_grad = cell_grad * input_gate * (1 - candidate * candidate)
        input_gate.copy_(cell_grad * candidate * input_gate * (1 - input_gate))
        for part, new in ((forget_gate, forget_grad), (candidate, candidate_grad), (output_gate, output_grad)):
            part.copy_(new)


def _cells(device: torch.device) -> Any:
    """Triton kernels on a GPU if Triton is installed, else plain torch."""
    if device.type == "cuda":
        try:
            from coalmine.simulation.engines.fast import lstm_kernels
        except ImportError:  # no Triton on this platform
            return PlainCells
        return lstm_kernels
    return PlainCells
