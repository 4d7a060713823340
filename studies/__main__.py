"""`make studies`: every slow study, then the tests marked slow; takes several hours. An interrupted study resumes."""

import subprocess
import sys
import time

STUDIES = [
    ["studies/calibration.py", "--jobs", "2"],
    ["-m", "studies.literature_calibration"],
    ["-m", "studies.gaussian_bound", "--jobs", "2"],
    ["-m", "studies.published_audits"],
    ["-m", "studies.leaderboard"],
    ["-m", "studies.verdicts", "--jobs", "2"],
    ["-m", "studies.trust", "--jobs", "2"],
    ["-m", "studies.claims", "--jobs", "2"],
    ["-m", "studies.coverage", "--jobs", "2"],
    ["-m", "studies.noise", "--jobs", "2"],
    ["-m", "studies.faults", "--jobs", "2"],
    ["-m", "studies.sampler", "--jobs", "2"],
    ["-m", "studies.mechanisms", "--jobs", "2"],
    ["-m", "studies.amplification", "--jobs", "2"],
    ["-m", "studies.alarm", "--jobs", "2"],
    ["-m", "studies.blocks", "--jobs", "2"],
    ["-m", "studies.flower_coverage"],
    ["-m", "studies.opacus_faults"],
    ["-m", "studies.clip_faults"],
    ["-m", "studies.replay"],
    ["-m", "studies.fine_tuning"],
    ["-m", "studies.data_canaries", "--jobs", "2"],
    ["-m", "studies.other_frameworks"],
    ["-m", "studies.nvflare_svt"],
    ["-m", "studies.field"],
    ["-m", "studies.reproduction"],
    ["-m", "studies.notebook"],
    ["-m", "fuzz", "--cases", "100000", "--seed", "2"],
    [".ci/versions.py", "lowest"],
    [".ci/versions.py", "newest"],
    ["-m", "pytest", "-m", "slow"],
]
NO_TESTS = 5  # pytest's exit code if no test is marked slow


def main() -> int:
    """Run all studies and name the failed ones at the end."""
    failed = []
    for arguments in STUDIES:
        name, start = " ".join(arguments), time.monotonic()
        print(f"== {name}", flush=True)
        code = subprocess.run([sys.executable, *arguments]).returncode
        print(f"== {name}: {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
        if code not in (0, NO_TESTS):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "every study done")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
