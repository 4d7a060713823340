import math

import numpy as np
import pytest
from scipy import stats

from coalmine import audit_gaussian_mechanism, epsilon_from_rates, mechanism_epsilon


@pytest.mark.parametrize(("noise", "spread"), [(0.541, 0.20), (1.54, 0.11), (4.22, 0.09)])
def test_half_as_many_canaries_as_dimensions_reaches_the_papers_precision(noise, spread):
    """d = 10^4, k = 5,000: the precision that the paper reaches at d = 10^7."""
    audit = audit_gaussian_mechanism(noise, dim=10_000, canaries=5_000, delta=1e-6, runs=50, seed=1)
    error = audit.null.std() / math.sqrt(audit.runs)
    assert audit.null.mean() == pytest.approx(audit.analytical, abs=0.01 * audit.analytical + 2 * error)
    assert audit.null.std() <= spread


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rotated", "sphere"])
@pytest.mark.parametrize("signal_norm", [0.0, 3.0])
def test_simulated_and_measured_cosines_have_the_same_law(kind, signal_norm):
    """Estimates of 300 runs with and without vectors: two-sample Kolmogorov-Smirnov at level 1e-4 per test."""
    dim, canaries = 150, 40
    data = np.zeros((4, dim))
    data[:3, 7] = 1.0 if signal_norm else 0.0
    settings = {"dim": dim, "canaries": canaries, "delta": 1e-3, "runs": 300, "kind": kind}
    drawn = audit_gaussian_mechanism(0.5, seed=1, signal_norm=signal_norm, **settings)
    measured = audit_gaussian_mechanism(0.5, seed=2, vectors=data, **settings)
    for sort in ("fitted", "null"):
        assert stats.ks_2samp(getattr(drawn, sort), getattr(measured, sort)).pvalue > 1e-4


def test_agrees_with_many_runs_and_a_threshold_attack():
    """Section 3: many runs on D and D', a threshold attack and Eq. 1; the audit gives the same from one run each."""
    noise, delta, rng = 1.0, 0.01, np.random.default_rng(5)
    truth = mechanism_epsilon(noise, delta=delta)
    target = np.zeros(20)
    target[3] = 1.0
    data = rng.normal(size=20) * 3  # the other clients, known to the attacker
    without, present = (
        (data + extra + noise * rng.normal(size=(400_000, 20)) - data) @ target for extra in (np.zeros(20), target)
    )
    threshold = truth * noise**2 + 0.5  # where the likelihood ratio is e^ε
    naive = epsilon_from_rates(np.log(np.mean(without > threshold)), np.log(np.mean(present <= threshold)), delta=delta)
    audit = audit_gaussian_mechanism(noise, dim=10_000, canaries=4_000, delta=delta, runs=20, seed=3)
    assert naive == pytest.approx(truth, rel=0.03)
    assert audit.null.mean() == pytest.approx(naive, rel=0.05)


def test_the_fitted_estimate_is_biased_upwards():
    """Algorithm 1 as written does not give Table 2: 10.6 at d = 10^6, k = 1,000 for a true 10."""
    audit = audit_gaussian_mechanism(0.541, dim=10**6, canaries=1_000, delta=1e-6, runs=200, seed=7)
    assert audit.fitted.mean() == pytest.approx(10.6, abs=0.15)
    assert audit.null.mean() == pytest.approx(10.0, abs=0.05)


def test_a_large_signal_dilutes_the_scores():
    """Theorem 3.3 needs ‖X‖ = o(√d): at ‖X‖ = √d the mean falls from 1/σ to 1/√(σ² + 1)."""
    settings = {"dim": 10_000, "canaries": 1_000, "delta": 1e-6, "runs": 50, "seed": 1}
    diluted = audit_gaussian_mechanism(0.541, signal_norm=100.0, **settings)
    assert diluted.null.mean() == pytest.approx(mechanism_epsilon(math.hypot(0.541, 1.0), delta=1e-6), rel=0.02)


def test_the_same_seed_gives_the_same_result():
    first, second = (audit_gaussian_mechanism(1.0, dim=100, canaries=20, delta=1e-5, seed=4) for _ in range(2))
    assert first.null == second.null


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": 10**18}, "runs must be at most 10,000,000, got 1,000,000,000,000,000,000"),
        ({"canaries": 99}, "canaries must be at most dim - 2, got 99 canaries in dimension 100"),
        ({"canaries": 5}, "canaries must be at least 10, got 5"),
        ({"dim": 1}, "dim must be at least 2, got 1"),
        ({"delta": 0}, r"delta must lie in \(0, 1\), got 0"),
        ({"runs": 0}, "runs must be at least 1, got 0"),
        ({"kind": "cube"}, "kind must be 'rotated' or 'sphere', got 'cube'"),
        ({"vectors": np.ones((2, 100))}, "norm at most 1, got one of 10; clip them first"),
        ({"vectors": np.ones((2, 99))}, r"rows of length dim = 100, got shape \(2, 99\)"),
        ({"vectors": np.full((2, 100), np.nan)}, "vectors must be finite"),
        ({"vectors": np.zeros((2, 100)), "signal_norm": 1.0}, "either vectors or signal_norm"),
    ],
)
def test_bad_input_is_rejected(change, message):
    settings = {"dim": 100, "canaries": 20, "delta": 1e-5, "seed": 1} | change
    with pytest.raises(ValueError, match=message):
        audit_gaussian_mechanism(1.0, **settings)


@pytest.mark.full
def test_reproduction_of_table_2():
    """Six runs per cell: each cell lies within five standard errors of the printed mean (both have errors)."""
    from reproduction import table_2

    for cell in table_2.table(runs=6, seed=1):
        mean, std = cell.paper
        for audit in (cell.sphere, cell.rotated):
            assert abs(audit.null.mean() - mean) < 5 * std / math.sqrt(6) + 0.05
