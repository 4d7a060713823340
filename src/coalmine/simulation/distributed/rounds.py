"""A round of several ranks, from rank 0's side and from the others'."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from coalmine.simulation.client_sums import ClientSums
from coalmine.simulation.distributed.rank_group import RankGroup, Round
from coalmine.simulation.population import Indices


@dataclass(frozen=True)
class RankSums:
    """The clients' part of a round over all ranks of a group: what `ClientSums` computes in one process."""

    group: RankGroup
    sums: ClientSums

    def compute(self, model_vector: Tensor, clients: Indices, number: int, clip_norm: float) -> tuple[Tensor, Tensor]:
        """On rank 0: the sum of all clipped updates, and the norms before clipping."""
        planned = Round(number, clip_norm, clients)
        self.group.send_round(planned, model_vector)
        return self._share(planned, model_vector)

    def follow(self, model_vector: Tensor) -> None:
        """On the other ranks: train a share of every round, until rank 0 ends."""
        while (planned := self.group.receive_round(model_vector)) is not None:
            self._share(planned, model_vector)

    def _share(self, planned: Round, model_vector: Tensor) -> tuple[Tensor, Tensor]:
        def compute() -> tuple[Tensor, Tensor]:
            with one_thread() if self.group.size > 1 else nullcontext():
                return self.sums.compute(
                    model_vector,
                    planned.clients,
                    planned.number,
                    planned.clip_norm,
                    rank=self.group.rank,
                    ranks=self.group.size,
                )

        return self.group.add(compute)


@contextmanager
def one_thread() -> Iterator[None]:
    """Train in one thread: each rank has one core, and the number of threads is part of how sums round."""
    before = torch.get_num_threads()
    if before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)
