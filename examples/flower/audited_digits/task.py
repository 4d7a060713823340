"""A small network for the digits that come with scikit-learn, in numpy: 9,610 parameters."""

from functools import cache

import numpy as np
from flwr.app import Array, ArrayRecord
from sklearn.datasets import load_digits

TEST = 297  # examples held out for testing


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 64 pixels, and their labels."""
    bunch = load_digits()
    return (bunch.data / 16).astype(np.float32), bunch.target


def partition(index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The training examples of one client."""
    images, labels = digits()
    chosen = np.arange(len(labels) - TEST)[index % count :: count]
    return images[chosen], labels[chosen]


def initial_model() -> ArrayRecord:
    """The model before training."""
    rng = np.random.default_rng(1)
    shapes = {"hidden.weight": (64, 128), "hidden.bias": (128,), "out.weight": (128, 10), "out.bias": (10,)}
    values = {name: rng.normal(size=shape, scale=0.1 * (len(shape) == 2)) for name, shape in shapes.items()}
    return ArrayRecord({name: Array(value.astype(np.float32)) for name, value in values.items()})


def forward(model: list[np.ndarray], images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden layer and class probabilities."""
    hidden = np.maximum(images @ model[0] + model[1], 0)
    logits = hidden @ model[2] + model[3]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def train(record: ArrayRecord, data: tuple[np.ndarray, np.ndarray], epochs: int, rate: float) -> ArrayRecord:
    """The model after some epochs on a client's data, in batches of 16."""
    model = [array.numpy().copy() for array in record.values()]
    images, labels = data
    for start in list(range(0, len(labels), 16)) * epochs:
        batch, target = images[start : start + 16], labels[start : start + 16]
        hidden, error = forward(model, batch)
        error[np.arange(len(target)), target] -= 1
        back = (error @ model[2].T) * (hidden > 0)
        gradients = [batch.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        for values, gradient in zip(model, gradients, strict=True):
            values -= rate / len(target) * gradient
    return ArrayRecord({name: Array(values) for name, values in zip(record, model, strict=True)})


def accuracy(record: ArrayRecord) -> float:
    """Accuracy on the held-out examples."""
    images, labels = digits()
    _, odds = forward([array.numpy() for array in record.values()], images[-TEST:])
    return float((odds.argmax(axis=1) == labels[-TEST:]).mean())
