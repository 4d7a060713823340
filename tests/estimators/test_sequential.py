"""Evidence that may be checked after every round, against quadrature and Monte Carlo."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr, ndtri
from scipy.stats import chi

from coalmine.estimators.sequential import (
    LARGEST,
    PRIOR,
    RunningEvidence,
    information,
    log_evidence,
    spent_level,
    standard_score,
)


def below(score, dof, expected):
    """Probability of a lower score, by quadrature over the estimated scale: given the scale, a score is normal."""
    spread = 12 / math.sqrt(2 * dof)
    low, high = max(1 - spread, 1e-9), 1 + spread
    density = chi(dof, scale=1 / math.sqrt(dof))
    return quad(lambda scale: ndtr(score * scale - expected) * density.pdf(scale), low, high, epsabs=1e-13, limit=400)[
        0
    ]


@pytest.mark.parametrize("dof", [3, 10, 100, 3_000, 90_000])
@pytest.mark.parametrize("expected", [0.0, 0.3, 3.0, 40.0])
def test_a_standard_score_is_the_quantile_of_the_noncentral_t(dof, expected):
    spread = math.sqrt(1 + expected**2 / (2 * dof))
    for away in (-3.0, -1.0, 0.0, 1.0, 3.0):
        score = expected + away * spread
        share = below(score, dof, expected)
        if share > 1e-8:  # smaller scores only lower the evidence
            assert float(standard_score(score, dof, expected)) == pytest.approx(ndtri(share), abs=2e-5)


@pytest.mark.parametrize(("dof", "expected"), [(2e5, 3.0), (1e9, 1.0), (5_000, 3_000.0), (math.inf, 2.0)])
def test_the_approximation_is_accurate_beyond_the_exact_law(dof, expected):
    dof_used = min(dof, 1e8)
    for away in (-3.0, 0.0, 3.0):
        score = expected + away * math.sqrt(1 + expected**2 / (2 * dof_used))
        exact = float(ndtri(below(score, dof_used, expected)))
        assert float(standard_score(score, dof, expected)) == pytest.approx(exact, abs=2e-2)


def test_extreme_scores_are_clipped_and_never_nan():
    scores = standard_score([1e6, 1e300, -1e6, 50.0, 0.0], [10, 1e4, 10, 1e12, 1], [0.1, 1.0, 900.0, 1.0, 0.0])
    assert np.isfinite(scores).all()
    assert scores.max() <= LARGEST


def test_the_evidence_is_the_mixture_of_likelihood_ratios():
    for total, informed in ((0.0, 0.0), (3.0, 10.0), (-20.0, 50.0), (80.0, 400.0)):

        def ratio(less, total=total, informed=informed):
            prior = 2 / (PRIOR * math.sqrt(2 * math.pi)) * math.exp(-(less**2) / (2 * PRIOR**2))
            return math.exp(less * total - less * less * informed / 2) * prior

        peak = max(total / (informed + 1 / PRIOR**2), 0.0)
        mixed = quad(ratio, 0, 12 * PRIOR, points=[peak] if 0 < peak < 12 * PRIOR else None, epsrel=1e-11)[0]
        assert float(log_evidence(total, informed)) == pytest.approx(math.log(mixed), abs=1e-7)


def test_repeated_checks_keep_the_level():
    assert sum(spent_level(0.002, look) for look in range(1, 100_000)) <= 0.002
    assert sum(spent_level(0.002, look) for look in range(1, 100_000)) > 0.00199


def ever(noise, claimed, *, dof, presentations, rounds, runs, seed):
    """The round in which each run's evidence reaches 500, or inf."""
    rng = np.random.default_rng(seed)
    scale = np.sqrt(rng.chisquare(dof, (runs, rounds)) / dof)
    scores = (math.sqrt(presentations) / noise + rng.standard_normal((runs, rounds))) / scale
    weight = float(information(presentations, dof, claimed))
    total = np.cumsum(math.sqrt(weight) * standard_score(scores, dof, math.sqrt(presentations) / claimed), axis=1)
    reached = log_evidence(total, weight * np.arange(1, rounds + 1)) >= math.log(500)
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, math.inf)


@pytest.mark.full
@pytest.mark.parametrize(
    ("noise", "dof", "presentations", "rounds"),
    [(1.0, 9_000, 10, 100), (0.25, 1_000, 100, 20), (1.0, 10, 10, 60), (0.5, 10, 50, 20), (5.0, 100, 50, 50)],
)
def test_a_true_claim_rarely_raises_the_alarm(noise, dof, presentations, rounds):
    found = ever(noise, noise, dof=dof, presentations=presentations, rounds=rounds, runs=10_000, seed=1)
    assert np.isfinite(found).mean() <= 0.002 + 3 * math.sqrt(0.002 / 10_000)


def test_more_noise_than_claimed_raises_the_alarm_even_less_often():
    assert not np.isfinite(ever(1.05, 1.0, dof=9_000, presentations=10, rounds=100, runs=4_000, seed=2)).any()


@pytest.mark.parametrize(("factor", "latest"), [(2.0, 3), (math.sqrt(2), 12), (1.25, 25)])
def test_too_little_noise_raises_the_alarm_soon(factor, latest):
    found = ever(1 / factor, 1.0, dof=9_000, presentations=10, rounds=100, runs=1_000, seed=3)
    assert np.median(found) <= latest


def test_evidence_is_the_same_when_computed_round_by_round():
    running, total, informed = RunningEvidence(0.8), 0.0, 0.0
    rng = np.random.default_rng(4)
    for count, dof in ((10, 500.0), (3, 500.0), (7, 90.0)):
        score = math.sqrt(count) / 0.8 + rng.standard_normal()
        running.add(score, count, dof)
        weight = float(information(count, dof, 0.8))
        total += math.sqrt(weight) * float(standard_score(score, dof, math.sqrt(count) / 0.8))
        informed += weight
    assert running.log == pytest.approx(float(log_evidence(total, informed)), rel=1e-12)
    assert running.presentations == 20
