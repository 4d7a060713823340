"""The paper's CNN for all clients together, without autograd: convolutions are batched products of patches.

Every client has its own kernels. A library would use a grouped convolution, which is slow. Channels are last, so that a row
of a patch is contiguous in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coalmine.simulation.batches import Batches
from coalmine.simulation.engines.fast import cnn_ops
from coalmine.simulation.engines.fast.cnn_ops import KERNEL
from coalmine.simulation.engines.fast.cuda import Graphs, train_in_chunks
from coalmine.simulation.engines.fast.descent import Descent
from coalmine.simulation.engines.plain.engine import ClientSettings, Examples, clients_that_fit
from coalmine.simulation.models import Convolutional, Model
from coalmine.simulation.population import Indices


class CnnTogether:
    """Trains all clients of a chunk at once, for models with a `Convolutional` structure."""

    def __init__(
        self, model: Model, examples: Examples, client: ClientSettings, *, memory_limit: float, precision: str = "fp32"
    ) -> None:
        assert isinstance(model.structure, Convolutional)
        self.model, self.structure = model, model.structure
        self.examples, self.client, self.precision = examples, client, precision
        copies = 3 if client.momentum else 2
        patches = 2 * KERNEL**2 * self.structure.channels[0] * (self.structure.side - 4) ** 2
        bytes_each = 4 * (copies * model.dim + client.batch_size * (model.activations + patches))
        self.chunk = clients_that_fit(bytes_each, memory_limit)
        self._graphs = Graphs()
        self._ops = _ops(examples.inputs.device, precision)

    @property
    def description(self) -> str:
        return f"together, written out for the CNN, {self.precision}"

    def updates(self, model_vector: Tensor, batches: Batches) -> Iterator[Tensor]:
        return train_in_chunks(self._train, model_vector, batches, size=self.chunk, precision=self.precision)

    def close(self) -> None:
        self._graphs.clear()

    def _train(self, model_vector: Tensor, batches: Batches, clients: Indices) -> Tensor:
        chunk, order = batches.longest_first(clients)
        device, count, size = model_vector.device, len(chunk), chunk.examples.shape[2]
        examples, shares = torch.from_numpy(chunk.examples).to(device), torch.from_numpy(chunk.shares).to(device)
        seeds = torch.from_numpy(chunk.dropout_seeds).to(device)
        buffers = self._graphs.tensors(
            {
                "rows": ((count, self.model.dim), model_vector.dtype),
                "index": ((count, size), examples.dtype),
                "shares": ((count, size), shares.dtype),
                "seeds": ((count,), seeds.dtype),
                "step": ((1,), torch.int64),
            }
            | ({"velocity": ((count, self.model.dim), model_vector.dtype)} if self.client.momentum else {}),
            device,
        )
        buffers["rows"].copy_(model_vector.expand(count, -1))
        buffers["seeds"].copy_(seeds)
        buffers["step"].zero_()
        if self.client.momentum:
            buffers["velocity"].zero_()
        for step, active in enumerate((chunk.counts > 0).sum(axis=0)):
            remaining = int(active)
            buffers["index"][:remaining].copy_(examples[:remaining, step])
            buffers["shares"][:remaining].copy_(shares[:remaining, step])
            self._graphs.run(remaining, self._step_of(buffers, remaining))
            buffers["step"].add_(1)
        rows = buffers["rows"] - model_vector
        return rows if (np.diff(order) == 1).all() else rows[torch.from_numpy(order).to(device)]

    def _step_of(self, buffers: Mapping[str, Tensor], remaining: int) -> Callable[[], None]:
        def step() -> None:
            views = self.model.split(buffers["rows"][:remaining])
            velocities = self.model.split(buffers["velocity"][:remaining]) if self.client.momentum else None
            index = buffers["index"][:remaining]
            inputs, labels = self.examples.inputs[index], self.examples.labels[index]
            descent = Descent(views, velocities, self.client)
            self._step(
                views,
                descent,
                inputs,
                labels,
                buffers["shares"][:remaining],
                buffers["seeds"][:remaining],
                buffers["step"],
            )

        return step

    def _step(
        self,
        weights: Mapping[str, Tensor],
        descent: Descent,
        inputs: Tensor,
        labels: Tensor,
        shares: Tensor,
        seeds: Tensor,
        step: Tensor,
    ) -> None:
        """One step of SGD in place, on the mean cross entropy of each client's batch."""
        clients, size = labels.shape
        ops, side, (narrow, wide) = self._ops, self.structure.side, self.structure.channels
        first, second = self.model.dropouts
        columns = cnn_ops.patches(inputs.view(clients * size, side, side, 1)).view(clients, -1, KERNEL**2)
        maps = torch.baddbmm(
            _bias(weights, "conv1"), columns, weights["conv1.weight"].flatten(2).transpose(1, 2)
        ).relu_()
        maps = maps.view(clients * size, side - 2, side - 2, narrow)
        kernel = weights["conv2.weight"].permute(0, 1, 3, 4, 2).reshape(clients, wide, KERNEL**2 * narrow)
        conv2 = ops.convolve(maps, kernel, weights["conv2.bias"])
        flat, argmax = ops.pool(conv2, first, seeds, step)  # channels first, as in the model's dense layer
        hidden = torch.baddbmm(_bias(weights, "dense1"), flat, weights["dense1.weight"].transpose(1, 2)).relu_()
        mask = ops.dense_mask(second, seeds, step, size, 1)
        hidden_mask = (hidden > 0) * mask
        hidden = hidden * mask
        grad = torch.baddbmm(_bias(weights, "dense2"), hidden, weights["dense2.weight"].transpose(1, 2)).softmax(dim=2)
        grad.scatter_add_(2, labels.unsqueeze(2), grad.new_full((1, 1, 1), -1.0).expand(clients, size, 1))
        grad.mul_(shares.unsqueeze(2))

        input_grad = torch.bmm(grad, weights["dense2.weight"]).mul_(hidden_mask)
        _apply_layer(descent, "dense2", grad, hidden)
        grad = torch.bmm(input_grad, weights["dense1.weight"])
        _apply_layer(descent, "dense1", input_grad, flat)
        conv2_grad = ops.unpool(grad, flat, argmax, first.rate, wide)
        input_grad = ops.input_gradient(conv2_grad, kernel, maps)
        kernel_grad = ops.kernel_gradient(maps, conv2_grad, clients).view(clients, wide, KERNEL, KERNEL, narrow)
        descent.apply_gradient("conv2.weight", kernel_grad.permute(0, 1, 4, 2, 3))
        descent.apply_gradient("conv2.bias", conv2_grad.view(clients, -1, wide).sum(dim=1))
        _apply_layer(descent, "conv1", input_grad.view(clients, -1, narrow), columns)


def _bias(weights: Mapping[str, Tensor], layer: str) -> Tensor:
    return weights[f"{layer}.bias"].unsqueeze(1)


def _apply_layer(descent: Descent, name: str, grad: Tensor, inputs: Tensor) -> None:
    descent.apply_product(f"{name}.weight", grad, inputs)
    descent.apply_gradient(f"{name}.bias", grad.sum(dim=1))


def _ops(device: torch.device, precision: str) -> Any:
    """Triton kernels on a GPU with tf32 if Triton is installed, else plain torch."""
    if device.type == "cuda" and precision == "tf32":
        try:
            from coalmine.simulation.engines.fast import cnn_kernels
        except ImportError:  # no Triton on this platform
            return cnn_ops
        return cnn_kernels
    return cnn_ops
