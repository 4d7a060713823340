"""Agrawal et al. 2026: against closed forms, a grid over the whole box, and simulation."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

from coalmine import Gaussian, gaussian_epsilon, mechanism_noise
from coalmine.estimators.literature.agrawal import agrawal_row, normal_box, smallest_epsilon

QUANTILES = stats.norm.ppf((np.arange(400) + 0.5) / 400)


def gaussian_mechanism_epsilon(mu, delta):
    """The inverse of Balle and Wang's delta(epsilon) (2018, Theorem 8)."""

    def excess(epsilon):
        return (
            stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta
        )

    return brentq(excess, 0.0, 200.0)


@pytest.mark.parametrize(("shift", "confidence"), [(1.0, 0.95), (-1.0, 0.95), (3.0, 0.99), (0.5, 0.8)])
def test_the_same_spread_on_both_sides_gives_a_gaussian_mechanism(shift, confidence):
    """The closest means of the t intervals, with the largest std of the chi-square interval on both sides."""
    failing, n = (1 - confidence) / 4, QUANTILES.size
    std = QUANTILES.std(ddof=1)
    low, high = stats.t(n - 1, 0, std / math.sqrt(n)).interval(1 - failing)
    widest = std * math.sqrt((n - 1) / stats.chi2(n - 1).ppf(failing / 2))
    expected = gaussian_mechanism_epsilon((abs(shift) - (high - low)) / widest, 1e-6)
    row = agrawal_row(QUANTILES + shift, QUANTILES, delta=1e-6, confidence=confidence)
    assert row.value == pytest.approx(expected, rel=1e-9)


def smallest_on_a_grid(boxes, delta):
    """Minimum over the four parameters; both stds share grid values where possible, so that they can be equal."""
    (mean, std), (null_mean, null_std) = boxes
    stds = np.unique([np.linspace(*ends, 60) for ends in (std, null_std)])
    means, null_means = (np.append(np.linspace(*ends, 3), [0.1, 0.2]) for ends in (mean, null_mean))
    points = np.stack([axis.ravel() for axis in np.meshgrid(means, stds, null_means, stds)])
    inside = [
        (axis >= ends.low) & (axis <= ends.high) for axis, ends in zip(points, [*boxes[0], *boxes[1]], strict=True)
    ]
    points = points[:, np.all(inside, axis=0)]
    return gaussian_epsilon(Gaussian(*points[2:]), Gaussian(*points[:2]), delta=delta).min()


@pytest.mark.parametrize(
    ("shift", "std", "count", "null_count", "delta", "corners_suffice"),
    [
        (1.0, 1.0, 300, 200, 1e-6, False),  # the stds can be equal: the kink
        (8.0, 0.9, 300, 180, 1e-6, False),
        (3.0, 1.0, 240, 60, 0.3, False),
        (0.0, 3.0, 50, 50, 1e-6, False),  # the means can be equal
        (3.0, 0.4, 120, 320, 1e-3, True),
        (8.0, 1.0, 140, 100, 0.6, True),  # at a large delta, unequal stds give less than equal ones
        (0.3, 1.0, 20, 30, 1e-6, False),  # indistinguishable
    ],
)
def test_the_smallest_epsilon_equals_that_of_a_grid_over_the_whole_box(
    shift, std, count, null_count, delta, corners_suffice
):
    rng = np.random.default_rng(3)
    boxes = [normal_box(rng.normal(shift, std, count), 0.0125), normal_box(rng.normal(size=null_count), 0.0125)]
    ours = smallest_epsilon(*boxes, delta=delta)
    on_the_grid = smallest_on_a_grid(boxes, delta)
    assert on_the_grid - 1e-3 <= ours <= on_the_grid + 1e-9
    corners = np.stack([axis.ravel() for axis in np.meshgrid(*boxes[0], *boxes[1])])
    at_corners = gaussian_epsilon(Gaussian(*corners[2:]), Gaussian(*corners[:2]), delta=delta).min()
    assert (at_corners <= ours + 1e-6) == corners_suffice


@pytest.mark.parametrize("count", [10, 100])
def test_each_interval_fails_at_its_stated_rate(count):
    rng, runs, failing = np.random.default_rng(7), 4_000, 0.05
    boxes = [normal_box(rng.normal(2, 3, count), failing) for _ in range(runs)]
    for i, truth in ((0, 2), (1, 3)):
        missed = np.mean([not box[i].low <= truth <= box[i].high for box in boxes])
        assert missed == pytest.approx(failing, abs=4 * math.sqrt(failing * (1 - failing) / runs))


