"""Gradients of single samples at several models at once: their norms, inner products and weighted sums.

Shapes begin with the number of models, then the number of samples of each. A gradient of dense layers is a sum of
outer products, so its norm, its product with another and a weighted sum of many need no gradient written out: for the
paper's network a step of crafting is 30 times less work. Other models get their gradients written out by torch.func.
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
        """models × samples."""
        ...

    def products(self, other: Self) -> Tensor:
        """Inner products with the one sample that `other` has of each model: models × samples."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """models × dim: the samples' gradients times their weights, added up."""
        ...


SampleGradients = Callable[[Tensor, Tensor, Tensor], Gradients]


def sample_gradients(model: Model) -> SampleGradients:
    """A function of flat models (models × dim), inputs and soft labels (models × samples × …) that gives Gradients.

    They can be differentiated through. The loss is the cross entropy with the soft label.
    """
    if model.ignored_label is not None or model.dropouts:
        raise ValueError(f"canaries are crafted for classifiers without dropout, got {model.name}")
    return _dense(model) if model.layers else _written_out(model)


@dataclass(frozen=True)
class Rows:
    """Gradients written out: models × samples × dim."""

    rows: Tensor

    def norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.rows, dim=2)

    def products(self, other: Self) -> Tensor:
        return torch.bmm(self.rows, other.rows.transpose(1, 2)).squeeze(2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.bmm(weights.unsqueeze(1), self.rows).squeeze(1)


@dataclass(frozen=True)
class Factors:
    """Gradients of dense layers by their factors: what went into each layer, and the slope of the loss after it.

    The gradient of a weight is the outer product of the two, that of a bias the slope: as of a weight whose input is 1.
    """

    inputs: tuple[Tensor, ...]  # models × samples × inputs of the layer
    slopes: tuple[Tensor, ...]  # models × samples × outputs of the layer

    def norms(self) -> Tensor:
        squares = [
            (layer.square().sum(dim=2) + 1) * slope.square().sum(dim=2)
            for layer, slope in zip(self.inputs, self.slopes, strict=True)
        ]
        total = torch.stack(squares).sum(dim=0)
        return total.clamp(min=torch.finfo(total.dtype).tiny).sqrt()  # whose slope at 0 is infinite

    def products(self, other: Self) -> Tensor:
        parts = [
            (torch.bmm(layer, alone.transpose(1, 2)) + 1) * torch.bmm(slope, slope_alone.transpose(1, 2))
            for layer, alone, slope, slope_alone in zip(
                self.inputs, other.inputs, self.slopes, other.slopes, strict=True
            )
        ]
        return torch.stack(parts).sum(dim=0).squeeze(2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        pieces = []
        for layer, slope in zip(self.inputs, self.slopes, strict=True):
            weighted = slope * weights.unsqueeze(2)
            pieces += [torch.bmm(layer.transpose(1, 2), weighted).flatten(start_dim=1), weighted.sum(dim=1)]
        return torch.cat(pieces, dim=1)


def _written_out(model: Model) -> SampleGradients:
    def loss(vector: Tensor, sample: Tensor, label: Tensor) -> Tensor:
        logits = model.logits(model.split(vector), sample.unsqueeze(0), ())[0]
        return -(label * logits.log_softmax(dim=0)).sum()

    gradients = vmap(vmap(grad(loss), in_dims=(None, 0, 0)))
    return lambda vectors, inputs, labels: Rows(gradients(vectors, inputs, labels))


def _dense(model: Model) -> SampleGradients:
    last = len(model.layers) - 1

    def gradients(vectors: Tensor, inputs: Tensor, labels: Tensor) -> Factors:
        parameters = model.split(vectors)
        weights = [parameters[f"dense{number}.weight"] for number in range(1, last + 1)]
        biases = [parameters[f"dense{number}.bias"].unsqueeze(1) for number in range(1, last + 1)]
        layers = [inputs.flatten(start_dim=2)]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            layers.append(torch.baddbmm(bias, layers[-1], weight).relu())
        logits = torch.baddbmm(biases[-1], layers[-1], weights[-1])
        slopes = [logits.softmax(dim=2) * labels.sum(dim=2, keepdim=True) - labels]
        for layer, weight in zip(layers[:0:-1], weights[:0:-1], strict=True):
            slopes.append(torch.bmm(slopes[-1], weight.transpose(1, 2)) * (layer > 0))
        return Factors(tuple(layers), tuple(slopes[::-1]))

    return gradients
