"""Verdicts on amplified claims: the accounting, noise and sampling legs, alone and combined."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from coalmine import AuditResult, Claim, FixedSize, Poisson, RandomAllocation, Shuffled, amplified_epsilon
from coalmine.log.files import json_ready
from coalmine.log.rounds_file import RoundLog
from coalmine.measure.schedule import sampled_schedule
from coalmine.measure.settings import Settings
from coalmine.result.derivation import derive_result
from studies.exact_rounds import exact_round

CANARIES, UNOBSERVED, DIM, DELTA = 400, 400, 6_000, 1e-5
POISSON = Poisson(0.1, rounds=60)
seen_round = partial(exact_round, canaries=CANARIES, unobserved=UNOBSERVED, dim=DIM)


def claimed(scheme, noise=1.0, *, factor=1.0, observed=True, stated=True):
    epsilon = factor * float(amplified_epsilon(noise, scheme, DELTA))
    return Claim(epsilon, sampling=scheme, noise_multiplier=noise if stated else None, sampler_observed=observed)


def picked(scheme, seed=1):
    chosen = sampled_schedule(CANARIES, scheme, key=seed.to_bytes(32, "little"))
    return [chosen(number) for number in range(1, scheme.total_rounds + 1)]


def audited(claim, present, *, noise=1.0, stated=None, cohorts=None, seed=3, settings=None):
    rng, log = np.random.default_rng(seed), RoundLog()
    for number, canaries in enumerate(present, start=1):
        size = None if cohorts is None else int(cohorts[number - 1])
        told = noise if stated is None else stated
        log.append(seen_round(number, canaries, noise, told, rng, size))
    settings = settings or Settings(dim=DIM, canaries=CANARIES, unobserved=UNOBSERVED, delta=DELTA)
    return derive_result(log, settings, claim=claim)


def outcomes(result):
    return {name: str(leg.outcome) for name, leg in result.legs.items()}


@pytest.fixture(scope="module")
def honest():
    return audited(claimed(POISSON), picked(POISSON))


def test_honest_sampling_passes_on_three_legs(honest):
    assert outcomes(honest) == {"accounting": "PASS", "noise": "PASS", "sampling": "PASS"}
    assert honest.verdict.outcome == "PASS"
    assert honest.verdict.code == "legs"
    assert honest.headline.rung == "unknown-round"
    low, high = honest.interval
    assert low < honest.claim.epsilon < high
    assert honest["unknown-round"].lower_bound < honest.claim.epsilon
    assert list(honest.adversaries) == ["all-iterates", "unknown-round", "known-round", "known-others"]


def test_the_estimate_is_the_accountants_epsilon_at_the_measured_noise(honest):
    """Oracle: the mean score of present canaries is 1/z̃, and the accountant's epsilon is monotone in z̃."""
    unknown = honest["unknown-round"]
    measured = 1 / honest.legs["noise"].finding.measured_noise
    assert unknown.epsilon == pytest.approx(float(amplified_epsilon(1 / measured, POISSON, DELTA)), rel=1e-6)


def test_result_survives_json_and_states_each_leg(honest):
    again = AuditResult.from_dict(json.loads(json.dumps(json_ready(honest.to_dict()))))
    assert again.legs == honest.legs
    assert again.claim == honest.claim
    assert again["unknown-round"].headline.fit == honest["unknown-round"].headline.fit
    text = honest.details()
    assert "accounting: PASS: dp-accounting PLD gives an epsilon of" in text
    assert "Cohort sizes were not given" in text
    assert "sampler: checked" in text


def test_an_unobserved_sampler_is_underpowered():
    result = audited(claimed(POISSON, observed=False), picked(POISSON))
    assert outcomes(result) == {"accounting": "PASS", "noise": "PASS", "sampling": "UNDERPOWERED"}
    assert result.verdict.outcome == "UNDERPOWERED"
    assert result.verdict.part == "sampling"
    assert "sampler_observed=True" in result.verdict.reason


