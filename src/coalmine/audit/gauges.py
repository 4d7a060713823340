"""Gauges of the noise itself: how much of it there is, where, and whether it is new in every round (STATISTICS 6)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import chdtri, gammaincinv

from coalmine.audit.adversaries import View, views
from coalmine.audit.rounds import RoundLog
from coalmine.audit.settings import Settings
from coalmine.checks import Floats
from coalmine.estimators.null import CosineNull

LEVEL = 1e-4  # false alarm of one gauge over the whole run


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """One gauge over the run. `status` is "ok", "low" (proof of less noise than claimed) or "warning".

    `smallest` and `largest` are the extremes over rounds, `limits` what an honest run keeps to; `flagged` rounds
    lie outside.
    """

    name: str
    meaning: str
    smallest: float
    largest: float
    limits: tuple[float, float]
    flagged: tuple[int, ...] = ()
    status: str = "ok"
    values: Floats = field(repr=False, compare=False, default_factory=lambda: np.zeros(0))

    def to_dict(self) -> dict[str, Any]:
        return {
            "meaning": self.meaning,
            "smallest": self.smallest,
            "largest": self.largest,
            "limits": list(self.limits),
            "flagged": list(self.flagged),
            "status": self.status,
        }


def read_gauges(log: RoundLog, settings: Settings) -> list[Gauge]:
    """Every gauge whose inputs were given: all but the cosine of residuals need the claimed noise std."""
    return [gauge for gauge in _all_gauges(log, settings) if gauge is not None]


def _all_gauges(log: RoundLog, settings: Settings) -> Iterator[Gauge | None]:
    with_noise = [view for view in _slim(views(log, settings)) if view.noise_std]
    residuals = [view for view in _slim(views(log, settings, residual=True)) if view.noise_std]
    yield _noise(with_noise, settings)
    yield _dilution(log, settings)
    yield _difference(log, settings)
    yield _residual(residuals, settings)
    yield from _layers(log, settings)
    yield from _correlation(log, settings)


def _slim(found: Iterable[View]) -> Iterator[View]:
    """Views without their scores: a gauge of lengths needs none, and a long run has many."""
    nothing = np.zeros(0)
    for view in found:
        yield View(**(vars(view) | {"observed": nothing, "unobserved": nothing}))


def _noise(found: list[View], settings: Settings) -> Gauge | None:
    """‖P⊥ρ‖/(noise_std·√dof): real signal can only add to it, so too small a value is proof of too little noise."""
    if not found:
        return None
    ratios = np.array([view.scale / view.noise_std for view in found if view.noise_std])
    floors = np.array([_ratio_quantile(LEVEL / len(found), view.dof) for view in found])
    return _one_sided("noise", "length off the canaries over that of the claimed noise", found, ratios, floors)


def _difference(log: RoundLog, settings: Settings) -> Gauge | None:
    """‖ρ_t/C_t - ρ_s/C_s‖ over its length under fresh noise, s the round before: near 0 where noise is used again.

    Taken along the unobserved canaries, so nothing of the model's size is kept.
    """
    found, ratios = [], []
    before: View | None = None
    for view in views(log, settings, whitened=True):
        if before is not None and view.noise_std and before.noise_std:
            gap = view.unobserved * view.scale / view.clip_norm - before.unobserved * before.scale / before.clip_norm
            fresh = math.hypot(view.noise_std / view.clip_norm, before.noise_std / before.clip_norm)
            ratios.append(math.sqrt(float(np.mean(gap * gap))) / fresh)
            found.append(view)
        before = view
    if not found:
        return None
    floors = np.full(len(found), _ratio_quantile(LEVEL / len(found), settings.unobserved_dof))
    meaning = "change from round to round over that of fresh noise"
    return _one_sided("difference", meaning, found, np.array(ratios), floors)


def _dilution(log: RoundLog, settings: Settings) -> Gauge | None:
    """Length of the sum of all rounds over that of noise alone: far above 1, real signal hides the canaries."""
    total, variance, count = np.zeros(settings.unobserved), 0.0, 0
    for view in views(log, settings, whitened=True):
        if view.noise_std:
            total += view.unobserved * view.scale
            variance += view.noise_std**2
            count += 1
    if not count:
        return None
    ratio = math.sqrt(float(np.mean(total * total)) / variance)
    return Gauge(
        name="dilution",
        meaning="length of the sum of all rounds over that of noise alone",
        smallest=ratio,
        largest=ratio,
        limits=(0.0, math.inf),
        values=np.array([ratio]),
    )


def _residual(found: list[View], settings: Settings) -> Gauge | None:
    """The same with everybody else's part taken out: what is left is noise alone, so both sides tell."""
    if not found:
        return None
    ratios = np.array([view.scale / view.noise_std for view in found if view.noise_std])
    return _two_sided(
        "residual", "length of what is left without the others over that of the claimed noise", found, ratios
    )


