"""A step of SGD without autograd: each gradient is applied as soon as it is known."""

from collections.abc import Mapping

import torch
from torch import Tensor

from coalmine.simulation.engines.plain.engine import ClientSettings


class Descent:
    """One step of clients whose models are rows: w ← w − η v, with v ← μ v + gradient.

    On the `first` step of updates that start from zero, the previous content of the tensors is not read. A caller that
    needs a tensor's weights for the gradients below it must use them first.
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
        """Apply the gradient of a matrix, for each client leftᵀ @ right; columns beyond the matrix are ignored."""
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
        """Apply a gradient."""
        weight = self.weights[name]
        if self.velocities is not None:
            velocity = self.velocities[name]
            gradient = velocity.mul_(self.client.momentum).add_(gradient) if self.keep else velocity.copy_(gradient)
        self._move(weight, gradient)

    def rows(self, name: str, clients: Tensor, index: Tensor, gradients: Tensor) -> None:
        """Apply the gradient of a table: `gradients` at rows `index` of `clients`; rows may repeat."""
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
            velocity.zero_()  # uninitialised memory may hold NaN
        velocity.index_put_((clients, index), gradients, accumulate=True)
        self._move(table, velocity)

    def _move(self, weight: Tensor, direction: Tensor) -> None:
        if self.keep:
            weight.sub_(direction, alpha=self.client.learning_rate)
        else:
            torch.mul(direction, -self.client.learning_rate, out=weight)
