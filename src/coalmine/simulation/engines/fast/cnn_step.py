"""One client's step with the paper's CNN on a CPU, without autograd.

No work is wasted: channels are last from the first layer to the pool, the gradient with respect to the images is never
computed, bias and ReLU come after the pool, where a quarter of the values is left, and a dense layer's gradient is added to
its weights in the product that computes it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from coalmine.simulation.engines.fast.descent import Descent
from coalmine.simulation.engines.plain.engine import ClientSettings
from coalmine.simulation.models import Masks, Model


def convolutional_step(
    model: Model,
    weights: Mapping[str, Tensor],
    velocities: Mapping[str, Tensor] | None,
    client: ClientSettings,
    pictures: Tensor,
    labels: Tensor,
    masks: Masks,
) -> None:
    """One step of SGD in place, on the mean cross entropy of the batch, for models with a `Convolutional` structure."""
    maps = functional.conv2d(pictures, weights["conv1.weight"], weights["conv1.bias"]).relu_()
    raised = functional.conv2d(maps, weights["conv2.weight"])
    pooled, places = functional.max_pool2d(raised, 2, return_indices=True)
    pooled.add_(weights["conv2.bias"].view(-1, 1, 1)).relu_()
    flat = pooled.flatten(start_dim=1).mul_(masks[0])  # a copy, channels first as the dense layer has them
    hidden = torch.addmm(weights["dense1.bias"], flat, weights["dense1.weight"].t()).relu_().mul_(masks[1])
    logits = torch.addmm(weights["dense2.bias"], hidden, weights["dense2.weight"].t())

    descent = Descent(_rows(weights), velocities and _rows(velocities), client)
    slope = logits.softmax(dim=1).sub_(functional.one_hot(labels.long(), logits.shape[1])).div_(len(labels))
    below = _below_relu(torch.mm(slope, weights["dense2.weight"]).mul_(masks[1]), hidden)
    _dense(descent, "dense2", slope, hidden)
    slope = _below_relu(torch.mm(below, weights["dense1.weight"]).mul_(masks[0]), flat)
    _dense(descent, "dense1", below, flat)
    below = slope.view(pooled.shape).contiguous(memory_format=torch.channels_last)
    descent.gradient("conv2.bias", below.sum(dim=(0, 2, 3)).unsqueeze(0))
    slope = torch.ops.aten.max_pool2d_with_indices_backward(
        below, raised, [2, 2], [2, 2], [0, 0], [1, 1], False, places
    )
    below, gradient = _below_convolution(slope, maps, weights["conv2.weight"], inputs=True)
    descent.gradient("conv2.weight", gradient.unsqueeze(0))
    slope = _below_relu(below, maps)
    _, gradient = _below_convolution(slope, pictures, weights["conv1.weight"], inputs=False)
    descent.gradient("conv1.weight", gradient.unsqueeze(0))
    descent.gradient("conv1.bias", slope.sum(dim=(0, 2, 3)).unsqueeze(0))


def _rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}


def _dense(descent: Descent, layer: str, slope: Tensor, inputs: Tensor) -> None:
    descent.product(f"{layer}.weight", slope.unsqueeze(0), inputs.unsqueeze(0))
    descent.gradient(f"{layer}.bias", slope.sum(dim=0, keepdim=True))


def _below_relu(slope: Tensor, outputs: Tensor) -> Tensor:
    """In place: 0 where the outputs are 0."""
    torch.ops.aten.threshold_backward.grad_input(slope, outputs, 0, grad_input=slope)
    return slope


def _below_convolution(slope: Tensor, outer: Tensor, kernel: Tensor, *, inputs: bool) -> tuple[Tensor, Tensor]:
    """The gradient with respect to the inputs, if requested, and that of the kernel."""
    one, none = [1, 1], [0, 0]
    below, gradient, _ = torch.ops.aten.convolution_backward(
        slope, outer, kernel, None, one, none, one, False, none, 1, [inputs, True, False]
    )
    return below, gradient
