"""The ladder and the gauges under correlated noise, which a plain loop generates with dense linear algebra."""

import hashlib
import json

import numpy as np
import pytest

from coalmine import Audit, Claim, mechanism_epsilon
from coalmine.estimators.correlated import BandedNoise, TreeNoise
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.evidence.ladder import ladder
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.evidence.views import views
from coalmine.log.commitment import Commitment
from coalmine.measure.settings import checked_settings
from coalmine.verification import verify_run

ROUNDS, DIM, CANARIES, NOISE = 32, 3_000, 300, 2.0
TREE = TreeNoise(rounds=ROUNDS)
BANDS = BandedNoise.for_prefix_sums(ROUNDS, bands=6)
both = pytest.mark.parametrize("law", [TREE, BANDS], ids=["tree", "bands"])


def train(law, *, seed=1, told=True, factor=1.0, presentations=1, skipped=(), fresh=False, **settings):
    """A loop with noise NOISE·C⁻¹ζ times `factor` and a constant real signal about as long; n changes every round."""
    rng = np.random.default_rng(seed)
    audit = Audit(
        DIM, canaries=CANARIES, unobserved=2_000, seed=seed, delta=1e-6, rounds=ROUNDS, presentations=presentations,
        noise=law if told else None, **settings,
    )  # fmt: skip
    inverse = np.linalg.inv(law.matrix())
    if fresh:  # the right length in every round, but uncorrelated
        inverse = np.diag(np.linalg.norm(inverse, axis=1))
    noise = factor * NOISE * inverse @ rng.normal(size=(ROUNDS, DIM))
    steady = NOISE * rng.normal(size=DIM)
    for t in range(1, ROUNDS + 1):
        n = 40.0 + t
        present = audit.canaries_in_round(t)
        others = 0.8 * steady + 0.6 * NOISE * rng.normal(size=DIM)
        total = others + audit.updates(present, 1.0) + noise[t - 1]
        if t not in skipped:
            std = NOISE * float(np.linalg.norm(np.linalg.inv(law.matrix())[t - 1]))
            audit.observe_round(t, total / n, present=present, others=others / n, noise_std=std / n, clip_norm=1 / n)
    return audit


def unit_claim() -> Claim:
    """The true epsilon of a client who moves CX by one clip norm."""
    return Claim(epsilon=float(mechanism_epsilon(NOISE, delta=1e-6)), sensitivity=1.0)


def slope_error(audit) -> float:
    """Distance of known-others from the truth in standard errors, with each canary's own strength."""
    groups = [scores for scores in ladder(audit.log, audit.settings) if scores.rung == "known-others"]
    signal = NoiseSignal.of(groups)
    error = np.sqrt(1 / signal.weight + 1 / (2 * signal.dof * NOISE**2))
    return float((signal.beta - 1 / NOISE) / error)


@pytest.mark.full
@both
@pytest.mark.parametrize("presentations", [1, 3])
def test_known_others_recovers_the_analytical_epsilon(law, presentations):
    errors = [slope_error(train(law, seed=seed, presentations=presentations)) for seed in range(12)]
    assert abs(np.mean(errors)) < 4 / np.sqrt(12)
    assert 0.4 < np.std(errors) < 1.7  # chi-square with 11 dof, 1e-3 on either side
    result = train(law, presentations=presentations).result(claim=unit_claim())
    row = result.adversaries["known-others"].headline
    truth = float(mechanism_epsilon(NOISE / row.sensitivity, delta=1e-6))
    assert row.estimate.interval.low < truth < row.estimate.interval.high
    assert result.verdict.outcome == "PASS", result.verdict.reason
    assert result.adversaries["known-round"].verdict.outcome == "UNDERPOWERED"


@both
def test_without_the_noise_matrix_the_estimate_is_lower_and_noise_looks_reused(law):
    told, untold = (train(law, told=told).result(claim=unit_claim()) for told in (True, False))
    whitened, plain = (result.adversaries["known-others"].headline for result in (told, untold))
    alone = np.mean([1 / law.std(t) for t in range(1, ROUNDS + 1)]) / NOISE  # a canary against its round's noise
    assert plain.estimate.mean == pytest.approx(alone, abs=4 / np.sqrt(CANARIES))
    assert whitened.estimate.mean == pytest.approx(whitened.sensitivity / NOISE, abs=4 / np.sqrt(CANARIES))
    assert plain.estimate.mean < 0.8 * whitened.estimate.mean
    assert {gauge.name: gauge.status for gauge in untold.gauges}["repeat"] == "low"
    assert {gauge.status for gauge in told.gauges} == {"ok"}


@both
def test_half_the_noise_is_detected(law):
    result = train(law, factor=0.5).result(claim=unit_claim())
    assert result.verdict.outcome == "VIOLATION"
    assert result.adversaries["known-others"].verdict.outcome == "VIOLATION"
    assert {gauge.name: gauge.status for gauge in result.gauges}["residual"] == "low"


@both
def test_uncorrelated_noise_of_the_right_length_gives_a_warning(law):
    statuses = {gauge.name: gauge.status for gauge in train(law, fresh=True).result().gauges}
    assert statuses["noise"] == "ok"
    assert statuses["residual"] == "warning"  # too long once whitened, which does not harm privacy


@both
def test_whitened_noise_is_independent_with_std_1(law):
    audit = train(law)
    seen = list(views(audit.log, audit.settings, residual=True))
    assert [view.number for view in seen] == list(range(1, ROUNDS + 1))
    rows = np.array([view.unobserved * view.scale for view in seen])
    covariance = rows @ rows.T / rows.shape[1]
    np.testing.assert_allclose(covariance, np.eye(ROUNDS), atol=5.5 * np.sqrt(2 / rows.shape[1]))


