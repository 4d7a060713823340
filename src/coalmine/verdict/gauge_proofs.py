"""Gauges as grounds of a verdict: proofs that noise is missing, and gauges outside their limits that prove nothing."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.evidence.gauges.gaussian import Gaussian
from coalmine.evidence.gauges.grid import Grid
from coalmine.evidence.gauges.length import Length
from coalmine.evidence.stated_noise import StatedNoise
from coalmine.verdict.claim_context import ClaimContext
from coalmine.verdict.findings.gauges import LongResidual, NoisePartlyLeft, NoiseRemovable, OutsideLimits
from coalmine.verdict.verdict import Verdict

Bools = npt.NDArray[np.bool_]
NO_NOISE = 1e-3  # share of the stated noise below which an attacker can remove it


def proofs_of(gauges: list[GaugeResult], context: ClaimContext) -> list[GaugeResult]:
    """The gauges that refute the claim. Those of single coordinates assume a Gaussian law, so another law voids them."""
    gaussian = all(gauge.status == "ok" for gauge in gauges if gauge.gauge is Gaussian)
    return [gauge for gauge in gauges if proves(gauge, context) and (gaussian or not gauge.statistic.needs_gaussian)]


def proves(gauge: GaugeResult, context: ClaimContext) -> bool:
    """Whether a gauge proves that there is too little noise for the claim."""
    if gauge.status != "low" or gauge.noise_left is None or gauge.noise_left >= 1:
        return False
    if gauge.noise_left < NO_NOISE:
        return True
    if not context.explicit:
        return False
    stated = context.run.stated
    if stated is None:
        return False
    return context.exceeded(_weakened(gauge, stated, context))


class _Weakened(NamedTuple):
    """The noise that a gauge leaves: the multiplier of the round with the least, and 1/z of every round."""

    least: float
    inverse: Floats


def _weakened(gauge: GaugeResult, stated: StatedNoise, context: ClaimContext) -> float:
    """Epsilon if only the gauge's share of the stated noise is left."""
    if context.run.correlated:
        return context.implied(stated.least(gauge.flagged) * (gauge.noise_left or 0.0) * stated.high)
    return context.composed(_left(gauge, stated).inverse)


def _left(gauge: GaugeResult, stated: StatedNoise) -> _Weakened:
    """The noise that is left: in each flagged round, in one of them, or over all rounds together.

    The share of the worst round is no limit on that of the others. Where no other is known, only one flagged round is
    taken to have it: the one that states the most noise.
    """
    assert gauge.noise_left
    inverse = 1 / (stated.multipliers * stated.high)
    flagged = np.isin(stated.numbers, gauge.flagged)
    if gauge.statistic is Length.DIFFERENCE:
        return _left_in_pairs(gauge.noise_left, inverse, flagged)
    if not flagged.any():  # over all rounds: the rounds with the most noise alone may lack it
        inverse = np.full(inverse.size, inverse.mean() / gauge.noise_left)
        return _Weakened(stated.least() * gauge.noise_left * stated.high, inverse)
    if len(gauge.left_by_round) == flagged.sum():
        inverse[flagged] /= np.array(gauge.left_by_round)
        return _Weakened(1 / float(inverse[flagged].max()), inverse)
    one = np.flatnonzero(flagged)[np.argmin(inverse[flagged])]
    inverse[one] /= gauge.noise_left
    return _Weakened(1 / float(inverse[one]), inverse)


def _left_in_pairs(left: float, inverse: Floats, flagged: Bools) -> _Weakened:
    """The noise of a client in one round and not in that before: the difference of the two has the noise of both.

    How it is shared between them is not known, so nothing is said of a client in both. The round before may be any that
    was observed, so it is taken to state the most noise.
    """
    pairs = left * np.hypot(1 / inverse[flagged], 1 / inverse.min())
    alone = np.zeros(inverse.size)
    alone[np.flatnonzero(flagged)[np.argmax(pairs)]] = 1 / float(pairs.max())
    return _Weakened(float(pairs.max()), alone)


def reading_of(gauge: GaugeResult) -> dict[str, Any]:
    """The facts of a finding that rests on one gauge: its reading, its limits, and the rounds outside them."""
    return {
        "gauge": gauge.name,
        "reading": (gauge.smallest, gauge.largest),
        "limits": gauge.limits,
        "rounds": len(gauge.flagged) or None,
        "first_round": gauge.flagged[0] if gauge.flagged else None,
    }


def proof(gauge: GaugeResult, context: ClaimContext) -> NoiseRemovable:
    """The finding if a gauge refutes the claim."""
    stated = context.run.stated
    if not gauge.noise_left or gauge.noise_left < NO_NOISE or stated is None:
        return NoiseRemovable(**reading_of(gauge))
    least = stated.least(gauge.flagged) * gauge.noise_left * stated.high
    if not context.run.correlated:
        least = _left(gauge, stated).least
    return NoisePartlyLeft(
        **reading_of(gauge),
        noise_left=gauge.noise_left,
        epsilon=_weakened(gauge, stated, context),
        measured_noise=least,
        claimed_noise=context.noise,
    )


def less_noise_notes(gauges: list[GaugeResult], context: ClaimContext) -> list[str]:
    """Notes on gauges that measure less noise than stated, although the claim still holds."""
    return [
        f"less noise than stated: the {gauge.name} gauge leaves at most {gauge.noise_left:.3g} of it; the claim allows that"
        for gauge in gauges
        if gauge.noise_left is not None and gauge.noise_left < 1 and is_allowed(gauge, context)
    ]


def is_allowed(gauge: GaugeResult, context: ClaimContext) -> bool:
    """Whether the claim allows a gauge's noise; only for gauges of lengths, which are all that less noise changes."""
    stated = context.run.stated
    if not gauge.gauge.measures_length or gauge.status != "low" or stated is None or not context.explicit:
        return False
    least = min(gauge.smallest, gauge.noise_left or 0.0) * 0.98  # the limit's own uncertainty
    if gauge.statistic is Length.DIFFERENCE and least < 0.9 * context.shortest:
        return False  # rounds differ by less than their noise, so noise is reused
    return context.permits(stated.least(gauge.flagged) * stated.low * least)


def outside_limits(odd: list[GaugeResult]) -> Verdict:
    """The verdict if gauges are outside their limits but refute nothing."""
    gauge = next((gauge for gauge in odd if gauge.statistic is Grid.ROUNDING), odd[0])
    finding = OutsideLimits(**reading_of(gauge))
    if gauge.statistic in (Length.RESIDUAL, Length.POOLED) and gauge.status == "warning":
        finding = LongResidual(**reading_of(gauge), length=gauge.largest)
    return Verdict(finding=finding, evidence=tuple(other.name for other in odd if other is not gauge))
