"""Claims as people make them: honest ones must not be refuted, and no fault may hide behind a claim.

    python -m studies.claims                       every row, about 80 minutes on one core
    python -m studies.claims --seeds 5             at most five seeds in each row
    python -m studies.claims --only 'schedule'     only the rows whose name matches this regular expression
    python -m studies.claims --write-docs          write the tables of docs/evidence/claims.md from finished runs

Noise schedules are simulated as an attacker who knows all other updates sees them, as in studies/amplification.py.
Coordinates and grids are whole audits of the loop in studies/pipelines.py, and checks those of studies/mechanisms.py. Rows
of Opacus, Flower and jax_privacy train tiny models in this process. They are left out where the framework is not installed.
A finished run is one line of studies/out/claims.jsonl and is not run again; `--fresh` starts over, which is necessary after
a change of the audit. The study fails if a row misses one of its bars.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from coalmine import AuditResult, Claim, Poisson, amplified_epsilon
from coalmine.measure.settings import Settings
from studies.claim_rows import (
    COVERS,
    NEVER_REFUTED,
    NO_ALARM,
    NO_PASS,
    NOT_REFUTED,
    PASSES,
    REFUTED,
    SEEDS,
    STATED,
    Bar,
    Row,
)
from studies.claims_in_frameworks import framework_rows
from studies.exact_rounds import DELTA, audited_rounds, composed, pld_epsilon
from studies.mechanisms import Row as Mechanism
from studies.mechanisms import checked, needed, noised
from studies.mechanisms import rows as mechanisms
from studies.noise_faults import on_grid
from studies.pipelines import Draw, Noise, Pipeline
from studies.results import (
    EVERY,
    Record,
    main_of,
    markdown_table,
    read_records,
    run_batches,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "claims.jsonl"
DOCS = ROOT / "docs" / "evidence" / "claims.md"
UNOBSERVED = 200
HONEST_SEEDS, BATCH = 1_000, 10
POWER = 0.95  # closed-form power of the gauge of coordinates from which on a fault must not pass
OUTCOMES = ("PASS", "VIOLATION", "UNDERPOWERED")


@cache
def rows() -> dict[str, Row]:
    """Every row by its name."""
    every = [*_schedules(), *_sampled(), *_coordinates(), *_grids(), *_checks(), *framework_rows()]
    found = {row.name: row for row in every}
    assert len(found) == len(every), "names of rows must differ"
    return found


def _steps(first: float, last: float, rounds: int) -> tuple[str, np.ndarray]:
    return f"z {first:g} → {last:g}, T = {rounds}", np.linspace(first, last, rounds)


def _in_turn(low: float, high: float, times: int) -> tuple[str, np.ndarray]:
    return f"z {low:g} and {high:g} in turn, T = {2 * times}", np.tile([low, high], times)


def _once(low: float, high: float, rounds: int) -> tuple[str, np.ndarray]:
    return f"z {low:g} once among {high:g}, T = {rounds}", np.where(np.arange(rounds) == rounds // 2, low, high)


def _schedules() -> Iterator[Row]:
    """Every canary in every round, and the claim is the composed epsilon."""
    cases = [
        (_steps(1.5, 0.7, 10), 100),
        (_steps(1.2, 0.9, 20), 300),
        (_steps(2, 0.5, 20), 100),
        (_steps(0.9, 1.2, 20), 60),
        (_in_turn(0.8, 1.6, 8), 100),
        (_once(0.6, 1.3, 15), 100),
        (_steps(1.5, 0.7, 5), 30),
        (_steps(1.5, 0.7, 40), 300),
        (_steps(0.5, 2, 20), 100),
        (_steps(0.9, 1.2, 100), 100),
        (_in_turn(0.8, 1.6, 30), 30),
        (_once(0.3, 1.3, 15), 100),
        (_once(0.6, 1.3, 60), 100),
        (_steps(3, 0.3, 30), 100),
    ]
    for (schedule, stated), canaries in cases:
        every = [np.arange(canaries)] * len(stated)
        claim = Claim(composed(stated), participations=len(stated), delta=DELTA)
        one = partial(_scheduled, stated, every, canaries=canaries, claim=claim)
        yield from _honest_and_broken(f"schedule, {schedule}, k = {canaries}", one)
    stated, canaries = np.repeat([0.7, 1.4], 5), 1_000
    present = [np.flatnonzero(np.arange(canaries) % 10 == number) for number in range(10)]
    claim = Claim(composed(np.array([0.7])), participations=1, delta=DELTA)
    one = partial(_scheduled, stated, present, canaries=canaries, claim=claim)
    yield from _honest_and_broken("schedule, a client in one of ten rounds, z 0.7 and 1.4, k = 1,000", one)


def _honest_and_broken(name: str, one: Callable[..., AuditResult]) -> Iterator[Row]:
    honest = Row(name=name, table="schedules", run=one, bars=(NOT_REFUTED, NO_ALARM, PASSES), seeds=HONEST_SEEDS)
    yield honest
    broken = partial(one, share=1 / 1.4, watched=False)
    yield replace(honest, name=f"{name}: noise over 1.4", run=broken, bars=(REFUTED,), seeds=SEEDS)


def _scheduled(
    stated: np.ndarray,
    present: Sequence[np.ndarray],
    seed: int,
    *,
    canaries: int,
    claim: Claim,
    share: float = 1.0,
    watched: bool = True,
) -> AuditResult:
    """A run that states this noise, has this share of it, and keeps to its planned rounds."""
    times = claim.participations
    assert times is not None
    settings = Settings(
        dim=4_000 + 10 * canaries,
        canaries=canaries,
        unobserved=UNOBSERVED,
        delta=DELTA,
        rounds=len(stated),
        presentations=(times,),
    )
    rng = np.random.default_rng(seed)
    said = stated.tolist()
    return audited_rounds(present, [share * z for z in said], said, settings, rng, claim, watched=watched)


def _sampled() -> Iterator[Row]:
    """Poisson sampling, and the claim is the epsilon that dp-accounting's PLD gives for the list of rounds."""
    cases = [
        (_steps(1.5, 0.8, 60), 0.1),
        (_steps(2, 0.7, 60), 0.1),
        (_in_turn(0.9, 2, 30), 0.1),
        (_steps(1.5, 0.8, 20), 0.3),
        (_steps(0.8, 1.5, 60), 0.1),
        (_once(0.5, 1.2, 60), 0.1),
    ]
    for (schedule, stated), rate in cases:
        name = f"sampled, q = {rate:g}, {schedule}, k = 300"
        bars = (NOT_REFUTED, COVERS)
        yield Row(name=name, table="sampled", run=partial(_amplified, stated, rate, 300, None), bars=bars)
    stated = np.where(np.isin(np.arange(60), [5, 20, 40]), 0.6, 1.0)
    constant = float(amplified_epsilon(1.0, Poisson(0.1, 60), DELTA))
    hidden = partial(_amplified, stated, 0.1, 40, constant)
    name = "sampled, q = 0.1, T = 60, claim for z = 1, three rounds state 0.6, k = 40"
    yield Row(name=name, table="sampled", run=hidden, bars=(STATED,))


