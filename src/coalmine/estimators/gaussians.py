"""Epsilon between two Gaussians and its inverse (Appendix A), to full precision and on whole arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import (
    Floats,
    WrongTypeError,
    delta_array,
    finite_array,
    nonnegative_array,
    positive_array,
    same_shape,
    short_repr,
)
from coalmine.estimators.hockey_stick import Pair, one_sided_delta, one_sided_epsilon

BLOCK = 4096  # rows at a time: temporaries stay in the cache


@dataclass(frozen=True)
class Gaussian:
    """A normal law, or an array of them: `mean` and `std` broadcast against each other."""

    mean: Any
    std: Any

    def __post_init__(self) -> None:
        mean, std = finite_array("mean", self.mean), positive_array("std", self.std)
        same_shape(mean=mean, std=std)
        object.__setattr__(self, "mean", float(mean) if mean.ndim == 0 else mean)
        object.__setattr__(self, "std", float(std) if std.ndim == 0 else std)


def gaussian_epsilon(null: Gaussian, alternative: Gaussian, *, delta: npt.ArrayLike) -> Any:
    """The smallest epsilon >= 0 at which the two Gaussians are (epsilon, delta)-indistinguishable (Appendix A).

    The maximum over both directions. A float for scalars, else an array of the broadcast shape; inf only where epsilon
    exceeds the largest float.

    >>> round(gaussian_epsilon(Gaussian(0, 0.541), Gaussian(1, 0.541), delta=1e-6), 2)
    10.0
    """
    return _blockwise(_epsilon, null, alternative, delta=delta_array(delta))


def gaussian_delta(null: Gaussian, alternative: Gaussian, *, epsilon: npt.ArrayLike) -> Any:
    """The smallest delta at which the two Gaussians are (epsilon, delta)-indistinguishable: gaussian_epsilon's inverse.

    >>> gaussian_delta(Gaussian(0, 1), Gaussian(0, 1), epsilon=0.5)
    0.0
    """
    return _blockwise(_delta, null, alternative, epsilon=nonnegative_array("epsilon", epsilon))


def _blockwise(function: Any, null: Gaussian, alternative: Gaussian, **level: Floats) -> Any:
    for name, value in (("null", null), ("alternative", alternative)):
        if not isinstance(value, Gaussian):
            raise WrongTypeError(f"{name} must be a Gaussian, got {short_repr(value)}")
    arrays = same_shape(
        null_mean=np.asarray(null.mean),
        null_std=np.asarray(null.std),
        alternative_mean=np.asarray(alternative.mean),
        alternative_std=np.asarray(alternative.std),
        **level,
    )
    flat = [array.ravel() for array in arrays]
    answer = np.empty(flat[0].size)
    with np.errstate(all="ignore"):
        for start in range(0, answer.size, BLOCK):
            rows = slice(start, start + BLOCK)
            answer[rows] = function(*(array[rows] for array in flat))
    return float(answer[0]) if arrays[0].ndim == 0 else answer.reshape(arrays[0].shape)


def _epsilon(null_mean: Floats, null_std: Floats, mean: Floats, std: Floats, delta: Floats) -> Floats:
    """The larger of both directions: nearly always the one from the wider Gaussian; the other is solved only if needed."""
    from_wider, from_narrower = _directions(null_mean, null_std, mean, std)
    epsilon = one_sided_epsilon(from_wider, delta)
    reversed_delta = one_sided_delta(from_narrower, np.where(np.isinf(epsilon), 0, epsilon))
    rows = np.flatnonzero(reversed_delta > delta)
    if rows.size:
        epsilon[rows] = np.maximum(epsilon[rows], one_sided_epsilon(from_narrower.take(rows), delta[rows]))
    return epsilon


def _delta(null_mean: Floats, null_std: Floats, mean: Floats, std: Floats, epsilon: Floats) -> Floats:
    from_wider, from_narrower = _directions(null_mean, null_std, mean, std)
    return np.maximum(one_sided_delta(from_wider, epsilon), one_sided_delta(from_narrower, epsilon))


def _directions(null_mean: Floats, null_std: Floats, mean: Floats, std: Floats) -> tuple[Pair, Pair]:
    """The wider Gaussian against the narrower one and the reverse, the first of each pair standardised to N(0, 1).

    `stretch` comes from the difference of the stds, so it keeps its digits when they are nearly equal.
    """
    wide, narrow = np.maximum(null_std, std), np.minimum(null_std, std)
    difference = np.abs(mean - null_mean)
    overflows = np.isinf(difference)
    half = np.abs(mean / 2 - null_mean / 2)

    def against(own: Floats, other: Floats) -> Pair:
        shift = np.where(overflows, half / (own / 2), difference / own)
        return Pair(shift, (other - own) / own, other / own)

    return against(wide, narrow), against(narrow, wide)
