"""Gauges of the noise's level: in total, by layer and by round."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.evidence.gauges.gauge import LEVEL, Gauge, deciding_reading, ratio_quantile
from coalmine.evidence.views import RoundViews, View
from coalmine.measure.settings import Settings

TOO_LONG = 1.02  # ratio to the stated noise from which on the residual holds more than noise


class LevelReader:
    """Takes one round after another, and computes every gauge of norms at the end; all need the stated noise."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lengths: list[_Length] = []
        self._residuals: list[_Length] = []
        self._rounding: dict[int, float] = {}
        self._sums = _Sums(settings)
        self._layers: list[_LayerLengths] = []

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        item = look.item
        if look.plain is not None and look.plain.noise_std:
            self._lengths.append(_Length.of(look.plain))
        if look.white_residual is not None and look.white_residual.noise_std:
            self._residuals.append(_Length.of(look.white_residual))
        if look.white_plain is not None:
            self._sums.add(look.white_plain)
        if item.rounding is not None:
            self._rounding[item.number] = item.rounding
        if item.layer_rests is not None and item.noise_std and self._settings.layers:
            self._layers.append(_LayerLengths(item.number, item.layer_rests, item.noise_std, item.rounding or 0.0))

    def gauges(self, level: float = LEVEL) -> Iterator[Gauge]:
        """Every gauge of norms whose inputs were given; a correct run fails one with probability `level`."""
        if self._lengths:
            yield _noise(self._lengths, level)
        yield from self._sums.gauges(level)
        if self._residuals:
            yield from _residual(self._residuals, self._rounding if self._settings.noise is None else {}, level)
            yield from _layers(self._layers, self._settings, level)


@dataclass(frozen=True)
class _Length:
    """The norm of one round's vector over that of the stated noise, and the directions from which it is measured."""

    number: int
    ratio: float
    dof: float
    noise_std: float

    @classmethod
    def of(cls, view: View) -> "_Length":
        assert view.noise_std
        return cls(view.number, view.scale / view.noise_std, view.dof, view.noise_std)


def _noise(lengths: list[_Length], level: float) -> Gauge:
    """‖P⊥ρ‖/(noise_std·√dof): real updates can only add to it, so too small a value proves too little noise."""
    ratios = np.array([length.ratio for length in lengths])
    floors = np.array([ratio_quantile(level / len(lengths), length.dof) for length in lengths])
    return _one_sided("noise", lengths, ratios, floors)


class _Sums:
    """Two gauges along the unobserved canaries, so that no array of the model's size is kept.

    *dilution*: the norm of the sum of all rounds over that of noise alone; far above 1, real updates hide the canaries.
    *difference*: ‖ρ_t/C_t - ρ_s/C_s‖ over its norm under independent noise, s the previous round; near 0 if noise is reused.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._total, self._variance = np.zeros(settings.unobserved), 0.0
        self._differences: list[_Length] = []
        self._before: tuple[Floats, float] | None = None  # the round before and its noise, over its clip norm

    def add(self, view: View) -> None:
        """Take the next round."""
        before, self._before = self._before, None
        if not view.noise_std:
            return
        along = view.unobserved * view.scale
        self._total += along
        self._variance += view.noise_std**2
        self._before = along / view.clip_norm, view.noise_std / view.clip_norm
        if before is not None:
            gap = self._before[0] - before[0]
            ratio = math.sqrt(float(np.mean(gap * gap))) / math.hypot(self._before[1], before[1])
            self._differences.append(_Length(view.number, ratio, self._settings.unobserved_dof, view.noise_std))

    def gauges(self, level: float) -> Iterator[Gauge]:
        """Both gauges, if noise was stated."""
        if self._variance:
            ratio = math.sqrt(float(np.mean(self._total * self._total)) / self._variance)
            yield Gauge(
                name="dilution",
                smallest=ratio,
                largest=ratio,
                limits=(0.0, math.inf),
                values=np.array([ratio]),
            )
        lengths = self._differences
        if lengths:
            floors = np.full(len(lengths), ratio_quantile(level / len(lengths), self._settings.unobserved_dof))
            ratios = np.array([length.ratio for length in lengths])
            yield _one_sided("difference", lengths, ratios, floors)


def _residual(lengths: list[_Length], rounding: dict[int, float], level: float) -> Iterator[Gauge]:
    """Norms of the residuals, round by round and pooled: only noise is left, so the test is two-sided."""
    ratios = np.array([length.ratio for length in lengths])
    known = {
        length.number: rounding[length.number] / length.noise_std**2 for length in lengths if length.number in rounding
    }
    extra = np.array([known.get(length.number, max(known.values(), default=0.0)) for length in lengths])
    share = level / (2 * len(lengths))
    low = np.array([ratio_quantile(share, length.dof) for length in lengths])
    high = np.array([ratio_quantile(1 - share, length.dof) for length in lengths]) * np.sqrt(1 + extra)
    high = np.maximum(high, TOO_LONG)
    yield _two_sided("residual", lengths, ratios, low, high)
    dofs = np.array([length.dof for length in lengths])
    freedom = float(dofs.sum())
    pooled = math.sqrt(float(dofs @ ratios**2) / freedom)
    allowed = math.sqrt(1 + float(dofs @ extra) / freedom)
    limits = (
        ratio_quantile(level / 2, freedom),
        max(ratio_quantile(1 - level / 2, freedom) * allowed, TOO_LONG * allowed),
    )
    status = "low" if pooled < limits[0] else "warning" if pooled > limits[1] else "ok"
    yield Gauge(
        name="pooled residual",
        smallest=pooled,
        largest=pooled,
        limits=limits,
        status=status,
        noise_left=pooled / limits[0] if status == "low" else None,
        values=np.array([pooled]),
    )


@dataclass(frozen=True)
class _LayerLengths:
    """The norm of one round's residual in each layer, its stated noise, and the rounding of its release."""

    number: int
    rests: Floats
    noise_std: float
    rounding: float


