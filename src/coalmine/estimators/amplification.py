"""Epsilon amplified by sampling: nobody knows in which rounds a client takes part.

These values are claims about the whole run. Against an attacker who knows the client's rounds, `mechanism_epsilon`
applies instead.
"""

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr

from coalmine.argument_checks import Floats, delta_array, nonnegative_array, one_number, whole_number
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampling import Poisson, Sampling

ORDERS = 128  # number of integer moments in the moment bound


def subsampled_epsilon(noise_multiplier: float, *, sampling_probability: float, rounds: int, delta: float) -> float:
    """Epsilon of `rounds` rounds of the Gaussian mechanism with Poisson sampling, by dp-accounting's PLD accountant.

    An upper bound under add-or-remove-one adjacency, for an attacker who sees every round but not who was sampled.
    """
    noise, delta, rounds = _checked(noise_multiplier, delta, rounds)
    probability = _probability(sampling_probability)
    if probability == 0:
        return 0.0
    if noise == 0:
        return math.inf
    if probability == 1:
        return float(mechanism_epsilon(noise, delta=delta, participations=rounds))
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    event = SelfComposedDpEvent(PoissonSampledDpEvent(probability, GaussianDpEvent(noise)), rounds)
    return float(PLDAccountant().compose(event).get_epsilon(delta))


def shuffled_epsilon(noise_multiplier: float, *, rounds: int, delta: float) -> float:
    """An upper bound on epsilon when each client takes part once, in a round drawn uniformly from `rounds`.

    This is random allocation, also called balls-and-bins sampling: its dominating pair is N(0, σ²I) and the mixture of
    its `rounds` unit shifts (Chua et al. 2025, arXiv 2412.16802; Feldman and Shenfeld 2025, arXiv 2502.08202). Shuffling
    clients into rounds of fixed size is similar, but no equally tight bound is known for it. The attacker sees every
    round. The result is the smallest of three valid bounds: no amplification; exact integer moments of the likelihood
    ratio; and, for little noise, a union bound over the round whose likelihood ratio dominates the sum. The reverse
    direction is bounded by the geometric mean of the ratios. In (0, mechanism_epsilon].
    """
    noise, delta, rounds = _checked(noise_multiplier, delta, rounds)
    unamplified = float(mechanism_epsilon(noise, delta=delta))
    if rounds == 1 or math.isinf(unamplified):
        return unamplified
    removing = min(_by_moments(noise, rounds, delta), _by_largest_ratio(noise, rounds, delta, unamplified))
    return min(unamplified, max(removing, _by_geometric_mean(noise, rounds, delta)))


def _by_moments(noise: float, rounds: int, delta: float) -> float:
    """From E[(mean of T lognormal ratios)^α], α! times a coefficient of the T-th power of a series: exact."""
    order = np.arange(0, min(rounds, ORDERS) + 1)
    log_a = order * (order - 1) / (2 * noise * noise) - gammaln(order + 1)
    log_b = np.zeros(order.size)
    for n in order[1:]:
        k = order[1 : n + 1]
        log_b[n] = logsumexp(np.log(k * (rounds + 1.0) - n) + log_a[k] + log_b[n - k]) - math.log(n)
    order = order[2:]
    log_moment = log_b[2:] + gammaln(order + 1) - order * math.log(rounds)
    slack = (order - 1) * np.log(order - 1) - order * np.log(order) - math.log(delta)
    return float(np.maximum((log_moment + slack) / (order - 1), 0).min())


def _by_largest_ratio(noise: float, rounds: int, delta: float, unamplified: float) -> float:
    """E(mean - K)+ <= E(largest/T - (1-η)K)+ + E(second largest - ηK)+, each by a union bound; the best η."""
    shift, log_rounds = 1 / noise, math.log(rounds)
    log_shares = -np.geomspace(1e-3, 60, 80)  # log η

    def missed(epsilon: float) -> float:
        level = epsilon + log_rounds + np.log(-np.expm1(log_shares))
        first = _call(shift, level)
        second = _second_largest(shift, log_rounds, epsilon + log_shares)
        return float(np.min(first + second)) - delta

    if missed(unamplified) > 0:
        return unamplified
    return float(brentq(missed, 0.0, unamplified, xtol=1e-9)) if missed(0.0) > 0 else 0.0


def _call(shift: float, level: Floats) -> Floats:
    """E(W - e^level)+ for the lognormal likelihood ratio W: the Gaussian mechanism's delta at epsilon = level."""
    edge = level / shift - shift / 2
    return np.asarray(ndtr(-edge) - np.exp(level + log_ndtr(-edge - shift)))


def _second_largest(shift: float, log_rounds: float, log_floor: Floats) -> Floats:
    """T²/2 times the integral of Pr(W > x)² from e^log_floor: bounds E(second largest - floor)+.

    Pr(W > x) falls in x, so the left end of each of many small steps bounds the integral from above.
    """
    steps = np.linspace(0, 1, 801)
    top = shift * shift / 2 + 40 * shift
    u = log_floor[:, None] + np.maximum(top - log_floor, 1.0)[:, None] * steps
    log_tail = log_ndtr(-(u / shift + shift / 2))
    terms = 2 * log_tail[:, :-1] + u[:, 1:] + np.log(-np.expm1(u[:, :-1] - u[:, 1:]))
    log_sum = np.asarray(logsumexp(terms, axis=1))
    return np.asarray(np.exp(np.minimum(2 * log_rounds - math.log(2) + log_sum, 700.0)))


def _by_geometric_mean(noise: float, rounds: int, delta: float) -> float:
    """E(1 - e^epsilon·mean)+ <= E(1 - e^epsilon·geometric mean)+, and the log of that mean is Gaussian."""
    mean, std = -1 / (2 * noise * noise), 1 / (noise * math.sqrt(rounds))

    def missed(epsilon: float) -> float:
        edge = (-epsilon - mean) / std
        return float(ndtr(edge) - math.exp(epsilon + mean + std * std / 2 + float(log_ndtr(edge - std)))) - delta

    if missed(0.0) <= 0:
        return 0.0
    high = -mean + 40 * std
    return float(brentq(missed, 0.0, high, xtol=1e-9))


def _checked(noise_multiplier: float, delta: float, rounds: int) -> tuple[float, float, int]:
    noise = float(nonnegative_array("noise_multiplier", one_number("noise_multiplier", noise_multiplier)))
    return noise, float(delta_array(one_number("delta", delta))), whole_number("rounds", rounds, minimum=1)


def _probability(sampling_probability: float) -> float:
    probability = one_number("sampling_probability", sampling_probability)
    if not 0 <= probability <= 1:
        raise ValueError(f"sampling_probability must lie in [0, 1], got {probability}")
    return probability


def amplified_epsilon(noise_multiplier: float, sampling: Sampling, delta: float) -> float:
    """Epsilon of the scheme, by an accountant."""
    if isinstance(sampling, Poisson):
        return subsampled_epsilon(
            noise_multiplier, sampling_probability=sampling.probability, rounds=sampling.rounds, delta=delta
        )
    raise ValueError(f"no accountant for {sampling}")
