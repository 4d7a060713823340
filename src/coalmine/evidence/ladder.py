"""The ladder of adversaries: from the log of an audit to the scores of each rung.

| rung | the attacker sees | score | null |
|---|---|---|---|
| final | the final model (Algorithm 2) | cosine over its null std | closed form |
| final-update | and knows the initial model | the same with their difference | closed form |
| all-iterates | every model delta (Algorithm 3) | largest cosine over rounds | unobserved canaries |
| unknown-round | and all other updates | log likelihood ratio of the sampling | its law |
| known-round | every model delta, the target's rounds | standardised cosines of its rounds | closed form; unobserved ones |
| known-others | and all other updates | the same on the residual, correlated noise whitened | closed form |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats
from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.loss_law import LossLaw
from coalmine.estimators.null import CosineNull
from coalmine.evidence.noise_schedule import NoiseSchedule
from coalmine.evidence.views import RoundViews, View, read_log, sketch_columns
from coalmine.log.recorded import RecordedRounds
from coalmine.measure.round import Final
from coalmine.measure.scale import SMALLEST, block_scale
from coalmine.measure.settings import Settings

SHARED = 1 << 24  # most numbers in memory for the correlation of rounds
RUNGS = ("final", "final-update", "all-iterates", "unknown-round", "known-round", "known-others")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of one rung for canaries that were presented equally often; high means present.

    `null` is the closed-form law of an unobserved score; None if only the unobserved scores are known. The bound compares
    `bound_observed` (default: the scores) with `bound_null`, or with the unobserved scores if that is None.
    `presentations` is None if they make no difference or if canaries with different numbers are pooled (`mixed`).
    `strength` is the mean of ‖Cu‖² over the canaries under correlated noise, or of Σ(reference/z_t)² if rounds state
    different noise, and `largest_strength` the largest. They replace the presentations, and are None under equal noise.
    `null_dof` is the number of directions from which the null's scale is estimated in all rounds, `round_dof` in one round.
    """

    rung: str
    observed: Floats
    unobserved: Floats
    null: CosineNull | Gaussian | None = None
    bound_null: CosineNull | Gaussian | LossLaw | None = None
    bound_observed: Floats | None = None
    null_dof: float = math.inf
    round_dof: float = math.inf
    mixed: bool = False
    presentations: int | None = None
    strength: float | None = None
    largest_strength: float | None = None
    units: float = 1.0  # a score times this is a cosine
    warnings: tuple[str, ...] = ()

    @property
    def bounded(self) -> Floats:
        """The observed scores that the bound uses."""
        return self.observed if self.bound_observed is None else self.bound_observed

    @property
    def exposure(self) -> float:
        """The squared mean of a score in units of 1/z: presentations, or the strength under correlated noise."""
        return float(self.presentations or 1) if self.strength is None else self.strength


def ladder(log: RecordedRounds, settings: Settings) -> list[Scores]:
    """The scores of every rung whose inputs were given; several groups if presentations differ."""
    reader = LadderReader(log, settings)
    read_log(log, settings, reader)
    return reader.scores(log.final)


