"""Error rate and speed of the alarm: honest and broken runs, checked after every round.

    python -m studies.alarm --jobs 2             scores alone, then whole loops with gauges: about ten minutes
    python -m studies.alarm --only "whole loop"  the rows whose name matches
    python -m studies.alarm --write-docs         write the tables of finished rows into docs/evidence/alarm.md

Rows of scores alone sample the scores of ten canaries per round with their common scale: 10,000 honest runs, 2,000 with less
noise. Whole loops are audits of a vector of 4,096 numbers with 1,000 canaries in 100 rounds, checked after every round. A
finished row is stored in studies/out/alarm.jsonl and is not run again.
"""

import argparse
import json
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import binom

from coalmine import Audit, mechanism_epsilon
from coalmine.canaries.rotation_numpy import stay_in_one_thread
from coalmine.estimators.sequential import information, log_evidence, standard_score
from coalmine.verdict.alarm import EVIDENCE_LEVEL
from studies.results import put_between_markers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "alarm.jsonl"
DOCS = ROOT / "docs" / "evidence" / "alarm.md"
PRESENT, DOF, DELTA = 10, 9_000, 1e-6  # canaries per round, degrees of freedom of its scale
DIM, CANARIES, ROUNDS = 4_096, 1_000, 100
MOST = {"honest": EVIDENCE_LEVEL, "honest whole loop": 0.01}  # allowed share of honest runs with an alarm
Law = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Runs of one kind. `latest` is the round by which the median run must alarm; honest rows have none."""

    name: str
    runs: int
    scores: dict[str, Any] | None = None  # settings of `first_alarms`; None for a whole loop
    loop: dict[str, Any] | None = None  # settings of `loop_alarm`
    latest: float | None = None
    barred: bool = True  # whether the row has a bar


def rows() -> list[Row]:
    """Every row of the study."""
    found = [
        Row(name=f"honest, z = {z}, T = {rounds:,}", runs=10_000, scores={"noise": z, "claimed": z, "rounds": rounds})
        for rounds in (100, 2_048)
        for z in (0.5, 1.0, 2.0)
    ]
    found += [
        Row(
            name=f"honest, a fixed-time test after every round, T = {rounds:,}",
            runs=10_000,
            scores={"noise": 1.0, "claimed": 1.0, "rounds": rounds, "fixed": True},
            barred=False,
        )
        for rounds in (100, 2_048)
    ]
    for z in (1.0, 0.5):
        for name, factor, latest in (
            ("1.1", 1.1, math.inf),
            ("1.25", 1.25, 25),
            ("√2", math.sqrt(2), 12),
            ("2", 2.0, 3),
        ):
            scores = {"noise": z / factor, "claimed": z, "rounds": 100}
            found.append(Row(name=f"noise over {name}, z = {z}", runs=2_000, scores=scores, latest=latest))
    found += [
        Row(name="honest whole loop", runs=500, loop={}),
        Row(name="honest whole loop, others unknown", runs=200, loop={"known": False}),
        Row(name="honest whole loop, noise not stated", runs=200, loop={"stated": False}),
        Row(name="whole loop, noise over 2", runs=50, loop={"law": "half"}, latest=1),
        Row(name="whole loop, noise over 2, not stated", runs=50, loop={"law": "half", "stated": False}, latest=3),
        Row(name="whole loop, noise over √2, not stated", runs=50, loop={"law": "root", "stated": False}, latest=12),
        Row(name="whole loop, noise used twice", runs=50, loop={"law": "twice"}, latest=2),
        Row(name="whole loop, a tenth of the noise from round 80 on", runs=50, loop={"law": "late"}, latest=94),
        Row(name="whole loop, noise on half of the coordinates", runs=50, loop={"law": "halved"}, barred=False),
    ]
    return found


def first_alarms(row: Row, seed: int) -> list[float]:
    """For each run, the round in which the evidence reaches its level, or inf."""
    assert row.scores is not None
    noise, claimed, rounds = row.scores["noise"], row.scores["claimed"], row.scores["rounds"]
    rng, found = np.random.default_rng(seed), []
    weight = float(information(PRESENT, DOF, claimed))
    informed = weight * np.arange(1, rounds + 1)
    for _ in range(row.runs // 100):
        scale = np.sqrt(rng.chisquare(DOF, (100, rounds)) / DOF)
        scores = (math.sqrt(PRESENT) / noise + rng.standard_normal((100, rounds))) / scale
        total = np.cumsum(math.sqrt(weight) * standard_score(scores, DOF, math.sqrt(PRESENT) / claimed), axis=1)
        if row.scores.get("fixed"):
            reached = total / np.sqrt(informed) > -float(ndtri(EVIDENCE_LEVEL))
        else:
            reached = log_evidence(total, informed) >= -math.log(EVIDENCE_LEVEL)
        found += np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, math.inf).tolist()
    return found


LAWS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "honest": lambda rng, number, seed: rng.normal(size=DIM),
    "half": lambda rng, number, seed: rng.normal(size=DIM) / 2,
    "root": lambda rng, number, seed: rng.normal(size=DIM) / math.sqrt(2),
    "twice": lambda rng, number, seed: np.random.default_rng([seed, (number + 1) // 2]).normal(size=DIM),
    "late": lambda rng, number, seed: rng.normal(size=DIM) * (0.1 if number >= 80 else 1.0),
    "halved": lambda rng, number, seed: rng.normal(size=DIM) * math.sqrt(2) * (np.arange(DIM) < DIM // 2),
}


def loop_alarm(seed: int, *, law: str = "honest", known: bool = True, stated: bool = True) -> tuple[float, str]:
    """The round and the cause of the first alarm of an audit that is checked after every round."""
    secret = f"study of the alarm, seed {seed}".encode()
    claim = mechanism_epsilon(1.0, delta=DELTA)
    audit = Audit(DIM, canaries=CANARIES, seed=secret, delta=DELTA, rounds=ROUNDS, claim=claim)
    rng = np.random.default_rng([seed, 1])
    signal = 2 * rng.normal(size=DIM)
    for number in range(1, ROUNDS + 1):
        present = audit.canaries_in_round(number)
        others = signal + 0.5 * rng.normal(size=DIM)
        release = audit.updates(present, 1.0) + others + LAWS[law](rng, number, seed)
        audit.observe_round(
            number,
            release,
            present=present,
            others=others if known else None,
            noise_std=1.0 if stated else None,
            clip_norm=1.0,
        )
        alarm = audit.alarm()
        if alarm is not None:
            return float(alarm.round), alarm.verdict.facts.get("gauge") or alarm.verdict.code
    return math.inf, ""


def run_part(name: str, part: int, parts: int) -> dict[str, Any]:
    """A part of a row's runs."""
    stay_in_one_thread()
    row = next(row for row in rows() if row.name == name)
    if row.loop is None:
        found = [(alarm, "evidence") for alarm in first_alarms(row, zlib.crc32(name.encode()))]
    else:
        found = [loop_alarm(seed, **row.loop) for seed in range(1 + part, row.runs + 1, parts)]
    alarms = [(alarm, why) for alarm, why in found if alarm < math.inf]
    return {"row": name, "part": part, "runs": len(found), "alarms": alarms}


