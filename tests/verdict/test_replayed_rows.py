"""What replayed rows mean for a verdict, with the figures of a run without any framework."""

import json

import numpy as np
import pytest

from coalmine import Audit, Claim
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.findings.missing import NothingClaimed
from coalmine.verdict.findings.noise import LittleNoise
from coalmine.verdict.findings.rows import RowAboveClaim, RowMovesOthers, RowMovesTooMuch
from coalmine.verdict.replayed_rows import ReplayedRows, ReplayedStep

DIM, ROUNDS, CANARIES, NOISE = 2_000, 6, 300, 1.0
CLAIM = float(mechanism_epsilon(NOISE, delta=1e-5, participations=2))


def result_with(*steps, claim=CLAIM, noise=NOISE, status=None, **more):
    """The result of a run in which every canary is twice in the sum, and clients add nothing else."""
    audit = Audit(dim=DIM, canaries=CANARIES, seed=b"tests only", delta=1e-5, rounds=ROUNDS, presentations=2)
    rng = np.random.default_rng(3)
    for number in range(1, ROUNDS + 1):
        present = audit.canaries_in_round(number)
        others = np.zeros(DIM)
        others[:5] = 0.5
        delta = audit.updates(present, 1.0) + others + noise * rng.normal(size=DIM)
        audit.observe_round(number, delta, present=present, others=others, noise_std=NOISE, clip_norm=1.0)
    replayed = ReplayedRows(steps=steps, **more)
    item = AuditedItem.of_rows(replayed) if status is None else AuditedItem("rows", status, "said so")
    return audit.result(claim=None if claim is None else Claim(claim, participations=2), audited=[item])


def step(number=1, factor=1.0, **more):
    return ReplayedStep(step=number, rows=8, factor=factor, tolerance=1e-3, row=3, **more)


def test_rows_that_stay_within_the_clip_norm_leave_a_pass():
    result = result_with(step(1), step(4, factor=1.0009))
    assert result.verdict.outcome == "PASS"
    item = result.audited[-1]
    assert (item.name, item.status) == ("rows", "checked")
    assert item.detail == "16 real clients in 2 rounds, at most 1.001 clip norms"
    assert "rows" in result.scope.split("It does not cover")[0]
    assert "was not tested" not in result.scope


def test_the_noise_in_a_witnessed_step_is_that_over_the_factor():
    """By hand: a client in the witnessed round and in one other has μ² = s² + 1."""
    found = result_with(step(2, factor=3.001)).verdict.finding
    assert isinstance(found, RowAboveClaim)
    assert found.epsilon == pytest.approx(float(mechanism_epsilon(NOISE / np.sqrt(3**2 + 1), delta=1e-5)))
    assert (found.step, found.row, found.steps) == (2, 3, 1)
    both = result_with(step(2, factor=3.001), step(5, factor=2.001)).verdict.finding
    assert both.epsilon == pytest.approx(float(mechanism_epsilon(NOISE / np.sqrt(3**2 + 2**2), delta=1e-5)))


def test_a_claim_that_allows_the_witnessed_steps_is_not_refuted():
    loose = float(mechanism_epsilon(NOISE / np.sqrt(1.2**2 + 1), delta=1e-5))
    found = result_with(step(2, factor=1.201), claim=loose).verdict
    assert found.outcome == "UNDERPOWERED"
    assert isinstance(found.finding, RowMovesTooMuch)
    always = float(mechanism_epsilon(NOISE / np.sqrt(2 * 1.2**2), delta=1e-5))
    assert found.finding.epsilon_if_every_step == pytest.approx(always)
    assert f"ε would be {always:.3g}" in found.reason


def test_the_same_step_on_several_ranks_counts_once_with_its_largest_factor():
    one = result_with(step(2, factor=3.001)).verdict.finding
    several = result_with(step(2, factor=1.5), step(2, factor=3.001), step(2)).verdict.finding
    assert several.epsilon == one.epsilon


@pytest.mark.parametrize("more", [{"coupled": 0.2}, {"leaks": ("bn.running_mean",)}])
def test_what_moves_beside_the_row_bars_a_pass_alone(more):
    found = result_with(step(1, **more)).verdict
    assert isinstance(found.finding, RowMovesOthers)
    assert found.outcome == "UNDERPOWERED"


def test_a_step_that_shows_nothing_decides_nothing():
    result = result_with(ReplayedStep(step=1, rows=0, problem="the step does not repeat"))
    assert result.verdict.outcome == "PASS"
    assert result.audited[-1].status == "not checked"
    assert result.scope.endswith("How real rows enter the sum was not tested.")


def test_a_claim_that_is_refuted_already_stays_refuted():
    result = result_with(step(2, coupled=0.3), noise=NOISE / 3)
    assert isinstance(result.verdict.finding, LittleNoise)
    assert isinstance(result_with(step(2, factor=3.0), noise=NOISE / 3).verdict.finding, RowAboveClaim)
    assert isinstance(result_with(step(2, factor=3.0), claim=None).verdict.finding, NothingClaimed)


def test_a_result_with_replayed_rows_is_read_as_it_was():
    result = result_with(step(2, factor=3.0, tensors=(("w", 2.0),), leaks=("m",)), assumes="a loss", passes=9)
    again = AuditResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again.audited[-1].replayed == result.audited[-1].replayed
    assert again.verdict == result.verdict


def test_a_failed_item_without_steps_bars_a_pass_as_any_other():
    assert result_with(status="failed").verdict.code == "pipeline"
