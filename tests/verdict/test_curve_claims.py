"""Claims that are a μ, a ρ or several points (ε, δ)."""

import math

import numpy as np
import pytest
from scipy.stats import norm
from training import train

from coalmine import Claim, mechanism_epsilon, mechanism_noise

DELTA = 1e-6


def test_mu_and_rho_are_the_same_claim_of_a_gaussian_mechanism():
    """ρ = μ²/2 (Bun and Steinke 2016)."""
    assert Claim.from_curve(DELTA, mu=1.5) == Claim.from_curve(DELTA, zcdp=1.5**2 / 2)
    assert Claim.from_curve(DELTA, mu=1.5).epsilon == pytest.approx(mechanism_epsilon(1 / 1.5, delta=DELTA))


def test_the_point_that_needs_most_noise_counts():
    points = [(8.0, 1e-9), (3.0, 1e-5), (1.0, 0.1)]
    noises = [mechanism_noise(epsilon, delta=delta) for epsilon, delta in points]
    claim = Claim.from_curve(DELTA, points=points, unit="document")
    assert mechanism_noise(claim.epsilon, delta=DELTA) == pytest.approx(max(noises))
    assert (claim.delta, claim.unit, claim.amplified, claim.bare) == (DELTA, "document", False, False)


@pytest.mark.parametrize(("mu", "outcome"), [(1.0, "PASS"), (0.5, "VIOLATION")])
def test_a_run_with_mu_1_is_judged_by_it(mu, outcome):
    result = train(dim=2_000, canaries=400, rounds=8).result(claim=Claim.from_curve(DELTA, mu=mu))
    assert result.verdict.outcome == outcome


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of mu, zcdp and points, got none"),
        ({"mu": 1, "zcdp": 2}, "got mu, zcdp"),
        ({"mu": 0}, "mu must be above 0, got 0"),
        ({"points": []}, "at least one"),
        ({"points": [3.0]}, r"pairs \(epsilon, delta\), got 3.0"),
        ({"points": [(3.0, 2.0)]}, "delta"),
    ],
)
def test_bad_curves_are_rejected_in_one_line(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        Claim.from_curve(DELTA, **values)
    assert "\n" not in str(caught.value)


def test_the_classic_formula_is_claimed_for_what_its_noise_has():
    """Integrals of the two normal densities say what √(2 ln(1.25/δ))/ε is worth: 96.4 at 50."""
    assert Claim.classic_gaussian(1.0, 1e-5).epsilon == 1.0
    with pytest.warns(UserWarning, match="proves nothing above epsilon = 1"):
        claim = Claim.classic_gaussian(50.0, 1e-5, unit="client")
    mu = 50.0 / math.sqrt(2 * math.log(1.25e5))
    grid = np.linspace(-12, 12 + mu, 400_001)
    excess = norm.pdf(grid, mu) - math.exp(claim.epsilon) * norm.pdf(grid)
    assert np.trapezoid(np.maximum(excess, 0), grid) == pytest.approx(1e-5, rel=1e-3)
    assert claim.epsilon == pytest.approx(96.4, abs=0.05)
    assert (claim.unit, claim.delta) == ("client", 1e-5)
    with pytest.raises(ValueError, match="epsilon"):
        Claim.classic_gaussian(-1.0, 1e-5)
