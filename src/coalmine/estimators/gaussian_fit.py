"""Epsilon from Gaussians fitted to the scores: the step that Algorithms 1, 2 and 3 share."""

import math
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, one_number, one_of, unit_interval
from coalmine.estimators.bounds import Null, is_law, lower_bound_ceiling, score_array
from coalmine.estimators.intervals import Floor, Interval, epsilon_interval, known_std_interval, noise_floor
from coalmine.estimators.normality import AndersonDarling, anderson_darling
from coalmine.estimators.variance import (
    Sample,
    Variance,
    equal_std_p_value,
    in_safe_units,
    null_std_range,
    point_epsilon,
)

LARGEST = 1e60  # largest mean, std or inverse std, in units of the null's std; squares of larger ones overflow


@dataclass(frozen=True)
class VarianceChoice:
    """Which std the alternative has, the null's or a fitted one, and why."""

    used: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class EpsilonEstimate:
    """An estimate of epsilon; never a bound.

    `interval` covers the true epsilon with probability `confidence` if the scores are normal; it is None if no interval
    was requested. `floor` holds quantiles of the estimate when nothing leaks. `ceiling` is the largest value that
    epsilon_lower_bound can report from this many scores, that of perfect separation; it is inf for a null in closed
    form. `mean`, `std`, `null_mean` and `null_std` are in the units of the scores.
    """

    epsilon: float
    interval: Interval | None
    confidence: float | None
    floor: Floor
    ceiling: float
    variance: VarianceChoice
    mean: float
    std: float
    null_mean: float
    null_std: float
    anderson_darling: AndersonDarling

    def to_dict(self) -> dict[str, Any]:
        """The figures as stored in files, except that inf and NaN are still floats."""
        interval = None if self.interval is None else [float(self.interval.low), float(self.interval.high)]
        return {
            "epsilon": self.epsilon,
            "interval": interval,
            "floor": {"median": self.floor.median, "q95": self.floor.q95},
            "ceiling": self.ceiling,
            "variance": asdict(self.variance),
            "mean": self.mean,
            "std": self.std,
            "null_mean": self.null_mean,
            "null_std": self.null_std,
            "anderson_darling": asdict(self.anderson_darling),
        }


def epsilon_estimate(
    observed: npt.ArrayLike,
    *,
    null: Null,
    delta: float,
    variance: Variance = "auto",
    confidence: float | None = 0.95,
    null_dof: float = math.inf,
) -> EpsilonEstimate:
    """Epsilon between the null and a Gaussian fitted to the observed scores, with its interval and its noise floor.

    `null` is a CosineNull, a Gaussian, or an array of unobserved scores, to which a second Gaussian is fitted.
    `variance` chooses the std of the alternative: "fitted" takes its own (the paper), "null" that of the null, and
    "auto" that of the null unless an F test at 5 % rejects it. `null_dof` is the number of directions from which the
    null's std was estimated, if the null does not know it; unobserved scores count as their number minus one.
    `confidence` None skips the interval. Skip it when the scores are not normal, such as maxima over rounds.

    >>> from coalmine.estimators.null import CosineNull
    >>> cosines = np.linspace(-0.73, 2.73, 1000) / 1000
    >>> estimate = epsilon_estimate(cosines, null=CosineNull(1_000_000), delta=1e-6)
    >>> f"{estimate.epsilon:.2f}, between {estimate.interval.low:.2f} and {estimate.interval.high:.2f}"
    '4.89, between 4.46 and 6.68'
    >>> estimate.variance.used
    'null'
    """
    scores, delta = score_array("observed", observed), unit_interval("delta", delta)
    one_of("variance", variance, get_args(Variance))
    _check_dof(null_dof)
    null_mean, null_std, sample = _fitted_null(null, scores.size, null_dof)
    raw_mean, raw_std = _fit("observed", scores)
    mean, std = _in_units_of_null(raw_mean, raw_std, null_mean, null_std)
    interval = None
    if confidence is not None:
        level = unit_interval("confidence", confidence)
        if variance == "null":  # the same model as the estimate's: the std is known
            interval = known_std_interval(mean, sample=sample, delta=delta, confidence=level)
        else:
            interval = epsilon_interval(mean, std, sample=sample, delta=delta, confidence=level)
    unobserved = None if math.isinf(sample.null_count) else int(sample.null_count)
    return EpsilonEstimate(
        epsilon=point_epsilon(mean, std, sample=sample, delta=delta, variance=variance),
        interval=interval,
        confidence=confidence,
        floor=noise_floor(sample=sample, delta=delta, variance=variance),
        ceiling=lower_bound_ceiling(scores.size, unobserved=unobserved, delta=delta, confidence=confidence or 0.95),
        variance=_choice(variance, std, sample),
        mean=raw_mean,
        std=raw_std,
        null_mean=null_mean,
        null_std=null_std,
        anderson_darling=anderson_darling(scores),
    )


