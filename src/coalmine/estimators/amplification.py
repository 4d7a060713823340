"""Epsilon amplified by sampling: the attacker does not know in which rounds a client takes part.

These values hold for the whole run. Against an attacker who knows the client's rounds, `mechanism_epsilon` applies
instead. The accounting is done by dp-accounting and PLD_accounting, which are imported on use.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
from scipy.special import gammaln, log_ndtr, ndtr, ndtri

from coalmine.argument_checks import Floats, delta_array, nonnegative_array, one_number
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.estimators.sampling import (
    NO_SCHEDULE,
    FixedSize,
    Poisson,
    RandomAllocation,
    Sampling,
    Shuffled,
    Strengths,
    checked_sampling,
    largest_exposure,
)

Kind = Literal["upper bound", "range", "estimate"]

PLD, ALLOCATION, RDP = "dp-accounting PLD", "PLD_accounting", "dp-accounting RDP"
UNAMPLIFIED = "Gaussian mechanism, no amplification"

FINEST_INTERVAL = 1e-5  # smallest step of the privacy loss
GRID_ERROR = 4e-5  # approximate error of epsilon; it grows with the rounds and the square of the step
LARGEST_GRID = 1_000_000  # most points of the composed privacy loss
MOST_ROUNDS = 1_000_000  # most rounds that are composed
MOST_ALLOCATED = 100_000  # most rounds of random allocation that are composed
WHOLE_ORDERS = [*range(2, 128), *(2**power for power in range(7, 15))]  # Rényi orders; others may not converge
SMALLEST_PLD_DELTA = 1e-13  # below it, a privacy loss distribution is dominated by rounding error
RDP_IS_WORSE = (
    "Rényi accounting gives a larger epsilon than no amplification, so the unamplified epsilon is the upper end"
)
LONGEST_LOSS = 700.0  # log likelihood ratios in a wider range overflow
GEOMETRIC_POINTS = 3_000  # the run time grows with their square
LINEAR_POINTS, LINEAR_POINTS_PER_ROUND = 30_000_000, 200_000
TAIL = 1e-2  # probability outside the grids, as a fraction of delta
COARSER = 5  # factor by which the grids are coarser in the first search for the noise
GAP_CELLS, GAP_STDS = 1_000, 9.0  # cells of a round's sum in the attack on cohorts of fixed size, and their range
GAP_ERROR = 1e-2  # approximate error of epsilon by which that attack is rounded down
MOST_STRENGTHS = 32  # most different strengths of rounds that are composed; more are rounded
VARIED_ERROR, LARGEST_STEP = 1e-4, 1e-3  # approximate error of epsilon of rounds with different noise; largest step
MOST_EPOCHS = 300  # most epochs that a lower end uses; leaving epochs out keeps it valid


class AmplifiedEpsilon(float):
    """An amplified epsilon with its accountant, adjacency and kind. Its value is the upper end of its range.

    `kind` is "upper bound" for a tight accountant, where `low` shows how tight. It is "range" where no tight accountant is
    known: epsilon then lies between `low` and `high`. It is "estimate" where the noise was measured.
    """

    low: float
    accountant: str
    adjacency: str
    kind: Kind
    note: str

    def __new__(
        cls, value: float, *, low: float | None = None, accountant: str, adjacency: str, kind: Kind, note: str = ""
    ) -> "AmplifiedEpsilon":
        epsilon = super().__new__(cls, value)
        epsilon.low = float(value) if low is None else min(float(low), float(value))
        epsilon.accountant, epsilon.adjacency, epsilon.kind, epsilon.note = accountant, adjacency, kind, note
        return epsilon

    @property
    def high(self) -> float:
        """The upper end: the value itself."""
        return float(self)

    def to_dict(self) -> dict[str, Any]:
        """The epsilon and its details, as stored in files."""
        return {"epsilon": float(self), **self._details()}

    def _details(self) -> dict[str, Any]:
        names = ("low", "accountant", "adjacency", "kind", "note")
        return {name: getattr(self, name) for name in names}

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        return (float(self),), self._details()

    def __str__(self) -> str:
        return float.__repr__(self)

    def __repr__(self) -> str:
        details = ", ".join(f"{name}={value!r}" for name, value in self._details().items())
        return f"AmplifiedEpsilon({float.__repr__(self)}, {details})"


def amplified_epsilon(noise_multiplier: float, sampling: Sampling, delta: float) -> AmplifiedEpsilon:
    """Epsilon of a whole run for an attacker who sees every round and knows all other updates, but not the target's rounds.

    Poisson: dp-accounting's PLD. Random allocation: PLD_accounting (Feldman and Shenfeld 2026, arXiv 2602.17284). Fixed
    size: between a proven attack and dp-accounting's RDP. Shuffling: between a proven attack and no amplification. Noise
    0 gives inf. Results are cached.

    >>> round(amplified_epsilon(1.0, Poisson(0.1, rounds=100), 1e-5), 2)
    7.05
    """
    noise, delta = _checked(noise_multiplier, delta)
    return _epsilon(noise, checked_sampling(sampling), delta)


def amplified_noise(epsilon: float, sampling: Sampling, delta: float) -> float:
    """The smallest noise multiplier whose amplified epsilon (upper end) is at most `epsilon`: amplified_epsilon's inverse.

    The epsilon at that noise is within 0.01 % of `epsilon`, for random allocation within 0.1 %. Epsilon inf gives 0. For
    shuffling, this is the noise without amplification.

    >>> round(amplified_noise(7.047, Poisson(0.1, rounds=100), 1e-5), 3)
    1.0
    """
    wanted = math.inf if epsilon == math.inf else one_number("epsilon", epsilon)
    if wanted <= 0:
        raise ValueError(f"epsilon must be above 0, got {wanted:g}")
    delta = float(delta_array(one_number("delta", delta)))
    return _noise(wanted, checked_sampling(sampling), delta)


def _checked(noise_multiplier: float, delta: float) -> tuple[float, float]:
    noise = float(nonnegative_array("noise_multiplier", one_number("noise_multiplier", noise_multiplier)))
    return noise, float(delta_array(one_number("delta", delta)))


def _unamplified(noise: float, sampling: Sampling, delta: float) -> float:
    """Epsilon if the attacker knew the rounds, in the scheme's adjacency.

    Under Poisson and fixed-size sampling a client may take part in every round.
    """
    if isinstance(sampling, FixedSize):
        noise = noise / 2  # replacing one client moves the sum by two clip norms
    times = sampling.rounds if isinstance(sampling, Poisson | FixedSize) else sampling.epochs
    if sampling.strengths:
        return float(mechanism_epsilon(noise / math.sqrt(largest_exposure(sampling, times)), delta=delta))
    return float(mechanism_epsilon(noise, delta=delta, participations=times))


@lru_cache(maxsize=4096)
def _epsilon(noise: float, sampling: Sampling, delta: float) -> AmplifiedEpsilon:
    unamplified = _unamplified(noise, sampling, delta)
    exact = AmplifiedEpsilon(
        unamplified, accountant=UNAMPLIFIED, adjacency=sampling.adjacency, kind="upper bound", note=""
    )
    if unamplified == 0 or math.isinf(unamplified) or sampling.rate == 1:
        return exact
    if sampling.strengths:
        return _varied(noise, sampling, delta, unamplified)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries warn of optional speedups, and of orders that overflow
        match sampling:
            case Poisson():
                return _poisson(noise, sampling, delta, unamplified)
            case RandomAllocation():
                return _allocation(noise, sampling, delta, unamplified)
            case Shuffled():
                return _shuffled(noise, sampling, delta, unamplified)
            case FixedSize():
                return _fixed_size(noise, sampling, delta, unamplified)


def _varied(noise: float, sampling: Sampling, delta: float, unamplified: float) -> AmplifiedEpsilon:
    """Epsilon if the noise varies from round to round: composed under Poisson sampling, bracketed under other schemes.

    An epsilon falls as noise grows, so all rounds with the most or the least noise bracket every scheme.
    """
    weakest, strongest = min(sampling.strengths)[0], max(sampling.strengths)[0]
    if not isinstance(sampling, Poisson) or not _accountable(noise / strongest, sampling, delta):
        plain = replace(sampling, strengths=NO_SCHEDULE)
        least, most = (_epsilon(noise / strength, plain, delta) for strength in (weakest, strongest))
        value = min(unamplified, most.high)
        return AmplifiedEpsilon(
            value, low=least.low, accountant=most.accountant, adjacency=sampling.adjacency, kind="range"
        )
    parts, error = merged_strengths(sampling.strengths)
    composed = _composed_epsilon(noise, replace(sampling, strengths=parts), delta)
    return AmplifiedEpsilon(
        min(unamplified, composed * (1 + error)),
        low=min(unamplified, composed * (1 - error)),
        accountant=PLD,
        adjacency=sampling.adjacency,
        kind="upper bound",
    )


@lru_cache(maxsize=4096)
def _composed_epsilon(noise: float, sampling: Poisson, delta: float, coarser: int = 1) -> float:
    """The PLD's epsilon of Poisson sampled rounds with different noise."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    plain = replace(sampling, strengths=NO_SCHEDULE)
    steps = [_interval(noise / strength, plain) for strength, _ in sampling.strengths]
    enough = min(LARGEST_STEP, math.sqrt(8 * VARIED_ERROR / sampling.rounds))
    accountant = PLDAccountant(value_discretization_interval=coarser * max(min(steps), enough))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for strength, count in sampling.strengths:
            event = PoissonSampledDpEvent(sampling.probability, GaussianDpEvent(noise / strength))
            accountant.compose(event, count)
        return float(accountant.get_epsilon(delta))


