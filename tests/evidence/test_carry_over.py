"""Rows of earlier rounds that come again, and honest runs in which none do."""

import math

import numpy as np
import pytest

from coalmine import Audit, BandedNoise, Claim, TreeNoise
from coalmine.evidence.gauges.carry_over import LAGS, CarryOver
from coalmine.evidence.gauges.gauge_reader import GaugeReader
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.views import read_log

SHAPES = {  # of honest runs: the audit's settings, and the loop's
    "one presentation": ({"canaries": 100, "rounds": 12}, {}),
    "three presentations": ({"canaries": 60, "rounds": 10, "presentations": 3}, {}),
    "most rounds": ({"canaries": 40, "rounds": 6, "presentations": 5}, {}),
    "momentum": ({"canaries": 60, "rounds": 10, "momentum": 0.9}, {}),
    "few dimensions": ({"dim": 60, "canaries": 30, "unobserved": 20, "rounds": 8}, {}),
    "few dimensions with momentum": ({"dim": 260, "canaries": 30, "rounds": 8, "momentum": 0.5}, {}),
    "banded noise": (
        {"canaries": 60, "rounds": 10, "noise": BandedNoise(coefficients=(1.0, 0.5, 0.25), rounds=10)},
        {},
    ),
    "tree noise": ({"canaries": 60, "rounds": 10, "noise": TreeNoise(rounds=10)}, {}),
    "two rounds": ({"canaries": 30, "rounds": 2}, {}),
    "rounds of one's own": ({"canaries": 80, "rounds": 10}, {"sampled": 0.2}),
    "clip norms that change": ({"canaries": 60, "rounds": 10}, {"clip_norms": (0.5, 1.0, 4.0)}),
    "a long signal": ({"canaries": 60, "rounds": 10}, {"signal": 50.0}),
}


QUICK = ("two rounds",)


def train(
    seed,
    *,
    share=0.0,
    lags=(),
    signal=1.0,
    sampled=None,
    clip_norms=(1.0,),
    declared=True,
    noise_multiplier=1.0,
    dim=400,
    **settings,
):
    """An audit of a loop in which `share` of the rows of the rounds `lags` before comes again."""
    rng = np.random.default_rng(seed)
    audit = Audit(dim, seed=int(seed).to_bytes(16, "big"), delta=1e-5, **{"unobserved": None, **settings})
    rounds, momentum, noise = settings["rounds"], settings.get("momentum", 0.0), settings.get("noise")
    draws, correlated = rng.normal(size=(rounds, dim)), np.eye(rounds)
    if noise is not None:
        correlated = np.linalg.inv(noise.matrix())
    drift, velocity, sums = rng.normal(size=dim), np.zeros(dim), []
    for t in range(1, rounds + 1):
        clip = clip_norms[t % len(clip_norms)]
        drift = 0.9 * drift + math.sqrt(0.19) * rng.normal(size=dim)
        present = (
            audit.canaries_in_round(t)
            if sampled is None
            else np.flatnonzero(rng.random(audit.settings.canaries) < sampled)
        )
        sums.append(audit.updates(present, clip))
        old = share * sum((sums[t - 1 - lag] for lag in lags if lag < t), np.zeros(dim))
        std = noise_multiplier * clip * float(np.linalg.norm(correlated[t - 1]))
        velocity = (
            momentum * velocity
            + signal * drift
            + sums[-1]
            + old
            + noise_multiplier * clip * (correlated[t - 1] @ draws)
        )
        audit.observe_round(
            t,
            velocity,
            present=present,
            others=signal * drift,
            noise_std=std,
            **({"clip_norm": clip} if declared else {}),
        )
    return audit


def statistic(audit):
    reader = GaugeReader(audit.settings, len(audit.log.numbers))
    read_log(audit.log, audit.settings, reader)
    return next((each for each in reader.results() if each.statistic is CarryOver.AGAIN), None)


def alone(audit):
    """The gauge without all others."""
    gauge = CarryOver(GaugedRounds(audit.settings, len(audit.log.numbers)))
    read_log(audit.log, audit.settings, gauge)
    return gauge


