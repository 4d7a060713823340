"""Models of dense layers for all clients together: one batched matrix product per layer and step.

This is written by hand, since a model with a few thousand parameters spends its time in calls, not in arithmetic. Forward
and backward pass are fourteen calls, and the product that gives a gradient also applies it.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from coalmine.simulation.batches import Batches
from coalmine.simulation.engines.plain.engine import ClientSettings, Examples, chunks, clients_that_fit
from coalmine.simulation.models import Model
from coalmine.simulation.population import Indices


class DenseTogether:
    """Trains all clients of a chunk at once, for models with `layers`."""

    def __init__(self, model: Model, examples: Examples, client: ClientSettings, *, memory_limit: float) -> None:
        self.model, self.examples, self.client = model, examples, client
        copies = 3 if client.momentum else 2
        bytes_each = 4 * (copies * model.dim + client.batch_size * model.activations)
        self.chunk = clients_that_fit(bytes_each, memory_limit)
        self.inputs = examples.inputs.flatten(start_dim=1)

    @property
    def description(self) -> str:
        return "together, by batched matrix products"

    def updates(self, model_vector: Tensor, batches: Batches) -> Iterator[Tensor]:
        for clients in chunks(len(batches), self.chunk):
            yield self._train(model_vector, batches, clients)

    def close(self) -> None:
        pass

    def _train(self, model_vector: Tensor, batches: Batches, clients: Indices) -> Tensor:
        chunk, order = batches.longest_first(clients)
        device = model_vector.device
        examples = torch.from_numpy(chunk.examples).to(device)
        shares = torch.from_numpy(chunk.shares).to(device)
        layers = [
            (weight.repeat(len(chunk), 1, 1), bias.repeat(len(chunk), 1, 1))
            for weight, bias in _pairs(list(self.model.split(model_vector).values()))
        ]
        velocities = [(torch.zeros_like(weight), torch.zeros_like(bias)) for weight, bias in layers]
        for step, active in enumerate((chunk.counts > 0).sum(axis=0)):
            index = examples[:active, step]
            inputs = self.inputs[index]
            self._step(
                [(weight[:active], bias[:active]) for weight, bias in layers],
                [(weight[:active], bias[:active]) for weight, bias in velocities] if self.client.momentum else None,
                inputs,
                self.examples.labels[index],
                shares[:active, step],
            )
        trained = torch.cat([tensor.flatten(start_dim=1) for layer in layers for tensor in layer], dim=1)
        trained -= model_vector
        return trained if (np.diff(order) == 1).all() else trained[torch.from_numpy(order).to(device)]

    def _step(
        self,
        layers: list[tuple[Tensor, Tensor]],
        velocities: list[tuple[Tensor, Tensor]] | None,
        inputs: Tensor,
        labels: Tensor,
        shares: Tensor,
    ) -> None:
        """One step of SGD in place, on the mean cross entropy of each client's batch."""
        rate, momentum = self.client.learning_rate, self.client.momentum
        hidden = [inputs]
        for weight, bias in layers[:-1]:
            hidden.append(torch.baddbmm(bias, hidden[-1], weight).relu_())
        logits = torch.baddbmm(layers[-1][1], hidden[-1], layers[-1][0])
        grad = logits.softmax(dim=2)
        grad.scatter_add_(2, labels.unsqueeze(2), torch.full_like(shares, -1.0).unsqueeze(2))
        grad *= shares.unsqueeze(2)
        for number in range(len(layers) - 1, -1, -1):
            weight, bias = layers[number]
            input_grad = torch.bmm(grad, weight.transpose(1, 2)) if number else None
            transposed = hidden[number].transpose(1, 2)
            if velocities is None:
                weight.baddbmm_(transposed, grad, alpha=-rate)
                bias.sub_(grad.sum(dim=1, keepdim=True), alpha=rate)
            else:
                weight_velocity, bias_velocity = velocities[number]
                weight.sub_(weight_velocity.baddbmm_(transposed, grad, beta=momentum), alpha=rate)
                bias.sub_(bias_velocity.mul_(momentum).add_(grad.sum(dim=1, keepdim=True)), alpha=rate)
            if input_grad is not None:
                grad = input_grad.mul_(hidden[number] > 0)


def _pairs(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))