def merged_strengths(strengths: Strengths) -> tuple[Strengths, float]:
    """At most MOST_STRENGTHS different strengths, and the relative error of epsilon that this may cause.

    Neighbours on a logarithmic grid are replaced by their root mean square, to which epsilon is stationary: the error is
    of second order in the width of a cell.
    """
    if len(strengths) <= MOST_STRENGTHS:
        return strengths, 0.0
    values, counts = (np.array(column, dtype=np.float64) for column in zip(*strengths, strict=True))
    width = math.log(float(values.max() / values.min())) / (MOST_STRENGTHS - 1)
    place = np.rint(np.log(values / values.min()) / width).astype(np.int64)
    merged = []
    for each in np.unique(place):
        inside = place == each
        count = float(counts[inside].sum())
        merged.append((math.sqrt(float(counts[inside] @ values[inside] ** 2) / count), round(count)))
    return tuple(merged), 2 * width**2


def _accountable(noise: float, sampling: Poisson | RandomAllocation, delta: float) -> bool:
    """Whether the accountants can handle this noise and these rounds; decided by the settings, not by run time."""
    if isinstance(sampling, Poisson):
        return sampling.rounds <= MOST_ROUNDS and 0.5 / noise**2 + 10 / noise < LONGEST_LOSS
    possible = sampling.total_rounds <= MOST_ALLOCATED and delta >= SMALLEST_PLD_DELTA
    return possible and _log_length(noise, sampling, delta) < LONGEST_LOSS


