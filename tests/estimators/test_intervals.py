"""The confidence interval of epsilon and the noise floor."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.intervals import deviance, epsilon_interval, noise_floor, region_image
from coalmine.estimators.variance import Sample, null_std_range, point_epsilon

INF = math.inf
SAMPLES = [
    Sample(300),
    Sample(1000, null_dof=9000.0),
    Sample(40, null_dof=25.0),
    Sample(500, null_dof=699.0, null_count=700),
]


def lost_log_likelihood(mean, std, mu, sigma, sample):
    """Twice the drop in log likelihood, with the null's mean and log std fitted by a numerical optimiser."""

    def loss(nuisance, mu, sigma):
        shift, log_tau = nuisance
        tau = math.exp(log_tau) if math.isfinite(sample.null_dof) else 1.0
        shift = shift if math.isfinite(sample.null_count) else 0.0
        total = sample.count * (
            2 * math.log(sigma * tau) + (std**2 + (mean - shift - mu * tau) ** 2) / (sigma * tau) ** 2
        )
        if math.isfinite(sample.null_dof):
            total += sample.null_dof * (2 * math.log(tau) + tau**-2)
        if math.isfinite(sample.null_count):
            total += sample.null_count * shift**2 / tau**2
        return total

    def best(mu, sigma):
        options = {"xatol": 1e-10, "fatol": 1e-11, "maxiter": 4000, "initial_simplex": [[0, 0], [0.05, 0], [0, 0.05]]}
        return minimize(loss, [0.0, 0.0], args=(mu, sigma), method="Nelder-Mead", options=options).fun

    return best(mu, sigma) - best(mean, std)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize(("mu", "sigma"), [(1.1, 1.05), (0.8, 0.93), (1.0, 1.2)])
def test_deviance_is_twice_the_drop_of_the_log_likelihood(sample, mu, sigma):
    ours = float(deviance(np.array(1.0), np.array(1.02), np.array(mu), np.array(sigma), sample))
    assert ours == pytest.approx(lost_log_likelihood(1.0, 1.02, mu, sigma, sample), rel=1e-5, abs=1e-6)


def test_deviance_has_the_known_covariance():
    """Near its minimum, the deviance is the quadratic form of Var(mean), Var(log std) and their covariance."""
    sample, mean, std = Sample(10**6, null_dof=3e6), 2.0, 1.1
    covariance = np.array([
        [std**2 / 1e6 + mean**2 / 6e6, mean / 6e6],
        [mean / 6e6, 1 / 2e6 + 1 / 6e6],
    ])  # fmt: skip
    for step in ([1e-3, 0.0], [0.0, 1e-3], [1e-3, 5e-4]):
        # The fitted std has its own scale, so the covariance with the mean refers to log std.
        expected = step @ np.linalg.inv(covariance) @ step
        ours = deviance(
            np.array(mean), np.array(std), np.array(mean + step[0]), np.array(std * math.exp(step[1])), sample
        )
        assert float(ours) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.05, 0.95), (0.3, 1.03), (1.0, 1.0), (4.0, 1.25), (-2.0, 0.8)])
def test_interval_is_the_image_of_the_region(sample, mean, std):
    """Oracle: those of 200,000 points of the plane that the deviance admits."""
    low, high = epsilon_interval(mean, std, sample=sample, delta=1e-6)
    rng = np.random.default_rng(0)
    spread = math.sqrt(std**2 / sample.count + mean**2 / sample.null_dof + 1 / sample.null_count)
    wide = math.sqrt(1 / sample.count + 1 / sample.null_dof)
    mu = mean + spread * rng.uniform(-4, 4, 200_000)
    sigma = std * np.exp(wide * rng.uniform(-3, 3, mu.size))
    sigma[::20] = 1.0  # the kink
    inside = deviance(np.array(mean), np.array(std), mu, sigma, sample) <= 5.991464547
    epsilons = gaussian_epsilon(Gaussian(0, 1), Gaussian(mu[inside], sigma[inside]), delta=1e-6)
    slack = 0.03 * (high - low)
    assert low - 1e-3 * high <= epsilons.min() <= low + slack
    assert high - slack <= epsilons.max() <= high * (1 + 1e-3)


