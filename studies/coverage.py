"""Coverage of the analytical epsilon by the interval of `known-others` in 100 short training runs.

    python -m studies.coverage --jobs 2     at least 90 of 100 must cover it; a few seconds per seed

Each seed has its own model, canaries, participants and noise. A finished seed is one line of studies/out/coverage.jsonl
and is not run again.
"""

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "out" / "coverage.jsonl"
SEEDS, BAR, SECONDS = 100, 90, 20.0
ROUNDS = 40
THREADS = {"OMP_NUM_THREADS": "1"}  # the processes share the cores


def run_seed(seed: int) -> dict[str, Any]:
    """One short run of the default task."""
    from coalmine.simulation import RunConfig, simulate
    from coalmine.simulation.config import ClaimSettings

    started = time.monotonic()
    outcome = simulate(RunConfig(rounds=ROUNDS, seed=seed, claim=ClaimSettings(analytical=True)))
    row = outcome.adversaries["known-others"].headline
    assert row.estimate.interval is not None
    low, high = row.estimate.interval
    return {
        "seed": seed,
        "rounds": ROUNDS,
        "analytical": outcome.analytical_epsilon,
        "epsilon": row.estimate.epsilon,
        "interval": [float(low), float(high)],
        "covers": bool(low <= outcome.analytical_epsilon <= high),
        "if_claimed": None if outcome.verdict is None else outcome.verdict.outcome,
        "accuracy": outcome.trainer.accuracy,
        "seconds": round(time.monotonic() - started, 1),
    }


def read_results() -> dict[int, dict[str, Any]]:
    """The finished seeds with this number of rounds."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    found = [json.loads(line) for line in lines]
    return {result["seed"]: result for result in found if result["rounds"] == ROUNDS}


def main() -> int:
    """Run the remaining seeds and print the coverage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    results = read_results()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(THREADS)
    todo = [seed for seed in range(1, SEEDS + 1) if seed not in results]
    with ProcessPoolExecutor(options.jobs) as pool, RESULTS.open("a", encoding="utf-8") as out:
        for future in as_completed([pool.submit(run_seed, seed) for seed in todo]):
            result = future.result()
            results[result["seed"]] = result
            out.write(json.dumps(result) + "\n")
            out.flush()
            print(f"seed {result['seed']}: {result['epsilon']:.2f} in {result['interval']}", flush=True)
    every = list(results.values())
    covered = sum(result["covers"] for result in every)
    verdicts = [result["if_claimed"] for result in every]
    mean = sum(result["epsilon"] for result in every) / len(every)
    slowest = max(result["seconds"] for result in every)
    print(
        f"{covered} of {len(every)} intervals cover the analytical {every[0]['analytical']:.2f} (bar {BAR}); mean {mean:.2f}"
    )
    print(f"had it been claimed: {', '.join(f'{verdicts.count(name)} {name}' for name in sorted(set(verdicts)))}")
    print(
        f"accuracy {min(r['accuracy'] for r in every):.2f} to {max(r['accuracy'] for r in every):.2f}; slowest {slowest} s"
    )
    return 0 if covered >= BAR and slowest <= SECONDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
