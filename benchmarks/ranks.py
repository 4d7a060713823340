"""Rounds of the CNN in ranks, one for each core, against one process with as many threads; the two take turns.

The floor is the training itself: 1.15 GFlop for each step of 16 pictures, which both ways do alike. One process divides each
convolution among threads, which wait for each other in every layer. Ranks divide clients and wait once a round. They
exchange the model and the sum, 10 MB a round, through gloo. The seconds are a whole round's: batches, training, clip,
canaries, noise, audit. Processor seconds add up all processes.

    python -m benchmarks.ranks            prints the figures
    python -m benchmarks.ranks --write    and stores them in results/ranks.json, for docs/evidence/scaling.md
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from coalmine.audit import Audit
from coalmine.canaries.array_types import cores
from coalmine.simulation.client_sums import ClientSums, engine_of
from coalmine.simulation.cohorts import plan_cohorts
from coalmine.simulation.config import RunConfig
from coalmine.simulation.config_sources import merged, task_defaults
from coalmine.simulation.distributed.local_ranks import LocalRanks, SharedExamples
from coalmine.simulation.dp_fedavg import Training
from coalmine.simulation.engines import ClientSettings, Examples
from coalmine.simulation.models import Model, cnn_dropout
from coalmine.simulation.planned_privacy import PlannedPrivacy
from coalmine.simulation.population import Population, random_partition
from coalmine.simulation.tasks import Task

BAR = 1.0  # ranks take no more processor time than one process
CLIENTS, EACH, TURNS, STRETCH, ROUNDS = 12, 64, 6, 2, 200
RESULTS = Path(__file__).parent / "results" / "ranks.json"


def ranks_of(
    model: Model, examples: Examples, client: ClientSettings, population: Population, *, clients: int
) -> LocalRanks:
    """The clients' part of a round in a rank for each core, without an audit: for other benchmarks too."""
    config = config_of(clients, min(cores(), clients), client)
    shared = SharedExamples(examples)
    sums = ClientSums(config, population, engine_of(config, model, examples))
    return LocalRanks(model, shared, sums, size=config.engine.jobs)


def config_of(clients: int, ranks: int, client: ClientSettings | None = None) -> RunConfig:
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "evaluate_every": 10 * ROUNDS,
        "participation": {"clients_per_round": clients},
        "engine": {"device": "cpu", "jobs": ranks},
    }
    config = RunConfig.from_dict(merged(task_defaults("mnist-by-writer"), settings))
    return dataclasses.replace(config, engine=config.engine.resolved(), client=client or config.client)


def pictures(count: int) -> Examples:
    generator = torch.Generator().manual_seed(0)
    return Examples(torch.rand(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator))


class Side:
    """A training in so many ranks."""

    def __init__(self, ranks: int) -> None:
        config, model, examples = config_of(CLIENTS, ranks), cnn_dropout(), pictures(CLIENTS * EACH)
        task = Task("pictures", model, examples, pictures(10), random_partition(len(examples), CLIENTS, seed=0))
        self.audit = Audit(
            model.dim,
            canaries=1000,
            unobserved=1000,
            seed=1,
            delta=1e-6,
            rounds=ROUNDS,
            layers=model.sizes,
            deferred=True,
        )
        shared, engine = SharedExamples(examples), engine_of(config, model, examples)
        planned = PlannedPrivacy(config, plan_cohorts(config, CLIENTS, self.audit.canaries_in_round), CLIENTS)
        self.training = Training(planned, task=task, engine=engine, audit=self.audit)
        self.local = LocalRanks(model, shared, self.training.sums, size=ranks)
        if ranks > 1:
            self.training.clients_sum = self.local.compute
        self.state = self.training.initial_state()
        self.seconds: list[float] = []
        self.used: list[float] = []

    def turn(self, *, counted: bool = True) -> None:
        """Some rounds in a row, as a run has them."""
        self.training.round(self.state)
        self.audit.flush()
        used, began = processor_seconds(), time.perf_counter()
        for _ in range(STRETCH):
            self.training.round(self.state)
        if counted:
            self.seconds.append((time.perf_counter() - began) / STRETCH)
            self.used.append((processor_seconds() - used) / STRETCH)


def processor_seconds() -> float:
    """Of this process and its children, so far."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(path.parent.name) == os.getpid() or int(fields[1]) == os.getpid():
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure() -> dict[str, Any]:
    """Medians, and the median ratio of a turn of one process to the next turn of the ranks."""
    count = cores()
    alone, ranked = Side(1), Side(count)
    try:
        for number in range(TURNS + 1):
            for side in (alone, ranked) if number % 2 else (ranked, alone):
                side.turn(counted=number > 0)
    finally:
        ranked.local.close()
    pairs = zip(alone.seconds, ranked.seconds, strict=True)
    return {
        "ranks": count,
        "turns": TURNS,
        "seconds": {"one process": statistics.median(alone.seconds), "ranks": statistics.median(ranked.seconds)},
        "processor_seconds": {"one process": statistics.median(alone.used), "ranks": statistics.median(ranked.used)},
        "ratio": statistics.median(one / other for one, other in pairs),
    }


def main() -> int:
    """Print the figures; 1 if the ranks cost more."""
    found = measure()
    print(json.dumps(found, indent=1))
    if "--write" in sys.argv[1:]:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    used = found["processor_seconds"]
    ratio = used["one process"] / used["ranks"]
    print(f"one process takes {ratio:.2f} times the processor time of {found['ranks']} ranks (bar {BAR:g}),")
    print(f"and {found['ratio']:.2f} times as long; on busy cores the ranks wait for the slowest of them")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
