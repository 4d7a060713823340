"""Claims: which ones are valid, and that they survive a round trip through JSON."""

import json
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant

from coalmine import (
    Audit,
    Claim,
    FixedSize,
    Poisson,
    RandomAllocation,
    Shuffled,
    mechanism_epsilon,
    mechanism_noise,
)
from coalmine.estimators.planning import power_against_claim
from coalmine.measure.settings import Settings
from coalmine.verdict.rung_claim import TEST_LEVEL
from studies.exact_rounds import DELTA, audited_rounds

SCHEMES = [Poisson(0.1, rounds=100), RandomAllocation(20, 3), Shuffled(20), FixedSize(10, 200, rounds=30)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_claim_survives_json(scheme):
    claim = Claim(7.05, sampling=scheme, noise_multiplier=1.0, sampler_observed=True)
    assert Claim.from_dict(json.loads(json.dumps(claim.to_dict()))) == claim
    assert claim.amplified
    assert claim.accounting == "amplified"


def test_a_number_is_a_mechanism_claim():
    claim = Claim.of(3)
    assert claim == Claim(3.0)
    assert not claim.amplified


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": 0}, "claim must be above 0, got 0"),
        ({"epsilon": 1, "noise_multiplier": 1.0}, "noise_multiplier belongs to a claim amplified by sampling"),
        ({"epsilon": 1, "sampler_observed": True}, "sampler_observed belongs to a claim amplified by sampling"),
        (
            {"epsilon": 1, "sampling": 0.1},
            "sampling must be one of Poisson, RandomAllocation, Shuffled, FixedSize, got 0.1",
        ),
        (
            {"epsilon": 1, "sampling": SCHEMES[0], "participations": 3},
            "participations belongs to a claim about known rounds",
        ),
        ({"epsilon": 1, "sampling": SCHEMES[0], "sensitivity": 3}, "sensitivity belongs to a claim about known rounds"),
        (
            {"epsilon": 1, "sampling": SCHEMES[0], "noise_multiplier": 1e-20},
            "noise_multiplier must lie between 1e-06 and",
        ),
        ({"epsilon": 1, "sampling": SCHEMES[0], "noise_multiplier": -1}, "noise_multiplier must be above 0, got -1"),
        (
            {"epsilon": 1, "sampling": SCHEMES[0], "sampler_observed": 1},
            "sampler_observed must be True or False, got 1",
        ),
        ({"epsilon": 1, "counts_sampling": 0}, "counts_sampling must be True, False or None, got 0"),
        ({"epsilon": 1, "unit": "row\nPASS"}, "unit must be a word such as row"),
        ({"epsilon": 1, "unit": "x" * 61}, "unit must be a word such as row"),
        ({"epsilon": 1, "adjacency": "swap"}, "adjacency must be one of add or remove one, zero out one, replace one"),
        (
            {"epsilon": 1, "sampling": SCHEMES[1], "adjacency": "replace one"},
            "adjacency must be 'add or remove one' or 'zero out one' for random allocation",
        ),
        (
            {"epsilon": 1, "sampling": SCHEMES[2], "adjacency": "add or remove one"},
            "adjacency must be 'zero out one' for shuffling",
        ),
        (
            {"epsilon": 1, "sampling": SCHEMES[3], "adjacency": "zero out one"},
            "adjacency must be 'replace one' for fixed-size sampling",
        ),
    ],
)
def test_contradictory_claims_are_rejected(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Claim(**given)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_an_audit_commits_to_its_scheme_and_follows_it(scheme, tmp_path):
    claim = Claim(5.0, sampling=scheme, noise_multiplier=1.0)
    made = {"canaries": 100, "seed": b"a long enough secret", "delta": 1e-5, "sampling": scheme, "claim": claim}
    with Audit(1_000, directory=tmp_path / "run", **made) as audit:
        assert audit.settings.rounds == scheme.total_rounds
        first = [audit.canaries_in_round(t).tolist() for t in range(1, scheme.total_rounds + 1)]
        commitment = audit.commitment
    with Audit(1_000, directory=tmp_path / "run", **made) as again:
        assert again.commitment == commitment
        assert [again.canaries_in_round(t).tolist() for t in range(1, scheme.total_rounds + 1)] == first
    other = made | {"sampling": Poisson(0.2, rounds=100)}
    with pytest.raises(ValueError, match="sampling"):
        Audit(1_000, directory=tmp_path / "run", **other)


@pytest.mark.parametrize("scheme", SCHEMES[1:3], ids=str)
def test_every_canary_takes_part_once_per_epoch(scheme):
    audit = Audit(1_000, canaries=100, seed=b"a long enough secret", delta=1e-5, sampling=scheme)
    rows = [audit.canaries_in_round(t) for t in range(1, scheme.total_rounds + 1)]
    for epoch in range(scheme.epochs):
        shown = [canary for row in rows[epoch * 20 : (epoch + 1) * 20] for canary in row]
        assert sorted(shown) == list(range(100))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounds": 50}, "rounds must be the 100 of the sampling scheme, got 50"),
        ({"presentations": 3}, "presentations must be omitted if sampling is given"),
        ({"sampling": "poisson"}, "sampling must be one of"),
    ],
)
def test_settings_that_contradict_the_scheme_are_rejected(given, message):
    made = {"canaries": 100, "seed": b"a long enough secret", "delta": 1e-5, "sampling": Poisson(0.1, rounds=100)}
    with pytest.raises((ValueError, TypeError), match=message):
        Audit(1_000, **made | given)


