"""The step of SGD as an engine without autograd takes it: each gradient goes into the weights as soon as it is known."""

from collections.abc import Mapping

import torch
from torch import Tensor

from coalmine.simulation.engines.plain.engine import ClientSettings


class Descent:
    """One step of the clients whose models are rows: w ← w − η v, with v ← μ v + gradient.

    On the `first` step of updates that start from zero, what was in the tensors does not matter, which saves reading it.
    Whoever needs the weights of a tensor for the gradients below it must use them before.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        velocities: Mapping[str, Tensor] | None,
        client: ClientSettings,
        *,
        first: bool = False,
    ) -> None:
        self.weights, self.velocities, self.client = weights, velocities, client
        self.keep = 0.0 if first else 1.0

    def product(self, name: str, left: Tensor, right: Tensor) -> None:
        """The gradient of a matrix, for each client leftᵀ @ right, of which columns beyond the matrix do not count."""
        weight, rate = self.weights[name], self.client.learning_rate
        weight = weight.flatten(start_dim=2)
        if right.shape[2] > weight.shape[2]:
            self.gradient(name, torch.bmm(left.transpose(1, 2), right)[:, :, : weight.shape[2]])
            return
        if self.velocities is None:
            weight.baddbmm_(left.transpose(1, 2), right, beta=self.keep, alpha=-rate)
            return
        velocity = self.velocities[name].flatten(start_dim=2)
        velocity.baddbmm_(left.transpose(1, 2), right, beta=self.keep * self.client.momentum)
        self._move(weight, velocity)

    def gradient(self, name: str, gradient: Tensor) -> None:
        """A gradient that is there already."""
        weight = self.weights[name]
        if self.velocities is not None:
            velocity = self.velocities[name]
            gradient = velocity.mul_(self.client.momentum).add_(gradient) if self.keep else velocity.copy_(gradient)
        self._move(weight, gradient)

    def rows(self, name: str, clients: Tensor, index: Tensor, gradients: Tensor) -> None:
        """The gradient of a table of rows: `gradients` at rows `index` of `clients`, the same row maybe several times."""
        table, rate = self.weights[name], self.client.learning_rate
        if self.velocities is None:
            if not self.keep:
                table.zero_()
            table.index_put_((clients, index), gradients * -rate, accumulate=True)
            return
        velocity = self.velocities[name]
        if self.keep:
            velocity.mul_(self.client.momentum)
        else:
            velocity.zero_()  # what memory held before may be anything, NaN too
        velocity.index_put_((clients, index), gradients, accumulate=True)
        self._move(table, velocity)

    def _move(self, weight: Tensor, direction: Tensor) -> None:
        if self.keep:
            weight.sub_(direction, alpha=self.client.learning_rate)
        else:
            torch.mul(direction, -self.client.learning_rate, out=weight)
