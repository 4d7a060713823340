"""A result of many rounds takes no more memory than one of few rounds, and agrees with it."""

import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from coalmine.evidence import ladder as ladder_module
from coalmine.evidence import views
from coalmine.evidence.gauges import gauged_rounds
from coalmine.evidence.ladder import ladder
from coalmine.log.rounds_file import RoundLog
from coalmine.measure.round import Round
from coalmine.measure.settings import Settings
from coalmine.result.derivation import derive_result

DIM, CANARIES, UNOBSERVED = 6_000, 40, 400


def settings(rounds: int) -> Settings:
    return Settings(dim=DIM, canaries=CANARIES, unobserved=UNOBSERVED, delta=1e-6, rounds=rounds)


def written_log(path: Path, rounds: int, *, others: bool = False) -> RoundLog:
    """Rounds with correlated real updates and three canaries each, so that every canary takes part several times."""
    rng, log = np.random.default_rng(rounds), RoundLog(path)
    common = rng.standard_normal(CANARIES + UNOBSERVED)
    for number in range(1, rounds + 1):
        noise = rng.standard_normal(CANARIES + UNOBSERVED)
        present = np.sort(rng.choice(CANARIES, 3, replace=False)).astype(np.int32)
        cosines = ((0.3 * common + noise) / np.sqrt(DIM)).astype(np.float32)
        cosines[present] += 0.5 / np.sqrt(DIM)
        residual = {
            "residual_norm": 1.0,
            "residual_rest": 1.0,
            "residual_cosines": (noise / DIM**0.5).astype(np.float32),
        }
        log.append(
            Round(
                number=number,
                present=present,
                norm=1.1,
                rest=1.1,
                cosines=cosines,
                noise_std=1 / np.sqrt(DIM),
                clip_norm=0.01,
                **(residual if others else {}),
            )
        )
    return log


def known_round(log: RoundLog, rounds: int) -> list[np.ndarray]:
    return [scores.observed for scores in ladder(log, settings(rounds)) if scores.rung == "known-round"]


def test_scores_do_not_depend_on_how_round_correlations_are_summed(tmp_path, monkeypatch):
    """Sums over each canary's rounds give the same variance as the Gram matrix of all rounds, up to rounding."""
    with closing(written_log(tmp_path / "log", 100)) as log:
        exact = known_round(log, 100)
        monkeypatch.setattr(ladder_module, "SHARED", CANARIES * UNOBSERVED)
        summed = known_round(log, 100)
    assert len(exact) == len(summed) > 1
    exact, summed = np.concatenate(exact), np.concatenate(summed)
    assert (exact != summed).any()  # type: ignore[attr-defined]  # the other code path was taken
    np.testing.assert_allclose(summed, exact, rtol=1e-5)


def test_fewer_unobserved_canaries_estimate_the_variance_within_their_sampling_error(tmp_path, monkeypatch):
    with closing(written_log(tmp_path / "log", 100)) as log:
        exact = np.concatenate(known_round(log, 100))
        monkeypatch.setattr(ladder_module, "SHARED", CANARIES * 100)
        ratio = np.concatenate(known_round(log, 100)) / exact
    assert np.abs(ratio - 1).max() > 1e-3
    assert np.abs(ratio**-2 - 1).max() < 5 * np.sqrt(2 / 100)


def test_a_result_of_four_times_the_rounds_takes_as_much_memory(tmp_path, monkeypatch):
    """It used to take 0.34 MB per round; a few hundred numbers per round remain."""
    monkeypatch.setattr(ladder_module, "SHARED", CANARIES * UNOBSERVED)
    monkeypatch.setattr(views, "SKETCH", 1 << 16)
    monkeypatch.setattr(gauged_rounds, "COMPARED", 64)
    monkeypatch.setattr(gauged_rounds, "BLOCK", 16)
    peaks = []
    for rounds in (100, 400):
        with closing(written_log(tmp_path / f"log{rounds}", rounds, others=True)) as log:
            derive_result(log, settings(rounds))  # fills the caches
            tracemalloc.start()
            derive_result(log, settings(rounds))
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 300 * 5_000


