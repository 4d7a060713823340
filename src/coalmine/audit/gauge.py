"""One gauge: a direct measurement of the noise over a run, with the limits that an honest run keeps to."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import chdtri, gammaincinv

from coalmine.checks import Floats

LEVEL = 1e-4  # false alarm of one gauge over the whole run


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """One gauge over the run.

    `status` is "ok", "low" (evidence of less noise than stated) or "warning" (something is wrong that does not prove less
    noise); both bar a PASS. `smallest` and `largest` are the extremes over rounds, `limits` what an honest run keeps to;
    `flagged` rounds lie outside. Where noise is missing, `noise_left` is an upper confidence limit of what is left for the
    attacker to overcome, over the stated noise; None where that cannot be said.
    """

    name: str
    meaning: str
    smallest: float
    largest: float
    limits: tuple[float, float]
    flagged: tuple[int, ...] = ()
    status: str = "ok"
    noise_left: float | None = None
    values: Floats = field(repr=False, compare=False, default_factory=lambda: np.zeros(0))

    def to_dict(self) -> dict[str, Any]:
        return {
            "meaning": self.meaning,
            "smallest": self.smallest,
            "largest": self.largest,
            "limits": list(self.limits),
            "flagged": list(self.flagged),
            "status": self.status,
            "noise_left": self.noise_left,
        }


def ratio_quantile(probability: float, dof: float) -> float:
    """The quantile of a noise vector's length over its expected length."""
    if probability > 0.5:
        return math.sqrt(float(chdtri(dof, 1 - probability)) / dof)
    return math.sqrt(2 * float(gammaincinv(dof / 2, probability)) / dof)
