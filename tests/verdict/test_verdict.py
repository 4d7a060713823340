import numpy as np
import pytest
from training import train

from coalmine import Audit, Claim, RandomAllocation, amplified_epsilon, epsilon_lower_bound, mechanism_epsilon
from coalmine.evidence.ladder import ladder

SMALL = {"dim": 4_000, "canaries": 400, "rounds": 8}


def verdict(audit, claim):
    return audit.result(claim=claim).verdict


@pytest.mark.parametrize("presentations", [1, pytest.param(4, marks=pytest.mark.full)])
def test_an_honest_run_passes_a_true_claim(presentations):
    """40 runs: at most 1 % of them may give a VIOLATION, so three have probability 0.8 %."""
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
    """Reused noise fools the cosines of one presentation, but not the gauges."""
    audit = train(noise=lambda t, rng, dim: np.random.default_rng(5).normal(size=dim), signal=0.2, **SMALL)
    found = verdict(audit, mechanism_epsilon(1.0, delta=1e-6))
    assert found.outcome == "VIOLATION"
    assert "gauge" in found.reason


class Impostor(Audit):
    """An audit whose canaries come from another seed, as if the server and the clients did not share one."""

    def updates(self, *arguments, **options):
        other = Audit(self.settings.dim, canaries=self.settings.canaries, seed=b"another", delta=1e-6, rounds=8)
        return other.updates(*arguments, **options)


def test_canaries_missing_from_the_rounds_are_reported():
    """No score exceeds the claim, so nothing else would show that no attack took place."""
    claim, settings = mechanism_epsilon(1.0, delta=1e-6), {"canaries": 400, "seed": b"own", "delta": 1e-6, "rounds": 8}
    for audit, outcome in ((Impostor(4_000, **settings), "UNDERPOWERED"), (Audit(4_000, **settings), "PASS")):
        found = train(audit=audit, **SMALL).result(claim=claim)
        assert found.verdict.outcome == outcome
        assert ("the canaries were not in the rounds" in found.verdict.reason) == (outcome == "UNDERPOWERED")
        assert any("that the claim implies" in note for note in found.notes) == (outcome == "UNDERPOWERED")


def test_updates_with_flipped_sign_do_not_pass():
    """Twenty times too little noise, but every score is negative: no score exceeds the claim, and yet it is violated."""
    audit, rng = Audit(4_000, canaries=400, seed=b"own", delta=1e-6, rounds=8), np.random.default_rng(1)
    for number in range(1, 9):
        present = audit.canaries_in_round(number)
        delta = audit.updates(present, 1.0) + rng.normal(size=4_000) / 20
        audit.observe_round(number, -delta, present=present, others=np.zeros(4_000), clip_norm=1.0)
    found = verdict(audit, mechanism_epsilon(1.0, delta=1e-6))
    assert found.outcome == "UNDERPOWERED"
    assert "is the sign of the updates flipped?" in found.reason


def test_much_more_noise_than_claimed_passes_if_canaries_are_detected():
    """Three times the noise: a claim may be loose as long as the audit detects its canaries."""
    found = train(noise_multiplier=3.0, **SMALL).result(claim=mechanism_epsilon(1.0, delta=1e-6))
    assert found.verdict.outcome == "PASS"
    assert any("that the claim implies" in note for note in found.notes)


@pytest.mark.parametrize(("presentations", "noise_multiplier"), [(1, 1.0), (4, 1.0), (1, 1.7)])
def test_honest_runs_report_no_missing_canaries(presentations, noise_multiplier):
    """Neither do runs with somewhat more noise than claimed: at 1.7 times, 0.59 of the claim's signal is left."""
    claim = mechanism_epsilon(1.0, delta=1e-6, participations=presentations)
    for seed in range(5):
        audit = train(seed=seed, presentations=presentations, noise_multiplier=noise_multiplier, **SMALL)
        assert audit.result(claim=claim).notes == ()


def test_a_run_without_canaries_is_reported():
    audit = Audit(4_000, canaries=400, seed=b"own", delta=1e-6)
    rng = np.random.default_rng(1)
    for number in (1, 2):
        audit.observe_round(number, rng.normal(size=4_000), present=[], noise_std=1.0, clip_norm=1.0)
    assert "no round with a canary in it" in verdict(audit, 5.0).reason


def test_too_few_canaries_are_underpowered_and_the_needed_number_is_stated():
    audit = train(dim=4_000, canaries=20, rounds=8, noise_multiplier=4.22)
    found = verdict(audit, 1.0)
    assert found.outcome == "UNDERPOWERED"
    assert "canaries would decide, 20 took part" in found.reason


def test_final_never_passes_a_mechanism_claim():
    audit = train(**SMALL)
    found = audit.result(claim=5.0)
    for name in ("final", "final-update", "all-iterates"):
        assert found.adversaries[name].verdict.outcome == "UNDERPOWERED"


