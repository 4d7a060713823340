"""The noise estimated from the canaries' scores: β = 1/z in score = β√R + noise, over all canaries."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri, fdtri, gammaln, nctdtr, ndtr

from coalmine.evidence.ladder import Scores

MANY = 10_000  # dof from which on the test takes the scale as known
FAR = 1_000.0  # standard deviations from 0 beyond which the noncentral t is practically normal, and slow
EVEN_LEVEL = 1e-3  # level of the test that all canaries contribute equally


@dataclass(frozen=True)
class NoiseSignal:
    """β in score = β√R + noise over all canaries, ΣR, and the directions from which the scores' scale is estimated.

    `dof` counts them over all rounds, `round_dof` in one round. `mean_square` is the mean of (β√R)².
    """

    beta: float
    weight: float
    dof: float
    round_dof: float
    mean_square: float

    @classmethod
    def of(cls, groups: list[Scores]) -> "NoiseSignal":
        """The pooled signal of all groups; R is ‖Cu‖² under correlated noise."""
        weight = float(sum(s.observed.size * s.exposure for s in groups))
        beta = sum(math.sqrt(s.exposure) * float(s.observed.sum()) for s in groups) / weight
        count = sum(s.observed.size for s in groups)
        dof, round_dof = min(s.null_dof for s in groups), min(s.round_dof for s in groups)
        return cls(beta, weight, dof, round_dof, beta * beta * weight / count)

    def p_value(self, claimed: float) -> float:
        """The probability of a β as large under the claim: noncentral t with `dof` degrees of freedom; normal for many.

        In a small model a round's scale is estimated from few directions. Its scores are then too large on average and
        spread more, which the two factors correct.
        """
        if self.dof > MANY and self.round_dof > MANY:
            return self._normal_p_value(claimed, 1.0, 1.0)
        dof = min(self.dof, 1e7)
        bias = _mean_factor(dof) / _mean_factor(self.round_dof)
        spread = (self.round_dof / max(self.round_dof - 2, 0.5)) / (dof / max(dof - 2, 0.5))
        root = math.sqrt(self.weight / (spread * bias * bias))
        if claimed * root > FAR:
            return self._normal_p_value(claimed, bias, spread)
        p_value = float(1 - nctdtr(dof, claimed * root, self.beta * bias * root))
        # far in the tail the series does not converge
        return self._normal_p_value(claimed, bias, spread) if math.isnan(p_value) else p_value

    def _normal_p_value(self, claimed: float, bias: float, spread: float) -> float:
        error = math.sqrt(spread * bias * bias / self.weight + claimed * claimed / (2 * self.dof))
        return float(ndtr(-(self.beta * bias - claimed) / error))

    def interval(self, confidence: float) -> tuple[float, float]:
        """The confidence interval of 1/z, at least 0."""
        tail = (1 - confidence) / 2
        return self.lower_limit(1 - tail), max(self._end(1 - tail), 0.0)

    def lower_limit(self, confidence: float) -> float:
        """The lower confidence limit of 1/z, at least 0: the smallest value that the test of the mean does not reject."""
        return max(self._end(1 - confidence), 0.0)

    def _end(self, level: float) -> float:
        """The 1/z at which the p-value, which grows with it, is `level`."""
        reach = 12 * math.sqrt(1 / self.weight + self.beta**2 / (2 * self.dof))
        low, high = self.beta - reach, self.beta + reach
        while self.p_value(high) < level:  # with few degrees of freedom the upper end is far away
            high += reach
        return float(brentq(lambda beta: self.p_value(beta) - level, low, high, xtol=1e-9 * max(reach, 1e-9)))

    def spread(self, groups: list[Scores]) -> tuple[float, float]:
        """The scores' standard deviation about β√R, and its limit if all canaries contribute equally."""
        square = sum(float(np.sum((s.observed - self.beta * math.sqrt(s.exposure)) ** 2)) for s in groups)
        count = max(sum(s.observed.size for s in groups) - 1, 1)
        heavier = 1.0 if math.isinf(self.round_dof) else self.round_dof / max(self.round_dof - 2, 0.5)
        limit = math.sqrt(_f_quantile(count, self.dof, EVEN_LEVEL) * heavier)
        return math.sqrt(square / count), limit


def _f_quantile(count: float, dof: float, level: float) -> float:
    if math.isinf(dof) or dof > 1e9:
        return float(chdtri(count, level)) / count
    return float(fdtri(count, dof, 1 - level))


def _mean_factor(dof: float) -> float:
    """E[√(dof/χ²_dof)]: the factor by which an estimated scale increases a score on average."""
    if dof > 1e6:
        return 1.0
    return math.exp(0.5 * math.log(dof / 2) + float(gammaln((dof - 1) / 2) - gammaln(dof / 2)))
