"""How many canaries an audit needs."""

import math
from bisect import bisect_left
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import norm

from coalmine import Audit, Claim
from coalmine.estimators.amplification import amplified_epsilon
from coalmine.estimators.gaussian_fit import epsilon_estimate
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.estimators.planning import (
    canaries_for_power,
    canaries_to_detect,
    plan_audit,
    plan_sampled,
    power_against_claim,
)
from coalmine.estimators.sampling import FixedSize, Poisson, Shuffled
from coalmine.estimators.variance import Sample, point_epsilon
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.verdict.amplified_claim import SampledClaim
from coalmine.verdict.rung_claim import POWER, TEST_LEVEL, _sampled_power


@pytest.mark.parametrize(
    ("claim", "fewest", "most"), [(3.0, 49, 69), (1.0, 332, 466), (0.3, 3_000, 4_200), (0.1, 24_000, 33_000)]
)
@pytest.mark.parametrize("level", [0.002, 0.001])
def test_number_of_canaries_that_detect_twice_the_claim(claim, fewest, most, level):
    """For 90 % power with all other updates known, at the levels of a verdict."""
    assert fewest <= canaries_for_power(claim, delta=1e-6, level=level) <= most


@pytest.mark.parametrize(("claim", "level", "power"), [(1.0, 0.05, 0.9), (3.0, 0.002, 0.8), (10.0, 0.01, 0.99)])
def test_the_fewest_canaries_have_the_closed_form(claim, level, power):
    gap = 1 / mechanism_noise(2 * claim, delta=1e-6) - 1 / mechanism_noise(claim, delta=1e-6)
    needed = ((norm.isf(level) + norm.ppf(power)) / gap) ** 2
    assert canaries_for_power(claim, delta=1e-6, level=level, power=power) == max(math.ceil(needed), 10)


@pytest.mark.parametrize(("null_dof", "dilution"), [(math.inf, 0.0), (300.0, 0.0), (math.inf, 0.5)])
def test_power_is_the_rejection_rate_of_the_test(null_dof, dilution):
    """Monte Carlo of the z-test on scores whose null std was estimated."""
    rng, runs, count, claim = np.random.default_rng(0), 4_000, 60, 3.0
    claimed = 1 / mechanism_noise(claim, delta=1e-6)
    faulty = 1 / math.hypot(mechanism_noise(2 * claim, delta=1e-6), dilution)
    scale = 1.0 if math.isinf(null_dof) else np.sqrt(rng.chisquare(null_dof, runs) / null_dof)
    means = rng.normal(faulty, 1, (runs, count)).mean(axis=1) / scale
    critical = claimed + norm.isf(0.01) * math.sqrt(1 / count + claimed**2 / (2 * null_dof))
    power = power_against_claim(count, claim, delta=1e-6, level=0.01, dilution=dilution, null_dof=null_dof)
    assert np.mean(means > critical) == pytest.approx(power, abs=4 * 0.5 / math.sqrt(runs))


def test_no_number_of_canaries_detects_a_strongly_diluted_fault():
    assert canaries_for_power(3.0, delta=1e-6, level=0.002, dilution=2.0) is None
    assert canaries_for_power(3.0, delta=1e-6, level=0.002, null_dof=10) is None


def test_the_detectable_epsilon_is_detected_in_90_percent():
    plan = plan_audit(200, dim=2_000, delta=1e-6)
    rng, runs, sample = np.random.default_rng(1), 4_000, Sample(200, null_dof=1_800.0)
    mean = 1 / mechanism_noise(plan.detectable, delta=1e-6)
    scale = np.sqrt(rng.chisquare(1_800, runs) / 1_800)
    scores = rng.normal(mean, 1, (runs, 200))
    epsilons = point_epsilon(
        scores.mean(axis=1) / scale, scores.std(axis=1) / scale, sample=sample, delta=1e-6, variance="auto"
    )
    assert np.mean(epsilons > plan.floor.q95) == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / runs) + 0.005)


def test_the_plan_agrees_with_the_estimate():
    plan = plan_audit(1_000, dim=100_000, delta=1e-6)
    scores = norm.ppf((np.arange(1_000) + 0.5) / 1_000)
    scores = scores / scores.std() + 1 / mechanism_noise(3.0, delta=1e-6)
    estimate = epsilon_estimate(scores, null=Gaussian(0, 1), delta=1e-6, null_dof=99_000)
    assert estimate.floor == pytest.approx(plan.floor, rel=1e-9)
    assert estimate.interval == pytest.approx(plan.interval_at(3.0), rel=1e-6)
    assert plan.unobserved == 10_000


