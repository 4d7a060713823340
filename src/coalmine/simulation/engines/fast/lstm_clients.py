"""Text models for all clients together, without autograd and without costly padding.

In the first step all clients have the same model, so their sentences are one batch. They are sorted by length, so that none
is computed beyond its end; only the gradients are computed per client. From the second step on, each client has its own
model, and a step is one batched product per layer and position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coalmine.simulation.batches import Batches
from coalmine.simulation.engines.fast import lstm_cell
from coalmine.simulation.engines.fast.cuda import train_in_chunks
from coalmine.simulation.engines.fast.descent import Descent
from coalmine.simulation.engines.fast.packing import Padded, buckets, halves, pack, pad, to_device
from coalmine.simulation.engines.plain.engine import ClientSettings, Examples, clients_that_fit
from coalmine.simulation.models import Model, Recurrent
from coalmine.simulation.population import Indices


class LstmTogether:
    """Trains all clients of a chunk at once, for models with a `Recurrent` structure."""

    def __init__(
        self, model: Model, examples: Examples, client: ClientSettings, *, memory_limit: float, precision: str = "fp32"
    ) -> None:
        assert isinstance(model.structure, Recurrent)
        assert model.ignored_label is not None
        self.model, self.structure, self.ignored = model, model.structure, model.ignored_label
        self.examples, self.client, self.precision = examples, client, precision
        self.lengths = _lengths(examples.labels, self.ignored)
        # Tensor cores need rows that begin at multiples of 32 bytes, so hidden states are padded to that on a GPU.
        self.align = 8 if examples.inputs.device.type == "cuda" else 1
        copies = 3 if client.momentum else 2
        bytes_each = 4 * (copies * model.dim + client.batch_size * model.activations)
        self.chunk = clients_that_fit(bytes_each, memory_limit)

    @property
    def description(self) -> str:
        return f"together, written out for LSTMs, {self.precision}"

    def updates(self, model_vector: Tensor, batches: Batches) -> Iterator[Tensor]:
        return train_in_chunks(self._train, model_vector, batches, size=self.chunk, precision=self.precision)

    def close(self) -> None:
        pass

    def _train(self, model_vector: Tensor, batches: Batches, clients: Indices) -> Tensor:
        chunk, order = self._longest_first(batches, clients)
        if not chunk.counts.size or not _batch_symbols(self.lengths, chunk.examples[:, 0], chunk.counts[:, 0]).any():
            return self._train_from_zero(model_vector, chunk, order)
        rows = model_vector.new_empty(len(chunk), len(model_vector))
        velocity = torch.empty_like(rows) if self.client.momentum else None
        self._first_step(model_vector, rows, velocity, chunk)
        return self._later_steps(model_vector, rows, velocity, chunk, order)

    def _train_from_zero(self, model_vector: Tensor, chunk: Batches, order: Indices) -> Tensor:
        """Train clients whose first batch has only ignored labels: their first update is zero."""
        rows = model_vector.new_zeros(len(chunk), len(model_vector))
        return self._later_steps(
            model_vector, rows, torch.zeros_like(rows) if self.client.momentum else None, chunk, order
        )

    def _later_steps(
        self, model_vector: Tensor, rows: Tensor, velocity: Tensor | None, chunk: Batches, order: Indices
    ) -> Tensor:
        """Run the steps from the second on; `rows` are the clients' updates."""
        active = (chunk.counts > 0).sum(axis=0)
        if len(active) > 1:
            rows[: active[1]] += model_vector
        for step in range(1, len(active)):
            for group in halves(chunk.counts[: active[step], step]):
                group_velocity = None if velocity is None else velocity[group]
                self._own_step(rows[group], group_velocity, chunk.examples[group, step], chunk.counts[group, step])
        if len(active) > 1:
            rows[: active[1]] -= model_vector
        return rows if (np.diff(order) == 1).all() else rows[to_device([order], rows.device)[0]]

    def _longest_first(self, batches: Batches, clients: Indices) -> tuple[Batches, Indices]:
        """Sort clients by their number of steps, then by the size of the last step, to reduce padding."""
        if not batches.counts.shape[1]:
            return batches.take(clients), np.arange(len(clients))
        last = np.maximum(batches.steps[clients] - 1, 0)
        sentences = batches.counts[clients, last]
        symbols = _batch_symbols(self.lengths, batches.examples[clients, last], sentences)
        order = np.lexsort((-symbols, -sentences, -batches.steps[clients]))
        return batches.take(clients[order]), np.argsort(order)

    def work(self, batches: Batches) -> tuple[int, int]:
        """The symbols of a round, and those computed with padding, in forward pass, backward pass and gradients."""
        chunk, _ = self._longest_first(batches, np.arange(len(batches)))
        symbols = [
            _batch_symbols(self.lengths, chunk.examples[:, step], chunk.counts[:, step])
            for step in range(chunk.counts.shape[1])
        ]
        padded = sum((group.stop - group.start) * int(symbols[0][group].max()) for group in buckets(symbols[0]))
        computed = 2 * int(symbols[0].sum()) + padded
        for step in range(1, len(symbols)):
            for group in halves(chunk.counts[: (chunk.counts[:, step] > 0).sum(), step]):
                slots, positions = _slots_and_positions(
                    self.lengths, chunk.examples[group, step], chunk.counts[group, step]
                )
                computed += 3 * (group.stop - group.start) * slots * positions
        return 3 * int(sum(own.sum() for own in symbols)), computed

    def _first_step(self, model_vector: Tensor, rows: Tensor, velocity: Tensor | None, chunk: Batches) -> None:
        """Run the first step, from the same model for all clients, and write their updates to `rows`."""
        packed = pack(self.lengths, chunk.examples[:, 0], chunk.counts[:, 0], rows.device)
        parts = list(buckets(packed.symbols))
        padding = pad(packed, parts)
        parameters = self.model.split(model_vector)
        symbols = self.examples.inputs[packed.example, packed.position].long()
        labels = self.examples.labels[packed.example, packed.position].long()[packed.by_client]
        layers, hidden = self._forward_shared(parameters, symbols, packed.sizes)
        shares = packed.shares.unsqueeze(1).to(model_vector.dtype)
        dense = self._dense_shared(parameters, hidden[:-1][packed.by_client], labels)
        grad = (dense.input_grad * shares)[packed.by_position]
        # For each LSTM layer: its inputs, its previous states, and the gradients of its gates.
        padded_layers: list[tuple[Padded, Padded, Padded]] = []
        for number in range(len(layers), 0, -1):
            layer = layers[number - 1]
            lstm_cell.backward(
                list(torch.split(layer.gates, packed.sizes)),
                _pad_columns(parameters[f"lstm{number}.recurrent"], layer.hidden.shape[1]),
                list(torch.split(grad, packed.sizes)),
                list(torch.split(layer.cells, packed.sizes)),
            )
            grad = layer.gates @ _pad_columns(parameters[f"lstm{number}.kernel"], layer.inputs.shape[1])
            by_client, before = padding.index_for(packed.by_client), padding.index_for(packed.before)
            padded_layers.append(
                (
                    padding.pad_rows(layer.inputs, by_client),
                    padding.pad_rows(layer.hidden, before),
                    padding.pad_rows(layer.gates, by_client, zero=True),
                )
            )
        padded_layers.reverse()
        velocities = None if velocity is None else self.model.split(velocity)
        all_clients = Descent(self.model.split(rows), velocities, self.client, first=True)
        all_clients.apply_rows("embedding", packed.owner, symbols, grad)
        dense_inputs = [padding.pad_rows(activation * shares, zero=True) for activation in dense.inputs]
        dense_grads = [padding.pad_rows(part) for part in dense.grads]
        padded_shares = padding.pad_rows(shares, zero=True)
        for number, group in enumerate(parts):
            views = self.model.split(rows[group])
            velocities = None if velocity is None else self.model.split(velocity[group])
            descent = Descent(views, velocities, self.client, first=True)
            for layer_number, (inputs, previous, grads) in enumerate(padded_layers, start=1):
                descent.apply_product(f"lstm{layer_number}.kernel", grads[number], inputs[number])
                descent.apply_product(f"lstm{layer_number}.recurrent", grads[number], previous[number])
                descent.apply_gradient(f"lstm{layer_number}.bias", grads[number].sum(dim=1))
            for layer_number, (activation, grads) in enumerate(zip(dense_inputs, dense_grads, strict=True), start=1):
                descent.apply_product(f"dense{layer_number}.weight", grads[number], activation[number])
                bias = torch.bmm(grads[number].transpose(1, 2), padded_shares[number]).squeeze(2)
                descent.apply_gradient(f"dense{layer_number}.bias", bias)

    def _forward_shared(
        self, parameters: dict[str, Tensor], symbols: Tensor, sizes: list[int]
    ) -> tuple[list["Layer"], Tensor]:
        inputs, layers = parameters["embedding"][symbols], []
        hidden = inputs
        for number, width in enumerate(self.structure.lstms, start=1):
            kernel, bias = parameters[f"lstm{number}.kernel"], parameters[f"lstm{number}.bias"]
            gates = torch.addmm(bias, inputs, _pad_columns(kernel, inputs.shape[1]).T)
            wide = -(-width // self.align) * self.align
            hidden = inputs.new_empty(len(inputs) + 1, wide)  # the last row is the initial state
            hidden[-1] = 0
            hidden[:, width:] = 0
            cells = inputs.new_empty(len(inputs), width)
            lstm_cell.forward(
                list(torch.split(gates, sizes)),
                _pad_columns(parameters[f"lstm{number}.recurrent"], wide),
                list(torch.split(hidden[:-1], sizes)),
                list(torch.split(cells, sizes)),
            )
            layers.append(Layer(inputs, gates, hidden, cells))
            inputs = hidden[:-1]
        return layers, hidden

    def _dense_shared(self, parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> "DenseGradients":
        """The dense layers' inputs, and the gradients of the unweighted losses."""
        weights = [parameters[f"dense{number}.weight"] for number in range(1, len(self.structure.dense) + 1)]
        weights[0] = _pad_columns(weights[0], inputs.shape[1])
        activations = [inputs]
        for number, weight in enumerate(weights, start=1):
            activations.append(torch.addmm(parameters[f"dense{number}.bias"], activations[-1], weight.T))
        grad = activations.pop().softmax(dim=1)
        grad.scatter_add_(1, labels.unsqueeze(1), grad.new_full((1, 1), -1.0).expand(len(labels), 1))
        grads = [grad]
        for weight in reversed(weights):
            grads.append(grads[-1] @ weight)
        input_grad = grads.pop()
        return DenseGradients(activations, grads[::-1], input_grad)

    def _own_step(self, rows: Tensor, velocity: Tensor | None, examples: Indices, counts: Indices) -> None:
        """Run a step in which every client has its own model, in place."""
        parameters = self.model.split(rows)
        device, count = rows.device, len(rows)
        lengths = np.where(np.arange(examples.shape[1]) < counts[:, None], self.lengths[examples], 0)
        slots, positions = _slots_and_positions(self.lengths, examples, counts)
        transferred = to_device([examples[:, :slots].ravel(), lengths[:, :slots].ravel()], device)
        index, present = transferred[0].view(count, slots), transferred[1].view(count, slots) > 0
        # positions come before slots, so that one position of all slots is contiguous
        symbols = self.examples.inputs[index, :positions].long().transpose(1, 2)
        labels = self.examples.labels[index, :positions].long().transpose(1, 2)
        counted = ((labels != self.ignored) & present.unsqueeze(1)).to(rows.dtype).flatten(1)
        shares = (counted / counted.sum(dim=1, keepdim=True).clamp(min=1)).unsqueeze(2)
        words = symbols.flatten(1)
        clients = torch.arange(count, device=device).unsqueeze(1)
        inputs = parameters["embedding"][clients, words]
        layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for number, width in enumerate(self.structure.lstms, start=1):
            bias = parameters[f"lstm{number}.bias"].unsqueeze(1)
            gates = torch.baddbmm(bias, inputs, parameters[f"lstm{number}.kernel"].transpose(1, 2))
            hidden = rows.new_zeros(count, positions + 1, slots, width)
            cells = rows.new_empty(count, positions, slots, width)
            by_position = gates.view(count, positions, slots, -1)
            lstm_cell.forward(
                list(by_position.unbind(1)),
                parameters[f"lstm{number}.recurrent"],
                list(hidden[:, 1:].unbind(1)),
                list(cells.unbind(1)),
            )
            layers.append((inputs, by_position, hidden, cells))
            inputs = hidden[:, 1:].reshape(count, positions * slots, width)
        weights = [parameters[f"dense{number}.weight"] for number in range(1, len(self.structure.dense) + 1)]
        activations = [inputs]
        for number, weight in enumerate(weights, start=1):
            bias = parameters[f"dense{number}.bias"].unsqueeze(1)
            activations.append(torch.baddbmm(bias, activations[-1], weight.transpose(1, 2)))
        grad = activations.pop().softmax(dim=2)
        grad.scatter_add_(2, labels.flatten(1).unsqueeze(2), grad.new_full((1, 1, 1), -1.0).expand(*words.shape, 1))
        grad.mul_(shares)
        descent = Descent(parameters, None if velocity is None else self.model.split(velocity), self.client)
        for number in range(len(weights), 0, -1):
            input_grad = torch.bmm(grad, weights[number - 1])
            descent.apply_product(f"dense{number}.weight", grad, activations[number - 1])
            descent.apply_gradient(f"dense{number}.bias", grad.sum(dim=1))
            grad = input_grad
        for number in range(len(layers), 0, -1):
            inputs, by_position, hidden, cells = layers[number - 1]
            recurrent = parameters[f"lstm{number}.recurrent"]
            grad_by_position = grad.view(count, positions, slots, -1)
            lstm_cell.backward(
                list(by_position.unbind(1)), recurrent, list(grad_by_position.unbind(1)), list(cells.unbind(1))
            )
            flat = by_position.flatten(1, 2)
            grad = torch.bmm(flat, parameters[f"lstm{number}.kernel"])
            descent.apply_product(f"lstm{number}.kernel", flat, inputs)
            descent.apply_product(f"lstm{number}.recurrent", flat, hidden[:, :-1].flatten(1, 2))
            descent.apply_gradient(f"lstm{number}.bias", flat.sum(dim=1))
        descent.apply_rows("embedding", clients, words, grad)


@dataclass(frozen=True)
class Layer:
    """The values that an LSTM layer keeps from the forward pass."""

    inputs: Tensor
    gates: Tensor
    hidden: Tensor
    cells: Tensor


@dataclass(frozen=True)
class DenseGradients:
    """The inputs and output gradients of each dense layer, and the gradient of the first layer's inputs."""

    inputs: Sequence[Tensor]
    grads: Sequence[Tensor]
    input_grad: Tensor


def _pad_columns(weight: Tensor, width: int) -> Tensor:
    """The matrix, padded with zero columns to `width`."""
    return weight if weight.shape[1] == width else torch.nn.functional.pad(weight, (0, width - weight.shape[1]))


def _lengths(labels: Tensor, ignored: int) -> Indices:
    """The length of each row of labels, up to the last one that is not ignored."""
    counts = labels != ignored
    positions = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    lengths: Indices = (counts * positions).amax(dim=1).cpu().numpy().astype(np.int64)
    return lengths


def _slots_and_positions(lengths: Indices, examples: Indices, counts: Indices) -> tuple[int, int]:
    """The largest number of sentences of a client, and of symbols of a sentence, in one step."""
    present = np.arange(examples.shape[1]) < counts[:, None]
    return int(counts.max()), max(int((lengths[examples] * present).max()), 1)


def _batch_symbols(lengths: Indices, examples: Indices, counts: Indices) -> Indices:
    present = np.arange(examples.shape[1]) < counts[:, None]
    total: Indices = (lengths[examples] * present).sum(axis=1)
    return total
