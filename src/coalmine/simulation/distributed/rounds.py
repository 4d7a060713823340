"""A round in several ranks: rank 0 leads it, and the others follow."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from coalmine.simulation.client_sums import ClientSums
from coalmine.simulation.distributed.rank_group import PlannedRound, RankGroup
from coalmine.simulation.population import Indices


@dataclass(frozen=True)
class RankSums:
    """Computes the clients' part of a round on all ranks of a group; `ClientSums` does this in one process."""

    group: RankGroup
    sums: ClientSums

    def compute(
        self, model_vector: Tensor, clients: Indices, round_number: int, clip_norm: float
    ) -> tuple[Tensor, Tensor]:
        """On rank 0: the sum of all clipped updates, and the norms before clipping."""
        planned = PlannedRound(round_number, clip_norm, clients)
        self.group.send_round(planned, model_vector)
        return self._compute_share(planned, model_vector)

    def follow(self, model_vector: Tensor) -> None:
        """On the other ranks: train a share of every round until rank 0 ends the training."""
        while (planned := self.group.receive_round(model_vector)) is not None:
            self._compute_share(planned, model_vector)

    def _compute_share(self, planned: PlannedRound, model_vector: Tensor) -> tuple[Tensor, Tensor]:
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
    """Use one thread: each rank has one core, and the number of threads affects the rounding of sums."""
    before = torch.get_num_threads()
    if before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)
