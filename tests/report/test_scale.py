"""The report at full scale: 2,048 rounds × 2,000 canaries × 20 runs. Writes 1.3 GB, so it runs with the studies."""

import math
import time

import numpy as np
import pytest

from coalmine.log.run_directory import RunDirectory
from coalmine.measure.round import Final, Round
from coalmine.measure.schedule import spread_schedule
from coalmine.measure.settings import checked_settings
from coalmine.report import write_report
from coalmine.result.derivation import derive_result
from coalmine.verdict.claim import Claim

ROUNDS, CANARIES, DIM = 2_048, 2_000, 100_000


def long_run(path, seed, result=None):
    """A run like one in 100,000 dimensions, with simulated cosines instead of canaries."""
    settings = checked_settings(
        DIM, canaries=CANARIES, unobserved=CANARIES, delta=1e-6, kind="rotated", rounds=ROUNDS, presentations=4,
        momentum=0.0, layers=None,
    )  # fmt: skip
    home, rng, std = RunDirectory(path), np.random.default_rng(seed), np.float32(1 / math.sqrt(DIM))
    home.commit(seed, settings)
    log = home.open_log()
    norm, rest = math.sqrt(DIM) / 600, math.sqrt(DIM - CANARIES) / 600
    schedule = spread_schedule(CANARIES, rounds=ROUNDS, presentations=4, key=bytes([seed]))
    for number, present in enumerate(schedule, start=1):
        cosines, residual = (std * rng.standard_normal(settings.total, dtype=np.float32) for _ in range(2))
        cosines[present] += 2 * std
        residual[present] += 3 * std
        log.append(
            Round(
                number=number, present=present, noise_std=1 / 600, norm=norm, rest=rest, cosines=cosines,
                residual_norm=norm, residual_rest=rest, residual_cosines=residual,
            )
        )  # fmt: skip
        home.append_metrics({"round": number, "accuracy": 0.9 - 0.8 / number})
    cosines = std * rng.standard_normal(settings.total, dtype=np.float32)
    log.finish(Final(norm=1.0, cosines=cosines, update_norm=1.0, update_cosines=cosines))
    if result is None:
        result = derive_result(log, settings, claim=Claim(epsilon=20.0), analytical_epsilon=20.0)
    home.write_result(result.with_entries(noise_multiplier=0.3 + 0.05 * seed, accuracy=0.9))
    home.close()
    return result


@pytest.mark.slow
def test_twenty_long_runs_take_twenty_seconds_and_two_megabytes(tmp_path):
    paths, result = [tmp_path / f"run {seed}" for seed in range(20)], None
    for seed, path in enumerate(paths):
        result = long_run(path, seed, result)
    start = time.process_time()
    several = write_report(paths, tmp_path / "several.html")
    assert time.process_time() - start < 20
    one = write_report(paths[:1])
    assert max(several.stat().st_size, one.stat().st_size) < 2_000_000
