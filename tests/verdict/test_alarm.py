"""The alarm during training: what raises it, what does not, and that checking it often does not change it."""

import json

import numpy as np
import pytest

from coalmine import Alarm, Audit, AuditResult, Claim, Poisson, ViolationError, amplified_epsilon, mechanism_epsilon
from coalmine.estimators.correlated import TreeNoise
from coalmine.log.files import json_ready
from coalmine.verification import verify_run

DIM, CANARIES, ROUNDS, DELTA = 4_096, 500, 50, 1e-6
CLAIM = mechanism_epsilon(1.0, delta=DELTA)  # for a client that takes part once


def new_audit(**settings):
    given = {"canaries": CANARIES, "seed": b"a secret of this test", "delta": DELTA, "rounds": ROUNDS, "claim": CLAIM}
    return Audit(DIM, **(given | settings))


def train(
    audit, noise=1.0, *, rounds=ROUNDS, first=1, known=True, stated=1.0, seed=0, law=None, length=0.3, after=None
):
    """Rounds of canaries, a signal that is the same in every round, and noise; `after` is called after each."""
    signal = length * np.random.default_rng(7).normal(size=DIM)
    for number in range(first, rounds + 1):
        rng = np.random.default_rng([seed, number])
        present = audit.canaries_in_round(number)
        drawn = noise * rng.normal(size=DIM) if law is None else law(rng, number)
        audit.observe_round(
            number,
            audit.updates(present, 1.0) + signal + drawn,
            present=present,
            others=signal if known else None,
            noise_std=stated,
            clip_norm=1.0,
        )
        if after is not None:
            after(audit.alarm())


@pytest.mark.parametrize("known", [True, False])
def test_an_honest_run_never_raises_the_alarm(known):
    audit, asked = new_audit(), []
    train(audit, known=known, length=3.0, after=asked.append)
    assert asked == [None] * ROUNDS


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("stated", [1.0, None])
def test_half_the_noise_raises_the_alarm_in_the_first_rounds(known, stated):
    audit, asked = new_audit(), []
    train(audit, 0.5, known=known, stated=stated, after=asked.append)
    alarm = asked[-1]
    assert isinstance(alarm, Alarm)
    assert alarm.round <= (12 if stated is None and not known else 4)
    assert asked[alarm.round - 1] == alarm  # raised right after its round, and unchanged since
    assert [found is None for found in asked] == [number < alarm.round for number in range(1, ROUNDS + 1)]
    assert f"alarm in round {alarm.round}: " in str(alarm)


def test_checking_only_at_the_end_gives_the_same_alarm():
    early, late = new_audit(), new_audit()
    train(early, 0.8, stated=None, after=lambda _: None)
    train(late, 0.8, stated=None)
    assert early.alarm() == late.alarm()
    assert early.alarm().verdict.code == "evidence"


def test_the_evidence_states_the_measured_noise():
    audit = new_audit()
    train(audit, 0.6, stated=None)
    alarm = audit.alarm()
    assert alarm.evidence >= 500
    assert alarm.verdict.finding.measured_noise == pytest.approx(0.6, rel=0.3)
    assert "times likelier with less noise than claimed" in alarm.reason
    assert alarm.to_dict()["verdict"] == "VIOLATION"
    assert json.loads(json.dumps(json_ready(alarm.to_dict())))["round"] == alarm.round


def test_one_late_round_without_noise_raises_the_alarm():
    def law(rng, number):
        return rng.normal(size=DIM) * (0.01 if number == 40 else 1.0)

    audit = new_audit()
    train(audit, stated=None, law=law)
    alarm = audit.alarm()
    assert (alarm.round, alarm.verdict.code) == (40, "round")


def test_stated_noise_below_the_claim_raises_the_alarm_at_once():
    audit = new_audit()
    train(audit, 0.7, stated=0.7, rounds=1)
    assert (audit.alarm().round, audit.alarm().verdict.code) == (1, "stated")


