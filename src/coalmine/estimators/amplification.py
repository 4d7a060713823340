"""Epsilon when nobody knows in which rounds a client took part: sampling, shuffling, and the last iterate alone.

These are claims about the whole run. They say nothing of an attacker who knows the client's rounds, whom
`mechanism_epsilon` is about.
"""

import math

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr

from coalmine.checks import Floats, delta_array, nonnegative_array, one_number, whole_number
from coalmine.estimators.mechanism import mechanism_epsilon

ORDERS = 128  # integer moments tried in the moment bound


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


def last_iterate_epsilon(noise_multiplier: float, *, sampling_probability: float, rounds: int, delta: float) -> float:
    """A heuristic for the epsilon of the final model alone, before training: not a bound.

    Treats the loss as linear, so that the final model holds Binomial(T, q) copies of the client's update under noise
    N(0, σ²T): the hockey-stick divergence of that mixture from N(0, σ²T), the larger of both directions (Steinke et al.
    2024, arXiv 2410.06186). Real models can leak more.
    """
    noise, delta, rounds = _checked(noise_multiplier, delta, rounds)
    probability = _probability(sampling_probability)
    if probability == 0:
        return 0.0
    if noise == 0:
        return math.inf
    copies = np.arange(rounds + 1)
    log_weight = _log_binomial(rounds, probability, copies)
    seen = log_weight > math.log(delta) - 45 - math.log(rounds + 1)
    shift, log_weight = copies[seen] / (noise * math.sqrt(rounds)), log_weight[seen]

    def log_ratio(x: float) -> float:
        """log of mixture over null at x, which grows with x: a threshold test is the best test."""
        return float(logsumexp(log_weight + shift * x - shift * shift / 2))

    def present(x: float) -> float:
        """How far delta is missed when the attacker says "present" above x."""
        mixture = np.exp(log_weight) @ ndtr(shift - x)
        return float(mixture - math.exp(min(log_ratio(x) + float(log_ndtr(-x)), 700.0)) - delta)

    def absent(x: float) -> float:
        mixture = float(logsumexp(log_weight + log_ndtr(x - shift)))
        return float(ndtr(x) - math.exp(min(mixture - log_ratio(x), 700.0)) - delta)

    low, high = float(shift[0]) - 45.0, float(shift[-1]) + 45.0
    zero = brentq(log_ratio, low, high) if log_ratio(low) < 0 < log_ratio(high) else low
    above = log_ratio(brentq(present, zero, high)) if present(zero) > 0 else 0.0
    below = -log_ratio(brentq(absent, low, zero)) if absent(zero) > 0 else 0.0
    return max(above, below, 0.0)


def shuffled_epsilon(noise_multiplier: float, *, rounds: int, delta: float) -> float:
    """An upper bound on epsilon when each client takes part once, in a round drawn uniformly from `rounds`.

    This is random allocation, also called balls-and-bins sampling: its dominating pair is N(0, σ²I) and the mixture of
    its `rounds` unit shifts (Chua et al. 2025, arXiv 2412.16802; Feldman and Shenfeld 2025, arXiv 2502.08202). Shuffling
    clients into rounds of fixed size is close to it, but no bound as tight is known there. The attacker sees every
    round. Three valid bounds, of which the best is taken: no amplification; exact integer moments of the likelihood
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


def _log_binomial(trials: int, probability: float, successes: npt.NDArray[np.int_]) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        choose = gammaln(trials + 1) - gammaln(successes + 1) - gammaln(trials - successes + 1)
        failures = trials - successes
        none = np.where(failures == 0, 0.0, failures * np.log1p(-probability))
    return np.asarray(choose + successes * math.log(probability) + none)


def _checked(noise_multiplier: float, delta: float, rounds: int) -> tuple[float, float, int]:
    noise = float(nonnegative_array("noise_multiplier", one_number("noise_multiplier", noise_multiplier)))
    return noise, float(delta_array(one_number("delta", delta))), whole_number("rounds", rounds, minimum=1)


def _probability(sampling_probability: float) -> float:
    probability = one_number("sampling_probability", sampling_probability)
    if not 0 <= probability <= 1:
        raise ValueError(f"sampling_probability must lie in [0, 1], got {probability}")
    return probability
