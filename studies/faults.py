"""How often each fault is detected: the study behind the table in docs/evidence/faults.md.

    python -m studies.faults                  run 100 seeds of each fault
    python -m studies.faults --write-docs     write the table into docs/evidence/faults.md

A finished trial is one line of studies/out/faults.jsonl and is not run again.
"""

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from coalmine.evidence import faults as known
from coalmine.simulation.faults import evidence, is_caught, try_fault

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "faults.jsonl"
DOCS = ROOT / "docs" / "evidence" / "faults.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
PRIVATE = ("noise-times-n", "others-wrong")  # faults that cost no privacy
FAULTS = {fault.name: fault for fault in known.FAULTS}


def trial(name: str, seed: int) -> dict[str, Any]:
    """One run, as a record."""
    import torch

    torch.set_num_threads(1)
    found = try_fault(FAULTS[name], seed)
    return {
        "fault": name,
        "seed": seed,
        "signal": min(found.signal),
        "outcome": found.outcome,
        "caught": found.caught,
        "named": found.named,
        "by": evidence(found.result),
        "blind_outcome": found.blind.verdict.outcome if found.blind.verdict else "",
        "blind_caught": is_caught(found.blind),
        "blind_by": evidence(found.blind),
    }


def read() -> list[dict[str, Any]]:
    """The finished trials."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def run(seeds: int, processes: int) -> None:
    """Run the trials that are missing."""
    done = {(line["fault"], line["seed"]) for line in read()}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes) as pool:
        waiting = [
            pool.submit(trial, name, seed)
            for seed in range(1, seeds + 1)
            for name in FAULTS
            if (name, seed) not in done
        ]
        for number, future in enumerate(as_completed(waiting), start=1):
            with RESULTS.open("a") as file:
                file.write(json.dumps(future.result()) + "\n")
            if not number % 50:
                print(f"{number} of {len(waiting)} trials", file=sys.stderr)


def table() -> str:
    """The finished trials as a Markdown table."""
    heads = ["fault", "runs", "signal", "caught", "named", "PASS / VIOLATION / UNDERPOWERED", "by"]
    heads += ["caught without `others`", "by"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines = read()
    for name, fault in FAULTS.items():
        mine = [line for line in lines if line["fault"] == name]
        if not mine:
            continue
        outcomes = Counter(line["outcome"] for line in mine)
        words = " / ".join(str(outcomes[word]) for word in ("PASS", "VIOLATION", "UNDERPOWERED"))
        caught, named, blind = (sum(line[key] for line in mine) for key in ("caught", "named", "blind_caught"))
        signal = f"{min(line['signal'] for line in mine):.2f}"
        unseen = f"cannot be detected: {fault.reason}" if fault.reason else ""
        seen, seen_blind = "; ".join(part for part in (unseen, _by(mine, "by")) if part), _by(mine, "blind_by")
        cells = [
            fault.title,
            len(mine),
            signal,
            caught,
            named if fault.detectable else "",
            words,
            seen,
            blind,
            seen_blind,
        ]
        rows.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(rows)


def _by(lines: list[dict[str, Any]], key: str) -> str:
    """Each piece of evidence and its count, largest first; the gauges of all layers count as one."""
    found: Counter[str] = Counter()
    for line in lines:
        found.update({"layer gauges" if name.startswith("layer ") else name for name in line[key]})
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def failures(lines: list[dict[str, Any]]) -> list[str]:
    """The missed bars.

    Honest training: PASS in at least 97 % of runs, VIOLATION in at most 1 %. A detectable fault is never PASS, and is
    detected and named in at least 95 % of runs. Wrong `others` is never VIOLATION, because privacy holds. In every round
    of every run the real signal is at least as long as the claimed noise.
    """
    bad = []
    for name, fault in FAULTS.items():
        mine = [line for line in lines if line["fault"] == name]
        caught, named = (sum(line[key] for line in mine) for key in ("caught", "named"))
        outcomes = Counter(line["outcome"] for line in mine)
        if any(line["signal"] < 1 for line in mine):
            bad.append(f"{name}: signal {min(line['signal'] for line in mine):.2f} of the noise")
        if name == "honest" and (outcomes["PASS"] < 0.97 * len(mine) or outcomes["VIOLATION"] > 0.01 * len(mine)):
            bad.append(f"honest: {dict(outcomes)}")
        if fault.detectable and outcomes["PASS"]:
            bad.append(f"{name}: PASS {outcomes['PASS']} of {len(mine)}")
        if fault.detectable and min(caught, named) < 0.95 * len(mine):
            bad.append(f"{name}: caught {caught} and named {named} of {len(mine)}")
        if name in PRIVATE and outcomes["VIOLATION"]:
            bad.append(f"{name}: VIOLATION {outcomes['VIOLATION']} of {len(mine)}, though privacy holds")
    return bad


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--write-docs", action="store_true", help="Write the table into docs/evidence/faults.md.")
    arguments = parser.parse_args()
    if not arguments.write_docs:
        run(arguments.seeds, arguments.jobs)
        print(table())
        bad = failures(read())
        print("\n".join(bad) if bad else "every bar met")
        return bool(bad)
    before, _, rest = DOCS.read_text().partition(BEGIN)
    DOCS.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
