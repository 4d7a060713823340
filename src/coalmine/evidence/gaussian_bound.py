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
from coalmine.estimators.normality import anderson_darling, heavy_tails_p_value
from coalmine.estimators.student import student_lower_bound
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
    observed: Floats,
    unobserved: Floats | None,
    null_dof: float,
    *,
    delta: float,
    confidence: float,
) -> GaussianBound:
    """The bound from scores alone, if all are normal, or nearly so where the null is a sample too.

    If an F test does not tell their spreads apart, it inverts the test of the means. At equal spreads epsilon is smallest,
    so a difference that the test misses makes the bound smaller, and the interval keeps the upper end of the joint region.
    Otherwise it is the end of that region, unless the spreads are so different that a mixture is more likely. No test of
    this many scores sees slightly heavy tails, which lower epsilon much: so it is at most the bound for Student's t.
    """
    doubt = _not_normal(estimate, observed, unobserved)
    if doubt:
        return GaussianBound(withheld=doubt)
    size = math.inf if unobserved is None else float(unobserved.size)
    sample = Sample(observed.size, null_dof=min(null_dof, size - 1), null_count=size)
    equal = equal_std_p_value(estimate.std / estimate.null_std, sample)
    if equal < UNLIKE_LEVEL:
        return GaussianBound(withheld=f"{UNLIKE} (F test p = {equal:.2g})")
    found = fitted_bound(estimate) if equal < EQUAL_LEVEL else _of_means(estimate, sample, delta, confidence)
    if unobserved is None or found.lower_bound is None or found.interval is None:
        return found
    least, low = (
        student_lower_bound(observed, unobserved, delta=delta, confidence=level)
        for level in (confidence, (1 + confidence) / 2)
    )
    ends = (min(low, found.interval[0]), found.interval[1])
    return GaussianBound(lower_bound=min(least, found.lower_bound), interval=ends)


def _not_normal(estimate: EpsilonEstimate, observed: Floats, unobserved: Floats | None) -> str:
    """Why the scores are not normal, empty if no test says so; their level is that of one test of each sample."""
    p_values = [estimate.anderson_darling.p_value]
    samples = [observed]
    if unobserved is not None:
        p_values.append(anderson_darling(unobserved).p_value)
        samples.append(unobserved)
    if min(p_values) < NORMALITY_LEVEL / 2:
        return f"{NOT_NORMAL} (Anderson-Darling p = {min(p_values):.2g})"
    heavy = heavy_tails_p_value(samples)
    return f"{NOT_NORMAL} (kurtosis p = {heavy:.2g})" if heavy < NORMALITY_LEVEL else ""


def _of_means(estimate: EpsilonEstimate, sample: Sample, delta: float, confidence: float) -> GaussianBound:
    """The test of the means, inverted, for scores of equal spread."""
    std, size = estimate.null_std, sample.null_count
    if math.isfinite(size):
        std *= math.sqrt(size / (size - 1))
    beta, weight = (estimate.mean - estimate.null_mean) / std, 1 / (1 / sample.count + 1 / size)
    signal = NoiseSignal(beta, weight, sample.null_dof, sample.null_dof, beta * beta)
    ends = (signal.lower_limit(confidence), *signal.interval(confidence))
    bound, low, high = (_epsilon(end, delta) for end in ends)
    widest = high if estimate.interval is None else max(high, float(estimate.interval.high))
    return GaussianBound(lower_bound=bound, interval=(low, widest))


def _epsilon(mean: float | Floats, delta: float) -> float:
    return float(gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(mean, 1.0), delta=delta))
