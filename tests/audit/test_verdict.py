import sys
from pathlib import Path

import numpy as np
import pytest

from coalmine import Audit, Claim, mechanism_epsilon

sys.path.insert(0, str(Path(__file__).parent))
from training import train

SMALL = {"dim": 4_000, "canaries": 400, "rounds": 8}


def verdict(audit, claim):
    return audit.result(claim=claim).verdict


@pytest.mark.parametrize("presentations", [1, 4])
def test_an_honest_run_passes_a_true_claim(presentations):
    """40 runs: a VIOLATION is to be seen in at most 1 % of them, so three have probability 0.8 %."""
    claim = mechanism_epsilon(1.0, delta=1e-6, participations=presentations)
    outcomes = [verdict(train(seed=s, presentations=presentations, **SMALL), claim).outcome for s in range(20)]
    assert outcomes.count("VIOLATION") <= 1
    assert outcomes.count("PASS") >= 19


def test_half_the_noise_is_a_violation():
    audit = train(noise=lambda t, rng, dim: rng.normal(size=dim) / 2, give_noise=False, **SMALL)
    found = audit.result(claim=mechanism_epsilon(1.0, delta=1e-6))
    assert found.verdict.outcome == "VIOLATION"
    assert found.adversaries["known-others"].verdict.outcome == "VIOLATION"
    assert "standard errors above the claim" in found.verdict.reason or "lower bound" in found.verdict.reason


def test_a_low_gauge_is_a_violation_by_itself():
    """Noise used again fools the cosines of one presentation, not the gauges."""
    audit = train(noise=lambda t, rng, dim: np.random.default_rng(5).normal(size=dim), signal=0.2, **SMALL)
    found = verdict(audit, mechanism_epsilon(1.0, delta=1e-6))
    assert found.outcome == "VIOLATION"
    assert "gauge" in found.reason


def test_too_few_canaries_are_underpowered_and_say_how_many_decide():
    audit = train(dim=4_000, canaries=20, rounds=8, noise_multiplier=4.22)
    found = verdict(audit, 1.0)
    assert found.outcome == "UNDERPOWERED"
    assert "canaries would decide, 20 were there" in found.reason


def test_final_never_passes_a_mechanism_claim():
    audit = train(**SMALL)
    found = audit.result(claim=5.0)
    for name in ("final", "final-update", "all-iterates"):
        assert found.adversaries[name].verdict.outcome == "UNDERPOWERED"


def test_an_amplified_claim_is_not_about_known_rounds():
    """A correct known-others reads 4.9 at R = 1 where an amplified claim says 2.12: no violation."""
    audit = train(**SMALL)
    found = audit.result(claim=Claim(epsilon=2.12, accounting="amplified"))
    assert found.adversaries["known-others"].headline.estimate.epsilon > 4
    assert found.verdict.outcome == "UNDERPOWERED"
    assert audit.result(claim=2.12).verdict.outcome == "VIOLATION"


def test_an_amplified_claim_is_refuted_by_the_rungs_it_is_about():
    audit = train(signal=0.0, noise_multiplier=0.1, **SMALL)
    assert verdict(audit, Claim(epsilon=0.5, accounting="amplified")).outcome == "VIOLATION"


def test_groups_are_tested_together():
    claim = Claim(epsilon=mechanism_epsilon(2.0, delta=1e-6, participations=4), participations=4)
    settings = {"presentations": (1, 2, 4), "dim": 4_000, "canaries": 1_200, "rounds": 8, "noise_multiplier": 2.0}
    assert verdict(train(**settings), claim).outcome == "PASS"
    broken = train(noise=lambda t, rng, dim: rng.normal(size=dim) / 1.5, give_noise=False, **settings)
    assert verdict(broken, claim).outcome == "VIOLATION"


def test_dilution_takes_power_from_known_round():
    audit = train(signal=5.0, give_others=False, **SMALL)
    found = verdict(audit, mechanism_epsilon(1.0, delta=1e-6))
    assert found.outcome == "UNDERPOWERED"
    assert "known-others (pass `others`)" in found.reason


def test_no_claim_no_verdict():
    found = train(dim=400, canaries=40, rounds=2).result()
    assert found.verdict is None
    assert found.to_dict()["verdict"] is None
    assert "verdict" not in str(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0}, "claim must be above 0, got 0"),
        ({"epsilon": np.inf}, "claim must be finite, got inf"),
        ({"epsilon": 1, "accounting": "magic"}, "accounting must be"),
        ({"epsilon": 1, "participations": 0}, "participations must be at least 1"),
    ],
)
def test_bad_claims_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Claim(**arguments)


def test_result_prints_and_serialises():
    audit = train(dim=400, canaries=40, rounds=2)
    found = audit.result(claim=3.0, analytical_epsilon=3.2)
    text = str(found)
    for word in ("known-others", "claimed epsilon 3", "gauge noise", "analytical epsilon 3.2"):
        assert word in text
    assert "<table>" in found._repr_html_()
    assert Audit(100, canaries=10, seed=1, delta=1e-5).result(claim=1.0).verdict.outcome == "UNDERPOWERED"
