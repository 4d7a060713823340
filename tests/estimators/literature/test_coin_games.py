"""Guesses about independent coins, and the bound that holds for every (epsilon, delta) mechanism."""

import itertools

import numpy as np
import pytest
from scipy.stats import binom

from coalmine.estimators.literature.guesses import Games, coin_games
from coalmine.estimators.literature.mahloujifar import any_law_epsilon


def one_game(guesses, mistakes, total):
    return Games(np.array([guesses]), np.array([mistakes]), total)


@pytest.mark.parametrize("guesses", [20, 300])
@pytest.mark.parametrize("mistakes", [0, 3])
def test_without_delta_the_bound_is_the_binomial_one(guesses, mistakes):
    """Randomised response is the worst pure mechanism: the bound inverts the tail of its right guesses, or nearly."""
    found = any_law_epsilon(one_game(guesses, mistakes, guesses), delta=1e-12, confidence=0.95)
    lie = 1 / (1 + np.exp(found))
    tail = binom.cdf(mistakes, guesses, lie)
    assert tail == pytest.approx(0.05, rel=1e-3) if mistakes == 0 else 0.045 < tail < 0.05


@pytest.mark.parametrize("delta", [1e-9, 1e-3, 0.02, 0.2])
def test_a_larger_delta_never_raises_the_bound(delta):
    game = one_game(200, 8, 400)
    assert any_law_epsilon(game, delta=delta, confidence=0.95) <= any_law_epsilon(
        game, delta=delta / 10, confidence=0.95
    )


def test_a_leak_of_everything_with_probability_delta_refutes_nothing():
    """With probability delta all guesses are right under any epsilon: nothing follows at a level below delta."""
    assert any_law_epsilon(one_game(500, 0, 1000), delta=0.06, confidence=0.95) == 0.0
    assert any_law_epsilon(one_game(500, 0, 1000), delta=0.001, confidence=0.95) > 3


def test_the_bound_is_valid_for_the_worst_small_mechanism():
    """All mechanisms that answer right about both coins, one or none: no such answer beats the bound more than 5 %."""
    epsilon, delta, total = 1.0, 0.01, 2
    bounds = [any_law_epsilon(one_game(total, wrong, total), delta=delta, confidence=0.6) for wrong in range(3)]
    rate = (np.exp(epsilon) + delta) / (1 + np.exp(epsilon))  # of a right guess about one coin
    laws = {wrong: binom.pmf(wrong, total, 1 - rate) for wrong in range(3)}
    assert sum(share for wrong, share in laws.items() if bounds[wrong] > epsilon) <= 0.4


def test_guesses_do_not_depend_on_the_coins():
    """However the coins lie, the same canaries are guessed: mistakes over all coins add up to half of the guesses."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=400)
    coins = rng.random(400) < 0.5
    one, other = coin_games(scores[coins], scores[~coins]), coin_games(scores[~coins], scores[coins])
    assert one.guesses.tolist() == other.guesses.tolist() == [340, 200, 100, 50, 25, 12]
    assert (one.mistakes + other.mistakes).tolist() == one.guesses.tolist()


def test_ties_count_as_mistakes():
    games = coin_games(np.zeros(100), np.zeros(100))
    assert games.mistakes.tolist() == games.guesses.tolist()


def test_perfect_scores_make_no_mistake_unless_the_coins_are_far_from_even():
    assert not coin_games(np.arange(1, 231), -np.arange(170)).mistakes.any()
    assert coin_games(np.arange(1, 301), -np.arange(100)).mistakes[0] > 0


def test_the_number_of_guesses_is_fixed_by_the_number_of_canaries():
    sizes = {tuple(coin_games(np.arange(n), np.arange(100 - n) - 200.0).guesses) for n in range(20, 80)}
    assert sizes == {(70, 50, 25, 12)}


@pytest.mark.parametrize("coupled", [False, True])
def test_the_bound_holds_for_coupled_answers(coupled):
    """Randomised response at 1.5, by itself and switched on for all together in half of the runs."""
    rng, epsilon, above, runs = np.random.default_rng(1), 1.5, 0, 200
    for _ in range(runs):
        coins = rng.random(300) < 0.5
        strength = 0.0 if coupled and rng.random() < 0.5 else epsilon
        scores = (coins ^ (rng.random(300) < 1 / (1 + np.exp(strength)))) + 1e-6 * rng.random(300)
        games = coin_games(scores[coins], scores[~coins])
        above += any_law_epsilon(games, delta=1e-5, confidence=0.95) > epsilon
    assert above <= binom.isf(1e-3, runs, 0.05)


def test_a_brute_force_of_all_coins_agrees_with_the_games():
    """Four distinct scores and a guess each side: mistakes by hand for every outcome of the coins."""
    scores = np.arange(40.0)
    for few in itertools.islice(itertools.product((True, False), repeat=4), 16):
        coins = np.array([*few, *[True, False] * 18])
        games = coin_games(scores[coins], scores[~coins])
        for guesses, mistakes in zip(games.guesses, games.mistakes, strict=True):
            up, down = (guesses + 1) // 2, guesses // 2
            assert mistakes == (~coins[40 - up :]).sum() + coins[:down].sum()
