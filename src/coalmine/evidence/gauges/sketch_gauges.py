"""Gauges that compare rounds with each other, and with `others`, through the unobserved canaries.

The scores of unobserved canaries are a sketch of the residual in unused directions. A correct run fails one gauge with
probability at most `LEVEL`, and the rank gauge with probability at most `RANK_LEVEL`.
"""

import math
from collections.abc import Container, Iterator

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc, chdtri, gammainc, gammaincinv, ndtri

from coalmine.argument_checks import Floats
from coalmine.estimators.null import CosineNull
from coalmine.evidence.gauges.gauge import LEVEL, Gauge, deciding_reading
from coalmine.evidence.views import FEWEST_COLUMNS, SKETCH, RoundViews, sketch_columns
from coalmine.measure.round import Round
from coalmine.measure.settings import Settings

EXPLAINED = 0.005  # share of the residual that `others` must explain to count as wrong
COMPARED = SKETCH // FEWEST_COLUMNS  # each round is compared with at most this many before it
BLOCK = 512  # rounds that are compared at a time
# Level of the rank gauge, which only prevents a PASS: in 12 rounds a fixed half of the dimensions hardly shows.
RANK_LEVEL = 2e-3


class SketchReader:
    """Takes one round after another, and computes the gauges that compare rounds with each other and with `others`.

    A sketch is a residual's scores along the unobserved canaries, with momentum undone and correlated noise whitened. It
    costs nothing: the scores are in the log. `rounds` is the number of rounds, so that all sketches fit in memory. If there
    are more than 32,768 rounds, each is compared only with that many before it. Only the rounds with
    the numbers `compared` are compared with those before them, by default all; the others have no value.
    """

    def __init__(self, settings: Settings, rounds: int, compared: Container[int] | None = None) -> None:
        self._settings, self._compared = settings, compared
        self._columns = sketch_columns(settings, rounds)
        self._pairs = Pairs()
        self._numbers: list[int] = []
        self._products: list[float] = []
        self._lengths: list[float] = []
        self._with_before: list[float] = []
        self._total: Floats | None = None

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        view = look.white_residual
        if view is None:
            return
        own = view.unobserved / _length(view.unobserved)
        wanted = self._compared is None or view.number in self._compared
        self._pairs.add(own[: self._columns].astype(np.float32), compared=wanted)
        if self._total is None:
            self._total = own
        else:
            self._with_before.append(float(own @ self._total) / _length(self._total))
            self._total += own
        self._numbers.append(view.number)
        clients = _others_sketch(look.item, self._settings.canaries)
        self._products.append(float(view.unobserved @ clients) / view.scale)
        self._lengths.append(_length(clients) / view.scale)

    def gauges(self, level: float = LEVEL) -> Iterator[Gauge]:
        """Every gauge that has its inputs; a correct run fails one with probability `level`."""
        settings = self._settings
        if len(self._numbers) > 1 and self._total is not None:
            dof = settings.unobserved_dof * (self._columns / settings.unobserved)
            yield from repeated_rounds(self._pairs, self._numbers, dof, level)
            yield _common(np.array(self._with_before), self._total, self._numbers, settings, level)
        if any(self._lengths):
            yield _others(np.array(self._products), np.array(self._lengths), settings, level)


def _length(vector: Floats) -> float:
    return math.sqrt(float(vector @ vector))


def _others_sketch(item: Round, canaries: int) -> Floats:
    """The sum of all other updates of a round, along the unobserved canaries."""
    assert item.residual_cosines is not None
    assert item.residual_norm is not None
    whole = np.asarray(item.cosines[canaries:], np.float64) * item.norm
    return np.asarray(whole - np.asarray(item.residual_cosines[canaries:], np.float64) * item.residual_norm)


class Pairs:
    """Cosines between every two rounds, at most COMPARED apart: for each round the largest one, and the sum of squares."""

    def __init__(self) -> None:
        self._before: list[Floats] = []  # unit vectors of the last rounds
        self._new: list[Floats] = []
        self._wanted: list[bool] = []  # whether a new round is compared with those before it
        self._largest: list[Floats] = []
        self._squares, self._count = 0.0, 0

    def add(self, row: npt.NDArray[np.float32], *, compared: bool = True) -> None:
        """Take the sketch of the next round, to be compared with those before it, or only those after it with this one."""
        unit = row.astype(np.float64)  # products in single precision differ from processor to processor
        unit /= _length(unit)
        self._new.append(unit)
        self._wanted.append(compared)
        if len(self._new) == BLOCK:
            self._compare()

    def results(self) -> tuple[Floats, float, int]:
        """Each round's largest cosine with a previous round, the sum of squares, and the number of pairs.

        The largest cosine of a round that was not compared with those before it is NaN.
        """
        self._compare()
        return np.concatenate([np.zeros(0), *self._largest]), self._squares, self._count

    def _compare(self) -> None:
        """Compare the new rows with those before them and with each other."""
        if not self._new:
            return
        new, before, wanted = np.stack(self._new), len(self._before), np.flatnonzero(self._wanted)
        own = new if wanted.size == len(new) else new[wanted]
        found = np.zeros(wanted.size)
        for start in range(0, before, BLOCK):
            found = self._take(own @ np.stack(self._before[start : start + BLOCK]).T, found)
        among = own @ new.T
        among[np.arange(len(new)) >= wanted[:, None]] = 0.0  # each pair once
        largest = np.full(len(new), np.nan)
        largest[wanted] = self._take(among, found)
        self._largest.append(largest)
        self._count += int(before * wanted.size + wanted.sum())
        self._before = [*self._before, *self._new][-COMPARED:]
        self._new, self._wanted = [], []

    def _take(self, cosines: Floats, largest: Floats) -> Floats:
        """The largest cosine of each row in absolute value, where `largest` is that of earlier columns."""
        self._squares += float(np.vdot(cosines, cosines))
        high, low = cosines.max(axis=1, initial=0.0), cosines.min(axis=1, initial=0.0)
        found = np.where(high >= -low, high, low)
        return np.where(np.abs(found) > np.abs(largest), found, largest)