def _amplified(stated: np.ndarray, rate: float, canaries: int, epsilon: float | None, seed: int) -> AuditResult:
    """An honest run under Poisson sampling, for the accountant's epsilon or another."""
    rng, rounds = np.random.default_rng(seed), len(stated)
    present = [np.flatnonzero(rng.random(canaries) < rate) for _ in range(rounds)]
    cohorts = [picked.size + int(rng.binomial(2 * canaries, rate)) for picked in present]
    claimed = pld_epsilon(tuple(stated.tolist()), rate) if epsilon is None else epsilon
    claim = Claim(claimed, sampling=Poisson(rate, rounds), sampler_observed=True)
    settings = Settings(dim=4_000 + 10 * canaries, canaries=canaries, unobserved=UNOBSERVED, delta=DELTA)
    noises = stated.tolist()
    return audited_rounds(present, noises, noises, settings, rng, claim, cohorts)


def weak(count: int, std: float) -> Draw:
    """Less noise in a fixed number of coordinates."""

    def draw(noise: Noise) -> np.ndarray:
        if "weak" not in noise.kept:
            noise.kept["weak"] = noise.rng.permutation(noise.dim)[:count]
        values = noise.normal()
        values[noise.kept["weak"]] *= std
        return values

    return draw


def _coordinates() -> Iterator[Row]:
    """Fixed coordinates with less noise; the layers are not declared."""
    sys.path.insert(0, str(ROOT / "tests" / "evidence"))
    from weak_coordinates import power

    cases = [(10_000, rounds, 100, part) for part in (2, 4) for rounds in (5, 15, 30, 60, 100)]
    cases += [(4_000, rounds, 8, 20) for rounds in (15, 30, 60)] + [(4_000, 15, 8, 2)]
    cases += [(4_000, rounds, 1, np.inf) for rounds in (4, 8, 15, 30)]
    for dim, rounds, count, part in cases:
        chance = power(dim, rounds, count, 1 / part)
        which = "one coordinate bare" if count == 1 else f"{count / dim:.1%} of coordinates at σ/{part}"
        name = f"{which}, d = {dim:,}, T = {rounds} (power {chance:.0%})"
        pipeline = Pipeline(dim=dim, rounds=rounds, layers=1, draw=weak(count, 1 / part))
        bars = (NO_PASS,) if chance >= POWER else ()
        yield Row(name=name, table="coordinates", run=pipeline.result, bars=bars)
    for dim, rounds in ((10_000, 5), (10_000, 15), (10_000, 60), (4_000, 30)):
        yield Row(
            name=f"all coordinates at σ, d = {dim:,}, T = {rounds}",
            table="coordinates",
            run=Pipeline(dim=dim, rounds=rounds, layers=1).result,
            bars=(NOT_REFUTED, PASSES),
        )


