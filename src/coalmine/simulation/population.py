"""Populations: which client has which examples."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import whole_number
from coalmine.simulation.randomness import numpy_stream

Indices = npt.NDArray[np.int64]


class Population(Protocol):
    """Clients 0 to len − 1, each with a few examples of the task's training set."""

    def __len__(self) -> int: ...

    def examples(self, client: int) -> Indices:
        """Indices of this client's examples in the training set."""
        ...

    @property
    def most_examples(self) -> int:
        """The largest number of examples that any client has. It bounds a client's weight."""
        ...


@dataclass(frozen=True)
class Partition:
    """Each example belongs to one client: client c has order[starts[c]:starts[c + 1]]."""

    order: Indices
    starts: Indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    def examples(self, client: int) -> Indices:
        return self.order[self.starts[client] : self.starts[client + 1]]

    @property
    def most_examples(self) -> int:
        return int(np.diff(self.starts).max())


@dataclass(frozen=True)
class Consecutive:
    """Clients with consecutive examples: client c has starts[c] to starts[c + 1] − 1."""

    starts: Indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    def examples(self, client: int) -> Indices:
        return np.arange(self.starts[client], self.starts[client + 1])

    @property
    def most_examples(self) -> int:
        return int(np.diff(self.starts).max())


def partition_by_owner(owners: npt.ArrayLike) -> Partition:
    """The partition in which example i belongs to owners[i]; owners are numbered in the order of their ids."""
    _, owner_numbers, counts = np.unique(np.asarray(owners), return_inverse=True, return_counts=True)
    order = np.argsort(owner_numbers, kind="stable").astype(np.int64)
    return Partition(order, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def random_partition(examples: int, clients: int, *, seed: int) -> Partition:
    """Assign every example to a random client; clients have examples / clients on average.

    With at least four examples per client, shares vary between about half and one and a half of the average, since real
    clients differ too. With fewer, shares are as equal as possible.
    """
    clients = whole_number("clients", clients, minimum=1)
    if clients > examples:
        raise ValueError(
            f"{examples} examples are too few for {clients} clients; use virtual clients, which share examples"
        )
    rng = numpy_stream(seed, "partition")
    starts = np.linspace(0, examples, clients + 1)
    if examples >= 4 * clients:
        starts[1:-1] += rng.uniform(-0.25, 0.25, clients - 1) * examples / clients
    return Partition(rng.permutation(examples).astype(np.int64), np.round(starts).astype(np.int64))


@dataclass(frozen=True)
class VirtualClients:
    """Any number of clients. A client's index determines the `per_client` examples it samples from the pool."""

    count: int
    pool: int
    per_client: int
    seed: int

    def __post_init__(self) -> None:
        whole_number("clients", self.count, minimum=1)
        if not 1 <= self.per_client <= self.pool:
            raise ValueError(f"a virtual client must have between 1 and {self.pool} examples, got {self.per_client}")

    def __len__(self) -> int:
        return self.count

    def examples(self, client: int) -> Indices:
        chosen = numpy_stream(self.seed, "virtual client", client).choice(self.pool, self.per_client, replace=False)
        return chosen.astype(np.int64)

    @property
    def most_examples(self) -> int:
        return self.per_client


def single_examples(count: int) -> Partition:
    """The population of DP-SGD, in which every example is its own client."""
    return Partition(np.arange(count), np.arange(count + 1))
