"""Epsilon and a verdict from scores alone, without a run, for `coalmine estimate`."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.estimators.bounds import epsilon_lower_bound, lower_bound_ceiling, score_array
from coalmine.estimators.gaussian_fit import EpsilonEstimate, epsilon_estimate, equal_scores
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.null import CosineNull
from coalmine.estimators.variance import Variance
from coalmine.evidence.gaussian_bound import GaussianBound, scores_bound
from coalmine.evidence.ladder import Scores
from coalmine.verdict.claim import Claim
from coalmine.verdict.claim_context import RunFacts
from coalmine.verdict.findings.power import NoClosedForm, PossiblyHidden
from coalmine.verdict.mechanism_claim import judge
from coalmine.verdict.rung_claim import BOUND_CONFIDENCE, TWO_SAMPLES
from coalmine.verdict.verdict import Verdict

SMALLEST, LARGEST = 1e-60, 1e60  # limits of stds and scores: squares of their ratios do not overflow


@dataclass(frozen=True, kw_only=True)
class ScoredCanaries:
    """Observed scores and their null: a law, or the scores of unobserved canaries."""

    observed: Floats
    null: CosineNull | Gaussian | Floats
    null_dof: float
    described: str
    unobserved: Floats | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScoresEstimate:
    """The result from scores without a run: estimate, interval, bound, floor, and the verdict if there is a claim."""

    canaries: ScoredCanaries
    delta: float
    estimate: EpsilonEstimate
    method: str
    confidence: float
    lower_bound: float
    gaussian: GaussianBound
    ceiling: float
    paper_epsilon: float
    paper_lower_bound: float
    claim: Claim | None
    verdict: Verdict | None
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON, under the names of an audit's result."""
        return {
            "canaries": self.canaries.observed.size,
            "unobserved": _unobserved(self.canaries.null),
            "delta": self.delta,
            "confidence": self.confidence,
            **self.estimate.to_dict(),
            "lower_bound": self.lower_bound,
            **self.gaussian.to_dict(),
            "method": self.method,
            "paper": {"epsilon": self.paper_epsilon, "lower_bound": self.paper_lower_bound},
            "ceiling": self.ceiling,
            "claimed_epsilon": None if self.claim is None else self.claim.epsilon,
            "verdict": None if self.verdict is None else self.verdict.outcome,
            "reason": None if self.verdict is None else self.verdict.reason,
            "warnings": list(self.warnings),
        }


def checked_scores(name: str, scores: Floats | None) -> Floats:
    """Scores as float64, rejected if they are equal up to rounding, or so large that their squares overflow."""
    array = score_array(name, scores)
    farthest = float(np.abs(array).max())
    if farthest > LARGEST:
        raise ValueError(f"{name} scores must be at most {LARGEST:g} in size, got {farthest:.4g}")
    apart = float(np.ptp(array))
    if apart <= 1e-12 * farthest:
        raise ValueError(equal_scores(name, array))
    if apart < SMALLEST:
        raise ValueError(
            f"{name} scores must differ by at least {SMALLEST:g}, got {apart:.4g}; pass them in other units"
        )
    return array


def estimate_from_scores(
    canaries: ScoredCanaries,
    *,
    delta: float,
    claim: Claim | None,
    known_others: bool,
    method: str | None,
    variance: Variance,
    confidence: float,
) -> ScoresEstimate:
    """Epsilon from the scores of canaries that took part once, and the verdict if there is a claim.

    With `known_others` the other clients' updates were subtracted, so that only noise hides a canary. `method` is that of
    the lower bound; by default "ranks" against unobserved scores, or else "simultaneous".
    """
    observed, null = canaries.observed, canaries.null
    estimate = epsilon_estimate(
        observed, null=null, delta=delta, variance=variance, confidence=confidence, null_dof=canaries.null_dof
    )
    settings = {"delta": delta, "confidence": confidence}
    fitted_null, fitted = Gaussian(estimate.null_mean, estimate.null_std), Gaussian(estimate.mean, estimate.std)
    verdict = None
    if claim is not None:
        verdict = judge_scores(canaries, estimate, claim, delta=delta, known_others=known_others)
        if verdict.outcome == "UNDERPOWERED" and not known_others and _unobserved(null) is None:
            verdict = Verdict(finding=PossiblyHidden())
    unobserved = null if isinstance(null, np.ndarray) else None
    best = "simultaneous" if unobserved is None else "ranks"
    method = method or best
    bound, any_law = (epsilon_lower_bound(observed, null=null, method=each, **settings) for each in (method, best))
    gaussian = scores_bound(estimate, observed, unobserved, _dof(canaries), **settings)
    return ScoresEstimate(
        canaries=canaries,
        delta=delta,
        estimate=estimate,
        method=method,
        confidence=confidence,
        lower_bound=bound,
        gaussian=gaussian.beside(any_law),
        ceiling=lower_bound_ceiling(observed.size, unobserved=_unobserved(null), method=method, **settings),
        paper_epsilon=gaussian_epsilon(fitted_null, fitted, delta=delta),
        paper_lower_bound=epsilon_lower_bound(observed, null=null, method="paper", **settings),
        claim=claim,
        verdict=verdict,
        warnings=(*canaries.notes, *_warnings(estimate, observed.size, claim, verdict)),
    )