@pytest.mark.parametrize("epsilon", [0.4, 1.0, 5.0])
def test_canaries_to_detect_inverts_the_plan(epsilon):
    count = canaries_to_detect(epsilon, dim=1_000_000, delta=1e-6)
    assert plan_audit(count, dim=1_000_000, delta=1e-6).detectable <= epsilon * 1.001
    assert plan_audit(int(count * 0.95) - 1, dim=1_000_000, delta=1e-6).detectable > epsilon


def test_more_canaries_detect_smaller_epsilons():
    plans = [plan_audit(count, dim=100_000, delta=1e-6) for count in (10, 100, 1_000, 10_000)]
    assert (np.diff([plan.detectable for plan in plans]) < 0).all()
    assert (np.diff([plan.ceiling for plan in plans]) > 0).all()
    assert mechanism_epsilon(1.0, delta=1e-6) < plans[0].detectable


RUNS = 4_000  # Monte Carlo runs of a sampler
ERROR = 4 * math.sqrt(0.09 / RUNS)  # four standard errors of a share near 90 %


def sampled_counts(canaries, sampling, rng):
    """How many canaries each round picks, in many runs of an honest sampler."""
    if isinstance(sampling, FixedSize):
        absent = max(sampling.population - canaries, 0)
        return rng.hypergeometric(canaries, absent, sampling.size, size=(RUNS, sampling.rounds))
    if isinstance(sampling, Poisson):
        return rng.binomial(canaries, sampling.rate, size=(RUNS, sampling.total_rounds))
    return rng.multinomial(canaries, [sampling.rate] * sampling.rounds, size=RUNS)


def passing_noise_legs(canaries, claim, sampling, noise, *, dim, seed=0):
    """The share of honest runs in which the noise leg has its power: the verdict's own function on the picks of each run."""
    counts = sampled_counts(canaries, sampling, np.random.default_rng(seed)).astype(float)
    counts = counts[counts.sum(axis=1) > 0]
    weights, dofs = counts.sum(axis=1), (dim - canaries) * counts.sum(axis=1) ** 2 / (counts**2).sum(axis=1)
    context = SimpleNamespace(noise=noise, delta=1e-5, claim=claim)
    runs = sorted(zip(weights, dofs, strict=True))  # the power grows with the weight, and among equal ones with the dof

    def passes(run):
        signal = NoiseSignal(beta=1 / noise, weight=run[0], dof=run[1], round_dof=dim - canaries, mean_square=1.0)
        return _sampled_power(context, sampling, signal, 0.0).outcome == "PASS"

    return (len(runs) - bisect_left(runs, True, key=passes)) / RUNS