def brute_pairs(rows: np.ndarray, apart: int) -> tuple[np.ndarray, float, int]:
    cosines = np.array([row / np.linalg.norm(row) for row in rows.astype(np.float64)])
    cosines = cosines @ cosines.T
    largest, squares, pairs = np.zeros(len(rows)), 0.0, 0
    for this in range(len(rows)):
        before = cosines[this, max(0, this - apart) : this]
        if before.size:
            largest[this] = before[np.abs(before).argmax()]
        squares, pairs = squares + float(before @ before), pairs + before.size
    return largest, squares, pairs


@pytest.mark.parametrize("rounds", [1, 15, 16, 17, 50])
def test_every_pair_of_rounds_is_compared_once(rounds, monkeypatch):
    monkeypatch.setattr(gauged_rounds, "BLOCK", 16)
    rows = np.random.default_rng(rounds).standard_normal((rounds, 30)).astype(np.float32)
    found = gauged_rounds.Pairs()
    for row in rows:
        found.add(row)
    for _ in range(2):  # a second call changes nothing
        largest, squares, pairs = found.results()
        wanted = brute_pairs(rows, rounds)
        np.testing.assert_allclose(largest, wanted[0], atol=1e-6)
        assert squares == pytest.approx(wanted[1], rel=1e-5)
        assert pairs == wanted[2] == rounds * (rounds - 1) // 2


def test_with_very_many_rounds_only_the_latest_are_compared(monkeypatch):
    """A round is compared with at least COMPARED rounds before it, fewer than a block more."""
    monkeypatch.setattr(gauged_rounds, "BLOCK", 16)
    monkeypatch.setattr(gauged_rounds, "COMPARED", 48)
    rows = np.random.default_rng(0).standard_normal((400, 30)).astype(np.float32)
    rows[348] = rows[300]
    found = gauged_rounds.Pairs()
    for row in rows:
        found.add(row)
    largest, _, pairs = found.results()
    assert largest[348] == pytest.approx(1)
    assert brute_pairs(rows, 48)[2] <= pairs <= brute_pairs(rows, 48 + 15)[2]
    assert len(found._before) + len(found._new) <= 48 + 16


def test_only_the_wanted_rounds_are_compared_with_those_before(monkeypatch):
    monkeypatch.setattr(gauged_rounds, "BLOCK", 16)
    rows = np.random.default_rng(1).standard_normal((50, 30)).astype(np.float32)
    wanted = [0, 3, 15, 16, 31, 40, 49]
    found = gauged_rounds.Pairs()
    for number, row in enumerate(rows):
        found.add(row, compared=number in wanted)
    largest, squares, pairs = found.results()
    np.testing.assert_allclose(largest[wanted], brute_pairs(rows, 50)[0][wanted], atol=1e-6)
    assert np.isnan(np.delete(largest, wanted)).all()
    assert pairs == sum(wanted)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert squares == pytest.approx(
        sum(float((units[w] @ units[:w].T) @ (units[w] @ units[:w].T)) for w in wanted), rel=1e-5
    )


def test_the_last_number_and_the_count_follow_skips_rewinds_and_reopening(tmp_path):
    def one_round(number, *, skipped):
        return Round(number=number, skipped=skipped, norm=1.0, rest=1.0, cosines=np.full(4, 0.1, np.float32))

    path = tmp_path / "rounds"
    with closing(RoundLog(path)) as log:
        assert (log.last_number, log.observed_count) == (0, 0)
        for number in (1, 2, 4, 7, 8):
            log.append(one_round(number, skipped=number in (2, 7)))
        assert (log.last_number, log.observed_count) == (8, 3)
    with closing(RoundLog(path)) as log:
        assert (log.last_number, log.observed_count, len(log.observed)) == (8, 3, 3)
        log.rewind_to(6)
        assert (log.last_number, log.observed_count, len(log.observed)) == (4, 2, 2)
        log.rewind_to(0)
        assert (log.last_number, log.observed_count) == (0, 0)
