"""The ladder of adversaries: from the log of an audit to the scores of each rung.

| rung | the attacker sees | score | null |
|---|---|---|---|
| final | the final model (Algorithm 2) | cosine over its null std | closed form |
| final-update | and knows the initial model | the same with their difference | closed form |
| all-iterates | every model delta (Algorithm 3) | largest cosine over rounds | unobserved canaries |
| known-round | and in which rounds the target was | standardised cosines of its rounds, combined | closed form; ghosts |
| known-others | and everybody else's updates | the same on what is left, correlated noise whitened | closed form |
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.checks import Floats
from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.null import CosineNull
from coalmine.storage.record import Settings
from coalmine.storage.rounds_file import Final, Round, RoundLog

SMALLEST = 1e-14  # of a squared length: without any noise nothing else is left of it
RUNGS = ("final", "final-update", "all-iterates", "known-round", "known-others")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of one rung for canaries that were presented equally often; high means present.

    `null` is the closed-form law of an unobserved score, None where only the unobserved scores tell. The bound compares
    `bound_observed` (default: the scores) with `bound_null`, or with the unobserved scores where that is None.
    `presentations` is None where they make no difference or, `mixed`, where canaries of different numbers are pooled.
    `strength` is the mean of ‖Cu‖² over the canaries under correlated noise, and `largest_strength` the largest: what
    presentations are under fresh noise, where both are None. `null_dof` is how many directions the null's scale rests on in
    all rounds together, `round_dof` in one.
    """

    rung: str
    observed: Floats
    unobserved: Floats
    null: CosineNull | Gaussian | None = None
    bound_null: CosineNull | Gaussian | None = None
    bound_observed: Floats | None = None
    null_dof: float = math.inf
    round_dof: float = math.inf
    mixed: bool = False
    presentations: int | None = None
    strength: float | None = None
    largest_strength: float | None = None
    units: float = 1.0  # times a score is a cosine
    warnings: tuple[str, ...] = ()

    @property
    def bounded(self) -> Floats:
        """The observed scores as the bound takes them."""
        return self.observed if self.bound_observed is None else self.bound_observed

    @property
    def exposure(self) -> float:
        """The square of what a score's mean is in units of 1/z: presentations, or what stands in their place."""
        return float(self.presentations or 1) if self.strength is None else self.strength


@dataclass(frozen=True)
class View:
    """One round as an attacker sees it: standardised scores, so that an unobserved canary has mean 0 and std 1.

    `scale` is what one std is in the units of the model delta; it rests on `dof` directions. `weights` say how much of each
    present canary is in it: 1, unless rounds were combined.
    """

    number: int
    present: npt.NDArray[np.int32]
    clip_norm: float
    noise_std: float | None
    observed: Floats
    unobserved: Floats
    scale: float
    dof: float
    cosine_scale: float  # times a standardised score is a cosine
    weights: Floats | float = 1.0


def views(log: RoundLog, settings: Settings, *, residual: bool = False, whitened: bool | None = None) -> Iterator[View]:
    """Each observed round, the server's momentum undone; with `residual`, less everybody else's part where known.

    `whitened` (default: as `residual`) undoes the correlation of noise too: what is seen in the place of round t is row t of
    CX + ζ, in which the noise is fresh. It makes no difference to noise that is fresh as it is.
    """
    seen = _plain_views(log, settings, residual=residual)
    asked = residual if whitened is None else whitened
    yield from _whitened(seen, log, settings, settings.noise) if asked and settings.noise else seen


def _plain_views(log: RoundLog, settings: Settings, *, residual: bool) -> Iterator[View]:
    """The rounds as they were released but for momentum.

    A momentum server's delta is Δ_t = βΔ_{t-1} + ρ_t, so ρ_t = Δ_t - βΔ_{t-1}. After a gap that cannot be had, and the round
    is left out. The inverted vector's length is measured along the unobserved canaries.
    """
    previous: Round | None = None
    for item in log.rounds():
        gap = settings.momentum and (previous.number if previous else 0) != item.number - 1
        if not gap and not (residual and item.residual_cosines is None):
            yield _view(item, previous, settings, residual)
        previous = item


