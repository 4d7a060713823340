"""The folders for data and for the cache."""

import os
from pathlib import Path


def data_folder(named: Path | None = None) -> Path:
    """The folder that holds a folder for each data set: `named`, COALMINE_DATA_DIR, or the user's own."""
    if named is not None:
        return named
    if from_environment := os.environ.get("COALMINE_DATA_DIR"):
        return Path(from_environment)
    return _home("XDG_DATA_HOME", ".local/share", "COALMINE_DATA_DIR")


def cache_folder() -> Path:
    """The folder for arrays computed from data, which can be computed again: COALMINE_CACHE_DIR, or the user's own."""
    if from_environment := os.environ.get("COALMINE_CACHE_DIR"):
        return Path(from_environment)
    return _home("XDG_CACHE_HOME", ".cache", "COALMINE_CACHE_DIR")


def _home(variable: str, default: str, own: str) -> Path:
    if named := os.environ.get(variable):
        return Path(named) / "coalmine"
    try:
        return Path.home() / default / "coalmine"
    except RuntimeError:  # a container with an unknown user and without HOME
        raise ValueError(f"this user has no home folder: set {own} to a folder") from None
