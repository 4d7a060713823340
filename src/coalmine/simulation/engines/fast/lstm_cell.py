"""An LSTM layer forward and backward, step by step, for one model or for a batch of them.

Every tensor is a list over positions: rows × values where all rows share one model, clients × rows × values where each
client has its own. Fewer rows than at the previous position mean that the last rows have ended.
"""

from typing import Any

import torch
from torch import Tensor


def forward(gates: list[Tensor], recurrent: Tensor, hidden: list[Tensor], cells: list[Tensor]) -> None:
    """Fill `hidden` and `cells`; `gates` hold the inputs' part before and the activations after.

    `recurrent` is that of the model, 4H × H; hidden states may be wider than H where it is too, by zeros.
    """
    transposed, open_gates = recurrent.transpose(-1, -2), _cells(gates[0].device).forward
    for place, gate in enumerate(gates):
        rows = gate.shape[0]
        if place:
            accumulate(gate, hidden[place - 1][:rows], transposed)
        open_gates(gate, cells[place - 1][:rows] if place else None, cells[place], hidden[place])


def backward(gates: list[Tensor], recurrent: Tensor, slopes: list[Tensor], cells: list[Tensor]) -> None:
    """Turn the activations in `gates` into their gradients, given those of the hidden states (`slopes`, overwritten)."""
    cell_backward = _cells(gates[0].device).backward
    handed = torch.empty_like(cells[0], memory_format=torch.contiguous_format)
    going_on = 0
    for place in range(len(gates) - 1, -1, -1):
        gate, slope = gates[place], slopes[place]
        if place + 1 < len(gates):
            later = gates[place + 1]
            accumulate(slope[: later.shape[0]], later, recurrent)
        before = cells[place - 1][: gate.shape[0]] if place else None
        cell_backward(gate, slope, cells[place], before, handed, going_on)
        going_on = gate.shape[:-1].numel()


def accumulate(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left @ right, for one model or a batch of them."""
    if out.ndim == 2:
        out.addmm_(left, right)
    else:
        out.baddbmm_(left, right)


class PlainCells:
    """The cell in plain torch: the same as lstm_kernels."""

    @staticmethod
    def forward(gate: Tensor, before: Tensor | None, cell: Tensor, hidden: Tensor) -> None:
        width = cell.shape[-1]
        gate[..., : 2 * width].sigmoid_()
        gate[..., 2 * width : 3 * width].tanh_()
        gate[..., 3 * width :].sigmoid_()
        opened, kept, fresh, shown = gate.chunk(4, dim=-1)
        torch.mul(opened, fresh, out=cell)
        if before is not None:
            cell.addcmul_(kept, before)
        torch.mul(shown, cell.tanh(), out=hidden[..., :width])

    @staticmethod
    def backward(
        gate: Tensor, slope: Tensor, cell: Tensor, before: Tensor | None, handed: Tensor, going_on: int
    ) -> None:
        width = cell.shape[-1]
        opened, kept, fresh, shown = gate.chunk(4, dim=-1)
        slope = slope[..., :width]
        bent = cell.tanh()
        steep = slope * shown * (1 - bent * bent)
        steep.view(-1, width)[:going_on] += handed.view(-1, width)[:going_on]
        handed.view(-1, width)[: steep[..., 0].numel()] = (steep * kept).view(-1, width)
        through = slope * bent * shown * (1 - shown)
        forgot = torch.zeros_like(kept) if before is None else steep * before * kept * (1 - kept)
        changed = steep * opened * (1 - fresh * fresh)
        opened.copy_(steep * fresh * opened * (1 - opened))
        for part, new in ((kept, forgot), (fresh, changed), (shown, through)):
            part.copy_(new)


def _cells(device: torch.device) -> Any:
    """Triton kernels on a GPU, where Triton is installed; else plain torch."""
    if device.type == "cuda":
        try:
            from coalmine.simulation.engines.fast import lstm_kernels
        except ImportError:  # no Triton on this platform
            return PlainCells
        return lstm_kernels
    return PlainCells
