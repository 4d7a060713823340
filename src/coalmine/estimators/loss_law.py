"""The likelihood ratio of a client whose rounds are hidden by sampling, and its law.

The attacker sees a score s_t in every round: N(1/z, 1) where the client took part and N(0, 1) elsewhere, with the scale
estimated from `dof` directions. They do not know the rounds, so the best test is the log likelihood ratio, summed over
rounds under Poisson sampling and over epochs under random allocation. Its law for an absent client is the null of the rung
unknown-round. Its law for a present client is the privacy loss distribution that an accountant composes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import chdtri, gammaln, stdtrit

from coalmine.argument_checks import Floats
from coalmine.estimators.sampling import NO_SCHEDULE, Strengths

NODES = 20_001  # number of nodes of a score's law
LOST = 1e-15  # probability beyond the nodes, on each side
LARGEST = 600.0  # largest log ratio of a round whose exponential does not overflow
FEWEST_BITS, MOST_POINTS = 14, 1 << 20  # of a composed law's grid
FINE = 0.05  # step of a composed law, as a fraction of a term's std
RAREST = 1e-13  # probability of a ratio beyond the linear scale
NARROW = 1.0  # relative std of a sum of ratios below which its law is on a linear scale; above it, on a logarithmic one
LINEAR_STEP, LINEAR_POINTS = 0.004, 1 << 21  # step of a linear scale divided by the variance of a ratio; most points
ALLOCATED_POINTS = 3_000  # points of a logarithmic scale
NEGLIGIBLE = 20.0  # a term below e to minus this of the larger one is left out
SCALES = 64  # quantiles of the estimated scale in the law of a present client
MANY = 10_000.0  # number of directions from which on a score's scale counts as known
ROUNDING = 1e-12  # rounding error of a probability that comes from a Fourier transform


def poisson_ratio(scores: Floats, *, noise: float, probability: float) -> Floats:
    """log(1 - q + q·exp(s/z - 1/(2z²))): one round's part of the log likelihood ratio under Poisson sampling."""
    exponent = scores / noise - 0.5 / noise**2
    beyond = np.maximum(exponent - LARGEST, 0.0)
    return np.log((1 - probability) + probability * np.exp(np.minimum(exponent, LARGEST))) + beyond


def round_ratio(scores: Floats, *, noise: float) -> Floats:
    """exp(s/z - 1/(2z²)): the likelihood ratio of a client that is in this round for certain."""
    return np.exp(np.minimum(scores / noise - 0.5 / noise**2, LARGEST))


def allocated_ratio(sums: Floats, *, rounds: int, observed: int) -> Floats:
    """log[(T - |O| + Σ ratios)/T]: one epoch's log likelihood ratio under random allocation, with |O| = `observed`."""
    return np.log(np.maximum((rounds - observed + sums) / rounds, np.finfo(np.float64).tiny))


@dataclass(frozen=True)
class LossLaw:
    """A discrete law on sorted points. The bound uses its upper tail, the goodness-of-fit test its cdf."""

    points: Floats
    masses: Floats

    @cached_property
    def _above(self) -> Floats:
        """The probability of each point and all above it, with a final 0."""
        return np.append(np.cumsum(self.masses[::-1])[::-1], 0.0)

    @cached_property
    def _below(self) -> Floats:
        return np.concatenate([[0.0], np.cumsum(self.masses)])

    @property
    def mean(self) -> float:
        return float(self.masses @ self.points)

    @property
    def std(self) -> float:
        return math.sqrt(max(float(self.masses @ (self.points - self.mean) ** 2), 0.0))

    def logsf(self, score: npt.ArrayLike) -> Floats:
        """log Pr(loss >= score), rounded up by one point and by the error of the transform, so that bounds stay valid."""
        place = np.searchsorted(self.points, score, side="left") - 1
        return np.log(np.minimum(self._above[np.maximum(place, 0)] + ROUNDING, 1.0))

    def cdf(self, score: npt.ArrayLike) -> Floats:
        """Pr(loss <= score), interpolated between the points."""
        middles = (self.points[1:] + self.points[:-1]) / 2
        edges = np.concatenate([[2 * self.points[0] - middles[0]], middles, [2 * self.points[-1] - middles[-1]]])
        return np.asarray(np.interp(np.asarray(score, dtype=np.float64), edges, self._below))

    def fit(self, scores: Floats) -> tuple[float, float]:
        """The Kolmogorov-Smirnov statistic of the scores under this law, and its p-value.

        The law is known at its points only, so a score is compared with the points on both sides of it.
        """
        from scipy.stats import kstwo

        ordered, count = np.sort(scores), scores.size
        place = np.searchsorted(self.points, ordered, side="left")
        most = self._below[np.minimum(place + 1, self.masses.size)]
        least = self._below[np.maximum(place - 1, 0)]
        ranks = np.arange(count + 1) / count
        statistic = float(max(np.max(ranks[1:] - most), np.max(least - ranks[:-1]), 0.0))
        return statistic, float(kstwo.sf(statistic, count))


