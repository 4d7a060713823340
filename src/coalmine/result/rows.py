"""Computes the numbers of a result from the scores of a rung: the row of each group of canaries, and the headline."""

import math
from dataclasses import replace

import numpy as np
from scipy.special import ndtri

from coalmine.estimators.all_iterates import estimate_from_iterates
from coalmine.estimators.amplification import AmplifiedEpsilon, amplified_epsilon
from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.gaussian_fit import EpsilonEstimate, VarianceChoice, epsilon_estimate, fitted_epsilon
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.intervals import Floor, Interval
from coalmine.estimators.loss_law import allocation_laws, loss_epsilon
from coalmine.estimators.normality import AndersonDarling
from coalmine.estimators.null import CosineNull
from coalmine.estimators.sampling import RandomAllocation, Sampling
from coalmine.evidence.gaussian_bound import (
    CONFIDENCE,
    KNOWN_RUNGS,
    GaussianBound,
    gaussian_bound,
    known_rounds_bound,
)
from coalmine.evidence.gaussian_gate import GaussianGate
from coalmine.evidence.ladder import RUNGS, Scores
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.evidence.unknown_round import UnknownRound
from coalmine.measure.settings import FEWEST, Settings
from coalmine.result.audit_result import Adversary, Headline, Row, interval_ends

POOR_FIT = 0.01  # p-value of the goodness of fit below which there is a warning
SMALLEST_SIGNAL = 1e-4  # value of 1/z up to which nothing leaks
IN_GROUPS = "canaries are picked in groups"


def make_row(scores: Scores, settings: Settings, gate: GaussianGate) -> Row | None:
    """The figures of one group of scores; None if it is too small."""
    estimate = _estimate(scores, settings)
    if estimate is None:
        return None
    delta, bound = settings.delta, _lower_bound(scores, settings)
    null = scores.unobserved if scores.bound_null is None else scores.bound_null
    return _consistent(
        Row(
            presentations=scores.presentations,
            canaries=scores.observed.size,
            estimate=estimate,
            lower_bound=bound,
            gaussian=gaussian_bound(scores, estimate, gate, delta).beside(bound),
            paper_epsilon=estimate.epsilon if scores.null is None else _paper_epsilon(scores, settings),
            paper_lower_bound=epsilon_lower_bound(
                scores.bounded, null=null, delta=delta, confidence=CONFIDENCE, method="paper"
            ),
            warnings=_warnings(scores, estimate),
            sensitivity=None if scores.strength is None else math.sqrt(scores.strength),
        )
    )


def _lower_bound(scores: Scores, settings: Settings) -> float:
    """The valid lower bound from one group of scores."""
    null = scores.unobserved if scores.bound_null is None else scores.bound_null
    return epsilon_lower_bound(scores.bounded, null=null, delta=settings.delta, confidence=CONFIDENCE)


def _consistent(row: Row) -> Row:
    """The row without its interval if the lower bound, which assumes less, lies above it."""
    interval = row.estimate.interval
    if interval is None or row.lower_bound <= interval.high:
        return row
    warning = (
        f"the lower bound lies above the interval {interval.low:.3g} … {interval.high:.3g}, so the scores do not have the "
        "law that the interval assumes: there is no interval"
    )
    return replace(row, estimate=replace(row.estimate, interval=None), warnings=(*row.warnings, warning))