def _grids() -> Iterator[Row]:
    """Noise on a grid, only in rounds of which the audit measures a few in full."""
    for first, rounds, dim in ((21, 29, 1_000), (21, 29, 20_000), (41, 80, 4_096)):
        pipeline = Pipeline(dim=dim, canaries=70, rounds=rounds, layers=1, draw=_late_grid(first))
        name = f"noise on a grid of σ/4 in rounds {first} to {rounds} of {rounds}, d = {dim:,}"
        yield Row(name=name, table="coordinates", run=pipeline.result, bars=(NO_PASS,))


def _late_grid(first: int) -> Draw:
    return lambda noise: on_grid(0.25)(noise) if noise.number >= first else noise.normal()


def _checks() -> Iterator[Row]:
    """Functions under the privacy unit test, with seeds that studies/mechanisms.py does not use."""
    known = mechanisms()
    faults = ("variance taken for a standard deviation", "noise where the sum is not 0", "clip by a scaled L1 norm")
    for name in faults:
        yield _check(f"{name}, claim 3", known[name], REFUTED)
    for epsilon in (2.0, 2.5):
        variance = partial(_variance, epsilon=epsilon)
        fault = Mechanism(make=variance, kind="faulty", settings={"epsilon": epsilon})
        yield _check(f"variance taken for a standard deviation, claim {epsilon:g}", fault, REFUTED)
    for name in ("clip by the largest value", "clip by the norm of 95 % of the coordinates"):
        yield _check(f"{name}, claim 3", known[name], REFUTED)
    for name in ("noised sum, claim 3", "noised sum, claim 10", "release in whole numbers"):
        yield _check(f"correct: {name}", known[name], NOT_REFUTED, PASSES)
    yield _check("correct: noised sum, claim 50", known["noised sum, claim 50"], NEVER_REFUTED, PASSES)