def _layers(lengths: list[_LayerLengths], settings: Settings, level: float) -> Iterator[Gauge]:
    """The same by layer: a small tensor without noise hardly changes the norm of the whole. Rounds are pooled too."""
    if not lengths:
        return
    sizes = np.array([size for _, size in settings.gauged_layers])
    ratios = np.array([item.rests / (np.sqrt(sizes) * item.noise_std) for item in lengths])
    allowed = math.sqrt(1 + max(item.rounding / item.noise_std**2 for item in lengths))
    share = level / (2 * ratios.size)
    pooled_share = level / (2 * len(sizes))
    fresh = settings.noise is None  # otherwise rounds are correlated, and do not add degrees of freedom
    for column, (name, size) in enumerate(settings.gauged_layers):
        low, high = ratio_quantile(share / 2, size), ratio_quantile(1 - share / 2, size) * allowed
        values = ratios[:, column]
        high = max(high, TOO_LONG * allowed)
        outside = (values < low) | (values > high)
        worst = float(values.min()) / low
        freedom = float(size * len(lengths)) if fresh else float(size)
        pooled = math.sqrt(float(np.mean(values**2)))
        floor = ratio_quantile(pooled_share / 2, freedom)
        worst = min(worst, pooled / floor)
        smallest, largest, limits = deciding_reading(values, (low, high), pooled, (floor, math.inf))
        yield Gauge(
            name=f"layer {name}",
            smallest=smallest,
            largest=largest,
            limits=limits,
            flagged=tuple(lengths[index].number for index in np.flatnonzero(outside)),
            status="low" if worst < 1 else "warning" if outside.any() else "ok",
            noise_left=worst if worst < 1 else None,
            values=values,
        )


def _one_sided(name: str, lengths: list[_Length], ratios: Floats, floors: Floats) -> Gauge:
    return _two_sided(name, lengths, ratios, floors, np.full(len(lengths), math.inf))


def _two_sided(name: str, lengths: list[_Length], ratios: Floats, low: Floats, high: Floats) -> Gauge:
    outside = (ratios < low) | (ratios > high)
    worst = float((ratios / low).min())
    limits = (float(low.min()), float(high.max()))
    if outside.any():  # rounds with fewer directions have wider limits
        index = int(np.argmin(ratios / low) if worst < 1 else np.argmax(ratios / high))
        limits = (float(low[index]), float(high[index]))
    return Gauge(
        name=name,
        smallest=float(ratios.min()),
        largest=float(ratios.max()),
        limits=limits,
        flagged=tuple(lengths[index].number for index in np.flatnonzero(outside)),
        status="low" if worst < 1 else "warning" if outside.any() else "ok",
        noise_left=worst if worst < 1 else None,
        values=ratios,
    )
