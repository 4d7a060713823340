"""How often a true claim is a VIOLATION: the study behind docs/evidence/verdicts.md.

    python -m studies.verdicts                 10,000 runs of the score model, 500 audits of a real loop
    python -m studies.verdicts --write-docs    write the table in docs/evidence/verdicts.md from finished runs

The score model samples the scores of all five rungs for an honest pipeline: known-others at the claim's mean, known-round
diluted by a signal as large as the noise, the null's std estimated from d - k directions, maxima over 20 rounds.
The loop is the plain DP-FedAvg of tests/audit/training.py, which does not declare the clip norm. A finished batch is one
line of studies/out/verdicts.jsonl and is not run again. The study fails if more than 1 % of the runs of a claim of the
score model, or of all loops, are VIOLATION, or if an amplified claim is judged on a known rung.
"""

import argparse
import json
import math
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.estimators.null import CosineNull
from coalmine.estimators.sampling import Poisson
from coalmine.evidence.ladder import Scores
from coalmine.verdict.claim import Claim
from coalmine.verdict.claim_context import RunFacts
from coalmine.verdict.mechanism_claim import judge
from studies.results import put_between_markers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "verdicts.jsonl"
DOCS = ROOT / "docs" / "evidence" / "verdicts.md"
DELTA = 1e-6
CLAIMS = (1.0, 3.0, 10.0, 30.0)
BATCH, BATCHES = 250, 10  # size and number of batches of the score model for each claim: 10,000 runs in total
LOOPS, LOOP_BATCHES = (
    25,
    10,
)  # size and number of batches of the real loop for each of two patterns: 500 audits in total
DIM, CANARIES, ROUNDS = 10_000, 1_000, 20
BAR = 0.01  # largest share of runs in which a true claim is a VIOLATION


def score_model(claim: float, rng: np.random.Generator) -> list[Scores]:
    """The five rungs of an honest pipeline with the claimed noise."""
    noise = float(mechanism_noise(claim, delta=DELTA))
    free = DIM - CANARIES

    def standard(mean: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        return rng.normal(mean, 1.0, CANARIES) / math.sqrt(rng.chisquare(free) / free)

    null = CosineNull(free, scale=math.sqrt(free), dof=float(free))
    plain = {"null": null, "bound_null": null, "null_dof": float(free)}
    nothing = rng.normal(size=free)
    known = 1 / math.hypot(noise, noise)
    rungs = [
        Scores(rung="final", observed=standard(known / 10), unobserved=nothing, **plain),
        Scores(rung="final-update", observed=standard(known / 8), unobserved=nothing, **plain),
        Scores(
            rung="all-iterates",
            observed=np.maximum(rng.normal(size=(ROUNDS - 1, CANARIES)).max(axis=0), rng.normal(known, 1, CANARIES)),
            unobserved=rng.normal(size=(ROUNDS, free)).max(axis=0),
        ),
    ]
    dofs = {"null_dof": float(free), "round_dof": float(free)}
    pooled = {"null": Gaussian(0.0, 1.0), "bound_null": Gaussian(0.0, 1.0), "presentations": 1, **dofs}
    return [
        *rungs,
        Scores(rung="known-round", observed=standard(known), unobserved=nothing, **pooled),
        Scores(rung="known-others", observed=standard(1 / noise), unobserved=nothing, **pooled),
    ]


def model_batch(claim: float, batch: int) -> dict[str, Any]:
    """Outcomes of mechanism claims and of amplified claims in one batch."""
    rng = np.random.default_rng([int(1000 * claim), batch])
    run = RunFacts(delta=DELTA, planned=1, presentations=1, vouched=True)
    outcomes: Counter[str] = Counter()
    for _ in range(BATCH):
        rungs = score_model(claim, rng)
        outcomes["mechanism " + judge(Claim(epsilon=claim), rungs, [], run)[0].outcome] += 1
        if _ % 10 == 0:  # an amplified claim a tenth as large: the known rungs must not judge it
            scheme = Poisson(1 / ROUNDS, rounds=ROUNDS)
            needs = (mechanism_noise(claim, delta=DELTA), scheme)
            by_rung = judge(Claim(claim / 10, sampling=scheme), rungs, [], run, sampled=needs)[1]
            bad = any(by_rung[name].outcome == "VIOLATION" for name in ("known-round", "known-others"))
            outcomes[f"amplified on known rungs {'VIOLATION' if bad else 'silent'}"] += 1
    return {"cell": f"score model, claim {claim:g}", "batch": batch, "outcomes": dict(outcomes)}


def loop_batch(presentations: int, batch: int) -> dict[str, Any]:
    """Outcomes of real audits, including gauges, with a signal as large as the noise."""
    sys.path.insert(0, str(ROOT / "tests" / "audit"))
    from training import train

    claim = mechanism_epsilon(1.0, delta=DELTA, participations=presentations)
    outcomes: Counter[str] = Counter()
    for index in range(LOOPS):
        seed = 1000 * batch + index
        outcomes["mechanism " + train(presentations=presentations, seed=seed).result(claim=claim).verdict.outcome] += 1
    return {"cell": _name(loop_batch, presentations), "batch": batch, "outcomes": dict(outcomes)}


def jobs() -> list[tuple[Any, float, int]]:
    """All batches."""
    model = [(model_batch, claim, batch) for claim in CLAIMS for batch in range(BATCHES)]
    return model + [(loop_batch, times, batch) for times in (1, 4) for batch in range(LOOP_BATCHES)]


def run(processes: int) -> None:
    """Run the remaining batches."""
    done = {(line["cell"], line["batch"]) for line in read()}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes) as pool:
        waiting = [
            pool.submit(job, value, batch) for job, value, batch in jobs() if (_name(job, value), batch) not in done
        ]
        for number, future in enumerate(as_completed(waiting), start=1):
            with RESULTS.open("a") as file:
                file.write(json.dumps(future.result()) + "\n")
            print(f"{number} of {len(waiting)} batches", file=sys.stderr)


