"""The models. Each has exactly the parameters of its original."""

import re

from coalmine.simulation.models.architectures import character_lstm, cnn_dropout, mlp, recurrent, word_lstm
from coalmine.simulation.models.model import (
    Convolutional,
    Dropout,
    Masks,
    Model,
    Parameters,
    Recurrent,
    accuracy,
)

__all__ = [
    "Convolutional",
    "Dropout",
    "Masks",
    "Model",
    "Parameters",
    "Recurrent",
    "accuracy",
    "character_lstm",
    "cnn_dropout",
    "mlp",
    "model_by_name",
    "recurrent",
    "word_lstm",
]


def model_by_name(name: str) -> Model:
    """The model of this name; the name determines it completely."""
    if match := re.fullmatch(r"mlp((?:-[1-9]\d*){2,})", name):
        return mlp(*map(int, match[1].split("-")[1:]))
    if match := re.fullmatch(r"(cnn-dropout|word-lstm)-([1-9]\d*)", name):
        return {"cnn-dropout": cnn_dropout, "word-lstm": word_lstm}[match[1]](int(match[2]))
    if name == "character-lstm":
        return character_lstm()
    raise ValueError(f"model must be like mlp-64-128-10, cnn-dropout-10 or word-lstm-10000, got {name!r}")