def _poisson(noise: float, sampling: Poisson, delta: float, unamplified: float) -> AmplifiedEpsilon:
    if not _accountable(noise, sampling, delta):
        return _not_amplified(unamplified, _attack_by_maximum(noise, sampling, delta), sampling)
    if delta < SMALLEST_PLD_DELTA:  # the tail of a Fourier transform is dominated by rounding error
        value, low = _poisson_rdp(noise, sampling, delta), _attack_by_maximum(noise, sampling, delta)
        if not value < unamplified:
            return _not_amplified(unamplified, low, sampling, RDP_IS_WORSE)
        return AmplifiedEpsilon(value, low=low, accountant=RDP, adjacency=sampling.adjacency, kind="range")
    value = min(unamplified, _poisson_pld(noise, sampling, delta))
    return AmplifiedEpsilon(value, accountant=PLD, adjacency=sampling.adjacency, kind="upper bound")


def _poisson_rdp(noise: float, sampling: Poisson, delta: float) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    event = SelfComposedDpEvent(PoissonSampledDpEvent(sampling.probability, GaussianDpEvent(noise)), sampling.rounds)
    return float(RdpAccountant(orders=WHOLE_ORDERS).compose(event).get_epsilon(delta))


def _poisson_pld(noise: float, sampling: Poisson, delta: float, coarser: int = 1) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    event = SelfComposedDpEvent(PoissonSampledDpEvent(sampling.probability, GaussianDpEvent(noise)), sampling.rounds)
    accountant = PLDAccountant(value_discretization_interval=coarser * _interval(noise, sampling))
    return float(accountant.compose(event).get_epsilon(delta))


