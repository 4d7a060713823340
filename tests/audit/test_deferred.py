"""Deferred audits, which measure a round in a thread while training goes on; test_audit_cuda.py tests them on a GPU."""

import errno
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from coalmine.audit import Audit
from coalmine.canaries import RotatedCanaries
from coalmine.canaries.rotation_torch import MeasurePlan

DIM = 3_000


def audit(**options):
    return Audit(DIM, canaries=60, unobserved=60, seed=1, delta=1e-6, rounds=6, presentations=2, **options)


def observe(own: Audit, number: int) -> None:
    rng = np.random.default_rng(number)
    present = own.canaries_in_round(number)
    others, noise = rng.normal(size=(2, DIM))
    model_delta = (others + own.updates(present, 1.0) + noise) / 100 if number != 4 else np.zeros(DIM)
    own.observe_round(number, model_delta, present=present, others=others / 100, noise_std=0.01, clip_norm=1.0)
    model_delta[:] = np.nan  # the audit keeps its own copy
    others[:] = np.nan


def test_a_deferred_audit_records_the_same_bytes():
    later, at_once = (
        audit(deferred=True, layers=[("a", 1_000), ("b", 2_000)]),
        audit(layers=[("a", 1_000), ("b", 2_000)]),
    )
    for number in range(1, 7):
        observe(later, number)
        observe(at_once, number)
        assert later.last_round == number
    assert later.log.digest == at_once.log.digest


def test_vectors_that_the_caller_will_not_change_are_not_copied(monkeypatch):
    copies = []
    monkeypatch.setattr("coalmine.measure.flat.copied", lambda vector: copies.append(vector) or vector.copy())
    copying, trusting, at_once = audit(deferred=True), audit(deferred=True), audit()
    for number in range(1, 7):
        rng = np.random.default_rng(number)
        present = at_once.canaries_in_round(number)
        others, noise = rng.normal(size=(2, DIM))
        for own, copy in ((copying, True), (trusting, False), (at_once, False)):
            model_delta = (others + own.updates(present, 1.0) + noise) / 100
            own.observe_round(number, model_delta, present=present, others=others / 100, copy=copy)
    assert copying.log.digest == trusting.log.digest == at_once.log.digest
    assert len(copies) == 2 * 6  # delta and others of each round, by the audit that copies


def test_a_round_is_recorded_by_the_next_round_or_by_flush():
    own = audit(deferred=True)
    observe(own, 1)
    assert own._log.held.numbers == []
    observe(own, 2)
    assert own._log.held.numbers == [1]
    own.flush()
    assert own._log.held.numbers == [1, 2]


def test_a_vector_that_is_not_finite_is_rejected_and_dropped():
    own = audit(deferred=True)
    observe(own, 1)
    own.observe_round(2, np.full(DIM, np.nan), present=[])
    with pytest.raises(ValueError, match="model_delta must be finite"):
        own.flush()
    observe(own, 2)
    assert own.log.numbers == [1, 2]


def test_a_full_disk_loses_no_round(monkeypatch):
    own = audit(deferred=True)
    observe(own, 1)
    append, full = own._log.append, [True]

    def once_full(item):
        if full.pop() if full else False:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(item)

    monkeypatch.setattr(own._log, "append", once_full)
    with pytest.raises(OSError, match="No space"):
        observe(own, 2)
    observe(own, 2)
    assert own.log.numbers == [1, 2]


def test_rewinding_drops_the_round_that_is_being_measured():
    own = audit(deferred=True)
    observe(own, 1)
    own.observe_round(2, np.full(DIM, np.nan), present=[])
    own.rewind_to(1)
    assert own.last_round == 1
    observe(own, 2)
    assert own.log.numbers == [1, 2]


class MeasuredHere:
    """Stands in for rotation_torch.Measurement, which needs a GPU: computes the same numbers at once on the CPU."""

    def __init__(self, canaries, vector, others, total, layers):
        self.plan = MeasurePlan(canaries.count, others is not None, layers, total is not None)
        self.vector, self.others = vector.clone(), None if others is None else others.clone()
        self.canaries, self.total = canaries, total

    def aside(self):
        return nullcontext()

    def numbers(self):
        def both(vector):
            norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
            return np.array([norm]), self.canaries.cosines(vector).numpy() if norm else np.zeros(self.plan.count)

        found = dict(zip(("norm", "cosines"), both(self.vector), strict=True))
        if self.others is not None:
            rest = self.vector - self.others
            found |= dict(zip(("residual_norm", "residual_cosines"), both(rest), strict=True))
            pieces = rest.double().split(self.plan.layers) if self.plan.layers else ()
            found["rests"] = np.array([float(piece @ piece) for piece in pieces])
            beside = self.others.double().split(self.plan.layers) if self.plan.layers else ()
            found["others"] = np.array([float(piece @ piece) for piece in beside])
            if self.total is not None and self.plan.layers:
                totals = self.total.double().split(self.plan.layers)
                found["overlaps"] = np.array([float(a @ b) for a, b in zip(pieces, totals, strict=True)])
                found["totals"] = np.array([float(piece @ piece) for piece in totals])
        return found


@pytest.mark.parametrize("layers", [None, [("a", 1_000), ("b", 2_000)]])
def test_a_round_measured_on_a_gpu_gives_the_same_result(layers, monkeypatch):
    """Follows the GPU's path through the audit with only the measurement replaced; `others` may be a numpy array."""
    monkeypatch.setattr("coalmine.measure.flat.is_on_device", lambda vector: True)
    monkeypatch.setattr(
        RotatedCanaries,
        "measure_later",
        lambda self, vector, others, total, layers, copy: MeasuredHere(self, vector, others, total, layers),
    )
    there, here = audit(deferred=True, layers=layers), audit(layers=layers)
    for number in range(1, 7):
        rng = np.random.default_rng(number)
        present = here.canaries_in_round(number)
        others, noise = rng.normal(size=(2, DIM))
        for own in (there, here):
            total = own.updates(present, 1.0)
            model_delta = torch.from_numpy((others + total + noise) / 100 if number != 4 else np.zeros(DIM))
            own.observe_round(number, model_delta, present=present, others=others / 100, noise_std=0.01, clip_norm=1.0)
    for (_, one), (_, other) in zip(there.log.records(), here.log.records(), strict=True):
        assert one.skipped == other.skipped == (one.number == 4)
        np.testing.assert_allclose(one.cosines, other.cosines, rtol=1e-6, atol=1e-9)
        if not one.skipped:
            np.testing.assert_allclose(one.residual_cosines, other.residual_cosines, rtol=1e-6, atol=1e-9)
            assert one.residual_rest == pytest.approx(other.residual_rest, rel=1e-9)
            if layers:
                np.testing.assert_allclose(one.layer_rests, other.layer_rests, rtol=1e-9)
                np.testing.assert_allclose(one.layer_others, other.layer_others, rtol=1e-7)
