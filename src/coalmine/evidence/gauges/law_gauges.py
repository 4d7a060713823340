"""Gauges of the noise's law: is it Gaussian, and independent in every coordinate and every round?

Each gauge uses the measurements of `noise_law` in the rounds. A correct run fails one with probability at most `LEVEL`.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import bdtrc, chdtrc, chdtri, ndtr, ndtri, pdtr, pdtrc

from coalmine.argument_checks import Floats
from coalmine.estimators.null import CosineNull
from coalmine.evidence.gauges.gauge import LEVEL, Gauge, deciding_reading
from coalmine.evidence.views import RoundViews
from coalmine.measure.noise_law import BARE, CELL, CELLS, NoiseParts, zero_width
from coalmine.measure.round import Round
from coalmine.measure.settings import Settings

KURTOSIS_OFF = 0.02  # smaller departures from 3 come from rounding, and their privacy cost is negligible
DIVERGENCE = 2e-4  # chi-squared divergence from a Gaussian below which rounding explains it
EXPECTED = 20.0  # fewest expected counts in a cell of the histogram; smaller cells are merged
GRID_STRENGTH = (
    0.05  # modulus of the characteristic function, 0 to 1; half-precision noise has less at these frequencies
)
ALIGNED = 0.5  # modulus of the characteristic function, 0 to 1, from which on most values lie on the grid
GRID_PEAK = 3.0  # smallest ratio of the peak to its surroundings
REPEATED = 0.05  # share of the largest values that are repeated
SAME = 1e-6  # distance, in standard deviations, below which two values count as the same
COARSE_RELEASE = (
    0.1  # share of rounding in the residual's variance from which on the law of the noise cannot be measured
)
FINE_STEP = 0.25 * CELL  # standard deviations: a coarser grid of release and `others` shows in the histogram
TAIL_RATIO = 0.75  # ratio to the expected number of large values, or its inverse; closer to 1, rounding explains it
FIRST_TAIL = 3.0  # standard deviations
SHIFTED_ROUNDS = 20  # most rounds that are compared with each other at every distance
SHIFTS = 1 << 18  # distances that are distinguished; larger ones wrap around
SLOPE = 0.05  # smallest slope of the noise's variance against another vector's size that fails the gauge


class LawReader:
    """Takes one round after another, and computes every gauge of the noise's law at the end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._rounds: list[Round] = []

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        if look.item.law_moments is not None:
            self._rounds.append(_without_scores(look.item))

    def gauges(self, level: float = LEVEL, *, proofs_only: bool = False) -> Iterator[Gauge]:
        """Every gauge of the noise's law whose inputs were given; a correct run fails one with probability `level`.

        With `proofs_only`, only those that can prove too little noise; the others only prevent a PASS.
        """
        settings, rounds, dim = self._settings, self._rounds, self._settings.law_dim
        if not rounds:
            return
        parts, whole = NoiseParts.of_all(settings), not proofs_only
        repeated = _repetition(settings, [item.number for item in rounds])
        if whole:
            yield _kurtosis(rounds, parts, repeated, level)
        counted = [item for item in rounds if item.law_counts is not None]
        smooth = [item for item in counted if not _on_lattice(item, dim)]
        if smooth and whole:
            yield _distribution(smooth, parts, repeated, level)
            yield _tails(smooth, parts, repeated, level)
            yield _zeros(smooth, dim, repeated, level)
        if smooth:
            yield _grid(smooth, dim, level)
        if counted:
            yield _spectrum(counted, dim, level)
        if counted and whole:
            yield from _follows(counted, dim, repeated, level)
        yield from _neighbours(rounds, parts, dim, repeated, level)
        if any(item.law_tail is not None for item in smooth):  # if the release lies on a grid, values repeat anyway
            yield from _ties(smooth, level)
        if whole and _rounding_share(rounds, dim) > 0:
            yield _rounding(rounds, dim)
        if whole and len(counted) > 1:
            yield _shifted(counted, dim, level)


