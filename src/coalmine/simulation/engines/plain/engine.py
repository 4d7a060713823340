"""The interface of an engine, which computes the clients' updates from a model and their batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from coalmine.argument_checks import one_number, whole_number
from coalmine.simulation.batches import Batches
from coalmine.simulation.population import Indices


@dataclass(frozen=True)
class Examples:
    """The training or the test set, on the device used for training."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: str) -> "Examples":
        return Examples(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """How a client trains: the τ of Algorithm 2."""

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 0.1
    momentum: float = 0.0

    def __post_init__(self) -> None:
        whole_number("client.epochs", self.epochs, minimum=1)
        whole_number("client.batch_size", self.batch_size, minimum=1)
        if not one_number("client.learning_rate", self.learning_rate) > 0:
            raise ValueError(f"client.learning_rate must be above 0, got {self.learning_rate}")
        if not 0 <= one_number("client.momentum", self.momentum) < 1:
            raise ValueError(f"client.momentum must lie in [0, 1), got {self.momentum}")


class Engine(Protocol):
    """Trains the clients of a round. All engines give the same updates, up to rounding."""

    @property
    def description(self) -> str:
        """How the clients are trained, in a few words."""
        ...

    def updates(self, model_vector: Tensor, batches: Batches) -> Iterator[Tensor]:
        """The clients' unclipped updates, in the order of the batches, in chunks of rows that fit in memory.

        A chunk is only valid until the next one is requested.
        """
        ...

    def close(self) -> None:
        """Release processes and memory."""
        ...


def chunks(count: int, size: int) -> Iterator[Indices]:
    """The numbers 0 to count − 1 in chunks of at most `size`, as equal as possible."""
    yield from np.array_split(np.arange(count), -(-count // max(size, 1))) if count else ()


def clients_that_fit(bytes_each: int, memory_limit: float) -> int:
    """The number of clients of `bytes_each` bytes that fit into `memory_limit` GiB; at least one."""
    return max(1, int(memory_limit * 2**30 / bytes_each))
