"""What a file of this study states about a project, and how a project's modules are imported."""

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from coalmine import mechanism_epsilon

HOME = Path(__file__).parents[1] / "out" / "field"
DELTA = 1e-5
EPSILON = float(mechanism_epsilon(1.0, delta=DELTA))  # of noise multiplier 1, for a release that one record enters


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim. `make` builds the release with this share of the noise; `options` are those of `check_private`.

    `expected` is the verdict that is right, and `why` we believe so. "not PASS" leaves open which of the others it is.
    """

    name: str
    make: Callable[[float], Callable[..., Any]]
    expected: str
    why: str
    epsilon: float = EPSILON
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Project:
    """A package with its pinned version, the place where noise is added, and the claim in its own words."""

    packages: tuple[str, ...]
    base: tuple[str, ...] = ()  # packages that are installed with all that they require
    where: str
    claim: str
    checks: tuple[Check, ...]


def bare(*names: str) -> None:
    """Let these packages be imported without running their __init__, which would need everything they require."""
    for name in names:
        paths = [str(Path(folder, *name.split("."))) for folder in sys.path if Path(folder, *name.split(".")).is_dir()]
        module = types.ModuleType(name)
        module.__path__ = paths
        sys.modules[name] = module


def mocked(*names: str) -> None:
    """Stand-ins for modules that the code under test imports and does not use here."""
    for name in names:
        sys.modules[name] = MagicMock(name=name)


def part(module: str, name: str) -> Any:
    """A name of a module, imported where it is used: the study reads every file without its packages."""
    return getattr(importlib.import_module(module), name)
