"""Each observed round as an attacker sees it, from one pass over the log.

`RoundViews` is a round with all of its views. Each reader of a log takes looks, one at a time, and keeps only the numbers it
needs: a log is decoded once, and memory does not grow with it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats
from coalmine.estimators.correlated import CorrelatedNoise, Encoder
from coalmine.evidence.noise_schedule import NoiseSchedule
from coalmine.log.recorded import RecordedRounds
from coalmine.measure.round import Round
from coalmine.measure.scale import SMALLEST, block_scale
from coalmine.measure.settings import Settings

SKETCH = 1 << 23  # most numbers along unobserved canaries in memory, for all rounds
FEWEST_COLUMNS = 256  # fewest of them for each round, however many rounds there are


@dataclass(frozen=True)
class View:
    """One round as an attacker sees it: standardised scores, so that an unobserved canary has mean 0 and std 1.

    `scale` is one std in the units of the model delta. It is estimated from `dof` directions, and for the far tail from
    `tail_dof`, which are fewer only if canaries are in blocks. `weights` are the present canaries' coefficients: 1,
    unless rounds were combined or state different noise.
    """

    number: int
    present: npt.NDArray[np.int32]
    clip_norm: float
    noise_std: float | None
    observed: Floats
    unobserved: Floats
    scale: float
    dof: float
    tail_dof: float
    cosine_scale: float  # a standardised score times this is a cosine
    weights: Floats | float = 1.0


@dataclass(frozen=True)
class RoundViews:
    """One round and its views: as it was released, with momentum undone, and without all other updates if known.

    In the `white_` views the correlation of noise is undone: round t is replaced by row t of CX + ζ, in which the noise is
    independent. They equal the other views if the noise is independent already. A view is None if it cannot be computed: an
    earlier round is missing, or `others` was not given.
    """

    item: Round
    plain: View | None
    residual: View | None
    white_plain: View | None
    white_residual: View | None


class Reader(Protocol):
    """Takes looks, in the order of rounds."""

    def add(self, look: RoundViews) -> None: ...


def read_log(log: RecordedRounds, settings: Settings, *readers: Reader) -> None:
    """Pass every observed round to every reader, in one pass."""
    for look in looks(log, settings):
        for reader in readers:
            reader.add(look)


def looks(log: RecordedRounds, settings: Settings) -> Iterator[RoundViews]:
    """Every observed round with its views."""
    schedule = NoiseSchedule.of(log.observed, settings)
    claimed = all(entry.states_noise for entry in log.observed)
    looker = RoundViewBuilder(settings, claimed=claimed, reference=None if schedule is None else schedule.reference)
    for item in log.rounds():
        yield looker.look(item)


class RoundViewBuilder:
    """Makes the views of one round after another; `claimed` means that every round states its noise.

    A canary's weight is the `reference` noise multiplier over that of the round. Without a reference it is 1.
    A momentum server's delta is Δ_t = βΔ_{t-1} + ρ_t, so ρ_t = Δ_t - βΔ_{t-1}. After a gap it cannot be computed.
    """

    def __init__(self, settings: Settings, *, claimed: bool, reference: float | None = None) -> None:
        self._settings, noise = settings, settings.noise
        self.reference = reference
        self._whiten = (
            None if noise is None else (_Whitener(settings, noise, claimed), _Whitener(settings, noise, claimed))
        )
        self._previous: Round | None = None

    def look(self, item: Round) -> RoundViews:
        """The next round with its views."""
        settings, previous = self._settings, self._previous
        plain = residual = None
        if not settings.momentum or (previous.number if previous else 0) == item.number - 1:
            plain = _view(item, previous, settings, False)
            residual = None if item.residual_cosines is None else _view(item, previous, settings, True)
        self._previous = item
        if self.reference is not None and item.noise_std:
            weight = self.reference * item.clip_norm / item.noise_std
            plain, residual = (None if view is None else replace(view, weights=weight) for view in (plain, residual))
        white_plain, white_residual = plain, residual
        if self._whiten is not None:
            white_plain = None if plain is None else self._whiten[0].whiten(plain)
            white_residual = None if residual is None else self._whiten[1].whiten(residual)
        return RoundViews(item, plain, residual, white_plain, white_residual)


def sketch_columns(settings: Settings, rounds: int) -> int:
    """The number of unobserved canaries kept per round for comparing rounds, so that all fit in memory."""
    return min(settings.unobserved, max(SKETCH // max(rounds, 1), FEWEST_COLUMNS))


def views(
    log: RecordedRounds, settings: Settings, *, residual: bool = False, whitened: bool | None = None
) -> Iterator[View]:
    """One view of each observed round that has it; `whitened` by default as `residual`."""
    undone = residual if whitened is None else whitened
    for look in looks(log, settings):
        plain, left = (look.white_plain, look.white_residual) if undone else (look.plain, look.residual)
        view = left if residual else plain
        if view is not None:
            yield view


def _view(item: Round, previous: Round | None, settings: Settings, residual: bool) -> View:
    cosines = item.residual_cosines if residual else item.cosines
    norm = item.residual_norm if residual else item.norm
    rest = item.residual_rest if residual else item.rest
    rests = item.residual_block_rests if residual else item.block_rests
    assert cosines is not None
    assert norm is not None
    assert rest is not None
    along, tail_dof = np.multiply(cosines, norm, dtype=np.float64), None
    if settings.momentum and previous is not None:
        along = along - settings.momentum * np.asarray(previous.cosines, dtype=np.float64) * previous.norm
        scale = _unobserved_scale(along, settings)
        length, dof = scale * math.sqrt(settings.dim), settings.unobserved_dof
    elif residual and settings.replicated:  # no process has the whole residual: measure along unobserved canaries
        scale, length, dof = _unobserved_scale(along, settings), norm, settings.unobserved_dof
    elif rests is not None:
        (scale, dof, tail_dof), length = block_scale(rests, settings), norm
    elif settings.kind == "rotated":
        scale, length, dof = rest / math.sqrt(settings.free), norm, float(settings.free)
    else:  # in the residual, the canaries' own part can be removed from the norm too
        scale = rest / math.sqrt(settings.dim - 1) if residual else norm / math.sqrt(settings.dim)
        length, dof = norm, float(settings.free)
    scores = np.divide(along, scale, out=along)
    return View(
        number=item.number,
        present=item.present,
        clip_norm=item.clip_norm,
        noise_std=item.noise_std,
        observed=scores[: settings.canaries],
        unobserved=scores[settings.canaries :],
        scale=scale,
        dof=dof,
        tail_dof=dof if tail_dof is None else tail_dof,
        cosine_scale=scale / length,
    )


def _unobserved_scale(along: Floats, settings: Settings) -> float:
    return math.sqrt(max(float(np.mean(along[settings.canaries :] ** 2)), SMALLEST * float(along @ along)))


class _Whitener:
    """Rounds multiplied by C, in units of ζ's std; None if a round that they need is missing.

    A round's unit is its noise's claimed std over the std that C gives it, n and clip norm included; if none was claimed,
    the clip norm. Norms are measured along the unobserved canaries, as when momentum is undone.
    """

    def __init__(self, settings: Settings, noise: CorrelatedNoise, claimed: bool) -> None:
        self._settings, self._noise, self._claimed = settings, noise, claimed
        self._encoder: Encoder = noise.encoder()

    def whiten(self, view: View) -> View | None:
        settings = self._settings
        unit = (view.noise_std or 0.0) / self._noise.std(view.number) if self._claimed else view.clip_norm
        shares = np.zeros(settings.canaries)
        shares[view.present] = view.weights
        along = np.concatenate([view.observed, view.unobserved]) * (view.scale / unit)
        combined = self._encoder.add(view.number, np.concatenate([shares, along]))
        if combined is None:
            return None
        shares, along = combined[: settings.canaries], combined[settings.canaries :]
        scale = _unobserved_scale(along, settings)
        present = np.flatnonzero(shares).astype(np.int32)
        return View(
            number=view.number,
            present=present,
            clip_norm=1.0,
            noise_std=1.0 if self._claimed else None,
            observed=along[: settings.canaries] / scale,
            unobserved=along[settings.canaries :] / scale,
            scale=scale,
            dof=settings.unobserved_dof,
            tail_dof=settings.unobserved_dof,
            cosine_scale=1 / math.sqrt(settings.dim),
            weights=shares[present],
        )
