"""The architectures: dense layers, the paper's CNN, and LSTMs with one bias per layer, as in Keras."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from coalmine.simulation.models.model import Convolutional, Dropout, Masks, Model, Parameters, Recurrent, Start

PADDING = 0


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
    """The paper's CNN for 28 by 28 characters (`cnn_dropout`): 1,199,882 parameters with 10 classes, 1,206,590 with 62."""
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
    return Model(
        f"cnn-dropout-{classes}",
        shapes,
        logits,
        activations,
        dropouts=(Dropout((9216,), 0.25), Dropout((128,), 0.5)),
        structure=Convolutional(side=28, channels=(32, 64), hidden=128, classes=classes),
    )


def word_lstm(vocabulary: int = 10_000) -> Model:
    """The paper's next-word model (`stackoverflow_word`): 4,050,748 parameters with 10,000 words.

    Symbols are the words, padding, one out-of-vocabulary bucket, and the beginning and the end of a sentence.
    """
    return recurrent(f"word-lstm-{vocabulary}", Recurrent(vocabulary + 4, 96, (670,), (96, vocabulary + 4)), length=20)


def character_lstm() -> Model:
    """The next-character model for Shakespeare, with two LSTM layers: 820,522 parameters."""
    structure = Recurrent(90, 8, (256, 256), (90,))
    return recurrent("character-lstm", structure, length=80, kernel_start=_he_normal)


def recurrent(name: str, structure: Recurrent, *, length: int, kernel_start: "Start | None" = None) -> Model:
    """The model of this structure, for rows of `length` symbols."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embedding", (structure.symbols, structure.embedding))]
    starts: dict[str, Start] = {
        "embedding": lambda weight, generator: weight.uniform_(-0.05, 0.05, generator=generator)
    }
    widths = (structure.embedding, *structure.lstms)
    for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        shapes += [
            (f"lstm{number}.kernel", (4 * outputs, inputs)),
            (f"lstm{number}.recurrent", (4 * outputs, outputs)),
            (f"lstm{number}.bias", (4 * outputs,)),
        ]
        starts |= {f"lstm{number}.recurrent": _orthogonal, f"lstm{number}.bias": _open_forget_gate}
        if kernel_start is not None:
            starts[f"lstm{number}.kernel"] = kernel_start
    for number, (inputs, outputs) in enumerate(pairwise((widths[-1], *structure.dense)), start=1):
        shapes += [(f"dense{number}.weight", (outputs, inputs)), (f"dense{number}.bias", (outputs,))]

    def with_lstm(parameters: Parameters, symbols: Tensor, *, alone: bool) -> Tensor:
        hidden = functional.embedding(symbols.long(), parameters["embedding"])
        for number in range(1, len(structure.lstms) + 1):
            weights = tuple(parameters[f"lstm{number}.{part}"] for part in ("kernel", "recurrent", "bias"))
            hidden = _lstm_alone(hidden, *weights) if alone else _lstm(hidden, *weights)
        for number in range(1, len(structure.dense) + 1):
            hidden = functional.linear(hidden, parameters[f"dense{number}.weight"], parameters[f"dense{number}.bias"])
        return hidden

    def logits(parameters: Parameters, symbols: Tensor, masks: Masks) -> Tensor:
        return with_lstm(parameters, symbols, alone=False)

    def logits_alone(parameters: Parameters, symbols: Tensor, masks: Masks) -> Tensor:
        return with_lstm(parameters, symbols, alone=True)

    activations = length * (structure.embedding + 10 * sum(structure.lstms) + 3 * sum(structure.dense))
    return Model(
        name,
        tuple(shapes),
        logits,
        activations,
        structure=structure,
        ignored_label=PADDING,
        logits_alone=logits_alone,
        starts=starts,
    )


def _lstm(inputs: Tensor, kernel: Tensor, recurrent: Tensor, bias: Tensor) -> Tensor:
    """All hidden states of an LSTM that starts from zeros; gates in the order input, forget, cell, output."""
    gates = functional.linear(inputs, kernel, bias)
    states = []
    hidden = cell = inputs.new_zeros(inputs.shape[0], recurrent.shape[1])
    for position in range(inputs.shape[1]):
        input_gate, forget_gate, candidate, output_gate = (
            gates[:, position] + functional.linear(hidden, recurrent)
        ).chunk(4, dim=1)
        cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
        hidden = output_gate.sigmoid() * cell.tanh()
        states.append(hidden)
    return torch.stack(states, dim=1)


def _lstm_alone(inputs: Tensor, kernel: Tensor, recurrent: Tensor, bias: Tensor) -> Tensor:
    """The same with PyTorch's LSTM and a zero second bias; not on a GPU, where it needs contiguous weights."""
    if inputs.is_cuda:
        return _lstm(inputs, kernel, recurrent, bias)
    start = inputs.new_zeros(1, inputs.shape[0], recurrent.shape[1])
    weights = [kernel, recurrent, bias, torch.zeros_like(bias)]
    states: Tensor = torch.lstm(inputs, (start, start), weights, True, 1, 0.0, False, False, True)[0]
    return states


def _orthogonal(weight: Tensor, generator: torch.Generator) -> None:
    """Orthonormal columns: Keras' initialiser of recurrent weights."""
    normals = torch.randn(weight.shape, generator=generator)
    directions, triangle = torch.linalg.qr(normals)
    weight.copy_(directions * triangle.diagonal().sign())


def _open_forget_gate(bias: Tensor, generator: torch.Generator) -> None:
    """Zeros, but ones for the forget gate: Keras' initialiser of LSTM biases."""
    quarter = len(bias) // 4
    bias.zero_()[quarter : 2 * quarter] = 1.0


def _he_normal(weight: Tensor, generator: torch.Generator) -> None:
    """Normal numbers truncated at two stds, with variance 2 / inputs."""
    std = (2 / weight.shape[1]) ** 0.5 / 0.8796256610342398  # std before truncation, as in Keras
    torch.nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