def _check(name: str, mechanism: Mechanism, *bars: Bar) -> Row:
    return Row(name=f"check, {name}", table="checks", run=partial(checked, mechanism), bars=bars)


def _variance(rng: np.random.Generator, epsilon: float) -> Callable[..., np.ndarray]:
    """The variance is taken for a standard deviation, which is less noise where the multiplier is above 1."""
    return noised(rng, std=needed(epsilon) ** 0.5)


def run_batch(name: str, seeds: Sequence[int]) -> list[Record]:
    """Some runs of one row."""
    return [rows()[name].record(seed) for seed in seeds]


def run(names: Iterable[str], limit: int, processes: int) -> None:
    """Run the remaining seeds of the rows whose packages are installed."""
    done = {_key(record) for record in read()}
    batches = []
    for name in names:
        row = rows()[name]
        left = [seed for seed in range(min(row.seeds, limit)) if (name, seed) not in done]
        if not row.installed:
            print(f"{name} is left out: {row.needs} is not installed", file=sys.stderr)
            continue
        batches += [(name, left[start : start + BATCH]) for start in range(0, len(left), BATCH)]
    run_batches(RESULTS, run_batch, batches, processes)


def read() -> list[Record]:
    """The finished runs of existing rows."""
    return read_records(RESULTS, rows(), _key)


def _key(record: Record) -> tuple[str, int]:
    return record["row"], record["seed"]


def by_row() -> dict[Row, list[Record]]:
    """The finished runs of each row that has any, in the order of the rows."""
    found: dict[str, list[Record]] = {name: [] for name in rows()}
    for record in read():
        found[record["row"]].append(record)
    return {rows()[name]: records for name, records in found.items() if records}


def failures(names: Iterable[str], limit: int = EVERY) -> list[str]:
    """The missed bars of these rows, and of all honest schedules together."""
    asked, found, bad = set(names), by_row(), []
    for name in asked:
        row = rows()[name]
        runs, wanted = len(found.get(row, [])), min(row.seeds, limit)
        if row.installed and runs < wanted:
            bad.append(f"{name}: {runs} of {wanted} runs were made")
    for row, records in found.items():
        for bar in row.bars if row.name in asked else ():
            right, wanted = bar.counts(records)
            if right < wanted:
                bad.append(f"{row.name}: {bar.name} in {right} of {len(records)} runs, {wanted} must be")
    watched = [record for row, records in found.items() if NO_ALARM in row.bars for record in records]
    right, wanted = NO_ALARM.counts(watched)
    if right < wanted:
        bad.append(f"honest schedules: no alarm in {right} of {len(watched)} runs, {wanted} must be")
    return bad


def tables() -> dict[str, str]:
    """Every table with finished runs, by the name of its markers in docs/evidence/claims.md."""
    found: dict[str, list[list[str]]] = {}
    for row, records in by_row().items():
        heads = ["case", "runs", "PASS / VIOLATION / UNDERPOWERED", "code of most", "bar"]
        outcomes = Counter(record["outcome"] for record in records)
        codes = Counter(record["code"] for record in records)
        counts = " / ".join(str(outcomes[outcome]) for outcome in OUTCOMES)
        lines = found.setdefault(row.table, [heads])
        lines.append([_shown(row), str(len(records)), counts, codes.most_common(1)[0][0], _bars(row, records)])
    return {name: markdown_table(lines) for name, lines in found.items()}


def _shown(row: Row) -> str:
    return row.name.removeprefix("schedule, ").removeprefix("sampled, ").removeprefix("check, ")


def _bars(row: Row, records: Sequence[Record]) -> str:
    """Each bar with the number of runs that meet it."""
    met = [f"{bar.name}: {bar.counts(records)[0]} (≥ {100 * bar.share:g} %)" for bar in row.bars]
    return ", ".join(met) or "none"


def main() -> int:
    """Command line."""
    return main_of(__doc__, results=RESULTS, page=DOCS, rows=rows(), run=run, tables=tables, failures=failures)


if __name__ == "__main__":
    sys.exit(main())
