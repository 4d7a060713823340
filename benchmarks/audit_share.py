"""The cost of the audit in a round: all five rungs, 1,000 + 1,000 canaries, the CNN of 1.2 million, 34 clients.

Its floor is the three transforms of the canaries' rotation: one for the sum of the present canaries, and one each for the
cosines with the model delta and with its residual. All three run during training, on cores that training keeps busy. So
the cost of the audit is the additional time of rounds with it. Rounds with and without it alternate, in changing order, so
that a machine that slows down affects both.
"""

import dataclasses
import statistics
import time
from typing import Any

import torch

from benchmarks.ranks import pictures
from coalmine.audit import Audit
from coalmine.canaries.array_types import cores
from coalmine.simulation.cohorts import plan_cohorts
from coalmine.simulation.config import RunConfig
from coalmine.simulation.config_sources import merged, task_defaults
from coalmine.simulation.distributed.local_ranks import LocalRanks, SharedExamples
from coalmine.simulation.dp_fedavg import Training
from coalmine.simulation.engines import client_engine
from coalmine.simulation.models import cnn_dropout
from coalmine.simulation.planned_privacy import PlannedPrivacy
from coalmine.simulation.population import random_partition
from coalmine.simulation.tasks import Task

BAR = 0.01
PAIRS, STRETCH, CLIENTS, EXAMPLES_EACH = 8, 6, 34, 111  # the digits of one MNIST writer


class SwitchedAudit(Audit):
    """An audit that can be switched off and that measures the time of its calls."""

    seconds = 0.0
    idle = False

    def updates(self, *arguments: Any, **options: Any) -> Any:
        if self.idle:
            return torch.zeros_like(options["like"])
        start = time.perf_counter()
        found = super().updates(*arguments, **options)
        self.seconds += time.perf_counter() - start
        return found

    def observe_round(self, *arguments: Any, **options: Any) -> None:
        if not self.idle:
            start = time.perf_counter()
            super().observe_round(*arguments, **options)
            self.seconds += time.perf_counter() - start


def measure() -> tuple[list[float], list[float], float]:
    """Seconds of alternating rounds with and without the audit, and of the audit's own calls in a round."""
    rounds = 2 * PAIRS * (STRETCH + 1) + 1
    settings = {"rounds": rounds, "evaluate_every": 1000, "participation": {"clients_per_round": CLIENTS}}
    config = RunConfig.from_dict(merged(task_defaults("mnist-by-writer"), settings))
    config = dataclasses.replace(config, engine=config.engine.resolved())
    model, examples = cnn_dropout(), pictures(CLIENTS * EXAMPLES_EACH)
    task = Task("pictures", model, examples, pictures(10), random_partition(len(examples), CLIENTS, seed=0))
    audit = SwitchedAudit(
        model.dim,
        canaries=1000,
        unobserved=1000,
        seed=1,
        delta=1e-6,
        rounds=rounds,
        layers=model.sizes,
        deferred=True,
    )
    shared, engine = SharedExamples(examples), client_engine("auto", model, examples, config.client)
    planned = PlannedPrivacy(config, plan_cohorts(config, CLIENTS, audit.canaries_in_round), CLIENTS)
    training = Training(planned, task=task, engine=engine, audit=audit)
    ranks = LocalRanks(model, shared, training.sums, size=cores())
    if cores() > 1:
        training.clients_sum = ranks.compute
    taken: dict[bool, list[float]] = {False: [], True: []}
    try:
        state = training.initial_state()
        training.round(state)
        audit.seconds = 0.0
        for pair in range(PAIRS):
            for idle in (False, True) if pair % 2 else (True, False):
                audit.flush()
                audit.idle = idle
                training.round(state)  # its audit is measured during the first timed round, and so on
                start = time.perf_counter()
                for _ in range(STRETCH):
                    training.round(state)
                taken[idle].append((time.perf_counter() - start) / STRETCH)
        return taken[False], taken[True], audit.seconds / (PAIRS * (STRETCH + 1))
    finally:
        ranks.close()
        engine.close()


def main() -> int:
    with_audit, without, waited = measure()
    whole = statistics.median(with_audit)
    longer = sorted(one - other for one, other in zip(with_audit, without, strict=True))
    share = statistics.median(longer) / whole
    quarter = len(longer) // 4
    low, high = longer[quarter] / whole, longer[-1 - quarter] / whole
    print(f"a round {whole:.3f} s with the audit, {statistics.median(without):.3f} s without, on two cores;")
    print(f"{waited:.3f} s of it are the audit's own, beside the training")
    print(f"share {share:.1%} (bar {BAR:.0%}); half of {len(longer)} pairs of stretches lie in {low:.1%} … {high:.1%}")
    return 0 if share <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