def _view(item: Round, previous: Round | None, settings: Settings, residual: bool) -> View:
    cosines = item.residual_cosines if residual else item.cosines
    norm = item.residual_norm if residual else item.norm
    rest = item.residual_rest if residual else item.rest
    assert cosines is not None
    assert norm is not None
    assert rest is not None
    along = np.asarray(cosines, dtype=np.float64) * norm
    if settings.momentum and previous is not None:
        along = along - settings.momentum * np.asarray(previous.cosines, dtype=np.float64) * previous.norm
        scale = math.sqrt(max(float(np.mean(along[settings.canaries :] ** 2)), SMALLEST * float(along @ along)))
        length, dof = scale * math.sqrt(settings.dim), settings.unobserved_dof
    elif settings.kind == "rotated":
        scale, length, dof = rest / math.sqrt(settings.free), norm, float(settings.free)
    else:  # with the others' part out, the canaries' own can be taken out of the length too
        scale = rest / math.sqrt(settings.dim - 1) if residual else norm / math.sqrt(settings.dim)
        length, dof = norm, float(settings.free)
    scores = along / scale
    return View(
        number=item.number,
        present=item.present,
        clip_norm=item.clip_norm,
        noise_std=item.noise_std,
        observed=scores[: settings.canaries],
        unobserved=scores[settings.canaries :],
        scale=scale,
        dof=dof,
        cosine_scale=scale / length,
    )


def _whitened(seen: Iterator[View], log: RoundLog, settings: Settings, noise: CorrelatedNoise) -> Iterator[View]:
    """The rounds multiplied by C, in units of ζ's std; left out where a round is missing that they need.

    A round's unit is its noise's claimed std over the std that C gives it, n and clip norm included; where none was claimed,
    the clip norm. Lengths are measured along the unobserved canaries, as where momentum is undone.
    """
    claimed = all(item.noise_std for item in log.rounds())
    encoder = noise.encoder()
    for view in seen:
        unit = (view.noise_std or 0.0) / noise.std(view.number) if claimed else view.clip_norm
        shares = np.zeros(settings.canaries)
        shares[view.present] = view.weights
        along = np.concatenate([view.observed, view.unobserved]) * (view.scale / unit)
        combined = encoder.add(view.number, np.concatenate([shares, along]))
        if combined is None:
            continue
        shares, along = combined[: settings.canaries], combined[settings.canaries :]
        scale = math.sqrt(max(float(np.mean(along[settings.canaries :] ** 2)), SMALLEST * float(along @ along)))
        present = np.flatnonzero(shares).astype(np.int32)
        yield View(
            number=view.number,
            present=present,
            clip_norm=1.0,
            noise_std=1.0 if claimed else None,
            observed=along[: settings.canaries] / scale,
            unobserved=along[settings.canaries :] / scale,
            scale=scale,
            dof=settings.unobserved_dof,
            cosine_scale=1 / math.sqrt(settings.dim),
            weights=shares[present],
        )


def ladder(log: RoundLog, settings: Settings) -> list[Scores]:
    """The scores of every rung whose inputs were given; several groups where presentations differ."""
    rungs = []
    if log.final is not None:
        rungs += _final_scores(log, log.final, settings)
    rungs += _largest_scores(log, settings)
    rungs += _known_scores(log, settings, residual=False)
    rungs += _known_scores(log, settings, residual=True)
    return rungs + _own_scores(log, settings)


def unit_null(settings: Settings) -> CosineNull:
    """The law of a standardised unobserved cosine with one vector (STATISTICS: exact given the observed canaries)."""
    dof = float(settings.free) if settings.kind == "rotated" else math.inf
    return CosineNull(settings.free, scale=math.sqrt(settings.free), dof=dof)


def exact_bound(scores: Floats, dof: float) -> dict[str, Any]:
    """Observed scores and null as the bound wants them: exact also where scores are large beside their dof.

    A score is a over the length of dof other directions; absent, a is one direction of dof + 1 that are all alike, so
    s/√(s² + dof) is a cosine in dof + 1 dimensions.
    """
    return {
        "bound_observed": scores / np.sqrt(scores * scores + dof) * (1 - 1e-15),  # 1 itself has probability 0
        "bound_null": CosineNull(max(int(dof) + 1, 2)),
    }


