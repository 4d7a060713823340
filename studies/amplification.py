"""Verdicts on amplified claims: honest and broken loops under Poisson sampling and random allocation.

    python -m studies.amplification --jobs 2                500 or 1,000 seeds of each honest setting, 100 of each broken one
    python -m studies.amplification --only poisson          the rows whose name matches
    python -m studies.amplification --write-docs            write the tables into docs/evidence/amplification.md

Rounds are simulated as an attacker who knows all other updates sees them: independent normals along the canaries, and a
length orthogonal to them. Everything from the log to the verdict is the package's own code. A finished seed is one line of
studies/out/amplification.jsonl and is not run again.
"""

import argparse
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from coalmine import AmplifiedEpsilon, Claim, Poisson, RandomAllocation, amplified_epsilon
from coalmine.canaries.rotation_numpy import stay_in_one_thread
from coalmine.estimators.sampling import Sampling
from coalmine.measure.schedule import sampled_schedule
from coalmine.measure.settings import Settings
from coalmine.result import rows as result_rows
from coalmine.verdict import amplified_claim, claim_context, rung_claim
from studies.exact_rounds import audited_rounds

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "amplification.jsonl"
DOCS = ROOT / "docs" / "evidence" / "amplification.md"
CANARIES, DIM, UNOBSERVED, DELTA = 1_000, 10_000, 1_000, 1e-5
HONEST, BROKEN, OFTEN = 500, 100, 1_000