def _interval(noise: float, sampling: Poisson) -> float:
    """The privacy loss step: as coarse as GRID_ERROR allows, finer than a round's loss, at most LARGEST_GRID points."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    weights = weights / weights.sum()
    probability = sampling.probability

    def moment(power: int) -> float:
        at = [(shift - 0.5) / noise**2 + nodes / noise for shift in (0, 1)]
        losses = [np.logaddexp(np.log1p(-probability), math.log(probability) + x) for x in at]
        absent, present = (float(weights @ loss**power) for loss in losses)
        return (1 - probability) * absent + probability * present

    mean, square = moment(1), moment(2)
    one_loss = math.sqrt(max(square - mean * mean, 0.0))
    spread = math.sqrt(sampling.rounds) * one_loss
    one_round = 0.5 / noise**2 + 10 / noise
    length = max(2 * one_round, 20 * spread + one_round)
    precise = min(math.sqrt(2 * GRID_ERROR / sampling.rounds), 0.1 * one_loss)
    return max(FINEST_INTERVAL, precise, length / LARGEST_GRID)


def _allocation(noise: float, sampling: RandomAllocation, delta: float, unamplified: float) -> AmplifiedEpsilon:
    low = max(_attack_by_maximum(noise, sampling, delta), _attack_by_sum(noise, sampling, delta))
    if not _accountable(noise, sampling, delta):
        return _not_amplified(unamplified, low, sampling)
    low = max(low, _allocation_geometric(noise, sampling, delta, upper=False))
    value = min(unamplified, _allocation_upper(noise, sampling, delta))
    return AmplifiedEpsilon(value, low=low, accountant=ALLOCATION, adjacency=sampling.adjacency, kind="upper bound")


def _allocation_upper(noise: float, sampling: RandomAllocation, delta: float, coarser: int = 1) -> float:
    """PLD_accounting's upper bound on the grid with the smaller rounding error; the better of both if they are similar."""
    length = _log_length(noise, sampling, delta)
    geometric = length * _stages(sampling) * coarser / GEOMETRIC_POINTS
    linear = math.exp(min(length / 2, 700.0)) * sampling.rounds * coarser / _linear_points(sampling)
    values = []
    if linear < 4 * geometric:
        values.append(_allocation_linear(noise, sampling, delta, coarser))
    if geometric < 4 * linear:
        values.append(_allocation_geometric(noise, sampling, delta, upper=True, coarser=coarser))
    return min(values)


def _log_length(noise: float, sampling: RandomAllocation, delta: float) -> float:
    """The width of the range of one round's log likelihood ratio, without its negligible tails."""
    return noise**-2 - 2 / noise * float(ndtri(TAIL * delta / (18 * sampling.total_rounds)))


def _stages(sampling: RandomAllocation) -> int:
    """The number of convolutions on a geometric grid: the powers of two, and their sums."""
    last = sampling.rounds - 1
    return 1 + last.bit_length() + last.bit_count()


def _allocation_geometric(
    noise: float, sampling: RandomAllocation, delta: float, *, upper: bool, coarser: int = 1
) -> float:
    """A bound on a geometric grid of likelihood ratios, with equally many points at any noise, so about equally fast."""
    step = _log_length(noise, sampling, delta) * _stages(sampling) * coarser / GEOMETRIC_POINTS
    return _from_library(noise, sampling, delta, upper=upper, loss_discretization=step)


def _allocation_linear(noise: float, sampling: RandomAllocation, delta: float, coarser: int = 1) -> float:
    """An upper bound on a linear grid of likelihood ratios, summed by FFT.

    Better at large noise: the range of the ratios is exponential in 1/noise.
    """
    from PLD_accounting import ConvolutionMethod

    points = _linear_points(sampling)
    length = _log_length(noise, sampling, delta)
    step = max(min(5e-5, 2 * math.exp(length / 2) / points), length / LARGEST_GRID)
    return _from_library(
        noise,
        sampling,
        delta,
        upper=True,
        loss_discretization=min(1e-4, step * math.sqrt(sampling.epochs)) * coarser,
        max_grid_fft=points // coarser,
        convolution_method=ConvolutionMethod.FFT,
    )


def _linear_points(sampling: RandomAllocation) -> int:
    return min(LINEAR_POINTS, LINEAR_POINTS_PER_ROUND * sampling.rounds)