def test_participants_must_include_the_canaries():
    audit = Audit(100, canaries=10, seed=b"a long enough secret", delta=1e-5)
    with pytest.raises(ValueError, match="participants must count the 3 canaries of the round too, got 2"):
        audit.observe_round(1, audit.updates([0, 1, 2], 1.0), present=[0, 1, 2], participants=2)


def test_a_claim_at_another_delta_is_refused_before_round_1(tmp_path):
    with pytest.raises(ValueError, match="the claim's delta must be the audit's, 1e-06, got 1e-05"):
        Audit(400, canaries=20, seed=1, delta=1e-6, directory=tmp_path / "run", claim=Claim(3.0, delta=1e-5))
    assert not (tmp_path / "run").exists()
    audit = Audit(400, canaries=20, seed=1, delta=1e-6)
    with pytest.raises(ValueError, match="the claim's delta must be the audit's"):
        audit.result(claim=Claim(3.0, delta=1e-5))


def test_a_bare_number_counts_the_sampling_that_the_audit_knows():
    audit = Audit(400, canaries=20, seed=1, delta=1e-6, sampling=Poisson(0.1, rounds=8), claim=3.0)
    rng = np.random.default_rng(0)
    for number in range(1, 7):
        noise = rng.normal(size=400)
        audit.observe_round(number, noise, present=[], others=np.zeros(400), noise_std=1.0, clip_norm=1.0)
    result = audit.result()
    assert result.claim == Claim(3.0, sampling=Poisson(0.1, rounds=6))
    assert "counting Poisson sampling with probability 0.1 in 6 rounds" in str(result)
    assert result.verdict.outcome == "UNDERPOWERED"
    explicit = audit.result(claim=Claim.mechanism(3.0))
    assert explicit.claim.sampling is None
    assert "a client whose rounds the attacker knows" in str(explicit)


@pytest.mark.parametrize("text", ["3", "mechanism:3", " 3.0 "])
def test_a_claim_is_read_from_text(text):
    claim = Claim.of(text)
    assert claim.epsilon == 3.0
    assert claim.bare == ("mechanism" not in text)


