"""The whole curve of a result: μ of Gaussian differential privacy, the trade-off of an attacker's errors, and δ(ε).

An attacker who knows a client's rounds faces one Gaussian against another, at a distance of μ. So one interval for μ is a
band for the whole curve, valid at all points simultaneously. It assumes Gaussian noise, and is withheld as the bound is.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from coalmine.argument_checks import Floats, finite_array
from coalmine.estimators.gaussians import Gaussian, gaussian_delta
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.evidence.gaussian_bound import CONFIDENCE, KNOWN_RUNGS, NO_LAW, GaussianBound

if TYPE_CHECKING:
    from coalmine.result.audit_result import AuditResult

SMALLEST_RATE, POINTS = 1e-6, 200  # of the default rates and epsilons


@dataclass(frozen=True, kw_only=True)
class GaussianPrivacy:
    """μ of Gaussian differential privacy for the client of a result: the distance of the two worlds' Gaussians.

    `mu` is the middle of its interval: what the mean of the scores says, whatever their spread. `low` and `high` are the
    interval's ends, and `analytical` is the μ of the stated noise; None where it is not known.
    """

    rung: str
    participations: int | None
    mu: float
    low: float
    high: float
    analytical: float | None = None
    confidence: float = CONFIDENCE


@dataclass(frozen=True, kw_only=True)
class TradeOff:
    """The trade-off function f: an attacker's smallest rate of false negatives at each rate of false positives.

    `low` and `high` are a band that contains the true curve at all points with probability `confidence`.
    """

    false_positives: Floats
    false_negatives: Floats
    low: Floats
    high: Floats
    analytical: Floats | None
    confidence: float


@dataclass(frozen=True, kw_only=True)
class PrivacyProfile:
    """The privacy profile δ(ε). `low` and `high` are a band as in `TradeOff`."""

    epsilons: Floats
    deltas: Floats
    low: Floats
    high: Floats
    analytical: Floats | None
    confidence: float


def gaussian_privacy(result: "AuditResult") -> GaussianPrivacy:
    """μ of the strongest attacker who knows the rounds; ValueError, with the reason, if its interval is withheld."""
    rung, times, gaussian = _strongest(result)
    if gaussian.interval is None:
        raise ValueError(
            f"a curve needs an interval that assumes Gaussian noise, which is withheld: {gaussian.withheld}"
        )
    delta, stated = result.settings.delta, result.analytical_epsilon
    low, high = (_mu(value, delta) for value in gaussian.interval)
    known = stated is not None and (times is None or result.trainer.presentations in (None, times))
    analytical = _mu(stated, delta) if known and stated is not None else None
    return GaussianPrivacy(
        rung=rung, participations=times, mu=(low + high) / 2, low=low, high=high, analytical=analytical
    )


def tradeoff(result: "AuditResult", rates: npt.ArrayLike | None = None) -> TradeOff:
    """The trade-off function at these rates of false positives; by default 200 from 1e-6 to 1."""
    privacy = gaussian_privacy(result)
    x = np.geomspace(SMALLEST_RATE, 1.0, POINTS) if rates is None else finite_array("rates", rates)
    if x.size and not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(f"rates must lie in [0, 1], got {x.min():g} to {x.max():g}")

    def at(mu: float) -> Floats:
        return np.asarray(ndtr(-ndtri(x) - mu))

    return TradeOff(
        false_positives=x,
        false_negatives=at(privacy.mu),
        low=at(privacy.high),
        high=at(privacy.low),
        analytical=None if privacy.analytical is None else at(privacy.analytical),
        confidence=privacy.confidence,
    )


def privacy_profile(result: "AuditResult", epsilons: npt.ArrayLike | None = None) -> PrivacyProfile:
    """δ(ε) at these epsilons; by default 200 from 0 to where it is far below the audit's δ."""
    privacy = gaussian_privacy(result)
    last = privacy.high**2 / 2 + 6 * privacy.high
    x = np.linspace(0.0, max(last, 1.0), POINTS) if epsilons is None else finite_array("epsilons", epsilons)
    if x.size and x.min() < 0:
        raise ValueError(f"epsilons must be at least 0, got {x.min():g}")

    def at(mu: float) -> Floats:
        return np.asarray(gaussian_delta(Gaussian(0.0, 1.0), Gaussian(mu, 1.0), epsilon=x))

    return PrivacyProfile(
        epsilons=x,
        deltas=at(privacy.mu),
        low=at(privacy.low),
        high=at(privacy.high),
        analytical=None if privacy.analytical is None else at(privacy.analytical),
        confidence=privacy.confidence,
    )


def _strongest(result: "AuditResult") -> tuple[str, int | None, GaussianBound]:
    """Rung, participations and bound: the headline's if its attacker knows the rounds, or else the strongest's."""
    top = result.headline
    if top is not None and top.rung in KNOWN_RUNGS:
        return top.rung, top.participations, top.gaussian
    for rung in reversed(KNOWN_RUNGS):
        if rung in result.adversaries:
            row = result.adversaries[rung].headline
            return rung, row.presentations, row.gaussian
    return "", None, GaussianBound(withheld=NO_LAW)


def _mu(epsilon: float, delta: float) -> float:
    if epsilon <= 0:
        return 0.0
    noise = float(mechanism_noise(epsilon, delta=delta))
    return 1 / noise if noise > 0 else math.inf
