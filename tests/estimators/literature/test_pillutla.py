import itertools
import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from coalmine.estimators.literature.pillutla import pillutla_rows, wilson, xbern_bounds


def draw(rng, runs, canaries, rate, spread):
    """Outcomes that are exchangeable within a run: each run has its own rate, from a Beta law with mean `rate`."""
    rates = rng.beta(rate * spread, (1 - rate) * spread, runs)
    return (rng.random((runs, canaries)) < rates[:, None]).astype(float)


def moment(outcomes, order):
    """Mean over runs of the share of ordered tuples of distinct canaries that were all detected, by enumeration."""
    tuples = list(itertools.permutations(range(outcomes.shape[1]), order))
    return np.mean([np.mean([all(row[i] for i in each) for each in tuples]) for row in outcomes])


def solved(mean, runs, variance, failing):
    """The two points at which the mean is z stds away, by root finding."""
    z = norm.isf(failing)

    def excess(mu):
        return (mean - mu) ** 2 - z * z / runs * variance(mu)

    below, above = mean - 1e-12, mean + 1e-12  # at 0 and 1 the mean itself is a root
    low = brentq(excess, -1.0, below) if excess(below) < 0 else mean
    high = brentq(excess, above, 2.0) if excess(above) < 0 else mean
    widest = z / (2 * math.sqrt(runs))
    return max(low, mean - widest, 0.0), min(high, mean + widest, 1.0)


def oracle(outcomes, order, failing):
    runs, k = outcomes.shape
    means = {j: moment(outcomes, j) for j in range(1, order + 1)}
    share = failing / order
    if order == 1:
        return solved(means[1], runs, lambda mu: mu * (1 - mu), share)
    if order == 2:
        mu2 = solved(means[2], runs, lambda mu: mu * (1 - mu), share)[1]
    else:
        mu3, mu4 = (solved(means[j], runs, lambda mu: mu * (1 - mu), share)[1] for j in (3, 4))
        # variance of the share of detected pairs: two pairs share two, one or no canaries
        same, one, none = 2 / (k * (k - 1)), 4 * (k - 2) / (k * (k - 1)), (k - 2) * (k - 3) / (k * (k - 1))
        mu2 = solved(means[2], runs, lambda mu: same * mu + one * mu3 + none * mu4 - mu * mu, share)[1]
    return solved(means[1], runs, lambda mu: mu / k + (k - 1) / k * mu2 - mu * mu, share)


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize(("rate", "spread"), [(0.5, 1e9), (0.5, 2.0), (0.05, 5.0), (0.98, 20.0)])
def test_bounds_equal_those_from_enumerated_moments(order, rate, spread):
    outcomes = draw(np.random.default_rng(order), 30, 5, rate, spread)
    low, high = xbern_bounds(outcomes, order=order, failing=0.05)
    assert (low, high) == pytest.approx(oracle(outcomes, order, 0.05), abs=1e-9)


def test_the_variance_assumed_by_order_4_is_exact():
    """A mixture of two rates, its moments in closed form, against a million simulated runs."""
    k, rates = 6, np.array([0.2, 0.9])
    mu = {j: np.mean(rates**j) for j in range(1, 5)}
    rng = np.random.default_rng(0)
    hits = rng.binomial(k, rng.choice(rates, 1_000_000))
    pairs = hits * (hits - 1) / (k * (k - 1))
    expected = (2 * mu[2] + 4 * (k - 2) * mu[3] + (k - 2) * (k - 3) * mu[4]) / (k * (k - 1)) - mu[2] ** 2
    assert pairs.var() == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("spread", [3.0, 1e9])