def judge_scores(
    canaries: ScoredCanaries, estimate: EpsilonEstimate, claim: Claim, *, delta: float, known_others: bool
) -> Verdict:
    """The verdict on a mechanism claim, for canaries that were presented once.

    Unless the other updates are known, it is unclear how much they hide. Power is then judged as on the known-round rung,
    by how far the mean score lies below that of the claim. Unobserved scores give no null exact enough for a test of the
    mean, so only the lower bound can refute the claim.
    """
    run = RunFacts(delta=delta, planned=1, presentations=1, vouched=known_others)
    if isinstance(canaries.null, np.ndarray):
        scores = Scores(rung=TWO_SAMPLES, observed=canaries.observed, unobserved=canaries.null)
        verdict = judge(claim, [scores], [], run)[1][TWO_SAMPLES]
        return verdict if verdict.outcome == "VIOLATION" else _undecided(canaries, claim, delta)
    rung = "known-others" if known_others else "known-round"
    unit: CosineNull | Gaussian = Gaussian(0.0, 1.0)
    if isinstance(canaries.null, CosineNull):
        unit = CosineNull(canaries.null.dim, scale=1 / estimate.null_std)
    scores = Scores(
        rung=rung,
        observed=canaries.observed / estimate.null_std,
        unobserved=np.zeros(0),  # the bound has its null in closed form
        null=unit,
        bound_null=unit,
        null_dof=canaries.null_dof,
        presentations=1,
    )
    return replace(judge(claim, [scores], [], run)[1][rung], rung=None)


def _undecided(canaries: ScoredCanaries, claim: Claim, delta: float) -> Verdict:
    highest = lower_bound_ceiling(
        canaries.observed.size,
        unobserved=_unobserved(canaries.null),
        delta=delta,
        confidence=BOUND_CONFIDENCE,
        method="ranks",
    )
    ceiling = None if highest > claim.epsilon else highest
    return Verdict(finding=NoClosedForm(confidence=BOUND_CONFIDENCE, ceiling=ceiling))


def _dof(canaries: ScoredCanaries) -> float:
    """The number of directions from which the null's scale was estimated."""
    return min(canaries.null_dof, getattr(canaries.null, "dof", math.inf))


def _unobserved(null: CosineNull | Gaussian | Floats) -> int | None:
    return null.size if isinstance(null, np.ndarray) else None


def _warnings(estimate: EpsilonEstimate, count: int, claim: Claim | None, verdict: Verdict | None) -> list[str]:
    notes = []
    if estimate.anderson_darling.p_value < 0.01:
        notes.append("the scores are not normal: trust the lower bound, not the estimate and its interval")
    ratio = estimate.std / estimate.null_std
    if not 0.5 <= ratio <= 2 and count >= 50:
        notes.append(
            f"the scores' std is {ratio:.2g} times the null's, but correct noise gives 1: is this the right null?"
        )
    if estimate.mean < estimate.null_mean - 4 * estimate.null_std / math.sqrt(count):
        notes.append(
            "observed scores lie below unobserved ones, but high scores must mean participation: is the sign reversed?"
        )
    if estimate.epsilon <= estimate.floor.q95:
        notes.append(
            f"nothing was detected: {count} scores give estimates up to {estimate.floor.q95:.2g} when nothing leaks"
        )
    passed = verdict is not None and verdict.outcome == "PASS"
    if claim is not None and passed and estimate.interval is not None and estimate.interval.low > claim.epsilon:
        notes.append("the mean score passes but the interval lies above the claim: the scores' std is not the null's")
    return notes