def _from_library(
    noise: float, sampling: RandomAllocation, delta: float, *, upper: bool, loss_discretization: float, **grid: Any
) -> float:
    from PLD_accounting import (
        AllocationSchemeConfig,
        BoundType,
        PrivacyParams,
        gaussian_allocation_epsilon_configurable,
    )

    rounds, epochs = sampling.rounds, sampling.epochs
    return float(
        gaussian_allocation_epsilon_configurable(
            params=PrivacyParams(sigma=noise, num_steps=rounds, num_epochs=epochs, delta=delta),
            config=AllocationSchemeConfig(
                loss_discretization=loss_discretization * epochs, tail_truncation=TAIL * delta, **grid
            ),
            bound_type=BoundType.DOMINATES if upper else BoundType.IS_DOMINATED,
        )
    )


def _shuffled(noise: float, sampling: Shuffled, delta: float, unamplified: float) -> AmplifiedEpsilon:
    """Between the lower bounds of two attacks and no amplification.

    The lower end takes a pair of neighbours and a test (compare Chua et al. 2024, arXiv 2403.17673). All others send -u
    for one unit vector u. The target sends u, and the neighbour zeroes the target out. Look at the projections on u. A
    cohort of B clients without the target has the mean -B. The target's cohort has 2 - B, or 1 - B when zeroed out,
    because the target displaces one of the others. The target's round is uniform among T. So, after adding B, one round
    has mean 2 under the first data set and 1 under the second; the rest have mean 0.

    The test asks whether the largest of the T rounds exceeds c. Its probabilities are p = 1 - Φ((c-2)/z)Φ(c/z)^(T-1)
    and p' = 1 - Φ((c-1)/z)Φ(c/z)^(T-1). Every (ε, δ) that holds has p <= e^ε p' + δ, so ε >= log((p - δ)/p') for each c.
    Epochs are independent, so the number of epochs that exceed c is binomial, and its tails are tests in the same way.
    The second test is the sum over an epoch's rounds. It has means 2 and 1 and variance Tz²: the Gaussian mechanism
    with noise z√T.

    The upper end gives the attacker the permutations. They do not depend on the target's update, so epsilon is then
    that of the Gaussian mechanism. Not knowing them cannot raise it.
    """
    low = max(_attack_by_maximum(noise, sampling, delta), _attack_by_sum(noise, sampling, delta))
    return AmplifiedEpsilon(
        unamplified,
        low=low,
        accountant=UNAMPLIFIED,
        adjacency=sampling.adjacency,
        kind="range",
        note="no accountant is known to amplify shuffled cohorts of fixed size; the lower end is a proven attack",
    )


def _fixed_size(noise: float, sampling: FixedSize, delta: float, unamplified: float) -> AmplifiedEpsilon:
    """Between a proven attack and RDP's epsilon for sampling without replacement.

    The lower end is the larger of two pairs of neighbours, and in both of them the neighbour replaces the target's update
    by 0. If all others send 0, a round has mean 1 with probability size/population, as under Poisson sampling. The second
    pair is that of `_gap_attack`. The upper end: Theorem 27 of Wang, Balle and Kasiviswanathan 2019 (arXiv 1808.00087).
    Replacing one client moves the sum by up to two clip norms, so its noise multiplier is half.
    """
    poisson = Poisson(sampling.rate, sampling.rounds)
    low = _epsilon(noise, poisson, delta).low
    if _accountable(noise, poisson, delta) and delta >= SMALLEST_PLD_DELTA:
        low = max(low, _gap_attack(noise, sampling, delta))
    value = _fixed_size_upper(noise, sampling, delta)
    if not value < unamplified:
        return _not_amplified(unamplified, low, sampling, RDP_IS_WORSE)
    return AmplifiedEpsilon(value, low=low, accountant=RDP, adjacency=sampling.adjacency, kind="range")


def _fixed_size_upper(noise: float, sampling: FixedSize, delta: float) -> float:
    from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent, SelfComposedDpEvent
    from dp_accounting.privacy_accountant import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    event = SelfComposedDpEvent(
        SampledWithoutReplacementDpEvent(sampling.population, sampling.size, GaussianDpEvent(noise / 2)),
        sampling.rounds,
    )
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    return float(accountant.compose(event).get_epsilon(delta))


