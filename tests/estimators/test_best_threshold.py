"""The search for the best threshold finds the same as trying all of them, with few evaluations."""

import numpy as np
import pytest

from coalmine.estimators import best_threshold as module
from coalmine.estimators.best_threshold import EXHAUSTIVE, best_threshold
from coalmine.estimators.bounds import METHODS, epsilon_lower_bound
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.literature.nasr import nasr_row
from coalmine.estimators.rates import epsilon_from_rates

RNG = np.random.default_rng(14)
SIZE = EXHAUSTIVE + 1_000
NORMAL = RNG.standard_normal(SIZE)
SCORES = {
    "shifted": NORMAL + 1,
    "no leak": NORMAL,
    "far": NORMAL + 30,
    "below": NORMAL - 1,
    "wide": 2 * NORMAL,
    "ties": np.round(NORMAL + 1, 1),
    "two values": (NORMAL > 0.3) * 1.0,
    "outliers": NORMAL + np.where(RNG.random(SIZE) < 1e-3, 20.0, 0.0),
    "tiny": 1e-200 * (NORMAL + 1),
}
NULLS = {"closed form": Gaussian(0.0, 1.0), "scores": RNG.standard_normal(SIZE // 2), "ties": np.round(NORMAL, 1)}


@pytest.mark.parametrize("null", NULLS)
@pytest.mark.parametrize(
    ("scores", "method"),
    [*((name, "simultaneous") for name in SCORES), *(("shifted", method) for method in METHODS[1:])],
)
def test_the_search_equals_trying_every_threshold(scores, null, method, monkeypatch):
    if (method, null) == ("ranks", "closed form"):
        with pytest.raises(ValueError, match='method "ranks" needs unobserved scores'):
            epsilon_lower_bound(SCORES[scores], null=NULLS[null], delta=1e-6, method=method)
        return
    searched = epsilon_lower_bound(SCORES[scores], null=NULLS[null], delta=1e-6, method=method)
    monkeypatch.setattr(module, "EXHAUSTIVE", SIZE)
    assert epsilon_lower_bound(SCORES[scores], null=NULLS[null], delta=1e-6, method=method) == searched


@pytest.mark.parametrize("scores", ["shifted", "no leak", "ties"])
def test_the_search_for_mu_equals_trying_every_threshold(scores, monkeypatch):
    searched = nasr_row(SCORES[scores], NORMAL, delta=1e-6).value
    monkeypatch.setattr(module, "EXHAUSTIVE", SIZE)
    assert nasr_row(SCORES[scores], NORMAL, delta=1e-6).value == searched


def test_a_million_thresholds_need_few_evaluations():
    """Smooth error rates, whose epsilon changes little from one threshold to the next."""
    looked = 0
    ranks = np.arange(1_000_000.0)

    def log_fnr(t):
        nonlocal looked
        looked += t.size
        return np.log((t + 2) / (ranks.size + 2))

    best, place = best_threshold(
        lambda fpr, fnr: epsilon_from_rates(fpr, fnr, delta=1e-6),
        ranks,
        log_fpr=lambda t: 3 * np.log(1 - (t + 1) / (ranks.size + 2)),
        log_fnr=log_fnr,
    )
    every = epsilon_from_rates(
        3 * np.log(1 - (ranks + 1) / (ranks.size + 2)), np.log((ranks + 2) / (ranks.size + 2)), delta=1e-6
    )
    assert (best, place) == (every.max(), every.argmax())
    assert looked < 50_000
