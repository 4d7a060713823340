"""The rounds that are measured in full: drawn by the key, often enough, and the same for whoever has the key."""

from itertools import pairwise

import numpy as np
import pytest

from coalmine import Audit, RunDirectory
from coalmine.measure.expensive_rounds import ExpensiveRounds
from coalmine.measure.schedule import schedule_key
from coalmine.measure.settings import checked_settings
from coalmine.verification import verify_run

LARGE, SMALL = 10**6, 10**4


def drawn(dim, rounds, *, seed=1, planned=True):
    settings = checked_settings(
        dim,
        canaries=10,
        unobserved=None,
        delta=1e-6,
        kind="rotated",
        rounds=rounds if planned else None,
        presentations=1,
        momentum=0.0,
        layers=None,
    )
    chosen = ExpensiveRounds(settings, schedule_key(seed))
    return [number for number in range(1, rounds + 1) if number in chosen]


@pytest.mark.parametrize("rounds", [1, 7, 8, 9, 29, 100, 399, 1000])
def test_a_large_model_has_at_least_eight_expensive_rounds_and_few_more(rounds):
    chosen = drawn(LARGE, rounds)
    assert len(chosen) == min(max(8, -(-rounds // 50)), rounds)
    assert all(later - earlier <= 100 for earlier, later in pairwise(chosen))


def test_without_a_planned_number_eight_of_the_first_twenty_rounds_are_drawn():
    chosen = drawn(LARGE, 500, planned=False)
    assert chosen[0] == 1
    assert sum(number <= 20 for number in chosen) == 8
    assert sum(20 < number <= 100 for number in chosen) == 4
    assert sum(number > 100 for number in chosen) == 8


def test_a_small_model_is_measured_in_full_in_all_first_rounds_and_at_least_in_every_tenth():
    chosen = drawn(SMALL, 1000)
    assert chosen[:20] == list(range(1, 21))
    assert max(later - earlier for earlier, later in pairwise(chosen)) < 20
    assert len(chosen) == 20 + 20 + 28 + 80


@pytest.mark.full
def test_each_round_of_a_stretch_is_drawn_equally_often():
    """80 rounds make eight stretches of ten. Over 2,000 keys a round is drawn 200 times, with a standard deviation of 13."""
    counts = np.zeros(81)
    for seed in range(2000):
        counts[drawn(LARGE, 80, seed=seed)] += 1
    assert np.abs(counts[1:] - 200).max() < 5 * np.sqrt(2000 * 0.1 * 0.9)


def test_the_draw_depends_on_the_key_and_survives_a_restart(tmp_path):
    assert drawn(LARGE, 100) == drawn(LARGE, 100)
    assert drawn(LARGE, 100) != drawn(LARGE, 100, seed=2)
    whole, resumed = [], []
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(30, 400))
    for stop in (None, 24):
        directory = None if stop is None else tmp_path / "run"
        for first, last in ((1, 30),) if stop is None else ((1, stop), (stop + 1, 30)):
            audit = Audit(400, canaries=20, seed=b"a secret of its own", delta=1e-6, rounds=30, directory=directory)
            for number in range(first, last + 1):
                told = {"others": np.zeros(400), "noise_std": 1.0, "clip_norm": 1.0}
                audit.observe_round(number, noise[number - 1], present=[], **told)
            numbers = [item.number for item in audit.log.rounds() if item.law_counts is not None]
            (whole if stop is None else resumed)[:] = numbers
            audit.close()
    assert whole == resumed
    assert 20 < len(whole) < 30


@pytest.mark.full
def test_noise_on_a_grid_after_the_first_twenty_rounds_is_seen():
    """Four stretches of two rounds lie between rounds 21 and 29, so at least four of these are measured."""
    dim, rounds = 1000, 29
    for seed in range(20):
        rng = np.random.default_rng([seed, 3])
        audit = Audit(dim, canaries=70, seed=rng.bytes(16), delta=1e-6, rounds=rounds)
        for number in range(1, rounds + 1):
            noise = rng.normal(size=dim)
            noise = np.round(noise / 0.25) * 0.25 if number > 20 else noise
            present, others = audit.canaries_in_round(number), rng.normal(size=dim) / 3
            release = audit.updates(present, 1.0) + others + noise
            audit.observe_round(number, release, present=present, others=others, noise_std=1.0, clip_norm=1.0)
        assert audit.result(claim=4.9).verdict.outcome != "PASS"


@pytest.mark.parametrize("plan", [None, ((10**9, 10**8),)])
def test_verification_draws_the_expensive_rounds_again(plan, tmp_path, monkeypatch):
    """A pipeline that measures fewer of them is found out once the seed is known."""
    rng = np.random.default_rng(0)
    with monkeypatch.context() as patched:
        if plan is not None:
            patched.setattr("coalmine.measure.expensive_rounds.SMALL", plan)
        with Audit(
            400, canaries=20, seed=b"a seed of its own", delta=1e-6, directory=RunDirectory(tmp_path / "run")
        ) as audit:
            for number in range(1, 25):
                told = {"others": np.zeros(400), "noise_std": 1.0, "clip_norm": 1.0}
                audit.observe_round(number, rng.normal(size=400), present=[], **told)
            audit.observe_final(rng.normal(size=400))
            audit.finish()
    schedule = next(check for check in verify_run(tmp_path / "run", b"a seed of its own") if check.name == "schedule")
    assert schedule.held is (plan is None), schedule.detail
