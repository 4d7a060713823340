"""An audit that measures a round beside what comes after it, in a thread; on a GPU: test_audit_cuda.py."""

import errno

import numpy as np
import pytest

from coalmine.audit.audit import Audit

DIM = 3_000


def audit(**options):
    return Audit(DIM, canaries=60, unobserved=60, seed=1, delta=1e-6, rounds=6, presentations=2, **options)


def observe(own: Audit, number: int) -> None:
    rng = np.random.default_rng(number)
    present = own.canaries_in_round(number)
    others, noise = rng.normal(size=(2, DIM))
    model_delta = (others + own.updates(present, 1.0) + noise) / 100 if number != 4 else np.zeros(DIM)
    own.observe_round(number, model_delta, present=present, others=others / 100, noise_std=0.01, clip_norm=1.0)
    model_delta[:] = np.nan  # what was observed is the audit's own
    others[:] = np.nan


def test_a_deferred_audit_notes_the_same_bytes():
    later, at_once = (
        audit(deferred=True, layers=[("a", 1_000), ("b", 2_000)]),
        audit(layers=[("a", 1_000), ("b", 2_000)]),
    )
    for number in range(1, 7):
        observe(later, number)
        observe(at_once, number)
        assert later.last_round == number
    assert later.log.digest == at_once.log.digest


def test_a_round_is_noted_when_the_next_one_comes_or_on_flush():
    own = audit(deferred=True)
    observe(own, 1)
    assert own._log.numbers == []
    observe(own, 2)
    assert own._log.numbers == [1]
    own.flush()
    assert own._log.numbers == [1, 2]


def test_what_is_not_finite_is_refused_when_it_is_noted_and_forgotten():
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


def test_rewinding_forgets_the_round_that_is_being_measured():
    own = audit(deferred=True)
    observe(own, 1)
    own.observe_round(2, np.full(DIM, np.nan), present=[])
    own.rewind_to(1)
    assert own.last_round == 1
    observe(own, 2)
    assert own.log.numbers == [1, 2]
