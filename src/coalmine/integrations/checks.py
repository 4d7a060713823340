"""Checks that integrations make before the first round."""

from pathlib import Path

from coalmine.audit.audit import Audit
from coalmine.checks import nonnegative_array, one_number, positive_array


def positive(name: str, value: float) -> float:
    """`value` as a float, refused unless it is finite and above 0."""
    return float(positive_array(name, one_number(name, value)))


def nonnegative(name: str, value: float) -> float:
    """`value` as a float, refused unless it is finite and at least 0."""
    return float(nonnegative_array(name, one_number(name, value)))


def check_unfinished(audit: Audit) -> None:
    """Refuse an audit that has observed its final model: its next round would be an error in the middle of training."""
    if audit.log.final is None:
        return
    if audit.directory is None:
        raise ValueError("this audit has observed its final model: make a new one, or rewind_to an earlier round")
    raise ValueError(f"{audit.directory.path} holds a finished audit: name another directory, or remove it")


def check_no_result(directory: Path | str) -> None:
    """Refuse a directory that holds a result, where the integration observes no final model."""
    if (Path(directory) / "result.json").exists():
        raise ValueError(f"{directory} holds a finished audit: name another directory, or remove it")
