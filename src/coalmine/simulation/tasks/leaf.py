"""LEAF's json files: {"users": […], "num_samples": […], "user_data": {user: {"x": [[784 numbers]], "y": [class]}}}."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.float32]
Classes = npt.NDArray[np.int64]


def read_leaf(paths: Sequence[Path]) -> Iterator[tuple[str, Pixels, Classes]]:
    """Each user's pictures, rows of numbers, and their classes; file after file, nobody twice."""
    seen: set[str] = set()
    for path in paths:
        users, data = _content(path)
        for user in users:
            if user in seen:
                raise ValueError(f"{path} has user {user}, who was in a file before")
            seen.add(user)
            yield user, *_examples(path, user, data)


def _content(path: Path) -> tuple[list[str], dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no whole JSON file ({error})") from None
    users = content.get("users") if isinstance(content, dict) else None
    data = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, list) or not isinstance(data, dict) or not all(user in data for user in users):
        raise ValueError(f"{path} must have users, and user_data for each of them, as LEAF writes it")
    return [str(user) for user in users], data


def _examples(path: Path, user: str, data: dict[str, Any]) -> tuple[Pixels, Classes]:
    try:
        pixels = np.array(data[user]["x"], dtype=np.float32)
        classes = np.array(data[user]["y"], dtype=np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: user {user} must have rows of numbers x and classes y ({error})") from None
    if len(pixels) != len(classes):
        raise ValueError(f"{path}: user {user} must have as many x as y, got {len(pixels)} and {len(classes)}")
    return pixels, classes
