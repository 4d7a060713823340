"""Analytical epsilon of the Gaussian mechanism (Section 3), and the noise for a given epsilon."""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from coalmine.argument_checks import Floats, delta_array, finite_array, names_neighbours, nonnegative_array, same_shape
from coalmine.estimators.gaussians import Gaussian, gaussian_delta, gaussian_epsilon

LARGEST_EPSILON = 1e100  # its double is finite, and so are the squares on the way


@names_neighbours
def mechanism_epsilon(
    noise_multiplier: npt.ArrayLike, *, delta: npt.ArrayLike, participations: npt.ArrayLike = 1
) -> Any:
    """Epsilon of the Gaussian mechanism for a client who takes part `participations` times (Section 3); no amplification.

    Equal to the epsilon of one release with the noise divided by √participations. Noise 0 gives inf.

    >>> round(mechanism_epsilon(0.541, delta=1e-6), 2)
    10.0
    """
    noise = nonnegative_array("noise_multiplier", noise_multiplier)
    noise, times, delta = same_shape(
        noise_multiplier=noise, participations=_times(participations), delta=delta_array(delta)
    )
    with np.errstate(divide="ignore", over="ignore"):  # noise 0, or the smallest number above it
        shift = np.sqrt(times) / noise
    finite = np.isfinite(shift)
    answer = np.where(finite, 0.0, np.inf)
    null = Gaussian(0.0, 1.0)
    answer[finite] = gaussian_epsilon(null, Gaussian(shift[finite], 1.0), delta=delta[finite])
    return float(answer) if answer.ndim == 0 else answer


@names_neighbours
def mechanism_noise(epsilon: npt.ArrayLike, *, delta: npt.ArrayLike, participations: npt.ArrayLike = 1) -> Any:
    """The noise multiplier that gives `epsilon`: the inverse of mechanism_epsilon. Epsilon inf gives 0.

    >>> round(mechanism_noise(10.0, delta=1e-6), 3)
    0.541
    """
    wanted = np.asarray(epsilon, dtype=np.float64)
    limited = nonnegative_array("epsilon", np.where(np.isposinf(wanted), 0.0, wanted))
    if limited.size and limited.max() > LARGEST_EPSILON:
        raise ValueError(f"epsilon must be at most {LARGEST_EPSILON:g}, or infinite, got {limited.max():g}")
    wanted, limited, times, delta = same_shape(
        epsilon=wanted, limited=limited, participations=_times(participations), delta=delta_array(delta)
    )
    shift = _shift(limited, delta)
    with np.errstate(over="ignore"):  # if epsilon is 0 and delta the smallest float
        noise = np.where(np.isposinf(wanted), 0.0, np.sqrt(times) / shift)
    return float(noise) if noise.ndim == 0 else noise


def _shift(epsilon: Floats, delta: Floats) -> Floats:
    """The shift between two unit Gaussians that gives `epsilon`: Newton's method on log delta over log shift.

    Both starting points overestimate delta: one drops its second term, the other takes the density's peak as its slope.
    So they lie below the root, and the steps do not overshoot; the bracket guards against rounding.
    """
    z = -ndtri(delta)
    spread = np.maximum(
        np.hypot(z, np.sqrt(2 * epsilon)) + z, np.finfo(np.float64).tiny
    )  # 0 at epsilon 0, delta >= 1/2
    low = np.log(np.maximum(2 * epsilon / spread, np.sqrt(2 * np.pi) * delta))
    high = np.log(np.sqrt(2 * epsilon) + 80.0)
    null, x = Gaussian(0.0, 1.0), np.minimum(low, high)
    for _ in range(100):
        shift = np.exp(x)
        reached = gaussian_delta(null, Gaussian(shift, 1.0), epsilon=epsilon)
        low, high = np.where(reached < delta, x, low), np.where(reached > delta, x, high)
        with np.errstate(all="ignore"):
            slope = shift * np.exp(-((shift / 2 - epsilon / shift) ** 2) / 2) / np.sqrt(2 * np.pi) / reached
            following = x + (np.log(delta) - np.log(reached)) / slope
        inside = (following >= low) & (following <= high)
        following = np.where(inside, following, (low + high) / 2)
        done = np.abs(following - x) < 1e-15 * np.maximum(1.0, np.abs(x))
        x = following
        if np.all(done):
            break
    return np.exp(x)


def _times(participations: npt.ArrayLike) -> Floats:
    times = finite_array("participations", participations)
    if times.size and times.min() < 1:
        raise ValueError(f"participations must be at least 1, got {times.min():g}")
    if not (times == np.floor(times)).all():
        raise ValueError(f"participations must be whole numbers, got {times[times != np.floor(times)].flat[0]:g}")
    return times
