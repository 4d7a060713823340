"""The lower bound and the interval if the noise is Gaussian, and the gate that withholds them."""

import json
import math

import numpy as np
import pytest
from frozen import stored
from scipy.stats import binom, norm
from training import train

from coalmine import Audit, AuditResult, mechanism_epsilon, mechanism_noise
from coalmine.estimators.gaussians import Gaussian
from coalmine.evidence.gaussian_bound import CONTRADICTED, GaussianBound, known_rounds_bound
from coalmine.evidence.gaussian_gate import NOT_MEASURED, OTHER_SAMPLER, UNEQUAL, GaussianGate
from coalmine.evidence.ladder import Scores
from coalmine.measure.noise_law import MANY_COORDINATES

DELTA = 1e-6
OPEN = GaussianGate(noise="", sampler="")
SMALL = {"dim": 2_000, "canaries": 200, "rounds": 8}


def of_scores(observed, dof=math.inf, times=1, gate=OPEN):
    group = Scores(
        rung="known-others",
        observed=np.asarray(observed),
        unobserved=np.zeros(0),
        null=Gaussian(0.0, 1.0),
        null_dof=dof,
        round_dof=dof,
        presentations=times,
    )
    return known_rounds_bound([group], float(times), gate, DELTA)


@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("epsilon", [0.5, 4.0, 20.0])
def test_with_a_known_null_the_bound_is_epsilon_at_the_lower_limit_of_the_mean(epsilon, times):
    """μ̂ - 1.645/√k and μ̂ ± 1.960/√k, as in the published audits that assume Gaussian noise."""
    count, mean = 400, 1 / mechanism_noise(epsilon, delta=DELTA)
    scores = norm.ppf((np.arange(count) + 0.5) / count)
    found = of_scores(scores - scores.mean() + mean, times=times)
    limits = [mean - norm.isf(level) / math.sqrt(count) for level in (0.05, 0.025, 0.975)]
    expected = [float(mechanism_epsilon(1 / limit, delta=DELTA)) for limit in limits]
    assert [found.lower_bound, *found.interval] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("free", [20, 300])
def test_the_bound_exceeds_the_truth_in_five_percent_of_runs_however_few_directions_there_are(free):
    """The scale of all scores is estimated from `free` directions, and its error is common to all of them."""
    rng, runs, count, epsilon = np.random.default_rng(3), 400, 300, 6.0
    mean, above, missed = 1 / mechanism_noise(epsilon, delta=DELTA), 0, 0
    for _ in range(runs):
        scale = math.sqrt(rng.chisquare(free) / free)
        found = of_scores((mean + rng.normal(size=count)) / scale, dof=float(free))
        above += found.lower_bound > epsilon
        missed += not found.interval[0] <= epsilon <= found.interval[1]
    low, high = binom.ppf([1e-4, 1 - 1e-4], runs, 0.05)
    assert low <= above <= high
    assert low <= missed <= high


def test_an_honest_run_has_a_bound_between_that_for_any_law_and_epsilon():
    result = train(**SMALL).result()
    row = result["known-others"].headline
    assert row.lower_bound < row.lower_bound_gaussian < row.estimate.epsilon
    assert result.headline.gaussian == row.gaussian
    assert AuditResult.from_dict(json.loads(json.dumps(result.to_dict(), default=str))).headline == result.headline


def test_too_little_noise_does_not_withhold_it():
    """The gauges of the level are far outside their limits, and the bound says how much the noise gives away."""
    audit = train(**SMALL, noise=lambda number, rng, dim: rng.normal(size=dim) / 2)
    result = audit.result(claim=4.9)
    assert result.verdict.outcome == "VIOLATION"
    assert result["known-others"].lower_bound_gaussian > 9


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": lambda number, rng, dim: rng.laplace(size=dim) / math.sqrt(2)},
        {"noise": lambda number, rng, dim: np.random.default_rng(5).normal(size=dim)},  # the same in every round
        {"noise": lambda number, rng, dim: np.round(2 * rng.normal(size=dim)) / 2},
    ],
    ids=["Laplace", "reused", "rounded"],
)
def test_a_gauge_of_the_law_outside_its_limits_withholds_it(changes):
    result = train(**SMALL, **changes).result()
    for rung in ("known-round", "known-others"):
        gaussian = result[rung].headline.gaussian
        assert (gaussian.lower_bound, gaussian.interval) == (None, None)
        assert gaussian.withheld.endswith("gauge is outside its limits")
    assert "not offered if Gaussian: the " in result.details()
    assert "Gaussian" not in str(result)


def test_without_others_the_law_is_not_measured():
    gaussian = train(**SMALL, give_others=False).result()["known-round"].headline.gaussian
    assert gaussian == GaussianBound(withheld=NOT_MEASURED)


@pytest.mark.parametrize("without", [0, 2])
def test_a_large_model_whose_law_is_measured_in_some_rounds_has_the_bound(without):
    """With 12 rounds the key draws eight of them. A round without `others` withholds it all the same."""
    dim, rng = MANY_COORDINATES + 1, np.random.default_rng(5)
    audit = Audit(dim, canaries=24, unobserved=24, seed=b"a large model", delta=DELTA, rounds=12)
    for number in range(1, 13):
        present, others = audit.canaries_in_round(number), rng.standard_normal(dim)
        release = audit.updates(present, 1.0) + others + rng.standard_normal(dim)
        given = None if number == without else others
        audit.observe_round(number, release, present=present, others=given, noise_std=1.0, clip_norm=1.0)
    found = audit.result()["known-others"].headline
    assert found.gaussian.withheld == (NOT_MEASURED if without else "")
    assert without or found.lower_bound < found.gaussian.lower_bound


def test_canaries_that_do_not_count_alike_withhold_it():
    mixed = np.concatenate([np.random.default_rng(0).normal(size=300), np.random.default_rng(1).normal(size=300) + 2])
    assert of_scores(mixed).withheld == UNEQUAL


def test_a_bound_that_assumes_less_and_lies_above_the_interval_withholds_it():
    gaussian = GaussianBound(lower_bound=2.0, interval=(1.9, 2.5))
    assert gaussian.beside(2.4) == gaussian
    assert gaussian.beside(2.6) == GaussianBound(withheld=CONTRADICTED)


@pytest.mark.parametrize("name", ["sampled-twice-as-often", "shuffled"])
def test_a_sampler_that_is_not_the_declared_one_withholds_that_of_unknown_rounds_alone(name):
    result = stored(name)
    assert result.headline.rung == "unknown-round"
    assert result.headline.gaussian == GaussianBound(withheld=OTHER_SAMPLER)
    assert result["known-others"].lower_bound_gaussian > 0


def test_that_of_unknown_rounds_lies_between_the_bound_for_any_law_and_the_estimate():
    row = stored("sampled")["unknown-round"].headline
    assert row.lower_bound < row.lower_bound_gaussian < row.estimate.epsilon


def test_scores_of_a_final_model_need_a_test_of_their_own():
    final = stored("plain")["final"].headline
    assert final.lower_bound_gaussian == final.estimate.interval.low
    assert stored("plain")["all-iterates"].headline.gaussian.lower_bound is None
