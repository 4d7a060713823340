"""In large blocks, the noise law is measured in the middle of each block and lengths are measured everywhere."""

import numpy as np
import pytest

from coalmine import Audit, mechanism_epsilon
from coalmine.measure import settings

DELTA, CLIENTS = 1e-5, 100
CLAIM = float(mechanism_epsilon(1.0, delta=DELTA))
SHAPES = {"first": (200, 60), "second": (9_000,), "third": (300, 50)}


def audited(fault, monkeypatch):
    monkeypatch.setattr(settings, "LAW_STRETCH", 4_000)
    model = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    audit = Audit.for_model(
        model, canaries=400, seed=b"the secret of stretches", delta=DELTA, rounds=20, blocks=[12_000] * 3
    )
    assert audit.settings.law_dim == 12_000
    rng = np.random.default_rng(3)
    for number in range(1, 21):
        noise = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in SHAPES.items()}
        if fault == "laplace":
            noise = {name: rng.laplace(0, 0.5**0.5, shape).astype(np.float32) for name, shape in SHAPES.items()}
        if fault == "end of a layer":  # outside every measured stretch
            noise["third"][-60:] *= 0.1
        others = {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in SHAPES.items()}
        present = audit.canaries_in_round(number)
        canaries = audit.updates(present, 1.0)
        delta = {name: (noise[name] + others[name] + canaries[name]) / CLIENTS for name in SHAPES}
        told = {name: value / CLIENTS for name, value in others.items()}
        audit.observe_round(number, delta, present=present, others=told, noise_std=1 / CLIENTS, clip_norm=1 / CLIENTS)
    return audit.result(claim=CLAIM)


def test_an_honest_run_passes_and_states_the_measured_share(monkeypatch):
    result = audited("none", monkeypatch)
    assert str(result.verdict.outcome) == "PASS"
    law = next(item for item in result.audited if item.name == "noise law")
    assert law.detail.endswith("(on 12,000 of 36,000 coordinates)")


@pytest.mark.parametrize(("fault", "gauge"), [("laplace", "shape"), ("end of a layer", "layer third")])
def test_faults_are_detected_by_law_or_by_length(fault, gauge, monkeypatch):
    result = audited(fault, monkeypatch)
    assert str(result.verdict.outcome) != "PASS"
    assert gauge in {each.name for each in result.gauges if each.status != "ok"}
