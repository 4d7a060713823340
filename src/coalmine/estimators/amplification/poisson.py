"""Poisson sampling: dp-accounting's privacy loss distribution."""

import math
from typing import NamedTuple

import numpy as np
from scipy import fft

from coalmine.argument_checks import Floats
from coalmine.estimators.amplification.amplified import (
    LARGEST_GRID,
    PLD,
    RDP,
    RDP_IS_WORSE,
    SMALLEST_PLD_DELTA,
    AmplifiedEpsilon,
    not_amplified,
)
from coalmine.estimators.amplification.attacks import attack_by_maximum
from coalmine.estimators.sampling import Poisson

FINEST_INTERVAL = 1e-5  # smallest step of the privacy loss
GRID_ERROR = 4e-5  # approximate error of epsilon; it grows with the rounds and the square of the step
LOST = 1e-15  # probability that a composed loss may lose on each side
MOST_ROUNDS = 1_000_000  # most rounds that are composed
LONGEST_LOSS = 700.0  # log likelihood ratios in a wider range overflow
WHOLE_ORDERS = [*range(2, 128), *(2**power for power in range(7, 15))]  # Rényi orders; others may not converge


def poisson_epsilon(noise: float, sampling: Poisson, delta: float, unamplified: float) -> AmplifiedEpsilon:
    """Epsilon by privacy loss distribution; by Rényi accounting if delta is too small for it."""
    if not poisson_accountable(noise, sampling):
        return not_amplified(unamplified, attack_by_maximum(noise, sampling, delta), sampling)
    if delta < SMALLEST_PLD_DELTA:  # the tail of a Fourier transform is dominated by rounding error
        value, low = _poisson_rdp(noise, sampling, delta), attack_by_maximum(noise, sampling, delta)
        if not value < unamplified:
            return not_amplified(unamplified, low, sampling, RDP_IS_WORSE)
        return AmplifiedEpsilon(value, low=low, accountant=RDP, adjacency=sampling.adjacency, kind="range")
    value = min(unamplified, poisson_pld(noise, sampling, delta))
    return AmplifiedEpsilon(value, accountant=PLD, adjacency=sampling.adjacency, kind="upper bound")


def poisson_accountable(noise: float, sampling: Poisson) -> bool:
    """Whether the accountant can handle this noise and these rounds; decided by the settings, not by run time."""
    return sampling.rounds <= MOST_ROUNDS and 0.5 / noise**2 + 10 / noise < LONGEST_LOSS


def _poisson_rdp(noise: float, sampling: Poisson, delta: float) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    event = SelfComposedDpEvent(PoissonSampledDpEvent(sampling.probability, GaussianDpEvent(noise)), sampling.rounds)
    return float(RdpAccountant(orders=WHOLE_ORDERS).compose(event).get_epsilon(delta))


def poisson_pld(noise: float, sampling: Poisson, delta: float, coarser: int = 1) -> float:
    """The epsilon of dp-accounting's privacy loss distribution, on a grid `coarser` times as coarse.

    Computed as dp-accounting does, whose loops over the points of the grid take most of the time of a result.
    """
    interval = coarser * loss_interval(noise, sampling)
    laws = (_round_losses(noise, sampling.probability, interval, removed=gone) for gone in (False, True))
    return max(_epsilon(_composed(law, sampling.rounds), interval, delta) for law in laws)


class _Losses(NamedTuple):
    """A privacy loss on a grid: its first point, the points' probabilities, and that of an infinite loss."""

    first: int
    masses: Floats
    infinite: float


def _round_losses(noise: float, probability: float, interval: float, *, removed: bool) -> _Losses:
    """The privacy loss of one round, if a client is removed or added: the dots of its divergences connected."""
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    kind = AdjacencyType.REMOVE if removed else AdjacencyType.ADD
    loss = GaussianPrivacyLoss(noise, sampling_prob=probability, adjacency_type=kind)
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    epsilons = np.arange(low, high + 1) * interval
    sign = 1.0 if removed else -1.0
    reachable = sign * epsilons > math.log1p(-probability)  # by any output; otherwise all or nothing is beyond epsilon
    deltas = np.where(reachable | (not removed), 0.0, -np.expm1(epsilons))
    within = epsilons[reachable]
    whole = sign * within - math.log(probability) + np.log1p(-(1 - probability) * np.exp(-sign * within))
    outputs = -sign * (0.5 + noise**2 * whole)  # where the loss of the sampled mechanism is epsilon
    deltas[reachable] = loss.mu_upper_cdf(outputs) - np.exp(within + loss.mu_lower_log_cdf(outputs))
    deltas = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
    falls, growth = np.diff(deltas), math.expm1(interval)
    masses = np.append(falls, 0.0) - math.exp(interval) * np.insert(falls, 0, 0.0)
    masses[0] += growth * (1 - deltas[0])
    return _Losses(low, np.maximum(masses / growth, 0.0), float(deltas[-1]))


def _composed(law: _Losses, rounds: int) -> _Losses:
    """The sum of the losses of that many rounds, without LOST of its probability on each side (Chernoff's bound)."""
    size = len(law.masses)
    orders = np.concatenate([np.arange(-20, 0), np.arange(1, 21)]) / size
    logs = np.log([law.masses @ np.exp(np.arange(size) * order) for order in orders])
    limits = (rounds * logs + math.log(2 / LOST)) / orders
    low = max(0, math.floor(limits[orders < 0].max()))
    high = min((size - 1) * rounds, math.ceil(limits[orders > 0].min()))
    length = fft.next_fast_len(max(high - low + 1, size))
    sums = np.roll(np.real(fft.ifft(fft.fft(law.masses, length) ** rounds)), -low)[: high - low + 1]
    return _Losses(law.first * rounds + low, sums, LOST - math.expm1(rounds * math.log1p(-law.infinite)))


def _epsilon(law: _Losses, interval: float, delta: float) -> float:
    """The smallest epsilon, at least 0, at which the hockey-stick divergence is at most delta."""
    if law.infinite > delta:
        return math.inf
    losses = ((law.first + np.arange(len(law.masses))) * interval)[::-1]
    masses = law.masses[::-1]
    above = law.infinite + np.concatenate(
        [[0.0], np.cumsum(masses)]
    )  # of losses before each point, from the largest on
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        below = np.concatenate([[0.0], np.cumsum(np.exp(-losses) * masses)])
        epsilons = np.log((above - delta) / below)
        found = (above[:-1] > delta) & (below[:-1] > 0) & (epsilons[:-1] >= losses)
    here = int(np.argmax(found)) if found.any() else len(losses)
    beyond = np.flatnonzero((above[1 : here + 1] >= delta) & (below[1 : here + 1] == 0))
    if beyond.size:  # the other side has no probability that double precision holds
        return max(0.0, float(losses[beyond[0]]))
    return 0.0 if above[here] <= below[here] + delta else float(epsilons[here])


def loss_interval(noise: float, sampling: Poisson) -> float:
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
