"""The lower bound and the interval of epsilon if the noise is Gaussian: narrower than those for any law of the scores.

They never enter a verdict. The gate of `coalmine.evidence.gaussian_gate` withholds them where the run contradicts the
assumption, or did not measure the law of the noise.
"""

import math
from dataclasses import dataclass
from typing import Any

from coalmine.argument_checks import Floats
from coalmine.estimators.gaussian_fit import EpsilonEstimate
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.evidence.gaussian_gate import NORMALITY_LEVEL, GaussianGate
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_signal import NoiseSignal

CONFIDENCE = 0.95
KNOWN_RUNGS = ("known-round", "known-others")
FINAL_RUNGS = ("final", "final-update")
NO_LAW = "the scores of this attacker follow no Gaussian law"
MIXED = "canaries were presented different numbers of times"
NOT_NORMAL = "the scores are not normal"
CONTRADICTED = "the bound that assumes no law lies above the interval"


@dataclass(frozen=True, kw_only=True)
class GaussianBound:
    """The lower bound and the interval of epsilon if the noise is Gaussian; None if `withheld`, which says why."""

    lower_bound: float | None = None
    interval: tuple[float, float] | None = None
    withheld: str = ""

    def beside(self, any_law: float) -> "GaussianBound":
        """The same, withheld if the bound that assumes no law lies above the interval."""
        contradicted = self.interval is not None and any_law > self.interval[1]
        return GaussianBound(withheld=CONTRADICTED) if contradicted else self

    def to_dict(self) -> dict[str, Any]:
        """The entries of a row of result.json."""
        return {
            "lower_bound_gaussian": self.lower_bound,
            "interval_gaussian": None if self.interval is None else list(self.interval),
            "gaussian_withheld": self.withheld or None,
        }


def gaussian_bound(scores: Scores, estimate: EpsilonEstimate, gate: GaussianGate, delta: float) -> GaussianBound:
    """The bound from one group of scores."""
    if scores.rung in KNOWN_RUNGS:
        return known_rounds_bound([scores], scores.exposure, gate, delta)
    if scores.rung not in FINAL_RUNGS:
        return GaussianBound(withheld=NO_LAW)
    return fitted_bound(estimate, mixed=scores.mixed)


def known_rounds_bound(groups: list[Scores], exposure: float, gate: GaussianGate, delta: float) -> GaussianBound:
    """The bound for a client of this exposure: the test of the mean, inverted, pushed through the Gaussian mechanism."""
    withheld = gate.known_rounds(groups)
    if withheld:
        return GaussianBound(withheld=withheld)
    signal, length = NoiseSignal.of(groups), math.sqrt(exposure)
    means = [each * length for each in (signal.lower_limit(CONFIDENCE), *signal.interval(CONFIDENCE))]
    bound, low, high = (_epsilon(mean, delta) for mean in means)
    return GaussianBound(lower_bound=bound, interval=(low, high))


def fitted_bound(estimate: EpsilonEstimate, *, mixed: bool = False) -> GaussianBound:
    """The bound from a final model's scores: the smallest epsilon over the joint region of their mean and spread.

    Epsilon has a kink where both laws have equal spread, and all that the region misses is there below. So a one-sided bound
    at 95 % needs the region at 95 % too.
    """
    if mixed or estimate.interval is None:
        return GaussianBound(withheld=MIXED)
    p_value = estimate.anderson_darling.p_value
    if p_value < NORMALITY_LEVEL:
        return GaussianBound(withheld=f"{NOT_NORMAL} (Anderson-Darling p = {p_value:.2g})")
    low, high = (float(end) for end in estimate.interval)
    return GaussianBound(lower_bound=low, interval=(low, high))


def _epsilon(mean: float | Floats, delta: float) -> float:
    return float(gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(mean, 1.0), delta=delta))
