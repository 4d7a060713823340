import math

import numpy as np
import pytest
from scipy import integrate
from scipy.optimize import brentq
from scipy.stats import binomtest, norm

from coalmine.estimators.literature.canife import canife_epsilon, canife_row, round_epsilons

ORDERS = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256, 512, 1024]


def noise_of(epsilon, delta):
    """The noise multiplier of Balle and Wang's epsilon (2018, Theorem 8), by root finding."""

    def excess(noise):
        a, b = 1 / (2 * noise) - epsilon * noise, -1 / (2 * noise) - epsilon * noise
        return norm.cdf(a) - math.exp(epsilon) * norm.cdf(b) - delta

    return brentq(excess, 1e-3, 1e3)


def renyi(order, noise, probability):
    """Rényi divergence of a Poisson-sampled Gaussian from the plain one, by quadrature."""

    def integrand(x):
        log_ratio = np.logaddexp(math.log1p(-probability), math.log(probability) + (2 * x - 1) / (2 * noise**2))
        return math.exp(order * log_ratio + norm.logpdf(x, scale=noise))

    edge = 12 * noise
    peak = order * probability
    moment, _ = integrate.quad(integrand, -edge, edge + order, points=[0.0, peak, float(order)], limit=500)
    return math.log(moment) / (order - 1)


def from_renyi(divergences, orders, delta):
    """The smallest epsilon over orders (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    return min(
        divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for divergence, order in zip(divergences, orders, strict=True)
    )


@pytest.mark.parametrize("epsilons", [[4.0], [1.0, 2.0, 3.0]])
def test_without_sampling_it_composes_gaussian_mechanisms(epsilons):
    delta, noises = 1e-5, [noise_of(epsilon, 1e-5) for epsilon in epsilons]
    orders = np.arange(1.01, 200, 0.01)
    wanted = from_renyi([sum(order / (2 * noise**2) for noise in noises) for order in orders], orders, delta)
    found = canife_epsilon(epsilons, delta=delta, sampling_probability=1.0)
    assert wanted - 1e-9 <= found <= wanted * 1.01  # an accountant's grid of orders is coarser


def test_with_sampling_it_composes_sampled_mechanisms_by_renyi_dp():
    delta, probability, rounds = 1e-5, 0.05, 60
    epsilons = [1.5, 3.0, 2.0]
    noises = [noise_of(epsilon, delta) for epsilon in epsilons]
    orders = [2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20]
    wanted = from_renyi(
        [sum(20 * renyi(order, noise, probability) for noise in noises) for order in orders], orders, delta
    )
    found = canife_epsilon(epsilons, delta=delta, sampling_probability=probability, rounds=rounds)
    assert found <= wanted + 1e-6
    assert found == pytest.approx(wanted, rel=0.02)


def test_each_audited_round_represents_an_equal_share():
    settings = {"delta": 1e-5, "sampling_probability": 0.1}
    assert canife_epsilon([1.0, 3.0], rounds=6, **settings) == canife_epsilon([1.0] * 3 + [3.0] * 3, **settings)
    assert canife_epsilon([2.0], rounds=7, **settings) == canife_epsilon([2.0] * 7, **settings)


def test_epsilon_is_right_at_the_limits_and_monotone():
    settings = {"delta": 1e-5, "sampling_probability": 0.1}
    assert canife_epsilon([1.0, math.inf], **settings) == math.inf
    assert canife_epsilon([0.0, 0.0], **settings) < 1e-3
    assert canife_epsilon([1.0, 5.0], delta=1e-5, sampling_probability=0.0) == 0
    grown = [canife_epsilon([epsilon] * 3, **settings) for epsilon in (0.5, 1.0, 2.0, 4.0)]
    assert grown == sorted(grown)


def test_a_rounds_epsilon_is_a_lower_bound_at_the_most_accurate_threshold():
    rng = np.random.default_rng(0)
    observed, unobserved = rng.normal(1.5, 1, (4, 50)), rng.normal(0, 1, (4, 50))
    found = round_epsilons((observed, unobserved), delta=1e-5)
    for round_number in range(4):
        x, y = observed[round_number], unobserved[round_number]
        fn, fp = min(((int(np.sum(x < t)), int(np.sum(y >= t))) for t in np.sort(x)), key=sum)
        fnr, fpr = (binomtest(errors, 50).proportion_ci(0.95, method="exact").high for errors in (fn, fp))
        wanted = max(math.log((1 - 1e-5 - fpr) / fnr), math.log((1 - 1e-5 - fnr) / fpr), 0.0)
        assert found[round_number] == pytest.approx(wanted, abs=1e-9)


def test_the_row_has_a_value_or_states_what_it_needs():
    rng = np.random.default_rng(0)
    scores = rng.normal(3, 1, (5, 100)), rng.normal(0, 1, (5, 100))
    assert "round by round" in canife_row(None, delta=1e-5).needs
    assert "sampling_probability" in canife_row(scores, delta=1e-5).needs
    row = canife_row(scores, delta=1e-5, sampling_probability=0.01, rounds=100)
    rounds = round_epsilons(scores, delta=1e-5)
    assert row.value == canife_epsilon(rounds, delta=1e-5, sampling_probability=0.01, rounds=100)
    assert (row.kind, row.confidence) == ("estimate", None)


@pytest.mark.parametrize(
    ("epsilons", "settings", "message"),
    [
        ([], {}, "per_round_epsilons must be one row of epsilons"),
        ([-1.0], {}, "per_round_epsilons must be one row of epsilons"),
        ([math.nan], {}, "per_round_epsilons must be finite"),
        ([1.0, 1.0], {"rounds": 1}, "rounds must be at least 2"),
        ([1.0], {"sampling_probability": 1.5}, r"sampling_probability must lie in \[0, 1\]"),
    ],
)
def test_bad_input_is_rejected(epsilons, settings, message):
    with pytest.raises(ValueError, match=message):
        canife_epsilon(epsilons, **{"delta": 1e-5, "sampling_probability": 0.1} | settings)