def _final_scores(log: RoundLog, final: Final, settings: Settings) -> list[Scores]:
    pairs = [("final", final.cosines)]
    if final.update_cosines is not None:
        pairs.append(("final-update", final.update_cosines))
    found = []
    times = presented_times(log, settings)
    groups = [int(number) for number in np.unique(times)]
    for rung, singles in pairs:
        cosines = np.asarray(singles, dtype=np.float64)
        observed = cosines[: settings.canaries]
        off = max(1 - float(observed @ observed), SMALLEST) / settings.free
        std = math.sqrt(off if settings.kind == "rotated" else 1 / settings.dim)
        null, unobserved = unit_null(settings), cosines[settings.canaries :] / std
        everybody = np.ones(settings.canaries, dtype=bool)
        parts: list[tuple[npt.NDArray[np.bool_], int | None, bool]] = [(everybody, None, len(groups) > 1)]
        if len(groups) > 1:
            parts += [(times == number, number, False) for number in groups if number]
        for members, number, mixed in parts:
            scores = observed[members] / std
            bound = exact_bound(scores, settings.free) if settings.kind == "rotated" else {"bound_null": null}
            found.append(
                Scores(
                    rung=rung,
                    observed=scores,
                    unobserved=unobserved,
                    null=null,
                    null_dof=null.dof,
                    units=std,
                    presentations=number,
                    mixed=mixed,
                    **bound,
                )
            )
    return found


def presented_times(log: RoundLog, settings: Settings) -> npt.NDArray[np.int64]:
    """In how many observed rounds each canary took part."""
    times = np.zeros(settings.canaries, dtype=np.int64)
    for item in log.rounds():
        times[item.present] += 1
    return times


def _largest_scores(log: RoundLog, settings: Settings) -> list[Scores]:
    """Algorithm 3: the largest cosine over all rounds, whoever took part in them."""
    largest: Floats | None = None
    for view in views(log, settings):
        cosines = np.concatenate([view.observed, view.unobserved]) * view.cosine_scale
        largest = cosines if largest is None else np.maximum(largest, cosines)
    if largest is None:
        return []
    return [Scores(rung="all-iterates", observed=largest[: settings.canaries], unobserved=largest[settings.canaries :])]


@dataclass(frozen=True)
class _Presentations:
    """Weighted scores of each canary over its own rounds, and the pieces of their variance."""

    times: npt.NDArray[np.int64]
    sums: Floats
    ghost_sums: Floats
    squares: Floats  # Σw² over the canary's rounds
    strengths: Floats  # what a score's mean is, squared, in units of 1/z; fresh noise: times
    sizes: list[float]  # canaries present, round by round
    dof: float


def _known_scores(log: RoundLog, settings: Settings, *, residual: bool) -> list[Scores]:
    rung = "known-others" if residual else "known-round"
    seen = _presentations(log, settings, residual=residual)
    if seen is None:
        return []
    variance = seen.squares.copy()
    several = seen.times > 1
    if not residual and several.any():
        variance[several] = _shared_variance(log, settings, seen.times)[several]
    std = np.sqrt(np.where(variance > 0, variance, 1.0))
    scores = seen.sums / std
    owners = np.arange(settings.unobserved) % settings.canaries  # whose rounds an unobserved canary borrows
    ghosts = seen.ghost_sums / std[owners]
    pooled = seen.dof * sum(seen.sizes) ** 2 / sum(size * size for size in seen.sizes)
    whitened = residual and settings.noise is not None
    strengths = seen.strengths if residual or settings.noise is None else _exposures(log, settings, settings.noise)
    found = []
    for times in np.unique(seen.times[seen.times > 0]):
        members = np.flatnonzero(seen.times == times)
        once = times == 1
        combined = bool(settings.momentum) or whitened
        null: CosineNull | Gaussian = unit_null(settings) if once and not combined else Gaussian(0.0, 1.0)
        closed = once or residual
        bound: dict[str, Any] = {"bound_null": null if closed else None}
        if whitened or (closed and (settings.kind == "rotated" or settings.momentum)):
            bound = exact_bound(scores[members], seen.dof)  # over several rounds tails are lighter: a bound still
        own = strengths[members]
        found.append(
            Scores(
                rung=rung,
                observed=_at_one_strength(scores[members], np.sqrt(own)) if whitened else scores[members],
                unobserved=ghosts[np.isin(owners, members)],
                null=null,
                null_dof=_dof(settings, pooled, estimated=not closed, whitened=whitened),
                round_dof=seen.dof if closed else float(settings.unobserved),
                presentations=int(times),
                strength=None if settings.noise is None else float(own.mean()),
                largest_strength=None if settings.noise is None else float(own.max()),
                **bound,
            )
        )
    return found


def _at_one_strength(scores: Floats, sensitivities: Floats) -> Floats:
    """Scores as if all canaries had the root mean square of their sensitivities: score = β·sensitivity + noise is fitted.

    Their mean is β̂ times that root, whose variance is that of a mean of so many; their std is that of the residuals.
    """
    if np.ptp(sensitivities) < 1e-9 * sensitivities.max():
        return scores
    beta = float(sensitivities @ scores) / float(sensitivities @ sensitivities)
    residuals = scores - beta * sensitivities
    return np.asarray(beta * math.sqrt(float(np.mean(sensitivities**2))) + residuals - residuals.mean())