def loss_epsilon(absent: LossLaw, present: LossLaw, delta: float) -> float:
    """The epsilon of the pair at `delta`: the larger of both directions."""

    def excess(epsilon: float) -> float:
        removed = float(present.masses @ np.maximum(-np.expm1(np.minimum(epsilon - present.points, 0.0)), 0.0))
        added = float(absent.masses @ np.maximum(-np.expm1(np.minimum(epsilon + absent.points, 0.0)), 0.0))
        return max(removed, added) - delta

    if excess(0.0) <= 0:
        return 0.0
    high = float(max(present.points[-1], -absent.points[0]))
    return float(brentq(excess, 0.0, high, xtol=1e-9)) if excess(high) < 0 else high


def poisson_laws(
    *, noise: float, probability: float, rounds: int, dof: float, strengths: Strengths = NO_SCHEDULE
) -> tuple[LossLaw, LossLaw]:
    """The laws of the log likelihood ratio of an absent client, and of one sampled with this probability.

    `strengths` has the noise of the rounds if it varies: `noise` over the strength, with the number of such rounds.
    """
    without, joined = [], []
    for strength, count in strengths or ((1.0, rounds),):
        scores, absent, shifted = _score_laws(noise / strength, dof)
        present = (1 - probability) * absent + probability * shifted
        values = poisson_ratio(scores, noise=noise / strength, probability=probability)
        without.append((values, absent, count))
        joined.append((values, present, count))
    return _composed(without), _composed(joined)


def allocation_laws(*, noise: float, rounds: int, observed: Iterable[int], dof: float) -> tuple[LossLaw, LossLaw]:
    """The same for a client in one round of each epoch of `rounds`; `observed` has each epoch's observed rounds."""
    counts = sorted(observed)
    absent, present = [], []
    for observed_rounds in sorted(set(counts)):
        values, without_target, with_target = _epoch_laws(noise, rounds, observed_rounds, dof)
        absent.append((values, without_target, counts.count(observed_rounds)))
        present.append((values, with_target, counts.count(observed_rounds)))
    return _composed(absent), _composed(present)


def _score_laws(noise: float, dof: float) -> tuple[Floats, Floats, Floats]:
    """Nodes of a score, and their probabilities for a client absent from the round and for one in it."""
    reach = float(stdtrit(min(dof, 1e8), 1 - LOST)) if dof < MANY else 8.0
    reach = min(reach, 60.0)
    shift = 1 / noise
    nodes = np.linspace(-reach, reach + shift * (1.0 if dof >= MANY else 1 + 8 / math.sqrt(2 * dof)), NODES)
    if dof >= MANY:
        absent, present = _normal(nodes), _normal(nodes - shift)
    else:
        absent, present = _student(nodes, dof), np.zeros(NODES)
        for length in np.sqrt(
            chdtri(dof, (np.arange(SCALES) + 0.5) / SCALES) / dof
        ):  # the estimated scale, at quantiles
            present += length * _normal(length * nodes - shift)
    return nodes, absent / absent.sum(), present / present.sum()


def _normal(x: Floats) -> Floats:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _student(x: Floats, dof: float) -> Floats:
    constant = float(gammaln((dof + 1) / 2) - gammaln(dof / 2)) - math.log(dof * math.pi) / 2
    return np.exp(constant - (dof + 1) / 2 * np.log1p(x * x / dof))


