"""Lower bounds on epsilon from threshold tests (Section 5)."""

import math
import time

import numpy as np
import pytest
from scipy.stats import beta, norm

from coalmine.estimators.bounds import METHODS, epsilon_lower_bound, lower_bound_ceiling
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.local_level import local_level
from coalmine.estimators.null import CosineNull

QUANTILES = norm.ppf((np.arange(1000) + 0.5) / 1000)
VALID = ("simultaneous", "bonferroni", "dkw", "split")
ONE_SAMPLE = [method for method in METHODS if method != "ranks"]


@pytest.mark.parametrize(("shift", "two_sample", "closed"), [(1, 1.626726, 2.924243), (2, 3.771945, 7.908868)])
def test_the_papers_bound_agrees_with_the_authors_code(shift, two_sample, closed):
    """The authors' published code gives these for normal quantiles, delta 1e-5, significance 0.05, dim 10^6."""
    observed = QUANTILES + shift
    assert epsilon_lower_bound(observed, null=QUANTILES, delta=1e-5, method="paper") == pytest.approx(
        two_sample, abs=1e-6
    )
    normal = epsilon_lower_bound(observed / 1000, null=Gaussian(0, 1e-3), delta=1e-5, method="paper")
    assert normal == pytest.approx(closed, abs=1e-6)
    # The authors use a normal null at dim >= 1000; the exact one has a lighter tail, a difference of 2e-4 here.
    exact = epsilon_lower_bound(observed / 1000, null=CosineNull(10**6), delta=1e-5, method="paper")
    assert exact == pytest.approx(closed, abs=3e-4)
    assert exact > normal


def test_the_papers_bound_is_at_most_6_25():
    """Section 5: at perfect separation of 1,000 and 1,000 scores."""
    assert lower_bound_ceiling(1000, unobserved=1000, delta=1e-6, method="paper") == pytest.approx(6.25, abs=0.02)


def slow_bound(observed, unobserved, delta, confidence):
    """The two-sample rule literally: every threshold, both directions of Eq. 1, scipy.stats quantiles."""
    half = 1 - math.sqrt(confidence)
    k, m = len(observed), len(unobserved)
    best = 0.0
    for t in [*observed, *unobserved, math.inf]:
        c, j = sum(x < t for x in observed), sum(y >= t for y in unobserved)
        fnr = 1.0 if c == k else beta.isf(local_level(k, half), c + 1, k - c)
        fpr = 1.0 if j == m else beta.isf(local_level(m, half), j + 1, m - j)
        for a, b in ((fnr, fpr), (fpr, fnr)):
            if 1 - delta - a > 0:
                best = max(best, math.log((1 - delta - a) / b))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_two_sample_bound_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    k, m = rng.integers(10, 60, 2)
    observed, unobserved = rng.normal(seed / 2, 1, k), rng.normal(0, 1, m)
    if seed % 2:  # ties, within and across
        observed, unobserved = observed.round(), unobserved.round()
    fast = epsilon_lower_bound(observed, null=unobserved, delta=1e-3, confidence=0.9)
    assert fast == pytest.approx(slow_bound(observed, unobserved, 1e-3, 0.9), rel=1e-9)


def test_the_closed_form_bound_equals_brute_force():
    rng = np.random.default_rng(5)
    observed = np.sort(rng.normal(2, 1, 40))
    best = 0.0
    for rank, t in enumerate(observed, start=1):
        fnr, fpr = beta.isf(local_level(40, 0.05), rank, 41 - rank), norm.sf(t)
        best = max(best, math.log((1 - 1e-6 - fpr) / fnr), math.log(1 - 1e-6 - fnr) - math.log(fpr))
    assert epsilon_lower_bound(observed, null=Gaussian(0, 1), delta=1e-6) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_a_two_sample_bound_depends_on_ranks_only(method):
    rng = np.random.default_rng(1)
    observed, unobserved = rng.normal(1.5, 1, 200), rng.normal(0, 1, 300)
    plain = epsilon_lower_bound(observed, null=unobserved, delta=1e-6, method=method)
    bent = epsilon_lower_bound(np.exp(observed[::-1]), null=np.exp(unobserved), delta=1e-6, method=method)
    assert plain == bent > 0


@pytest.mark.parametrize("method", ONE_SAMPLE)
def test_units_do_not_matter(method):
    observed = QUANTILES + 2
    plain = epsilon_lower_bound(observed, null=Gaussian(0, 1), delta=1e-6, method=method)
    moved = epsilon_lower_bound(3 * observed + 7, null=Gaussian(7, 3), delta=1e-6, method=method)
    assert moved == pytest.approx(plain, rel=1e-9)


def test_ties_count_against_the_test():
    """With many ties the bound is no larger than with ties broken in the test's favour."""
    rng = np.random.default_rng(2)
    observed, unobserved = rng.normal(2, 1, 500).round(), rng.normal(0, 1, 500).round()
    tied = epsilon_lower_bound(observed, null=unobserved, delta=1e-6)
    assert tied <= epsilon_lower_bound(observed + 1e-9, null=unobserved, delta=1e-6)
    assert epsilon_lower_bound(np.ones(50), null=np.ones(50), delta=1e-6) == 0