@both
def test_a_skipped_round_leaves_out_the_rows_that_need_it(law):
    audit = train(law, skipped={5})
    seen = {view.number for view in views(audit.log, audit.settings, residual=True)}
    assert seen == {t for t in range(1, ROUNDS + 1) if t != 5 and not law.matrix()[t - 1, 4]}
    assert abs(slope_error(audit)) < 4
    assert audit.result(claim=unit_claim()).verdict.outcome == "PASS"


def test_a_claim_defaults_to_the_most_exposed_canary():
    audit = train(TREE)
    most = max(TREE.strength([t]) for t in range(1, ROUNDS + 1))
    plain = float(mechanism_epsilon(NOISE / np.sqrt(most), delta=1e-6))
    assert audit.result(claim=plain).verdict.outcome == "PASS"
    assert audit.result(claim=plain / 2).verdict.outcome == "VIOLATION"
    with pytest.raises(ValueError, match="give the claim its sensitivity"):
        audit.result(claim=Claim(epsilon=plain, participations=1))
    with pytest.raises(ValueError, match="sensitivity must be above 0"):
        Claim(epsilon=1.0, sensitivity=0.0)


@both
def test_a_run_on_disk_can_be_verified(law, tmp_path):
    audit = train(law, directory=tmp_path)
    audit.directory.write_result(audit.result(claim=unit_claim()))
    audit.directory.close()
    assert {check.name: check.held for check in verify_run(tmp_path, 1)}["result"] is True
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["claim_sensitivity"] == 1.0
    assert stored["adversaries"]["known-others"]["sensitivity"] > 0.99
    with pytest.raises(ValueError, match="other settings"):
        Audit(DIM, canaries=CANARIES, unobserved=2_000, seed=1, delta=1e-6, rounds=ROUNDS, directory=tmp_path)


def test_independent_noise_leaves_the_commitment_unchanged():
    settings = checked_settings(
        1_000, canaries=10, unobserved=300, delta=1e-6, kind="rotated", rounds=None, presentations=1, momentum=0.0,
        layers=None,
    )  # fmt: skip
    text = (
        '{"canaries":10,"delta":1e-06,"dim":1000,"kind":"rotated","layers":[],"momentum":0.0,"presentations":[1],'
        '"rounds":null,"unobserved":300}'
    )
    parts = (b"salt", text.encode(), b"number:7")
    expected = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()
    assert Commitment.to(7, settings, salt="salt").sha256 == expected


def test_invalid_noise_settings_are_rejected():
    with pytest.raises(ValueError, match="noise must be a TreeNoise, a BandedNoise or None, got 'tree'"):
        Audit(1_000, canaries=100, seed=1, delta=1e-6, noise="tree")
    with pytest.raises(ValueError, match="at least 200 if correlated noise is whitened"):
        Audit(1_000, canaries=100, unobserved=100, seed=1, delta=1e-6, noise=TREE)
    audit = Audit(1_000, canaries=100, seed=1, delta=1e-6, noise=TreeNoise(rounds=2))
    with pytest.raises(ValueError, match="planned for 2 rounds, got round 3"):
        audit.observe_round(3, np.ones(1_000), present=[])


def test_a_round_without_stated_noise_does_not_hide_a_violation():
    """A third of the noise is detected even if one round without canaries lacks its claimed std."""
    law, dim, rng = TreeNoise(rounds=8), 4_000, np.random.default_rng(0)
    audit = Audit(dim, canaries=200, unobserved=2_000, seed=b"x", delta=1e-6, rounds=8, noise=law)
    others, drawn = 20 * rng.normal(size=dim), {}
    for number in range(1, 9):
        drawn[number] = 0.3 * rng.normal(size=dim)
        noise = drawn[number] - sum((drawn[child] for child in law.children(number)), np.zeros(dim))
        present = audit.canaries_in_round(number) if number != 3 else []
        claimed = None if number == 3 else law.std(number)
        total = audit.updates(present, 1.0)
        audit.observe_round(number, total + noise + others, present=present, others=others, noise_std=claimed)
    epsilon = float(mechanism_epsilon(0.5, delta=1e-6))
    assert audit.result(claim=Claim(epsilon=epsilon, sensitivity=2.0)).verdict.outcome == "VIOLATION"


@pytest.mark.parametrize(("sensitivity", "claimed"), [(None, 30.0), (1.0, 30.0), (3.0, 30.0), (3.0, 5.0)])
def test_with_only_the_final_model_the_claim_is_compared_as_stated(sensitivity, claimed):
    """An epsilon near 20 lies below a claimed 30 and above a claimed 5, whatever the claim's sensitivity."""
    dim, noise = 20_000, float(mechanism_noise(20.0, delta=1e-6))
    audit = Audit(dim, canaries=CANARIES, unobserved=2_000, seed=1, delta=1e-6, rounds=ROUNDS, noise=TREE)
    model = audit.updates(range(CANARIES), 1.0) + noise * np.random.default_rng(3).normal(size=dim)
    audit.observe_final(model)
    result = audit.result(claim=Claim(epsilon=claimed, sensitivity=sensitivity))
    assert 8 < result.adversaries["final"].headline.lower_bound < 20
    assert result.verdict.outcome == ("VIOLATION" if claimed == 5.0 else "UNDERPOWERED")