def test_the_noise_leg_detects_missing_noise():
    for factor in (1.3, 2.0):
        result = audited(claimed(POISSON), picked(POISSON), noise=1 / factor, stated=1.0)
        assert result.verdict.outcome == "VIOLATION"
        assert result.verdict.part == "noise"


def test_the_accounting_leg_rejects_an_epsilon_for_fewer_rounds():
    half = Poisson(0.1, rounds=30)
    for claim in (claimed(half), replace(claimed(POISSON), epsilon=claimed(half).epsilon)):
        result = audited(claim, picked(POISSON))
        assert result.verdict.outcome == "VIOLATION"
        assert result.verdict.part == "accounting"


def test_the_noise_multiplier_defaults_to_the_one_the_claim_implies():
    result = audited(claimed(POISSON, stated=False), picked(POISSON))
    assert result.verdict.outcome == "PASS"
    assert result.legs["accounting"].finding.claimed_noise == pytest.approx(1.0, rel=1e-3)


def test_a_loose_claim_allows_less_noise_than_stated():
    """Twice the accountant's epsilon is claimed: noise of 0.9 still satisfies it, noise of 0.3 does not."""
    loose = claimed(POISSON, factor=2.0)
    assert audited(loose, picked(POISSON), noise=0.9).verdict.outcome == "PASS"
    assert audited(loose, picked(POISSON), noise=0.3).verdict.outcome == "VIOLATION"


def test_the_sampling_leg_detects_faster_sampling():
    result = audited(claimed(Poisson(0.03, rounds=60)), picked(POISSON))
    assert result.verdict.outcome == "VIOLATION"
    assert result.verdict.part == "sampling"
    assert result.legs["noise"].outcome == "PASS"


def test_slower_sampling_passes():
    result = audited(claimed(POISSON), picked(Poisson(0.05, rounds=60)))
    assert result.legs["sampling"].outcome == "PASS"
    assert result.verdict.outcome == "PASS"


def test_canaries_that_share_all_rounds_are_a_violation():
    rng = np.random.default_rng(4)
    present = [np.arange(CANARIES) if coin else [] for coin in rng.random(60) < 0.1]
    result = audited(claimed(POISSON), present)
    assert result.verdict.outcome == "VIOLATION"
    assert result.verdict.part == "sampling"
    assert result["unknown-round"].lower_bound == 0  # scores of canaries sampled in groups are not independent
    assert any("no lower bound" in warning for warning in result["unknown-round"].headline.warnings)


def test_shuffling_called_poisson_never_passes():
    """With cohort sizes, the interval's lower end refutes the claim; without them it could be random allocation."""
    scheme = Poisson(1 / 60, rounds=60)
    rng = np.random.default_rng(5)
    cohorts = np.array_split(rng.permutation(60 * 50), 60)
    present = [np.sort(cohort[cohort < CANARIES]) for cohort in cohorts]
    sizes = np.full(60, 50)
    known = audited(claimed(scheme), present, cohorts=sizes)
    assert known.verdict.outcome == "VIOLATION"
    assert known.verdict.part == "sampling"
    assert "shuffling" in known.verdict.finding.seen_scheme
    assert audited(claimed(scheme), present).legs["sampling"].outcome == "UNDERPOWERED"


def test_no_amplified_claim_passes_on_shuffling():
    scheme = Shuffled(60)
    accounted = amplified_epsilon(1.0, scheme, DELTA)
    present = picked(scheme)
    between = Claim((accounted.low + accounted.high) / 2, sampling=scheme, noise_multiplier=1.0, sampler_observed=True)
    result = audited(between, present)
    assert result.legs["accounting"].outcome == "UNDERPOWERED"
    assert result.verdict.outcome == "UNDERPOWERED"
    below = replace(between, epsilon=0.5 * accounted.low)
    assert audited(below, present).verdict.outcome == "VIOLATION"


