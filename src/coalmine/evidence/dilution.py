"""Is the canaries' part of a residual in the release too?

known-others scores the residual, which is the release less `others`; known-round scores the release itself. Along a canary
the difference of the two is that of `others`. Real updates know nothing of a canary that was never presented before, so
along it they have mean 0, and the standard deviation that unobserved canaries show. They dilute known-round and no more.
If `others` was computed from canaries that never joined the sum, it holds minus a canary: known-others scores well, and
known-round nothing.

After its first presentation, training may pull a canary back, so `others` has a mean. Canaries that were presented before
and are not in the round then show that mean, if chance decides who is in a round.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from coalmine.argument_checks import Floats
from coalmine.evidence.levels import GAUGE_LEVEL
from coalmine.evidence.views import RoundViews
from coalmine.measure.settings import Settings

MATERIAL = 0.05  # share of the canaries' contribution below which a difference does not matter
SMALLEST = 1e-3  # of the noise: smaller products with `others` are rounding errors


class CanaryShare(NamedTuple):
    """The share of the canaries' contribution to the residuals that is in the releases, and its standard error."""

    share: float
    error: float
    presentations: int
    dof: float

    def limit(self, level: float = GAUGE_LEVEL) -> float:
        """The distance from 1 that matters, and that a correct run exceeds with a probability of at most `level`."""
        return max(self.error * -float(stdtrit(self.dof, level / 2)), MATERIAL)

    def is_off(self, level: float = GAUGE_LEVEL) -> bool:
        """Whether canaries are missing from the releases, or in them more than once."""
        return abs(self.share - 1) > self.limit(level)


class DilutionReader:
    """Takes one round after another, and compares the canaries in the release with those in the residual."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._presented = np.zeros(settings.canaries, dtype=bool)
        self._first, self._repeated = _Sums(), _Sums()

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        before = self._presented.copy()
        present = np.asarray(look.item.present, dtype=np.int64)
        self._presented[present] = True
        plain, residual = look.plain, look.residual
        if plain is None or residual is None or self._settings.kind != "rotated" or self._settings.unobserved < 2:
            return
        others = plain.observed * plain.scale - residual.observed * residual.scale
        absent = plain.unobserved * plain.scale - residual.unobserved * residual.scale
        std = max(math.sqrt(float(np.mean(absent**2))), SMALLEST * residual.scale)
        along = residual.observed * residual.scale
        clip = residual.clip_norm
        first, repeated = present[~before[present]], present[before[present]]
        self._first.add(others[first], along[first], 0.0, std, 0.0, clip)
        control = before.copy()
        control[present] = False
        count = int(control.sum())
        if count:
            self._repeated.add(others[repeated], along[repeated], float(others[control].mean()), std, 1 / count, clip)

    @property
    def first(self) -> CanaryShare | None:
        """The share at each canary's first presentation; None if nothing is known."""
        return self._first.share(self._settings)

    @property
    def repeated(self) -> CanaryShare | None:
        """The share at later presentations. Valid if chance decides in each round which canaries are in it."""
        return self._repeated.share(self._settings)


class _Sums:
    """Σ w·o and Σ w·r over presentations: o is `others` along a canary, r the residual; w weighs rounds by precision."""

    def __init__(self) -> None:
        self._others = self._residual = self._variance = 0.0
        self._count = 0

    def add(self, others: Floats, residual: Floats, mean: float, std: float, control: float, clip: float) -> None:
        """A round's presentations. `mean` is that of the canaries for comparison, `control` its variance over std²."""
        count = others.size
        if not count:
            return
        variance = std * std * (1 + count * control)  # of a single value's share of the sum
        weight = clip / variance
        self._others += weight * (float(others.sum()) - count * mean)
        self._residual += weight * float(residual.sum())
        self._variance += weight * weight * count * variance
        self._count += count

    def share(self, settings: Settings) -> CanaryShare | None:
        if self._residual <= 0:
            return None  # no canary was detected in the residual either
        error = math.sqrt(self._variance) / self._residual
        return CanaryShare(1 + self._others / self._residual, error, self._count, settings.unobserved_dof)
