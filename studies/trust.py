"""Error rates of verdicts: broken pipelines must not PASS, honest ones must not be a VIOLATION.

    python -m studies.trust                      every row, about 20 minutes on two cores
    python -m studies.trust --seeds 5            at most five seeds in each row
    python -m studies.trust --only 'pool'        only the rows whose name matches this regular expression
    python -m studies.trust --write-docs         write the tables of docs/evidence/verdicts.md from finished runs

Every run is a whole audit of the loop in studies/pipelines.py, once with the clip norm declared and once without. A finished
run is one line of studies/out/trust.jsonl and is not run again; `--fresh` starts over, which is necessary after a change of
the audit. The study fails if a broken pipeline ever passes, if honest pipelines are VIOLATION in more than 1 % of all runs
(or, beyond chance, of the runs of one row), if a plain honest pipeline rarely passes, or if the pooled residual gauge misses
5 % less noise.
"""

import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coalmine import Claim, Poisson, amplified_epsilon, mechanism_epsilon
from coalmine.estimators.correlated import BandedNoise, TreeNoise
from studies.noise_faults import BROKEN_LAWS, scaled
from studies.pipelines import Noise, Pipeline, bfloat16, discrete_gaussian, fixed_point, half_precision
from studies.results import (
    EVERY,
    Record,
    main_of,
    markdown_table,
    most_errors,
    read_records,
    run_batches,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "trust.jsonl"
DOCS = ROOT / "docs" / "evidence" / "verdicts.md"
DELTA = 1e-6
BROKEN_SEEDS, HONEST_SEEDS, POWER_SEEDS = 100, 200, 20
FALSE_ALARMS = 0.01  # share of honest runs that may be a VIOLATION
PASSING = 0.95  # share of plain honest runs that must PASS if nothing hides the noise
FACTORS, COUNTS = (0.95, 0.9, 0.8, 0.71), (100, 400, 1_000)  # rows of the power table
BATCH = 20
OUTCOMES = ("PASS", "VIOLATION", "UNDERPOWERED")

Told = dict[str, Any]
Kind = Literal["broken", "honest", "plain", "power"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table: a pipeline, its claim (default: the truth), and its number of seeds.

    Without a declared clip norm, honest rows get half as many. "plain" rows are honest and give the audit no wrong
    inputs; with `passes`, nearly all of them must PASS.
    """

    name: str
    kind: Kind
    pipeline: Pipeline
    claim: Claim | float | None = None
    seeds: int
    passes: bool = True

    def numbers(self, *, declared: bool) -> range:
        """The seeds of this row."""
        return range(self.seeds if declared or self.kind in ("broken", "power") else self.seeds // 2)

    def run(self, seed: int, *, declared: bool) -> Record:
        """One run: its verdict, that of known-others, and the gauges outside their limits."""
        own = zlib.crc32(self.name.encode()) + seed  # rows that share seeds would share their false alarms
        result = self.pipeline.but(declared=declared).result(own, self.claim)
        assert result.verdict is not None
        others = result.adversaries.get("known-others")
        return {
            "row": self.name,
            "declared": declared,
            "seed": seed,
            "outcome": result.verdict.outcome,
            "code": result.verdict.code,
            "known-others": others.verdict.code if others and others.verdict else None,
            "gauges": [gauge.name for gauge in result.gauges if gauge.status != "ok"],
        }


@cache
def rows() -> dict[str, Row]:
    """Every row by its name."""
    every = [*_broken(), *_honest(), *_plain(), *_power()]
    found = {row.name: row for row in every}
    assert len(found) == len(every), "names of rows must differ"
    return found


def _broken() -> Iterator[Row]:
    for name, draw in BROKEN_LAWS.items():
        yield Row(name=f"noise: {name}", kind="broken", pipeline=Pipeline(draw=draw), seeds=BROKEN_SEEDS)
    for name, pipeline, claim in [*_incomplete(), *_misleading()]:
        yield Row(name=name, kind="broken", pipeline=pipeline, claim=claim, seeds=BROKEN_SEEDS)


def _incomplete() -> Iterator[tuple[str, Pipeline, None]]:
    """Too little noise and incomplete `others`: the remaining signal is random, or as long as the missing noise."""
    for factor in (0.25, 0.5):
        lost = np.sqrt(1 - factor**2)
        for length, zeros, common, own in (("", 1.0, 1.0, 1.0), (", same length", lost, 2 * lost, np.sqrt(2) * lost)):
            short = Pipeline(draw=scaled(factor))
            ending = f"and noise × {factor:g}{length}"
            yield f"`others` zero, {ending}", short.but(signal=zeros, tell=times_others(0.0)), None
            yield (
                f"half of a common signal in `others`, {ending}",
                short.but(signal=common, tell=times_others(0.5)),
                None,
            )
            yield f"half of the clients in `others`, {ending}", short.but(signal=own, missing=0.5), None


def _misleading() -> Iterator[tuple[str, Pipeline, Claim | float | None]]:
    """Faults that the audit's inputs could hide."""
    four = float(mechanism_epsilon(1.0, delta=DELTA, participations=4))
    few = Pipeline(rounds=30, presentations=4, observed=lambda number: number <= 7, draw=scaled(0.5))
    yield "half the noise, 7 of 30 rounds observed, bare claim for 4 participations", few, four
    yield "the same, noise_std as drawn", few.but(tell=times_noise(0.5)), four
    last = Pipeline(
        draw=lambda noise: noise.normal() * (0.5 if noise.number > 18 else 1.0),
        tell=lambda told, noise: times_noise(0.5)(told, noise) if noise.number > 18 else told,
    )
    yield "noise halved in the last 2 of 20 rounds, noise_std as drawn", last, None
    half = Pipeline(lost=0.5, draw=scaled(np.sqrt(0.5)), tell=lambda told, noise: told | {"noise_std": None})
    yield "half of the canaries lost, noise/√2, no noise_std", half, None


def _honest() -> Iterator[Row]:
    for name, pipeline, claim in _honest_cases():
        seeds = HONEST_SEEDS // 2 if name.startswith("Poisson") else HONEST_SEEDS
        yield Row(name=name, kind="honest", pipeline=pipeline, claim=claim, seeds=seeds)


def _honest_cases() -> Iterator[tuple[str, Pipeline, Claim | float | None]]:
    """Honest noise with wrong `others`, a loose claim, a custom schedule, or few degrees of freedom."""
    yield (
        "`others` divided by the clients alone (1.2 ×), signal 2 ×",
        Pipeline(signal=2.0, tell=times_others(1.2)),
        None,
    )
    yield "one client of ten missing from `others`", Pipeline(missing=0.1), None
    yield "one client of ten missing from `others`, signal 5 ×", Pipeline(missing=0.1, signal=5.0), None
    heavy = Pipeline(missing=0.1, law="heavy")
    yield "one client of ten missing from `others`, heavy-tailed signal", heavy, None
    yield "server learning rate 0.5 not applied to `others`", Pipeline(tell=halved_but_others), None
    generous = Claim(epsilon=float(mechanism_epsilon(0.8, delta=DELTA)), participations=1)
    for percent in (2, 5, 8):
        yield (
            f"claim for z = 0.8, noise {percent} % below the stated z = 1",
            Pipeline(draw=scaled(1 - percent / 100)),
            generous,
        )
    four = float(mechanism_epsilon(1.0, delta=DELTA, participations=4))
    poisson = Pipeline(sample=lambda audit, number, rng: audit.sampled_canaries(number, 0.2))
    yield "Poisson, q = 0.2, claim for 4 participations", poisson, Claim(epsilon=four, participations=4)
    yield "Poisson, q = 0.2, the same claim bare", poisson, four
    yield (
        "k = 500, d = 530, T = 100, R = 10",
        Pipeline(canaries=500, dim=530, rounds=100, presentations=10),
        None,
    )
    yield "k = 1,000, d = 1,010, T = 20", Pipeline(canaries=1_000, dim=1_010), None
    one = Pipeline(rounds=1, sample=lambda audit, number, rng: audit.sampled_canaries(number, 0.02))
    scheme = Poisson(0.02, rounds=1)
    amplified = Claim(
        amplified_epsilon(1.0, scheme, DELTA), sampling=scheme, noise_multiplier=1.0, sampler_observed=True
    )
    yield "one Poisson round, q = 0.02, amplified claim", one, amplified


def _plain() -> Iterator[Row]:
    """Nothing is wrong; sizes, signals, precisions and kinds of noise vary."""
    unit = 1 / (Pipeline.clients + Pipeline.canaries // Pipeline.rounds)  # unit of the release, in clip norms
    cases: dict[str, tuple[Pipeline, int, bool]] = {
        "d = 500, k = 50": (Pipeline(dim=500, canaries=50), HONEST_SEEDS, True),
        "d = 1,000, k = 100": (Pipeline(dim=1_000, canaries=100), HONEST_SEEDS, True),
        "d = 4,096": (Pipeline(), 2 * HONEST_SEEDS, True),
        "d = 20,000": (Pipeline(dim=20_000), HONEST_SEEDS // 2, True),
        "d = 100,000": (Pipeline(dim=100_000), 20, True),
        "T = 1": (Pipeline(rounds=1), HONEST_SEEDS, True),
        "T = 5": (Pipeline(rounds=5), HONEST_SEEDS, True),
        "T = 100": (Pipeline(rounds=100), HONEST_SEEDS // 4, True),
        "T = 500": (Pipeline(rounds=500), 10, True),
        "R = 4": (Pipeline(presentations=4), HONEST_SEEDS, True),
        "T = 100, R = 10": (Pipeline(rounds=100, presentations=10), HONEST_SEEDS // 4, True),
        "z = 0.3": (Pipeline(noise_multiplier=0.3), HONEST_SEEDS, True),
        "z = 2, k = 1,000": (Pipeline(noise_multiplier=2.0, canaries=1_000), HONEST_SEEDS, True),
        "no signal": (Pipeline(signal=0.0), HONEST_SEEDS, True),
        "heavy-tailed signal": (Pipeline(law="heavy"), HONEST_SEEDS, True),
        "sparse signal": (Pipeline(law="sparse"), HONEST_SEEDS, True),
        "signal 100 ×": (Pipeline(signal=100.0), HONEST_SEEDS, True),
        "noise in fp16": (Pipeline(draw=lambda noise: half_precision(noise.normal())), HONEST_SEEDS, True),
        "noise in bf16": (Pipeline(draw=lambda noise: bfloat16(noise.normal())), HONEST_SEEDS, True),
        "release in fp16": (Pipeline(release=half_precision), HONEST_SEEDS, True),
        "release in bf16": (Pipeline(release=bfloat16), HONEST_SEEDS, True),
        "release in bf16, signal 100 ×": (Pipeline(release=bfloat16, signal=100.0), HONEST_SEEDS, False),
        "fixed point, steps of 1/16 std": (Pipeline(release=fixed_point(unit / 16)), HONEST_SEEDS, True),
        "fixed point, steps of 1/2 std": (Pipeline(release=fixed_point(unit / 2)), HONEST_SEEDS, False),
        "discrete Gaussian, steps of 1/64 std": (
            Pipeline(draw=discrete_gaussian(1 / 64), release=fixed_point(unit / 64)),
            HONEST_SEEDS,
            True,
        ),
        "discrete Gaussian, steps of 1/4 std": (
            Pipeline(draw=discrete_gaussian(1 / 4), release=fixed_point(unit / 4)),
            HONEST_SEEDS,
            False,
        ),
        "tree noise": (Pipeline(correlated=TreeNoise(rounds=20)), HONEST_SEEDS, True),
        "banded noise": (Pipeline(correlated=BandedNoise.for_prefix_sums(20, bands=4)), HONEST_SEEDS, True),
        "momentum 0.9": (Pipeline(momentum=0.9), HONEST_SEEDS, True),
    }
    for name, (pipeline, seeds, passes) in cases.items():
        yield Row(name=name, kind="plain", pipeline=pipeline, seeds=seeds, passes=passes)


def _power() -> Iterator[Row]:
    for factor in FACTORS:
        for canaries in COUNTS:
            pipeline = Pipeline(canaries=canaries, draw=scaled(factor))
            yield Row(name=_power_name(factor, canaries), kind="power", pipeline=pipeline, seeds=POWER_SEEDS)


def _power_name(factor: float, canaries: int) -> str:
    return f"noise × {factor:g}, k = {canaries:,}"


def times_others(factor: float) -> Callable[[Told, Noise], Told]:
    """Give the audit a multiple of the other clients' sum."""
    return lambda told, noise: told | {"others": factor * told["others"]}


def times_noise(factor: float) -> Callable[[Told, Noise], Told]:
    """Give the audit a multiple of the noise's standard deviation."""
    return lambda told, noise: told | {"noise_std": factor * told["noise_std"]}


def halved_but_others(told: Told, noise: Noise) -> Told:
    """Apply a server learning rate of 0.5 to everything except `others`."""
    changed = {name: 0.5 * told[name] for name in ("model_delta", "noise_std")}
    clip_norm = told["clip_norm"]
    return told | changed | {"clip_norm": None if clip_norm is None else 0.5 * clip_norm}


def run_batch(name: str, declared: bool, seeds: list[int]) -> list[Record]:
    """Some runs of one row."""
    return [rows()[name].run(seed, declared=declared) for seed in seeds]


def run(names: Iterable[str], limit: int, processes: int) -> None:
    """Run the remaining seeds."""
    done = {_key(record) for record in read()}
    batches = []
    for name in names:
        for declared in (True, False):
            seeds = rows()[name].numbers(declared=declared)[:limit]
            left = [seed for seed in seeds if (name, declared, seed) not in done]
            batches += [(name, declared, left[start : start + BATCH]) for start in range(0, len(left), BATCH)]
    run_batches(RESULTS, run_batch, batches, processes)


def read() -> list[Record]:
    """The finished runs of existing rows."""
    return read_records(RESULTS, rows(), _key)


def _key(record: Record) -> tuple[str, bool, int]:
    return record["row"], record["declared"], record["seed"]


@dataclass(frozen=True)
class Summary:
    """The runs of one row, with the clip norm declared, without, or both."""

    runs: int
    outcomes: Counter[str]
    codes: Counter[str]
    gauges: Counter[str]
    mean: int  # runs in which known-others alone refutes the claim

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Summary":
        found = list(records)
        return cls(
            runs=len(found),
            outcomes=Counter(record["outcome"] for record in found),
            codes=Counter(f"{record['outcome']} {record['code']}" for record in found),
            gauges=Counter(_short(gauge) for record in found for gauge in {_short(g) for g in record["gauges"]}),
            mean=sum(record["known-others"] in ("mean", "bound") for record in found),
        )

    @property
    def counts(self) -> str:
        return " / ".join(str(self.outcomes[outcome]) for outcome in OUTCOMES)

    @property
    def seen_by(self) -> str:
        """The test that decided most runs, and the three gauges that are most often outside their limits."""
        deciding = {"mean": "mean test", "bound": "lower bound", "round": "scan over rounds", "stated": "stated noise"}
        code = self.codes.most_common(1)[0][0] if self.codes else ""
        outcome, _, word = code.partition(" ")
        names = [deciding[word]] if outcome == "VIOLATION" and word in deciding else []
        often = sorted(self.gauges.items(), key=lambda item: (-item[1], item[0]))[:3]
        names += [name for name, count in often if 2 * count > self.runs]
        if not names and outcome == "UNDERPOWERED":
            names = [f"code `{word}`"]
        return ", ".join(names)


def _short(gauge: str) -> str:
    return "layer gauges" if gauge.startswith("layer ") else gauge


def _summaries(kinds: tuple[Kind, ...]) -> dict[str, tuple[Summary, Summary]]:
    """By row: with the clip norm declared, and without."""
    sorted_out: dict[tuple[str, bool], list[Record]] = {}
    for record in read():
        sorted_out.setdefault((record["row"], record["declared"]), []).append(record)
    return {
        name: (Summary.of(sorted_out.get((name, True), [])), Summary.of(sorted_out.get((name, False), [])))
        for name, row in rows().items()
        if row.kind in kinds and ((name, True) in sorted_out or (name, False) in sorted_out)
    }


def _not_run(names: set[str], limit: int) -> list[str]:
    done = Counter(record["row"] for record in read())
    bad = []
    for name in (name for name in rows() if name in names):
        wanted = sum(len(rows()[name].numbers(declared=declared)[:limit]) for declared in (True, False))
        if done[name] < wanted:
            bad.append(f"{name}: {done[name]} of {wanted} runs were made")
    return bad


def failures(names: Iterable[str], limit: int = EVERY) -> list[str]:
    """The missed bars of these rows."""
    asked = set(names)
    bad, wrong, runs = _not_run(asked, limit), 0, 0
    for name, (declared, undeclared) in _summaries(("broken", "honest", "plain")).items():
        row = rows()[name]
        if name not in asked:
            continue
        for how, found in (("declared", declared), ("not declared", undeclared)):
            passed, violations = found.outcomes["PASS"], found.outcomes["VIOLATION"]
            where = f"{name} (clip norm {how})"
            if row.kind == "broken" and passed:
                bad.append(f"{where}: PASS in {passed} of {found.runs} runs, none may be")
            if row.kind != "broken":
                wrong, runs = wrong + violations, runs + found.runs
                if violations > most_errors(found.runs, FALSE_ALARMS):
                    bad.append(f"{where}: VIOLATION in {violations} of {found.runs} honest runs")
            if row.kind == "plain" and row.passes and passed < PASSING * found.runs - 1:
                bad.append(f"{where}: only {passed} of {found.runs} honest runs PASS")
    if wrong > FALSE_ALARMS * runs:
        bad.append(f"VIOLATION in {wrong} of {runs:,} honest runs, {FALSE_ALARMS:.0%} may be")
    for name, pair in _summaries(("power",)).items():
        if name in asked and name.startswith("noise × 0.95"):
            seen, total = sum(s.gauges["pooled residual"] for s in pair), sum(s.runs for s in pair)
            if seen < total:
                bad.append(f"{name}: the pooled residual gauge sees {seen} of {total} runs, all must be seen")
    return bad


def tables() -> dict[str, str]:
    """Every table with finished runs, by the name of its markers in docs/evidence/verdicts.md."""
    heads = ["runs", "clip norm declared", "not declared", "seen by"]
    found = {
        "broken": _table(["broken pipeline", *heads], _summaries(("broken",))),
        "honest": _table(["honest pipeline", *heads], _summaries(("honest",))),
        "plain": _table(["honest pipeline", *heads[:-1], "PASS"], _summaries(("plain",))),
        "power": _power_table(),
    }
    honest = [summary for pair in _summaries(("honest", "plain")).values() for summary in pair]
    wrong, runs = sum(s.outcomes["VIOLATION"] for s in honest), sum(s.runs for s in honest)
    found["total"] = f"All honest rows together: {wrong} of {runs:,} runs were a VIOLATION."
    return found


def _table(heads: list[str], summaries: dict[str, tuple[Summary, Summary]]) -> str:
    lines = [heads]
    for name, (declared, undeclared) in summaries.items():
        together = Summary.of([])
        for one in (declared, undeclared):
            together = Summary(
                together.runs + one.runs,
                together.outcomes + one.outcomes,
                together.codes + one.codes,
                together.gauges + one.gauges,
                together.mean + one.mean,
            )
        passed = f"{together.outcomes['PASS'] / together.runs:.1%}"
        last = passed if heads[-1] == "PASS" else together.seen_by
        lines.append([name, f"{declared.runs} + {undeclared.runs}", declared.counts, undeclared.counts, last])
    return markdown_table(lines)


def _power_table() -> str:
    heads = ["noise", "canaries", "clip norm", "mean test", "pooled residual", "VIOLATION", "no PASS"]
    lines = [heads]
    summaries = _summaries(("power",))
    for factor in FACTORS:
        for canaries in COUNTS:
            for how, one in zip(
                ("declared", "not declared"), summaries.get(_power_name(factor, canaries), ()), strict=False
            ):
                shares = [
                    one.mean,
                    one.gauges["pooled residual"],
                    one.outcomes["VIOLATION"],
                    one.runs - one.outcomes["PASS"],
                ]
                lines.append([f"× {factor:g}", f"{canaries:,}", how, *(f"{count} of {one.runs}" for count in shares)])
    return markdown_table(lines)


def main() -> int:
    """Command line."""
    return main_of(__doc__, results=RESULTS, page=DOCS, rows=rows(), run=run, tables=tables, failures=failures)


if __name__ == "__main__":
    sys.exit(main())
