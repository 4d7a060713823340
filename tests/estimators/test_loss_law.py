"""The log likelihood ratio of hidden rounds and its law, against Monte Carlo and the accountant."""

import math

import numpy as np
import pytest
from scipy.stats import kstest

from coalmine import Poisson, RandomAllocation, amplified_epsilon, mechanism_epsilon
from coalmine.estimators.loss_law import (
    LossLaw,
    allocated_ratio,
    allocation_laws,
    loss_epsilon,
    poisson_laws,
    poisson_ratio,
    round_ratio,
)

DRAWS = 20_000


def poisson_draws(rng, *, noise, probability, rounds, dof, present):
    total = np.zeros(DRAWS)
    for _ in range(rounds):
        joins = (rng.random(DRAWS) < probability) if present else np.zeros(DRAWS)
        scores = (rng.standard_normal(DRAWS) + joins / noise) / np.sqrt(rng.chisquare(dof, DRAWS) / dof)
        total += np.log(1 - probability + probability * np.exp(scores / noise - 0.5 / noise**2))
    return total


def allocation_draws(rng, *, noise, rounds, observed, dof, present):
    total = np.zeros(DRAWS)
    for seen in observed:
        place, sums = rng.integers(rounds, size=DRAWS), np.zeros(DRAWS)
        for number in range(seen):
            joins = (place == number) if present else np.zeros(DRAWS)
            scores = (rng.standard_normal(DRAWS) + joins / noise) / np.sqrt(rng.chisquare(dof, DRAWS) / dof)
            sums += np.exp(scores / noise - 0.5 / noise**2)
        total += np.log((rounds - seen + sums) / rounds)
    return total


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize(
    ("rounds", "probability", "noise", "dof"),
    [(30, 0.1, 1.0, 9_000.0), (20, 0.3, 2.0, 1e6), (40, 0.05, 0.6, 200.0), (1, 0.02, 1.0, 9_000.0)],
)
def test_poisson_law_agrees_with_simulation(rounds, probability, noise, dof, present):
    setting = {"noise": noise, "probability": probability, "rounds": rounds, "dof": dof}
    law = poisson_laws(**setting)[present]
    found = poisson_draws(np.random.default_rng(5), **setting, present=present)
    assert kstest(found, law.cdf).pvalue > 1e-3
    assert law.masses.sum() == pytest.approx(1)
    assert law.mean == pytest.approx(found.mean(), abs=5 * found.std() / math.sqrt(DRAWS))


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize(
    ("rounds", "observed", "noise", "dof"),
    [
        (40, [40], 0.6, 9_000.0),  # a linear scale
        (10, [10, 10, 7], 1.0, 500.0),  # several epochs, one of them partly observed
        (20, [20], 0.2, 9_000.0),  # a logarithmic scale
        (2, [2], 0.3, 9_000.0),
        (1, [1, 1], 2.0, 9_000.0),  # no amplification
        (10, [0, 10], 1.0, 9_000.0),  # an unobserved epoch
    ],
)
def test_allocation_law_agrees_with_simulation(rounds, observed, noise, dof, present):
    setting = {"noise": noise, "rounds": rounds, "observed": observed, "dof": dof}
    law = allocation_laws(**setting)[present]
    found = allocation_draws(np.random.default_rng(6), **setting, present=present)
    assert law.fit(found)[1] > 1e-3


@pytest.mark.parametrize("noise", [0.8, 1.0, 2.0])
@pytest.mark.parametrize("sampling", [Poisson(0.1, 100), Poisson(0.01, 500)])
def test_poisson_law_is_the_accountants_privacy_loss(sampling, noise):
    """E(1 - e^(ε - ℓ))+ for a present client, or E(1 - e^(ε + ℓ))+ for an absent one, is δ at the accountant's ε."""
    delta = 1e-5
    epsilon = float(amplified_epsilon(noise, sampling, delta))
    absent, present = poisson_laws(noise=noise, probability=sampling.probability, rounds=sampling.rounds, dof=1e9)
    removed = present.masses @ np.maximum(1 - np.exp(epsilon - present.points), 0)
    added = absent.masses @ np.maximum(1 - np.exp(epsilon + np.minimum(absent.points, 50)), 0)
    assert 0.95 * delta < max(removed, added) < 1.002 * delta  # the accountant's grid rounds ε up by at most 2e-4