def _repetition(settings: Settings, numbers: list[int]) -> float:
    """The factor by which correlated noise increases the variance of a sum over rounds: ΣK²/T over pairs of rounds.

    K is the correlation of two rounds' noise; the measurements within a round are of second order or higher in it.
    """
    if settings.noise is None or not numbers:
        return 1.0
    rows = np.linalg.inv(settings.noise.matrix())[np.array(numbers) - 1]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return float(np.square(rows @ rows.T).sum()) / len(numbers)


def _without_scores(item: Round) -> Round:
    """A copy of the record without its long arrays, and not a view of the file: a run has many rounds."""
    kept: dict[str, Any] = {
        name: np.array(value) if isinstance(value, np.ndarray) else value
        for name, value in vars(item).items()
        if name not in ("cosines", "residual_cosines", "scores")
    }
    return Round(**kept)


def _variance(item: Round) -> float:
    assert item.law_moments is not None
    return float(item.law_moments.reshape(-1, 3)[:, 1].sum())


def _rounding_share(rounds: list[Round], dim: int) -> float:
    """The largest share of rounding in a residual's variance."""
    return max((item.rounding or 0.0) * dim / _variance(item) for item in rounds)


def _is_coarse(rounds: list[Round], dim: int) -> bool:
    """Whether the release was rounded so coarsely that the law of the noise cannot be measured."""
    return _rounding_share(rounds, dim) > COARSE_RELEASE


def _on_lattice(item: Round, dim: int) -> bool:
    """Whether release and `others` lie on a coarse grid: then the residual does too, which costs no privacy."""
    std = math.sqrt(_variance(item) / dim)
    if math.sqrt(item.lattice or 0.0) > FINE_STEP * std:
        return True
    assert item.law_grid is not None
    strength, frequency, own, _ = item.law_grid
    return bool(strength > GRID_STRENGTH and own > ALIGNED and frequency * FINE_STEP < 1)


def _rounding(rounds: list[Round], dim: int) -> Gauge:
    """The share of the residual that comes from rounding the release: too much of it makes all noise look alike."""
    shares = np.array([(item.rounding or 0.0) * dim / _variance(item) for item in rounds])
    outside = shares > COARSE_RELEASE
    return Gauge(
        name="rounding",
        smallest=float(shares.min()),
        largest=float(shares.max()),
        limits=(0.0, COARSE_RELEASE),
        flagged=tuple(rounds[index].number for index in np.flatnonzero(outside)),
        status="warning" if outside.any() else "ok",
        values=shares,
    )


def _kurtosis(rounds: list[Round], parts: NoiseParts, repeated: float, level: float) -> Gauge:
    """The fourth moment over the squared second, pooled over rounds and layers: 3 for a Gaussian."""
    sizes = np.array([place.stop - place.start for place in parts.groups], dtype=np.float64)
    moments = np.stack([item.law_moments.reshape(-1, 3) for item in rounds if item.law_moments is not None])
    values = sizes * moments[:, :, 2] / moments[:, :, 1] ** 2
    scores = np.asarray(anscombe_glynn(values, sizes))
    pooled = float((np.sqrt(sizes) * scores).sum() / math.sqrt(sizes.sum() * len(rounds) * repeated))
    by_round = (np.sqrt(sizes) * scores).sum(axis=1) / math.sqrt(sizes.sum())
    weighted = (sizes * values * (sizes + 2) / sizes).sum(axis=1) / sizes.sum()
    reading = float(weighted.mean())
    limit, one = -float(ndtri(level / 4)), -float(ndtri(level / (4 * len(rounds))))
    spread = math.sqrt(24 * repeated / (sizes.sum() * len(rounds)))
    off = KURTOSIS_OFF + 6 * _rounding_share(rounds, int(sizes.sum()))
    odd = abs(pooled) > limit and abs(reading - 3) > off
    flagged = np.flatnonzero((np.abs(by_round) > one) & (np.abs(weighted - 3) > off))
    failed = (odd or flagged.size > 0) and not _is_coarse(rounds, int(sizes.sum()))
    margin = max(limit * spread, off)
    if odd:
        margin = _margin(reading - 3, float(pooled), limit, off)
    elif flagged.size:  # only single rounds fail
        worst = flagged[np.abs(by_round[flagged]).argmax()]
        reading = float(weighted[worst])
        margin = _margin(reading - 3, float(by_round[worst]), one, off)
    return Gauge(
        name="shape",
        smallest=reading,
        largest=reading,
        limits=(3 - margin, 3 + margin),
        flagged=tuple(rounds[index].number for index in flagged),
        status="warning" if failed else "ok",
        values=weighted,
    )


