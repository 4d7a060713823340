"""What the audit costs in a round: all five rungs, 1,000 + 1,000 canaries, the CNN of 1.2 million, 34 clients.

Its floor are the transforms of the canaries' rotation: one for the sum of the present canaries, one each for the cosines
with the model delta and with what is left of it without the clients, and one for the gauges by layer.
"""

import dataclasses
import time
from typing import Any

import torch

from benchmarks.engine import pictures
from coalmine.audit.audit import Audit
from coalmine.simulation.cohorts import plan_cohorts
from coalmine.simulation.config import RunConfig, merged, task_defaults
from coalmine.simulation.engines import client_engine
from coalmine.simulation.models import cnn_dropout
from coalmine.simulation.population import random_partition
from coalmine.simulation.tasks import Task
from coalmine.simulation.training import Training

BAR = 0.03
ROUNDS, CLIENTS, EXAMPLES_EACH = 4, 34, 111  # as many digits as a writer of MNIST has


class TimedAudit(Audit):
    """An audit that keeps the time it takes in the rounds."""

    seconds = 0.0

    def updates(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = super().updates(*arguments, **options)
        self.seconds += time.perf_counter() - start
        return found

    def observe_round(self, *arguments: Any, **options: Any) -> None:
        start = time.perf_counter()
        super().observe_round(*arguments, **options)
        self.seconds += time.perf_counter() - start


def measure() -> tuple[float, float]:
    """Seconds of a round, and of the audit in it, after one round to warm up."""
    settings = {"rounds": ROUNDS + 1, "evaluate_every": 1000, "participation": {"clients_per_round": CLIENTS}}
    config = RunConfig.from_dict(merged(task_defaults("mnist-by-writer"), settings))
    config = dataclasses.replace(config, engine=config.engine.resolved())
    model, examples = cnn_dropout(), pictures(CLIENTS * EXAMPLES_EACH)
    task = Task("pictures", model, examples, pictures(10), random_partition(len(examples), CLIENTS, seed=0))
    audit = TimedAudit(
        model.dim, canaries=1000, unobserved=1000, seed=1, delta=1e-6, rounds=config.rounds, layers=model.sizes
    )
    engine = client_engine("auto", model, examples, config.client, workers=config.engine.workers)
    cohorts = plan_cohorts(config, CLIENTS, audit.canaries_in_round)
    training = Training(config, task=task, engine=engine, cohorts=cohorts, audit=audit)
    try:
        state = training.initial_state()
        training.round(state)
        audit.seconds, start = 0.0, time.perf_counter()
        list(training.rounds(state))
        return (time.perf_counter() - start) / ROUNDS, audit.seconds / ROUNDS
    finally:
        engine.close()


def main() -> int:
    whole, audit = measure()
    print(f"a round {whole:.2f} s on {torch.get_num_threads()} threads, the audit in it {audit:.3f} s:")
    print(f"share {audit / whole:.1%} (bar {BAR:.0%})")
    return 0 if audit / whole <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
