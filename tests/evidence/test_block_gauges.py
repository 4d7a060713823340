"""Gauges of a model in blocks detect noise that a part lacks or two blocks share, and pass honest noise."""

import math
from dataclasses import replace

import numpy as np
import pytest

from coalmine import Audit, mechanism_epsilon
from coalmine.evidence.gauges.gauge_reader import GaugeReader
from coalmine.evidence.views import RoundViews
from coalmine.measure.round import Round
from coalmine.measure.settings import checked_settings

DELTA, CLIENTS, HALF = 1e-5, 100, 9_000
CLAIM = float(mechanism_epsilon(1.0, delta=DELTA))


def noise_of(fault, rng, before):
    """One round's noise in two halves, each of them a block: two ranks' shards of one layer."""
    one, two = rng.normal(size=(2, HALF))
    if fault == "one half weak":
        one, two = 0.3 * one, math.sqrt(2 - 0.09) * two
    if fault == "an end weak":
        one[:1_000], one[1_000:2_000] = 0.3 * one[:1_000], math.sqrt(2 - 0.09) * one[1_000:2_000]
    if fault == "same draw":
        two = one
    if fault == "half the same":
        two = 0.5 * one + math.sqrt(0.75) * two
    if fault == "other's last draw" and before is not None:
        two = before[:HALF]
    if fault == "prefix":
        two[:2_500] = one[:2_500]
    return np.concatenate([one, two])


def audited(fault, dtype=np.float32):
    audit = Audit.for_model(
        {"layer": np.zeros(2 * HALF, dtype)},
        canaries=300,
        seed=b"the secret of block gauges",
        delta=DELTA,
        rounds=20,
        blocks=[HALF, HALF],
    )
    rng, before = np.random.default_rng(4), None
    for number in range(1, 21):
        present = audit.canaries_in_round(number)
        before = noise_of(fault, rng, before)
        others = 0.05 * rng.normal(size=2 * HALF)
        delta = (before + others + audit.updates(present, 1.0)["layer"]) / CLIENTS
        audit.observe_round(
            number,
            {"layer": delta.astype(dtype)},
            present=present,
            others={"layer": (others / CLIENTS).astype(dtype)},
            noise_std=1 / CLIENTS,
            clip_norm=1 / CLIENTS,
        )
    return audit.result(claim=CLAIM)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_honest_run_passes(dtype):
    result = audited("none", dtype)
    assert str(result.verdict.outcome) == "PASS"
    assert {"parts of blocks", "shared blocks"} <= {gauge.name for gauge in result.gauges}


@pytest.mark.parametrize(
    ("fault", "gauge"),
    [
        ("one half weak", "parts of blocks"),
        ("an end weak", "parts of blocks"),
        ("same draw", "shared blocks"),
        ("half the same", "shared blocks"),
        ("other's last draw", "shared blocks"),
        ("prefix", "shared blocks"),
    ],
)
def test_faulty_noise_with_the_right_total_length_is_a_violation(fault, gauge):
    """In each of these faults, the noise of the whole model and of each layer has the right length."""
    result = audited(fault)
    assert str(result.verdict.outcome) == "VIOLATION"
    assert gauge in {each.name for each in result.gauges if each.status == "low"}


@pytest.mark.parametrize("sizes", [[2_000, 3_000], [900] * 12])
def test_gauges_keep_their_false_positive_rate(sizes):
    """400 runs of five rounds, with lengths and sketches drawn from their null laws, at a level of 10 %."""
    settings = checked_settings(
        sum(sizes),
        canaries=20,
        unobserved=50,
        delta=DELTA,
        kind="rotated",
        rounds=None,
        presentations=1,
        momentum=0.0,
        layers=None,
        blocks=sizes,
    )
    rng, level, runs = np.random.default_rng(6), 0.1, 400
    parts = np.repeat([size // settings.chunks for size in sizes], settings.chunks)
    alarms = {"parts of blocks": 0, "shared blocks": 0}
    for _ in range(runs):
        reader = GaugeReader(settings, 5)
        for number in range(1, 6):
            item = replace(
                Round(number=number, noise_std=2.0),
                chunk_rests=2.0 * np.sqrt(rng.chisquare(parts)),
                block_sketches=rng.normal(size=len(sizes) * settings.sketch).astype(np.float32),
            )
            reader.add(RoundViews(item, None, None, None, None))
        for gauge in reader.results(level):
            alarms[gauge.name] += gauge.status == "low"
    most = level + 3 * math.sqrt(level * (1 - level) / runs)
    assert all(0 < count <= most * runs for count in alarms.values()), alarms