def sampling_leg(canaries, claim, sampling, noise):
    """The sampling leg for a sampler that passed its tests, with the picks that 90 % of honest runs have."""
    sampled = SampledClaim(claim, sampling, noise, noise, 1e-5)
    totals = np.sort(sampled_counts(canaries, sampling, np.random.default_rng(1)).sum(axis=1))
    shape = {"rounds": sampling.total_rounds, "canaries": canaries, "rate": sampling.rate}
    reading = SimpleNamespace(**shape, picks=int(totals[RUNS // 10]))
    return sampled._sampler_power(reading, True).outcome


@pytest.mark.parametrize(
    ("sampling", "noise", "dim"),
    [
        pytest.param(Poisson(0.1, rounds=40), 1.0, 1_000, marks=pytest.mark.full),
        pytest.param(Poisson(0.05, rounds=40), 1.0, 5_000, marks=pytest.mark.full),
        (Poisson(0.3, rounds=5), 2.0, 50_000),
        pytest.param(FixedSize(50, 500, rounds=10), 1.0, 2_000, marks=pytest.mark.full),
        (Shuffled(10), 1.5, 2_000),
    ],
)
def test_the_plan_is_the_fewest_canaries_that_decide_90_percent_of_honest_runs(sampling, noise, dim):
    """Oracle: Monte Carlo over the picks, each run judged by the verdict's own legs."""
    epsilon = float(amplified_epsilon(noise, sampling, 1e-5))
    claim = Claim(epsilon, sampling=sampling, noise_multiplier=noise, sampler_observed=True)
    settings = {"dim": dim, "delta": 1e-5, "level": TEST_LEVEL, "power": POWER, "noise_multiplier": noise}
    plan = plan_sampled(epsilon, sampling, **settings)
    count = plan.noise
    fewer = int(count * 0.93) - 1
    enough, short = (passing_noise_legs(k, claim, sampling, noise, dim=dim) for k in (count, fewer))
    assert enough >= 0.9 - ERROR
    assert short < 0.9
    chances = plan_sampled(epsilon, sampling, **settings, canaries=[count, fewer]).chances
    assert (chances[0].noise >= 0.9, chances[1].noise < 0.9) == (True, True)
    slack = 0.1 if isinstance(sampling, FixedSize) else 0.02  # the binomial is wider than a fixed size's law
    assert chances[1].noise == pytest.approx(short, abs=ERROR + slack)
    assert sampling_leg(plan.sampling, claim, sampling, noise) == "PASS"
    if plan.sampling > 10:  # counts are integers, so the power is not monotone; the rate is known to 0.1 %
        fewer = int(0.98 * plan.sampling) - math.ceil(3 / (sampling.total_rounds * sampling.rate))
        assert sampling_leg(fewer, claim, sampling, noise) == "UNDERPOWERED"


def test_a_plan_for_a_looser_claim_counts_on_the_noise_that_the_claim_needs():
    """The sampling leg computes its epsilon with the least noise that the claim allows, which takes more canaries."""
    sampling, noise = Poisson(0.02, rounds=50), 4.0
    claim = Claim(1.2, sampling=sampling, noise_multiplier=noise, sampler_observed=True)
    plan = plan_sampled(claim.epsilon, sampling, dim=10_000, delta=1e-5, level=TEST_LEVEL, noise_multiplier=noise)
    sampled = SampledClaim.of(claim, delta=1e-5, rounds=50)
    assert sampled.required_noise < 0.5 * noise
    reading = SimpleNamespace(rounds=50, canaries=plan.sampling, picks=plan.sampling, rate=sampling.rate)
    assert sampled._sampler_power(reading, True).outcome == "PASS"


@pytest.mark.full
def test_planned_canaries_decide_real_audits():
    """Twelve honest runs, each with a sampler that picks every client and canary by a coin of its own."""
    sampling, dim, noise = Poisson(0.1, rounds=40), 1_500, 1.0
    epsilon = float(amplified_epsilon(noise, sampling, 1e-5))
    plan = plan_sampled(epsilon, sampling, dim=dim, delta=1e-5, level=TEST_LEVEL, noise_multiplier=noise)
    claim = Claim(epsilon, sampling=sampling, noise_multiplier=noise, sampler_observed=True)
    verdicts = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        audit = Audit(dim, canaries=plan.canaries, seed=bytes([seed]) * 16, delta=1e-5)
        for number in range(1, sampling.rounds + 1):
            present = np.flatnonzero(rng.random(plan.canaries) < sampling.rate)
            others = rng.binomial(200, sampling.rate) * np.ones(dim) / math.sqrt(dim)
            total = others + audit.updates(present, 1.0) + noise * rng.normal(size=dim)
            audit.observe_round(number, total, present=present, others=others, noise_std=noise, clip_norm=1.0)
        verdicts.append(audit.result(claim=claim).verdict)
    outcomes = [str(verdict.outcome) for verdict in verdicts]
    assert "VIOLATION" not in outcomes
    assert outcomes.count("PASS") >= 9, [verdict.reason for verdict in verdicts]  # fewer has probability 0.4 %


def test_no_canaries_confirm_a_claim_that_the_accountant_refutes():
    plan = plan_sampled(2.0, Poisson(0.1, rounds=100), dim=1_000, delta=1e-5, level=0.002, noise_multiplier=1.0)
    assert plan.exceeds
    assert (plan.canaries, plan.leg) == (None, "accounting")
    assert plan.accounted == pytest.approx(7.047, abs=0.01)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: plan_sampled(0.0, Poisson(0.1, 10), dim=1000, delta=1e-5, level=0.01), "claim_epsilon must be above 0"),
    (lambda: plan_sampled(1.0, Poisson(0.1, 10), dim=1000, delta=1e-5, level=0.01, canaries=[9]), "canaries must be at"),
    (lambda: plan_audit(9, dim=1000, delta=1e-6), "canaries must be at least 10"),
    (lambda: plan_audit(999, dim=1000, delta=1e-6), "at most dim - 2"),
    (lambda: canaries_to_detect(0.01, dim=1000, delta=1e-6), "no number of canaries in 1000 dimensions"),
    (lambda: canaries_for_power(0.0, delta=1e-6, level=0.01), "claim_epsilon must be above 0"),
    (lambda: canaries_for_power(1.0, delta=1e-6, level=0.01, factor=1.0), "factor must be above 1"),
    (lambda: power_against_claim(100, 1.0, delta=1e-6, level=0.0), "level must lie in"),
])  # fmt: skip
def test_bad_input_is_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