def _layers(log: RoundLog, settings: Settings) -> Iterator[Gauge]:
    if not settings.layers or settings.momentum:
        return
    sizes = np.array([size for _, size in settings.layers])
    found = [item for item in log.rounds() if item.layer_rests is not None and item.noise_std]
    if not found:
        return
    ratios = np.array([item.layer_rests / (np.sqrt(sizes) * item.noise_std) for item in found])
    share = LEVEL / ratios.size
    for column, (name, size) in enumerate(settings.layers):
        low, high = _ratio_quantile(share / 2, size), _ratio_quantile(1 - share / 2, size)
        values = ratios[:, column]
        outside = (values < low) | (values > high)
        yield Gauge(
            name=f"layer {name}",
            meaning="length of what is left without the others, in this layer, over that of the claimed noise",
            smallest=float(values.min()),
            largest=float(values.max()),
            limits=(low, high),
            flagged=tuple(found[index].number for index in np.flatnonzero(outside)),
            status="low" if (values < low).any() else "warning" if outside.any() else "ok",
            values=values,
        )


def _correlation(log: RoundLog, settings: Settings) -> Iterator[Gauge]:
    """Cosine of a round's residual with the round before and with the sum of all before: 0 for fresh noise."""
    earlier, total, numbers = None, None, []
    with_last, with_all = [], []
    for view in views(log, settings, residual=True):
        own = view.unobserved / np.linalg.norm(view.unobserved)
        if earlier is not None and total is not None:
            with_last.append(float(own @ earlier))
            with_all.append(float(own @ total) / float(np.linalg.norm(total)))
            numbers.append(view.number)
        earlier, total = own, own if total is None else total + own
    if not numbers:
        return
    limit = float(-CosineNull(max(int(settings.unobserved_dof), 2)).ppf(LEVEL / (2 * len(numbers))))
    for name, values in (("repeat", np.array(with_last)), ("repeat of any", np.array(with_all))):
        outside = np.abs(values) > limit
        yield Gauge(
            name=name,
            meaning="cosine of what is left with that of the round before"
            if name == "repeat"
            else "cosine of what is left with the sum of all rounds before",
            smallest=float(values.min()),
            largest=float(values.max()),
            limits=(-limit, limit),
            flagged=tuple(numbers[index] for index in np.flatnonzero(outside)),
            status="low" if outside.any() else "ok",
            values=values,
        )


def _one_sided(name: str, meaning: str, found: list[View], ratios: Floats, floors: Floats) -> Gauge:
    below = ratios < floors
    return Gauge(
        name=name,
        meaning=meaning,
        smallest=float(ratios.min()),
        largest=float(ratios.max()),
        limits=(float(floors.min()), math.inf),
        flagged=tuple(found[index].number for index in np.flatnonzero(below)),
        status="low" if below.any() else "ok",
        values=ratios,
    )


def _two_sided(name: str, meaning: str, found: list[View], ratios: Floats) -> Gauge:
    share = LEVEL / (2 * len(found))
    low = np.array([_ratio_quantile(share, view.dof) for view in found])
    high = np.array([_ratio_quantile(1 - share, view.dof) for view in found])
    outside = (ratios < low) | (ratios > high)
    return Gauge(
        name=name,
        meaning=meaning,
        smallest=float(ratios.min()),
        largest=float(ratios.max()),
        limits=(float(low.min()), float(high.max())),
        flagged=tuple(found[index].number for index in np.flatnonzero(outside)),
        status="low" if (ratios < low).any() else "warning" if outside.any() else "ok",
        values=ratios,
    )


def _ratio_quantile(probability: float, dof: float) -> float:
    """The quantile of a noise vector's length over its expected length."""
    if probability > 0.5:
        return math.sqrt(float(chdtri(dof, 1 - probability)) / dof)
    return math.sqrt(2 * float(gammaincinv(dof / 2, probability)) / dof)
