"""Text models, all clients together, without autograd and without costly padding.

In the first step all clients have the same model, so their sentences are one batch: sorted by length, none is computed
beyond its end, and only the gradients are computed per client. From the second step on each client has its own model, and a
step is one batched product per layer and position.
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
    """All clients of a chunk at once, for models with a `Recurrent` structure."""

    def __init__(
        self, model: Model, examples: Examples, client: ClientSettings, *, memory_limit: float, precision: str = "fp32"
    ) -> None:
        assert isinstance(model.structure, Recurrent)
        assert model.ignored_label is not None
        self.model, self.structure, self.ignored = model, model.structure, model.ignored_label
        self.examples, self.client, self.precision = examples, client, precision
        self.lengths = _lengths(examples.labels, self.ignored)
        # Tensor cores need rows that begin at multiples of 32 bytes: hidden states are widened to that on a GPU.
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
        """Train clients whose first batch has no label that counts: they start from a zero update."""
        rows = model_vector.new_zeros(len(chunk), len(model_vector))
        return self._later_steps(
            model_vector, rows, torch.zeros_like(rows) if self.client.momentum else None, chunk, order
        )

    def _later_steps(
        self, model_vector: Tensor, rows: Tensor, velocity: Tensor | None, chunk: Batches, order: Indices
    ) -> Tensor:
        """The steps from the second on; `rows` are the clients' updates."""
        active = (chunk.counts > 0).sum(axis=0)
        if len(active) > 1:
            rows[: active[1]] += model_vector
        for step in range(1, len(active)):
            for some in halves(chunk.counts[: active[step], step]):
                moving = None if velocity is None else velocity[some]
                self._own_step(rows[some], moving, chunk.examples[some, step], chunk.counts[some, step])
        if len(active) > 1:
            rows[: active[1]] -= model_vector
        return rows if (np.diff(order) == 1).all() else rows[to_device([order], rows.device)[0]]

    def _longest_first(self, batches: Batches, clients: Indices) -> tuple[Batches, Indices]:
        """Sort by number of steps, then by the size of the last one, so that adjacent clients need little padding."""
        if not batches.counts.shape[1]:
            return batches.take(clients), np.arange(len(clients))
        last = np.maximum(batches.steps[clients] - 1, 0)
        sentences = batches.counts[clients, last]
        symbols = _batch_symbols(self.lengths, batches.examples[clients, last], sentences)
        order = np.lexsort((-symbols, -sentences, -batches.steps[clients]))
        return batches.take(clients[order]), np.argsort(order)

    def work(self, batches: Batches) -> tuple[int, int]:
        """Symbols that a round needs, and those it computes including padding: forward, backward and gradients."""
        chunk, _ = self._longest_first(batches, np.arange(len(batches)))
        symbols = [
            _batch_symbols(self.lengths, chunk.examples[:, step], chunk.counts[:, step])
            for step in range(chunk.counts.shape[1])
        ]
        padded = sum((some.stop - some.start) * int(symbols[0][some].max()) for some in buckets(symbols[0]))
        computed = 2 * int(symbols[0].sum()) + padded
        for step in range(1, len(symbols)):
            for some in halves(chunk.counts[: (chunk.counts[:, step] > 0).sum(), step]):
                slots, places = _slots_and_places(self.lengths, chunk.examples[some, step], chunk.counts[some, step])
                computed += 3 * (some.stop - some.start) * slots * places
        return 3 * int(sum(own.sum() for own in symbols)), computed

    def _first_step(self, model_vector: Tensor, rows: Tensor, velocity: Tensor | None, chunk: Batches) -> None:
        """The first step, from the same model for all clients; writes their updates to `rows`."""
        packed = pack(self.lengths, chunk.examples[:, 0], chunk.counts[:, 0], rows.device)
        parts = list(buckets(packed.symbols))
        padded = pad(packed, parts)
        parameters = self.model.split(model_vector)
        symbols = self.examples.inputs[packed.example, packed.place].long()
        labels = self.examples.labels[packed.example, packed.place].long()[packed.by_client]
        layers, hidden = self._forward_shared(parameters, symbols, packed.sizes)
        shares = packed.shares.unsqueeze(1).to(model_vector.dtype)
        dense = self._dense_shared(parameters, hidden[:-1][packed.by_client], labels)
        slope = (dense.below * shares)[packed.by_place]
        gathered: list[tuple[Padded, Padded, Padded]] = []  # inputs, previous states and slopes of each LSTM layer
        for number in range(len(layers), 0, -1):
            layer = layers[number - 1]
            lstm_cell.backward(
                list(torch.split(layer.gates, packed.sizes)),
                _widened(parameters[f"lstm{number}.recurrent"], layer.hidden.shape[1]),
                list(torch.split(slope, packed.sizes)),
                list(torch.split(layer.cells, packed.sizes)),
            )
            slope = layer.gates @ _widened(parameters[f"lstm{number}.kernel"], layer.inputs.shape[1])
            places, before = padded.places(packed.by_client), padded.places(packed.before)
            gathered.append(
                (
                    padded.of(layer.inputs, places),
                    padded.of(layer.hidden, before),
                    padded.of(layer.gates, places, zero=True),
                )
            )
        gathered.reverse()
        moving = None if velocity is None else self.model.split(velocity)
        everybody = Descent(self.model.split(rows), moving, self.client, first=True)
        everybody.rows("embedding", packed.owner, symbols, slope)
        weighted = [padded.of(activation * shares, zero=True) for activation in dense.inputs]
        steep = [padded.of(part) for part in dense.slopes]
        share = padded.of(shares, zero=True)
        for number, some in enumerate(parts):
            views = self.model.split(rows[some])
            moving = None if velocity is None else self.model.split(velocity[some])
            descent = Descent(views, moving, self.client, first=True)
            for layer_number, (inputs, previous, slopes) in enumerate(gathered, start=1):
                descent.product(f"lstm{layer_number}.kernel", slopes[number], inputs[number])
                descent.product(f"lstm{layer_number}.recurrent", slopes[number], previous[number])
                descent.gradient(f"lstm{layer_number}.bias", slopes[number].sum(dim=1))
            for layer_number, (activation, slopes) in enumerate(zip(weighted, steep, strict=True), start=1):
                descent.product(f"dense{layer_number}.weight", slopes[number], activation[number])
                bias = torch.bmm(slopes[number].transpose(1, 2), share[number]).squeeze(2)
                descent.gradient(f"dense{layer_number}.bias", bias)

    def _forward_shared(
        self, parameters: dict[str, Tensor], symbols: Tensor, sizes: list[int]
    ) -> tuple[list["Layer"], Tensor]:
        inputs, layers = parameters["embedding"][symbols], []
        hidden = inputs
        for number, width in enumerate(self.structure.lstms, start=1):
            kernel, bias = parameters[f"lstm{number}.kernel"], parameters[f"lstm{number}.bias"]
            gates = torch.addmm(bias, inputs, _widened(kernel, inputs.shape[1]).T)
            wide = -(-width // self.align) * self.align
            hidden = inputs.new_empty(len(inputs) + 1, wide)  # the last row is the state before the first symbol
            hidden[-1] = 0
            hidden[:, width:] = 0
            cells = inputs.new_empty(len(inputs), width)
            lstm_cell.forward(
                list(torch.split(gates, sizes)),
                _widened(parameters[f"lstm{number}.recurrent"], wide),
                list(torch.split(hidden[:-1], sizes)),
                list(torch.split(cells, sizes)),
            )
            layers.append(Layer(inputs, gates, hidden, cells))
            inputs = hidden[:-1]
        return layers, hidden

    def _dense_shared(self, parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> "DenseSlopes":
        """The dense layers' inputs and the gradients of the unweighted losses."""
        weights = [parameters[f"dense{number}.weight"] for number in range(1, len(self.structure.dense) + 1)]
        weights[0] = _widened(weights[0], inputs.shape[1])
        activations = [inputs]
        for number, weight in enumerate(weights, start=1):
            activations.append(torch.addmm(parameters[f"dense{number}.bias"], activations[-1], weight.T))
        slope = activations.pop().softmax(dim=1)
        slope.scatter_add_(1, labels.unsqueeze(1), slope.new_full((1, 1), -1.0).expand(len(labels), 1))
        slopes = [slope]
        for weight in reversed(weights):
            slopes.append(slopes[-1] @ weight)
        below = slopes.pop()
        return DenseSlopes(activations, slopes[::-1], below)

    def _own_step(self, rows: Tensor, velocity: Tensor | None, examples: Indices, counts: Indices) -> None:
        """A step in which every client has its own model, in place."""
        parameters = self.model.split(rows)
        device, going = rows.device, len(rows)
        lengths = np.where(np.arange(examples.shape[1]) < counts[:, None], self.lengths[examples], 0)
        slots, places = _slots_and_places(self.lengths, examples, counts)
        chosen = to_device([examples[:, :slots].ravel(), lengths[:, :slots].ravel()], device)
        index, present = chosen[0].view(going, slots), chosen[1].view(going, slots) > 0
        # positions before slots, so that one position of all slots is contiguous
        symbols = self.examples.inputs[index, :places].long().transpose(1, 2)
        labels = self.examples.labels[index, :places].long().transpose(1, 2)
        counted = ((labels != self.ignored) & present.unsqueeze(1)).to(rows.dtype).flatten(1)
        shares = (counted / counted.sum(dim=1, keepdim=True).clamp(min=1)).unsqueeze(2)
        words = symbols.flatten(1)
        clients = torch.arange(going, device=device).unsqueeze(1)
        inputs = parameters["embedding"][clients, words]
        layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for number, width in enumerate(self.structure.lstms, start=1):
            bias = parameters[f"lstm{number}.bias"].unsqueeze(1)
            gates = torch.baddbmm(bias, inputs, parameters[f"lstm{number}.kernel"].transpose(1, 2))
            hidden = rows.new_zeros(going, places + 1, slots, width)
            cells = rows.new_empty(going, places, slots, width)
            by_place = gates.view(going, places, slots, -1)
            lstm_cell.forward(
                list(by_place.unbind(1)),
                parameters[f"lstm{number}.recurrent"],
                list(hidden[:, 1:].unbind(1)),
                list(cells.unbind(1)),
            )
            layers.append((inputs, by_place, hidden, cells))
            inputs = hidden[:, 1:].reshape(going, places * slots, width)
        weights = [parameters[f"dense{number}.weight"] for number in range(1, len(self.structure.dense) + 1)]
        activations = [inputs]
        for number, weight in enumerate(weights, start=1):
            bias = parameters[f"dense{number}.bias"].unsqueeze(1)
            activations.append(torch.baddbmm(bias, activations[-1], weight.transpose(1, 2)))
        slope = activations.pop().softmax(dim=2)
        slope.scatter_add_(2, labels.flatten(1).unsqueeze(2), slope.new_full((1, 1, 1), -1.0).expand(*words.shape, 1))
        slope.mul_(shares)
        descent = Descent(parameters, None if velocity is None else self.model.split(velocity), self.client)
        for number in range(len(weights), 0, -1):
            below = torch.bmm(slope, weights[number - 1])
            descent.product(f"dense{number}.weight", slope, activations[number - 1])
            descent.gradient(f"dense{number}.bias", slope.sum(dim=1))
            slope = below
        for number in range(len(layers), 0, -1):
            inputs, by_place, hidden, cells = layers[number - 1]
            recurrent = parameters[f"lstm{number}.recurrent"]
            sliding = slope.view(going, places, slots, -1)
            lstm_cell.backward(list(by_place.unbind(1)), recurrent, list(sliding.unbind(1)), list(cells.unbind(1)))
            flat = by_place.flatten(1, 2)
            slope = torch.bmm(flat, parameters[f"lstm{number}.kernel"])
            descent.product(f"lstm{number}.kernel", flat, inputs)
            descent.product(f"lstm{number}.recurrent", flat, hidden[:, :-1].flatten(1, 2))
            descent.gradient(f"lstm{number}.bias", flat.sum(dim=1))
        descent.rows("embedding", clients, words, slope)


@dataclass(frozen=True)
class Layer:
    """What an LSTM layer keeps from the forward pass."""

    inputs: Tensor
    gates: Tensor
    hidden: Tensor
    cells: Tensor


@dataclass(frozen=True)
class DenseSlopes:
    """For each dense layer its inputs and the gradient of its outputs, and the gradient below the first layer."""

    inputs: Sequence[Tensor]
    slopes: Sequence[Tensor]
    below: Tensor


def _widened(weight: Tensor, width: int) -> Tensor:
    """The matrix padded with zero columns to `width`."""
    return weight if weight.shape[1] == width else torch.nn.functional.pad(weight, (0, width - weight.shape[1]))


def _lengths(labels: Tensor, ignored: int) -> Indices:
    """The length of each row of labels, up to the last one that counts."""
    counts = labels != ignored
    places = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    lengths: Indices = (counts * places).amax(dim=1).cpu().numpy().astype(np.int64)
    return lengths


def _slots_and_places(lengths: Indices, examples: Indices, counts: Indices) -> tuple[int, int]:
    """The largest number of sentences, and of symbols in one, in a step of these clients."""
    present = np.arange(examples.shape[1]) < counts[:, None]
    return int(counts.max()), max(int((lengths[examples] * present).max()), 1)


def _batch_symbols(lengths: Indices, examples: Indices, counts: Indices) -> Indices:
    present = np.arange(examples.shape[1]) < counts[:, None]
    total: Indices = (lengths[examples] * present).sum(axis=1)
    return total
