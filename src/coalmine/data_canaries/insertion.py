"""Adds records to a data set, whatever its kind."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import short_repr

TEXT_COLUMNS = ("input_ids", "labels")
Array = npt.NDArray[Any]


def inserted(dataset: Any, inputs: Array, labels: Array, columns: Any = None) -> Any:
    """The data set with these records at its end, in the form of its own rows."""
    names = _columns(columns, labels)
    if isinstance(dataset, Mapping) and not hasattr(dataset, "column_names"):
        parts = {name: _part(dataset, name) for name in names}
        return {**dataset, **_joined(parts, dict(zip(names, (inputs, labels), strict=True)))}
    if isinstance(dataset, tuple | list) and len(dataset) == 2 and all(hasattr(each, "shape") for each in dataset):
        joined = _joined(dict(enumerate(dataset)), {0: inputs, 1: labels})
        return [joined[0], joined[1]] if isinstance(dataset, list) else (joined[0], joined[1])
    if hasattr(dataset, "shape") and hasattr(dataset, "dtype"):
        return _joined({0: dataset}, {0: inputs})[0]
    if hasattr(dataset, "column_names"):
        return _in_hugging_face(dataset, inputs, labels, names)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not hasattr(dataset, "iloc"):
        return _in_torch(dataset, inputs, labels, names)
    raise TypeError(
        "dataset must be a torch or Hugging Face data set, an array, or a tuple or dict of arrays, got "
        f"{short_repr(type(dataset).__name__)}; wrap an iterable one into a data set with a length"
    )


def _columns(columns: Any, labels: Array) -> tuple[str, str]:
    if columns is not None:
        if not isinstance(columns, tuple | list) or len(columns) != 2:
            raise ValueError(f"columns must be the names of input and label, got {short_repr(columns)}")
        return str(columns[0]), str(columns[1])
    return TEXT_COLUMNS if labels.ndim == 2 else ("image", "label")


def _part(dataset: Mapping[str, Any], name: str) -> Any:
    if name not in dataset:
        raise ValueError(f"columns must name two of {', '.join(map(str, dataset))}, got {name!r}")
    return dataset[name]


def _joined(parts: Mapping[Any, Any], added: Mapping[Any, Array]) -> dict[Any, Any]:
    """Each array with its records at the end, in its own library and type."""
    joined: dict[Any, Any] = {}
    for name, array in parts.items():
        records = added[name]
        if tuple(array.shape[1:]) != records.shape[1:]:
            raise ValueError(
                f"canaries must have the shape of the data's rows, {tuple(array.shape[1:])}, got {records.shape[1:]}"
            )
        kind = type(array).__module__.split(".")[0]
        if kind == "torch":
            import torch

            joined[name] = torch.cat([array, torch.as_tensor(records).to(array)])
        elif kind in ("jax", "jaxlib"):
            import jax.numpy

            joined[name] = jax.numpy.concatenate([array, jax.numpy.asarray(records, array.dtype)])
        else:
            joined[name] = np.concatenate([array, records.astype(array.dtype)])
    return joined


def _in_hugging_face(dataset: Any, inputs: Array, labels: Array, names: tuple[str, str]) -> Any:
    if not set(names) <= set(dataset.column_names):
        raise ValueError(f"columns must name two of {', '.join(dataset.column_names)}, got {', '.join(names)}")
    from datasets import Dataset, concatenate_datasets

    rows = {name: list(array) for name, array in zip(names, (inputs, labels), strict=True)}
    for name in set(dataset.column_names) - set(names):
        if name != "attention_mask":
            raise ValueError(f"the data set has a column {name!r} that canaries lack: remove it before insert")
        rows[name] = [np.ones(len(row), np.int64) for row in inputs]
    return concatenate_datasets([dataset, Dataset.from_dict(rows, features=dataset.features)])


def _in_torch(dataset: Any, inputs: Array, labels: Array, names: tuple[str, str]) -> Any:
    from torch.utils.data import ConcatDataset

    from coalmine.data_canaries.rows import RecordRows

    return ConcatDataset([dataset, RecordRows(dataset[0], inputs, labels, names)]) if len(inputs) else dataset
