"""Lower bounds on epsilon from the error rates of threshold tests: a valid one, and the published ones (Section 5).

Every test here calls a canary observed when its score is at least t. Upper bounds on its two error rates give a lower
bound on epsilon by Eq. 1. The best t is chosen on the same scores, so the bounds on the rates must hold at all thresholds
simultaneously; otherwise the search selects a threshold whose bound fails. The paper's pointwise 95 % bound exceeds the
true epsilon in three of four runs when nothing leaks.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, log_ndtr

from coalmine.argument_checks import Floats, finite_array, one_of, unit_interval, whole_number
from coalmine.estimators.best_threshold import Counts, best_threshold
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.local_level import local_level, order_statistic_bounds
from coalmine.estimators.rank_bound import rank_lower_bound
from coalmine.estimators.rates import epsilon_from_rates

FEWEST = 10  # fewest canaries; fewer allow no useful statement at 95 %
SPLIT_SEED = 20240  # seed of the permutation with which "split" halves the scores


class Law(Protocol):
    """A null in closed form: a CosineNull, scaled or not, or anything else with an upper tail in logs."""

    def logsf(self, score: npt.ArrayLike, /) -> Any:
        """log Pr(score of an unobserved canary > score)."""


Null = Law | Gaussian | npt.ArrayLike


def epsilon_lower_bound(
    observed: npt.ArrayLike, *, null: Null, delta: float, confidence: float = 0.95, method: str = "simultaneous"
) -> float:
    """A lower bound on epsilon from the scores of the observed canaries; high scores mean present.

    `null` is the law of an unobserved canary's score (a CosineNull, a Gaussian), or an array of unobserved scores. Only the
    scores' independence is assumed, not their law. `method` chooses the bounds on the error rates:

    - "simultaneous": Beta bounds on the order statistics at one local level, valid at all thresholds simultaneously.
      Exact: with probability `confidence` the result is at most the true epsilon.
    - "ranks": against an array only. Guesses which scores are of observed canaries by their rank, and counts the right ones
      at both ends. Tighter than "simultaneous", for two samples of independent scores.
    - "bonferroni", "dkw": valid at all thresholds simultaneously too, and wider.
    - "split": the threshold is chosen on one half of the scores (a fixed seeded permutation of the sorted scores) and
      tested on the other. Valid, and wider still.
    - "paper": a Jeffreys bound at each threshold alone, each rate at the full level (Section 5). Not a bound at
      `confidence`, since the best threshold is chosen afterwards.
    - "clopper-pearson": Jagielski et al. 2020. A valid bound at each threshold alone, so not a bound at `confidence` either.

    Against an array of m unobserved scores each rate has half of the failing probability, 1 - √confidence. Ties count
    against the test. A `null` in closed form must be exact far into its tail.

    >>> observed = np.linspace(0.5, 3.5, 1000)
    >>> round(epsilon_lower_bound(observed, null=Gaussian(0, 1), delta=1e-6), 2)
    4.69
    """
    scores = np.sort(score_array("observed", observed))
    if is_law(null):
        _refuse_constant(scores)
    return _bound(scores, null, delta, confidence, method)


def bound_of(observed: Floats, *, null: Null, delta: float, confidence: float, method: str = "simultaneous") -> float:
    """As epsilon_lower_bound, but equal scores are allowed: without noise, all canaries have the same score."""
    return _bound(np.sort(observed), null, delta, confidence, method)


def lower_bound_ceiling(
    count: int, *, delta: float, unobserved: int | None = None, confidence: float = 0.95, method: str = "simultaneous"
) -> float:
    """The largest value epsilon_lower_bound can report against `unobserved` unobserved scores: at perfect separation.

    Unlimited (inf) for a null in closed form (`unobserved` None), whose tail has no smallest rate.

    >>> round(lower_bound_ceiling(1000, unobserved=1000, delta=1e-6, method="paper"), 2)
    6.25
    """
    if unobserved is None:
        return math.inf
    delta, failing = _checked_levels(delta, confidence, method, two_samples=True)
    sizes = [_enough_scores("observed", count), _enough_scores("unobserved", unobserved)]
    if method == "ranks":
        return rank_lower_bound(np.ones(count), np.zeros(unobserved), delta=delta, failing=1 - confidence)
    if method == "split":
        sizes = [size - size // 2 for size in sizes]
    band, none = BANDS.get(method, clopper_pearson_band), np.zeros(1, dtype=np.int64)
    log_fnr, log_fpr = (log_rates(band, none, size, failing) for size in sizes)
    return float(epsilon_from_rates(log_fpr, log_fnr, delta=delta)[0])


def score_array(name: str, scores: Any) -> Floats:
    """`scores` as one row of at least ten finite numbers."""
    array = finite_array(f"{name} scores", scores)
    if array.ndim != 1:
        raise ValueError(
            f"{name} scores must be one row of numbers, got shape {array.shape}; pass one score per canary"
        )
    _enough_scores(name, array.size)
    return array


def is_law(null: Null) -> TypeGuard[Law | Gaussian]:
    """Whether `null` is a law in closed form, not an array of unobserved scores."""
    return isinstance(null, Gaussian) or hasattr(null, "logsf")


def one_of_two(failing: float) -> float:
    """The failing probability of each of two independent bounds that together fail with probability `failing`."""
    return -math.expm1(math.log1p(-failing) / 2)


def log_rates(upper_bounds: "Band", errors: Counts, count: int, failing: float) -> Floats:
    """log upper bounds on an error rate, for each of these numbers of errors among `count` scores."""
    some = np.minimum(errors, count - 1)
    return np.where(errors < count, np.log(np.minimum(upper_bounds(some, count, failing), 1.0)), 0.0)


def simultaneous_band(errors: Counts, count: int, failing: float) -> Floats:
    """With c errors below a threshold the error rate is at most U_(c+1), whose Beta bounds hold simultaneously."""
    return order_statistic_bounds(errors + 1, count, local_level(count, failing))


def jeffreys_band(errors: Counts, count: int, failing: float) -> Floats:
    """Jeffreys' one-sided bound at each count of errors alone (Section 5)."""
    band: Floats = betaincinv(errors + 0.5, count - errors + 0.5, 1 - failing)
    return band


