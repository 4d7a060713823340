"""Views of a federation: honest local and distributed noise must pass, and no fault at the clients may hide.

    python -m studies.views                     100 seeds in each row; about an hour on one core
    python -m studies.views --seeds 10          at most ten seeds in each row
    python -m studies.views --write-docs        write the tables of docs/evidence/flower.md from finished runs

Flower's strategy, its LocalDpMod and canary_mod are real and run in one process: two rounds of a model of 2,000 numbers, 8
real clients and the row's canaries. δ = 1e-5. A server's claim is for any two updates of a client in both rounds, a
coalition's for a client that is zeroed out. A finished run is one line of studies/out/views.jsonl and is not run again. The
study fails if honest noise passes in fewer than 98 of 100 runs or is a VIOLATION in more than 1, if a fault is VIOLATION in
fewer than 95, or if the interval of an honest coalition covers the closed-form ε in fewer than 90.
"""

import logging
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from studies.results import Record, main_of, markdown_table, read_records, run_batches

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "views.jsonl"
PAGE = ROOT / "docs" / "evidence" / "flower.md"
SEEDS, BATCH = 100, 10
REAL, ROUNDS, DELTA, SIZE = 8, 2, 1e-5, 2_000
NAMED = "view of the server", "view of a coalition"


class Row(NamedTuple):
    """A federation: the noise that its clients state, the one that they add, their clip and their canaries.

    `colluding` is the number of colluding canary nodes; 0 is the view of the server.
    """

    canaries: int
    stated: float
    added: float
    clip: float = 1.0
    shared: bool = False
    colluding: int = 0

    @property
    def honest(self) -> bool:
        """Whether every client does as it states."""
        return self.added == self.stated and self.clip == 1 and not self.shared

    @property
    def claim(self) -> float:
        """The closed-form ε of what is stated."""
        return self._epsilon(1 if self.colluding else 2)

    @property
    def one_norm(self) -> float:
        """The same for a client who moves a round by one clip norm, as intervals are about."""
        return self._epsilon(1)

    def _epsilon(self, moved: int) -> float:
        left = self.stated * (math.sqrt(REAL + self.canaries - self.colluding) if self.colluding else 1.0)
        return float(mechanism_epsilon(left / moved / math.sqrt(ROUNDS), delta=DELTA))


def local_noise(epsilon: float) -> float:
    """The noise of a client whose replies have this ε together, over the clip norm."""
    return 2 * math.sqrt(ROUNDS) * float(mechanism_noise(epsilon, delta=DELTA))


def _rows() -> dict[str, Row]:
    found = {}
    for epsilon, many, count in ((1.0, 1_400, 200), (8.0, 60, 60), (50.0, 30, 30)):
        noise = local_noise(epsilon)
        found[f"local ε = {epsilon:g}, honest"] = Row(many, noise, noise)
        found[f"local ε = {epsilon:g}, noise of each client sized for the sum"] = Row(
            count, noise, noise / math.sqrt(REAL + count)
        )
        found[f"local ε = {epsilon:g}, half the noise"] = Row(count, noise, noise / 2)
    noise = local_noise(8.0)
    found["local ε = 8, clip norm times 3"] = Row(60, noise, noise, clip=3.0)
    found["local ε = 8, one seed for all clients"] = Row(60, noise, noise, shared=True)
    for members in (1, 10, 50):
        found[f"{members} of 100 collude, honest"] = Row(92, 0.1, 0.1, colluding=members)
    found["50 of 100 collude, half the noise"] = Row(92, 0.1, 0.05, colluding=50)
    return found


ROWS = _rows()


