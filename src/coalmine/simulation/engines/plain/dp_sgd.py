"""DP-SGD: every example is a client that takes one step with learning rate 1, so its update is minus its gradient."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import grad, vmap

from coalmine.simulation.batches import Batches
from coalmine.simulation.engines.plain.engine import Examples, chunks, clients_that_fit
from coalmine.simulation.models import Masks, Model


class PerExample:
    """Computes the gradients of a batch with torch.func, one row for each example."""

    def __init__(self, model: Model, examples: Examples, *, memory_limit: float) -> None:
        self.model, self.examples = model, examples
        self.chunk = clients_that_fit(4 * (3 * model.dim + model.activations), memory_limit)
        self._gradients = vmap(grad(self._loss), in_dims=(None, 0, 0, 0))

    @property
    def description(self) -> str:
        return "per-example gradients, by torch.func"

    def updates(self, model_vector: Tensor, batches: Batches) -> Iterator[Tensor]:
        device = model_vector.device
        for clients in chunks(len(batches), self.chunk):
            index = torch.from_numpy(batches.examples[clients, 0, 0]).to(device)
            seeds = torch.from_numpy(batches.dropout_seeds[clients]).to(device)
            masks = [mask[:, 0] for mask in self.model.masks(seeds, 0, 1)]
            gradients: Tensor = self._gradients(
                model_vector, self.examples.inputs[index], self.examples.labels[index], masks
            )
            yield gradients.neg_()

    def close(self) -> None:
        pass

    def _loss(self, vector: Tensor, example: Tensor, label: Tensor, masks: Masks) -> Tensor:
        masks = [mask.unsqueeze(0) for mask in masks]
        logits = self.model.logits(self.model.split(vector), example.unsqueeze(0), masks)
        return self.model.loss(logits, label.unsqueeze(0))