@pytest.mark.parametrize(("share", "lags"), [(1.0, range(1, 20)), (1.0, (1,)), (0.9, (LAGS,))])
def test_rows_that_come_again_are_measured_and_refute_the_claim(share, lags):
    """Gradients that are never cleared bring all earlier rows back, a buffer of one round those of the last."""
    audit = train(1, share=share, lags=lags, dim=4_000, canaries=600, rounds=12)
    found = statistic(audit)
    assert found.status == "low"
    assert found.smallest == pytest.approx(share, abs=4 / math.sqrt(400))
    assert found.smallest > found.limits[1]
    told = math.sqrt(1 + share**2 * len([lag for lag in lags if lag <= LAGS]))  # true factor of an old row's exposure
    assert 1 / told < found.noise_left < 1
    if len(lags) > 1:
        assert found.noise_left < 1.3 / told
    verdict = audit.result(claim=Claim(epsilon=4.4, participations=1)).verdict  # the mechanism's epsilon is 4.377
    assert (verdict.outcome, verdict.facts["gauge"]) == ("VIOLATION", found.name)


def test_rows_that_come_again_with_a_minus_bar_a_pass():
    """As if a step subtracted the rows before it: no proof of a larger epsilon."""
    found = statistic(train(2, share=-0.6, lags=(1,), dim=2_000, canaries=300, rounds=10))
    assert (found.status, found.noise_left) == ("warning", None)
    assert found.smallest == pytest.approx(-0.6, abs=0.25)


def test_a_small_share_bars_a_pass_without_proving_a_larger_epsilon():
    audit = train(3, share=0.4, lags=(2,), dim=4_000, canaries=600, rounds=12)
    found = statistic(audit)
    assert found.status == "warning"
    assert found.smallest == pytest.approx(0.4, abs=4 / math.sqrt(500))
    verdict = audit.result(claim=Claim(epsilon=4.4, participations=1)).verdict
    assert (verdict.outcome, verdict.facts["gauge"]) == ("UNDERPOWERED", found.name)


@pytest.mark.parametrize("settings", [{"declared": False}, {"noise": BandedNoise(coefficients=(1.0, 0.3), rounds=10)}])
def test_without_a_unit_it_is_a_warning(settings):
    found = statistic(train(3, share=1.0, lags=(1, 2, 3), dim=2_000, canaries=300, rounds=10, **settings))
    assert found.status == "warning"
    assert found.smallest == pytest.approx(1.0, abs=0.35)


def test_a_release_that_holds_the_one_before_proves_nothing():
    """An undeclared momentum carries the noise on as well: a function of releases costs no privacy."""
    audit = train(4, dim=2_000, canaries=300, rounds=10)
    again = Audit(2_000, canaries=300, seed=b"tests only", delta=1e-5, rounds=10)
    rng, velocity = np.random.default_rng(0), np.zeros(2_000)
    for t in range(1, 11):
        present, others = again.canaries_in_round(t), rng.normal(size=2_000)
        velocity = 0.9 * velocity + again.updates(present, 1.0) + rng.normal(size=2_000)
        again.observe_round(t, velocity + others, present=present, others=others, noise_std=1.0, clip_norm=1.0)
    assert statistic(audit).status == "ok"
    assert statistic(again).status == "warning"


def test_what_cannot_be_measured_is_left_out():
    """Canaries in every round, and canaries that overlap."""
    for settings in ({"presentations": 6}, {"kind": "sphere"}):
        assert statistic(train(5, **{"canaries": 40, "rounds": 6, **settings})) is None
    assert statistic(train(5, canaries=40, rounds=6)) is not None


@pytest.mark.parametrize(
    "shape", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SHAPES]
)
def test_honest_runs_stay_within_the_level(shape):
    """Monte Carlo at loose levels, four standard errors; at the gauge's own level none of the runs leaves its limits."""
    settings, loop = SHAPES[shape]
    runs, outside, level = 60, 0, 0.2
    for seed in range(runs):
        gauge = alone(train(seed, **settings, **loop))
        outside += next(gauge.results(level)).status != "ok"
        assert next(gauge.results(1e-4)).status == "ok"
    assert outside / runs <= level + 4 * math.sqrt(level * (1 - level) / runs)
