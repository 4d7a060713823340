"""Noise that varies from round to round, as stated: what composes, what is refuted, and when the alarm is raised."""

import math
from dataclasses import replace

import numpy as np
import pytest

from coalmine import Claim, Poisson, RandomAllocation, Shuffled, amplified_epsilon, mechanism_epsilon, mechanism_noise
from coalmine.estimators.amplification import merged_strengths
from coalmine.measure.settings import Settings
from coalmine.verdict.claim import LARGEST_CLAIM
from coalmine.verdict.round_limits import composed_epsilon
from studies.exact_rounds import DELTA, audited_rounds, composed, pld_epsilon

UNOBSERVED = 200


def audited(stated, claim, *, canaries, seed, true=None, present=None, presentations=None, watched=False):
    """A run whose rounds state this noise, and have the noise `true`; every canary in every round by default."""
    rng, rounds = np.random.default_rng(seed), len(stated)
    present = [np.arange(canaries)] * rounds if present is None else present
    settings = Settings(dim=4_000 + 10 * canaries, canaries=canaries, unobserved=UNOBSERVED, delta=DELTA)
    sizes = None
    if presentations:
        settings = replace(settings, rounds=rounds, presentations=(presentations,))
    else:
        sizes = [picked.size + int(rng.binomial(200, 0.1)) for picked in present]
    true = stated if true is None else true
    return audited_rounds(present, true, stated, settings, rng, claim, sizes, watched=watched)


def pld(stated, rate):
    return pld_epsilon(tuple(stated.tolist()), rate)


SHRINKING, GROWING = np.linspace(1.5, 0.7, 10), np.linspace(0.9, 1.2, 20)
PERIODIC, ONE_OFF = np.tile([0.8, 1.6], 8), np.where(np.arange(15) == 7, 0.6, 1.3)
SCHEDULES = [(SHRINKING, 100), (np.linspace(1.2, 0.9, 20), 300), (np.linspace(2, 0.5, 20), 100), (GROWING, 60)]
SCHEDULES += [(PERIODIC, 100), (ONE_OFF, 100)]


@pytest.mark.parametrize(("stated", "canaries"), SCHEDULES)
def test_an_honest_schedule_passes_on_its_composed_epsilon(stated, canaries):
    """At most 1 % of true claims are refuted; here none of 12, and no alarm is raised."""
    claim = Claim(composed(stated), participations=len(stated))
    results = [
        audited(stated, claim, canaries=canaries, seed=seed, presentations=len(stated), watched=True)
        for seed in range(12)
    ]
    assert [str(result.verdict.outcome) for result in results].count("PASS") >= 11
    assert not any(result.verdict.outcome == "VIOLATION" for result in results)
    assert not any(result.alarm for result in results)


@pytest.mark.parametrize(("stated", "canaries"), SCHEDULES)
def test_less_noise_than_the_schedule_states_is_refuted(stated, canaries):
    claim = Claim(composed(stated), participations=len(stated))
    for seed in range(3):
        result = audited(stated, claim, canaries=canaries, seed=seed, true=stated / 1.4, presentations=len(stated))
        assert result.verdict.outcome == "VIOLATION"


def test_known_others_measures_the_composed_epsilon_of_a_schedule():
    claim = Claim(composed(SHRINKING), participations=10)
    estimates = [
        audited(SHRINKING, claim, canaries=300, seed=seed, presentations=10)["known-others"].epsilon
        for seed in range(12)
    ]
    assert np.median(estimates) == pytest.approx(composed(SHRINKING), rel=0.03)


def test_a_client_in_one_round_is_judged_by_the_round_with_the_least_noise():
    """k canaries, one round each: the claim is about the round with noise 0.7, and other rounds may state more."""
    stated, canaries = np.repeat([0.7, 1.4], 5), 1_000
    rounds = np.arange(canaries) % 10
    present = [np.flatnonzero(rounds == number) for number in range(10)]
    claim = Claim(float(mechanism_epsilon(0.7, delta=DELTA)), participations=1)
    honest = [audited(stated, claim, canaries=canaries, seed=s, present=present, presentations=1) for s in range(6)]
    assert [str(result.verdict.outcome) for result in honest] == ["PASS"] * 6
    strong = np.where(stated < 1, 0.45, stated)
    assert audited(stated, claim, canaries=canaries, seed=1, true=strong, present=present).verdict.outcome != "PASS"
    result = audited(stated, claim, canaries=canaries, seed=1, true=strong, present=present, presentations=1)
    assert result.verdict.outcome == "VIOLATION"
    looser = Claim(claim.epsilon / 1.2, participations=1)
    result = audited(stated, looser, canaries=canaries, seed=1, present=present, presentations=1)
    assert (result.verdict.outcome, result.verdict.code) == ("VIOLATION", "stated")


