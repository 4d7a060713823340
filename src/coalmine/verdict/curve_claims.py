"""Claims that are a curve or points of one: μ of Gaussian privacy, ρ-zCDP, pairs (ε, δ), the classic formula's noise."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

from coalmine.argument_checks import one_number, short_repr, unit_interval
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.verdict.claim import Claim

ONE = "a claim needs exactly one of mu, zcdp and points"


def claim_of_curve(
    delta: float,
    *,
    mu: float | None = None,
    zcdp: float | None = None,
    points: Iterable[tuple[float, float]] | None = None,
    **terms: Any,
) -> Claim:
    """The claim about known rounds that such a curve makes, as the ε of its Gaussian mechanism at `delta`.

    For noise that is Gaussian, each of these says how large μ may be: a mechanism is ρ-zCDP if μ²/2 is at most ρ, and
    (ε, δ) fixes the μ of the curve through it. Of several points the one that allows the smallest μ counts: if that is
    refuted, the claim is.

    >>> round(claim_of_curve(1e-6, mu=1.0).epsilon, 2), round(claim_of_curve(1e-6, zcdp=0.5).epsilon, 2)
    (4.89, 4.89)
    >>> round(claim_of_curve(1e-6, points=[(4.0, 1e-5), (10.0, 1e-6)]).epsilon, 2)
    4.47
    """
    delta = unit_interval("delta", delta)
    if sum(each is not None for each in (mu, zcdp, points)) != 1:
        raise ValueError(f"{ONE}, got {', '.join(_given(mu, zcdp, points)) or 'none'}")
    if mu is not None:
        allowed = _positive("mu", mu)
    elif zcdp is not None:
        allowed = math.sqrt(2 * _positive("zcdp", zcdp))
    else:
        allowed = _weakest(list(points or []))
    epsilon = float(mechanism_epsilon(1 / allowed, delta=delta))
    return Claim.mechanism(epsilon, delta=delta, **terms)


def claim_of_classic_gaussian(epsilon: float, delta: float, **terms: Any) -> Claim:
    """The claim of noise by the classic formula √(2 ln(1.25/δ))/ε (Dwork and Roth, Theorem A.1), in sensitivities.

    The theorem is for ε up to 1. Above that the same noise may have a larger ε: then that is the claim, and a warning
    says so.

    >>> claim_of_classic_gaussian(0.5, 1e-5).epsilon
    0.5
    """
    stated, delta = _positive("epsilon", epsilon), unit_interval("delta", delta)
    noise = math.sqrt(2 * math.log(1.25 / delta)) / stated
    holds = max(stated, float(mechanism_epsilon(noise, delta=delta)))
    if stated > 1:
        warnings.warn(
            f"the classic formula proves nothing above epsilon = 1: its noise for {stated:g} at delta {delta:g} has epsilon "
            f"{holds:.4g}, which is claimed instead",
            stacklevel=3,
        )
    return Claim.mechanism(holds, delta=delta, **terms)


def _weakest(points: list[tuple[float, float]]) -> float:
    """The smallest μ that one of the points allows."""
    if not points:
        raise ValueError("points must hold at least one (epsilon, delta)")
    allowed = []
    for point in points:
        try:
            epsilon, delta = point
        except (TypeError, ValueError):
            raise ValueError(f"points must hold pairs (epsilon, delta), got {short_repr(point)}") from None
        noise = float(mechanism_noise(_positive("epsilon", epsilon), delta=unit_interval("delta", delta)))
        allowed.append(1 / noise)
    return min(allowed)


def _positive(name: str, value: float) -> float:
    number = one_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be above 0, got {number}")
    return number


def _given(*values: object) -> list[str]:
    return [name for name, value in zip(("mu", "zcdp", "points"), values, strict=True) if value is not None]