def repeated_rounds(compared: Pairs, numbers: list[int], dof: float, level: float) -> Iterator[Gauge]:
    """Two gauges of the cosines between the residuals of every two rounds: their largest, and the sum of their squares."""
    largest, squares, pairs = compared.results()
    limit = float(-CosineNull(max(int(dof), 2)).ppf(level / (2 * pairs)))
    outside = np.abs(largest) > limit
    worst = float(np.nanmax(np.abs(largest)))
    certain = math.tanh(math.atanh(min(worst, 1 - 1e-12)) + float(ndtri(level / (2 * pairs))) / math.sqrt(dof))
    yield Gauge(
        name="repeat",
        smallest=float(np.nanmin(largest[1:])),
        largest=float(np.nanmax(largest[1:])),
        limits=(-limit, limit),
        flagged=tuple(numbers[index] for index in np.flatnonzero(outside)),
        status="low" if outside.any() else "ok",
        noise_left=math.sqrt(1 - max(certain, 0.0) ** 2) if outside.any() else None,
        values=largest[1:],
    )
    reading, high = dof * squares / pairs, float(chdtri(pairs, RANK_LEVEL)) / pairs
    yield Gauge(
        name="rank",
        smallest=reading,
        largest=reading,
        limits=(0.0, high),
        status="warning" if reading > high else "ok",
        values=np.array([reading]),
    )


def rank_power(rounds: int, dof: float, dim: int) -> float:
    """The number of standard deviations by which noise in a fixed half of the dimensions would move the rank gauge."""
    return math.sqrt(rounds * (rounds - 1) / 4) * dof / dim


def _common(with_before: Floats, total: Floats, numbers: list[int], settings: Settings, level: float) -> Gauge:
    """The gauge of a common part of all rounds: the cosine of each with the sum of all before, and the sum's norm."""
    dof, count = settings.unobserved_dof, len(numbers)
    limit = float(-CosineNull(max(int(dof), 2)).ppf(level / (4 * len(with_before))))
    outside = np.abs(with_before) > limit
    statistic = dof * float(total @ total) / count
    # the length of the sum of all rounds, as the cosine of the last one with the sum of those before
    mean, *ends = (
        _last_cosine(value / dof, count)
        for value in (statistic, 2 * float(gammaincinv(dof / 2, level / 4)), float(chdtri(dof, level / 4)))
    )
    pooled = min(float(chdtrc(dof, statistic)), float(gammainc(dof / 2, statistic / 2))) < level / 4
    shared = (statistic / float(chdtri(dof, level / 4)) * count - count) / (count * (count - 1))
    certain = max(shared, float((np.abs(with_before) - limit).max()) ** 2, 0.0)
    failed = bool(outside.any() or pooled)
    smallest, largest, limits = deciding_reading(with_before, (-limit, limit), mean, (ends[0], ends[1]))
    return Gauge(
        name="repeat of any",
        smallest=smallest,
        largest=largest,
        limits=limits,
        flagged=tuple(numbers[index + 1] for index in np.flatnonzero(outside)),
        status="low" if failed else "ok",
        noise_left=math.sqrt(max(1 - certain, 0.0)) if failed else None,
        values=with_before,
    )


def _last_cosine(square: float, count: int) -> float:
    """The cosine of a round with the sum of those before it, if the sum of all is √square times that of independent ones."""
    shared = (square - 1) / (count - 1)  # mean cosine of two rounds
    return shared * math.sqrt((count - 1) / (1 + (count - 2) * shared))


def _others(products: Floats, lengths: Floats, settings: Settings, level: float) -> Gauge:
    """The share of `others` that is still in the residual: 0 if `others` is what the round summed.

    The reading is the factor by which `others` must be multiplied to equal what the round summed.
    """
    overlap = 1.0 if settings.kind == "rotated" else math.sqrt(1 + settings.unobserved / settings.dim)
    square = float(lengths @ lengths)
    score = float(products.sum()) / math.sqrt(square) / overlap
    factor = 1 + float(products.sum()) / square
    explained = (score * score - 1) / (len(products) * settings.unobserved_dof)
    margin = -float(ndtri(level / 2)) * overlap / math.sqrt(square)
    margin = max(margin, math.sqrt(EXPLAINED * len(products) * settings.unobserved_dof / square))
    failed = abs(score) > -float(ndtri(level / 2)) and explained > EXPLAINED
    return Gauge(
        name="others",
        smallest=factor,
        largest=factor,
        limits=(1 - margin, 1 + margin),
        status="warning" if failed else "ok",
        values=products / np.maximum(lengths, 1e-300),
    )