Picks = Callable[[np.random.Generator, int], list[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A pipeline: its claim, its behaviour, and the verdict that it must get."""

    name: str
    claim: Claim
    noise: float
    picks: Picks
    seeds: int = BROKEN
    wanted: str = "VIOLATION"
    leg: str | None = None
    cohorts: Callable[[np.random.Generator, int], np.ndarray] | None = None
    canaries: int = CANARIES
    true_epsilon: float | None = None  # for honest rows: the reference for interval and bound


def by(sampling: Sampling) -> Picks:
    """The canaries' rounds under a scheme."""

    def picks(rng: np.random.Generator, canaries: int) -> list[np.ndarray]:
        chosen = sampled_schedule(canaries, sampling, key=rng.bytes(32))
        return [chosen(number) for number in range(1, sampling.total_rounds + 1)]

    return picks


def a_tenth_always(rounds: int) -> Picks:
    """The same tenth of the canaries in every round."""
    return lambda rng, canaries: [np.arange(canaries // 10)] * rounds


def all_together(rounds: int, probability: float) -> Picks:
    """All canaries in the same rounds."""

    def picks(rng: np.random.Generator, canaries: int) -> list[np.ndarray]:
        coins = rng.random(rounds) < probability
        return [np.arange(canaries) if coin else np.zeros(0, np.int64) for coin in coins]

    return picks


def same_order(rounds: int, epochs: int) -> Picks:
    """Each canary samples one round of the first epoch and keeps it in all epochs."""

    def picks(rng: np.random.Generator, canaries: int) -> list[np.ndarray]:
        place = rng.integers(rounds, size=canaries)
        return [np.flatnonzero(place == number) for number in range(rounds)] * epochs

    return picks


def shuffled(rounds: int, epochs: int) -> Picks:
    """Fixed cohorts from a permutation of ten times as many clients as canaries, a new permutation in each epoch."""

    def picks(rng: np.random.Generator, canaries: int) -> list[np.ndarray]:
        orders = [rng.permutation(10 * canaries) for _ in range(epochs)]
        cohorts = [part for order in orders for part in np.array_split(order, rounds)]
        return [np.sort(cohort[cohort < canaries]) for cohort in cohorts]

    return picks


def rows() -> Iterator[Row]:
    """All pipelines of the study."""
    settings: list[tuple[str, Sampling, float]] = [
        ("Poisson, T = 100, q = 0.1, z = 1", Poisson(0.1, 100), 1.0),
        ("Poisson, T = 1,000, q = 0.01, z = 0.8", Poisson(0.01, 1_000), 0.8),
        ("allocation over 200 rounds, z = 0.6", RandomAllocation(200), 0.6),
    ]
    for name, scheme, noise in settings:
        epsilon = float(amplified_epsilon(noise, scheme, DELTA))
        claim = Claim(epsilon, sampling=scheme, noise_multiplier=noise, sampler_observed=True)
        honest = Row(name=name, claim=claim, noise=noise, picks=by(scheme))
        yield replace(honest, seeds=HONEST, wanted="PASS", true_epsilon=epsilon)
        yield replace(honest, name=f"{name}: noise over 2", noise=noise / 2, leg="noise")
        yield replace(honest, name=f"{name}: noise over 1.25", noise=noise / 1.25, leg="noise")
    scheme, noise = Poisson(0.5, 10), 0.5
    epsilon = float(amplified_epsilon(noise, scheme, DELTA))
    claim = Claim(epsilon, sampling=scheme, noise_multiplier=noise, sampler_observed=True)
    for canaries in (1_000, 100):
        name = f"Poisson, T = 10, q = 0.5, z = 0.5, {canaries:,} canaries"
        often = Row(
            name=name, claim=claim, noise=noise, picks=by(scheme), seeds=OFTEN, wanted="PASS", canaries=canaries
        )
        yield replace(often, true_epsilon=epsilon)
    _, scheme, noise = settings[0]
    epsilon = float(amplified_epsilon(noise, scheme, DELTA))
    claim = Claim(epsilon, sampling=scheme, noise_multiplier=noise, sampler_observed=True)
    base = Row(name="", claim=claim, noise=noise, picks=by(scheme), leg="sampling")
    third = Poisson(0.1 / 3, 100)
    low = Claim(
        float(amplified_epsilon(1.0, third, DELTA)), sampling=third, noise_multiplier=1.0, sampler_observed=True
    )
    yield replace(base, name="claimed q a third of the true rate", claim=low)
    hidden = Poisson(0.01, 100)
    weak = float(amplified_epsilon(1.0, hidden, DELTA))
    loose = Claim(weak, sampling=hidden, noise_multiplier=1.0, sampler_observed=True)
    sizes = {"cohorts": lambda rng, rounds: np.full(rounds, 100)}
    yield replace(
        base, name="shuffling called Poisson, T = 100, one epoch", claim=loose, picks=shuffled(100, 1), **sizes
    )
    unsized = "shuffling called Poisson, cohort sizes not given"
    yield replace(base, name=unsized, claim=loose, picks=shuffled(100, 1), wanted="not PASS", leg=None)
    yield replace(base, name="a tenth of the rows in every step", picks=a_tenth_always(100))
    yield replace(base, name="all canaries in the same steps", picks=all_together(100, 0.1))
    repeated = RandomAllocation(10, 10)
    again = float(amplified_epsilon(1.0, repeated, DELTA))
    epochs = Claim(again, sampling=repeated, noise_multiplier=1.0, sampler_observed=True)
    yield replace(base, name="the same order in every epoch", claim=epochs, picks=same_order(10, 10))
    short = float(amplified_epsilon(1.0, Poisson(0.1, 50), DELTA))
    other = replace(claim, epsilon=short)
    yield replace(base, name="epsilon computed for half of the rounds", claim=other, leg="accounting")
    half = Claim(short, sampling=Poisson(0.1, 50), noise_multiplier=1.0, sampler_observed=True)
    yield replace(base, name="scheme of half of the rounds", claim=half, leg="accounting")


@cache
def interpolated(sampling: RandomAllocation) -> Callable[[float], AmplifiedEpsilon]:
    """The accountant's epsilon at a noise multiplier, interpolated between 25 values, because a call takes seconds.

    Between them log ε is almost linear in log z.
    """
    grid = np.geomspace(0.25, 1.2, 25)
    found = [amplified_epsilon(noise, sampling, DELTA) for noise in grid]

    def epsilon(noise: float) -> AmplifiedEpsilon:
        if not grid[0] <= noise <= grid[-1]:
            return amplified_epsilon(noise, sampling, DELTA)
        low, high = (
            float(np.exp(np.interp(np.log(noise), np.log(grid), np.log(ends))))
            for ends in ([each.low for each in found], [each.high for each in found])
        )
        return AmplifiedEpsilon(high, low=low, accountant="", adjacency=sampling.adjacency, kind="upper bound")

    return epsilon


def quick_epsilon(noise: float, sampling: Sampling, delta: float) -> AmplifiedEpsilon:
    """amplified_epsilon, interpolated for random allocation."""
    if isinstance(sampling, RandomAllocation):
        return interpolated(sampling)(noise)
    return amplified_epsilon(noise, sampling, delta)


def run_seed(name: str, seed: int) -> dict[str, Any]:
    """One run of a row."""
    stay_in_one_thread()
    for module in (result_rows, amplified_claim, claim_context, rung_claim):
        module.amplified_epsilon = quick_epsilon  # type: ignore[attr-defined]
    row = next(row for row in rows() if row.name == name)
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    present = row.picks(rng, row.canaries)
    cohorts = None if row.cohorts is None else row.cohorts(rng, len(present)).tolist()
    claimed = row.claim.noise_multiplier or row.noise
    settings = Settings(dim=DIM, canaries=row.canaries, unobserved=UNOBSERVED, delta=DELTA)
    result = audited_rounds(
        present, [row.noise] * len(present), [claimed] * len(present), settings, rng, row.claim, cohorts
    )
    assert result.verdict is not None
    found: dict[str, Any] = {
        "row": name,
        "seed": seed,
        "outcome": str(result.verdict.outcome),
        "code": result.verdict.code,
        "leg": result.verdict.part,
    }
    if row.true_epsilon is not None:
        unknown = result["unknown-round"]
        assert unknown.interval is not None
        fit = unknown.headline.fit
        found |= {
            "true": row.true_epsilon,
            "epsilon": unknown.epsilon,
            "interval": list(unknown.interval),
            "bound": unknown.lower_bound,
            "algorithm_3": result["all-iterates"].lower_bound,
            "fit": None if fit is None else fit.p_value,
        }
    return found


def read() -> list[dict[str, Any]]:
    """The finished seeds."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def failures(found: Iterable[dict[str, Any]]) -> list[str]:
    """The missed bars."""
    bad, done = [], list(found)
    for row in rows():
        mine = [line for line in done if line["row"] == row.name]
        if not mine:
            continue
        count = Counter(line["outcome"] for line in mine)
        if row.true_epsilon is None:
            right = sum(line["outcome"] != "PASS" if row.wanted == "not PASS" else _rightly(line, row) for line in mine)
            if right < (1 if row.wanted == "not PASS" else 0.95) * len(mine):
                bad.append(f"{row.name}: {right} of {len(mine)} are {row.wanted} by the right leg")
            continue
        covered = sum(line["interval"][0] <= line["true"] <= line["interval"][1] for line in mine)
        above = sum(line["bound"] > line["true"] for line in mine)
        if covered < 0.925 * len(mine):
            bad.append(f"{row.name}: {covered} of {len(mine)} intervals cover")
        if above > 0.07 * len(mine):
            bad.append(f"{row.name}: {above} of {len(mine)} bounds lie above the true epsilon")
        if count["PASS"] < 0.95 * len(mine) or count["VIOLATION"] > 0.01 * len(mine):
            bad.append(f"{row.name}: {dict(count)}")
        poor = sum(line["fit"] < 0.05 for line in mine)
        if binom.sf(poor - 1, len(mine), 0.05) < 1e-3:
            bad.append(f"{row.name}: the fit is rejected at 5 % in {poor} of {len(mine)}")
    first = [line for line in done if line["row"] == next(rows()).name]
    if first and np.mean([line["bound"] for line in first]) < 0.38 * first[0]["true"]:
        bad.append("the mean bound at the first setting is below .38 of the accountant's epsilon")
    return bad


def _rightly(line: dict[str, Any], row: Row) -> bool:
    return line["outcome"] == row.wanted and (row.leg is None or line["leg"] == row.leg)


def tables(found: list[dict[str, Any]]) -> str:
    """The results as two Markdown tables."""
    honest = [
        "| honest loop | ε | runs | interval covers | bound above ε | mean bound | Algorithm 3's | PASS / VIOLATION |",
        "|---|---|---|---|---|---|---|---|",
    ]
    broken = ["| broken loop | runs | PASS / VIOLATION / UNDERPOWERED | leg that decides |", "|---|---|---|---|"]
    for row in rows():
        mine = [line for line in found if line["row"] == row.name]
        if not mine:
            continue
        count = Counter(line["outcome"] for line in mine)
        if row.true_epsilon is None:
            outcomes = f"{count['PASS']} / {count['VIOLATION']} / {count['UNDERPOWERED']}"
            legs = Counter(line["leg"] or line["code"] for line in mine)
            named = ", ".join(f"{leg} {number}" for leg, number in sorted(legs.items(), key=lambda pair: -pair[1]))
            broken.append(f"| {row.name} | {len(mine)} | {outcomes} | {named} |")
            continue
        covers = np.mean([line["interval"][0] <= line["true"] <= line["interval"][1] for line in mine])
        above = np.mean([line["bound"] > line["true"] for line in mine])
        bound, largest = (float(np.mean([line[name] for line in mine])) for name in ("bound", "algorithm_3"))
        honest.append(
            f"| {row.name} | {row.true_epsilon:.3f} | {len(mine)} | {covers:.1%} | {above:.1%} | {bound:.2f} | "
            f"{largest:.2f} | {count['PASS']} / {count['VIOLATION']} |"
        )
    return "\n".join([*honest, "", *broken])


def main() -> int:
    """Run the remaining seeds and compare all of them with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, help="Largest number of seeds of each row.")
    parser.add_argument("--only", default="", help="Regular expression for the rows to run.")
    parser.add_argument(
        "--write-docs", action="store_true", help="Write the tables into docs/evidence/amplification.md."
    )
    options = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    done = {(line["row"], line["seed"]) for line in read()}
    todo = [
        (row.name, seed)
        for row in rows()
        if re.search(options.only, row.name)
        for seed in range(1, min(row.seeds, options.seeds or row.seeds) + 1)
        if (row.name, seed) not in done
    ]
    if not options.write_docs:
        with ProcessPoolExecutor(options.jobs) as pool, RESULTS.open("a") as out:
            for future in as_completed([pool.submit(run_seed, *task) for task in todo]):
                out.write(json.dumps(future.result()) + "\n")
                out.flush()
    found = read()
    print(tables(found))
    bad = failures(found)
    print("\n".join(bad) if bad else "every bar is met")
    if options.write_docs:
        start, end = "<!-- study -->", "<!-- /study -->"
        before, rest = DOCS.read_text().split(start)
        DOCS.write_text(f"{before}{start}\n{tables(found)}\n{end}{rest.split(end)[1]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
