"""One gauge: a direct measurement of the noise over a run, with the limits of a correct run."""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import chdtri, gammaincinv

from coalmine.argument_checks import Floats
from coalmine.evidence.levels import GAUGE_LEVEL

LEVEL = GAUGE_LEVEL  # probability that one gauge fails in a correct run
LAYER = "layer "  # prefix of the names of gauges of single tensors
MOVED, GRADIENT, SIGNAL = "layers moved", "layers with a gradient", "signal by layer"  # gauges of the training itself
TRAINED = "layers trained"  # present only if no layer was trained
TRAINING = (MOVED, GRADIENT, SIGNAL, TRAINED)
MEANINGS = {
    "noise": "length off the canaries over that of the stated noise",
    "dilution": "length of the sum of all rounds over that of noise alone",
    "difference": "change from round to round over that of fresh noise",
    "residual": "length of the residual over that of the stated noise",
    "pooled residual": "length of the residuals of all rounds together over that of the stated noise",
    "repeat": "cosine of what is left in a round with the round before that is most like it",
    "rank": "mean squared cosine between two rounds over that of noise in all dimensions",
    "repeat of any": "cosine of what is left in a round with the sum of all rounds before",
    "others": "factor by which `others` must be multiplied to be what the round summed",
    "shape": "fourth moment of the noise over its squared variance, 3 for a Gaussian",
    "distribution": "chi-squared distance of the noise's histogram from a Gaussian, per cell",
    "tails": "number of large noise values over that of a Gaussian",
    "bare coordinates": "coordinates with next to no noise, over the number that chance gives",
    "grid": "how far the noise lies on a grid of values, 0 to 1",
    "spectrum": "largest correlation of the noise with itself at any distance, in standard deviations",
    "noise follows others": "slope of the noise's variance against the size of the others",
    "noise follows canaries": "slope of the noise's variance against the size of the canaries",
    "neighbours": "correlation of the noise in neighbouring coordinates",
    "shared draws": "correlation of the noise between two layers",
    "repeated values": "share of the largest noise values that occur twice",
    "parts of blocks": "length of the residual in a part of a block over that of the stated noise",
    "shared blocks": "correlation of the noise between two blocks, in one round or in two that follow each other",
    "coordinates": "length of one coordinate's noise over the rounds, over that of its layer's noise",
    "weak coordinates": "number of coordinates with little noise over the rounds, over the number that chance gives",
    "rounding": "share of the residual's variance that comes from rounding the release",
    MOVED: "share of the layers whose weights differ from those before training",
    GRADIENT: "share of the layers that received a gradient in any round",
    TRAINED: "share of the layers that received a gradient and moved",
    SIGNAL: "standard deviations by which a layer's updates differ from noise alone",
    "canaries in the release": "share of the canaries' contribution to the residual that is in the release too",
    "shifted repeat": "share of a round's largest noise values that stand in another round at one common distance",
}


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """One gauge over the run.

    `status` is "ok", "low" (evidence of less noise than stated) or "warning" (a fault that does not prove less noise).
    Both prevent a PASS, except for gauges of training (see `bars_pass`). `smallest` and `largest` are the extremes over
    rounds or layers, and `limits` are those of a correct run;
    `flagged` rounds lie outside. If noise is missing, `noise_left` is an upper confidence limit on the remaining noise as a
    share of the stated noise; None if it is unknown.
    """

    name: str
    smallest: float
    largest: float
    limits: tuple[float, float]
    flagged: tuple[int, ...] = ()
    status: str = "ok"
    noise_left: float | None = None
    values: Floats = field(repr=False, compare=False, default_factory=lambda: np.zeros(0))

    @property
    def meaning(self) -> str:
        """A phrase for the quantity that the gauge measures."""
        return meaning_of(self.name)

    @property
    def bars_pass(self) -> bool:
        """Whether there can be no PASS: gauges of training bar one only if no layer at all moved, or had a gradient."""
        if self.name in TRAINING:
            return self.status != "ok" and self.name != SIGNAL and self.largest == 0
        return self.status != "ok"

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


def meaning_of(name: str) -> str:
    """A phrase for the quantity that a gauge measures."""
    if name.startswith(LAYER):
        return "length of the residual in this layer over that of the stated noise"
    return MEANINGS.get(name, name)


def deciding_reading(
    values: Floats, limits: tuple[float, float], pooled: float, pooled_limits: tuple[float, float]
) -> tuple[float, float, tuple[float, float]]:
    """Smallest and largest reading with their limits: those of single rounds, or of all together if only these are outside.

    So the reading of a gauge that fails lies outside the limits beside it, whichever of its two tests failed.
    """
    smallest, largest = float(values.min()), float(values.max())
    inside = limits[0] <= smallest and largest <= limits[1]
    if inside and not pooled_limits[0] <= pooled <= pooled_limits[1]:
        return pooled, pooled, pooled_limits
    return smallest, largest, limits


@lru_cache(maxsize=64)
def ratio_quantile(probability: float, dof: float) -> float:
    """The quantile of a noise vector's norm over its root mean square."""
    if probability > 0.5:
        return math.sqrt(float(chdtri(dof, 1 - probability)) / dof)
    return math.sqrt(2 * float(gammaincinv(dof / 2, probability)) / dof)
