"""Checkpoints of a server: the model after a round, the strategy's numbers, what was seen of clients; two are kept."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord

from coalmine.integrations.flower.arrays import DAMAGED
from coalmine.integrations.flower.warning_log import logger
from coalmine.log.checkpoints import load_newest
from coalmine.log.files import check_archive, write_atomically

NAME = "checkpoint.npz"
PREVIOUS = "checkpoint.previous.npz"


class Checkpoint(NamedTuple):
    """The state from which a server resumes."""

    round_number: int
    model: ArrayRecord
    state: dict[str, float]
    seen: dict[str, Any]  # arrays of `Exposures`; empty in a checkpoint of an earlier version


def save_checkpoint(
    directory: Path,
    round_number: int,
    model: Mapping[str, Array],
    state: Mapping[str, float],
    seen: Mapping[str, Any],
) -> None:
    """Save the model after a round atomically. The existing checkpoint becomes the previous one."""
    numbers = {"round": np.int64(round_number)} | {f"state/{name}": np.float64(value) for name, value in state.items()}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:  # like np.savez, but Flower's arrays are already in numpy's format
        for name, array in model.items():
            archive.writestr(f"model/{name}.npy", array.data)
        for name, value in (numbers | {f"seen/{name}": rows for name, rows in seen.items()}).items():
            archive.writestr(f"{name}.npy", Array(np.asarray(value)).data)
    write_atomically(directory / NAME, content.getvalue(), keep=directory / PREVIOUS)


def load_checkpoint(directory: Path, *, recorded_rounds: int | None = None) -> Checkpoint | None:
    """The newest complete checkpoint that is not ahead of the recorded rounds, or None.

    Raises a ValueError if none is usable and one is damaged.
    """
    return load_newest(directory / NAME, directory / PREVIOUS, _read, logger, recorded_rounds=recorded_rounds)


def _read(path: Path) -> Checkpoint:
    try:
        with path.open("rb") as file:
            check_archive(str(path), file, most=path.stat().st_size)  # nothing in it is compressed
        with (
            path.open("rb") as file,
            np.load(file, allow_pickle=False) as saved,
        ):  # numpy would leave a damaged file open
            arrays: dict[str, Any] = dict(saved)
        model = {name.removeprefix("model/"): Array(arrays[name]) for name in arrays if name.startswith("model/")}
        state = {name.removeprefix("state/"): float(arrays[name]) for name in arrays if name.startswith("state/")}
        seen = {name.removeprefix("seen/"): arrays[name] for name in arrays if name.startswith("seen/")}
        return Checkpoint(int(arrays["round"]), ArrayRecord(model), state, seen)
    except DAMAGED as error:
        raise ValueError(f"{path} is not a checkpoint ({error}); remove it to train from round 1") from None
