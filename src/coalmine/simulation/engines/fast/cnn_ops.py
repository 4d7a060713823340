"""The operations of the CNN's step in plain torch; cnn_kernels has the same operations as Triton kernels.

Channels are last: maps are pictures × side × side × channels. Kernels are clients × outputs × 9 · inputs, the nine
positions of a kernel before its inputs. A client's pictures are adjacent.
"""

import torch
from torch import Tensor

from coalmine.simulation.models.model import Dropout, dropout_mask

KERNEL = 3


def convolve(maps: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """Convolve every client's pictures with its own 3 by 3 kernels: pictures × side − 2 × side − 2 × outputs."""
    count, side, _, inputs = maps.shape
    columns = patches(maps).view(len(kernel), -1, KERNEL**2 * inputs)
    return torch.baddbmm(bias.unsqueeze(1), columns, kernel.transpose(1, 2)).view(count, side - 2, side - 2, -1)


def kernel_gradient(maps: Tensor, grads: Tensor, clients: int) -> Tensor:
    """The gradient of `convolve` with respect to its kernel."""
    columns = patches(maps).view(clients, -1, KERNEL**2 * maps.shape[3])
    return torch.bmm(grads.view(clients, -1, grads.shape[3]).transpose(1, 2), columns)


def input_gradient(grads: Tensor, kernel: Tensor, maps: Tensor) -> Tensor:
    """The gradient with respect to the inputs of `convolve`, backpropagated through the ReLU that gave `maps`."""
    count, side, _, outputs = grads.shape
    columns = torch.bmm(grads.view(len(kernel), -1, outputs), kernel).view(count, side, side, KERNEL, KERNEL, -1)
    total = torch.zeros_like(maps)
    for down in range(KERNEL):
        for right in range(KERNEL):
            total[:, down : down + side, right : right + side] += columns[:, :, :, down, right]
    return total.mul_(maps > 0)


def pool(maps: Tensor, dropout: Dropout, seeds: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """A 2 by 2 max pool, then ReLU and dropout: clients × pictures × values, channels first.

    Also returns the position of each maximum: 0 to 3 in reading order, the first one on ties.
    """
    count, side, _, channels = maps.shape
    half, clients = side // 2, len(seeds)
    windows = (
        maps.view(count, half, 2, half, 2, channels).permute(0, 5, 1, 3, 2, 4).reshape(clients, count // clients, -1, 4)
    )
    largest, argmax = windows.max(dim=3)
    mask = dropout_mask(dropout, seeds, step, count // clients, 0)
    return largest.relu_().mul_(mask), argmax.to(torch.int8)


def unpool(grads: Tensor, pooled: Tensor, argmax: Tensor, rate: float, channels: int) -> Tensor:
    """The gradient with respect to the inputs of `pool`."""
    half = round((grads.shape[2] / channels) ** 0.5)
    kept = grads * (pooled > 0) * (1 / (1 - rate))
    windows = torch.zeros(*grads.shape, 4, dtype=grads.dtype, device=grads.device)
    windows.scatter_(3, argmax.long().unsqueeze(3), kept.unsqueeze(3))
    maps = windows.view(-1, channels, half, half, 2, 2).permute(0, 2, 4, 3, 5, 1)
    return maps.reshape(-1, 2 * half, 2 * half, channels)


def dense_mask(dropout: Dropout, seeds: Tensor, step: Tensor, count: int, salt: int) -> Tensor:
    """The dropout mask of a dense layer."""
    return dropout_mask(dropout, seeds, step, count, salt)


def patches(maps: Tensor) -> Tensor:
    """The 3 by 3 patches around every inner position: pictures × side − 2 × side − 2 × 3 × 3 × channels."""
    windows = maps.unfold(1, KERNEL, 1).unfold(2, KERNEL, 1)
    return windows.permute(0, 1, 2, 4, 5, 3).contiguous()
