"""All clients together, for any model: torch.func vectorises one client's step over the clients."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import grad, vmap

from coalmine.simulation.batches import Batches
from coalmine.simulation.engines.plain.engine import ClientSettings, Examples, chunks, clients_that_fit
from coalmine.simulation.models import Masks, Model
from coalmine.simulation.population import Indices


class VectorizedTogether:
    """Trains all clients of a chunk at once; each client's model is a row of one matrix."""

    def __init__(self, model: Model, examples: Examples, client: ClientSettings, *, memory_limit: float) -> None:
        self.model, self.examples, self.client = model, examples, client
        bytes_each = 4 * (4 * model.dim + client.batch_size * model.activations)
        self.chunk = clients_that_fit(bytes_each, memory_limit)
        self._gradients = vmap(grad(self._loss))

    @property
    def description(self) -> str:
        return "together, vectorised by torch.func"

    def updates(self, model_vector: Tensor, batches: Batches) -> Iterator[Tensor]:
        for clients in chunks(len(batches), self.chunk):
            yield self._train(model_vector, batches, clients)

    def close(self) -> None:
        pass

    def _loss(self, vector: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, masks: Masks) -> Tensor:
        logits = self.model.logits(self.model.split(vector), inputs, masks)
        return self.model.loss(logits, labels, shares)

    def _train(self, model_vector: Tensor, batches: Batches, clients: Indices) -> Tensor:
        chunk, order = batches.longest_first(clients)
        device = model_vector.device
        examples, shares = torch.from_numpy(chunk.examples).to(device), torch.from_numpy(chunk.shares).to(device)
        vectors = model_vector.repeat(len(chunk), 1)
        velocity = torch.zeros_like(vectors) if self.client.momentum else None
        seeds = torch.from_numpy(chunk.dropout_seeds).to(device)
        for step, active in enumerate((chunk.counts > 0).sum(axis=0)):
            index = examples[:active, step]
            masks = self.model.masks(seeds[:active], step, self.client.batch_size)
            inputs, labels = self.examples.inputs[index], self.examples.labels[index]
            gradients = self._gradients(vectors[:active], inputs, labels, shares[:active, step], masks)
            if velocity is not None:
                gradients = velocity[:active].mul_(self.client.momentum).add_(gradients)
            vectors[:active].sub_(gradients, alpha=self.client.learning_rate)
        vectors -= model_vector
        return vectors[torch.from_numpy(order).to(device)]
