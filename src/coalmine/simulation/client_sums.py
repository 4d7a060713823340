"""The clients' part of a round: clients train, and their updates are weighted, clipped and summed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coalmine.simulation.batches import Batches, draw_batches
from coalmine.simulation.clipping import clip_factors
from coalmine.simulation.config import RunConfig
from coalmine.simulation.engines import Engine, Examples, client_engine, example_engine
from coalmine.simulation.models import Model
from coalmine.simulation.population import Indices, Population
from coalmine.simulation.randomness import numpy_stream


def equal_weights(examples: Tensor) -> Tensor:
    """The weight of each update in the sum: always 1, so the number of examples does not matter."""
    return torch.ones_like(examples, dtype=torch.float32)


def engine_of(config: RunConfig, model: Model, train: Examples) -> Engine:
    """The engine that a run's settings name."""
    settings = config.engine
    if config.task.level == "example":
        return example_engine(model, train, memory_limit=settings.memory_limit or 1.0)
    return client_engine(
        settings.name,
        model,
        train,
        config.client,
        memory_limit=settings.memory_limit or 1.0,
        precision="tf32" if settings.precision == "tf32" else "fp32",
    )


def divide_clients(steps: Indices, ranks: int) -> list[Indices]:
    """Divide the clients among the ranks: longest client first, each to the rank with the least work so far.

    The division depends only on the numbers of steps, so every rank computes the same one.
    """
    load, rank_of = np.zeros(ranks, dtype=np.int64), np.zeros(len(steps), dtype=np.int64)
    for client in np.argsort(-steps, kind="stable"):
        rank = int(load.argmin())
        rank_of[client] = rank
        load[rank] += max(1, int(steps[client]))
    return [np.flatnonzero(rank_of == rank) for rank in range(ranks)]


@dataclass(frozen=True)
class ClientSums:
    """Trains the clients of a round in this process: all of them, or one rank's share."""

    config: RunConfig
    population: Population
    engine: Engine
    weigh: Callable[[Tensor], Tensor] = equal_weights
    clip: Callable[[Tensor, float], Tensor] = clip_factors

    def compute(
        self,
        model_vector: Tensor,
        clients: Indices,
        round_number: int,
        clip_norm: float,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """The sum of the clipped updates of this rank's clients, and the norms of all clients before clipping.

        The norms of other ranks' clients are 0, so that norms, like sums, can be added over the ranks.
        """
        owned = [self.population.examples(index) for index in clients.tolist()]
        batches = self._batches(owned, round_number)
        own = np.arange(len(batches)) if ranks == 1 else divide_clients(batches.steps, ranks)[rank]
        declared = [self.declared_examples(len(owned[index])) for index in own]
        weights = self.weigh(torch.tensor(declared, device=model_vector.device))
        total, chunk_norms, done = torch.zeros_like(model_vector), [model_vector.new_zeros(0)], 0
        for updates in self.engine.updates(model_vector, batches if ranks == 1 else batches.take(own)):
            chunk_norms.append(torch.linalg.vector_norm(updates, dim=1))
            factors = self.clip(chunk_norms[-1], clip_norm) * weights[done : done + len(updates)]
            total += factors @ updates
            done += len(updates)
        norms = torch.cat(chunk_norms)
        if ranks > 1:
            norms = model_vector.new_zeros(len(clients)).index_copy_(0, torch.from_numpy(own).to(norms.device), norms)
        return total, norms

    def _batches(self, owned: list[Indices], round_number: int) -> Batches:
        client, by_example = self.config.client, self.config.task.level == "example"
        return draw_batches(
            owned,
            epochs=1 if by_example else client.epochs,
            batch_size=1 if by_example else client.batch_size,
            rng=numpy_stream(self.config.seed, "batches", round_number),
            max_examples=self.config.task.max_examples_per_client,
        )

    def declared_examples(self, examples: int) -> int:
        """The number of examples that a client declares, capped at the number it may train on per round."""
        return min(examples, self.config.task.max_examples_per_client or examples)
