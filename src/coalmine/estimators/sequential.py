"""Evidence against a noise multiplier that may be checked after every round.

A test at a fixed level errs far more often if it is repeated after every round until the first alarm. The evidence here is
a test martingale: if the noise is at least as large as claimed, its expectation is at most 1 at every stopping time. So the
probability that it ever reaches 1/α is at most α (Ville's inequality).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, nctdtr, ndtri

from coalmine.argument_checks import Floats

# Scale of the alternatives, in standard deviations of one score: close to the best of seven for z from 0.05 to 5.
PRIOR = 0.2
LARGEST = 8.0  # larger standard scores are cut to this: the tail is not exact there, and a smaller score is still valid
MANY = 1e5  # dof from which on the scale counts as known
FAR = 2000.0  # standard deviations from 0 beyond which the noncentral t is slow and its approximation accurate enough


def standard_score(score: npt.ArrayLike, dof: npt.ArrayLike, expected: npt.ArrayLike) -> Floats:
    """A score whose scale rests on `dof` directions, as a standard normal one; `expected` is its mean at the claim.

    The score is noncentral t: all scores of a round share the scale of that round, so they must not be treated as
    independent normal ones.
    """
    x, nu, mean = np.broadcast_arrays(*(np.asarray(value, np.float64) for value in (score, dof, expected)))
    x, nu = np.clip(x, -1e100, 1e100), np.minimum(nu, 1e15)
    near = (x * (1 - 1 / (4 * nu)) - mean) / np.sqrt(1 + x * x / (2 * nu))
    exact = (nu < MANY) & (np.abs(mean) < FAR) & (np.abs(near) < 6)
    standard = np.array(near)
    if exact.any():
        below = nctdtr(nu[exact], mean[exact], x[exact])
        usable = (below > 1e-12) & (below < 1 - 1e-9)  # otherwise the series did not converge, or lost its precision
        standard[exact] = np.where(usable, ndtri(np.clip(below, 1e-300, 1 - 1e-16)), near[exact])
    return np.minimum(standard, LARGEST)


def information(presentations: npt.ArrayLike, dof: npt.ArrayLike, noise_multiplier: float) -> Floats:
    """A round's information about 1/z: the number of presentations, reduced if the round's scale is uncertain."""
    count = np.asarray(presentations, np.float64)
    return np.asarray(count / (1 + count / (2 * np.asarray(dof, np.float64) * noise_multiplier**2)))


def log_evidence(total: npt.ArrayLike, informed: npt.ArrayLike, prior: float = PRIOR) -> Floats:
    """The log of the evidence, from the weighted sum of standard scores and the sum of squared weights.

    A mixture of likelihood ratios over alternatives with less noise, half-normal with scale `prior`.
    """
    s, v = np.asarray(total, np.float64), 1 + np.asarray(informed, np.float64) * prior * prior
    return np.asarray(
        math.log(2) - 0.5 * np.log(v) + s * s * prior * prior / (2 * v) + log_ndtr(s * prior / np.sqrt(v))
    )


def spent_level(level: float, look: int) -> float:
    """The share of the level for look number 1, 2, …; the shares of all looks add up to the level."""
    return level * 6 / (math.pi * look) ** 2


@dataclass
class RunningEvidence:
    """Evidence against a noise multiplier of `noise_multiplier` or more, round by round.

    `total` is S = Σ w_t·h_t, and `informed` is Σ w_t².
    """

    noise_multiplier: float
    total: float = 0.0
    informed: float = 0.0
    scores: float = 0.0  # Σ of scores, weighted as presentations are
    presentations: float = 0.0

    def add(self, score: float, presentations: float, dof: float) -> float:
        """Take a round's score, √n times the mean over its n presentations; returns it as a standard normal one."""
        expected = math.sqrt(presentations) / self.noise_multiplier
        standard = float(standard_score(score, dof, expected))
        weight = float(information(presentations, dof, self.noise_multiplier))
        self.total += math.sqrt(weight) * standard
        self.informed += weight
        self.scores += math.sqrt(presentations) * score
        self.presentations += presentations
        return standard

    @property
    def log(self) -> float:
        """The log of the evidence now."""
        return float(log_evidence(self.total, self.informed))

    @property
    def mean(self) -> float:
        """The mean score per presentation: 1 over the measured noise multiplier."""
        return self.scores / self.presentations if self.presentations else 0.0