def read() -> dict[str, dict[str, Any]]:
    """The finished rows: the number of runs, and the rounds and causes of their alarms."""
    found: dict[str, dict[str, Any]] = {}
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else []:
        told = json.loads(line)
        whole = found.setdefault(told["row"], {"runs": 0, "alarms": [], "parts": set()})
        if told["part"] not in whole["parts"]:
            whole["parts"].add(told["part"])
            whole["runs"] += told["runs"]
            whole["alarms"] += told["alarms"]
    return found


def median_round(found: dict[str, Any]) -> float:
    """The alarm's median round, or inf if most runs had none."""
    alarms = [alarm for alarm, _ in found["alarms"]]
    return float(np.median(alarms + [math.inf] * (found["runs"] - len(alarms))))


def failures(found: dict[str, dict[str, Any]]) -> list[str]:
    """The missed bars; an honest row may exceed its level by the sampling error that occurs once in a thousand."""
    bad = []
    for row in rows():
        if row.name not in found or not row.barred:
            continue
        told = found[row.name]
        count = len(told["alarms"])
        if row.latest is None:
            level = MOST["honest whole loop" if row.loop is not None else "honest"]
            most = int(binom.ppf(0.999, told["runs"], level))
            if count > most:
                bad.append(f"{row.name}: {count} of {told['runs']} alarmed, at most {most} may")
        elif median_round(told) > row.latest:
            bad.append(f"{row.name}: the median alarm is in round {median_round(told):g}, bar {row.latest:g}")
    return bad


def tables(found: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = ["| runs of | runs | alarm at any time | median round of the alarm | raised by |", "|---|---|---|---|---|"]
    for row in rows():
        if row.name in found:
            told = found[row.name]
            count, middle = len(told["alarms"]), median_round(told)
            why = Counter(why for _, why in told["alarms"]).most_common(3)
            share = f"{count:,} ({count / told['runs']:.2%})"
            by = ", ".join(f"{name} {number}" for name, number in why) if row.loop is not None else ""
            lines.append(f"| {row.name} | {told['runs']:,} | {share} | {middle if middle < math.inf else '–'} | {by} |")
    return "\n".join(line.replace(".0 |", " |") for line in lines)


def main() -> int:
    """Run the remaining rows and compare all of them with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", default="", help="Regular expression for the rows to run.")
    parser.add_argument("--write-docs", action="store_true", help="Write the table into docs/evidence/alarm.md.")
    options = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    done = {(name, part) for name, told in read().items() for part in told["parts"]}
    parts = {row.name: 1 if row.loop is None else 10 for row in rows() if re.search(options.only, row.name)}
    todo = [(name, part, count) for name, count in parts.items() for part in range(count) if (name, part) not in done]
    if not options.write_docs:
        with ProcessPoolExecutor(options.jobs) as pool, RESULTS.open("a") as out:
            for future in as_completed([pool.submit(run_part, *task) for task in todo]):
                out.write(json.dumps(future.result()) + "\n")
                out.flush()
    found = read()
    print(tables(found))
    bad = failures(found)
    print("\n".join(bad) if bad else "every bar is met")
    if options.write_docs:
        DOCS.write_text(put_between_markers(DOCS.read_text(), "study", tables(found)))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