def fitted_epsilon(observed: npt.ArrayLike, *, null: Null, delta: float) -> float:
    """The epsilon of `epsilon_estimate` with the alternative's own std, as the paper has it: a number and nothing else."""
    scores = score_array("observed", observed)
    null_mean, null_std, sample = _fitted_null(null, scores.size, math.inf)
    mean, std = _in_units_of_null(*_fit("observed", scores), null_mean, null_std)
    return point_epsilon(mean, std, sample=sample, delta=unit_interval("delta", delta), variance="fitted")


def _in_units_of_null(mean: float, std: float, null_mean: float, null_std: float) -> tuple[float, float]:
    """A fitted mean and std in units of the null."""
    moved, ratio = (mean - null_mean) / null_std, std / null_std
    if not (abs(moved) <= LARGEST and 1 / LARGEST <= ratio <= LARGEST):
        raise ValueError(
            f"observed scores must be of the null's size, got mean {mean:.4g} and std {std:.4g} against a null of "
            f"mean {null_mean:.4g} and std {null_std:.4g}; give both in the same units"
        )
    return moved, ratio


def _fitted_null(null: Null, count: int, null_dof: float) -> tuple[float, float, Sample]:
    if is_law(null):
        mean, std = one_number("null mean", getattr(null, "mean", 0.0)), one_number("null std", null.std)  # type: ignore[union-attr]
        return mean, std, Sample(count, null_dof=min(null_dof, getattr(null, "dof", math.inf)))
    unobserved = score_array("unobserved", null)
    mean, std = _fit("unobserved", unobserved)
    return mean, std, Sample(count, null_dof=min(null_dof, unobserved.size - 1.0), null_count=unobserved.size)


def _fit(name: str, scores: Floats) -> tuple[float, float]:
    units, exponent = in_safe_units(scores)
    mean, std = float(np.mean(units)), float(np.std(units))  # ddof=0: the paper divides by k (Algorithm 1, line 9)
    if scores.min() == scores.max() or std == 0:
        raise ValueError(equal_scores(name, scores))
    return math.ldexp(mean, exponent), math.ldexp(std, exponent)


def equal_scores(name: str, scores: Floats) -> str:
    """The error message for scores that are all equal."""
    return (
        f"all {scores.size} {name} scores are equal ({scores[0]:.4g}), so no Gaussian can be fitted; check that there is "
        "one score per canary and that the model was updated"
    )


def _choice(variance: str, std: float, sample: Sample) -> VarianceChoice:
    if variance != "auto":
        return VarianceChoice(variance, f"{variance}, as asked")
    low, high = null_std_range(sample)
    p_value = equal_std_p_value(std, sample)
    if low <= std <= high:
        return VarianceChoice(
            "null", f"the stds differ by a factor of {std:.3g}, F test p = {p_value:.2g}: not rejected at 5 %"
        )
    return VarianceChoice(
        "fitted", f"the stds differ by a factor of {std:.3g}, F test p = {p_value:.2g}: rejected at 5 %"
    )


def _check_dof(null_dof: float) -> None:
    if not null_dof >= 2:
        raise ValueError(f"null_dof must be at least 2 (inf for a null known exactly), got {null_dof}")