@pytest.mark.parametrize("method", VALID)
@pytest.mark.parametrize("two_sample", [False, True])
def test_valid_bounds_hold_when_nothing_leaks(method, two_sample):
    rng = np.random.default_rng(3)
    runs, above = 300, 0
    for _ in range(runs):
        null = rng.standard_normal(100) if two_sample else Gaussian(0, 1)
        above += epsilon_lower_bound(rng.standard_normal(100), null=null, delta=1e-6, method=method) > 0
    assert above / runs < 0.05 + 4 * math.sqrt(0.05 * 0.95 / runs)


def test_the_papers_bound_does_not_hold():
    rng = np.random.default_rng(4)
    above = [
        epsilon_lower_bound(rng.standard_normal(1000), null=Gaussian(0, 1), delta=1e-6, method="paper")
        for _ in range(100)
    ]
    assert np.mean(np.array(above) > 0) > 0.5


def test_simultaneous_is_the_largest_valid_bound():
    observed = QUANTILES + 1
    bounds = {
        method: epsilon_lower_bound(observed, null=Gaussian(0, 1), delta=1e-6, method=method) for method in ONE_SAMPLE
    }
    truth = gaussian_epsilon(Gaussian(0, 1), Gaussian(1, 1), delta=1e-6)
    assert all(0 < bounds[method] <= bounds["simultaneous"] for method in VALID)
    assert bounds["simultaneous"] < bounds["clopper-pearson"] < bounds["paper"] < truth


def test_a_higher_confidence_gives_a_smaller_bound():
    bounds = [
        epsilon_lower_bound(QUANTILES + 1, null=Gaussian(0, 1), delta=1e-6, confidence=c)
        for c in (0.5, 0.9, 0.95, 0.999)
    ]
    assert (np.diff(bounds) < 0).all()


def test_the_tail_of_the_null_is_computed_in_logs():
    """Scores 60 stds away: a false positive rate of e^-1800."""
    bound = epsilon_lower_bound(QUANTILES + 60, null=Gaussian(0, 1), delta=1e-6)
    assert 1500 < bound < gaussian_epsilon(Gaussian(0, 1), Gaussian(60, 1), delta=1e-6)


def test_ceilings_match_perfect_separation_and_the_closed_form():
    ceiling = lower_bound_ceiling(1000, unobserved=10_000, delta=1e-6)
    rng = np.random.default_rng(0)
    apart = epsilon_lower_bound(rng.normal(50, 1, 1000), null=rng.normal(0, 1, 10_000), delta=1e-6)
    assert ceiling == pytest.approx(apart, rel=1e-12)
    fpr, fnr = (
        beta.isf(local_level(10_000, 1 - 0.95**0.5), 1, 10_000),
        beta.isf(local_level(1000, 1 - 0.95**0.5), 1, 1000),
    )
    assert ceiling == pytest.approx(math.log((1 - 1e-6 - fnr) / fpr), rel=1e-9)
    assert lower_bound_ceiling(1000, delta=1e-6) == math.inf


def test_10_000_scores_take_less_than_a_second():
    observed = np.random.default_rng(0).normal(1, 1, 10_000)
    started = time.process_time()
    epsilon_lower_bound(observed / 1000, null=CosineNull(10**6), delta=1e-6, confidence=0.987)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(("observed", "message"), [
    ([], "at least 10 observed scores, got 0"),
    ([1.0] * 9, "at least 10 observed scores, got 9"),
    ([*range(20), float("nan")], "finite"),
    (np.zeros((10, 10)), "one row"),
    (np.zeros(100), "equal"),
    (["a"] * 20, "numbers"),
])  # fmt: skip
def test_bad_scores_are_rejected(observed, message):
    with pytest.raises(ValueError, match=message) as error:
        epsilon_lower_bound(observed, null=Gaussian(0, 1), delta=1e-6)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("options", "message"), [
    ({"delta": 0.0}, "delta must lie in"), ({"confidence": 1.0}, "confidence must lie in"),
    ({"method": "best"}, "method must be one of"), ({"null": np.zeros(3)}, "at least 10 unobserved scores"),
])  # fmt: skip
def test_bad_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        epsilon_lower_bound(QUANTILES, **{"null": Gaussian(0, 1), "delta": 1e-6} | options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("count", "unobserved"), [(10, 10), (37, 1000), (1000, 11), (30_000, 25_000)])
def test_the_ceiling_is_the_bound_at_perfect_separation(method, count, unobserved):
    apart = epsilon_lower_bound(np.ones(count), null=np.zeros(unobserved), delta=1e-6, method=method)
    assert lower_bound_ceiling(count, unobserved=unobserved, delta=1e-6, method=method) == apart


def test_the_ceiling_of_a_billion_scores_is_quick():
    started = time.process_time()
    assert 18 < lower_bound_ceiling(10**8, unobserved=10**9, delta=1e-12) < 20
    assert time.process_time() - started < 1


@pytest.mark.parametrize(("count", "unobserved"), [(9, 100), (100, 9), (100, 10.5), (-1, 100)])
def test_the_ceiling_of_too_few_scores_is_rejected(count, unobserved):
    with pytest.raises(ValueError, match=r"must be at least|must be a whole number"):
        lower_bound_ceiling(count, unobserved=unobserved, delta=1e-6)