@pytest.mark.full
def test_an_amplified_claim_is_not_about_known_rounds():
    """A correct known-others gives 4.9 at R = 1 where one of eight hidden rounds gives 3.3: not a violation."""
    audit, scheme = train(**SMALL), RandomAllocation(8)
    accounted = amplified_epsilon(1.0, scheme, 1e-6)
    assert accounted < 3.5
    found = audit.result(claim=Claim(accounted, sampling=scheme, noise_multiplier=1.0))
    assert found.adversaries["known-others"].headline.estimate.epsilon > 4
    assert {name: leg.outcome for name, leg in found.legs.items()} == {
        "accounting": "PASS", "noise": "PASS", "sampling": "UNDERPOWERED",
    }  # fmt: skip
    assert (found.verdict.outcome, found.verdict.code) == ("UNDERPOWERED", "sampler not observed")
    assert audit.result(claim=float(accounted)).verdict.outcome == "VIOLATION"


@pytest.mark.full
def test_an_amplified_claim_is_refuted_by_a_tenth_of_the_noise():
    found = verdict(train(signal=0.0, noise_multiplier=0.1, **SMALL), Claim(0.5, sampling=RandomAllocation(8)))
    assert (found.outcome, found.part) == ("VIOLATION", "noise")


def test_groups_of_presentations_are_tested_jointly():
    claim = Claim(epsilon=mechanism_epsilon(2.0, delta=1e-6, participations=4), participations=4)
    settings = {"presentations": (1, 2, 4), "dim": 4_000, "canaries": 1_200, "rounds": 8, "noise_multiplier": 2.0}
    assert verdict(train(**settings), claim).outcome == "PASS"
    broken = train(noise=lambda t, rng, dim: rng.normal(size=dim) / 1.5, give_noise=False, **settings)
    assert verdict(broken, claim).outcome == "VIOLATION"


def test_known_round_never_passes_where_signal_could_replace_noise():
    """Half the noise plus a signal of 0.87 times the noise looks just like the claim: without `others` it cannot PASS."""

    def half(t, rng, dim):
        return rng.normal(size=dim) / 2

    claim = mechanism_epsilon(1.0, delta=1e-6)
    broken = train(noise=half, signal=0.87, give_others=False, **SMALL)
    assert broken.result(claim=claim).verdict.outcome != "PASS"
    assert broken.result(claim=claim, clients=100).verdict.outcome != "PASS"
    honest = train(signal=0.0, give_others=False, **SMALL)
    found = honest.result(claim=claim)
    assert found.verdict.outcome == "UNDERPOWERED"
    assert "real updates could hide missing noise" in found.verdict.reason
    assert honest.result(claim=claim, clients=20).verdict.outcome == "PASS"  # 20 clipped clients hide at most 0.33 C√d
    many = honest.result(claim=claim, clients=100).verdict
    assert many.outcome == "UNDERPOWERED"
    assert "known-others (pass `others`)" in many.reason


@pytest.mark.parametrize("signal", [3.0, 30.0])
def test_rounds_that_nearly_cancel_raise_no_alarm(signal):
    """An alternating signal, R = T = 2, few unobserved canaries: wᵀGw is near 0 and must not be underestimated."""
    rng = np.random.default_rng(1)
    for seed in range(15):
        audit = Audit(2_000, canaries=40, unobserved=200, seed=seed, delta=1e-6)
        drift = signal * rng.normal(size=2_000)
        for t in (1, 2):
            delta = drift * (-1) ** t + audit.updates(range(40), 1.0) + rng.normal(size=2_000)
            audit.observe_round(t, delta, present=range(40), noise_std=1.0)
        assert verdict(audit, mechanism_epsilon(1.0, delta=1e-6, participations=2)).outcome != "VIOLATION"


@pytest.mark.parametrize(("dim", "canaries", "noise"), [(60, 30, 0.5), (200, 100, 0.2), (1_000, 500, 0.1)])
def test_the_bound_holds_in_few_dimensions(dim, canaries, noise):
    """Honest, one round: the 95 % bound exceeds the truth in at most 5 % of 100 runs (13 or more: 1 in 1,000)."""
    truth, above = mechanism_epsilon(noise, delta=1e-6), 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        audit = Audit(dim, canaries=canaries, seed=seed, delta=1e-6)
        clean = audit.updates(range(canaries), 1.0)
        audit.observe_round(1, clean + noise * rng.normal(size=dim), present=range(canaries), others=np.zeros(dim))
        known = next(s for s in ladder(audit.log, audit.settings) if s.rung == "known-others")
        above += epsilon_lower_bound(known.bounded, null=known.bound_null, delta=1e-6) > truth
    assert above <= 12


@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_no_noise_at_all_is_a_violation_and_not_a_crash(signal):
    for give_others in (True, False):
        audit = train(noise=lambda t, rng, dim: np.zeros(dim), signal=signal, give_others=give_others, **SMALL)
        if signal == 0 or give_others:
            assert verdict(audit, mechanism_epsilon(1.0, delta=1e-6)).outcome == "VIOLATION"