def test_epsilon_grows_with_the_distance_of_the_means():
    """This allows the search to vary only the stds."""
    means, stds = np.linspace(0, 6, 121)[:, None], np.geomspace(0.5, 2, 41)[None, :]
    epsilons = gaussian_epsilon(Gaussian(0, 1), Gaussian(means + 0 * stds, stds + 0 * means), delta=1e-6)
    assert (np.diff(epsilons, axis=0) > -1e-9).all()


def test_a_finer_search_finds_the_same_ends():
    rng = np.random.default_rng(1)
    means, stds = rng.uniform(0, 5, 50), rng.uniform(0.8, 1.25, 50)
    short, long = (
        region_image(means, stds, sample=Sample(1000, null_dof=9000.0), delta=1e-6, threshold=5.99, grids=grids)
        for grids in (3, 8)
    )
    for a, b in zip(short, long, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_interval_contains_the_estimate_and_shrinks():
    intervals = [epsilon_interval(1.0, 1.0, sample=Sample(count), delta=1e-6) for count in (100, 1000, 10_000)]
    truth = gaussian_epsilon(Gaussian(0, 1), Gaussian(1, 1), delta=1e-6)
    widths = [high - low for low, high in intervals]
    assert all(low < truth < high for low, high in intervals)
    assert widths[0] > 2.5 * widths[1] > 2.5 * 2.5 * widths[2]
    narrow = epsilon_interval(1.0, 1.0, sample=Sample(1000), delta=1e-6, confidence=0.5)
    assert intervals[1].low < narrow.low < truth < narrow.high < intervals[1].high


def test_interval_starts_at_0_when_nothing_leaks():
    assert epsilon_interval(0.0, 1.0, sample=Sample(1000), delta=1e-6).low == 0


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("variance", ["fitted", "null", "auto"])
def test_floor_has_the_quantiles_of_estimates_when_nothing_leaks(sample, variance):
    """Monte Carlo over individual scores; `auto` exceeds q95 in 5.1 % of the runs, as documented."""
    rng, runs = np.random.default_rng(7), 4_000
    scores = rng.standard_normal((runs, sample.count))
    null_mean, null_std = 0.0, 1.0
    if math.isfinite(sample.null_count):
        unobserved = rng.standard_normal((runs, sample.null_count))
        null_mean, null_std = unobserved.mean(axis=1), unobserved.std(axis=1)
    elif math.isfinite(sample.null_dof):
        null_std = np.sqrt(rng.chisquare(sample.null_dof, runs) / sample.null_dof)
    means, stds = (scores.mean(axis=1) - null_mean) / null_std, scores.std(axis=1) / null_std
    epsilons = point_epsilon(means, stds, sample=sample, delta=1e-6, variance=variance)
    floor = noise_floor(sample=sample, delta=1e-6, variance=variance)
    assert np.mean(epsilons > floor.median) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(runs))
    high = 0.051 if variance == "auto" else 0.05
    assert np.mean(epsilons > floor.q95) == pytest.approx(high, abs=4 * math.sqrt(0.05 * 0.95 / runs))


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_f_test_rejects_equal_stds_in_5_percent(sample):
    rng, runs = np.random.default_rng(8), 100_000
    ratio = np.sqrt(rng.chisquare(sample.count - 1, runs) / sample.count)
    if math.isfinite(sample.null_dof):
        divisor = sample.null_count if math.isfinite(sample.null_count) else sample.null_dof
        ratio /= np.sqrt(rng.chisquare(sample.null_dof, runs) / divisor)
    low, high = null_std_range(sample)
    tolerance = 4 * math.sqrt(0.025 / runs)
    assert np.mean(ratio < low) == pytest.approx(0.025, abs=tolerance)
    assert np.mean(ratio > high) == pytest.approx(0.025, abs=tolerance)