def _margin(departure: float, score: float, limit: float, least: float) -> float:
    """How far a reading may depart from its expected value, if its `score` may reach `limit`."""
    return max(abs(departure * limit / score) if score else 0.0, least)


def anscombe_glynn(kurtosis: Floats, size: Floats) -> Floats:
    """A kurtosis about a known mean of 0, made standard normal (Anscombe and Glynn 1983, with one more observation)."""
    n = size + 1.0
    mean = 3 * (n - 1) / (n + 1)
    variance = 24 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    x = (kurtosis - mean) / np.sqrt(variance)
    skew = 6 * (n * n - 5 * n + 2) / ((n + 7) * (n + 9)) * np.sqrt(6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3)))
    a = 6 + 8 / skew * (2 / skew + np.sqrt(1 + 4 / skew**2))
    inner = 1 + x * np.sqrt(2 / (a - 4))
    root = np.sign(inner) * np.cbrt((1 - 2 / a) / np.abs(inner))
    return np.asarray((1 - 2 / (9 * a) - root) / np.sqrt(2 / (9 * a)))


def _distribution(rounds: list[Round], parts: NoiseParts, repeated: float, level: float) -> Gauge:
    """Pearson's test of the histogram of all coordinates of all rounds against the law of standardised Gaussian noise."""
    counts = np.sum([item.law_counts for item in rounds if item.law_counts is not None], axis=0).astype(np.float64)
    sizes = [place.stop - place.start for place in parts.groups]
    expected = len(rounds) * sum(size * _cell_probabilities(size) for size in sizes)
    observed, predicted = _merged_cells(counts / repeated, np.asarray(expected) / repeated)
    statistic, freedom = float(np.sum((observed - predicted) ** 2 / predicted)), len(predicted) - 1
    divergence = (statistic - freedom) / float(predicted.sum())
    limit = max(float(chdtri(freedom, level)) / freedom, 1 + DIVERGENCE * float(predicted.sum()) / freedom)
    failed = chdtrc(freedom, statistic) < level and divergence > DIVERGENCE and not _is_coarse(rounds, int(sum(sizes)))
    return Gauge(
        name="distribution",
        smallest=statistic / freedom,
        largest=statistic / freedom,
        limits=(0.0, limit),
        status="warning" if failed else "ok",
        values=np.array([statistic / freedom]),
    )