def test_reused_noise_raises_the_alarm():
    def law(rng, number):
        return np.random.default_rng(number // 2).normal(size=DIM)

    audit = new_audit()
    train(audit, law=law, rounds=10)
    assert audit.alarm().verdict.finding.gauge is not None


def test_extra_noise_raises_no_alarm_and_missing_noise_does():
    audit = new_audit()
    train(audit, 1.5, stated=1.5)
    assert audit.alarm() is None
    audit = new_audit(seed=b"another secret of the test")
    train(audit, 1e-6, rounds=1)
    assert audit.alarm().round == 1


def test_a_claim_for_more_participations_needs_more_noise():
    audit = new_audit(presentations=4, claim=mechanism_epsilon(1.0, delta=DELTA, participations=4))
    train(audit)
    assert audit.alarm() is None
    assert audit.alarm(mechanism_epsilon(1.5, delta=DELTA, participations=4)).round <= 20
    assert audit.alarm(Claim(CLAIM, participations=1)) is None  # same noise, but a claim about fewer participations


def test_a_claim_without_participations_gets_the_most_lenient_reading():
    audit = Audit(DIM, canaries=CANARIES, seed=b"a secret of this test", delta=DELTA)
    rng = np.random.default_rng(0)
    for number in range(1, 21):
        present = range(number * 20, number * 20 + 20)
        audit.observe_round(
            number, audit.updates(present, 1.0) + rng.normal(size=DIM), present=present, others=np.zeros(DIM)
        )
    assert audit.alarm(CLAIM) is None
    assert audit.alarm(CLAIM / 3) is not None


def test_known_round_counts_a_canary_once():
    """A canary's scores share the real updates: counting all of them would raise the alarm in each of these honest runs."""
    for seed in (1, 28, 29, 47, 48):
        audit = new_audit(seed=f"secret {seed} of this test".encode(), canaries=250, presentations=25, claim=None)
        train(audit, 20.0, seed=seed, known=False, stated=None, length=30.0)
        assert audit.alarm(mechanism_epsilon(20.0, delta=DELTA, participations=25)) is None


def test_momentum_is_undone():
    audit = new_audit(momentum=0.9)
    rng, velocity = np.random.default_rng(3), np.zeros(DIM)
    for number in range(1, 31):
        present = audit.canaries_in_round(number)
        fresh = audit.updates(present, 1.0) + 0.6 * rng.normal(size=DIM)
        velocity = 0.9 * velocity + fresh
        audit.observe_round(number, velocity, present=present, others=np.zeros(DIM), clip_norm=1.0)
    assert audit.alarm().round <= 10
    assert audit.alarm(CLAIM * 3) is None


@pytest.mark.parametrize(("noise", "latest"), [(1.0, None), (0.5, 10)])
def test_correlated_noise_is_whitened(noise, latest):
    law = TreeNoise(rounds=32)
    audit = new_audit(rounds=32, noise=law, claim=Claim(CLAIM, sensitivity=1.0))
    rng = np.random.default_rng(5)
    rows = np.linalg.inv(law.matrix()) @ rng.normal(size=(32, DIM)) * noise
    for number in range(1, 33):
        present = audit.canaries_in_round(number)
        audit.observe_round(
            number,
            audit.updates(present, 1.0) + rows[number - 1],
            present=present,
            others=np.zeros(DIM),
            noise_std=law.std(number),
            clip_norm=1.0,
        )
    alarm = audit.alarm()
    assert (alarm is None) if latest is None else alarm.round <= latest


@pytest.mark.parametrize(("rate", "alarmed"), [(0.1, False), (0.3, True)])
def test_sampling_above_the_claimed_rate_raises_the_alarm(rate, alarmed):
    scheme = Poisson(0.1, 60)
    claim = Claim(
        float(amplified_epsilon(2.0, scheme, DELTA)), sampling=scheme, noise_multiplier=2.0, sampler_observed=True
    )
    audit = Audit(DIM, canaries=CANARIES, seed=b"a secret of this test", delta=DELTA, claim=claim)
    rng = np.random.default_rng(2)
    for number in range(1, 61):
        present = np.flatnonzero(rng.random(CANARIES) < rate)
        release = audit.updates(present, 1.0) + 2 * rng.normal(size=DIM)
        audit.observe_round(number, release, present=present, others=np.zeros(DIM), noise_std=2.0, clip_norm=1.0)
    alarm = audit.alarm()
    assert (alarm is not None) == alarmed
    if alarmed:
        assert (alarm.verdict.part, alarm.verdict.code) == ("sampling", "sampler")
        assert alarm.round <= 5


def test_a_wrong_accountant_raises_the_alarm_before_the_first_round():
    scheme = Poisson(0.1, 60)
    claim = Claim(float(amplified_epsilon(2.0, scheme, DELTA)) / 2, sampling=scheme, noise_multiplier=2.0)
    audit = Audit(DIM, canaries=CANARIES, seed=b"a secret of this test", delta=DELTA, claim=claim)
    assert (audit.alarm().round, audit.alarm().verdict.part) == (0, "accounting")


def test_a_rewound_audit_forgets_its_alarm():
    audit = new_audit()
    train(audit, 0.5, rounds=6)
    assert audit.alarm() is not None
    audit.rewind_to(0)
    assert audit.alarm() is None
    train(audit, rounds=6)
    assert audit.alarm() is None


@pytest.mark.parametrize("deferred", [False, True])
def test_on_violation_raises_and_the_audit_can_still_be_finished(tmp_path, deferred):
    audit = new_audit(on_violation="raise", directory=tmp_path / "run", deferred=deferred)
    with pytest.raises(ViolationError, match=r"alarm in round 1: .*Training was stopped") as caught:
        train(audit, 0.5)
    assert caught.value.alarm.round == 1
    result = audit.finish()
    assert result.verdict.outcome == "VIOLATION"
    assert result.alarm == caught.value.alarm
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["alarm"]["round"] == 1
    audit.close()
    checks = {check.name: check for check in verify_run(tmp_path / "run", b"a secret of this test")}
    assert checks["rounds"].held is True
    assert "the alarm stopped the run" in checks["rounds"].detail
    assert checks["result"].held is True
    stored["alarm"] = None
    (tmp_path / "run" / "result.json").write_text(json.dumps(stored))
    checks = {check.name: check for check in verify_run(tmp_path / "run", b"a secret of this test")}
    assert checks["rounds"].held is False
    assert checks["result"].held is False


def test_on_violation_warns_once():
    audit = new_audit(on_violation="warn")
    with pytest.warns(RuntimeWarning, match="alarm in round 1") as told:
        train(audit, 0.5, rounds=8)
    assert len(told) == 1


def test_on_violation_calls_a_function_which_may_use_the_audit():
    seen = []
    audit = new_audit(on_violation=lambda alarm: seen.append((alarm.round, audit.result().verdict.outcome)))
    train(audit, 0.5, rounds=8)
    assert seen == [(1, "VIOLATION")]


def test_a_restarted_audit_repeats_its_alarm_in_the_next_round(tmp_path):
    seen = []
    with new_audit(directory=tmp_path, on_violation=seen.append) as audit:
        train(audit, 0.5, rounds=3)
    with new_audit(directory=tmp_path, on_violation=seen.append) as audit:
        train(audit, 0.5, first=4, rounds=6)
    assert [alarm.round for alarm in seen] == [1, 1]


def test_an_honest_result_states_that_no_alarm_was_raised():
    audit = new_audit(on_violation="raise")
    train(audit)
    result = audit.result()
    assert result.verdict.outcome == "PASS"
    assert (result.watched, result.alarm) == (True, None)
    again = AuditResult.from_dict(json.loads(json.dumps(json_ready(result.to_dict()))))
    assert again.to_dict() == result.to_dict()
    assert "alarm" not in new_audit().result().to_dict()


def test_a_run_stopped_by_an_alarm_is_a_violation():
    """A run stopped after its first rounds has too few canaries for a verdict, but the alarm's refutation still counts."""
    audit = new_audit(canaries=40, rounds=40)
    train(audit, 0.4, rounds=30, stated=None)
    fixed, watched = audit.result(watched=False), audit.result(watched=True)
    assert watched.alarm is not None
    assert watched.verdict.outcome == "VIOLATION"
    again = AuditResult.from_dict(json.loads(json.dumps(json_ready(watched.to_dict()))))
    assert again.alarm.to_dict() == watched.alarm.to_dict()
    assert fixed.alarm is None


def test_an_interim_verdict_warns_that_its_error_rate_is_for_one_look():
    audit = new_audit()
    train(audit, rounds=20)
    assert "20 of 50 rounds were observed: this verdict's error rate holds for one look" in " ".join(
        audit.result().notes
    )
    train(audit, first=21)
    assert "one look" not in " ".join(audit.result().notes)


def test_invalid_claims_and_actions_are_rejected():
    with pytest.raises(ValueError, match="alarm needs a claim"):
        new_audit(claim=None).alarm()
    with pytest.raises(ValueError, match="claim must be above 0"):
        new_audit().alarm(-1.0)
    with pytest.raises(ValueError, match="on_violation needs a claim"):
        new_audit(claim=None, on_violation="raise")
    with pytest.raises(ValueError, match="on_violation must be 'warn', 'raise' or a function, got 'stop'"):
        new_audit(on_violation="stop")
    assert new_audit(claim=1e99).alarm() is None
    assert new_audit(claim=1e-3).alarm() is None  # before the first round