def _gap_attack(noise: float, sampling: FixedSize, delta: float) -> float:
    """A lower bound on epsilon for cohorts of a fixed size: the target displaces one of the others, which leaves a gap.

    All others send -u for one unit vector u, the target sends u, and the neighbour zeroes the target out, as in
    `_shuffled`. A cohort of B has mean -B on u without the target, and 2 - B or 1 - B with it. The target is in each
    round with probability q, independently of other rounds. So, after adding B, a round is (1 - q)N(0, z²) + qN(2, z²)
    under the first data set and (1 - q)N(0, z²) + qN(1, z²) under the second. An attacker who sees only in which of many
    cells each round lies knows no more; losses are rounded down. Both keep the composed epsilon a lower bound.
    """
    from dp_accounting.pld import privacy_loss_distribution

    q, rounds = sampling.rate, sampling.rounds
    edges = np.linspace(-GAP_STDS * noise, 2 + GAP_STDS * noise, GAP_CELLS - 1)
    absent, zeroed, present = (_cells(edges, mean, noise) for mean in (0.0, 1.0, 2.0))
    first, second = (1 - q) * absent + q * present, (1 - q) * absent + q * zeroed
    losses = np.log(first) - np.log(second)
    mean = float(first @ losses)
    spread = math.sqrt(rounds * max(float(first @ losses**2) - mean**2, 0.0))
    length = rounds * abs(mean) + 20 * spread + float(np.ptp(losses))
    found = privacy_loss_distribution.from_two_probability_mass_functions(
        dict(enumerate(np.log(second).tolist())),
        dict(enumerate(np.log(first).tolist())),
        pessimistic_estimate=False,
        value_discretization_interval=max(GAP_ERROR / rounds, length / LARGEST_GRID),
    )
    return max(float(found.self_compose(rounds).get_epsilon_for_delta(delta)), 0.0)