def test_rounds_of_different_size_have_equal_weight():
    """n alternates between 50 and 250: a canary adds C/n, so known-others still recovers the analytical epsilon."""
    audit = Audit(4_000, canaries=400, seed=3, delta=1e-6, rounds=8, presentations=4)
    rng = np.random.default_rng(0)
    for t in range(1, 9):
        present, n = audit.canaries_in_round(t), 50 if t % 2 else 250
        delta = (audit.updates(present, 1.0) + 0.5 * rng.normal(size=4_000)) / n
        audit.observe_round(t, delta, present=present, others=np.zeros(4_000), noise_std=0.5 / n)
    row = audit.result().adversaries["known-others"].headline
    truth = mechanism_epsilon(0.5, delta=1e-6, participations=4)
    assert row.estimate.interval.low <= truth <= row.estimate.interval.high
    assert row.estimate.epsilon == pytest.approx(truth, rel=0.05)


def test_a_claim_about_fewer_participations_is_converted():
    """Canaries in all 16 rounds, claim for one: every rung is compared with what the claim implies for 16."""
    audit = train(rounds=16, presentations=16, noise_multiplier=4.0, signal=0.1, dim=4_000, canaries=400)
    claim = Claim(epsilon=mechanism_epsilon(4.0, delta=1e-6), participations=1)
    assert verdict(audit, claim).outcome == "PASS"


def test_unobserved_rounds_require_explicit_participations():
    """Canaries in 8 rounds of which 2 are observed: a bare claim does not say how many rounds it covers."""
    audit = Audit(4_000, canaries=400, seed=3, delta=1e-6, rounds=8, presentations=8)
    rng = np.random.default_rng(0)
    for t in (4, 8):
        noise = rng.normal(size=4_000) / 1.7
        audit.observe_round(t, audit.updates(range(400), 1.0) + noise, present=range(400), others=np.zeros(4_000))
    epsilon = mechanism_epsilon(1.0, delta=1e-6, participations=8)
    bare = verdict(audit, epsilon)
    assert (bare.outcome, bare.code) == ("UNDERPOWERED", "participations")
    assert "participations=" in bare.reason
    assert verdict(audit, Claim(epsilon=epsilon, participations=8)).outcome == "VIOLATION"


def test_without_a_claim_nothing_passes():
    found = train(dim=400, canaries=40, rounds=2).result()
    assert (found.verdict.outcome, found.verdict.code) == ("UNDERPOWERED", "no claim")
    assert found.to_dict()["verdict"] == "UNDERPOWERED"
    assert str(found).startswith("NO VERDICT: nothing was claimed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0}, "claim must be above 0, got 0"),
        ({"epsilon": np.inf}, "claim must be finite, got inf"),
        ({"epsilon": 1, "sampler_observed": True}, "sampler_observed belongs to a claim amplified by sampling"),
        ({"epsilon": 1, "participations": 0}, "participations must be at least 1"),
    ],
)
def test_invalid_claims_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        Claim(**arguments)


def test_result_prints_and_serialises():
    audit = train(dim=400, canaries=40, rounds=2)
    found = audit.result(claim=3.0, analytical_epsilon=3.2)
    text = found.details()
    for word in ("known-others", "claimed epsilon 3", "gauge length: noise", "analytical ε 3.2"):
        assert word in text
    page = found._repr_html_()
    assert "<table>" in page
    assert "<svg" in page
    assert found.verdict.outcome in page
    frame = found.to_frame()
    assert list(frame["adversary"]) == [name for name, each in found.adversaries.items() for _ in each.rows]
    rows = [row for each in found.adversaries.values() for row in each.rows]
    assert list(frame["epsilon"]) == [row.estimate.epsilon for row in rows]
    assert Audit(100, canaries=10, seed=1, delta=1e-5).result(claim=1.0).verdict.outcome == "UNDERPOWERED"


@pytest.mark.parametrize("name", ["final", "known-round", "known-others"])
def test_an_attack_named_like_a_rung_is_rejected(name, tmp_path):
    """Verdicts look rungs up by name: random scores called known-others would pass."""
    with pytest.raises(ValueError, match="must not be named like a rung"):
        Audit(400, canaries=40, seed=1, delta=1e-6, scores={name: lambda *_: None}, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_numpy_numbers_can_be_serialised(tmp_path):
    audit = Audit(400, canaries=40, seed=1, delta=1e-6, directory=tmp_path / "run")
    claim = Claim(epsilon=np.float32(5), participations=np.int64(1), sensitivity=np.float32(1))
    audit.observe_round(1, np.ones(400), present=range(40), noise_std=1.0)
    audit.directory.write_result(audit.result(claim=claim, clients=np.int64(50), analytical_epsilon=np.float32(4)))
    with pytest.raises(ValueError, match="analytical_epsilon must be at least 0"):
        audit.result(analytical_epsilon=-3)
