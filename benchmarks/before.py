"""A result and a report against those of the version that read a log a dozen times: ratios of processor time in one run.

The version is taken from the repository's history, so it takes a clone. Both read the same log: 2,000 rounds of 11,000
canaries. The report of a small run, the stored one of the tests, is mostly drawing.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

BEFORE = "df0f898"  # the last commit before a result was derived in one pass
RESULT_BAR, REPORT_BAR = 1 / 3, 1 / 2
DIM, CANARIES, UNOBSERVED, ROUNDS = 20_000, 1_000, 10_000, 2_000
SMALL = Path(__file__).parents[1] / "tests" / "golden" / "stored" / "digits"
REPEATS = 3


def main() -> int:
    """Print the times before and now, and their ratios."""
    found = subprocess.run(["git", "archive", BEFORE, "src"], capture_output=True)
    if found.returncode:
        print(f"skipped: this is no clone with commit {BEFORE}")
        return 0
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(found.stdout)) as sources:
            sources.extractall(folder, filter="data")
        old, new = Path(folder) / "src", Path(__file__).parents[1] / "src"
        large = Path(folder) / "large"
        child(old, "write", str(large))
        for name, stored in (("large", large), ("small", SMALL)):
            runs = [Path(folder) / f"{name}-{each}" for each in ("before", "now")]
            for run in runs:
                shutil.copytree(stored, run)
            times = [best(source, run) for source, run in zip((old, new), runs, strict=True)]
            bars = {"result": RESULT_BAR, "report": REPORT_BAR} if name == "large" else {"report": REPORT_BAR}
            for what, bar in bars.items():
                before, now = (each[what] for each in times)
                missed |= now / before > bar
                print(f"{name} {what}: {before:.2f} s before, {now:.2f} s now: {now / before:.3f} (bar {bar:.3f})")
    return missed


def best(source: Path, run: Path) -> dict[str, float]:
    """The shortest times of two processes: a busy machine only adds."""
    found = [child(source, "measure", str(run)) for _ in range(2)]
    return {what: min(each[what] for each in found) for what in found[0]}


def child(source: Path, *arguments: str) -> dict[str, float]:
    """What a process of one version found."""
    here = [sys.executable, "-P", __file__, *arguments]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return json.loads(subprocess.run(here, check=True, env=environment, stdout=subprocess.PIPE).stdout)


def write(folder: str) -> dict[str, float]:
    """A run in which each canary takes part about once, with everybody else's part known; by the version before."""
    from coalmine import Audit

    rounds: Any = import_module("coalmine.audit.rounds")
    Audit(DIM, canaries=CANARIES, unobserved=UNOBSERVED, rounds=ROUNDS, delta=1e-6, seed=1 << 70, directory=folder)
    rng, log = np.random.default_rng(0), rounds.RoundLog(Path(folder) / "audit" / "rounds.log")
    for number in range(1, ROUNDS + 1):
        cosines = (rng.standard_normal(CANARIES + UNOBSERVED) / np.sqrt(DIM)).astype(np.float32)
        present = np.flatnonzero(rng.random(CANARIES) < 1 / ROUNDS).astype(np.int32)
        cosines[present] += 0.5 / np.sqrt(DIM)
        log.append(
            rounds.Round(
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
    log.finish(rounds.Final(norm=1.0, cosines=cosines))
    log.close()
    return {}


def measure(folder: str) -> dict[str, float]:
    """Processor time of a result and of the page of the finished run."""
    import matplotlib.figure  # noqa: F401  the report's own time is wanted, not that of an import

    from coalmine import Claim, RunDirectory
    from coalmine.report import plots, write_report

    try:
        derive_result = import_module("coalmine.result.derivation").derive_result
    except ImportError:
        derive_result = import_module("coalmine.audit").derive_result
        plain = plots.gauge

        def gauge(ax: Any, *arguments: Any) -> Any:
            try:
                return plain(ax, *arguments)
            except IndexError:  # it failed on gauges of pairs of rounds
                return ax

        plots.gauge = gauge  # type: ignore[assignment]
    home = RunDirectory(folder)
    settings, _ = home.read_record()
    log = home.read_log()
    start = time.process_time()
    result = derive_result(log, settings, claim=Claim(epsilon=5.0, participations=1))
    took = {"result": time.process_time() - start}
    home.write_result(result)
    reports = []
    for _ in range(REPEATS):
        start = time.process_time()
        write_report([folder], Path(folder) / "page.html")
        reports.append(time.process_time() - start)
    return took | {"report": min(reports)}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    print(json.dumps({"write": write, "measure": measure}[sys.argv[1]](*sys.argv[2:])))
