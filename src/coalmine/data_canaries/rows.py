"""Records as rows of a torch data set, in the form of its own first row."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from coalmine.argument_checks import short_repr


class RecordRows(Dataset[Any]):
    """Rows like `example`: a pair of input and label, or a dict with these two names.

    Text in rows that are pairs is input and next tokens; in dicts both hold all tokens, as in Hugging Face.
    """

    def __init__(
        self, example: Any, inputs: npt.NDArray[Any], labels: npt.NDArray[Any], names: tuple[str, str]
    ) -> None:
        self._names, self._inputs, self._labels = names, inputs, labels
        pairs = isinstance(example, tuple | list) and len(example) == 2
        if not pairs and not (isinstance(example, Mapping) and set(names) <= set(example)):
            raise TypeError(
                f"rows must be pairs of input and label, or dicts with {' and '.join(names)}, got {short_repr(example)}"
            )
        self._example = example
        if pairs and labels.ndim == 2:
            self._inputs, self._labels = inputs[:, :-1], labels[:, 1:]
        if len(self._inputs):
            self[0]  # reject records of another shape now

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Any:
        pair = (self._inputs[index], self._labels[index])
        if isinstance(self._example, Mapping):
            values = {name: _like(value, self._example[name]) for name, value in zip(self._names, pair, strict=True)}
            if "attention_mask" in self._example:
                values["attention_mask"] = _like(np.ones(len(pair[0]), np.int64), self._example["attention_mask"])
            return values
        return type(self._example)(_like(value, own) for value, own in zip(pair, self._example, strict=True))


def _like(value: Any, own: Any) -> Any:
    """A value in the type of the data set's own."""
    if isinstance(own, torch.Tensor):
        if np.ndim(value) != own.ndim or (own.ndim > 1 and tuple(np.shape(value)) != tuple(own.shape)):
            raise ValueError(
                f"canaries must have the shape of the data's rows, {tuple(own.shape)}, got {np.shape(value)}"
            )
        return torch.as_tensor(np.asarray(value)).to(own.dtype)
    if isinstance(own, np.ndarray):
        return np.asarray(value, dtype=own.dtype)
    return np.asarray(value).tolist() if isinstance(own, list) else type(own)(np.asarray(value).item())