def _cells(edges: Floats, mean: float, std: float) -> Floats:
    """Probabilities of a Gaussian between neighbouring edges, and beyond the first and the last."""
    below, above = ndtr((edges - mean) / std), ndtr((mean - edges) / std)
    inner = np.where(edges[1:] > mean, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.concatenate([below[:1], inner, above[-1:]])


def _not_amplified(unamplified: float, low: float, sampling: Sampling, note: str | None = None) -> AmplifiedEpsilon:
    note = (
        note
        or "not amplified: the accountants cannot handle so little noise or so many rounds; the lower end is an attack"
    )
    return AmplifiedEpsilon(
        unamplified, low=low, accountant=UNAMPLIFIED, adjacency=sampling.adjacency, kind="range", note=note
    )


def _attack_by_sum(noise: float, sampling: RandomAllocation | Shuffled, delta: float) -> float:
    """A lower bound on epsilon from the sum over an epoch's rounds: it moves by 1, and its noise is z√T."""
    return float(mechanism_epsilon(noise * math.sqrt(sampling.rounds), delta=delta, participations=sampling.epochs))


def _attack_by_maximum(noise: float, sampling: Poisson | RandomAllocation | Shuffled, delta: float) -> float:
    """The best log((p - δ)/p') for tests of whether the largest round of an epoch exceeds c: a lower bound on epsilon.

    `_shuffled` derives it. Random allocation has means 1 and 0 in place of 2 and 1. So has each Poisson round, with its
    sampling probability.
    """
    top = 2.0 if isinstance(sampling, Shuffled) else 1.0
    c = np.linspace(0, top + 8 * noise, 2001)
    absent = log_ndtr(-c / noise)
    if isinstance(sampling, Poisson):
        q = sampling.probability
        sampled = np.logaddexp(math.log1p(-q) + absent, math.log(q) + log_ndtr((1 - c) / noise))
        all_rounds = math.log(sampling.rounds)
        return _best_advantage(all_rounds + _log_rate(sampled), all_rounds + _log_rate(absent), 1, delta)
    others = math.log(sampling.rounds - 1) + _log_rate(absent)
    present, changed = (np.logaddexp(_log_rate(log_ndtr((mean - c) / noise)), others) for mean in (top, top - 1))
    return _best_advantage(present, changed, min(sampling.epochs, MOST_EPOCHS), delta)


def _log_rate(log_tail: Floats) -> Floats:
    """log(-log(1 - p)) from log p: rates of independent rounds add up."""
    usual = np.minimum(np.maximum(log_tail, -40.0), -1e-12)
    return np.where(log_tail < -36, log_tail, np.log(-np.log1p(-np.exp(usual))))


def _best_advantage(log_rate: Floats, changed_log_rate: Floats, epochs: int, delta: float) -> float:
    """The largest log((P(K >= k) - δ)/P'(K >= k)) for the number K of epochs with an exceedance, over thresholds and k."""
    k = np.arange(1, epochs + 1)[:, None]
    log_ways = gammaln(epochs + 1) - gammaln(k + 1) - gammaln(epochs - k + 1)

    def log_tails(rate: Floats) -> Floats:
        log_hit = np.where(rate < -36, rate, np.log(-np.expm1(-np.exp(np.maximum(rate, -40.0)))))
        terms = log_ways + k * log_hit - (epochs - k) * np.exp(rate)
        return np.asarray(np.logaddexp.accumulate(terms[::-1], axis=0))

    power = np.exp(log_tails(log_rate)) - delta
    reached = power > 0
    advantage = np.log(np.where(reached, power, 1.0)) - log_tails(changed_log_rate)
    return float(np.max(advantage, where=reached, initial=0.0))


@lru_cache(maxsize=4096)
def _noise(epsilon: float, sampling: Sampling, delta: float) -> float:
    if math.isinf(epsilon):
        return 0.0
    times = sampling.rounds if isinstance(sampling, Poisson | FixedSize) else sampling.epochs
    enough = float(mechanism_noise(epsilon, delta=delta, participations=times))
    enough = 2 * enough if isinstance(sampling, FixedSize) else enough
    if sampling.strengths:
        enough *= math.sqrt(largest_exposure(sampling, times) / times)
    if isinstance(sampling, Shuffled) or sampling.rate == 1:
        return enough
    start, slope = math.log(enough) + 0.5 * math.log(sampling.rate), -1.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # a bound for random allocation jumps a little as its grid moves with the noise
        fine = 1e-3 if isinstance(sampling, RandomAllocation) else 1e-4
        for coarser, tolerance in ((COARSER, 1e-2), (1, fine)):
            upper_end = partial(_upper_end, sampling=sampling, delta=delta, coarser=coarser)
            start, slope = _search(upper_end, epsilon, enough, start, slope, tolerance)
    return math.exp(start)


def _upper_end(noise: float, sampling: Sampling, delta: float, coarser: int) -> float:
    """`_epsilon` without its lower end, on coarser grids."""
    unamplified = _unamplified(noise, sampling, delta)
    if sampling.strengths:
        if unamplified > 0 and isinstance(sampling, Poisson) and _accountable(noise, sampling, delta):
            parts, error = merged_strengths(sampling.strengths)
            merged = replace(sampling, strengths=parts)
            return min(unamplified, _composed_epsilon(noise, merged, delta, coarser) * (1 + error))
        return float(_epsilon(noise, sampling, delta))
    if unamplified > 0 and isinstance(sampling, Poisson) and _accountable(noise, sampling, delta):
        return min(unamplified, _poisson_pld(noise, sampling, delta, coarser))
    if unamplified > 0 and isinstance(sampling, RandomAllocation) and _accountable(noise, sampling, delta):
        return min(unamplified, _allocation_upper(noise, sampling, delta, coarser))
    if unamplified > 0 and isinstance(sampling, FixedSize):
        return min(unamplified, _fixed_size_upper(noise, sampling, delta))
    return float(_epsilon(noise, sampling, delta))


def _search(
    upper_end: Callable[[float], float], epsilon: float, enough: float, start: float, slope: float, tolerance: float
) -> tuple[float, float]:
    """The log noise at which `upper_end` lies within `tolerance` below `epsilon`, and its slope there, by secants on logs.

    A bracket guards the secants. Where `upper_end` jumps over `epsilon`, the answer is the first noise after the jump.
    """
    low, high = -math.inf, math.log(enough)
    x, before = min(start, high), None
    while True:
        excess = math.log(max(upper_end(math.exp(x)), 1e-300) / epsilon)
        if -tolerance <= excess <= 0 or (excess <= 0 and x - low < 1e-5):
            return x, slope
        if before is not None and before[0] != x:
            slope = min(-0.1, max(-20.0, (excess - before[1]) / (x - before[0])))
        before = (x, excess)
        low, high = (x, high) if excess > 0 else (low, x)
        if high - low < 1e-5:
            return high, slope
        step = (-tolerance / 2 - excess) / slope
        following = x + max(-2.0, min(2.0, step))
        inside = low < following < high
        x = following if inside else (x - 1.0 if math.isinf(low) else (low + high) / 2)