def _composed(parts: list[tuple[Floats, Floats, int]]) -> LossLaw:
    """The law of a sum of independent terms: `times` of each law, given by values and masses."""
    if len(parts) == 1 and parts[0][2] == 1:
        return LossLaw(parts[0][0], parts[0][1])
    means = [float(masses @ values) for values, masses, _ in parts]
    stds = [math.sqrt(float(m @ (v - mean) ** 2)) for (v, m, _), mean in zip(parts, means, strict=True)]
    spread = math.sqrt(sum(times * std * std for (_, _, times), std in zip(parts, stds, strict=True)))
    widest = max(float(np.ptp(values)) for values, _, _ in parts)
    width = 2.2 * max(12 * spread, widest) + 1e-9
    finest = FINE * min(
        (min(std, _middle_half(v, m)) for (v, m, _), std in zip(parts, stds, strict=True)), default=width
    )
    points = 1 << max(math.ceil(math.log2(min(width / max(finest, width / MOST_POINTS), MOST_POINTS))), FEWEST_BITS)
    step = width / points
    total = np.ones(points // 2 + 1, dtype=np.complex128)
    first = 0.0
    for (values, masses, times), mean in zip(parts, means, strict=True):
        origin = math.floor(mean / step) * step
        placed = np.zeros(points)
        place = (values - origin) / step
        low = np.floor(place)
        share = place - low
        np.add.at(placed, low.astype(np.int64) % points, masses * (1 - share))
        np.add.at(placed, (low.astype(np.int64) + 1) % points, masses * share)
        total *= np.fft.rfft(placed) ** times
        first += origin * times
    masses = np.maximum(np.fft.irfft(total, points), 0.0)
    middle = round((sum(mean * times for (_, _, times), mean in zip(parts, means, strict=True)) - first) / step)
    start = middle - points // 2
    return LossLaw(first + step * (start + np.arange(points, dtype=np.float64)), np.roll(masses, -start) / masses.sum())


def _middle_half(values: Floats, masses: Floats) -> float:
    """The distance between the quartiles."""
    low, high = np.searchsorted(np.cumsum(masses), [0.25, 0.75])
    return float(values[min(high, values.size - 1)] - values[low])


@lru_cache(maxsize=64)
def _epoch_laws(noise: float, rounds: int, observed: int, dof: float) -> tuple[Floats, Floats, Floats]:
    """Values of an epoch's log likelihood ratio, and their probabilities for an absent and for a present client."""
    if observed == 0:
        return np.zeros(1), np.ones(1), np.ones(1)
    scores, absent, shifted = _score_laws(noise, dof)
    logs = np.minimum(scores / noise - 0.5 / noise**2, LARGEST)
    if noise > 0.05 and math.expm1(1 / noise**2) < NARROW**2 * observed:
        sums, without_target, with_target = _linear_sums(np.exp(logs), absent, shifted, observed)
    else:
        sums, without_target, with_target = _logarithmic_sums(logs, absent, shifted, observed)
    share = observed / rounds
    values = allocated_ratio(sums, rounds=rounds, observed=observed)
    return values, without_target, share * with_target + (1 - share) * without_target


def _linear_sums(ratios: Floats, absent: Floats, shifted: Floats, count: int) -> tuple[Floats, Floats, Floats]:
    """Sums of ratios, and their probabilities without and with the target, for sums that stay close to their mean.

    The points are equally spaced. A small ratio is split between 0 and the first point, which keeps the mean and adds
    less variance than the ratios have.
    """
    variance = float(absent @ (ratios - 1) ** 2)
    spread = math.sqrt(count * variance)
    ratios = np.minimum(ratios, ratios[np.searchsorted(np.cumsum(absent), 1 - RAREST)])
    reach = count + 12 * spread + 1.2 * float(ratios[-1])
    step = max(min(LINEAR_STEP * variance, spread / 300), reach / LINEAR_POINTS)
    points = 1 << math.ceil(math.log2(reach / step))
    place = ratios / step
    low = np.floor(place).astype(np.int64)
    share = place - low
    without_target, with_target = (
        np.fft.rfft(
            np.bincount(low, masses * (1 - share), minlength=points)
            + np.bincount(low + 1, masses * share, minlength=points)
        )
        for masses in (absent, shifted)
    )
    rest = without_target ** (count - 1)
    laws = [np.maximum(np.fft.irfft(rest * last, points), 0.0) for last in (without_target, with_target)]
    kept = max(int(np.flatnonzero(law > 1e-18)[-1]) for law in laws) + 1
    first = max(min(int(np.flatnonzero(law > 1e-18)[0]) for law in laws), 1)
    cut = [law[first:kept] / law[first:kept].sum() for law in laws]
    return step * np.arange(first, kept, dtype=np.float64), cut[0], cut[1]


def _logarithmic_sums(logs: Floats, absent: Floats, shifted: Floats, count: int) -> tuple[Floats, Floats, Floats]:
    """As _linear_sums, for ratios that differ by orders of magnitude, so that the largest dominates."""
    width = float(np.ptp(logs)) + math.log(count) + 1.0
    grid = _LogGrid(float(logs[0]), max(width / ALLOCATED_POINTS, 1e-4), ALLOCATED_POINTS + 2)
    without_target, with_target = grid.place(logs, absent), grid.place(logs, shifted)
    rest = grid.power(without_target, count - 1)
    if rest is not None:
        without_target, with_target = grid.added(rest, without_target), grid.added(rest, with_target)
    return np.exp(grid.points), without_target, with_target


@dataclass(frozen=True)
class _LogGrid:
    """Laws of positive numbers on a grid of their logarithms. Splitting mass between neighbours keeps the mean of sums."""

    first: float
    step: float
    size: int

    @property
    def points(self) -> Floats:
        return self.first + self.step * np.arange(self.size, dtype=np.float64)

    def place(self, logs: Floats, masses: Floats) -> Floats:
        """A law given by values and masses, on the grid."""
        place = (logs - self.first) / self.step
        low = np.clip(np.floor(place), 0, self.size - 2).astype(np.int64)
        share = self._share(np.clip(place - low, 0.0, 1.0))
        law_on_grid = np.zeros(self.size)
        np.add.at(law_on_grid, low, masses * (1 - share))
        np.add.at(law_on_grid, low + 1, masses * share)
        return law_on_grid

    def _share(self, fraction: Floats) -> Floats:
        """The share of the mass for the next point, for a number this fraction of a step above a point; keeps the mean."""
        return np.expm1(fraction * self.step) / math.expm1(self.step)

    def power(self, law: Floats, times: int) -> Floats | None:
        """The law of the sum of `times` independent numbers; None if `times` is 0."""
        total: Floats | None = None
        while times:
            if times & 1:
                total = law if total is None else self.added(total, law)
            times >>= 1
            if times:
                law = self.added(law, law)
        return total

    def added(self, one: Floats, two: Floats) -> Floats:
        """The law of the sum of two independent numbers."""
        law_on_grid = np.zeros(self.size)
        reach = min(int(NEGLIGIBLE / self.step) + 1, self.size - 1)
        gaps = np.arange(reach + 1)
        offsets = np.log1p(np.exp(-gaps * self.step)) / self.step
        whole = np.floor(offsets).astype(np.int64)
        shares = self._share(offsets - whole)
        pairs = [(one, two, 0), (two, one, 1)]  # each may be the larger one; equal numbers count once
        for larger, smaller, nearest in pairs:
            for gap in range(nearest, reach + 1):
                product = larger[gap:] * smaller[: self.size - gap]
                self._put(law_on_grid, product, gap + int(whole[gap]), float(shares[gap]))
            far = np.concatenate([np.zeros(reach + 1), np.cumsum(smaller)[: -reach - 1]])
            law_on_grid += larger * far
        return law_on_grid

    def _put(self, law_on_grid: Floats, masses: Floats, start: int, share: float) -> None:
        """Add masses from index `start` on, `share` of each to the next point; the last point takes mass beyond the grid."""
        room = self.size - 1 - start
        if room <= 0:
            law_on_grid[-1] += masses.sum()
            return
        inside = masses[:room]
        law_on_grid[start : start + inside.size] += (1 - share) * inside
        law_on_grid[start + 1 : start + 1 + inside.size] += share * inside
        if masses.size > room:
            law_on_grid[-1] += masses[room:].sum()
