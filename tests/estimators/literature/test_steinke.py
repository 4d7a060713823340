"""Steinke et al. 2023: against linear programming, closed forms, and the figures of jax-privacy 2.0.0."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import linprog

from coalmine import mechanism_noise
from coalmine.estimators.literature.guesses import hull_guesses
from coalmine.estimators.literature.steinke import one_run_epsilon, steinke_fixed_row, steinke_row

QUANTILES = stats.norm.ppf((np.arange(10_000) + 0.5) / 10_000)


@pytest.mark.parametrize(("shift", "epsilon"), [(1, 1.13346), (2, 2.311945), (4, 4.395568)])
def test_values_agree_with_the_public_package(shift, epsilon):
    row = steinke_row(QUANTILES + shift, QUANTILES, delta=1e-6)
    assert row.value == pytest.approx(epsilon, rel=1e-6)


def worst_p_value(epsilon, guesses, mistakes, delta, total):
    """The probability of this many correct guesses under the worst law of revealed canaries, mean 2·delta·total, by LP."""
    given_away, correct = np.arange(guesses + 1), guesses - mistakes
    gain = stats.binom.sf(correct - given_away - 1, guesses, 1 / (1 + math.exp(-epsilon)))
    done = linprog(
        -gain, A_ub=[given_away], b_ub=[2 * delta * total], A_eq=[np.ones(guesses + 1)], b_eq=[1], method="highs"
    )
    return -done.fun


@pytest.mark.parametrize(
    ("guesses", "mistakes", "delta", "total"),
    [(100, 10, 1e-5, 1000), (2500, 364, 1e-5, 10_000), (30, 0, 1e-3, 40), (50, 12, 1e-9, 50), (400, 20, 1e-4, 800)],
)
def test_the_bound_is_the_largest_refuted_epsilon(guesses, mistakes, delta, total):
    epsilon = one_run_epsilon(guesses, mistakes, delta=delta, total=total)
    assert worst_p_value(epsilon, guesses, mistakes, delta, total) == pytest.approx(0.05, rel=1e-5)
    assert worst_p_value(epsilon - 1e-3, guesses, mistakes, delta, total) < 0.05


def test_without_delta_it_is_clopper_pearson():
    rate = stats.binomtest(27, 30, alternative="greater").proportion_ci(0.95, method="exact").low
    assert one_run_epsilon(30, 3, delta=1e-300, total=30) == pytest.approx(math.log(rate / (1 - rate)), rel=1e-9)


def test_the_bound_holds_for_a_mechanism_that_exposes_ten_canaries_at_once():
    """Each canary is exposed with probability delta, ten at once: the true epsilon, 1, is refuted in at most 5 % of runs."""
    total, together, delta, epsilon = 100, 10, 0.004, 1.0
    correct = stats.binom(together, 1 / (1 + math.exp(-epsilon)))

    def refuted(assumed):
        bounds = np.array([one_run_epsilon(together, u, delta=assumed, total=total) for u in range(together + 1)])
        fewest = np.sum(bounds > epsilon)  # how many numbers of mistakes refute it
        given_away = delta * total / together
        return given_away * (fewest > 0) + (1 - given_away) * correct.sf(together - fewest)

    assert refuted(delta) <= 0.05
    assert refuted(1e-12) > 0.05


def test_edge_cases():
    assert one_run_epsilon(10, 10, delta=1e-6, total=20) == 0
    assert one_run_epsilon(10, 5, delta=1e-6, total=20) == 0
    assert one_run_epsilon(4, 0, delta=1e-6, total=20) == 0  # 2^-4 is more than 5 %
    assert one_run_epsilon(1000, 0, delta=0.03, total=1000) == 0  # all are revealed in 3 % of runs
    assert one_run_epsilon(10**6, 0, delta=1e-12, total=10**6) == pytest.approx(math.log(10**6 / 3), abs=0.01)


@pytest.mark.parametrize(("row", "tests"), [(steinke_row, 3), (steinke_fixed_row, 4)])
def test_edge_cases_of_the_rows(row, tests):
    assert row(np.ones(20), np.ones(20), delta=1e-6).value == 0
    assert row(QUANTILES, QUANTILES[::20], delta=1e-6).value == 0  # twenty observed per unobserved, and nothing leaks
    apart = row(np.arange(100) + 1000, np.arange(100), delta=1e-6).value
    assert apart == pytest.approx(one_run_epsilon(100, 0, delta=1e-6, total=200, confidence=1 - 0.05 / tests))
    assert row(np.arange(100) + 1000, np.arange(100), delta=1e-6, confidence=0.99).value < apart
    assert row(np.arange(100), np.arange(100) + 1000, delta=1e-6).value == 0  # high scores mean present


def test_the_fields_of_the_rows():
    rows = [row(QUANTILES + 2, QUANTILES, delta=1e-6, confidence=0.9) for row in (steinke_row, steinke_fixed_row)]
    assert [row.kind for row in rows] == ["heuristic", "valid bound"]
    assert {row.confidence for row in rows} == {0.9}
    assert {(row.controls, row.receives) for row in rows} == {("train data", "final model")}  # Table 1


def test_bad_input_is_rejected():
    with pytest.raises(ValueError, match="delta must lie in"):
        one_run_epsilon(10, 1, delta=0.0, total=10)
    with pytest.raises(ValueError, match="confidence must lie in"):
        steinke_row(QUANTILES, QUANTILES, delta=1e-6, confidence=1.0)
    with pytest.raises(ValueError, match="observed scores must be finite"):
        steinke_row([math.nan] * 20, QUANTILES, delta=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.8, 2.3])
def test_the_fixed_row_is_a_bound_on_a_gaussian_mechanism(epsilon):
    """At most 5 % of 300 runs exceed the truth, plus three standard errors."""
    shift = 1 / mechanism_noise(epsilon, delta=1e-6) if epsilon else 0.0
    rng = np.random.default_rng(11)
    values = [steinke_fixed_row(rng.normal(shift, 1, 200), rng.normal(0, 1, 200), delta=1e-6).value for _ in range(300)]
    assert np.mean(np.array(values) > epsilon) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


@pytest.mark.slow
def test_bonferroni_over_the_hull_is_not_a_bound():
    """Fair coins, no leak, delta = 0: this is why the row on the hull is called a heuristic."""
    rng = np.random.default_rng(6)
    refuted = 0
    for _ in range(2000):
        scores, coins = np.sort(rng.normal(size=2000)), rng.random(2000) < 0.5
        guesses, mistakes = hull_guesses(scores[coins], scores[~coins])
        p_values = stats.binom.sf(guesses - mistakes - 1, guesses, 0.5)[1:]
        refuted += p_values.min() <= 0.05 / guesses.size
    assert refuted / 2000 > 0.05 + 2 * math.sqrt(0.05 * 0.95 / 2000)
