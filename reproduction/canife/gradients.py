"""Gradients of single samples at several models at once: their norms, inner products and weighted sums.

Shapes begin with the number of models, then the number of samples of each. A gradient of dense layers is made of outer
products, so norms, inner products and weighted sums do not need the gradient itself. For the paper's network this makes a
step of crafting 30 times cheaper. For other models torch.func computes the full gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.func import grad, vmap

from coalmine.simulation.models import Model


class Gradients(Protocol):
    """Gradients of models × samples."""

    def norms(self) -> Tensor:
        """The norm of each gradient: models × samples."""
        ...

    def products(self, other: Self) -> Tensor:
        """Inner products with the single sample of each model in `other`: models × samples."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The weighted sum of the samples' gradients: models × dim."""
        ...


SampleGradients = Callable[[Tensor, Tensor, Tensor], Gradients]


def sample_gradients(model: Model) -> SampleGradients:
    """A function from flat models (models × dim), inputs and soft labels (models × samples × …) to Gradients.

    Autograd can differentiate through it. The loss is the cross entropy with the soft label.
    """
    if model.ignored_label is not None or model.dropouts:
        raise ValueError(f"canaries are crafted for classifiers without dropout, got {model.name}")
    return _factored_gradients(model) if model.layers else _full_gradients(model)


@dataclass(frozen=True)
class Rows:
    """Full gradients: models × samples × dim."""

    rows: Tensor

    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.rows, dim=2)

    def products(self, other: Self) -> Tensor:
        return torch.bmm(self.rows, other.rows.transpose(1, 2)).squeeze(2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.bmm(weights.unsqueeze(1), self.rows).squeeze(1)


@dataclass(frozen=True)
class Factors:
    """Gradients of dense layers as factors: the inputs of each layer, and the gradients of the loss by its outputs.

    The gradient of a weight is the outer product of the two. A bias is like a weight whose input is 1.
    """

    inputs: tuple[Tensor, ...]  # models × samples × inputs of the layer
    output_gradients: tuple[Tensor, ...]  # models × samples × outputs of the layer

    def norms(self) -> Tensor:
        squares = [
            (layer.square().sum(dim=2) + 1) * gradient.square().sum(dim=2)
            for layer, gradient in zip(self.inputs, self.output_gradients, strict=True)
        ]
        total = torch.stack(squares).sum(dim=0)
        return total.clamp(
            min=torch.finfo(total.dtype).tiny
        ).sqrt()  # the derivative of the square root at 0 is infinite

    def products(self, other: Self) -> Tensor:
        parts = [
            (torch.bmm(layer, other_layer.transpose(1, 2)) + 1) * torch.bmm(gradient, other_gradient.transpose(1, 2))
            for layer, other_layer, gradient, other_gradient in zip(
                self.inputs, other.inputs, self.output_gradients, other.output_gradients, strict=True
            )
        ]
        return torch.stack(parts).sum(dim=0).squeeze(2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        pieces = []
        for layer, gradient in zip(self.inputs, self.output_gradients, strict=True):
            weighted = gradient * weights.unsqueeze(2)
            pieces += [torch.bmm(layer.transpose(1, 2), weighted).flatten(start_dim=1), weighted.sum(dim=1)]
        return torch.cat(pieces, dim=1)


def _full_gradients(model: Model) -> SampleGradients:
    def loss(vector: Tensor, sample: Tensor, label: Tensor) -> Tensor:
        logits = model.logits(model.split(vector), sample.unsqueeze(0), ())[0]
        return -(label * logits.log_softmax(dim=0)).sum()

    gradients = vmap(vmap(grad(loss), in_dims=(None, 0, 0)))
    return lambda vectors, inputs, labels: Rows(gradients(vectors, inputs, labels))


def _factored_gradients(model: Model) -> SampleGradients:
    last = len(model.layers) - 1

    def gradients(vectors: Tensor, inputs: Tensor, labels: Tensor) -> Factors:
        parameters = model.split(vectors)
        weights = [parameters[f"dense{number}.weight"] for number in range(1, last + 1)]
        biases = [parameters[f"dense{number}.bias"].unsqueeze(1) for number in range(1, last + 1)]
        layers = [inputs.flatten(start_dim=2)]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            layers.append(torch.baddbmm(bias, layers[-1], weight).relu())
        logits = torch.baddbmm(biases[-1], layers[-1], weights[-1])
        output_gradients = [logits.softmax(dim=2) * labels.sum(dim=2, keepdim=True) - labels]
        for layer, weight in zip(layers[:0:-1], weights[:0:-1], strict=True):
            output_gradients.append(torch.bmm(output_gradients[-1], weight.transpose(1, 2)) * (layer > 0))
        return Factors(tuple(layers), tuple(output_gradients[::-1]))

    return gradients