class LadderReader:
    """Takes one round after another, and computes the scores of every rung at any time."""

    def __init__(self, log: RecordedRounds, settings: Settings) -> None:
        self._settings = settings
        self._present: dict[int, npt.NDArray[np.int32]] = {}
        self._times = np.zeros(settings.canaries, dtype=np.int64)
        self._largest: list[Floats] | None = None  # of the observed canaries, and of the unobserved ones
        self._scheduled = NoiseSchedule.of(log.observed, settings) is not None
        self._known = _Presentations(log, settings, residual=False)
        self._residual = _Presentations(log, settings, residual=True)
        self._shared = _SharedVariance(log, settings)
        self._own: dict[str, Floats] = {}

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        present = np.array(look.item.present)
        self._times[present] += 1
        if self._settings.noise is not None:
            self._present[look.item.number] = present
        self._own |= {name: np.asarray(values, dtype=np.float64) for name, values in look.item.scores.items()}
        if look.white_residual is not None:
            self._residual.add(look.white_residual)
        if look.plain is None:
            return
        cosines = [scores * look.plain.cosine_scale for scores in (look.plain.observed, look.plain.unobserved)]
        if self._largest is None:
            self._largest = cosines
        else:
            self._largest = [np.maximum(*pair, out=pair[0]) for pair in zip(self._largest, cosines, strict=True)]
        self._known.add(look.plain)
        self._shared.add(look.plain)

    def scores(self, final: Final | None = None, *, largest_groups: bool = False) -> list[Scores]:
        """The scores of every rung from the rounds so far, and from the final model if it is given.

        Canaries that took part equally often are a group. With `largest_groups`, rungs that need the canaries' rounds have
        only the group with most canaries.
        """
        settings, rungs = self._settings, []
        if final is not None:
            rungs += _final_scores(self._times, final, settings)
        if self._largest is not None:  # Algorithm 3: the largest cosine over all rounds, whoever took part in them
            observed, unobserved = (values.copy() for values in self._largest)
            rungs.append(Scores(rung="all-iterates", observed=observed, unobserved=unobserved))
        exposures = None if settings.noise is None else _exposures(self._present, settings, settings.noise)
        rungs += _known_scores(
            settings, self._known, self._times, self._shared, exposures, largest_groups, self._scheduled
        )
        rungs += _known_scores(settings, self._residual, self._times, None, None, largest_groups, self._scheduled)
        # the user's own attacks: their scores after the last round, against those of unobserved canaries
        return rungs + [
            Scores(rung=name, observed=values[: settings.canaries], unobserved=values[settings.canaries :])
            for name, values in self._own.items()
        ]


def unit_null(settings: Settings, free: float | None = None) -> CosineNull:
    """The law of a standardised unobserved cosine with one vector, given the observed canaries.

    Exact in one block; in several it has the right variance and fourth moment if `free` is the dof of its scale.
    """
    directions = max(round(settings.free if free is None else free), 2)
    dof = float(directions) if settings.kind == "rotated" else math.inf
    return CosineNull(directions, scale=math.sqrt(directions), dof=dof)


def exact_bound(scores: Floats, dof: float) -> dict[str, Any]:
    """Observed scores and null for the bound: exact even if scores are large relative to their dof.

    A score is a coordinate a over the root mean square of dof other directions. For an absent canary all dof + 1
    directions are exchangeable, so s/√(s² + dof) is a cosine in dof + 1 dimensions.
    """
    return {
        "bound_observed": scores / np.sqrt(scores * scores + dof) * (1 - 1e-15),  # 1 itself has probability 0
        "bound_null": CosineNull(max(int(dof) + 1, 2)),
    }


