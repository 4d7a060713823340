"""Epsilon from the error rates of a membership test (Eq. 1)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, WrongTypeError, delta_array, same_shape, short_repr


def epsilon_from_rates(log_fpr: npt.ArrayLike, log_fnr: npt.ArrayLike, *, delta: npt.ArrayLike) -> Any:
    """Epsilon implied by a test's false positive and false negative rates (Eq. 1), at least 0.

    Rates come as logs: under the closed-form null the false positive rate underflows long before epsilon stops being
    interesting. A rate of 0 (log -inf) gives inf.

    >>> round(epsilon_from_rates(-50.0, -0.5, delta=1e-6), 3)
    49.067
    """
    log_fpr, log_fnr, delta = same_shape(
        log_fpr=_log_rate("log_fpr", log_fpr), log_fnr=_log_rate("log_fnr", log_fnr), delta=delta_array(delta)
    )
    epsilon = np.maximum.reduce(
        [np.zeros(log_fpr.shape), _one_sided(log_fpr, log_fnr, delta), _one_sided(log_fnr, log_fpr, delta)]
    )
    return float(epsilon) if epsilon.ndim == 0 else epsilon


def _one_sided(log_a: Floats, log_b: Floats, delta: Floats) -> Floats:
    power = -np.expm1(log_a) - delta
    positive = power > 0
    return np.where(positive, np.log(np.where(positive, power, 1.0)) - log_b, -np.inf)


def _log_rate(name: str, value: npt.ArrayLike) -> Floats:
    try:
        rate = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise WrongTypeError(f"{name} must be logs of rates, got {short_repr(value)}") from None
    if not (rate <= 0).all():
        raise ValueError(f"{name} must be at most 0 (a log of a rate), got {rate[~(rate <= 0)].flat[0]}")
    return rate