def clopper_pearson_band(errors: Counts, count: int, failing: float) -> Floats:
    """Clopper and Pearson's one-sided bound at each count of errors alone."""
    return order_statistic_bounds(errors + 1, count, failing)


def bonferroni_band(errors: Counts, count: int, failing: float) -> Floats:
    """Clopper and Pearson's bounds, each with its share of the failing probability."""
    return order_statistic_bounds(errors + 1, count, failing / count)


def dkw_band(errors: Counts, count: int, failing: float) -> Floats:
    """Dvoretzky, Kiefer and Wolfowitz with Massart's constant, which is one-sided up to a failing probability of 1/2."""
    return errors / count + math.sqrt(-math.log(min(failing, 0.5)) / (2 * count))


Band = Callable[[Counts, int, float], Floats]
BANDS: dict[str, Band] = {
    "simultaneous": simultaneous_band,
    "paper": jeffreys_band,
    "clopper-pearson": clopper_pearson_band,
    "bonferroni": bonferroni_band,
    "dkw": dkw_band,
}
METHODS = (*BANDS, "split", "ranks")


def _bound(observed: Floats, null: Null, delta: float, confidence: float, method: str) -> float:
    """As bound_of, for sorted scores."""
    delta, failing = _checked_levels(delta, confidence, method, two_samples=not is_law(null))
    if not is_law(null):
        null = np.sort(score_array("unobserved", null))
    if method == "ranks":
        if is_law(null):
            raise ValueError('method "ranks" needs unobserved scores, got a null in closed form; use "simultaneous"')
        return rank_lower_bound(observed, np.asarray(null), delta=delta, failing=1 - confidence)
    if method == "split":
        return _split_bound(observed, null, delta, failing)
    return _best_epsilon(observed, null, delta, BANDS[method], failing)[0]


def _checked_levels(delta: float, confidence: float, method: str, *, two_samples: bool) -> tuple[float, float]:
    """delta, and the failing probability of one rate."""
    delta, failing = unit_interval("delta", delta), 1 - unit_interval("confidence", confidence)
    one_of("method", method, METHODS)
    return delta, one_of_two(failing) if two_samples and method != "paper" else failing


def _enough_scores(name: str, count: int) -> int:
    if whole_number(f"the number of {name} scores", count, minimum=0) < FEWEST:
        raise ValueError(f"there must be at least {FEWEST} {name} scores, got {count}; audit with more canaries")
    return count


def _best_epsilon(observed: Floats, null: Any, delta: float, band: Band, failing: float) -> tuple[float, int]:
    """Eq. 1 at its best threshold, and that threshold's index; `observed`, and `null` if it is an array, are sorted.

    Only observed scores are tried as thresholds: moving another threshold up to the next score increases neither rate.
    """
    return best_threshold(
        lambda log_fpr, log_fnr: epsilon_from_rates(log_fpr, log_fnr, delta=delta),
        observed,
        log_fpr=lambda thresholds: _log_fpr(thresholds, null, band, failing),
        log_fnr=lambda thresholds: log_rates(band, np.searchsorted(observed, thresholds), observed.size, failing),
    )


def _log_fpr(thresholds: Floats, null: Any, band: Band, failing: float) -> Floats:
    if is_law(null):
        return log_upper_tail(null, thresholds)
    return log_rates(band, null.size - np.searchsorted(null, thresholds), null.size, failing)


def log_upper_tail(null: Law | Gaussian, scores: Floats) -> Floats:
    """log of the false positive rate at each threshold."""
    # Pr(X > t; mean) as Pr(X < mean; t), which keeps its digits in the upper tail (Appendix A).
    tail = log_ndtr((null.mean - scores) / null.std) if isinstance(null, Gaussian) else null.logsf(scores)
    return np.minimum(np.asarray(tail, dtype=np.float64), 0.0)


def _split_bound(observed: Floats, null: Any, delta: float, failing: float) -> float:
    rng = np.random.default_rng(SPLIT_SEED)
    choosing, testing = _halves(observed, rng)
    null_choosing, null_testing = (null, null) if is_law(null) else _halves(null, rng)
    _, index = _best_epsilon(choosing, null_choosing, delta, clopper_pearson_band, failing)
    threshold = choosing[[index]]
    log_fpr = _log_fpr(threshold, null_testing, clopper_pearson_band, failing)
    log_fnr = log_rates(clopper_pearson_band, np.searchsorted(testing, threshold), testing.size, failing)
    return float(epsilon_from_rates(log_fpr, log_fnr, delta=delta)[0])


def _halves(scores: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    shuffled = rng.permutation(scores)
    return np.sort(shuffled[: scores.size // 2]), np.sort(shuffled[scores.size // 2 :])


def _refuse_constant(scores: Floats) -> None:
    if scores[0] == scores[-1]:
        raise ValueError(
            f"all {scores.size} scores are equal, so they carry no information; was the model ever updated?"
        )