def test_bounds_hold_with_many_runs(order, spread):
    """Each fails in at most 5 % of 2,000 experiments, and order 2 is tighter for independent canaries."""
    rng, rate, trials = np.random.default_rng(8), 0.3, 2_000
    tables = draw(rng, trials * 200, 8, rate, spread).reshape(trials, 200, 8)
    bounds = np.array([xbern_bounds(table, order=order, failing=0.05) for table in tables])
    allowed = 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials)
    assert np.mean(bounds[:, 0] > rate) <= allowed
    assert np.mean(bounds[:, 1] < rate) <= allowed
    if order > 1 and spread > 1e6:
        first = np.array([xbern_bounds(table, order=1, failing=0.05) for table in tables[:50]])
        assert np.mean(bounds[:50, 1] - bounds[:50, 0]) < np.mean(first[:, 1] - first[:, 0])


def test_order_1_is_wilsons_interval():
    """The textbook formula (p + z²/2n ± z√(p(1-p)/n + z²/4n²)) / (1 + z²/n), here for 3 of 40."""
    z, p, n = norm.isf(0.025), 3 / 40, 40
    reach = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = wilson(p, n, 1.0, 0.0, 0.025)
    assert low == pytest.approx((p + z * z / (2 * n) - reach) / (1 + z * z / n))
    assert high == pytest.approx((p + z * z / (2 * n) + reach) / (1 + z * z / n))


def test_the_threshold_of_a_run_is_chosen_on_other_runs():
    rng = np.random.default_rng(4)
    observed, unobserved = rng.normal(2, 1, (60, 8)), rng.normal(0, 1, (60, 8))
    rows = pillutla_rows((observed, unobserved), delta=1e-5)
    assert [row.name for row in rows] == [f"Pillutla 2023, order {order}" for order in (1, 2, 4)]
    assert all(row.value > 0.5 for row in rows)
    best = {}
    for t in np.sort(observed[30:], axis=None):
        for order in (1, 2, 4):
            tpr = xbern_bounds(observed[30:] >= t, order=order, failing=0.025)[0]
            fpr = xbern_bounds(unobserved[30:] >= t, order=order, failing=0.025)[1]
            shown = [math.log((tpr - 1e-5) / fpr)] if tpr > 1e-5 else []
            shown += [math.log((1 - 1e-5 - fpr) / (1 - tpr))] if fpr < 1 - 1e-5 else []
            best[order] = max([best.get(order, 0.0), *shown])
    for row, order in zip(rows, (1, 2, 4), strict=True):
        assert row.value <= best[order] + 1e-9  # never the best of the runs it is tested on


@pytest.mark.parametrize(
    ("trials", "needs"),
    [
        (None, "needs scores of several runs"),
        ((np.zeros((19, 5)), np.zeros((19, 5))), "needs at least 20 runs.*got 19"),
        ((np.zeros((20, 3)), np.zeros((20, 5))), "needs at least 4 canaries per run"),
    ],
)
def test_a_row_without_input_states_what_it_needs(trials, needs):
    row = pillutla_rows(trials, delta=1e-5)[-1]
    assert row.value is None
    with pytest.raises(AssertionError, match=needs):
        raise AssertionError(row.needs)


@pytest.mark.parametrize(
    ("trials", "message"),
    [
        ((np.zeros(20), np.zeros((20, 5))), "trials: observed scores must be a table"),
        ((np.zeros((20, 5)), np.zeros((21, 5))), "the same number of rows, got 20 observed and 21 unobserved"),
        ((np.full((20, 5), np.nan), np.zeros((20, 5))), "trials: observed scores must be finite"),
    ],
)
def test_tables_of_different_shape_are_rejected(trials, message):
    with pytest.raises(ValueError, match=message):
        pillutla_rows(trials, delta=1e-5)


@pytest.mark.parametrize(
    ("outcomes", "order", "message"),
    [
        (np.full((5, 5), 0.5), 1, "table of 0 and 1"),
        (np.ones((5, 5)), 3, "order must be one of 1, 2, 4"),
        (np.ones((5, 3)), 4, "order 4 needs at least 4 canaries"),
    ],
)
def test_invalid_outcomes_are_rejected(outcomes, order, message):
    with pytest.raises(ValueError, match=message):
        xbern_bounds(outcomes, order=order, failing=0.05)
