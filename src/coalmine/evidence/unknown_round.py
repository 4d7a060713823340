"""The rung unknown-round: an attacker who sees every release and knows all other updates, but not the target's rounds.

That is the adversary of the amplified epsilon that accountants print. Its score is the log likelihood ratio of the declared
scheme, and all canaries count, including those that were never picked. If noise and sampling are as declared, the
scores of present and absent canaries follow the pair of laws that the accountant composes.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.estimators.amplification import merged_strengths
from coalmine.estimators.loss_law import (
    LossLaw,
    allocated_ratio,
    allocation_laws,
    poisson_laws,
    poisson_ratio,
    round_ratio,
)
from coalmine.estimators.sampling import FixedSize, Poisson, Sampling
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_schedule import counted_strengths
from coalmine.evidence.views import RoundViews
from coalmine.log.recorded import RecordedRounds
from coalmine.measure.settings import Settings

RUNG = "unknown-round"
BINS = 40  # bins of the histogram


class UnknownRoundReader:
    """Takes one round after another, and computes the log likelihood ratio of every canary at the end.

    `noise` is the noise multiplier that the attacker assumes: the claimed one. Fixed-size sampling is scored as Poisson
    sampling, and shuffling as random allocation: the nearest schemes whose ratio has a closed form.
    """

    def __init__(self, settings: Settings, sampling: Sampling, noise: float) -> None:
        self._settings, self._sampling, self._noise = settings, sampling, noise
        self._sums = np.zeros(settings.total)
        self._strengths: list[float] = []
        self._epoch: tuple[int, int, Floats] | None = None  # number, observed rounds, sum of ratios
        self._observed_rounds: list[int] = []  # number of observed rounds of each epoch
        self._dof = math.inf
        self.rounds = 0

    def add(self, look: RoundViews) -> None:
        """Take the next round; this attacker cannot use one without `others`."""
        view = look.residual
        if view is None:
            return
        scores = np.concatenate([view.observed, view.unobserved])
        self.rounds += 1
        strength = float(np.mean(view.weights))
        self._strengths.append(strength)
        self._dof = min(self._dof, view.dof)
        sampling = self._sampling
        if isinstance(sampling, Poisson | FixedSize):
            self._sums += poisson_ratio(scores, noise=self._noise / strength, probability=sampling.rate)
            return
        number = (view.number - 1) // sampling.rounds
        if self._epoch is not None and self._epoch[0] != number:
            self._close_epoch()
        _, observed, sums = self._epoch or (number, 0, np.zeros(self._settings.total))
        self._epoch = (number, observed + 1, sums + round_ratio(scores, noise=self._noise))

    def _close_epoch(self) -> None:
        if self._epoch is None or isinstance(self._sampling, Poisson | FixedSize):
            return
        _, observed, sums = self._epoch
        self._sums += allocated_ratio(sums, rounds=self._sampling.rounds, observed=observed)
        self._observed_rounds.append(observed)
        self._epoch = None

    def reading(self) -> "UnknownRound | None":
        """The scores and their laws; None if there was no usable round."""
        if not self.rounds:
            return None
        self._close_epoch()
        sampling, count = self._sampling, self._settings.canaries
        if isinstance(sampling, Poisson | FixedSize):
            laws = poisson_laws(
                noise=self._noise,
                probability=sampling.rate,
                rounds=self.rounds,
                dof=self._dof,
                strengths=merged_strengths(counted_strengths(self._strengths))[0],
            )
        else:
            laws = allocation_laws(
                noise=self._noise, rounds=sampling.rounds, observed=self._observed_rounds, dof=self._dof
            )
        return UnknownRound(sampling, self._noise, self._sums[:count], self._sums[count:], *laws)


@dataclass(frozen=True)
class UnknownRound:
    """Log likelihood ratios of the canaries, and their laws for an absent and for a present client."""

    sampling: Sampling
    noise: float
    observed: Floats
    unobserved: Floats
    absent: LossLaw
    present: LossLaw

    @property
    def scores(self) -> Scores:
        """The scores in the form of the other rungs."""
        return Scores(rung=RUNG, observed=self.observed, unobserved=self.unobserved, bound_null=self.absent)

    @cached_property
    def fit(self) -> "LossFit":
        """The goodness of fit of the scores to the accountant's law."""
        statistic, p_value = self.present.fit(self.observed)
        low, high = (
            float(edge)
            for edge in (
                min(self.observed.min(), _quantile(self.absent, 0.001)),
                max(self.observed.max(), _quantile(self.present, 0.999)),
            )
        )
        edges = np.linspace(low, max(high, low + 1e-9), BINS + 1)
        return LossFit(
            statistic=statistic,
            p_value=p_value,
            edges=tuple(float(edge) for edge in edges),
            observed=tuple(int(number) for number in np.histogram(self.observed, edges)[0]),
            present=tuple(float(share) for share in np.diff(self.present.cdf(edges))),
            absent=tuple(float(share) for share in np.diff(self.absent.cdf(edges))),
        )


@dataclass(frozen=True, kw_only=True)
class LossFit:
    """Goodness of fit of the scores to the privacy loss distribution (Kolmogorov-Smirnov), and both as a histogram.

    `observed` counts canaries between neighbouring `edges`; `present` and `absent` are the probabilities that the
    accountant's pair of laws predicts.
    """

    statistic: float
    p_value: float
    edges: tuple[float, ...]
    observed: tuple[int, ...]
    present: tuple[float, ...]
    absent: tuple[float, ...]


def stated_multiplier(log: RecordedRounds) -> float | None:
    """The noise multiplier that the first observed round states; None if it states none."""
    first = next(log.rounds(), None)
    if first is None or first.noise_std is None or not first.clip_declared:
        return None
    return first.noise_std / first.clip_norm


def _quantile(law: LossLaw, probability: float) -> float:
    index = int(np.searchsorted(np.cumsum(law.masses), probability))
    return float(law.points[min(index, law.points.size - 1)])
