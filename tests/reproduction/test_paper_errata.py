"""Values missing from the paper's text, computed in independent ways."""

import math

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("torch")

from reproduction import paper_errata
from reproduction.paper import EMNIST, NORMALITY, STACK_OVERFLOW
from reproduction.training_configs import WORDS_DELTA


def test_the_delta_of_a_printed_epsilon_agrees_with_the_privacy_loss():
    """The privacy loss is normal; its mean and half its variance are 1/2z²."""
    for item in paper_errata.implied_deltas():
        z, epsilon = item["noise_multiplier"], item["printed"]
        loss = stats.norm(1 / (2 * z * z), 1 / z)
        grid = np.linspace(epsilon, epsilon + 40 / z, 400_001)
        delta = np.trapezoid((1 - np.exp(epsilon - grid)) * loss.pdf(grid), grid)
        assert item["implied_delta"] == pytest.approx(delta, rel=1e-5)
    emnist = [item["implied_delta"] for item in paper_errata.implied_deltas() if item["table"] == "EMNIST"]
    assert min(emnist) > 0.0074
    assert max(emnist) < 0.0079


def test_probability_of_three_or_more_of_fifteen_is_binomial():
    below = sum(math.comb(15, count) * 0.15**count * 0.85 ** (15 - count) for count in range(3))
    assert 1 - below == pytest.approx(0.396, abs=5e-4)
    assert stats.binom.sf(1, 15, 0.15) == pytest.approx(0.68, abs=5e-3)


def test_simulated_maxima_follow_their_law():
    rng = np.random.default_rng(3)
    drawn = paper_errata._largest(rng, 50)
    plain = rng.normal(size=(paper_errata.CANARIES, 50)).max(axis=1)
    assert stats.ks_2samp(drawn, plain).pvalue > 0.01


def test_known_round_recovers_epsilon_where_maxima_do_not():
    for item in paper_errata.maxima():
        assert item["known_round"] == pytest.approx(item["analytical"], rel=0.1)
    assert paper_errata.maxima()[0]["all"] > 2 * paper_errata.maxima()[0]["analytical"]


def test_the_largest_bound_of_a_thousand_scores_matches_jeffreys():
    """Jeffreys' bound with no error among 1,000 on both sides: log of (1 - upper) over upper."""
    upper = stats.beta.ppf(0.95, 0.5, 1000.5)
    assert paper_errata.largest_bound() == pytest.approx(math.log((1 - WORDS_DELTA - upper) / upper), abs=1e-6)


def test_the_papers_tables_are_complete():
    assert [len(table) for table in (STACK_OVERFLOW, EMNIST, NORMALITY)] == [4, 6, 3]
    for table in (STACK_OVERFLOW, EMNIST):
        for column in range(5):
            values = [line[column] for line in table.values()]
            assert values == sorted(values, reverse=True)  # every column falls with noise
