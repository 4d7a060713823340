"""The study of data canaries: its mechanisms are what they say, and its bars can be missed."""

import math

import numpy as np
import pytest

from studies import data_canaries as study


def test_randomised_response_lies_as_often_as_epsilon_says():
    rng = np.random.default_rng(0)
    truth = rng.random(200_000) < 0.5
    lies = (study.responses(truth, 2.0, rng) > 0.5) != truth
    assert lies.mean() == pytest.approx(1 / (1 + math.exp(2)), abs=4 * 0.5 / math.sqrt(200_000))


def test_a_shared_loss_has_the_rates_of_a_gaussian_mechanism():
    """Over many draws of the loss, guesses are right as often as the likelihood ratio of N(0, 1) and N(μ, 1)."""
    rng, mu, runs = np.random.default_rng(1), 1.0, 4_000
    right = [((study.shared(np.ones(1, bool), mu, rng) > 0.5).item()) for _ in range(runs)]
    assert np.mean(right) == pytest.approx(0.5 * (1 + math.erf(mu / 2 / math.sqrt(2))), abs=4 * 0.5 / math.sqrt(runs))


def test_rows_repeat_and_a_bound_above_epsilon_misses_the_bar(monkeypatch):
    row = "mechanism: randomised response, ε 2"
    found = study.run_mechanism(row, 3)
    assert study.run_mechanism(row, 3) == found
    assert found["verdict"] < found["any law"] < study.truth_of(row) + 1
    bad = [{"row": row, "seed": seed, **found, "any law": 2.5} for seed in range(50)]
    monkeypatch.setattr(study, "finished", lambda: bad)
    assert study.failures([row], 50) == [f"{row}: the bound any law is above ε in 50 of 50 runs"]
    assert "| randomised response, ε 2 | 50 | 2.00 |" in study.tables()["bounds"]


def test_leaks_that_are_not_seen_miss_the_bar(monkeypatch):
    row, broken = study.LEAKS[0], next(iter(study.BROKEN))
    runs = [{"row": row, "seed": 0, "any law": 2.9}, {"row": broken, "seed": 0, "outcome": "UNDERPOWERED"}]
    monkeypatch.setattr(study, "finished", lambda: runs)
    assert len(study.failures([row, broken], 1)) == 2
