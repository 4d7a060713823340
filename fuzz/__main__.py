"""`make fuzz`: run the cases of every part and print the faults. Exit code 1 if there are any."""

import argparse
import importlib
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz.cases import Fault, case_rng, run_case

# Cases out of 1,000 for each part.
PARTS = {
    "cli_arguments": 180,
    "configs": 170,
    "score_files": 150,
    "run_directories": 180,
    "audit_arguments": 120,
    "flower_replies": 20,
    "archives": 40,
    "composed": 20,
}
MOST_SHOWN = 40
MEMORY = 8 << 30  # bytes of address space: a case that reads an endless file fails instead of filling the machine


def main() -> int:
    """Run the fuzzer; exit code 1 if it finds a fault."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=5_000, help="Number of cases (default: 5,000).")
    parser.add_argument("--seed", type=int, default=1, help="Seed of all cases (default: 1).")
    parser.add_argument("--part", choices=PARTS, help="Run only this part, with all the cases.")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="Run one case of --part, to repeat a fault.")
    given = parser.parse_args()
    if given.only is not None and given.part is None:
        parser.error("--only needs --part")
    shares = {given.part: 1_000} if given.part else PARTS
    faults: list[Fault] = []
    total = 0
    home = Path(tempfile.mkdtemp(prefix="coalmine-fuzz-"))
    start, before = time.monotonic(), Path.cwd()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    os.chdir(home)  # a command without --out writes into the current directory
    try:
        for name, share in shares.items():
            numbers = [given.only] if given.only is not None else range(given.cases * share // 1_000)
            found = run_part(name, list(numbers), given.seed, home)
            faults += found
            total += len(numbers)
            print(f"{name}: {len(numbers):,} cases, {len(found)} faults, {time.monotonic() - start:.0f} s", flush=True)
            show(found, given.seed)
    finally:
        os.chdir(before)
        shutil.rmtree(home, ignore_errors=True)
    print(f"{total:,} cases, {len(faults)} faults, seed {given.seed}, {time.monotonic() - start:.0f} s")
    return int(bool(faults))


def run_part(name: str, numbers: list[int], seed: int, home: Path) -> list[Fault]:
    """The faults among these cases of a part; each case has its own empty folder."""
    make_case = importlib.import_module(f"fuzz.{name}").make_case
    faults = []
    for number in numbers:
        folder = home / "case"
        folder.mkdir()
        try:
            case = make_case(case_rng(seed, name, number), folder)
            if (fault := run_case(name, number, case)) is not None:
                faults.append(fault)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(home / "runs", ignore_errors=True)
    return faults


def show(faults: list[Fault], seed: int) -> None:
    """Print one fault of each kind, the most frequent first."""
    kinds = Counter((fault.part, fault.kind, fault.detail[:60]) for fault in faults)
    for (part, kind, start), count in kinds.most_common(MOST_SHOWN):
        first = next(each for each in faults if (each.part, each.kind, each.detail[:60]) == (part, kind, start))
        detail, given = ascii(first.detail[:300])[1:-1], ascii(first.given[:300])[1:-1]
        again = f"python -m fuzz --seed {seed} --part {part} --only {first.number}"
        print(f"{count} x {part} {kind}: {detail}\n    {again}  ({given})", flush=True)
    if len(kinds) > MOST_SHOWN:
        print(f"and {len(kinds) - MOST_SHOWN} other kinds")


if __name__ == "__main__":
    sys.exit(main())
