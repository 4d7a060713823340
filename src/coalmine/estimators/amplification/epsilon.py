"""Epsilon of a whole run whose clients are sampled, from its noise."""

import math
import warnings
from dataclasses import replace
from functools import lru_cache

from coalmine.argument_checks import delta_array, names_neighbours, nonnegative, one_number
from coalmine.estimators.amplification.allocation import allocation_epsilon
from coalmine.estimators.amplification.amplified import PLD, UNAMPLIFIED, AmplifiedEpsilon, unamplified_epsilon
from coalmine.estimators.amplification.attacks import attack_on_varied_noise
from coalmine.estimators.amplification.fixed_cohorts import fixed_size_epsilon, shuffled_epsilon
from coalmine.estimators.amplification.noise_schedule import composed_epsilon, merged_strengths
from coalmine.estimators.amplification.poisson import poisson_accountable, poisson_epsilon
from coalmine.estimators.sampling import (
    NO_SCHEDULE,
    FixedSize,
    Poisson,
    RandomAllocation,
    Sampling,
    Shuffled,
    checked_sampling,
)


@names_neighbours
def amplified_epsilon(noise_multiplier: float, sampling: Sampling, delta: float) -> AmplifiedEpsilon:
    """Epsilon of a whole run for an attacker who sees every round and knows all other updates, but not the target's rounds.

    Poisson: dp-accounting's PLD. Random allocation: PLD_accounting (Feldman and Shenfeld 2026, arXiv 2602.17284). Fixed
    size: between a proven attack and dp-accounting's RDP. Shuffling: between a proven attack and no amplification. Noise
    0 gives inf. Results are cached.

    >>> round(amplified_epsilon(1.0, Poisson(0.1, rounds=100), 1e-5), 2)
    7.05
    """
    noise, delta = _checked(noise_multiplier, delta)
    return epsilon_of(noise, checked_sampling(sampling), delta)


def least_epsilon(noise_multiplier: float, sampling: Sampling, delta: float) -> float:
    """The lower end of `amplified_epsilon`: by attacks alone where an accountant would take seconds for a range."""
    if isinstance(sampling, RandomAllocation | Shuffled) and sampling.strengths:
        noise, delta = _checked(noise_multiplier, delta)
        return attack_on_varied_noise(noise, sampling, delta)
    return amplified_epsilon(noise_multiplier, sampling, delta).low


def _checked(noise_multiplier: float, delta: float) -> tuple[float, float]:
    noise = nonnegative("noise_multiplier", noise_multiplier)
    return noise, float(delta_array(one_number("delta", delta)))


@lru_cache(maxsize=4096)
def epsilon_of(noise: float, sampling: Sampling, delta: float) -> AmplifiedEpsilon:
    """`amplified_epsilon` of checked arguments."""
    unamplified = unamplified_epsilon(noise, sampling, delta)
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
                return poisson_epsilon(noise, sampling, delta, unamplified)
            case RandomAllocation():
                return allocation_epsilon(noise, sampling, delta, unamplified)
            case Shuffled():
                return shuffled_epsilon(noise, sampling, delta, unamplified)
            case FixedSize():
                return fixed_size_epsilon(noise, sampling, delta, unamplified)


def _varied(noise: float, sampling: Sampling, delta: float, unamplified: float) -> AmplifiedEpsilon:
    """Epsilon if the noise varies from round to round: composed under Poisson sampling, bracketed under other schemes.

    An epsilon falls as noise grows, so all rounds with the most or the least noise bracket every scheme. A strength of 0
    is that of a round without any information.
    """
    weakest, strongest = min(sampling.strengths)[0], max(sampling.strengths)[0]
    if not isinstance(sampling, Poisson) or not poisson_accountable(noise / strongest, sampling):
        plain = replace(sampling, strengths=NO_SCHEDULE)
        most = epsilon_of(noise / strongest, plain, delta)
        low = epsilon_of(noise / weakest, plain, delta).low if weakest else 0.0
        if isinstance(sampling, RandomAllocation | Shuffled):
            low = max(low, attack_on_varied_noise(noise, sampling, delta))
        value = min(unamplified, most.high)
        return AmplifiedEpsilon(value, low=low, accountant=most.accountant, adjacency=sampling.adjacency, kind="range")
    parts, error = merged_strengths(sampling.strengths)
    composed = composed_epsilon(noise, replace(sampling, strengths=parts), delta)
    return AmplifiedEpsilon(
        min(unamplified, composed * (1 + error)),
        low=min(unamplified, composed * (1 - error)),
        accountant=PLD,
        adjacency=sampling.adjacency,
        kind="upper bound",
    )
