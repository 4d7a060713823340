"""The folders for data and for the cache."""

import os
from pathlib import Path


def data_folder(named: Path | None = None) -> Path:
    """The folder that holds a folder for each data set: the one named, COALMINE_DATA_DIR, or the user's own."""
    if named is not None:
        return named
    if from_environment := os.environ.get("COALMINE_DATA_DIR"):
        return Path(from_environment)
    return _home("XDG_DATA_HOME", ".local/share")


def cache_folder() -> Path:
    """The folder for arrays computed from data, which can be computed again: COALMINE_CACHE_DIR, or the user's own."""
    if from_environment := os.environ.get("COALMINE_CACHE_DIR"):
        return Path(from_environment)
    return _home("XDG_CACHE_HOME", ".cache")


def _home(variable: str, default: str) -> Path:
    if named := os.environ.get(variable):
        return Path(named) / "coalmine"
    try:
        return Path.home() / default / "coalmine"
    except RuntimeError:  # a container with a user that it does not know, and without HOME
        return Path("/nonexistent") / default / "coalmine"