def _name(job: Any, value: float) -> str:
    return f"score model, claim {value:g}" if job is model_batch else f"loop, each canary in {value} of 20 rounds"


def read() -> list[dict[str, Any]]:
    """The finished batches."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def failures(lines: list[dict[str, Any]]) -> list[str]:
    """The missed bars."""
    missing = {(_name(job, value), batch) for job, value, batch in jobs()} - {(x["cell"], x["batch"]) for x in lines}
    bad = [f"{len(missing)} of {len(jobs())} batches were not run"] if missing else []
    rows: dict[str, Counter[str]] = {}
    for line in lines:
        row = "all loops" if line["cell"].startswith("loop") else line["cell"]
        rows.setdefault(row, Counter()).update(line["outcomes"])
    for row, found in sorted(rows.items()):
        runs = sum(count for name, count in found.items() if name.startswith("mechanism "))
        wrong, judged = found["mechanism VIOLATION"], found["amplified on known rungs VIOLATION"]
        if wrong > BAR * runs:
            bad.append(f"{row}: a true claim is VIOLATION in {wrong} of {runs:,} runs, {BAR:.0%} may be")
        if judged:
            bad.append(f"{row}: an amplified claim is VIOLATION on a known rung in {judged} runs, none may be")
    return bad


def tables() -> str:
    """The results as Markdown."""
    cells: dict[str, Counter[str]] = {}
    for line in read():
        cells.setdefault(line["cell"], Counter()).update(line["outcomes"])
    heads = ["pipeline", "runs", "PASS", "VIOLATION", "UNDERPOWERED", "amplified claim: VIOLATION on a known rung"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cell in dict.fromkeys(_name(job, value) for job, value, _ in jobs()):
        found = cells.get(cell, Counter())
        counts = [found[f"mechanism {word}"] for word in ("PASS", "VIOLATION", "UNDERPOWERED")]
        asked = found["amplified on known rungs VIOLATION"] + found["amplified on known rungs silent"]
        amplified = f"{found['amplified on known rungs VIOLATION']} of {asked}" if asked else ""
        rows.append(f"| {cell} | {sum(counts):,} | {counts[0]:,} | {counts[1]} | {counts[2]} | {amplified} |")
    return "\n".join(rows)


def write_docs() -> None:
    """Write the table between its markers in docs/evidence/verdicts.md."""
    DOCS.write_text(put_between_markers(DOCS.read_text(), "table", tables()))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--write-docs", action="store_true", help="Write the table into docs/evidence/verdicts.md.")
    arguments = parser.parse_args()
    if arguments.write_docs:
        write_docs()
        return 0
    run(arguments.jobs)
    print(tables())
    bad = failures(read())
    print("\n".join(bad) if bad else "every bar met")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