@lru_cache(maxsize=4096)
def _cell_probabilities(size: int) -> Floats:
    """Probabilities of the cells, for a coordinate of a Gaussian vector of this size over its own standard deviation."""
    edges = (np.arange(CELLS + 1) - CELLS // 2) * CELL
    below = np.asarray(CosineNull(max(size, 2), scale=math.sqrt(size)).cdf(edges))
    return np.diff(np.concatenate([[0.0], below, [1.0]]))


def _merged_cells(counts: Floats, expected: Floats) -> tuple[Floats, Floats]:
    """The cells, merged from both ends inwards until each expects enough counts."""
    observed, predicted = list(counts), list(expected)
    for end in (0, -1):
        while len(predicted) > 2 and predicted[end] < EXPECTED:
            for cells in (observed, predicted):
                first = cells.pop(end)
                cells[end] += first
    while len(predicted) > 2 and min(predicted) < EXPECTED:  # with few coordinates the middle has small cells too
        joined = range(0, len(predicted) - 1, 2)
        odd = len(predicted) % 2
        observed = [observed[i] + observed[i + 1] for i in joined] + observed[len(observed) - odd :] * odd
        predicted = [predicted[i] + predicted[i + 1] for i in joined] + predicted[len(predicted) - odd :] * odd
    return np.array(observed), np.array(predicted)


def _tails(rounds: list[Round], parts: NoiseParts, repeated: float, level: float) -> Gauge:
    """The number of values beyond 3, 3.25, ... standard deviations over that of a Gaussian: truncated or heavy tails."""
    counts = np.sum([item.law_counts for item in rounds if item.law_counts is not None], axis=0).astype(np.float64)
    sizes = [place.stop - place.start for place in parts.groups]
    expected = np.asarray(len(rounds) * sum(size * _cell_probabilities(size) for size in sizes))
    first, step = round(FIRST_TAIL / CELL), round(0.25 / CELL)
    middle = CELLS // 2 + 1  # the first cell above 0
    tested = []
    for cells in range(first, CELLS // 2 + 1, step):
        observed, predicted = (
            float(x[middle + cells :].sum() + x[: middle - cells].sum())
            for x in (counts / repeated, expected / repeated)
        )
        few, many = float(pdtr(observed, predicted)), float(pdtrc(observed - 1, predicted)) if observed else 1.0
        tested.append((observed / predicted if predicted else 1.0, min(few, many)))
    share = level / (2 * len(tested))
    odd = [ratio for ratio, p in tested if p < share and not TAIL_RATIO <= ratio <= 1 / TAIL_RATIO]
    reading = odd[0] if odd else tested[0][0]
    return Gauge(
        name="tails",
        smallest=reading,
        largest=reading,
        limits=(TAIL_RATIO, 1 / TAIL_RATIO),
        status="warning" if odd and not _is_coarse(rounds, int(sum(sizes))) else "ok",
        values=np.array([ratio for ratio, _ in tested]),
    )


def _zeros(rounds: list[Round], dim: int, repeated: float, level: float) -> Gauge:
    """Coordinates with hardly any noise: more than a Gaussian has near 0.

    If the canaries were subtracted exactly, a second count much closer to 0 detects single coordinates.
    """
    readings = []
    for column, width in enumerate((zero_width(dim), BARE)):
        measured = [item.law_zeros for item in rounds if item.law_zeros is not None and item.law_zeros.size > column]
        if measured:
            count, total = sum(int(zeros[column]) for zeros in measured) / repeated, dim * len(measured) / repeated
            probability = 2 * float(ndtr(width)) - 1
            p_value = float(bdtrc(math.ceil(count) - 1, round(total), probability)) if count else 1.0
            least = DIVERGENCE if column == 0 else 1 / dim
            excess = (count - probability * total) / total
            expected, odd = probability * total, p_value < level / 2 and excess > least
            most = expected + 4 - float(ndtri(level / 2)) * math.sqrt(expected)
            if odd:
                most = max(_most_by_chance(round(total), probability, level / 2), expected + least * total)
            readings.append((count / expected, odd, most / expected))
    failed = any(odd for _, odd, _ in readings) and not _is_coarse(rounds, dim)
    reading, _, limit = next((entry for entry in readings if entry[1]), readings[0])
    return Gauge(
        name="bare coordinates",
        smallest=reading,
        largest=reading,
        limits=(0.0, limit),
        status="warning" if failed else "ok",
        values=np.array([reading]),
    )


def _most_by_chance(total: int, probability: float, level: float) -> int:
    """The largest number of `total` coordinates near 0 that Gaussian noise reaches with at least this probability."""
    low, high = 0, total + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bdtrc(middle - 1, total, probability) >= level else (low, middle)
    return low


def _follows(rounds: list[Round], dim: int, repeated: float, level: float) -> Iterator[Gauge]:
    """Whether the noise is larger where the sum of all other updates, or the canaries' sum, is larger."""
    least = SLOPE + 5 * _rounding_share(rounds, dim)
    for place, name in enumerate(("others", "canaries")):
        measured = [item for item in rounds if item.law_follows is not None and item.law_follows.size > 2 * place]
        readings = np.array(
            [item.law_follows[2 * place : 2 * place + 2] for item in measured if item.law_follows is not None]
        )
        if not measured or not readings.any():
            continue
        pooled = float(readings[:, 0].sum()) / math.sqrt(len(measured) * repeated)
        slope = float(readings[:, 1].mean())
        one, every = -float(ndtri(level / (8 * len(measured)))), -float(ndtri(level / 8))
        outside = (np.abs(readings[:, 0]) > one) & (np.abs(readings[:, 1]) > least)
        odd = abs(pooled) > every and abs(slope) > least
        reading, limit = slope, _margin(slope, pooled, every, least)
        if outside.any() and not odd:  # only single rounds fail
            worst = np.flatnonzero(outside)[np.abs(readings[outside, 0]).argmax()]
            reading = float(readings[worst, 1])
            limit = _margin(reading, float(readings[worst, 0]), one, least)
        yield Gauge(
            name=f"noise follows {name}",
            smallest=reading,
            largest=reading,
            limits=(-limit, limit),
            flagged=tuple(measured[index].number for index in np.flatnonzero(outside)),
            status="warning" if odd or outside.any() else "ok",
            values=readings[:, 1],
        )


def _grid(rounds: list[Round], dim: int, level: float) -> Gauge:
    """Whether the noise lies on a grid and the release does not: then the noise hides nothing."""
    readings = np.array([item.law_grid for item in rounds])
    strengths, own, around = readings[:, 0], readings[:, 2], readings[:, 3]
    least = math.sqrt(math.log(2000 * len(rounds) / level) / dim)
    limit = max(least, GRID_STRENGTH)
    outside = (strengths > np.maximum(limit, GRID_PEAK * around)) & (own < ALIGNED)
    proof = bool((outside & (strengths > ALIGNED)).any())  # most values lie on it
    return Gauge(
        name="grid",
        smallest=float(strengths.min()),
        largest=float(strengths.max()),
        limits=(0.0, limit),
        flagged=tuple(rounds[index].number for index in np.flatnonzero(outside)),
        status="low" if proof else "warning" if outside.any() else "ok",
        noise_left=0.0 if proof else None,
        values=strengths,
    )


def _spectrum(rounds: list[Round], dim: int, level: float) -> Gauge:
    """The largest autocorrelation within a round at any lag, in standard deviations."""
    readings = np.array([item.law_spectrum for item in rounds])
    limit = -float(ndtri(level / (dim * len(rounds))))
    values = readings[:, 0]
    outside = values > limit
    correlation = max(float((values - limit).max()) / math.sqrt(dim), 0.0)
    return Gauge(
        name="spectrum",
        smallest=float(values.min()),
        largest=float(values.max()),
        limits=(0.0, limit),
        flagged=tuple(rounds[index].number for index in np.flatnonzero(outside)),
        status="low" if outside.any() else "ok",
        noise_left=math.sqrt(max(1 - correlation, 0.0)) if outside.any() else None,
        values=values,
    )


def _neighbours(rounds: list[Round], parts: NoiseParts, dim: int, repeated: float, level: float) -> Iterator[Gauge]:
    """Correlations of neighbouring coordinates, and of pairs of layers that would be equal if a random key were reused."""
    cosines = np.stack([item.law_lags for item in rounds if item.law_lags is not None])
    sizes = np.array([dim, dim, *(one.stop - one.start for one, _ in parts.pairs)], dtype=np.float64)
    kinds = [
        ("neighbours", cosines[:, :2], sizes[:2]),
        ("shared draws", cosines[:, 2:], sizes[2:]),
    ]
    for name, values, lengths in kinds:
        if not values.size:
            continue
        scores = values * np.sqrt(lengths)
        pooled = scores.sum(axis=0) / math.sqrt(len(rounds) * repeated)
        one = -CosineNull(int(lengths.min())).ppf(level / (4 * values.size)) * math.sqrt(lengths.min())
        every = -float(ndtri(level / (4 * values.shape[1])))
        outside = np.abs(scores) > float(one)
        outside_pooled = np.abs(pooled) > every
        certain = max(
            float(((np.abs(scores) - one) / np.sqrt(lengths)).max()),
            float(((np.abs(pooled) - every) * math.sqrt(repeated) / np.sqrt(lengths * len(rounds))).max()),
            0.0,
        )
        failed = bool(outside.any() or outside_pooled.any())
        # the pair that is furthest outside: longer ones have narrower limits
        place = int(np.abs(scores).max(axis=0).argmax() if outside.any() else np.abs(pooled).argmax())
        limit, root = float(one) / math.sqrt(lengths[place] if outside.any() else lengths.min()), math.sqrt(repeated)
        share = root / math.sqrt(lengths[place] * len(rounds))  # from a pooled score to a mean correlation
        smallest, largest, limits = deciding_reading(
            values, (-limit, limit), float(pooled[place]) * share, (-every * share, every * share)
        )
        yield Gauge(
            name=name,
            smallest=smallest,
            largest=largest,
            limits=limits,
            flagged=tuple(rounds[index].number for index in np.flatnonzero(outside.any(axis=1))),
            status="low" if failed else "ok",
            noise_left=math.sqrt(max(1 - certain, 0.0)) if failed else None,
            values=np.abs(values).max(axis=1),
        )


def _ties(rounds: list[Round], level: float) -> Iterator[Gauge]:
    """The share of a round's largest values that are repeated, in the same round or in another: noise used twice."""
    measured = [item for item in rounds if item.law_tail is not None]
    units = [item.noise_std or math.sqrt(_variance(item)) for item in measured]
    values = [np.asarray(item.law_tail, np.float64) / unit for item, unit in zip(measured, units, strict=True)]
    shares = [repeated_share(tail, SAME) for tail in values]
    all_values = np.sort(np.concatenate(values))
    pooled = repeated_share(all_values, SAME)
    if _has_steps(all_values, SAME):
        return  # values on a floating-point grid repeat anyway
    everything = [*shares, pooled]
    share = max(share for share, _ in everything)
    failed = any(share > REPEATED and p_value < level / (2 * len(everything)) for share, p_value in everything)
    yield Gauge(
        name="repeated values",
        smallest=min(share for share, _ in everything),
        largest=share,
        limits=(0.0, REPEATED),
        flagged=tuple(
            item.number
            for item, (own, p_value) in zip(measured, shares, strict=True)
            if own > REPEATED and p_value < level
        ),
        status="low" if failed else "ok",
        noise_left=math.sqrt(max(1 - share, 0.0)) if failed else None,
        values=np.array([own for own, _ in shares]),
    )


def _shifted(rounds: list[Round], dim: int, level: float) -> Gauge:
    """Whether the largest values of a round recur in another round at a common shift: noise taken twice from one stream.

    At a given shift the signs of two rounds' largest values agree by chance, each with probability one half. Shift 0 is left
    out, since correlated noise may repeat there; the repeat gauges test it. A client that is missing from `others` and whose
    update fills a block looks the same, so this gauge prevents a PASS but proves nothing.
    """
    measured = [item for item in rounds if item.law_peaks is not None and item.law_peaks.size][:SHIFTED_ROUNDS]
    width = min(1 << (2 * dim - 1).bit_length(), SHIFTS)  # a power of 2: shifts are distinguished modulo it
    pairs = [(one, two) for index, one in enumerate(measured) for two in measured[:index]]
    each = level / (max(len(pairs), 1) * min(2 * dim, SHIFTS) * 2)
    readings = [_agreement(one, two, width) for one, two in pairs]
    outside = [index for index, (_, p_value) in enumerate(readings) if p_value < each]
    flagged = sorted({pairs[index][0].number for index in outside})
    largest = max((agreed for agreed, _ in readings), default=0.0)
    longest = max((len(item.law_peaks) for item in measured if item.law_peaks is not None), default=1)
    smallest = math.ceil(-math.log2(each)) / longest
    return Gauge(
        name="shifted repeat",
        smallest=min((agreed for agreed, _ in readings), default=0.0),
        largest=largest,
        limits=(0.0, float(max(smallest, largest if not outside else 0.0))),
        flagged=tuple(flagged),
        status="warning" if outside else "ok",
        values=np.array([agreed for agreed, _ in readings]),
    )


def _agreement(one: Round, two: Round, width: int) -> tuple[float, float]:
    """The share of largest values that agree in sign beyond chance at the best shift, and its p-value there."""
    assert one.law_peaks is not None
    assert two.law_peaks is not None
    places = (np.abs(one.law_peaks)[:, None] - np.abs(two.law_peaks)).ravel() & (width - 1)
    signs = (np.sign(one.law_peaks).astype(np.float64)[:, None] * np.sign(two.law_peaks)).ravel()
    excess = np.abs(np.bincount(places, weights=signs, minlength=width))
    excess[0] = 0.0  # shift 0
    largest = excess.max()
    both = min(int((places == place).sum()) for place in np.flatnonzero(excess == largest)[:8])
    p_value = 2 * float(bdtrc((both + largest) / 2 - 1, both, 0.5)) if largest else 1.0
    return float(largest) / len(one.law_peaks), p_value


def repeated_share(ordered: Floats, same: float) -> tuple[float, float]:
    """The share of sorted values closer than `same` to the next, less the share expected by chance, and its p-value.

    The expected share follows from the local density. Values on a floating-point grid cannot be tested: 0 and 1.
    """
    count = len(ordered)
    if count < 64 or _has_steps(ordered, same):
        return 0.0, 1.0
    gaps, resolution = np.diff(ordered), _resolution(ordered, same)
    reach = 16
    centres = np.arange(count - 1)
    left, right = np.maximum(centres - reach, 0), np.minimum(centres + reach, count - 1)
    density = (right - left) / np.maximum(ordered[right] - ordered[left], resolution)
    tail = np.exp(-0.5 * ordered[:-1] ** 2) / math.sqrt(2 * math.pi)
    coarse = 2.0**-22 / np.maximum(tail, 1e-12)  # generators that invert a 23-bit uniform number
    expected = float(np.minimum(density * (resolution + np.minimum(coarse, 1e-3)), 1.0).sum())
    close = int((gaps < resolution).sum())
    return max(close - expected, 0.0) / count, float(pdtrc(close - 1, expected)) if close else 1.0


def _resolution(ordered: Floats, same: float) -> float:
    largest = np.clip(ordered[-1], -3e38, 3e38)  # the range of single precision
    return max(same, 4 * float(np.spacing(np.float32(largest))))


def _has_steps(ordered: Floats, same: float) -> bool:
    """Whether sorted values lie on a grid: the smallest gap between distinct ones is far larger than expected."""
    gaps = np.diff(ordered)
    distinct = gaps[gaps >= _resolution(ordered, same)]
    if distinct.size < 32:
        return True
    spread = float(ordered[-1] - ordered[0])
    return float(distinct.min()) > 12 * spread / distinct.size**2 + _resolution(ordered, same)