def test_rounds_with_more_noise_than_the_claim_needs_may_have_less_than_they_state():
    """Half of the rounds state 1.4 and have 1.1, but a client is in one round, and the claim allows 0.7."""
    stated, canaries = np.repeat([0.7, 1.4], 5), 1_000
    present = [np.flatnonzero(np.arange(canaries) % 10 == number) for number in range(10)]
    claim = Claim(float(mechanism_epsilon(0.7, delta=DELTA)), participations=1)
    true = np.where(stated > 1, 1.1, stated)
    for seed in range(4):
        result = audited(stated, claim, canaries=canaries, seed=seed, true=true, present=present, presentations=1)
        assert result.verdict.outcome != "VIOLATION"


def picks(rate, rounds, canaries, seed):
    rng = np.random.default_rng(1_000 + seed)
    return [np.flatnonzero(rng.random(canaries) < rate) for _ in range(rounds)]


@pytest.mark.full
@pytest.mark.parametrize("stated", [np.linspace(1.5, 0.8, 60), np.tile([2.0, 0.9], 30)])
def test_a_sampled_schedule_passes_on_the_accountants_epsilon(stated):
    claim = Claim(pld(stated, 0.1), sampling=Poisson(0.1, 60), sampler_observed=True)
    covered = []
    for seed in range(8):  # of 8 intervals of 95 %, 6 or more cover in 99.4 % of tries
        result = audited(stated, claim, canaries=300, seed=seed, present=picks(0.1, 60, 300, seed), watched=seed == 0)
        assert result.verdict.outcome == "PASS"
        assert result.alarm is None
        assert result["unknown-round"].headline.fit.p_value > 1e-3
        low, high = result["unknown-round"].interval
        covered.append(low <= claim.epsilon <= high)
    assert sum(covered) >= 6
    result = audited(stated, claim, canaries=300, seed=1, true=stated / 1.5, present=picks(0.1, 60, 300, 1))
    assert result.verdict.outcome == "VIOLATION"


def once_an_epoch(scheme, seed):
    """Each of 300 canaries in one round of each epoch."""
    rng, rounds = np.random.default_rng(2_000 + seed), scheme.rounds
    places = rng.integers(rounds, size=(scheme.epochs, 300))
    if isinstance(scheme, Shuffled):
        places = np.array([rng.permutation(np.arange(300) % rounds) for _ in range(scheme.epochs)])
    return [np.flatnonzero(row == number) for row in places for number in range(rounds)]


SHRINKING_20 = np.linspace(1.2, 0.6, 20)


@pytest.mark.parametrize(
    ("stated", "scheme"),
    [
        pytest.param(SHRINKING_20, RandomAllocation(20), marks=pytest.mark.full),
        pytest.param(np.tile([0.7, 1.2], 20), RandomAllocation(20, 2), marks=pytest.mark.full),
        (SHRINKING_20, Shuffled(20)),
        (np.where(np.arange(20) == 7, 0.5, 0.8), Shuffled(10, 2)),
    ],
)
def test_a_schedule_under_other_sampling_is_judged_by_a_range(stated, scheme):
    """A claim above the range may PASS, one below is refuted, and within it nothing is decided but missing noise."""
    reference = float(np.median(stated))
    strengths = tuple((reference / float(noise), 1) for noise in stated)
    epsilon = amplified_epsilon(reference, replace(scheme, strengths=strengths), DELTA)
    above, inside, below = 1.01 * epsilon.high, math.sqrt(epsilon.low * epsilon.high), 0.97 * epsilon.low
    present = once_an_epoch(scheme, 0)

    def verdict(claimed, true=stated):
        claim = Claim(claimed, sampling=scheme, sampler_observed=True)
        return audited(stated, claim, canaries=300, seed=0, true=true, present=present).verdict

    honest = [verdict(claimed) for claimed in (above, inside, below)]
    assert honest[0].outcome == "PASS"
    assert (honest[1].outcome, honest[1].code) == ("UNDERPOWERED", "range")
    assert (honest[2].outcome, honest[2].code) == ("VIOLATION", "stated")
    assert verdict(inside, true=stated / 3).outcome == "VIOLATION"


