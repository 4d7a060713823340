"""A step of SGD without autograd, which applies each gradient as soon as it is known."""

from collections.abc import Mapping

import torch
from torch import Tensor

from coalmine.simulation.engines.plain.engine import ClientSettings


class Descent:
    """One step for clients whose models are rows: w ← w − η v, with v ← μ v + gradient.

    On the `first` step of updates that start from zero, the old content of the tensors is not read. A caller that needs a
    layer's weights for the gradients of earlier layers must use them before the step.
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

    def apply_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Apply leftᵀ @ right, the gradient of a matrix, for each client; columns beyond the matrix are ignored."""
        weight, rate = self.weights[name], self.client.learning_rate
        weight = weight.flatten(start_dim=2)
        if right.shape[2] > weight.shape[2]:
            self.apply_gradient(name, torch.bmm(left.transpose(1, 2), right)[:, :, : weight.shape[2]])
            return
        if self.velocities is None:
            weight.baddbmm_(left.transpose(1, 2), right, beta=self.keep, alpha=-rate)
            return
        velocity = self.velocities[name].flatten(start_dim=2)
        velocity.baddbmm_(left.transpose(1, 2), right, beta=self.keep * self.client.momentum)
        self._move(weight, velocity)

    def apply_gradient(self, name: str, gradient: Tensor) -> None:
        """Apply a gradient."""
        weight = self.weights[name]
        if self.velocities is not None:
            velocity = self.velocities[name]
            gradient = velocity.mul_(self.client.momentum).add_(gradient) if self.keep else velocity.copy_(gradient)
        self._move(weight, gradient)

    def apply_rows(self, name: str, clients: Tensor, index: Tensor, gradients: Tensor) -> None:
        """Apply the gradient of an embedding: `gradients` at rows `index` of `clients`; rows may repeat."""
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
