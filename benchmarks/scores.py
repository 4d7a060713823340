"""The cost of ten million scores: their estimate with its bounds, from a file, against bare passes over the same numbers.

The floor of an estimate is one sort and one pass of log Φ, which the Anderson-Darling statistic needs, and for a text file
the conversion of each line. A bound used to compute a Beta quantile at every score, 6 µs each, and a plan at every
unobserved canary. Both now evaluate at most a few thousand thresholds. `before` is the earlier time of the same call.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.special import log_ndtr

from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.gaussian_fit import epsilon_estimate
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.planning import plan_audit
from coalmine.log.score_files import read_scores

SCORES = 10_000_000
ESTIMATE_BAR = 6.0  # times a sort and a pass of log Φ
FILE_BAR = 3.0  # times the conversion of the lines
PLAN_BAR = 10.0  # times the plan of 1,000 canaries; F quantiles with many degrees of freedom take longer
BEFORE = {"estimate": 150.0}  # seconds


def seconds(call: Callable[[], object]) -> float:
    """Processor time, which other processes hardly affect."""
    start = time.process_time()
    call()
    return time.process_time() - start


def estimate(scores: np.ndarray) -> None:
    """The computations of `coalmine estimate`: the estimate, the valid bound, and the paper's bound."""
    null = Gaussian(0.0, 1.0)
    epsilon_estimate(scores, null=null, delta=1e-6)
    for method in ("simultaneous", "paper"):
        epsilon_lower_bound(scores, null=null, delta=1e-6, method=method)


def main() -> int:
    """Print times and ratios."""
    scores = np.random.default_rng(0).standard_normal(SCORES) + 1
    floor = seconds(lambda: log_ndtr(np.sort(scores)))
    whole = seconds(lambda: estimate(scores))
    print(
        f"{SCORES:,} scores: a sort and log Φ {floor:.1f} s, estimate and bounds {whole:.1f} s "
        f"({BEFORE['estimate']:.0f} s before): {whole / floor:.1f} times (bar {ESTIMATE_BAR:g})"
    )
    lines = [repr(score).encode() for score in scores[: SCORES // 10].tolist()]
    converted = seconds(lambda: np.fromiter(map(float, lines), dtype=np.float64, count=len(lines)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scores.csv"
        path.write_bytes(b"score\n" + b"\n".join(lines))
        read = seconds(lambda: read_scores(str(path)))
    print(
        f"{len(lines):,} lines: converted {converted:.2f} s, read {read:.2f} s: {read / converted:.1f} times "
        f"(bar {FILE_BAR:g})"
    )
    few = seconds(lambda: plan_audit(1_000, dim=10**9, delta=1e-6))
    many = seconds(lambda: plan_audit(10**8, dim=10**9, delta=1e-6))
    print(
        f"a plan of 1,000 canaries {few:.1f} s, of 100,000,000 {many:.1f} s: {many / few:.1f} times (bar {PLAN_BAR:g})"
    )
    return whole > ESTIMATE_BAR * floor or read > FILE_BAR * converted or many > PLAN_BAR * few


if __name__ == "__main__":
    sys.exit(main())
