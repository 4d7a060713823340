"""Lower ends: epsilons that an attack proves, whatever an accountant says."""

import math

import numpy as np
from scipy.special import gammaln, log_ndtr

from coalmine.argument_checks import Floats
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampling import Poisson, RandomAllocation, Shuffled

MOST_EPOCHS = 300  # most epochs that a lower end uses; leaving epochs out keeps it valid


def attack_by_sum(noise: float, sampling: RandomAllocation | Shuffled, delta: float) -> float:
    """A lower bound on epsilon from the sum over an epoch's rounds: it moves by 1, and its noise is z√T."""
    return float(mechanism_epsilon(noise * math.sqrt(sampling.rounds), delta=delta, participations=sampling.epochs))


def attack_by_maximum(noise: float, sampling: Poisson | RandomAllocation | Shuffled, delta: float) -> float:
    """The best log((p - δ)/p') for tests of whether the largest round of an epoch exceeds c: a lower bound on epsilon.

    `shuffled_epsilon` derives it. Random allocation has means 1 and 0 in place of 2 and 1. So has each Poisson round, with
    its sampling probability.
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