def _exposures(log: RoundLog, settings: Settings, noise: CorrelatedNoise) -> Floats:
    """‖Cu‖² of each canary, u the rounds that it took part in."""
    present = {item.number: item.present for item in log.rounds()}
    encoder, strengths = noise.encoder(), np.zeros(settings.canaries)
    for number in range(1, noise.rounds + 1):
        shares = np.zeros(settings.canaries)
        shares[present.get(number, [])] = 1.0
        combined = encoder.add(number, shares)
        assert combined is not None  # no round is missing here
        strengths += combined**2
    return strengths


def _dof(settings: Settings, pooled: float, *, estimated: bool, whitened: bool = False) -> float:
    """From how many directions the null's std comes; fewer where rounds' correlations come from unobserved canaries."""
    if settings.kind == "sphere" and not settings.momentum and not estimated and not whitened:
        return math.inf
    return min(pooled, settings.unobserved) if estimated else pooled


def _presentations(log: RoundLog, settings: Settings, *, residual: bool) -> _Presentations | None:
    times = np.zeros(settings.canaries, dtype=np.int64)
    sums, squares, strengths = (np.zeros(settings.canaries) for _ in range(3))
    ghost_sums = np.zeros(settings.unobserved)
    owners = np.arange(settings.unobserved) % settings.canaries
    sizes, dof = [], math.inf
    weigh = _weights(log, residual=residual)
    for view in views(log, settings, residual=residual):
        if not view.present.size:
            continue
        share = np.zeros(settings.canaries)
        share[view.present] = view.weights
        times[view.present] += 1
        weights = weigh(view) * share
        sums += weights * view.observed
        squares += weights * weights
        strengths += share * share
        ghost_sums += weights[owners] * view.unobserved
        sizes.append(float(share @ share))
        dof = min(dof, view.dof)
    if residual and settings.noise is not None:  # a canary is in the rows of many rounds, but took part in its own
        times = np.where(strengths > 0, presented_times(log, settings), 0)
    return _Presentations(times, sums, ghost_sums, squares, strengths, sizes, dof) if sizes else None


def _weights(log: RoundLog, *, residual: bool) -> Callable[[View], float]:
    """Rounds weigh by what a canary adds over the scale: the stated noise tells that, n included; else the clip norm does.

    A residual is noise alone, in which a canary adds the same number of standard deviations in every round. Its own scale is
    left out of the weights, as in few dimensions it is itself uncertain and the scores are divided by it.
    """
    if all(item.noise_std for item in log.rounds() if item.present.size):
        if residual:
            return lambda view: 1.0
        return lambda view: (view.noise_std or view.clip_norm) / view.scale  # whitened ones may be in units of the clip
    return lambda view: view.clip_norm / view.scale


def _shared_variance(log: RoundLog, settings: Settings, times: npt.NDArray[np.int64]) -> Floats:
    """wᵀGw over each canary's rounds: real updates correlate from round to round.

    G_tt' is the cosine between the two rounds' vectors off the observed canaries, measured along the unobserved ones: exact
    where they fill the complement, else to √(2/m). All of G comes from the same directions, so that wᵀGw is a mean of
    squares and stays one where rounds nearly cancel.
    """
    rows, weights, present = [], [], []
    weigh = _weights(log, residual=False)
    for view in views(log, settings):
        members = view.present[times[view.present] > 1]
        if members.size:
            rows.append(view.unobserved.astype(np.float32))
            weights.append(weigh(view))
            present.append(members)
    stacked = np.stack(rows)
    gram = (stacked @ stacked.T).astype(np.float64) / settings.unobserved
    pattern = np.zeros((settings.canaries, len(rows)))
    for column, (members, weight) in enumerate(zip(present, weights, strict=True)):
        pattern[members, column] = weight
    return np.asarray(np.einsum("ct,ct->c", pattern @ gram, pattern))


def _own_scores(log: RoundLog, settings: Settings) -> list[Scores]:
    """The user's own attacks: their scores after the last round, against those of unobserved canaries."""
    last: dict[str, Floats] = {}
    for item in log.rounds():
        last |= {name: np.asarray(values, dtype=np.float64) for name, values in item.scores.items()}
    return [
        Scores(rung=name, observed=values[: settings.canaries], unobserved=values[settings.canaries :])
        for name, values in last.items()
    ]
