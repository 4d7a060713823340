"""Analytical epsilon of the Gaussian mechanism (Section 3), alone or repeated, and the noise it takes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.checks import Floats, delta_array, finite_array, nonnegative_array, same_shape
from coalmine.estimators.gaussians import Gaussian, gaussian_delta, gaussian_epsilon


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
    with np.errstate(divide="ignore"):
        shift = np.sqrt(times) / noise
    finite = np.isfinite(shift)
    answer = np.where(finite, 0.0, np.inf)
    null = Gaussian(0.0, 1.0)
    answer[finite] = gaussian_epsilon(null, Gaussian(shift[finite], 1.0), delta=delta[finite])
    return float(answer) if answer.ndim == 0 else answer


def mechanism_noise(epsilon: npt.ArrayLike, *, delta: npt.ArrayLike, participations: npt.ArrayLike = 1) -> Any:
    """The noise multiplier that gives `epsilon`: the inverse of mechanism_epsilon. Epsilon inf gives 0.

    >>> round(mechanism_noise(10.0, delta=1e-6), 3)
    0.541
    """
    wanted = np.asarray(epsilon, dtype=np.float64)
    limited = nonnegative_array("epsilon", np.where(np.isposinf(wanted), 0.0, wanted))
    wanted, limited, times, delta = same_shape(
        epsilon=wanted, limited=limited, participations=_times(participations), delta=delta_array(delta)
    )
    # Bisection on log shift: at shift s, s²/2 + s·quantile(delta) is about epsilon, so these brackets hold every root.
    low, high = np.full(wanted.shape, -745.0), np.log(np.sqrt(2 * limited) + 80.0)
    null = Gaussian(0.0, 1.0)
    for _ in range(64):
        middle = (low + high) / 2
        above = gaussian_delta(null, Gaussian(np.exp(middle), 1.0), epsilon=limited) > delta
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    noise = np.where(np.isposinf(wanted), 0.0, np.sqrt(times) / np.exp((low + high) / 2))
    return float(noise) if noise.ndim == 0 else noise


def _times(participations: npt.ArrayLike) -> Floats:
    times = finite_array("participations", participations)
    if times.size and times.min() < 1:
        raise ValueError(f"participations must be at least 1, got {times.min():g}")
    if not (times == np.floor(times)).all():
        raise ValueError(f"participations must be whole numbers, got {times[times != np.floor(times)].flat[0]:g}")
    return times
