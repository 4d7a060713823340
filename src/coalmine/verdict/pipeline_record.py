"""What a trainer knows of its own pipeline: the entry `pipeline` of result.json, from which a statement is filled in."""

import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from coalmine.estimators.amplification import UNAMPLIFIED
from coalmine.version import __version__

CLOSED_FORM = "closed form of the Gaussian mechanism, by coalmine"
ACCOUNTING_PACKAGES = ("dp-accounting", "PLD_accounting", "opacus")
NUMBERS = ("clip_norm",)
WORDS = {
    "unit": ("client", "example"),
    "trust_model": ("central", "local", "distributed"),
    "clipping": ("fixed", "adaptive"),
}


@dataclass(frozen=True, kw_only=True)
class PipelineRecord:
    """Facts of a pipeline that its trainer knows; None where it does not.

    `unit` is what one clip bounds: "client" or "example". `trust_model` is "central" where one party sees the clipped
    updates before noise is added. `accountant` is the one that computed the claimed epsilon. `clipping` is "fixed" or
    "adaptive"; an adaptive clip starts at `clip_norm`.
    """

    library: str | None = None
    library_version: str | None = None
    coalmine_version: str | None = None
    unit: str | None = None
    trust_model: str | None = None
    clip_norm: float | None = None
    clipping: str | None = None
    precision: str | None = None
    generator: str | None = None
    accountant: str | None = None
    accountant_version: str | None = None
    also_released: str | None = None
    pretraining: str | None = None
    evaluation: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The facts that are known, for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def read(cls, values: Any) -> "PipelineRecord":
        """The entry of a result.json; a fact of the wrong type, or of an unknown name, is left out."""
        if not isinstance(values, Mapping):
            return cls()
        known = {}
        for part in fields(cls):
            value = values.get(part.name)
            if part.name in NUMBERS:
                fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            else:
                fits = isinstance(value, str) and bool(value.strip()) and value in WORDS.get(part.name, (value,))
            if fits:
                known[part.name] = value
        return cls(**known)


def of_library(distribution: str, **facts: Any) -> PipelineRecord:
    """The record of a pipeline of this installed distribution, with its version and coalmine's."""
    version = __version__ if distribution == "coalmine" else installed_version(distribution)
    return PipelineRecord(library=distribution, library_version=version, coalmine_version=__version__, **facts)


def accountant_version(accountant: str) -> str | None:
    """The installed version of the package that an accountant's name begins with; coalmine's for its own."""
    if accountant in (CLOSED_FORM, UNAMPLIFIED):
        return __version__
    name = next((package for package in ACCOUNTING_PACKAGES if accountant.startswith(package)), None)
    return None if name is None else installed_version(name)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