def make_sampled_row(reading: UnknownRound, groups: list[Scores], settings: Settings, gate: GaussianGate) -> Row:
    """The figures of unknown-round: the accountant's epsilon at the measured noise, and the bound from the scores.

    Epsilon falls as noise grows, so the interval of the noise maps to one of epsilon. Both assume the declared scheme.
    `groups` are the scores of known-others, of all canaries that were ever picked.
    """
    delta, sampling, signal = settings.delta, reading.sampling, NoiseSignal.of(groups)
    least = signal.lower_limit(CONFIDENCE)
    low, high = signal.interval(CONFIDENCE)
    null_signal = ndtri(0.95) / math.sqrt(signal.weight)  # 95 % quantile of the estimate of 1/z when nothing leaks
    best = _accounted(signal.beta, sampling, delta)
    if isinstance(sampling, RandomAllocation):
        ends, floor_epsilon = _allocation_ends((low, high), null_signal, signal.beta, best, sampling, delta)
    else:
        ends = (_accounted(low, sampling, delta).low, float(_accounted(high, sampling, delta)))
        floor_epsilon = float(_accounted(null_signal, sampling, delta))
    withheld = gate.unknown_rounds(groups)
    gaussian = GaussianBound(withheld=withheld)
    if not withheld:
        gaussian = GaussianBound(lower_bound=_accounted(least, sampling, delta).low, interval=ends)
    floor = Floor(0.0, floor_epsilon)
    estimate = EpsilonEstimate(
        epsilon=float(best),
        interval=Interval(*ends),
        confidence=CONFIDENCE,
        floor=floor,
        ceiling=math.inf,
        variance=VarianceChoice("accountant", f"the law of the scores is the accountant's for {sampling}"),
        mean=float(reading.observed.mean()),
        std=float(reading.observed.std()),
        null_mean=reading.absent.mean,
        null_std=reading.absent.std,
        anderson_darling=AndersonDarling(math.nan, math.nan),
    )
    bounds = {
        method: epsilon_lower_bound(
            reading.observed, null=reading.absent, delta=delta, confidence=CONFIDENCE, method=method
        )
        for method in ("simultaneous", "paper")
    }
    warnings = [f"the estimate is the accountant's epsilon at the measured noise, for {sampling}"]
    if best.low < best.high:
        warnings.append(
            f"the accountant gives a range, {best.low:.3g} … {best.high:.3g}; the estimate is its upper end"
        )
    if reading.fit.p_value < POOR_FIT:
        warnings.append(
            f"the scores do not follow the accountant's law (Kolmogorov-Smirnov p = {reading.fit.p_value:.2g})"
        )
    if estimate.epsilon <= floor.q95:
        warnings.append(
            f"nothing was detected: with this many canaries, estimates reach {floor.q95:.2g} when nothing leaks"
        )
    return _consistent(
        Row(
            presentations=None,
            canaries=reading.observed.size,
            estimate=estimate,
            lower_bound=bounds["simultaneous"],
            gaussian=gaussian.beside(bounds["simultaneous"]),
            paper_epsilon=math.nan,
            paper_lower_bound=bounds["paper"],
            warnings=tuple(warnings),
            fit=reading.fit,
        )
    )


def without_bound(unknown: Adversary) -> Adversary:
    """The rung without its lower bound, which is not valid if canaries are picked in groups."""
    warning = f"{IN_GROUPS}, so their scores are not independent: there is no lower bound"
    rows = []
    for row in unknown.rows:
        lost = row.estimate.interval is None  # `_consistent` took it, and said so last
        kept = row.warnings[:-1] if lost else row.warnings
        told = warning + (" and no interval" if lost else "")
        gaussian = GaussianBound(withheld=IN_GROUPS)
        rows.append(replace(row, lower_bound=0.0, gaussian=gaussian, paper_lower_bound=0.0, warnings=(*kept, told)))
    return replace(unknown, rows=tuple(rows))


def _allocation_ends(
    ends: tuple[float, float],
    null_signal: float,
    beta: float,
    best: AmplifiedEpsilon,
    sampling: RandomAllocation,
    delta: float,
) -> tuple[tuple[float, float], float]:
    """The interval's ends, and the floor, for an accountant that takes seconds per call.

    They are the accountant's figure at the measured noise, scaled by ratios that follow from the laws of the scores.
    """

    def by_law(inverse_noise: float) -> float:
        if inverse_noise <= SMALLEST_SIGNAL:
            return 0.0
        observed = [sampling.rounds] * sampling.epochs
        laws = allocation_laws(noise=1 / inverse_noise, rounds=sampling.rounds, observed=observed, dof=math.inf)
        return loss_epsilon(*laws, delta)

    middle = by_law(beta)
    if middle == 0:
        return (0.0, max(by_law(ends[1]), float(best))), by_law(null_signal)
    low, high, floor = (by_law(each) / middle for each in (*ends, null_signal))
    return (best.low * low, float(best) * high), float(best) * floor


def _accounted(inverse_noise: float, sampling: Sampling, delta: float) -> AmplifiedEpsilon:
    """The accountant's epsilon at noise multiplier 1/β; 0 without a signal."""
    if inverse_noise <= SMALLEST_SIGNAL:
        return AmplifiedEpsilon(0.0, low=0.0, accountant="", adjacency=sampling.adjacency, kind="upper bound")
    return amplified_epsilon(1 / inverse_noise, sampling, delta)


def _estimate(scores: Scores, settings: Settings) -> EpsilonEstimate | None:
    """The estimate from one group of scores; None if it is too small."""
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
    """The paper's estimate: fitted std, and against N(0, 1/d) for the final model (Algorithm 2)."""
    if scores.rung.startswith("final"):
        return fitted_epsilon(scores.observed * scores.units, null=CosineNull(settings.dim), delta=settings.delta)
    assert scores.null is not None
    return fitted_epsilon(scores.observed, null=scores.null, delta=settings.delta)


