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
from coalmine.estimators.normality import anderson_darling
from coalmine.estimators.variance import Sample, equal_std_p_value
from coalmine.evidence.gaussian_gate import NORMALITY_LEVEL, GaussianGate
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_signal import NoiseSignal

CONFIDENCE = 0.95
EQUAL_LEVEL, UNLIKE_LEVEL = 0.05, 1e-3  # of the test that observed and unobserved scores spread alike
KNOWN_RUNGS = ("known-round", "known-others")
FINAL_RUNGS = ("final", "final-update")
NO_LAW = "the scores of this attacker follow no Gaussian law"
MIXED = "canaries were presented different numbers of times"
NOT_NORMAL = "the scores are not normal"
UNLIKE = "observed and unobserved scores do not spread alike"
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


def scores_bound(
    estimate: EpsilonEstimate,
    unobserved: Floats | None,
    count: int,
    null_dof: float,
    *,
    delta: float,
    confidence: float,
) -> GaussianBound:
    """The bound from scores alone, observed ones of this number, if all scores are normal.

    If an F test does not tell their spreads apart, it inverts the test of the means. At equal spreads epsilon is smallest,
    so a difference that the test misses makes the bound smaller, and the interval keeps the upper end of the joint region.
    Otherwise it is the end of that region, unless the spreads are so different that a mixture is more likely.
    """
    p_values = [estimate.anderson_darling.p_value]
    std, size = estimate.null_std, math.inf
    if unobserved is not None:
        p_values.append(anderson_darling(unobserved).p_value)
        size = float(unobserved.size)
        std *= math.sqrt(size / (size - 1))
    if min(p_values) < NORMALITY_LEVEL:
        return GaussianBound(withheld=f"{NOT_NORMAL} (Anderson-Darling p = {min(p_values):.2g})")
    sample = Sample(count, null_dof=min(null_dof, size - 1), null_count=size)
    equal = equal_std_p_value(estimate.std / estimate.null_std, sample)
    if equal < UNLIKE_LEVEL:
        return GaussianBound(withheld=f"{UNLIKE} (F test p = {equal:.2g})")
    if equal < EQUAL_LEVEL:
        return fitted_bound(estimate)
    beta, weight = (estimate.mean - estimate.null_mean) / std, 1 / (1 / count + 1 / size)
    signal = NoiseSignal(beta, weight, sample.null_dof, sample.null_dof, beta * beta)
    ends = (signal.lower_limit(confidence), *signal.interval(confidence))
    bound, low, high = (_epsilon(end, delta) for end in ends)
    widest = high if estimate.interval is None else max(high, float(estimate.interval.high))
    return GaussianBound(lower_bound=bound, interval=(low, widest))


def _epsilon(mean: float | Floats, delta: float) -> float:
    return float(gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(mean, 1.0), delta=delta))