@pytest.mark.full
def test_fixed_size_called_poisson_is_a_violation_and_passes_restated():
    """With all others at -1 the target leaves a gap: fixed cohorts then give away more than Poisson's epsilon."""
    fixed = FixedSize(400, 4_000, rounds=60)
    present, sizes = picked(fixed), np.full(60, 400)
    result = audited(claimed(POISSON), present, cohorts=sizes)
    assert result.verdict.outcome == "VIOLATION"
    assert result.verdict.part == "sampling"
    assert result.verdict.finding.epsilon_range[0] > 1.5 * result.verdict.finding.claimed_epsilon
    assert "fixed-size sampling of 400 of" in result.verdict.finding.seen_scheme
    restated = Claim(
        float(amplified_epsilon(1.0, fixed, DELTA)), sampling=fixed, noise_multiplier=1.0, sampler_observed=True
    )
    assert audited(restated, present, cohorts=sizes).verdict.outcome == "PASS"


@pytest.mark.slow
def test_random_allocation_passes():
    scheme = RandomAllocation(10, 6)
    assert audited(claimed(scheme), picked(scheme)).verdict.outcome == "PASS"


@pytest.mark.full
def test_the_same_order_in_every_epoch_is_a_violation():
    scheme = RandomAllocation(10, 6)
    claim = claimed(scheme)
    place = np.random.default_rng(6).integers(10, size=CANARIES)
    result = audited(claim, [np.flatnonzero(place == number % 10) for number in range(60)])
    assert result.verdict.outcome == "VIOLATION"
    assert result.verdict.part == "sampling"


def test_unknown_round_requires_others_and_independent_noise():
    settings = Settings(dim=DIM, canaries=CANARIES, unobserved=UNOBSERVED, delta=DELTA, rounds=60, sampling=POISSON)
    log, rng = RoundLog(), np.random.default_rng(7)
    for number, canaries in enumerate(picked(POISSON), start=1):
        item = seen_round(number, canaries, 1.0, 1.0, rng)
        log.append(replace(item, residual_cosines=None, residual_norm=None, residual_rest=None))
    assert "unknown-round" not in derive_result(log, settings, claim=claimed(POISSON)).adversaries


def test_without_a_claim_the_stated_noise_is_used():
    settings = Settings(dim=DIM, canaries=CANARIES, unobserved=UNOBSERVED, delta=DELTA, rounds=60, sampling=POISSON)
    result = audited(None, picked(POISSON), settings=settings)
    assert result["unknown-round"].headline.fit.p_value > 0.001
    assert result.verdict.code == "no claim"
    assert result.legs == {}


def test_scores_of_canaries_that_were_never_sampled_count():
    """At q = 0.02 most canaries are absent from a round, but they still belong to the sample."""
    scheme = Poisson(0.02, rounds=1)
    result = audited(claimed(scheme), picked(scheme))
    assert result["unknown-round"].headline.canaries == CANARIES
    assert result["unknown-round"].lower_bound <= float(amplified_epsilon(1.0, scheme, DELTA))


def test_too_few_sampled_canaries_are_underpowered():
    scheme = Poisson(0.002, rounds=5)
    result = audited(claimed(scheme), picked(scheme, seed=8))
    assert result.legs["sampling"].outcome == "UNDERPOWERED"
    assert "too few" in result.legs["sampling"].reason


def test_no_noise_at_all_is_a_violation():
    result = audited(claimed(POISSON), picked(POISSON), noise=1e-6, stated=1.0)
    assert result.verdict.outcome == "VIOLATION"


