"""Before training: how many canaries an audit needs, and what a given number of canaries can show (Section 5).

The model is a correct pipeline with orthonormal canaries. Scores are N(mean, 1) in units of the null's std, which is
estimated from the dim - k directions without a canary.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import betainc, ndtr, ndtri

from coalmine.argument_checks import nonnegative_array, one_number, unit_interval, whole_number
from coalmine.estimators.amplification import AmplifiedEpsilon, amplified_epsilon, amplified_noise
from coalmine.estimators.bounds import FEWEST, lower_bound_ceiling
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.intervals import Floor, Interval, epsilon_interval, noise_floor, null_lattice, quick_epsilons
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.estimators.sampler_tests import rate_power
from coalmine.estimators.sampling import FixedSize, Poisson, Sampling
from coalmine.estimators.variance import Sample

# With a rotation, unobserved canaries cost nothing; ten per observed canary raise the ceiling of the lower bound.
UNOBSERVED_PER_CANARY = 10
MOST = 2**53  # most canaries that the search tries
LARGEST_MEAN = 100.0  # an epsilon of 5,000, which ten canaries detect


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an audit with `canaries` observed canaries in R^dim can show.

    `detectable` is the smallest detectable epsilon: its estimate lies above the floor's q95 in `power` of the runs.
    `ceiling` is the largest attainable lower bound with `unobserved` unobserved canaries; it is unlimited when the null
    is known in closed form.
    """

    dim: int
    delta: float
    canaries: int
    unobserved: int
    power: float
    floor: Floor
    detectable: float
    ceiling: float

    def interval_at(self, epsilon: float, *, confidence: float = 0.95) -> Interval:
        """The expected interval if the true epsilon is `epsilon`."""
        return expected_interval(epsilon, self.canaries, dim=self.dim, delta=self.delta, confidence=confidence)


def plan_audit(canaries: int, *, dim: int, delta: float, power: float = 0.9) -> Plan:
    """What an audit with this many canaries can show.

    >>> plan = plan_audit(1000, dim=1_000_000, delta=1e-6)
    >>> f"smallest detectable epsilon {plan.detectable:.2f}, ceiling {plan.ceiling:.2f}"
    'smallest detectable epsilon 0.58, ceiling 7.12'
    """
    dim = whole_number("dim", dim, minimum=2)
    count = _fitting(canaries, dim)
    delta, power = unit_interval("delta", delta), unit_interval("power", power)
    unobserved = max(min(dim - count, UNOBSERVED_PER_CANARY * count), FEWEST)
    return Plan(
        dim=dim,
        delta=delta,
        canaries=count,
        unobserved=unobserved,
        power=power,
        floor=_floor(_sample(count, dim), delta),
        detectable=_detectable_epsilon(_sample(count, dim), delta, power),
        ceiling=lower_bound_ceiling(count, unobserved=unobserved, delta=delta),
    )


def canaries_to_detect(epsilon: float, *, dim: int, delta: float, power: float = 0.9) -> int:
    """The fewest canaries that detect `epsilon` in `power` of the runs.

    An epsilon is detected if its estimate lies above the noise floor's q95, which 5 % of the runs exceed when nothing
    leaks.
    """
    dim = whole_number("dim", dim, minimum=FEWEST + 2)
    delta, power = unit_interval("delta", delta), unit_interval("power", power)
    mean = _mean(one_number("epsilon", epsilon), delta)

    # More canaries would leave too few directions to estimate the null's std from.
    most = min(max(int(dim / (1 + mean / math.sqrt(2))), FEWEST), dim - 2)
    fewest = _fewest(lambda count: _detection_power(mean, _sample(count, dim), delta) >= power, most)
    if fewest is None:
        raise ValueError(
            f"no number of canaries in {dim} dimensions detects an epsilon of {epsilon:g}; choose a larger epsilon"
        )
    return fewest


def power_against_claim(
    canaries: int,
    claim_epsilon: float,
    *,
    delta: float,
    level: float,
    factor: float = 2.0,
    dilution: float = 0.0,
    null_dof: float = math.inf,
) -> float:
    """The power of the z-test of a mechanism claim, if the true epsilon is `factor` times the claim.

    The test rejects the claim if the mean score exceeds 1/z, for the noise multiplier z of the claim, by the normal
    quantile at 1 - level. The mean score of the faulty mechanism is 1/√(z'² + dilution²): `dilution` is the norm of the
    real signal over clip_norm·√dim, and 0 for an attacker who knows it. For R participations divide it by √R.
    """
    count, level = whole_number("canaries", canaries, minimum=1), unit_interval("level", level)
    return _power(count, *_claim_means(claim_epsilon, delta, factor, dilution), level, null_dof)


