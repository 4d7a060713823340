"""Every integration stops, warns or calls a function in the round that refutes the claim."""

import numpy as np
import pytest
from requires import require

require("torch")
require("opacus")
require("flwr")
from flower_training import SMALL, LoopGrid, client_app, initial_arrays, nodes, server_side, small_run  # noqa: E402
from opacus_training import WARNINGS, halve_noise, make, run_epoch  # noqa: E402

from coalmine import ViolationError, mechanism_epsilon  # noqa: E402
from coalmine.integrations import flower, opacus  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*WARNINGS)
SEED = b"a secret of this test"


def opacus_run(steps=8, fault=None, **settings):
    model, optimizer, loss, loader, _ = make()
    if fault:
        fault(optimizer)
    options = {"canaries": 300, "seed": SEED, "delta": 1e-5, "sampling_probability": 1.0, "through_clip": False}
    options |= {"rng": np.random.default_rng(0)} | settings
    optimizer = opacus.audited(optimizer, model, **options)
    while optimizer.audit.last_round < steps:
        run_epoch(model, optimizer, loss, loader, optimizer.audit, steps)
    return optimizer.audit


def test_opacus_with_half_the_noise_is_stopped():
    with pytest.raises(ViolationError) as caught:
        opacus_run(fault=halve_noise, on_violation="raise")
    assert caught.value.alarm.round <= 2


def test_opacus_calls_a_function_only_for_a_violation():
    alarms = []
    opacus_run(on_violation=alarms.append)
    assert alarms == []
    audit = opacus_run(steps=4, fault=halve_noise, on_violation=alarms.append)
    assert [alarm.round for alarm in alarms] == [1]
    result = audit.finish()
    assert (result.verdict.outcome, result.verdict.code) == ("VIOLATION", "less noise")
    assert result.alarm is None  # it refuted the stated noise, and nobody claimed anything


def flower_run(noise, *, rounds=4, **settings):
    options = {"mode": "replace", "canary_nodes": {node: node - 1 for node in range(1, 26)}, "canaries": 25}
    options |= {"seed": SEED, "delta": 1e-5} | settings
    strategy = flower.audited(server_side(50, noise=noise), initial_arrays(SMALL), **options)
    small_run(strategy, LoopGrid(client_app(), nodes(50, 0)), rounds=rounds)
    return strategy.audit


def test_flower_is_stopped_in_the_round_that_refutes_the_claim():
    claim = mechanism_epsilon(1.0, delta=1e-5)
    with pytest.raises(ViolationError) as caught:
        flower_run(0.5, claim=claim, on_violation="raise")
    assert caught.value.alarm.round == 1


def test_flower_without_a_claim_checks_its_noise():
    alarms = []
    assert flower_run(1.0, on_violation=alarms.append).last_round == 4
    assert alarms == []
    with pytest.raises(ValueError, match="on_violation needs a claim or a noise multiplier to test the rounds against"):
        flower_run(0.0, on_violation="warn")


def test_a_claim_given_at_the_start_is_judged_at_the_end():
    audit = flower_run(1.0, claim=30.0)
    assert audit.finish().claim.epsilon == 30.0