def test_a_loose_claim_does_not_excuse_less_noise_and_faster_sampling_together():
    """Each alone would be harmless: epsilon is that of noise 1 where noise 2 is claimed, and the rate is doubled."""
    claim = Claim(claimed(POISSON).epsilon, sampling=POISSON, noise_multiplier=2.0, sampler_observed=True)
    result = audited(claim, picked(Poisson(0.2, rounds=60)), noise=1.05)
    assert result.legs["sampling"].outcome == "UNDERPOWERED"
    assert result.verdict.outcome != "PASS"


def test_unobserved_rounds_prevent_a_pass():
    present = picked(POISSON)[:20]
    result = audited(claimed(POISSON), present)
    assert result.legs["noise"].code == "unobserved"
    assert result.verdict.outcome == "UNDERPOWERED"
    assert "40 of the rounds" in result.verdict.reason
    shorter = Poisson(0.1, rounds=20)
    assert audited(claimed(shorter), present).verdict.outcome == "PASS"


def test_rounds_that_start_late_are_not_counted_twice():
    rng, log = np.random.default_rng(9), RoundLog()
    for number, canaries in enumerate(picked(POISSON), start=101):
        log.append(seen_round(number, canaries, 1.0, 1.0, rng))
    settings = Settings(dim=DIM, canaries=CANARIES, unobserved=UNOBSERVED, delta=DELTA)
    result = derive_result(log, settings, claim=claimed(POISSON))
    assert result.legs["accounting"].outcome == "PASS"
    assert result.verdict.outcome == "UNDERPOWERED"


def test_dividing_by_the_realised_cohort_size_prevents_a_pass():
    """Poisson accounting assumes a fixed divisor; otherwise a client's contribution reveals the cohort size."""
    rng, log, present = np.random.default_rng(10), RoundLog(), picked(POISSON)
    for number, canaries in enumerate(present, start=1):
        size = int(rng.binomial(2_000, 0.1)) + len(canaries)
        item = seen_round(number, canaries, 1.0, 1.0, rng, size)
        lengths = {name: getattr(item, name) / size for name in ("norm", "rest", "residual_norm", "residual_rest")}
        log.append(replace(item, **lengths, clip_norm=1 / size, noise_std=1 / size))
    settings = Settings(dim=DIM, canaries=CANARIES, unobserved=UNOBSERVED, delta=DELTA)
    result = derive_result(log, settings, claim=claimed(POISSON))
    assert result.legs["sampling"].code == "divisor"
    assert result.verdict.outcome == "UNDERPOWERED"


def test_cohorts_that_repeat_once_are_not_treated_as_fixed_cohorts():
    """The second half repeats the first: epsilon is that of 30 rounds with noise 1/√2, and a claim of it is not refuted."""
    half = Poisson(0.1, rounds=30)
    true = float(amplified_epsilon(1 / math.sqrt(2), half, DELTA))
    claim = Claim(1.02 * true, sampling=POISSON, noise_multiplier=1.0, sampler_observed=True)
    assert audited(claim, picked(half) * 2).legs["sampling"].outcome != "VIOLATION"


def test_a_constant_cohort_size_does_not_exclude_fixed_cohorts():
    sizes = [None] * 60
    rng, log = np.random.default_rng(11), RoundLog()
    for number, canaries in enumerate(picked(POISSON), start=1):
        log.append(seen_round(number, canaries, 1.0, 1.0, rng, 400 if number == 1 else sizes[number - 1]))
    settings = Settings(dim=DIM, canaries=CANARIES, unobserved=UNOBSERVED, delta=DELTA)
    result = derive_result(log, settings, claim=claimed(POISSON))
    assert "fixed cohorts cannot be excluded" in result.legs["sampling"].reason


@pytest.mark.parametrize("epsilon", [1e-3, pytest.param(1e3, marks=pytest.mark.full), 1e20, 1e99])
def test_absurd_claims_have_a_verdict(epsilon):
    claim = Claim(epsilon, sampling=POISSON, sampler_observed=True)
    assert audited(claim, picked(POISSON)).verdict.outcome == ("VIOLATION" if epsilon < 1 else "PASS")
