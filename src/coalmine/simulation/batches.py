"""The batches of one round as arrays: clients × steps × examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coalmine.simulation.population import Indices


@dataclass(frozen=True)
class Batches:
    """The examples of every step of every client.

    Step s of client c trains on examples[c, s, :counts[c, s]]; the rest of that row is padding. A count of 0 means that
    the client has taken its last step.
    """

    examples: Indices  # clients × steps × batch size
    counts: Indices  # clients × steps
    dropout_seeds: Indices  # one for each client

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def steps(self) -> Indices:
        """The number of steps that each client takes."""
        count: Indices = (self.counts > 0).sum(axis=1)
        return count

    @property
    def sizes(self) -> Indices:
        """The number of examples that each client trains on, summed over epochs."""
        total: Indices = self.counts.sum(axis=1)
        return total

    @property
    def shares(self) -> npt.NDArray[np.float32]:
        """The weight of each example in the mean over its batch: 1 / batch size, and 0 for padding."""
        present = np.arange(self.examples.shape[2]) < self.counts[:, :, None]
        return (present / np.maximum(self.counts, 1)[:, :, None]).astype(np.float32)

    def longest_first(self, clients: Indices) -> tuple["Batches", Indices]:
        """The batches of some clients, most steps first, and the permutation that restores the order.

        In this order the clients that still train at a step are always the first rows.
        """
        order = np.argsort(-self.steps[clients], kind="stable")
        return self.take(clients[order]), np.argsort(order)

    def take(self, clients: Indices) -> "Batches":
        """The batches of some clients, without the steps that none of them takes."""
        counts = self.counts[clients]
        steps = int((counts > 0).sum(axis=1).max(initial=0))
        return Batches(self.examples[clients, :steps], counts[:, :steps], self.dropout_seeds[clients])


def draw_batches(
    owned: Sequence[Indices], *, epochs: int, batch_size: int, rng: np.random.Generator, max_examples: int | None = None
) -> Batches:
    """Divide each client's examples into batches, reshuffled in each epoch; the last batch of an epoch may be smaller.

    A client stops after `max_examples` examples in all epochs together: examples are shuffled, then cut, then batched.
    """
    sizes = np.array([len(examples) for examples in owned], dtype=np.int64)
    if not len(sizes):
        return Batches(np.zeros((0, 0, batch_size), np.int64), np.zeros((0, 0), np.int64), np.zeros(0, np.int64))
    flat, owner = np.concatenate(owned), np.repeat(np.arange(len(sizes)), sizes)
    position = np.arange(len(flat)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    per_epoch = -(-sizes // batch_size)
    used = np.arange(epochs)[:, None] * sizes  # examples used before an epoch
    shares = np.tile(sizes, (epochs, 1)) if max_examples is None else (max_examples - used).clip(0, sizes)
    steps = int((-(-shares // batch_size)).sum(axis=0).max())
    examples = np.zeros((len(sizes), steps, batch_size), dtype=np.int64)
    counts = np.zeros((len(sizes), steps), dtype=np.int64)
    for epoch, share in enumerate(shares):
        order = np.lexsort((rng.random(len(flat)), owner))
        kept = position < share[owner]
        client, index, example = owner[kept], position[kept], flat[order][kept]
        step = epoch * per_epoch[client] + index // batch_size
        examples[client, step, index % batch_size] = example
        np.add.at(counts, (client, step), 1)
    return Batches(examples, counts, rng.integers(2**62, size=len(sizes), dtype=np.int64))