def _final_scores(times: npt.NDArray[np.int64], final: Final, settings: Settings) -> list[Scores]:
    pairs = [("final", final.cosines, final.norm, final.block_rests)]
    if final.update_cosines is not None:
        pairs.append(("final-update", final.update_cosines, final.update_norm or 1.0, final.update_block_rests))
    scored = []
    groups = [int(number) for number in np.unique(times)]
    for rung, singles, norm, rests in pairs:
        cosines = np.asarray(singles, dtype=np.float64)
        observed = cosines[: settings.canaries]
        off = max(1 - float(observed @ observed), SMALLEST) / settings.free
        std, dof, tail_dof = (
            math.sqrt(off if settings.kind == "rotated" else 1 / settings.dim),
            settings.free,
            settings.free,
        )
        if rests is not None:
            std, dof, tail_dof = block_scale(rests / norm, settings)
        null, unobserved = unit_null(settings, dof), cosines[settings.canaries :] / std
        everyone = np.ones(settings.canaries, dtype=bool)
        parts: list[tuple[npt.NDArray[np.bool_], int | None, bool]] = [(everyone, None, len(groups) > 1)]
        if len(groups) > 1:
            parts += [(times == number, number, False) for number in groups if number]
        for members, number, mixed in parts:
            scores = observed[members] / std
            bound = exact_bound(scores, tail_dof) if settings.kind == "rotated" else {"bound_null": null}
            scored.append(
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
    return scored


def presented_times(log: RecordedRounds, settings: Settings) -> npt.NDArray[np.int64]:
    """The number of observed rounds in which each canary took part."""
    times = np.zeros(settings.canaries, dtype=np.int64)
    for entry in log.observed:
        times[entry.present] += 1
    return times


def most_presentations(log: RecordedRounds, settings: Settings) -> int:
    """Largest number of presentations of one canary; 1 before the first round."""
    return max(int(presented_times(log, settings).max()), 1)


def usual_presentations(log: RecordedRounds, settings: Settings) -> int:
    """Most frequent number of presentations, the larger one in a tie; 1 before the first round.

    The first row of known-others and the analytical epsilon of `coalmine run` are for this number.
    """
    counts = np.bincount(presented_times(log, settings))
    counts[0] = 0
    return max(int(len(counts) - 1 - np.argmax(counts[::-1])) if counts.any() else 1, 1)


class _Presentations:
    """Weighted scores of each canary over its own rounds, and the parts of their variance."""

    def __init__(self, log: RecordedRounds, settings: Settings, *, residual: bool) -> None:
        self.residual = residual
        self.times = np.zeros(settings.canaries, dtype=np.int64)
        self.sums = np.zeros(settings.canaries)
        self.squares = np.zeros(settings.canaries)  # Σw² over the canary's rounds
        self.strengths = np.zeros(settings.canaries)  # squared mean of a score, in units of 1/z
        self.unobserved_sums = np.zeros(settings.unobserved)
        self.sizes: list[float] = []  # canaries present, round by round
        self.dof = self.tail_dof = math.inf
        self._blocks = np.arange(0, settings.unobserved, settings.canaries)[:, None]
        self._weigh = _weights(log, residual=residual)

    def add(self, view: View) -> None:
        """Take the next round."""
        if not view.present.size:
            return
        present, share = view.present, np.zeros(self.times.size)
        share[present] = view.weights
        weights = self._weigh(view) * share[present]
        self.times[present] += 1
        self.sums[present] += weights * view.observed[present]
        self.squares[present] += weights * weights
        self.strengths[present] += share[present] ** 2
        owned = (self._blocks + present).ravel()  # an unobserved canary counts in the rounds of an observed one
        kept = np.flatnonzero(owned < self.unobserved_sums.size)
        owned, owners = owned[kept], kept % present.size
        self.unobserved_sums[owned] += weights[owners] * view.unobserved[owned]
        self.sizes.append(float(share @ share))
        self.dof, self.tail_dof = min(self.dof, view.dof), min(self.tail_dof, view.tail_dof)


def _known_scores(
    settings: Settings,
    totals: _Presentations,
    took_part: npt.NDArray[np.int64],
    shared: "_SharedVariance | None",
    exposures: Floats | None,
    largest_group: bool,
    scheduled: bool,
) -> list[Scores]:
    """The scores of known-round, which needs the `shared` variance of a canary's rounds, or of known-others.

    `took_part` is the number of rounds of each canary. Under correlated noise known-round needs the canaries' `exposures`.
    With `largest_group`, only the largest group of canaries that took part equally often. `scheduled` means that rounds
    state different noise.
    """
    if not totals.sizes:
        return []
    residual = totals.residual
    whitened = residual and settings.noise is not None
    presented = totals.times
    if whitened:  # a canary is in the whitened rows of many rounds, but took part in its own
        presented = np.where(totals.strengths > 0, took_part, 0)
    groups, sizes = np.unique(presented[presented > 0], return_counts=True)
    if largest_group and groups.size:
        groups = groups[sizes.argmax() :][:1]
    variance = totals.squares.copy()
    several = (presented > 1) & np.isin(presented, groups)
    if shared is not None and several.any():
        variance[several] = shared.variance(presented)[several]
    std = np.sqrt(np.where(variance > 0, variance, 1.0))
    scores = totals.sums / std
    owners = (
        np.arange(settings.unobserved) % settings.canaries
    )  # observed canary whose rounds an unobserved one is assigned
    absent = totals.unobserved_sums / std[owners]
    pooled = totals.dof * sum(totals.sizes) ** 2 / sum(size * size for size in totals.sizes)
    strengths = totals.strengths if exposures is None else exposures
    varied = scheduled or settings.noise is not None
    scored = []
    for times in groups:
        members = np.flatnonzero(presented == times)
        once = times == 1
        combined = bool(settings.momentum) or whitened
        null: CosineNull | Gaussian = unit_null(settings, totals.dof) if once and not combined else Gaussian(0.0, 1.0)
        closed = once or residual
        bound: dict[str, Any] = {"bound_null": null if closed else None}
        if whitened or (closed and (settings.kind == "rotated" or settings.momentum)):
            bound = exact_bound(
                scores[members], totals.tail_dof
            )  # over several rounds tails are lighter, so the bound stays valid
        own = strengths[members]
        scored.append(
            Scores(
                rung="known-others" if residual else "known-round",
                observed=_at_one_strength(scores[members], np.sqrt(own)) if whitened or scheduled else scores[members],
                unobserved=absent[(presented == times)[owners]],
                null=null,
                null_dof=_dof(settings, pooled, estimated=not closed, whitened=whitened),
                round_dof=totals.dof if closed else float(settings.unobserved),
                presentations=int(times),
                strength=float(own.mean()) if varied else None,
                largest_strength=float(own.max()) if varied else None,
                **bound,
            )
        )
    return scored


def _at_one_strength(scores: Floats, sensitivities: Floats) -> Floats:
    """Scores as if all canaries had the root mean square of their sensitivities: score = β·sensitivity + noise is fitted.

    Their mean is β̂ times that root mean square, with the variance of a mean of this many scores; their std is that of the
    residuals.
    """
    if np.ptp(sensitivities) < 1e-9 * sensitivities.max():
        return scores
    beta = float(sensitivities @ scores) / float(sensitivities @ sensitivities)
    residuals = scores - beta * sensitivities
    return np.asarray(beta * math.sqrt(float(np.mean(sensitivities**2))) + residuals - residuals.mean())


def _exposures(present: dict[int, npt.NDArray[np.int32]], settings: Settings, noise: CorrelatedNoise) -> Floats:
    """‖Cu‖² of each canary, where u marks the rounds in which it took part."""
    encoder, strengths = noise.encoder(), np.zeros(settings.canaries)
    for number in range(1, noise.rounds + 1):
        shares = np.zeros(settings.canaries)
        shares[present.get(number, [])] = 1.0
        combined = encoder.add(number, shares)
        assert combined is not None  # no round is missing here
        strengths += combined**2
    return strengths


def _dof(settings: Settings, pooled: float, *, estimated: bool, whitened: bool = False) -> float:
    """Directions from which the null's std is estimated; fewer if unobserved canaries give the correlation of rounds."""
    if settings.kind == "sphere" and not settings.momentum and not estimated and not whitened:
        return math.inf
    return min(pooled, settings.unobserved) if estimated else pooled


def _weights(log: RecordedRounds, *, residual: bool) -> Callable[[View], float]:
    """The weight of a round: a canary's contribution over the scale, from the stated noise or else from the clip norm.

    In a residual, which is noise alone, a canary adds the same number of standard deviations in every round. Its scale is
    not in the weights: with few dimensions it is uncertain, and the scores are already divided by it.
    """
    if all(entry.states_noise for entry in log.observed if entry.present.size):
        if residual:
            return lambda view: 1.0
        return lambda view: (
            (view.noise_std or view.clip_norm) / view.scale
        )  # whitened rounds may be in units of the clip norm
    return lambda view: view.clip_norm / view.scale


class _SharedVariance:
    """wᵀGw over each canary's rounds: real updates are correlated from round to round.

    G_tt' is the cosine between the two rounds' vectors orthogonal to the observed canaries, measured along the unobserved
    ones: exact if they span the complement, otherwise to √(2/m). All of G comes from the same directions, so wᵀGw is a mean
    of squares even if rounds nearly cancel. Rounds are kept only if one of their canaries takes part more than once, and
    with many rounds only as many directions as fit in memory.

    If G itself does not fit into `SHARED` numbers, no round is kept. wᵀGw is then the mean square of Σ w_t·row_t, which is
    summed for each canary: the same number up to rounding. If there are too many canaries for that, fewer directions are
    used, and the variance is approximate, to √(2/directions).
    """

    def __init__(self, log: RecordedRounds, settings: Settings) -> None:
        self._settings, self._times = settings, presented_times(log, settings)
        self._columns = sketch_columns(settings, len(log.numbers))
        self._weigh = _weights(log, residual=False)
        self._rows: list[npt.NDArray[np.float32]] = []
        self._weights: list[float] = []
        self._present: list[npt.NDArray[np.int32]] = []
        several = np.flatnonzero(self._times > 1)
        self._indices = np.zeros(settings.canaries, dtype=np.int64)  # index of a canary in the sums
        self._indices[several] = np.arange(several.size)
        self._gram: Floats = np.zeros((0, 0))
        self._sums: Floats | None = None
        rounds = sum(bool((self._times[entry.present] > 1).any()) for entry in log.observed)
        if rounds * (rounds + 2 * settings.canaries) > SHARED:  # G, the canaries of each round, and the product of both
            self._sums = np.zeros((several.size, max(min(settings.unobserved, SHARED // several.size), 1)))

    def add(self, view: View) -> None:
        """Take the next round."""
        members = view.present[self._times[view.present] > 1]
        if not members.size:
            return
        if self._sums is not None:
            row = self._weigh(view) * float(np.mean(view.weights)) * view.unobserved[: self._sums.shape[1]]
            for index in self._indices[members]:
                self._sums[index] += row
            return
        self._rows.append(view.unobserved[: self._columns].astype(np.float32))
        self._weights.append(self._weigh(view) * float(np.mean(view.weights)))
        self._present.append(members)

    def variance(self, times: npt.NDArray[np.int64]) -> Floats:
        """The variance of each canary's score from the rounds so far, in which it took part `times` times."""
        if self._sums is not None:
            squares = np.einsum("cm,cm->c", self._sums, self._sums) / self._sums.shape[1]
            return np.asarray(squares[self._indices])
        several = [members[times[members] > 1] for members in self._present]
        kept = [index for index, members in enumerate(several) if members.size]
        gram = self._products()[np.ix_(kept, kept)] / self._columns
        pattern = np.zeros((self._settings.canaries, len(kept)))
        for column, index in enumerate(kept):
            pattern[several[index], column] = self._weights[index]
        return np.asarray(np.einsum("ct,ct->c", pattern @ gram, pattern))

    def _products(self) -> Floats:
        """Of every two rows so far; those that were asked for before are kept."""
        done, count = len(self._gram), len(self._rows)
        if done < count:
            before, self._gram = self._gram, np.zeros((count, count))
            stacked = np.stack(self._rows)
            for start in range(0, self._columns, 1024):  # single precision would differ from processor to processor
                block = stacked[:, start : start + 1024].astype(np.float64)
                self._gram[done:] += block[done:] @ block.T
            self._gram[:done, :done], self._gram[:done, done:] = before, self._gram[done:, :done].T
        return self._gram