def test_allocation_law_is_between_the_accountants_ends():
    sampling, delta = RandomAllocation(100), 1e-6
    accounted = amplified_epsilon(1.0, sampling, delta)
    law = allocation_laws(noise=1.0, rounds=100, observed=[100], dof=1e9)[1]
    reached = [float(law.masses @ np.maximum(1 - np.exp(e - law.points), 0)) for e in (accounted.low, accounted.high)]
    assert reached[1] <= delta * 1.01
    assert reached[0] >= delta * 0.99


def test_likelihood_ratio_has_mean_one_under_the_null():
    """E e^ℓ = 1 for an absent client under every scheme."""
    laws = [
        poisson_laws(noise=1.0, probability=0.1, rounds=50, dof=1e9)[0],
        allocation_laws(noise=1.0, rounds=20, observed=[20, 20], dof=1e9)[0],
        allocation_laws(noise=0.3, rounds=20, observed=[20], dof=1e9)[0],
    ]
    assert [float(law.masses @ np.exp(law.points)) for law in laws] == pytest.approx([1, 1, 1], rel=2e-3)


def test_upper_tail_is_never_too_small():
    """The bound uses it as a false positive rate."""
    setting = {"noise": 0.7, "probability": 0.1, "rounds": 25, "dof": 9_000.0}
    law = poisson_laws(**setting)[0]
    found = np.sort(poisson_draws(np.random.default_rng(7), **setting, present=False))
    for rank in (100, 1_000, 10_000):
        share = rank / DRAWS
        assert math.exp(float(law.logsf(found[-rank]))) > share - 4 * math.sqrt(share / DRAWS)
    assert float(law.logsf(1e9)) == pytest.approx(math.log(1e-12), abs=0.1)
    assert float(law.logsf(-1e9)) == 0


def test_ratios_of_huge_scores_stay_finite():
    """Without noise, a canary's score is unbounded."""
    scores = np.array([-1e8, 0.0, 1e8])
    assert np.isfinite(poisson_ratio(scores, noise=0.1, probability=0.5)).all()
    assert np.isfinite(allocated_ratio(round_ratio(scores, noise=0.1), rounds=3, observed=3)).all()
    assert poisson_ratio(scores, noise=0.1, probability=0.5)[2] == pytest.approx(1e9, rel=1e-3)


def test_fit_rejects_another_law_and_accepts_its_own():
    law = poisson_laws(noise=1.0, probability=0.1, rounds=50, dof=1e9)[1]
    rng = np.random.default_rng(8)
    own = rng.choice(law.points, p=law.masses, size=1_000)
    assert law.fit(own)[1] > 0.01
    assert law.fit(own + 0.5)[1] < 1e-6


def test_fit_has_its_nominal_rate():
    """Exact for a law with fine steps: 5 % of p-values lie below 5 %."""
    points = np.linspace(0, 1, 100_001)
    law = LossLaw(points, np.full(points.size, 1 / points.size))
    rng = np.random.default_rng(9)
    low = sum(law.fit(rng.random(100))[1] < 0.05 for _ in range(600))
    assert 12 <= low <= 52


@pytest.mark.parametrize("noise", [0.7, 1.5, 20.0])
def test_epsilon_of_the_pair_is_the_accountants(noise):
    sampling = Poisson(0.05, 200)
    laws = poisson_laws(noise=noise, probability=0.05, rounds=200, dof=math.inf)
    assert loss_epsilon(*laws, 1e-5) == pytest.approx(float(amplified_epsilon(noise, sampling, 1e-5)), abs=5e-4)


def test_epsilon_of_the_pair_without_amplification_is_the_mechanisms():
    laws = allocation_laws(noise=1.0, rounds=1, observed=[1], dof=math.inf)
    assert loss_epsilon(*laws, 1e-5) == pytest.approx(float(mechanism_epsilon(1.0, delta=1e-5)), rel=2e-3)