def expected_interval(epsilon: float, canaries: int, *, dim: int, delta: float, confidence: float = 0.95) -> Interval:
    """The interval of scores with exactly the expected mean and std, if the true epsilon is `epsilon`."""
    mean = _mean(one_number("epsilon", epsilon), delta)
    return epsilon_interval(mean, 1.0, sample=_sample(canaries, dim), delta=delta, confidence=confidence)


def canaries_for_precision(epsilon: float, *, dim: int, delta: float, within: float = 0.25) -> int | None:
    """The fewest canaries whose expected interval lies within ±`within` of `epsilon`; None if dim/2 are too few."""

    def enough(count: int) -> bool:
        return is_precise(expected_interval(epsilon, count, dim=dim, delta=delta), epsilon, within=within)

    # More than dim/2 canaries leave too few directions to estimate the null's std from.
    return _fewest(enough, max(dim // 2, FEWEST))


def is_precise(interval: Interval, epsilon: float, *, within: float) -> bool:
    """Whether both ends of the interval lie within ±`within` of `epsilon`, as a share of it."""
    return bool(epsilon * (1 - within) <= interval.low and interval.high <= epsilon * (1 + within))


def canaries_to_decide(claim_epsilon: float, *, dim: int, delta: float, level: float, power: float = 0.9) -> int | None:
    """canaries_for_power in R^dim, where the null's std is estimated from the directions without a canary."""
    count = FEWEST
    while count <= dim - 2:
        needed = canaries_for_power(claim_epsilon, delta=delta, level=level, power=power, null_dof=float(dim - count))
        if needed is None or needed <= count:
            return None if needed is None else count
        count = needed  # leaves fewer directions, so more canaries may be needed
    return None


def canaries_for_power(
    claim_epsilon: float,
    *,
    delta: float,
    level: float,
    power: float = 0.9,
    factor: float = 2.0,
    dilution: float = 0.0,
    null_dof: float = math.inf,
) -> int | None:
    """The fewest canaries at which power_against_claim reaches `power`; None if no number does.

    >>> canaries_for_power(3.0, delta=1e-6, level=0.002)
    58
    """
    level, power = unit_interval("level", level), unit_interval("power", power)
    claimed, faulty = _claim_means(claim_epsilon, delta, factor, dilution)
    if faulty <= claimed:
        return None
    return _fewest(lambda count: _power(count, claimed, faulty, level, null_dof) >= power, MOST)


@dataclass(frozen=True, kw_only=True)
class SampledChance:
    """The probability, over the sampler's picks, that each leg can confirm a claim with `canaries` observed canaries.

    `picks` is the expected number of picks. Both legs need a least number of the same picks, so both can confirm the claim
    with the smaller of the two probabilities.
    """

    canaries: int
    picks: float
    noise: float
    sampling: float

    @property
    def both(self) -> float:
        """The probability that neither leg has too few picks."""
        return min(self.noise, self.sampling)


@dataclass(frozen=True, kw_only=True)
class SampledPlan:
    """How many canaries decide a claim amplified by sampling: for its noise leg, and for its sampling leg.

    `accounted` is the accountant's epsilon at the claimed `noise_multiplier`. If it `exceeds` the claim, no canaries help.
    A number is None if no number of canaries in this dimension is enough. `chances` are those of the numbers asked for.
    """

    noise_multiplier: float
    accounted: AmplifiedEpsilon
    exceeds: bool
    noise: int | None
    sampling: int | None
    chances: tuple[SampledChance, ...] = ()

    @property
    def canaries(self) -> int | None:
        """The larger of both numbers; None if no number decides the claim."""
        if self.exceeds or self.noise is None or self.sampling is None:
            return None
        return max(self.noise, self.sampling)

    @property
    def leg(self) -> str:
        """The leg that needs the most canaries, or the one that no number of canaries decides."""
        if self.exceeds:
            return "accounting"
        if self.noise is None or self.sampling is None:
            return "noise" if self.noise is None else "sampling"
        return "noise" if self.noise >= self.sampling else "sampling"


def plan_sampled(
    claim_epsilon: float,
    sampling: Sampling,
    *,
    dim: int,
    delta: float,
    level: float,
    noise_multiplier: float | None = None,
    power: float = 0.9,
    rounded: float = 1.005,
    canaries: Iterable[int] = (),
) -> SampledPlan:
    """The fewest canaries with which the verdict on a claim amplified by sampling is decided in `power` of honest runs.

    Each leg must detect twice the claim with this power: the noise leg too little noise at the claimed rate, the sampling
    leg too high a rate at the claimed noise. How often the sampler picks canaries is random, so a number of canaries is
    enough if the picks give both legs that power in this share of runs. Without `noise_multiplier`, the noise is the one
    that gives the claim. A claim may have been rounded by a factor of up to `rounded`. `canaries` are numbers whose
    `chances` are computed too.

    >>> plan = plan_sampled(7.05, Poisson(0.1, rounds=100), dim=1_000_000, delta=1e-5, level=0.002, canaries=[11])
    >>> plan.canaries, f"{plan.chances[0].both:.2f}"
    (12, '0.74')
    """
    dim = whole_number("dim", dim, minimum=FEWEST + 2)
    claim = one_number("claim_epsilon", claim_epsilon)
    if claim <= 0:
        raise ValueError(f"claim_epsilon must be above 0, got {claim}")
    level, power = unit_interval("level", level), unit_interval("power", power)
    counts = [_fitting(count, dim) for count in canaries]
    noise = amplified_noise(claim, sampling, delta) if noise_multiplier is None else noise_multiplier
    accounted, twice = amplified_epsilon(noise, sampling, delta), 2 * rounded * claim
    needed = noise
    if accounted.high < claim / rounded:  # the claim is looser than its own accounting
        needed = min(noise, amplified_noise(claim, sampling, delta))
    legs = _Legs(
        sampling=sampling,
        dim=dim,
        level=level,
        power=power,
        claimed=1 / needed,
        faulty=1 / amplified_noise(twice, sampling, delta),
        rate=_rate_to_detect(sampling, needed, twice, delta),
    )
    return SampledPlan(
        noise_multiplier=noise,
        accounted=accounted,
        exceeds=accounted.high > rounded * claim,
        noise=_fewest(lambda count: legs.noise(count) >= power, dim - 2),
        sampling=_fewest_on_a_lattice(
            lambda count: legs.sampled(count) >= power, math.ceil(3 / (sampling.total_rounds * sampling.rate)), dim - 2
        ),
        chances=tuple(legs.chance(count) for count in counts),
    )


@dataclass(frozen=True, kw_only=True)
class _Legs:
    """The probability, over the sampler's picks, that the noise and the sampling leg have enough of them.

    `claimed` and `faulty` are the mean scores at the claimed noise and at the noise of twice the claim. `rate` is the
    smallest rate that the sampling leg must detect; None if any number of canaries is enough.
    """

    sampling: Sampling
    dim: int
    level: float
    power: float
    claimed: float
    faulty: float
    rate: float | None

    def chance(self, count: int) -> SampledChance:
        picks = count * self.sampling.total_rounds * self.sampling.rate
        return SampledChance(canaries=count, picks=picks, noise=self.noise(count), sampling=self.sampled(count))

    def noise(self, count: int) -> float:
        """The probability of enough picks for the power of the noise leg."""
        most = count * self.sampling.total_rounds

        def enough(picks: int) -> bool:
            return self._noise_power(picks, count) >= self.power

        if self.faulty <= self.claimed or not enough(most):
            return 0.0
        low, high = 0, most  # the power grows with the picks
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return self._at_least(high, count)

    def sampled(self, count: int) -> float:
        """The probability of enough picks for the sampling leg; 0 if its power is too small with any."""
        sampling = self.sampling
        if self.rate is not None and (
            self.rate <= sampling.rate or rate_power(sampling, sampling.total_rounds, count, self.rate) < self.power
        ):
            return 0.0
        return self._at_least(FEWEST, count)

    def _noise_power(self, picks: int, count: int) -> float:
        """The power of the noise leg with this many picks, spread over the rounds more unevenly than in 99.8 % of runs.

        The null's std is pooled over rounds in proportion to their picks n, so its dof is that of (Σn)²/Σn² rounds, and
        Σn² - Σn is twice the number of pairs of picks in the same round.
        """
        pairs = picks * (picks - 1) / (2 * self.sampling.total_rounds)
        unevenness = picks + 2 * (pairs + 3 * math.sqrt(pairs))
        rounds = max(picks**2 / unevenness, 1.0)
        return _power(picks, self.claimed, self.faulty, self.level, (self.dim - count) * rounds)

    def _at_least(self, picks: int, count: int) -> float:
        """The probability that the sampler picks canaries at least this often.

        Under fixed-size sampling the number varies less than the binomial's, which is therefore on the safe side below
        the mean (Hoeffding, Annals of Mathematical Statistics 27, 1956).
        """
        sampling = self.sampling
        if not isinstance(sampling, Poisson | FixedSize) or sampling.rate >= 1:  # every client equally often
            return float(picks <= round(count * sampling.total_rounds * sampling.rate))
        cells = count * sampling.total_rounds
        return 0.0 if picks > cells else float(betainc(picks, cells - picks + 1, sampling.rate))


def _rate_to_detect(sampling: Sampling, noise: float, twice: float, delta: float) -> float | None:
    """The smallest rate with an epsilon of `twice`, or 1; None if each client is sampled once per epoch.

    Then every second time is noticed, so any number of canaries is enough.
    """
    if not isinstance(sampling, Poisson | FixedSize) or sampling.rate >= 1:
        return None

    def reached(rate: float) -> float:
        return amplified_epsilon(noise, Poisson(rate, sampling.total_rounds), delta).high

    low, high = sampling.rate, 1.0
    if reached(high) <= twice:
        return high
    while high - low > 1e-3 * low:  # a smaller rate takes more canaries, so the error is on the safe side
        rate = math.sqrt(low * high)
        low, high = (low, rate) if reached(rate) > twice else (rate, high)
    return low


def _fewest_on_a_lattice(enough: Callable[[int], bool], window: int, most: int) -> int | None:
    """The number from which on `enough` holds for `window` numbers: counts are whole, so power is not monotone."""
    count = _fewest(enough, most)
    while count is not None and count <= most:
        worse = [more for more in range(count, min(count + window, most) + 1) if not enough(more)]
        if not worse:
            return count
        count = worse[-1] + 1
    return None


def detectable_mean(weight: float, claimed: float, *, level: float, power: float, null_dof: float) -> float | None:
    """The smallest mean score that the z-test of a mean of `claimed` rejects with this power; None if it rejects none.

    `weight` is the number of scores, or of presentations.
    """

    def missing(faulty: float) -> float:
        return _power(weight, claimed, faulty, level, null_dof) - power

    high = 2 * claimed
    while missing(high) < 0:
        high *= 2
        if high > 1e6 * claimed:
            return None
    return float(brentq(missing, claimed, high))


def _power(count: float, claimed: float, faulty: float, level: float, null_dof: float) -> float:
    spread_claimed, spread_faulty = (math.sqrt(1 / count + mean**2 / (2 * null_dof)) for mean in (claimed, faulty))
    critical = claimed - float(ndtri(level)) * spread_claimed
    return float(ndtr((faulty - critical) / spread_faulty))


def _claim_means(claim_epsilon: float, delta: float, factor: float, dilution: float) -> tuple[float, float]:
    claim, factor = one_number("claim_epsilon", claim_epsilon), one_number("factor", factor)
    if claim <= 0:
        raise ValueError(f"claim_epsilon must be above 0, got {claim}")
    if factor <= 1:
        raise ValueError(f"factor must be above 1, got {factor}")
    dilution = float(nonnegative_array("dilution", dilution))
    noise = float(mechanism_noise(factor * claim, delta=delta))
    return _mean(claim, delta), 1 / math.hypot(noise, dilution)


def _mean(epsilon: float, delta: float) -> float:
    """The mean score at which N(0, 1) and N(mean, 1) are `epsilon` apart."""
    return 1 / float(mechanism_noise(epsilon, delta=delta))


def _fitting(canaries: int, dim: int) -> int:
    """The number of canaries, which must leave directions to estimate the null's std from."""
    count = whole_number("canaries", canaries, minimum=FEWEST)
    if count > dim - 2:
        raise ValueError(
            f"canaries must be at most dim - 2, got {count} canaries in {dim} dimensions; audit with fewer"
        )
    return count


def _sample(count: int, dim: int) -> Sample:
    return Sample(count, null_dof=float(dim - count))


def _detectable_epsilon(sample: Sample, delta: float, power: float) -> float:
    low, high = 0.0, LARGEST_MEAN
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _detection_power(middle, sample, delta) >= power else (middle, high)
    return float(gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(high, 1.0), delta=delta))


def _detection_power(mean: float, sample: Sample, delta: float) -> float:
    """The probability that the estimate lies above the floor's q95 at a true mean, from the floor's lattice, shifted."""
    means, stds = null_lattice(sample)
    # All scores share the error of the null's std; it follows from the fitted std.
    ratio = stds**2 * sample.variance_ratio_scale
    shared = np.sqrt((sample.null_dof + (sample.count - 1) * ratio) / (sample.null_dof + sample.count - 1))
    shifted = quick_epsilons(means + mean * shared, stds, sample=sample, delta=delta, variance="auto")
    return float(np.mean(shifted > _floor(sample, delta).q95))


@lru_cache(maxsize=64)
def _floor(sample: Sample, delta: float) -> Floor:
    return noise_floor(sample=sample, delta=delta)


def _fewest(enough: Callable[[int], bool], most: int) -> int | None:
    """The smallest count in [FEWEST, most] for which `enough` holds, if it holds for every larger count too."""
    low, high = FEWEST - 1, FEWEST
    while not enough(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
