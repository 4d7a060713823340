"""The models: functions of one flat vector of parameters, so that a canary can pose as an update of all of them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

Parameters = Mapping[str, Tensor]
Masks = Sequence[Tensor]


@dataclass(frozen=True)
class Dropout:
    """Where a model drops activations in training: the shape of one example's, and how many are dropped."""

    shape: tuple[int, ...]
    rate: float


@dataclass(frozen=True)
class Model:
    """Logits as a function of named parameters, inputs and dropout masks.

    Masks are drawn outside and handed in, one for each of `dropouts`, already divided by the rate kept; with none the
    model is the one for evaluation. So training clients together and one by one drops the same activations.
    """

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    logits: Callable[[Parameters, Tensor, Masks], Tensor]
    activations: int  # numbers that one example's forward and backward pass keep, to stay within a memory limit
    dropouts: tuple[Dropout, ...] = ()
    layers: tuple[int, ...] = ()  # the widths, where the model is dense layers with ReLU between them and nothing else

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and number of parameters of each tensor, in the order of the flat vector."""
        return tuple((name, math.prod(shape)) for name, shape in self.shapes)

    @property
    def dim(self) -> int:
        """How many parameters in all."""
        return sum(size for _, size in self.sizes)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector (or of a batch of them) by parameter."""
        pieces = torch.split_with_sizes(vector, [size for _, size in self.sizes], dim=-1)
        batch = vector.shape[:-1]
        return {name: piece.view(*batch, *shape) for (name, shape), piece in zip(self.shapes, pieces, strict=True)}

    def initial(self, generator: torch.Generator) -> Tensor:
        """Weights uniform after Glorot, biases zero; on the CPU."""
        vector = torch.zeros(self.dim)
        for weight in self.split(vector).values():
            if weight.ndim > 1:
                receptive = math.prod(weight.shape[2:])
                bound = math.sqrt(6 / (receptive * (weight.shape[0] + weight.shape[1])))
                weight.uniform_(-bound, bound, generator=generator)
        return vector

    def draw_masks(self, generator: torch.Generator, count: int) -> list[Tensor]:
        """Masks for `count` examples."""
        return [
            torch.empty(count, *dropout.shape, device=generator.device)
            .bernoulli_(1 - dropout.rate, generator=generator)
            .div_(1 - dropout.rate)
            for dropout in self.dropouts
        ]


def mlp(*widths: int) -> Model:
    """Dense layers of these widths with ReLU between them; widths 64, 128, 10 make 9,610 parameters."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        shapes += [(f"dense{number}.weight", (inputs, outputs)), (f"dense{number}.bias", (outputs,))]

    def logits(parameters: Parameters, inputs: Tensor, masks: Masks) -> Tensor:
        hidden = inputs.flatten(start_dim=1)
        for number in range(1, len(widths)):
            hidden = hidden @ parameters[f"dense{number}.weight"] + parameters[f"dense{number}.bias"]
            if number < len(widths) - 1:
                hidden = hidden.relu()
        return hidden

    return Model(f"mlp-{'-'.join(map(str, widths))}", tuple(shapes), logits, 3 * sum(widths), layers=widths)


def cnn_dropout(classes: int = 10) -> Model:
    """The paper's CNN for 28 by 28 characters (`cnn_dropout`): 1,199,882 parameters with 10 classes."""
    shapes = (
        ("conv1.weight", (32, 1, 3, 3)),
        ("conv1.bias", (32,)),
        ("conv2.weight", (64, 32, 3, 3)),
        ("conv2.bias", (64,)),
        ("dense1.weight", (128, 9216)),
        ("dense1.bias", (128,)),
        ("dense2.weight", (classes, 128)),
        ("dense2.bias", (classes,)),
    )

    def logits(parameters: Parameters, images: Tensor, masks: Masks) -> Tensor:
        maps = functional.conv2d(images, parameters["conv1.weight"], parameters["conv1.bias"]).relu()
        maps = functional.conv2d(maps, parameters["conv2.weight"], parameters["conv2.bias"]).relu()
        flat = functional.max_pool2d(maps, 2).flatten(start_dim=1)
        flat = flat * masks[0] if masks else flat
        hidden = functional.linear(flat, parameters["dense1.weight"], parameters["dense1.bias"]).relu()
        hidden = hidden * masks[1] if masks else hidden
        return functional.linear(hidden, parameters["dense2.weight"], parameters["dense2.bias"])

    activations = 784 + 3 * (32 * 26 * 26 + 64 * 24 * 24) + 5 * 9216
    return Model(f"cnn-dropout-{classes}", shapes, logits, activations, (Dropout((9216,), 0.25), Dropout((128,), 0.5)))


def model_by_name(name: str) -> Model:
    """The model that has this name, which says all there is to say of it."""
    if match := re.fullmatch(r"mlp((?:-[1-9]\d*){2,})", name):
        return mlp(*map(int, match[1].split("-")[1:]))
    if match := re.fullmatch(r"cnn-dropout-([1-9]\d*)", name):
        return cnn_dropout(int(match[1]))
    raise ValueError(f"model must be like mlp-64-128-10 or cnn-dropout-10, got {name!r}")


def accuracy(model: Model, vector: Tensor, inputs: Tensor, labels: Tensor, *, batch: int = 1000) -> float:
    """Share of the examples that the model classifies rightly."""
    parameters = model.split(vector)
    right = 0
    with torch.no_grad():
        for images, classes in zip(torch.split(inputs, batch), torch.split(labels, batch), strict=True):
            right += int((model.logits(parameters, images, ()).argmax(dim=1) == classes).sum())
    return right / len(labels)
