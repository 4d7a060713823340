"""The paper's experiments at scale small: each takes at most three minutes on two idle cores and shows the paper's trends.

    python -m studies.reproduction            all of them
    python -m studies.reproduction emnist     some of them

Every claim that an experiment checks must be decided and hold; only multirun, with just three repeats, may leave its claim
undecided. In addition, the trends are checked independently: epsilon falls with noise, grows with presentations, and is far
lower for the final model than for all iterates.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coalmine.data.folders import data_folder
from reproduction.command import EXPERIMENTS
from reproduction.run_numbers import read_json

LONGEST = 180.0  # seconds
READS_FILES = {"canife": "fashion-mnist"}
OPEN = ("multirun",)  # may leave its claim undecided at scale small


def run(name: str, out: Path) -> tuple[dict[str, Any], float]:
    """The experiment's output and its duration."""
    started = time.monotonic()
    processes = ("--jobs", "2") if name == "multirun" else ()
    command = [sys.executable, "-m", "reproduction", "-q", name, "--out", str(out), *processes]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_json(out / f"{name}-small.json"), time.monotonic() - started


def rung(reading: dict[str, Any], name: str) -> float:
    """The estimate of a rung for its largest group of canaries."""
    return next(row["epsilon"] for row in reading["rows"] if row["rung"] == name)


def table_directions(found: dict[str, Any]) -> list[str]:
    """The wrong trends in a table of epsilons."""
    readings = sorted(found["readings"], key=lambda reading: reading["noise_multiplier"])
    noisy = [rung(reading, "known-others") for reading in readings if reading["noise_multiplier"] > 0]
    finals = [rung(reading, "final") for reading in readings]
    wrong = []
    if noisy != sorted(noisy, reverse=True):
        wrong.append(f"known-others does not fall with noise: {noisy}")
    if not finals[0] > 2 * finals[-1]:
        wrong.append(f"final is not halved from the least noise to the most: {finals}")
    far = [rung(reading, "all-iterates") / rung(reading, "final") for reading in readings]
    if min(far) < 10:
        wrong.append(f"final is not ten times below all-iterates everywhere: {far}")
    return wrong


def presentation_directions(found: dict[str, Any]) -> list[str]:
    """Runs in which the most frequent canaries do not have twice the epsilon of those with one presentation."""
    wrong = []
    for reading in found["readings"]:
        groups = {row["presentations"]: row["epsilon"] for row in reading["rows"] if row["rung"] == "final"}
        shown = sorted(times for times in groups if times)
        if not groups[shown[-1]] > 2 * groups[shown[0]]:
            wrong.append(f"noise {reading['noise_multiplier']:g}: {groups}")
    return wrong


DIRECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "stackoverflow": table_directions,
    "emnist": table_directions,
    "presentations": presentation_directions,
}


def problems(name: str, out: Path) -> list[str]:
    """Descriptions of all problems of one experiment."""
    found, seconds = run(name, out)
    print(
        f"{name}: {seconds:.0f} s, {sum(check['outcome'] == 'holds' for check in found['checks'])} claims hold",
        flush=True,
    )
    fine = ("holds", "not decided") if name in OPEN else ("holds",)
    wrong = [f"{check['claim']}: {check['outcome']}, {check['detail']}" for check in found["checks"]
             if check["outcome"] not in fine]  # fmt: skip
    wrong += DIRECTIONS.get(name, lambda _: [])(found)
    if found.get("missing"):
        wrong.append(f"not finished: {', '.join(found['missing'])}")
    if seconds > LONGEST:
        wrong.append(f"took {seconds:.0f} s, at most {LONGEST:.0f} are allowed")
    return [f"{name}: {text}" for text in wrong]


def main() -> int:
    """Run the experiments; 1 if there is a problem."""
    names = sys.argv[1:] or list(EXPERIMENTS)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name in READS_FILES and not (data_folder(None) / READS_FILES[name]).is_dir():
                print(f"{name}: left out, {READS_FILES[name]} is not there (coalmine data {READS_FILES[name]})")
                continue
            wrong += problems(name, Path(folder))
    print("\n".join(wrong) or "every direction is as it should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
