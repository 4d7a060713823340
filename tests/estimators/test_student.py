"""The lower bound for nearly normal samples: its epsilon and its fit by oracles, its level, and its size."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq, minimize
from scipy.stats import binom, t

from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.student import TAILS, _fits, student_epsilon, student_lower_bound

DELTA = 1e-5


def epsilon_by_quadrature(shift, dof):
    x = np.concatenate([-np.geomspace(1e3, 1e-4, 50_000), np.geomspace(1e-4, 1e3, 50_000)])
    present, absent = t.pdf(x - shift, dof), t.pdf(x, dof)
    return brentq(lambda e: np.trapezoid(np.maximum(present - math.exp(e) * absent, 0), x) - DELTA, 0, 60)


@pytest.mark.parametrize(("shift", "dof"), [(0.3, 5), (1, 50), (2, 5), (3, 20), (0.5, 400)])
def test_epsilon_equals_quadrature(shift, dof):
    found = student_epsilon(np.array([float(shift)]), np.array([float(dof)]), delta=DELTA)[0]
    assert found == pytest.approx(epsilon_by_quadrature(shift, dof), rel=1e-4)


def test_epsilon_tends_to_that_of_normal_laws():
    found = student_epsilon(np.array([0.0, 1e-7, 1.0]), np.array([5.0, 5.0, 1e6]), delta=DELTA)
    assert found[:2].tolist() == [0, 0]
    assert found[2] == pytest.approx(float(gaussian_epsilon(Gaussian(0, 1), Gaussian(1, 1), delta=DELTA)), rel=1e-3)


def test_the_fit_is_the_largest_likelihood():
    rng = np.random.default_rng(1)
    observed, unobserved = 2 * rng.standard_t(5, 60) + 3, 2 * rng.standard_t(5, 80)
    shifts, fits = _fits(observed, unobserved)
    for index in (0, 16, len(fits) - 1):
        dof = 1 / TAILS[index]

        def loss(values, dof=dof):
            scale = math.exp(values[2])
            return -t.logpdf(observed, dof, values[0], scale).sum() - t.logpdf(unobserved, dof, values[1], scale).sum()

        best = minimize(
            loss, [3, 0, 0.5], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-8, "maxiter": 4000}
        )
        assert fits[index] == pytest.approx(-best.fun, abs=1e-3)
        assert shifts[index] == pytest.approx((best.x[0] - best.x[1]) / math.exp(best.x[2]), abs=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("dof", [5, 50])
def test_it_holds_for_students_t(dof):
    rng, runs, truth = np.random.default_rng(2), 100, epsilon_by_quadrature(1.5, dof)
    above = sum(
        student_lower_bound(rng.standard_t(dof, 150) + 1.5, rng.standard_t(dof, 150), delta=DELTA, confidence=0.95)
        > truth
        for _ in range(runs)
    )
    assert above <= binom.isf(1e-4, runs, 0.05)


def test_more_scores_and_less_confidence_give_a_larger_bound():
    rng = np.random.default_rng(3)
    many = rng.standard_normal(4000) + 1, rng.standard_normal(4000)
    few = [sample[:200] for sample in many]
    bounds = [student_lower_bound(*few, delta=DELTA, confidence=level) for level in (0.99, 0.95)]
    assert 0 < bounds[0] < bounds[1] < student_lower_bound(*many, delta=DELTA, confidence=0.95) < 4.38


def test_units_do_not_matter():
    rng = np.random.default_rng(4)
    observed, unobserved = rng.standard_normal(100) + 1, rng.standard_normal(150)
    plain = student_lower_bound(observed, unobserved, delta=DELTA, confidence=0.95)
    moved = student_lower_bound(3 * observed + 7, 3 * unobserved + 7, delta=DELTA, confidence=0.95)
    assert moved == pytest.approx(plain, rel=1e-9)
