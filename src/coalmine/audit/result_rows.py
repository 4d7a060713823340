"""From the scores of a rung to the numbers of a result: the row of each group of canaries, and the headline."""

import math

import numpy as np
from scipy.special import ndtri

from coalmine.audit.ladder import RUNGS, Scores
from coalmine.audit.result import CONFIDENCE, Headline, Row, interval_ends
from coalmine.estimators.all_iterates import estimate_from_iterates
from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.final_model import estimate_from_final
from coalmine.estimators.gaussian_fit import EpsilonEstimate, epsilon_estimate
from coalmine.estimators.gaussians import Gaussian
from coalmine.storage.record import FEWEST, Settings

KNOWN_RUNGS = ("known-round", "known-others")


def make_row(scores: Scores, settings: Settings) -> Row | None:
    """The figures of one group of scores; None where it is too small to say anything."""
    estimate = _estimate(scores, settings)
    if estimate is None:
        return None
    delta = settings.delta
    null = scores.unobserved if scores.bound_null is None else scores.bound_null
    return Row(
        presentations=scores.presentations,
        canaries=scores.observed.size,
        estimate=estimate,
        lower_bound=epsilon_lower_bound(scores.bounded, null=null, delta=delta, confidence=CONFIDENCE),
        paper_epsilon=estimate.epsilon if scores.null is None else _paper_epsilon(scores, settings),
        paper_lower_bound=epsilon_lower_bound(
            scores.bounded, null=null, delta=delta, confidence=CONFIDENCE, method="paper"
        ),
        warnings=_warnings(scores, estimate),
        sensitivity=None if scores.strength is None else math.sqrt(scores.strength),
    )


def _estimate(scores: Scores, settings: Settings) -> EpsilonEstimate | None:
    """The estimate from one group of scores; None where it is too small to say anything."""
    compared = scores.unobserved.size if scores.bound_null is None else FEWEST
    if min(scores.observed.size, compared) < FEWEST:
        return None
    if scores.null is None:
        return estimate_from_iterates(scores.observed, scores.unobserved, delta=settings.delta)
    return epsilon_estimate(
        scores.observed,
        null=scores.null,
        delta=settings.delta,
        confidence=None if scores.mixed else CONFIDENCE,
        null_dof=scores.null_dof,
    )


def _paper_epsilon(scores: Scores, settings: Settings) -> float:
    """The paper's own: fitted std, and against N(0, 1/d) for the final model (Algorithm 2)."""
    if scores.rung.startswith("final"):
        return estimate_from_final(scores.observed * scores.units, dim=settings.dim, delta=settings.delta).epsilon
    assert scores.null is not None
    return epsilon_estimate(
        scores.observed, null=scores.null, delta=settings.delta, variance="fitted", confidence=None
    ).epsilon


def _warnings(scores: Scores, estimate: EpsilonEstimate) -> tuple[str, ...]:
    found = list(scores.warnings)
    if scores.mixed:
        found.append(
            "canaries were presented different numbers of times: no interval; each number has a row of its own"
        )
    if estimate.anderson_darling.p_value < 0.01 and scores.null is not None:
        found.append(
            f"the scores are not normal (Anderson-Darling p = {estimate.anderson_darling.p_value:.2g}): "
            "trust the bound, not the interval"
        )
    if estimate.variance.used == "fitted" and scores.null is not None:
        found.append(
            f"the standard deviation was fitted to the {scores.observed.size} scores, as they spread {estimate.std:.3g} "
            "times as much as the null"
        )
    if estimate.epsilon <= estimate.floor.q95:
        found.append(f"nothing was detected: as many canaries read up to {estimate.floor.q95:.2g} when nothing leaks")
    return tuple(found)


def make_headline(
    rungs: list[Scores],
    settings: Settings,
    *,
    rung: str | None,
    participations: int | None,
    sensitivity: float | None = None,
) -> Headline | None:
    """What one rung reads for a client who takes part so often: its own row, or all of its canaries pooled.

    A `sensitivity`, in clip norms, is that of a client who weighs more than a canary.
    """
    name = rung or next((known for known in reversed(RUNGS) if any(s.rung == known for s in rungs)), None)
    groups = [scores for scores in rungs if scores.rung == name]
    if name is None or not groups:
        return None
    usual = max(groups, key=lambda s: s.observed.size)
    times = participations or usual.presentations
    exact = [s for s in groups if s.presentations == times and s.observed.size >= FEWEST]
    heavier = sensitivity is not None and settings.noise is None and not math.isclose(sensitivity**2, times or 1)
    alone = groups if name not in KNOWN_RUNGS or len(groups) == 1 else exact
    if heavier and name in KNOWN_RUNGS:
        alone = []
    try:
        if alone:
            estimate = _estimate(alone[0], settings)
            if estimate is None:
                return None
            return Headline(
                rung=name,
                participations=alone[0].presentations,
                epsilon=estimate.epsilon,
                interval=interval_ends(estimate.interval),
            )
        return _pooled_headline(name, groups, settings, times, sensitivity if heavier else None)
    except ValueError:  # constant scores: the notes say so
        return None


def _pooled_headline(
    name: str, groups: list[Scores], settings: Settings, times: int | None, sensitivity: float | None
) -> Headline | None:
    """β from all canaries, and the epsilon of somebody who takes part `times` times, or has that sensitivity."""
    weight = float(sum(s.observed.size * s.exposure for s in groups))
    usual = max(groups, key=lambda s: s.observed.size)
    exposure = usual.exposure if times is None or usual.strength is not None else float(times)
    if sensitivity is not None:
        exposure = sensitivity**2
    beta = sum(math.sqrt(s.exposure) * float(s.observed.sum()) for s in groups) / weight
    residuals = np.concatenate([s.observed - beta * math.sqrt(s.exposure) for s in groups])
    count = round(weight / exposure)  # canaries of that exposure whose mean is known as well
    if min(count, residuals.size) < FEWEST:
        return None
    normal = ndtri((np.arange(count) + 0.5) / count)
    scores = beta * math.sqrt(exposure) + normal * (float(residuals.std()) / float(normal.std()))
    found = epsilon_estimate(
        scores,
        null=Gaussian(0.0, 1.0),
        delta=settings.delta,
        confidence=CONFIDENCE,
        null_dof=min(s.null_dof for s in groups),
    )
    return Headline(
        rung=name,
        participations=times,
        epsilon=found.epsilon,
        interval=interval_ends(found.interval),
        pooled=True,
    )
