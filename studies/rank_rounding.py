"""How rounding grows over the rounds of the CNN on MNIST: two shares against one, and one weight moved by 1e-8.

    python -m studies.rank_rounding     a few minutes; the figures of docs/how-to/training.md, "Several processes"

Both shares of a round are computed in this process, one after the other: what differs from one process is the order of sums.
"""

import dataclasses
from typing import Any

import torch

from coalmine.simulation.config import RunConfig
from coalmine.simulation.config_sources import merged, task_defaults
from coalmine.simulation.training_run import prepared

ROUNDS, MOVED = 5, 1e-8


def main() -> int:
    """Print the largest difference of a parameter from the run in one process, after each round."""
    settings = {
        "rounds": ROUNDS + 1,  # the accuracy after the last one would take longer than all of them
        "canaries": {"count": 30},
        "participation": {"clients_per_round": 6},
        "engine": {"threads": 1, "jobs": 1, "device": "cpu"},
    }
    config = RunConfig.from_dict(merged(task_defaults("mnist-by-writer"), settings))
    config = dataclasses.replace(config, evaluate_every=10 * ROUNDS, engine=config.engine.resolved())
    models = {kind: trained(config, kind) for kind in ("one process", "two shares", "one weight moved")}
    for name in ("two shares", "one weight moved"):
        pairs = zip(models[name], models["one process"], strict=True)
        print(f"{name}: {', '.join(f'{float((a - b).abs().max()):.1e}' for a, b in pairs)}")
    return 0


def trained(config: RunConfig, kind: str) -> list[torch.Tensor]:
    """The model after each round."""
    found = []
    with prepared(config, None, None) as training:
        if kind == "two shares":
            training.clients_sum = lambda *round_: tuple(  # type: ignore[assignment,return-value]
                sum(parts) for parts in zip(*(_share(training, rank, *round_) for rank in range(2)), strict=True)
            )
        state = training.initial_state()
        if kind == "one weight moved":
            state.model_vector[17] += MOVED
        for _ in range(ROUNDS):
            training.round(state)
            found.append(state.model_vector.clone())
    return found


def _share(training: Any, rank: int, *round_: Any) -> Any:
    return training.sums.compute(*round_, rank=rank, ranks=2)


if __name__ == "__main__":
    raise SystemExit(main())
