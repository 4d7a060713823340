"""Models as functions of one flat parameter vector, so that a canary can replace an update."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

Parameters = Mapping[str, Tensor]
Masks = Sequence[Tensor]
Logits = Callable[[Parameters, Tensor, Masks], Tensor]
Start = Callable[[Tensor, torch.Generator], object]


@dataclass(frozen=True)
class Dropout:
    """A dropout layer: the shape of one example's activations, and the rate."""

    shape: tuple[int, ...]
    rate: float


@dataclass(frozen=True)
class Recurrent:
    """The widths of a text model: an embedding, LSTM layers, dense layers without activations; the last gives logits."""

    symbols: int
    embedding: int
    lstms: tuple[int, ...]
    dense: tuple[int, ...]


@dataclass(frozen=True)
class Convolutional:
    """The widths of an image model: two 3 by 3 convolutions, a 2 by 2 pool, two dense layers, two dropouts."""

    side: int
    channels: tuple[int, int]
    hidden: int
    classes: int


@dataclass(frozen=True)
class Model:
    """Logits as a function of named parameters, inputs and dropout masks.

    There is one mask for each of `dropouts`, already divided by the keep rate; evaluation uses no masks. Since masks are
    arguments, training clients together and one by one drops the same activations.

    A text model takes rows of symbols and gives logits for the symbol after each; labels equal to `ignored_label` are not
    counted. `logits_alone` computes the same logits faster, but torch.func cannot vectorise it. The `structure` lets an
    engine work without autograd.
    """

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    logits: Logits
    activations: int  # values that a forward and backward pass keeps per example, for the memory limit
    dropouts: tuple[Dropout, ...] = ()
    layers: tuple[int, ...] = ()  # the widths; only for models of dense layers with ReLU between them
    structure: Recurrent | Convolutional | None = None
    ignored_label: int | None = None
    logits_alone: Logits | None = None
    starts: Mapping[str, Start] = field(default_factory=dict)  # initialisers other than Glorot's, by parameter

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The name and size of each parameter tensor, in the order of the flat vector."""
        return tuple((name, math.prod(shape)) for name, shape in self.shapes)

    @property
    def dim(self) -> int:
        """The number of parameters."""
        return sum(size for _, size in self.sizes)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector (or of a batch of them) by parameter."""
        pieces = torch.split_with_sizes(vector, [size for _, size in self.sizes], dim=-1)
        batch = vector.shape[:-1]
        return {name: piece.view(*batch, *shape) for (name, shape), piece in zip(self.shapes, pieces, strict=True)}

    def initial(self, generator: torch.Generator) -> Tensor:
        """Initial parameters on the CPU: `starts` where given, else Glorot uniform weights and zero biases."""
        vector = torch.zeros(self.dim)
        for name, weight in self.split(vector).items():
            if name in self.starts:
                self.starts[name](weight, generator)
            elif weight.ndim > 1:
                receptive = math.prod(weight.shape[2:])
                bound = math.sqrt(6 / (receptive * (weight.shape[0] + weight.shape[1])))
                weight.uniform_(-bound, bound, generator=generator)
        return vector

    def masks(self, seeds: Tensor, step: Tensor | int, count: int) -> list[Tensor]:
        """The masks of a step for `count` examples of each client, as a function of the client's seed and the step.

        So they do not depend on which clients train together, and one call makes the masks of all clients.
        """
        return [dropout_mask(dropout, seeds, step, count, salt) for salt, dropout in enumerate(self.dropouts)]

    def loss(self, logits: Tensor, labels: Tensor, shares: Tensor | None = None) -> Tensor:
        """The mean cross entropy of a batch: over its examples or, for text, over the symbols that are not ignored.

        `shares` are the examples' weights in the mean, 0 for padding. By default they are equal.
        """
        labels = labels.long()
        if self.ignored_label is None:
            if shares is None:
                return functional.cross_entropy(logits, labels)
            return (functional.cross_entropy(logits, labels, reduction="none") * shares).sum()
        counted = labels != self.ignored_label
        if shares is not None:
            counted = counted & (shares > 0).unsqueeze(1)
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        weights = counted.flatten().to(losses.dtype)
        return (losses * weights).sum() / weights.sum().clamp(min=1)


def dropout_mask(dropout: Dropout, seeds: Tensor, step: Tensor | int, count: int, salt: int) -> Tensor:
    """A mask, clients × count × shape: 0 with probability `rate`, else 1 / (1 − rate).

    A 32-bit hash of position, client and step decides, so that masks need no sequential generator.
    """
    length = count * math.prod(dropout.shape)
    first, second = (_mix(seeds >> 32 * half, step, 2 * salt + half).unsqueeze(1) for half in (0, 1))
    hashed = torch.arange(length, dtype=torch.int32, device=seeds.device) ^ first
    hashed = _scramble(_scramble(hashed, 16, -2048144789) ^ second, 13, -1028477387)
    hashed ^= (hashed >> 16) & 0xFFFF
    dropped = round(dropout.rate * 2**32) - 2**31
    return (hashed >= dropped).to(torch.float32).mul_(1 / (1 - dropout.rate)).view(len(seeds), count, *dropout.shape)


def _mix(seeds: Tensor, step: Tensor | int, salt: int) -> Tensor:
    """32 bits of each seed, mixed with the step and the mask's number."""
    low = (seeds & 0x7FFFFFFF).to(torch.int32)
    mixed = _scramble(low + (step * 16 + salt), 16, -2048144789)
    return _scramble(mixed.to(torch.int32), 13, -1028477387)


def _scramble(words: Tensor, shift: int, factor: int) -> Tensor:
    """One round of a 32-bit hash (the constants of MurmurHash3's finaliser): fold, then multiply."""
    return (words ^ ((words >> shift) & (2 ** (32 - shift) - 1))) * factor


def accuracy(
    model: Model,
    vector: Tensor,
    inputs: Tensor,
    labels: Tensor,
    *,
    unscored: Sequence[int] = (),
    batch: int | None = None,
) -> float:
    """The share of correct predictions of examples or, for text, of symbols; `unscored` labels are ignored."""
    parameters = model.split(vector)
    logits_of = model.logits_alone or model.logits
    batch = batch or max(10, min(1000, 2**28 // (4 * model.activations)))
    excluded = torch.tensor(list(unscored), device=labels.device, dtype=labels.dtype)
    correct = torch.zeros((), dtype=torch.int64, device=labels.device)
    scored = torch.zeros_like(correct)
    with torch.no_grad():
        for chunk, expected in zip(torch.split(inputs, batch), torch.split(labels, batch), strict=True):
            is_scored = (
                ~torch.isin(expected, excluded) if len(excluded) else torch.ones_like(expected, dtype=torch.bool)
            )
            correct += ((logits_of(parameters, chunk, ()).argmax(dim=-1) == expected) & is_scored).sum()
            scored += is_scored.sum()
    return int(correct) / max(int(scored), 1)
