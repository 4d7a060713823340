"""Guesses about independent coins, and the bound that holds for every (epsilon, delta) mechanism."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog
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


def luckiest(epsilon, delta, canaries, guesses, mistakes):
    """The largest probability of so few mistakes, over all (epsilon, delta) mechanisms and auditors: a linear program.

    The output says what is guessed of each canary: in, out, or nothing for all but so many. Slack variables hold the
    excess of each output's probability over e^epsilon times that under a neighbour.
    """
    coins = list(itertools.product((0, 1), repeat=canaries))
    outputs = [out for out in itertools.product((0, 1, None), repeat=canaries) if guesses == canaries - out.count(None)]
    place = {key: number for number, key in enumerate(itertools.product(coins, outputs))}
    pairs = [(b, (*b[:i], 1 - b[i], *b[i + 1 :])) for b in coins for i in range(canaries)]
    slack = {key: len(place) + number for number, key in enumerate(itertools.product(range(len(pairs)), outputs))}
    size = len(place) + len(slack)
    above, limits = [], []
    for number, (one, other) in enumerate(pairs):
        for out in outputs:
            row = np.zeros(size)
            row[place[one, out]], row[place[other, out]], row[slack[number, out]] = 1, -np.exp(epsilon), -1
            above.append(row)
            limits.append(0.0)
        row = np.zeros(size)
        row[[slack[number, out] for out in outputs]] = 1
        above.append(row)
        limits.append(delta)
    sums = np.zeros((len(coins), size))
    gain = np.zeros(size)
    for (b, out), at in place.items():
        sums[coins.index(b), at] = 1
        wrong = sum(guess is not None and guess != coin for guess, coin in zip(out, b, strict=True))
        gain[at] = -(wrong <= mistakes) / len(coins)
    return -linprog(gain, above, limits, sums, np.ones(len(coins))).fun


@pytest.mark.parametrize(("canaries", "guesses"), [(2, 2), (3, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("delta", [1e-9, 0.02, 0.1])
@pytest.mark.parametrize("mistakes", [0, 1])
def test_no_small_mechanism_is_luckier_than_the_bound_allows(canaries, guesses, delta, mistakes):
    """Every mechanism with an epsilon below the bound makes so few mistakes with less than the failing probability."""
    failing = 0.35 if mistakes == 0 else 0.75
    bound = any_law_epsilon(one_game(guesses, mistakes, canaries), delta=delta, confidence=1 - failing)
    if bound > 1e-6:
        assert luckiest(bound * 0.999, delta, canaries, guesses, mistakes) <= failing + 1e-6
    tightest = any_law_epsilon(one_game(2, 0, 2), delta=1e-9, confidence=0.5)
    assert luckiest(tightest, 1e-9, 2, 2, 0) == pytest.approx(0.5, abs=1e-4)


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
