"""The cost of checking the alarm after every round, compared with observing the round.

The floor is one pass over the scores of the round, and the noncentral t law of their mean. Gauges are checked whenever the
number of rounds has grown by a factor of 1.25.
"""

import time

import numpy as np

from coalmine import Audit, mechanism_epsilon

DIM, CANARIES, ROUNDS, DELTA = 200_000, 1_000, 200, 1e-6
BAR = 0.15  # share of the processor time of observing the rounds


def main() -> int:
    """Print times and their ratio."""
    claim = mechanism_epsilon(1.0, delta=DELTA)
    audit = Audit(DIM, canaries=CANARIES, seed=b"of this benchmark", delta=DELTA, rounds=ROUNDS, claim=claim)
    rng, nobody = np.random.default_rng(0), np.zeros(DIM, np.float32)
    observing = asking = longest = 0.0
    for number in range(1, ROUNDS + 1):
        present = audit.canaries_in_round(number)
        release = audit.updates(present, 1.0) + rng.standard_normal(DIM, dtype=np.float32)
        start = time.process_time()
        audit.observe_round(number, release, present=present, others=nobody, noise_std=1.0, clip_norm=1.0)
        middle = time.process_time()
        audit.alarm()
        took = time.process_time() - middle
        observing, asking, longest = observing + middle - start, asking + took, max(longest, took)
    print(
        f"{ROUNDS} rounds of {DIM:,} numbers, {CANARIES:,} canaries: observing {observing / ROUNDS * 1e3:.1f} ms a round, "
        f"the alarm {asking / ROUNDS * 1e3:.1f} ms (longest {longest * 1e3:.0f} ms): {asking / observing:.3f} (bar {BAR:g})"
    )
    return asking > BAR * observing


if __name__ == "__main__":
    raise SystemExit(main())
