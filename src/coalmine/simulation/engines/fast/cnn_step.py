"""One client's step with the paper's CNN on a CPU, without autograd.

It avoids unnecessary work. Channels are last from the first layer to the pool. The gradient with respect to the images is
not computed. Bias and ReLU come after the pool, where only a quarter of the values are left. The product that computes a
dense layer's gradient also adds it to the weights.
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
    conv2 = functional.conv2d(maps, weights["conv2.weight"])
    pooled, places = functional.max_pool2d(conv2, 2, return_indices=True)
    pooled.add_(weights["conv2.bias"].view(-1, 1, 1)).relu_()
    flat = pooled.flatten(start_dim=1).mul_(masks[0])  # a copy with channels first, as in the dense layer
    hidden = torch.addmm(weights["dense1.bias"], flat, weights["dense1.weight"].t()).relu_().mul_(masks[1])
    logits = torch.addmm(weights["dense2.bias"], hidden, weights["dense2.weight"].t())

    descent = Descent(_as_rows(weights), velocities and _as_rows(velocities), client)
    grad = logits.softmax(dim=1).sub_(functional.one_hot(labels.long(), logits.shape[1])).div_(len(labels))
    input_grad = _relu_backward(torch.mm(grad, weights["dense2.weight"]).mul_(masks[1]), hidden)
    _apply_dense(descent, "dense2", grad, hidden)
    grad = _relu_backward(torch.mm(input_grad, weights["dense1.weight"]).mul_(masks[0]), flat)
    _apply_dense(descent, "dense1", input_grad, flat)
    input_grad = grad.view(pooled.shape).contiguous(memory_format=torch.channels_last)
    descent.apply_gradient("conv2.bias", input_grad.sum(dim=(0, 2, 3)).unsqueeze(0))
    grad = torch.ops.aten.max_pool2d_with_indices_backward(
        input_grad, conv2, [2, 2], [2, 2], [0, 0], [1, 1], False, places
    )
    input_grad, kernel_grad = _convolution_backward(grad, maps, weights["conv2.weight"], inputs=True)
    descent.apply_gradient("conv2.weight", kernel_grad.unsqueeze(0))
    grad = _relu_backward(input_grad, maps)
    _, kernel_grad = _convolution_backward(grad, pictures, weights["conv1.weight"], inputs=False)
    descent.apply_gradient("conv1.weight", kernel_grad.unsqueeze(0))
    descent.apply_gradient("conv1.bias", grad.sum(dim=(0, 2, 3)).unsqueeze(0))


def _as_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}


def _apply_dense(descent: Descent, layer: str, grad: Tensor, inputs: Tensor) -> None:
    descent.apply_product(f"{layer}.weight", grad.unsqueeze(0), inputs.unsqueeze(0))
    descent.apply_gradient(f"{layer}.bias", grad.sum(dim=0, keepdim=True))


def _relu_backward(grad: Tensor, outputs: Tensor) -> Tensor:
    """Backpropagate through a ReLU, in place: 0 where the outputs are 0."""
    torch.ops.aten.threshold_backward.grad_input(grad, outputs, 0, grad_input=grad)
    return grad


def _convolution_backward(grad: Tensor, layer_inputs: Tensor, kernel: Tensor, *, inputs: bool) -> tuple[Tensor, Tensor]:
    """The gradients of a convolution with respect to its inputs, if requested, and its kernel."""
    one, none = [1, 1], [0, 0]
    input_grad, kernel_grad, _ = torch.ops.aten.convolution_backward(
        grad, layer_inputs, kernel, None, one, none, one, False, none, 1, [inputs, True, False]
    )
    return input_grad, kernel_grad
