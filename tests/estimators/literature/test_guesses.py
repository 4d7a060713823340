"""The guesses behind the one-run audits."""

import numpy as np
import pytest
from scipy.spatial import ConvexHull

from coalmine.estimators.literature.guesses import (
    checked_counts,
    fair_halves,
    halvings,
    hull_guesses,
    mistakes_by_confidence,
)


@pytest.mark.parametrize("seed", range(5))
def test_the_hull_equals_the_hull_of_the_whole_roc_curve(seed):
    rng = np.random.default_rng(seed)
    observed, unobserved = np.sort(rng.normal(0.7, 1, 40)), np.sort(rng.normal(0, 1, 30))
    points = [(np.sum(unobserved >= t), np.sum(observed >= t)) for t in (*observed, *unobserved, np.inf)]
    corners = {tuple(points[i]) for i in ConvexHull([*points, (31, -1)]).vertices if i < len(points)}
    guesses, mistakes = hull_guesses(observed, unobserved)
    assert set(zip(mistakes.tolist(), (guesses - mistakes).tolist(), strict=True)) == corners


def test_mistakes_among_the_most_confident_match_a_hand_count():
    observed, unobserved = np.array([-1.0, 2.0, 5.0]), np.array([-7.0, -4.0, 3.0])
    # the median is 0.5: distances 7.5 (right), 4.5 (right), 4.5 (right), 2.5 (wrong), 1.5 (right), 1.5 (wrong, first)
    assert mistakes_by_confidence(observed, unobserved).tolist() == [0, 0, 0, 0, 1, 2, 2]


def test_tied_scores_count_against_the_test():
    assert mistakes_by_confidence(np.zeros(4), np.zeros(4)).tolist() == list(range(9))
    guesses, mistakes = hull_guesses(np.zeros(4), np.zeros(4))
    assert (guesses.tolist(), mistakes.tolist()) == ([0, 8], [0, 4])


def test_the_larger_side_is_thinned_independently_of_order():
    rng = np.random.default_rng(3)
    observed, unobserved = rng.normal(2, 1, 50), rng.normal(0, 1, 400)
    first, second = fair_halves(observed, unobserved)
    assert np.array_equal(first, np.sort(observed))
    assert second.size == 50
    assert np.isin(second, unobserved).all()
    assert np.array_equal(second, fair_halves(observed, rng.permutation(unobserved))[1])


def test_halvings_stop_at_ten_guesses():
    assert halvings(200).tolist() == [100, 50, 25, 12]
    assert halvings(20).tolist() == [10]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((0, 0, 10), "guesses must be at least 1, got 0"),
        ((5, 6, 10), "mistakes must be at most the guesses, got 6 mistakes in 5 guesses"),
        ((11, 6, 10), "guesses must be at most the total of canaries, got 11 guesses for 10 canaries"),
        ((5.5, 1, 10), "guesses must be a whole number, got 5.5"),
        ((5, -1, 10), "mistakes must be at least 0, got -1"),
    ],
)
def test_impossible_counts_are_rejected(counts, message):
    with pytest.raises(ValueError, match=message):
        checked_counts(*counts)
