"""Gauges as grounds of a verdict: proofs that noise is missing, and gauges outside their limits that prove nothing."""

from typing import Any

import numpy as np

from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.evidence.gauges.gaussian import Gaussian
from coalmine.evidence.gauges.grid import Grid
from coalmine.evidence.gauges.length import Length
from coalmine.evidence.stated_noise import StatedNoise
from coalmine.verdict.claim_context import ClaimContext
from coalmine.verdict.findings.gauges import LongResidual, NoisePartlyLeft, NoiseRemovable, OutsideLimits
from coalmine.verdict.verdict import Verdict

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


def _weakened(gauge: GaugeResult, stated: StatedNoise, context: ClaimContext) -> float:
    """Epsilon if only the gauge's share of the stated noise is left: in the flagged rounds, or in all."""
    assert gauge.noise_left is not None
    if context.run.correlated:
        return context.implied(stated.least(gauge.flagged) * gauge.noise_left * stated.high)
    inverse = 1 / (stated.multipliers * stated.high)
    if not gauge.flagged:  # over all rounds: the rounds with the most noise alone may lack it
        return context.composed(np.full(inverse.size, inverse.mean() / gauge.noise_left))
    return context.composed(np.where(np.isin(stated.numbers, gauge.flagged), inverse / gauge.noise_left, inverse))


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
    return NoisePartlyLeft(
        **reading_of(gauge),
        noise_left=gauge.noise_left,
        epsilon=_weakened(gauge, stated, context),
        measured_noise=stated.least(gauge.flagged) * gauge.noise_left * stated.high,
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
