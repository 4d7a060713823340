"""The stated noise of the rounds: a canary's contribution to a round, and the noise multiplier that follows."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from coalmine.argument_checks import Floats
from coalmine.evidence.views import RoundViews, View
from coalmine.measure.settings import Settings

LEVEL = 1e-3  # probability that the measured norm of a canary lies outside its limits
CREDIBLE = (0.8, 1.25)  # range of a canary's measured norm over the declared one; far outside, the units differ


@dataclass(frozen=True, kw_only=True)
class RoundScores:
    """The canaries present in each round: their number, their mean score, and the round's units. Arrays of equal length."""

    numbers: Floats
    counts: Floats
    means: Floats
    scales: Floats
    dofs: Floats
    clip_norms: Floats
    declared: bool  # whether every round declared its clip norm
    residual: bool  # whether `others` was subtracted

    @property
    def length(self) -> tuple[float, float]:
        """A canary's measured norm over the clip norm, and its standard error."""
        weights = self.counts * self.clip_norms / self.scales**2
        information = float(weights @ self.clip_norms)
        return float(weights @ (self.means * self.scales)) / information, 1 / math.sqrt(information)

    @property
    def credible(self) -> bool:
        """Whether the declared clip norm is in the units of the model delta, judging by the measured norm."""
        length, error = self.length
        return self.declared and (CREDIBLE[0] <= length <= CREDIBLE[1] or abs(length - 1) < 4 * error)


class StatedReader:
    """Takes one round after another, and returns the rounds' scores and stated noise at the end.

    Correlated noise is not whitened here: a whitened canary would be in the rows of many rounds.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._residual: list[_RoundScore] = []
        self._plain: list[_RoundScore] = []
        self._stated: list[tuple[int, float | None, float]] = []  # number, noise, clip norm
        self._declared = True

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        item = look.item
        self._stated.append((item.number, item.noise_std, item.clip_norm))
        if item.present.size:
            self._declared &= item.clip_declared
        for view, scores in ((look.residual, self._residual), (look.plain, self._plain)):
            if view is not None and view.present.size:
                scores.append(_RoundScore.of(view))

    @property
    def clip_norms(self) -> list[float]:
        """The clip norm of each round, in order."""
        return [clip for _, _, clip in self._stated]

    def round_scores(self) -> RoundScores | None:
        """The rounds with canaries, without all other updates if those are known; None if there are none."""
        scores = self._residual or self._plain
        if not scores:
            return None
        columns = (np.array(column) for column in zip(*scores, strict=True))
        names = _RoundScore._fields
        return RoundScores(
            **dict(zip(names, columns, strict=True)), declared=self._declared, residual=bool(self._residual)
        )

    def stated_noise(self) -> "StatedNoise | None":
        """The stated noise multipliers; None if a round states no noise, or if a canary's contribution is unknown."""
        return _stated_noise(self._stated, self._settings, self.round_scores())


class _RoundScore(NamedTuple):
    """One round's entry of `RoundScores`."""

    numbers: int
    counts: float
    means: float
    scales: float
    dofs: float
    clip_norms: float

    @classmethod
    def of(cls, view: View) -> "_RoundScore":
        mean = float(view.observed[view.present].mean())
        return cls(view.number, float(view.present.size), mean, view.scale, view.dof, view.clip_norm)


@dataclass(frozen=True, kw_only=True)
class StatedNoise:
    """The stated noise multiplier of each round, with canaries or not: its noise over one client's contribution.

    `multipliers` are the best values for the rounds in `numbers`; the true ones lie between `low` and `high` times them.
    Both are 1 if the clip norm was declared. They differ if a canary's norm had to be measured.
    """

    numbers: npt.NDArray[np.int64]
    multipliers: Floats
    low: float
    high: float

    @property
    def usual(self) -> float:
        return float(np.median(self.multipliers))

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def least(self, numbers: tuple[int, ...] = ()) -> float:
        """The smallest multiplier of these rounds, or of all rounds by default."""
        chosen = self.multipliers[np.isin(self.numbers, numbers)] if numbers else self.multipliers
        return float(chosen.min(initial=math.inf))

    def weakest(self, rounds: int) -> float:
        """The noise multiplier of a client who takes part in the `rounds` rounds with the least noise."""
        smallest = np.sort(self.multipliers)[: max(rounds, 1)]
        return 1 / math.sqrt(float(np.mean(smallest**-2.0)))


def _stated_noise(
    observed: list[tuple[int, float | None, float]], settings: Settings, rounds: RoundScores | None
) -> StatedNoise | None:
    if rounds is None or not all(noise for _, noise, _ in observed):
        return None
    spreads = [1.0 if settings.noise is None else settings.noise.std(number) for number, _, _ in observed]
    numbers = np.array([number for number, _, _ in observed])
    multipliers = np.array([(noise or 0.0) / clip for _, noise, clip in observed]) / np.array(spreads)
    if rounds.credible:
        return StatedNoise(numbers=numbers, multipliers=multipliers, low=1.0, high=1.0)
    length, error = rounds.length
    margin = -float(ndtri(LEVEL / 2)) * error
    if length <= 0:
        return None
    high = length / (length - margin) if length > margin else math.inf
    return StatedNoise(numbers=numbers, multipliers=multipliers / length, low=length / (length + margin), high=high)
