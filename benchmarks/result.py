"""The cost of a result: one pass over the log, and the statistics at its end. 2,000 rounds of 11,000 canaries.

Its floor is a bare pass, which reads every record, checks its digest and decodes it. A result makes such a pass, makes two
views of each round, compares every pair of rounds, and bounds epsilon for every group of canaries. It used to take twenty
passes, 28 times the floor. If a sampling scheme is declared, the rung unknown-round adds a likelihood ratio of every
canary in every round, the law of their sums, and four calls of the accountant; it may add a quarter.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from coalmine import Claim, Poisson, amplified_epsilon
from coalmine.log.rounds_file import RoundLog
from coalmine.measure.round import Final, Round
from coalmine.measure.settings import Settings
from coalmine.result.derivation import derive_result

BAR = 12.0  # times a bare pass
SAMPLED_BAR = 1.25  # a result with the rung unknown-round, over one without
DIM, CANARIES, UNOBSERVED, ROUNDS = 20_000, 1_000, 10_000, 2_000


def write_log(path: Path) -> None:
    """Write a run in which each canary takes part about once and all other updates are known."""
    rng, log = np.random.default_rng(0), RoundLog(path)
    for number in range(1, ROUNDS + 1):
        cosines = (rng.standard_normal(CANARIES + UNOBSERVED) / np.sqrt(DIM)).astype(np.float32)
        present = np.flatnonzero(rng.random(CANARIES) < 1 / ROUNDS).astype(np.int32)
        cosines[present] += 0.5 / np.sqrt(DIM)
        log.append(
            Round(
                number=number,
                present=present,
                norm=1.2,
                rest=1.1,
                cosines=cosines,
                noise_std=1 / np.sqrt(DIM),
                clip_norm=0.01,
                clip_declared=True,
                residual_norm=1.0,
                residual_rest=0.97,
                residual_cosines=cosines,
            )
        )
    log.finish(Final(norm=1.0, cosines=cosines))
    log.close()


def seconds(call: Callable[[], object]) -> float:
    """Processor time, which other processes hardly affect."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> int:
    """Print both times and their ratio."""
    settings = Settings(dim=DIM, canaries=CANARIES, unobserved=UNOBSERVED, delta=1e-6, rounds=ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rounds.log"
        write_log(path)
        log = RoundLog(path, read_only=True)
        floor = min(seconds(lambda: sum(1 for _ in log.rounds())) for _ in range(3))
        claim = Claim(epsilon=5.0, participations=1)
        whole = seconds(lambda: derive_result(log, settings, claim=claim))
        sampled = replace(settings, sampling=Poisson(1 / ROUNDS, ROUNDS))
        amplified_epsilon(1.0, Poisson(0.5, 2), 1e-6)  # imports the accountant
        with_rung = seconds(lambda: derive_result(log, sampled, claim=claim))
        log.close()
    ratio, added = whole / floor, with_rung / whole
    print(f"a bare pass {floor:.2f} s, a result {whole:.2f} s: {ratio:.1f} times (bar {BAR:g})")
    print(f"a result with unknown-round {with_rung:.2f} s: {added:.2f} times one without (bar {SAMPLED_BAR:g})")
    return ratio > BAR or added > SAMPLED_BAR


if __name__ == "__main__":
    sys.exit(main())
