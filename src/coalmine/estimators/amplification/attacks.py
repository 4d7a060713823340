"""Lower ends: epsilons that an attack proves, whatever an accountant says."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, log_ndtr

from coalmine.argument_checks import Floats
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampling import Poisson, RandomAllocation, Shuffled

MOST_EPOCHS = 300  # most epochs that a lower end uses; leaving epochs out keeps it valid
MOST_SPLITS = 8  # of a lower end that looks at the rounds with the least noise, where noise varies


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


def attack_on_varied_noise(noise: float, sampling: RandomAllocation | Shuffled, delta: float) -> float:
    """The same where the noise varies: each round has its own threshold, all at about the same likelihood ratio.

    The order of the rounds is not known. So of several epochs the test looks at one, and there at the rounds with no more
    than some noise: one epoch holds at least its share of them. Or all rounds are taken for those with the most noise.
    """
    strengths = [each for each in sorted(sampling.strengths, reverse=True) if each[0] > 0]
    if sampling.epochs == 1:
        return _varied_advantage(noise, strengths, sampling, delta)
    weakest, equal = min(sampling.strengths)[0], 0.0
    if weakest > 0:
        equal = max(attack(noise / weakest, sampling, delta) for attack in (attack_by_maximum, attack_by_sum))
    counts = np.cumsum([count for _, count in strengths])
    chosen = np.unique(np.linspace(0, len(strengths) - 1, MOST_SPLITS).round().astype(int))
    return max(
        equal,
        *(
            _varied_advantage(noise, [(strengths[last][0], math.ceil(counts[last] / sampling.epochs))], sampling, delta)
            for last in chosen
        ),
    )


def _varied_advantage(
    noise: float, strengths: Sequence[tuple[float, int]], sampling: RandomAllocation | Shuffled, delta: float
) -> float:
    """The best log((p - δ)/p') in one epoch; rounds without a strength are not looked at."""
    top = 2.0 if isinstance(sampling, Shuffled) else 1.0
    least = noise / strengths[0][0]
    c = np.linspace(0, top + 8 * least, 2001)
    none, present, changed = np.zeros((3, c.size))
    for strength, count in strengths:
        std, share = noise / strength, count / sampling.rounds
        threshold = top - 0.5 + (std / least) ** 2 * (c - top + 0.5)
        absent = log_ndtr(threshold / std)
        none += count * absent
        present -= share * np.expm1(np.minimum(log_ndtr((threshold - top) / std) - absent, 0.0))
        changed -= share * np.expm1(np.minimum(log_ndtr((threshold - top + 1) / std) - absent, 0.0))
    power, rate = (np.exp(none) * more - np.expm1(none) for more in (present, changed))
    reached = power > delta
    ratio = np.divide(power - delta, rate, out=np.ones_like(power), where=reached)
    return float(np.log(ratio).max())


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