@pytest.mark.parametrize("text", ["three", "mechanism:", "pld:3", ""])
def test_text_that_is_no_claim_is_refused_with_the_right_spelling(text):
    with pytest.raises(ValueError, match="claim must be a number such as 3, or mechanism:3"):
        Claim.of(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": 3}, r"claim must be a number such as 3.0, or a Claim, got \{'epsilon': 3\}"),
        (
            GaussianDpEvent(1.0),
            r"a Claim, got GaussianDpEvent.*: Claim.from_event\(event, delta, neighboring_relation\)",
        ),
        (RdpAccountant(), "got <dp_accounting.*: pass its epsilon"),
    ],
)
def test_what_is_no_number_is_refused_with_the_right_spelling(given, message):
    with pytest.raises(TypeError, match=message):
        Claim.of(given)


REPLACED = "replace one"
TIMES = 5


def replaced_epsilon(noise):
    """Replacing a client moves each of its rounds by two clip norms."""
    return float(mechanism_epsilon(noise / 2, delta=DELTA, participations=TIMES))


def run_of_five_rounds(claim, *, noise=1.0, stated=None, seed=0):
    settings = Settings(dim=4_000, canaries=200, unobserved=200, delta=DELTA, rounds=TIMES, presentations=(TIMES,))
    said = [noise if stated is None else stated] * TIMES
    present = [np.arange(200)] * TIMES
    return audited_rounds(present, [noise] * TIMES, said, settings, np.random.default_rng(seed), claim, watched=True)


@pytest.mark.parametrize("terms", [{}, {"participations": TIMES}, {"counts_sampling": False}])
def test_a_replace_one_claim_about_known_rounds_needs_twice_the_noise(terms):
    """The number that would be right if a client were added or removed is refuted without chance."""
    claim = Claim(replaced_epsilon(1.0), adjacency=REPLACED, **terms)
    results = [run_of_five_rounds(claim, seed=seed) for seed in range(10)]
    assert [str(result.verdict.outcome) for result in results].count("PASS") >= 9
    assert all(result.alarm is None for result in results)
    result = results[0]
    assert result.headline.interval[0] < claim.epsilon < result.headline.interval[1]
    assert "for one client, replaced" in str(result)
    assert run_of_five_rounds(claim, noise=1 / 1.4).verdict.outcome == "VIOLATION"
    assert run_of_five_rounds(claim, noise=1 / 1.4, stated=1.0).verdict.outcome == "VIOLATION"
    added = float(mechanism_epsilon(1.0, delta=DELTA, participations=TIMES))
    refuted = run_of_five_rounds(replace(claim, epsilon=added))
    assert (str(refuted.verdict.outcome), refuted.verdict.code) == ("VIOLATION", "stated")
    assert refuted.verdict.finding.epsilon == pytest.approx(claim.epsilon)


def test_the_power_against_a_replace_one_claim_is_that_of_twice_the_claim():
    """Twice an epsilon of replacement is less than twice a canary's own epsilon, so it is harder to detect."""
    claim = Claim(replaced_epsilon(1.0), participations=TIMES, adjacency=REPLACED)
    finding = run_of_five_rounds(claim).verdict.finding
    faulty = float(mechanism_noise(2 * claim.epsilon, delta=DELTA, participations=TIMES)) * 2
    canary = float(mechanism_epsilon(faulty, delta=DELTA, participations=TIMES))
    own = float(mechanism_epsilon(1.0, delta=DELTA, participations=TIMES))
    assert canary < 1.9 * own
    settings = {"delta": DELTA, "level": TEST_LEVEL, "factor": canary / own}
    assert finding.power == pytest.approx(power_against_claim(finding.canaries, own, **settings), rel=1e-2)


def test_an_audit_refuses_a_claim_that_its_sampling_cannot_have():
    with pytest.raises(ValueError, match="adjacency must be 'zero out one' for shuffling"):
        Audit(400, canaries=20, seed=1, delta=DELTA, sampling=Shuffled(20), claim=Claim(3.0, adjacency=REPLACED))