def run_row(name: str, seeds: list[int]) -> list[Record]:
    """One run for each seed: the verdict of the view, and whether its interval covers the claim."""
    sys.path.insert(0, str(ROOT / "tests" / "integrations"))
    from flower_training import LoopGrid, client_app, fedavg, initial_arrays, nodes, run
    from flwr.app import Array
    from flwr.clientapp.mod import LocalDpMod

    from coalmine.integrations.flower import audited, canary_mod

    logging.getLogger("flwr").setLevel(logging.ERROR)
    row, found = ROWS[name], []

    def shared_noise(message: Any, context: Any, call_next: Any) -> Any:
        """Noise from a generator that every client seeds with the round."""
        rng = np.random.default_rng(int(message.content["config"]["server-round"]))
        reply = call_next(message, context)
        key, record = next(iter(reply.content.array_records.items()))
        values = {each: array.numpy() for each, array in record.items()}
        noisy = {each: array + row.added * rng.normal(size=array.shape) for each, array in values.items()}
        reply.content[key] = type(record)({each: Array(array.astype("f4")) for each, array in noisy.items()})
        return reply

    for seed in seeds:
        view = f"coalition({row.colluding})" if row.colluding else "server"
        strategy = audited(
            fedavg(),
            initial_arrays(SIZE),
            canaries=row.canaries,
            seed=b"views" + seed.to_bytes(12),
            delta=DELTA,
            clip_norm=1.0,
            views={view: row.claim},
            client_noise=row.stated,
            progress=False,
        )
        added = 1e-6 if row.shared else row.added
        mods = [LocalDpMod(row.clip, 1.0, math.sqrt(2 * math.log(1.25 / DELTA)) / added, DELTA), canary_mod]
        grid = LoopGrid(client_app([shared_noise, *mods] if row.shared else mods), nodes(REAL, row.canaries))
        run(strategy, grid, rounds=ROUNDS, seed=seed, arrays=initial_arrays(SIZE))
        strategy.audit.finish()
        result = strategy.audit.views.results[view]
        rung = result.adversaries["known-round" if row.colluding else "known-others"].headline.estimate
        assert rung.interval is not None
        assert result.verdict is not None
        low, high = float(rung.interval.low), float(rung.interval.high)
        found.append({
            "row": name, "seed": seed, "verdict": str(result.verdict.outcome), "code": result.verdict.code,
            "epsilon": strategy.audit.views.by_name[view].seen(result).measured, "covers": low <= row.one_norm <= high,
        })  # fmt: skip
    return found


def read() -> list[Record]:
    """The finished runs."""
    return read_records(RESULTS, ROWS, lambda record: (record["row"], record["seed"]))


def run(names: list[str], seeds: int, jobs: int) -> None:
    """Run the seeds that are not finished."""
    done = {(record["row"], record["seed"]) for record in read()}
    left = {name: [seed for seed in range(1, min(seeds, SEEDS) + 1) if (name, seed) not in done] for name in names}
    batches = [(name, left[name][at : at + BATCH]) for name in names for at in range(0, len(left[name]), BATCH)]
    run_batches(RESULTS, run_row, batches, jobs)


def tables() -> dict[str, str]:
    """One table for each view."""
    lines: dict[str, list[list[str]]] = {name: [HEADS] for name in NAMED}
    for name, row in ROWS.items():
        mine = [record for record in read() if record["row"] == name]
        if mine:
            counts = [sum(record["verdict"] == verdict for record in mine) for verdict in ("PASS", "VIOLATION")]
            measured = [record["epsilon"] for record in mine if record["epsilon"] is not None]
            middle = f"{np.median(measured):.3g}" if measured else "–"
            covered = str(sum(record["covers"] for record in mine)) if row.honest else "–"
            cells = [name, f"{row.canaries:,}", str(len(mine)), f"{row.claim:.3g}", middle, covered]
            lines[NAMED[bool(row.colluding)]].append(cells + [str(count) for count in counts])
    return {name: markdown_table(table) for name, table in lines.items()}


HEADS = ["clients", "canaries", "runs", "claimed ε", "median ε", "interval covers the claim", "PASS", "VIOLATION"]


def failures(names: list[str], seeds: int) -> list[str]:
    """The bars that were missed."""
    missed = []
    for name in names:
        row, mine = ROWS[name], [record for record in read() if record["row"] == name]
        passed, refuted = (sum(r["verdict"] == verdict for r in mine) for verdict in ("PASS", "VIOLATION"))
        count = len(mine)
        if row.honest and refuted > max(0.01 * count, 1):
            missed.append(f"{name}: {refuted} of {count} honest runs are a VIOLATION")
        if row.honest and not row.colluding and passed < 0.98 * count - 1:
            missed.append(f"{name}: {passed} of {count} honest runs pass")
        if row.colluding and row.honest and sum(r["covers"] for r in mine) < 0.9 * count - 1:
            missed.append(f"{name}: too few intervals cover the closed form")
        if not row.honest and refuted < 0.95 * count:
            missed.append(f"{name}: {refuted} of {count} faulty runs are a VIOLATION")
    return missed


def main() -> int:
    """Command line."""
    return main_of(__doc__, results=RESULTS, page=PAGE, rows=ROWS, run=run, tables=tables, failures=failures)


if __name__ == "__main__":
    sys.exit(main())
