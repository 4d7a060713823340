"""The global model on disk, so that a restarted ServerApp goes on."""

import io
import tokenize
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from coalmine.integrations.flower.layout import Row
from coalmine.storage.files import write_atomically

NAME = "checkpoint.npz"
# what numpy and zipfile raise over a file that is cut short, changed or not theirs
DAMAGED = (ValueError, OSError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, tokenize.TokenError)


def save_checkpoint(directory: Path, round_number: int, model: Mapping[str, Array], state: Mapping[str, float]) -> None:
    """The model after a round and a few numbers of the strategy, whole or not at all."""
    numbers = {"round": np.int64(round_number)} | {f"state/{name}": np.float64(value) for name, value in state.items()}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:  # as np.savez would, but Flower has the arrays in its format already
        for name, array in model.items():
            archive.writestr(f"model/{name}.npy", array.data)
        for name, value in numbers.items():
            archive.writestr(f"{name}.npy", Array(np.asarray(value)).data)
    write_atomically(directory / NAME, content.getvalue())


def load_checkpoint(directory: Path) -> tuple[int, ArrayRecord, dict[str, float]] | None:
    """Round, model and the strategy's numbers, or None where none was saved."""
    path = directory / NAME
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:  # numpy leaves a damaged one open
            found: dict[str, Any] = dict(saved)
        model = {name.removeprefix("model/"): Array(found[name]) for name in found if name.startswith("model/")}
        state = {name.removeprefix("state/"): float(found[name]) for name in found if name.startswith("state/")}
        return int(found["round"]), ArrayRecord(model), state
    except DAMAGED as error:
        raise ValueError(f"{path} is no checkpoint ({error}); remove it to train from round 1") from None


def save_row(path: Path, row: Any) -> None:
    """One .npy row, as `coalmine verify --model` reads it."""
    content = io.BytesIO()
    np.save(content, row, allow_pickle=False)
    write_atomically(path, content.getvalue())


def load_row(path: Path, like: Row) -> Row:
    """The inverse, refused unless the row is as long as `like`, whose kind it takes."""
    try:
        row = np.asarray(np.load(path, allow_pickle=False), dtype=like.dtype)
    except DAMAGED as error:
        raise ValueError(f"{path} is no model ({error}); restore it from a copy, or name another directory") from None
    if row.shape != like.shape:
        raise ValueError(
            f"{path} must be a model of {like.size} numbers, got shape {row.shape}; restore it, or name another directory"
        )
    return row