@pytest.mark.full
@pytest.mark.parametrize("epsilon", [0.0, 2.3])
def test_it_is_a_bound_for_normal_scores(epsilon):
    """Also with different stds and few scores: at most 5 % of 100 runs exceed the truth, plus three standard errors."""
    shift = 1 / mechanism_noise(epsilon, delta=1e-6) if epsilon else 0.0
    rng, runs = np.random.default_rng(13), 100
    for std in (1.0, 1.2):
        truth = gaussian_epsilon(Gaussian(0, 1), Gaussian(shift, std), delta=1e-6)
        values = [agrawal_row(rng.normal(shift, std, 40), rng.normal(size=60), delta=1e-6).value for _ in range(runs)]
        assert np.mean(np.array(values) > truth) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_many_scores_give_the_true_epsilon():
    """The confidence box shrinks to a point, and the bound approaches the truth from below."""
    truth = gaussian_mechanism_epsilon(1.0, 1e-6)
    quantiles = stats.norm.ppf((np.arange(10**6) + 0.5) / 10**6)
    value = agrawal_row(quantiles + 1, quantiles, delta=1e-6).value
    assert 0.98 * truth < value < truth


def test_it_is_not_a_bound_for_laplace_scores():
    """For a true epsilon of 2.3 (a Laplace mechanism of sensitivity 2.3) it gives more than twice as much."""
    rng = np.random.default_rng(2)
    assert agrawal_row(rng.laplace(2.3, 1, 1_000), rng.laplace(size=1_000), delta=1e-6).value > 4.6


def test_it_is_not_a_bound_for_scores_of_a_sampled_mechanism():
    """The likelihood ratio is skewed under Poisson sampling: 100 rounds at rate 0.1 and noise 1, an epsilon of 7.05.

    A 95 % bound exceeds it in 8 or more of 40 runs with a probability of 0.1 %.
    """
    rng = np.random.default_rng(6)
    above = 0
    for _ in range(40):
        present = rng.random((1_000, 100)) < 0.1
        observed, unobserved = (
            np.log1p(0.1 * np.expm1(mean + rng.normal(size=present.shape) - 0.5)).sum(axis=1) for mean in (present, 0)
        )
        above += agrawal_row(observed, unobserved, delta=1e-5).value > 7.05
    assert above >= 8


def test_scores_that_are_all_equal_have_no_value():
    scores = np.linspace(0, 1, 20)
    for observed, unobserved, words in [
        (np.full(20, 0.1), scores, "all observed scores are equal"),
        (scores, np.full(20, 0.1), "all unobserved scores are equal"),
        (np.full(20, 0.3), np.full(20, 0.1), "all observed and all unobserved scores are equal"),
    ]:
        row = agrawal_row(observed, unobserved, delta=1e-6)
        assert row.value is None
        assert words in row.needs


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_units_do_not_matter_even_at_the_ends_of_the_floats(scale):
    plain = agrawal_row(QUANTILES + 1, QUANTILES, delta=1e-6).value
    assert agrawal_row((QUANTILES + 1) * scale, QUANTILES * scale, delta=1e-6).value == pytest.approx(plain, rel=1e-9)


def test_scores_of_very_different_spread_give_a_large_epsilon():
    row = agrawal_row(QUANTILES * 1e-12, QUANTILES, delta=1e-6)
    assert row.value > 1e10


def test_the_fields_of_the_row():
    row = agrawal_row(QUANTILES + 2, QUANTILES, delta=1e-6, confidence=0.9)
    assert (row.kind, row.confidence, row.threshold) == ("valid bound", 0.9, "none")
    assert "normal scores" in row.assumptions
    assert row.value > agrawal_row(QUANTILES + 2, QUANTILES, delta=1e-6, confidence=0.99).value


def test_bad_input_is_rejected():
    with pytest.raises(ValueError, match="confidence must lie in"):
        agrawal_row(QUANTILES, QUANTILES, delta=1e-6, confidence=1.0)
    with pytest.raises(ValueError, match="at least 10 unobserved scores, got 5"):
        agrawal_row(QUANTILES, QUANTILES[:5], delta=1e-6)