@pytest.mark.parametrize("kind", [pytest.param(RandomAllocation, marks=pytest.mark.full), Shuffled])
def test_the_limit_of_one_round_is_not_taken_for_that_of_all(kind):
    """A client is in this round of 20 with probability 1/20; of the others nothing is known."""
    limits = {"delta": DELTA, "times": 1, "exposure": 1.0, "sampling": kind(20)}
    one, few, every = (composed_epsilon(np.full(count, 1 / 0.6), **limits) for count in (1, 5, 20))
    assert 0 < one < few < every
    ends = composed_epsilon(np.array([1 / 0.6, *[1.0] * 19]), **limits), composed_epsilon(np.ones(20), **limits)
    assert max(one, ends[1]) < ends[0] < every


def test_three_rounds_with_little_stated_noise_refute_a_sampled_claim_without_chance():
    """The mean of z⁻² hides them: a sampled epsilon is convex in it."""
    stated = np.where(np.isin(np.arange(60), [5, 20, 40]), 0.6, 1.0)
    claim = Claim(
        float(amplified_epsilon(1.0, Poisson(0.1, 60), DELTA)), sampling=Poisson(0.1, 60), sampler_observed=True
    )
    for seed in range(3):
        result = audited(stated, claim, canaries=40, seed=seed, present=picks(0.1, 60, 40, seed))
        assert (result.verdict.outcome, result.verdict.code) == ("VIOLATION", "stated")
        assert result.verdict.finding.epsilon == pytest.approx(pld(stated, 0.1), rel=1e-3)


@pytest.mark.parametrize(
    "stated",
    [
        pytest.param(np.linspace(1.5, 0.8, 60), marks=pytest.mark.full),
        pytest.param(np.linspace(1, 4, 60), marks=pytest.mark.full),
        np.tile([2.0, 0.9], 30),
    ],
)
def test_the_epsilon_of_a_schedule_is_dp_accountings(stated):
    reference = float(np.median(stated))
    scheme = Poisson(0.1, 60, strengths=tuple((float(reference / noise), 1) for noise in stated))
    epsilon = amplified_epsilon(reference, scheme, DELTA)
    assert epsilon.low <= pld(stated, 0.1) * 1.0005
    assert epsilon.high >= pld(stated, 0.1) * 0.9995
    assert epsilon.high - epsilon.low < 0.01 * epsilon.high


def test_merged_strengths_keep_their_number_and_mean_square():
    strengths = tuple((float(value), 2) for value in np.geomspace(0.2, 3, 200))
    merged, error = merged_strengths(strengths)
    assert len(merged) <= 32
    assert error < 0.05
    assert sum(count for _, count in merged) == 400
    total = sum(count * value**2 for value, count in strengths)
    assert sum(count * value**2 for value, count in merged) == pytest.approx(total)


def test_without_a_claim_nothing_passes_and_missing_noise_is_named():
    stated = np.full(10, 1.0)
    honest = audited(stated, None, canaries=200, seed=1, presentations=10)
    assert (honest.verdict.outcome, honest.verdict.code) == ("UNDERPOWERED", "no claim")
    assert "claim=" in honest.verdict.reason
    broken = audited(stated, None, canaries=200, seed=1, true=stated / 2, presentations=10)
    assert (broken.verdict.outcome, broken.verdict.code) == ("VIOLATION", "less noise")


@pytest.mark.parametrize("stated", [SHRINKING, PERIODIC])
def test_the_noise_that_a_claim_needs_follows_from_the_claim_alone(stated):
    claim = Claim(composed(stated) / 1.3, participations=len(stated))
    verdict = audited(stated, claim, canaries=60, seed=1, presentations=len(stated)).verdict
    assert (verdict.outcome, verdict.code) == ("VIOLATION", "stated")
    needed = float(mechanism_noise(claim.epsilon, delta=DELTA, participations=len(stated)))
    assert verdict.finding.claimed_noise == pytest.approx(needed)
    assert verdict.finding.measured_noise == pytest.approx(1 / math.sqrt(np.mean(stated**-2.0)))
    assert f"the claim needs {needed:.4g}" in verdict.reason


def test_the_largest_claim_is_judged_like_any_other():
    stated = np.full(3, 1.0)
    result = audited(stated, Claim(LARGEST_CLAIM, participations=3), canaries=100, seed=1, presentations=3)
    assert result.verdict.outcome != "VIOLATION"
    with pytest.raises(ValueError, match=r"claim must be at most 1e\+99, got 1e\+100"):
        Claim(1e100)


