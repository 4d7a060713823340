"""Cohorts of a fixed size, drawn anew in each round or shuffled: between a proven attack and an upper bound."""

import math

import numpy as np
from scipy.special import ndtr

from coalmine.argument_checks import Floats
from coalmine.estimators.amplification.amplified import (
    LARGEST_GRID,
    RDP,
    RDP_IS_WORSE,
    SMALLEST_PLD_DELTA,
    UNAMPLIFIED,
    AmplifiedEpsilon,
    not_amplified,
    unamplified_epsilon,
)
from coalmine.estimators.amplification.attacks import attack_by_maximum, attack_by_sum
from coalmine.estimators.amplification.poisson import poisson_accountable, poisson_epsilon
from coalmine.estimators.sampling import FixedSize, Poisson, Shuffled

GAP_CELLS, GAP_STDS = 1_000, 9.0  # cells of a round's sum in the attack on cohorts of fixed size, and their range
GAP_ERROR = 1e-2  # approximate error of epsilon by which that attack is rounded down


def shuffled_epsilon(noise: float, sampling: Shuffled, delta: float, unamplified: float) -> AmplifiedEpsilon:
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
    low = max(attack_by_maximum(noise, sampling, delta), attack_by_sum(noise, sampling, delta))
    return AmplifiedEpsilon(
        unamplified,
        low=low,
        accountant=UNAMPLIFIED,
        adjacency=sampling.adjacency,
        kind="range",
        note="no accountant is known to amplify shuffled cohorts of fixed size; the lower end is a proven attack",
    )


def fixed_size_epsilon(noise: float, sampling: FixedSize, delta: float, unamplified: float) -> AmplifiedEpsilon:
    """Between a proven attack and RDP's epsilon for sampling without replacement.

    The lower end is the larger of two pairs of neighbours, and in both of them the neighbour replaces the target's update
    by 0. If all others send 0, a round has mean 1 with probability size/population, as under Poisson sampling. The second
    pair is that of `_gap_attack`. The upper end: Theorem 27 of Wang, Balle and Kasiviswanathan 2019 (arXiv 1808.00087).
    Replacing one client moves the sum by up to two clip norms, so its noise multiplier is half.
    """
    poisson = Poisson(sampling.rate, sampling.rounds)
    low = poisson_epsilon(noise, poisson, delta, unamplified_epsilon(noise, poisson, delta)).low
    if poisson_accountable(noise, poisson) and delta >= SMALLEST_PLD_DELTA:
        low = max(low, _gap_attack(noise, sampling, delta))
    value = fixed_size_upper_end(noise, sampling, delta)
    if not value < unamplified:
        return not_amplified(unamplified, low, sampling, RDP_IS_WORSE)
    return AmplifiedEpsilon(value, low=low, accountant=RDP, adjacency=sampling.adjacency, kind="range")


def fixed_size_upper_end(noise: float, sampling: FixedSize, delta: float) -> float:
    """The epsilon of Rényi accounting under replacement of one client."""
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
    `shuffled_epsilon`. A cohort of B has mean -B on u without the target, and 2 - B or 1 - B with it. The target is in each
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
