"""The parts of the CNN's step that have a Triton kernel on a GPU, here in plain torch.

Channels are last: maps are pictures × side × side × channels. Kernels are clients × outputs × 9 · inputs, the nine
positions of a kernel before its inputs. A client's pictures are adjacent.
"""

import torch
from torch import Tensor

from coalmine.simulation.models.model import Dropout, dropout_mask

KERNEL = 3


def convolve(maps: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """Every client's pictures through its own 3 by 3 kernels: pictures × side − 2 × side − 2 × outputs."""
    count, side, _, inputs = maps.shape
    cut = patches(maps).view(len(kernel), -1, KERNEL**2 * inputs)
    return torch.baddbmm(bias.unsqueeze(1), cut, kernel.transpose(1, 2)).view(count, side - 2, side - 2, -1)


def kernel_gradient(maps: Tensor, slopes: Tensor, clients: int) -> Tensor:
    """The gradient of `convolve` by its kernel."""
    cut = patches(maps).view(clients, -1, KERNEL**2 * maps.shape[3])
    return torch.bmm(slopes.view(clients, -1, slopes.shape[3]).transpose(1, 2), cut)


def through_relu(slopes: Tensor, kernel: Tensor, maps: Tensor) -> Tensor:
    """The gradient with respect to the inputs of `convolve`, before the ReLU that gave `maps`."""
    count, side, _, outputs = slopes.shape
    cut = torch.bmm(slopes.view(len(kernel), -1, outputs), kernel).view(count, side, side, KERNEL, KERNEL, -1)
    total = torch.zeros_like(maps)
    for down in range(KERNEL):
        for right in range(KERNEL):
            total[:, down : down + side, right : right + side] += cut[:, :, :, down, right]
    return total.mul_(maps > 0)


def pool(maps: Tensor, dropout: Dropout, seeds: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """ReLU and dropout of the largest of each 2 by 2: clients × pictures × values, channels first.

    Also which of the four it was: 0 to 3 in reading order, the first of equals.
    """
    count, side, _, channels = maps.shape
    half, clients = side // 2, len(seeds)
    fours = (
        maps.view(count, half, 2, half, 2, channels).permute(0, 5, 1, 3, 2, 4).reshape(clients, count // clients, -1, 4)
    )
    largest, which = fours.max(dim=3)
    mask = dropout_mask(dropout, seeds, step, count // clients, 0)
    return largest.relu_().mul_(mask), which.to(torch.int8)


def unpool(slopes: Tensor, pooled: Tensor, which: Tensor, rate: float, channels: int) -> Tensor:
    """The gradient with respect to the inputs of `pool`."""
    half = round((slopes.shape[2] / channels) ** 0.5)
    passed = slopes * (pooled > 0) * (1 / (1 - rate))
    fours = torch.zeros(*slopes.shape, 4, dtype=slopes.dtype, device=slopes.device)
    fours.scatter_(3, which.long().unsqueeze(3), passed.unsqueeze(3))
    places = fours.view(-1, channels, half, half, 2, 2).permute(0, 2, 4, 3, 5, 1)
    return places.reshape(-1, 2 * half, 2 * half, channels)


def dropped(dropout: Dropout, seeds: Tensor, step: Tensor, count: int, salt: int) -> Tensor:
    """The mask of a dense layer."""
    return dropout_mask(dropout, seeds, step, count, salt)


def patches(maps: Tensor) -> Tensor:
    """The 3 by 3 patches around every inner position: pictures × side − 2 × side − 2 × 3 × 3 × channels."""
    cut = maps.unfold(1, KERNEL, 1).unfold(2, KERNEL, 1)
    return cut.permute(0, 1, 2, 4, 5, 3).contiguous()
