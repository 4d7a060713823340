"""Gauges that follow each coordinate over the rounds: honest runs, weak coordinates, restarts, and what the log has."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from weak_coordinates import power

from coalmine import Audit, BandedNoise, RunDirectory, TreeNoise
from coalmine.evidence.gauges.coordinates import Coordinates
from coalmine.evidence.gauges.gauge import LEVEL
from coalmine.evidence.gauges.gauge_reader import read_gauges
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.views import RoundViews
from coalmine.measure.coordinate_sums import CoordinateReading, CoordinateSums
from coalmine.verification import verify_run

SEED = b"a seed that is long enough"
NAMES = ("coordinates", "weak coordinates")


def train(
    *, dim=2000, rounds=15, stds=1.0, seed=0, signal=1.0, known=True, canaries=60, first=1, last=None, **settings
):
    """An audit of noise whose standard deviation differs by coordinate, with real updates that drift."""
    rng = np.random.default_rng([seed, 4])
    audit = Audit(dim, canaries=canaries, seed=SEED + bytes([seed]), delta=1e-6, rounds=rounds, **settings)
    drift = signal * rng.normal(size=dim)
    for number in range(1, (last or rounds) + 1):
        noise, others = stds * rng.normal(size=dim), drift * rng.uniform(0.5, 1.5)
        if number >= first:
            present = audit.canaries_in_round(number)
            told = {"others": others if known else None, "noise_std": 1.0, "clip_norm": 1.0}
            audit.observe_round(number, audit.updates(present, 1.0) + others + noise, present=present, **told)
    return audit


def gauges(audit):
    return {gauge.name: gauge for gauge in read_gauges(audit.log, audit.settings) if gauge.name in NAMES}


def last_reading(audit):
    return [
        CoordinateReading.of(item.law_coordinates) for item in audit.log.rounds() if item.law_coordinates is not None
    ][-1]


def weak(dim, count, std, *, seed=0):
    stds = np.ones(dim)
    stds[np.random.default_rng([seed, 5]).permutation(dim)[:count]] = std
    return stds


@pytest.mark.parametrize(
    ("dim", "rounds", "count", "std"),
    [
        (10_000, 15, 100, 0.5),
        (3_000, 8, 1, 0.0),
        pytest.param(3_000, 60, 30, 0.5, marks=pytest.mark.full),
        pytest.param(10_000, 5, 100, 0.25, marks=pytest.mark.full),
        pytest.param(3_000, 15, 30, 0.25, marks=pytest.mark.full),
        pytest.param(3_000, 30, 6, 0.05, marks=pytest.mark.full),
        pytest.param(10_000, 15, 500, 0.7, marks=pytest.mark.full),
    ],
)
def test_no_pass_where_the_power_against_weak_coordinates_is_high(dim, rounds, count, std):
    """With a power of at least 95 %, at most one in a thousand times do three of five runs pass."""
    assert power(dim, rounds, count, std) > 0.95
    outcomes = [
        train(dim=dim, rounds=rounds, stds=weak(dim, count, std, seed=seed), seed=seed)
        .result(claim=4.9)
        .verdict.outcome
        for seed in range(5)
    ]
    assert outcomes.count("PASS") <= 2


def test_honest_sums_are_chi_squared():
    """The counts below both quantiles are binomial: 40 runs of 2,000 coordinates, with a slack of 1 % in the variance."""
    counts = sum(np.array(last_reading(train(rounds=6, seed=seed)).counts) for seed in range(40))
    for count, probability in zip(counts.tolist(), (1e-3, 1e-2), strict=True):
        low, high = stats.binom.ppf([1e-4, 1 - 1e-4], 80_000, probability)
        assert low <= count <= high


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"kind": "sphere", "unobserved": 60}, marks=pytest.mark.full),
        {"momentum": 0.9, "unobserved": 300},
        {"layers": [("a", 300), ("b", 5), ("c", 1695)]},
        {"known": False},
        {"signal": 30.0},
    ],
)
def test_honest_runs_stay_within_the_limits(settings):
    momentum = settings.get("momentum", 0.0)
    for seed in range(4):
        audit = train(seed=seed, **settings) if not momentum else momentum_run(seed, momentum)
        assert {gauge.status for gauge in gauges(audit).values()} == {"ok"}
        assert not any(note.startswith("coordinates") for note in audit.result().notes)


def momentum_run(seed, momentum):
    rng = np.random.default_rng(seed)
    audit = Audit(1000, canaries=20, unobserved=300, seed=SEED, delta=1e-6, rounds=12, momentum=momentum)
    before = np.zeros(1000)
    for number in range(1, 13):
        present, others = audit.canaries_in_round(number), rng.normal(size=1000)
        before = audit.updates(present, 1.0) + others + rng.normal(size=1000) + momentum * before
        audit.observe_round(number, before, present=present, others=others, noise_std=1.0, clip_norm=1.0)
    return audit


@pytest.mark.parametrize("noise", [BandedNoise.for_prefix_sums(12, bands=3), TreeNoise(rounds=12)])
@pytest.mark.parametrize("std", [1.0, 0.3])
def test_correlated_noise_is_whitened_before_coordinates_are_followed(noise, std):
    dim, rng = 1000, np.random.default_rng(1)
    rows = np.linalg.inv(noise.matrix()) @ (rng.normal(size=(12, dim)) * weak(dim, 50, std))
    audit = Audit(dim, canaries=20, unobserved=300, seed=SEED, delta=1e-6, rounds=12, noise=noise)
    for number, row in enumerate(rows, start=1):
        present, others = audit.canaries_in_round(number), rng.normal(size=dim)
        told = {"others": others, "noise_std": noise.std(number), "clip_norm": 1.0}
        audit.observe_round(number, audit.updates(present, 1.0) + others + row, present=present, **told)
    assert last_reading(audit).rounds == 12
    assert (gauges(audit)["weak coordinates"].status == "ok") == (std == 1.0)


@pytest.mark.parametrize("coarse", [torch.bfloat16, torch.float16, "grid"])
def test_rounding_of_an_honest_release_is_not_taken_for_missing_noise(coarse):
    """Under a signal of 10 standard deviations bf16 leaves many exact zeros in two rounds."""
    dim, rng = 200_000, np.random.default_rng(2)

    def rounded(values):
        return np.round(values * 16) / 16 if coarse == "grid" else torch.from_numpy(values).to(coarse).double().numpy()

    audit = Audit(dim, canaries=10, unobserved=10, seed=SEED, delta=1e-6)
    zeros = 0
    for number in (1, 2):
        others = rounded(10 * rng.normal(size=dim))
        release = rounded(others + rng.normal(size=dim))
        zeros += int((release == others).sum())
        audit.observe_round(number, release, present=[], others=others, noise_std=1.0, clip_norm=1.0)
    assert zeros > 100
    assert {gauge.status for gauge in gauges(audit).values()} == {"ok"}


def test_a_reading_names_the_layer_and_the_number_of_weak_coordinates():
    layers = [("first", 1500), ("second", 500)]
    stds = np.ones(2000)
    stds[1500:1560] = 0.4
    result = train(stds=stds, layers=layers).result()
    note = next(note for note in result.notes if note.startswith("coordinates"))
    assert "in layer second" in note
    assert "of 2,000 hold less noise over rounds 1 to 15" in note
    reading = last_reading(train(stds=stds, layers=layers))
    assert reading.by_layer[1] > 40
    assert reading.by_layer.sum() == reading.counts[-1]


def test_a_single_coordinate_without_noise_is_a_violation_and_its_share_is_bounded():
    """The limit of what is left follows from the smallest quantile of chi-squared, which no honest coordinate goes below."""
    audit = train(stds=weak(2000, 1, 0.02), rounds=20)
    gauge = gauges(audit)["coordinates"]
    assert gauge.status == "low"
    assert gauge.smallest < gauge.limits[0]
    assert 0.02 < gauge.noise_left < 0.2
    verdict = audit.result(claim=4.9).verdict
    assert (verdict.outcome, verdict.code) == ("VIOLATION", "gauge")


def test_without_others_weak_coordinates_bar_a_pass_but_strong_ones_do_not():
    assert gauges(train(stds=weak(2000, 60, 0.2), signal=0.1, known=False))["weak coordinates"].bars_pass
    strong = gauges(train(stds=weak(2000, 60, 3.0), signal=0.1, known=False))
    assert {gauge.status for gauge in strong.values()} == {"ok"}
    assert gauges(train(stds=weak(2000, 60, 3.0)))["coordinates"].status == "warning"


def test_weak_coordinates_in_the_first_rounds_only_are_seen_by_an_early_reading():
    dim, rng = 4000, np.random.default_rng(3)
    audit = Audit(dim, canaries=20, seed=SEED, delta=1e-6, rounds=200)
    stds = weak(dim, 200, 0.1)
    for number in range(1, 201):
        noise = rng.normal(size=dim) * (stds if number <= 8 else 1.0)
        audit.observe_round(number, noise, present=[], others=np.zeros(dim), noise_std=1.0, clip_norm=1.0)
    assert gauges(audit)["weak coordinates"].bars_pass


def test_a_restart_follows_coordinates_anew_and_says_so(tmp_path):
    told = {"stds": weak(2000, 40, 0.2), "rounds": 20, "directory": tmp_path / "run"}
    with train(last=12, **told):
        pass
    with train(first=13, **told) as audit:
        readings = [CoordinateReading.of(item.law_coordinates) for item in audit.log.rounds()]
        assert [(one.first, one.last, one.rounds) for one in readings[11:13]] == [(1, 12, 12), (13, 13, 1)]
        assert any("rounds 1 to 12, then rounds 13 to 20" in note for note in audit.result().notes)
        assert any(gauge.status == "low" for gauge in gauges(audit).values())


def test_a_round_that_is_observed_again_is_not_counted_twice():
    audit = train(rounds=6)
    before = last_reading(audit)
    audit.rewind_to(5)
    audit.observe_round(6, np.ones(2000), present=[], others=np.zeros(2000), noise_std=1.0)
    assert (before.rounds, last_reading(audit).rounds) == (6, 1)


def test_the_last_reading_is_recorded_with_the_final_model_and_verified(tmp_path):
    """A large model is read at powers of two, as rounds go on, and at the end."""
    dim, rng = 140_000, np.random.default_rng(0)
    stds = weak(dim, 700, 0.3)
    home = RunDirectory(tmp_path / "run")
    with Audit(dim, canaries=20, unobserved=20, seed=SEED, delta=1e-6, directory=home, claim=5.0) as audit:
        model = np.zeros(dim)
        for number in range(1, 13):
            others = rng.normal(size=dim)
            release = others + stds * rng.normal(size=dim)
            audit.observe_round(number, release, present=[], others=others, noise_std=1.0, clip_norm=1.0)
            model += release
        audit.observe_final(model)
        read = [item.number for item in audit.log.rounds() if item.law_coordinates is not None]
        assert read == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11]
        last = CoordinateReading.of(audit.log.final.law_coordinates)
        assert (last.rounds, last.followed) == (12, dim)
        assert gauges(audit)["weak coordinates"].status == "low"
        audit.finish()
    checks = {check.name: check for check in verify_run(tmp_path / "run", SEED)}
    assert checks["result"].held, checks["result"].detail


def test_correlated_noise_in_a_large_model_is_followed_on_a_secret_stretch():
    noise = BandedNoise.for_prefix_sums(8, bands=4)
    settings = Audit(1_000_000, canaries=20, unobserved=300, seed=SEED, delta=1e-6, noise=noise).settings
    places = [CoordinateSums.of_vector(settings, bytes([key]) * 32).places[0] for key in range(20)]
    assert {place.stop - place.start for place in places} == {250_000}
    assert len({place.start for place in places}) == 20


def test_torch_and_numpy_have_the_same_sums():
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(4, 600)).astype(np.float32)
    readings = []
    for kind in (np.asarray, torch.from_numpy):
        audit = Audit(600, canaries=10, seed=SEED, delta=1e-6)
        for number, row in enumerate(rows, start=1):
            audit.observe_round(number, kind(row), present=[], others=kind(0 * row), noise_std=1.0, clip_norm=1.0)
        readings.append(last_reading(audit).to_array())
    np.testing.assert_allclose(*readings, rtol=1e-6)
    sums = np.sum(rows.astype(np.float64) ** 2 / np.mean(rows.astype(np.float64) ** 2, axis=1)[:, None], axis=0)
    assert readings[0][5] == pytest.approx(sums.min(), rel=1e-5)
    assert readings[0][6] == pytest.approx(sums.max(), rel=1e-5)


def test_more_chance_hits_than_the_level_allows_are_a_warning_with_true_limits():
    """Whatever the counts, a reading that fails lies outside its printed limits, and one that does not lies inside."""
    settings = train(rounds=1).settings
    for count in range(0, 200, 3):
        reading = replace(last_reading(train(rounds=2)), counts=(count // 10, count))
        reader = Coordinates(GaugedRounds(settings, 1))
        item = replace(next(iter(train(rounds=1).log.rounds())), law_coordinates=reading.to_array())
        reader.add(RoundViews(item, None, None, None, None))
        gauge = {each.name: each for each in reader.results(LEVEL)}["weak coordinates"]
        assert (gauge.status == "ok") == (gauge.smallest <= gauge.limits[1])
        assert gauge.noise_left is None or 0 < gauge.noise_left < 1
        assert math.isfinite(gauge.limits[1])


@pytest.mark.parametrize("coarse", [False, True])
def test_sums_on_a_device_are_those_of_the_host(coarse, monkeypatch):
    """The arithmetic of a GPU and of jax, on a CPU: groups of layers, and values that are increased by their rounding."""
    jnp = pytest.importorskip("jax.numpy")
    rng = np.random.default_rng(6)
    settings = Audit(2000, canaries=20, seed=SEED, delta=1e-6, layers=[("a", 700), ("b", 1300)]).settings
    rows, others = (rng.normal(size=(3, 2000)).astype(np.float32) for _ in range(2))
    if coarse:
        rows = (rows + 10 * others).astype(np.float16).astype(np.float32) - (10 * others).astype(np.float16)
    readings = {}
    for name, kind in (("numpy", np.asarray), ("torch", torch.from_numpy), ("jax", jnp.asarray)):
        sums = CoordinateSums.of_vector(settings, b"key")
        with monkeypatch.context() as patched:
            patched.setattr("coalmine.measure.coordinate_sums.is_on_device", lambda vector, name=name: name != "numpy")
            patched.setattr("coalmine.canaries.rotation_jax.on_cpu", lambda array: False)
            for number, (row, other) in enumerate(zip(rows, others, strict=True), start=1):
                release = (row + 10 * other).astype(np.float16).astype(np.float32) if coarse else row + other
                assert sums.add(number, 0, kind(row), kind(release), others=kind(other))
                assert sums.end(number)
            readings[name] = sums.read()
    assert readings["numpy"][4] == (not coarse)
    np.testing.assert_allclose(readings["torch"], readings["numpy"], rtol=1e-4)
    np.testing.assert_allclose(readings["jax"], readings["numpy"], rtol=1e-4)