def test_noise_that_rounds_do_not_state_is_taken_to_be_equal_and_a_note_says_so():
    claim = Claim(composed(SHRINKING), participations=10)
    settings = Settings(dim=5_000, canaries=100, unobserved=UNOBSERVED, delta=DELTA, rounds=10, presentations=(10,))
    said = [None, *SHRINKING.tolist()[1:]]
    present = [np.arange(100)] * 10
    silent = audited_rounds(present, SHRINKING.tolist(), said, settings, np.random.default_rng(0), claim)
    note = "the noise is taken to be equal in all rounds, as 1 round did not state it"
    assert any(note in text for text in silent.notes)
    assert silent.verdict.outcome != "PASS"
    told = audited(SHRINKING, claim, canaries=100, seed=0, presentations=10)
    assert not any(note in text for text in told.notes)


@pytest.mark.parametrize("stated", [np.array([0.41, 2.27, 0.41]), np.tile([0.54, 2.0], 4)])
def test_a_round_with_spare_noise_may_lack_some_beside_rounds_without(stated):
    """The difference of two rounds has the noise of both: its lack says nothing of the round that states less."""
    claim = Claim(composed(stated[:1]), participations=1)
    true = np.where(np.arange(len(stated)) == 1, 0.6 * stated, stated)
    present = [np.flatnonzero(np.arange(300) % len(stated) == number) for number in range(len(stated))]
    settings = {"canaries": 300, "present": present, "presentations": 1, "watched": True}
    for seed in range(5):
        result = audited(stated, claim, seed=seed, true=true, **settings)
        assert any(gauge.name == "difference" and gauge.status == "low" for gauge in result.gauges)
        assert result.verdict.outcome != "VIOLATION"
        assert result.alarm is None
        halved = audited(stated, claim, seed=seed, true=stated / 2, **settings)
        assert halved.verdict.outcome == "VIOLATION"


def test_the_least_noise_of_one_round_is_not_taken_for_that_of_other_flagged_rounds():
    """All twenty rounds have too little noise, one of them far too little. The claim is what they compose to."""
    stated, true = np.ones(20), np.where(np.arange(20) == 7, 0.3, 0.9)
    for seed in range(5):
        settings = {"canaries": 60, "seed": seed, "true": true, "presentations": 20, "watched": True}
        holds = audited(stated, Claim(1.01 * composed(true), participations=20), **settings)
        assert sum(len(gauge.flagged) == 20 for gauge in holds.gauges) >= 1
        assert holds.verdict.outcome != "VIOLATION"
        assert holds.alarm is None
        assert (
            audited(stated, Claim(0.85 * composed(true), participations=20), **settings).verdict.outcome == "VIOLATION"
        )


def any_schedule(rng):
    """Noise of 1 to 55 rounds that grows, shrinks, oscillates, changes once, hardly changes, or has two scales."""
    rounds = int(rng.choice([1, 2, 3, 5, 8, 13, 21, 34, 55]))
    low, high = np.sort(rng.uniform(0.3, 4, size=2))
    number = np.arange(rounds)
    wave = (np.sin(number * rng.uniform(0.3, 3)) + 1) / 2
    return [
        np.linspace(low, high, rounds),
        np.linspace(high, low, rounds),
        low + (high - low) * wave,
        np.where(number == rng.integers(rounds), low, high),
        np.where(number < rounds * rng.random(), low, high),
        rng.uniform(low, high, size=rounds),
        high * (1 + 1e-5 * rng.random(rounds)),
        np.where(rng.random(rounds) < 0.3, low, 20 * high),
    ][int(rng.integers(8))]


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(0, 20), range(20, 40)], ids=str)
def test_random_schedules_are_never_refuted_and_missing_noise_never_passes(seeds):
    """Any number of rounds and canaries, each canary in some of the rounds, and the claim is for those with least noise."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        stated = any_schedule(rng)
        rounds, canaries = len(stated), int(rng.choice([12, 30, 100, 400]))
        times = int(rng.integers(1, rounds + 1))
        chosen = np.array([rng.permutation(rounds) < times for _ in range(canaries)])
        weakest = np.sort(stated)[:times]
        settings = {"canaries": canaries, "present": [np.flatnonzero(row) for row in chosen.T], "presentations": times}
        claim = Claim(composed(weakest), participations=times)
        honest = audited(stated, claim, seed=seed, watched=True, **settings)
        assert honest.verdict.outcome != "VIOLATION", seed
        assert honest.alarm is None, seed
        for true in (0.55 * stated, np.where(stated <= weakest[-1], 0.55 * stated, stated)):
            broken = audited(stated, claim, seed=10_000 + seed, true=true, **settings)
            assert broken.verdict.outcome != "PASS", seed