def _warnings(scores: Scores, estimate: EpsilonEstimate) -> tuple[str, ...]:
    warnings = list(scores.warnings)
    if scores.mixed:
        warnings.append(
            "canaries were presented different numbers of times: no interval; each number has a row of its own"
        )
    if estimate.anderson_darling.p_value < 0.01 and scores.null is not None:
        warnings.append(
            f"the scores are not normal (Anderson-Darling p = {estimate.anderson_darling.p_value:.2g}): "
            "trust the bound, not the interval"
        )
    if estimate.variance.used == "fitted" and scores.null is not None:
        warnings.append(
            f"the standard deviation was fitted to the {scores.observed.size} scores, as they spread {estimate.std:.3g} "
            "times as much as the null"
        )
    if estimate.epsilon <= estimate.floor.q95:
        warnings.append(
            f"nothing was detected: with this many canaries, estimates reach {estimate.floor.q95:.2g} when nothing leaks"
        )
    return tuple(warnings)


def sampled_headline(unknown: Adversary | None) -> Headline | None:
    """The headline of an amplified claim: the estimate of unknown-round."""
    if unknown is None:
        return None
    return Headline(
        rung=unknown.name,
        participations=None,
        epsilon=unknown.epsilon,
        interval=unknown.interval,
        gaussian=unknown.headline.gaussian,
    )


def make_headline(
    rungs: list[Scores],
    settings: Settings,
    gate: GaussianGate,
    *,
    rung: str | None,
    participations: int | None,
    sensitivity: float | None = None,
) -> Headline | None:
    """The estimate of one rung for a client with this many participations: from its own row, or from all canaries pooled.

    A `sensitivity`, in clip norms, is that of a client with a larger weight than a canary.
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
            headline = Headline(
                rung=name,
                participations=alone[0].presentations,
                epsilon=estimate.epsilon,
                interval=interval_ends(estimate.interval),
                gaussian=gaussian_bound(alone[0], estimate, gate, settings.delta),
            )
            return _below_bounds(headline, alone[:1], settings)
        pooled = _pooled_headline(name, groups, settings, gate, times, sensitivity if heavier else None)
        same = [s for s in groups if s.presentations == times and s.observed.size >= FEWEST]
        return _below_bounds(pooled, [] if heavier else same, settings)
    except ValueError:  # constant scores, which the notes report
        return None


def _below_bounds(headline: Headline | None, groups: list[Scores], settings: Settings) -> Headline | None:
    """The headline without its intervals if a lower bound of the same client lies above them."""
    if headline is None:
        return None
    bound = max((_lower_bound(scores, settings) for scores in groups), default=0.0)
    if headline.interval is not None and bound > headline.interval[1]:
        headline = replace(headline, interval=None)
    return replace(headline, gaussian=headline.gaussian.beside(bound))


def _pooled_headline(
    name: str,
    groups: list[Scores],
    settings: Settings,
    gate: GaussianGate,
    times: int | None,
    sensitivity: float | None,
) -> Headline | None:
    """β from all canaries, and the epsilon of a client who takes part `times` times, or has that sensitivity."""
    weight = float(sum(s.observed.size * s.exposure for s in groups))
    usual = max(groups, key=lambda s: s.observed.size)
    exposure = usual.exposure if times is None or usual.strength is not None else float(times)
    if sensitivity is not None:
        exposure = sensitivity**2
    beta = sum(math.sqrt(s.exposure) * float(s.observed.sum()) for s in groups) / weight
    residuals = np.concatenate([s.observed - beta * math.sqrt(s.exposure) for s in groups])
    count = round(weight / exposure)  # number of canaries of that exposure whose mean is equally precise
    if min(count, residuals.size) < FEWEST:
        return None
    normal = ndtri((np.arange(count) + 0.5) / count)
    scores = beta * math.sqrt(exposure) + normal * (float(residuals.std()) / float(normal.std()))
    estimate = epsilon_estimate(
        scores,
        null=Gaussian(0.0, 1.0),
        delta=settings.delta,
        confidence=CONFIDENCE,
        null_dof=min(s.null_dof for s in groups),
    )
    return Headline(
        rung=name,
        participations=times,
        epsilon=estimate.epsilon,
        interval=interval_ends(estimate.interval),
        gaussian=known_rounds_bound(groups, exposure, gate, settings.delta),
        pooled=True,
    )
