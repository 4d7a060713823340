"""One interface for whatever measures a model: as one vector, or in blocks and over processes."""

from collections.abc import Callable
from typing import Any, Protocol, SupportsIndex

from coalmine.canaries import RotatedCanaries
from coalmine.measure.blocks import BlockMeasurer
from coalmine.measure.flat import FlatMeasurer
from coalmine.measure.layout import Layout
from coalmine.measure.ranks import Ranks
from coalmine.measure.round import Final, Round
from coalmine.measure.round_facts import RoundFacts
from coalmine.measure.settings import Settings


class Measurer(Protocol):
    """Makes the canaries' updates, and the records of rounds and of the final model."""

    @property
    def canaries(self) -> Any:
        """The canaries themselves, as the user's own attacks get them."""

    @property
    def rotated_canaries(self) -> RotatedCanaries:
        """The canaries, for a framework's compiler; ValueError if they cannot be compiled."""

    def sum_of_canaries(self, indices: list[int], size: float, like: Any = None) -> Any:
        """The sum of the canaries at `indices`, each of norm `size`."""

    def read(self, model_delta: Any, others: Any, *, own: bool) -> tuple[Any, Any]:
        """The arguments of a round as `round` takes them; with `own`, the caller may change the originals."""

    def refuse(self, error: Exception) -> None:
        """What the caller states about a round is invalid, so it will not be measured."""

    def round(self, model_delta: Any, others: Any, facts: RoundFacts, order: int) -> Round:
        """The record of a round, the `order`-th that was not skipped."""

    def round_later(
        self, model_delta: Any, others: Any, facts: RoundFacts, order: int, *, copy: bool
    ) -> Callable[[], Round] | None:
        """Start to measure a round. The function that comes back waits for its record; None if `round` must measure it.

        With `copy` the caller may change the vectors at once.
        """

    def final(self, model: Any, initial: Any = None) -> Final:
        """The record of the final model."""

    def forget(self) -> None:
        """Forget the previous round, because it was rewound."""


def measurer_of(
    settings: Settings, seed: SupportsIndex | bytes, layout: Layout | None = None, ranks: Ranks | None = None
) -> Measurer:
    """The measurer of a flat vector, or of the model with this layout; ValueError if the canaries do not fit in memory."""
    try:
        if layout is not None and ranks is not None and (settings.blocks or ranks.several):
            return BlockMeasurer(layout.tree, settings, seed=seed, ranks=ranks, on_host=layout.on_host)
        return FlatMeasurer(settings, seed=seed, tree=None if layout is None else layout.tree)
    except MemoryError:
        raise ValueError(
            f"{settings.total:,} canaries of {settings.dim:,} numbers do not fit in memory: use fewer"
        ) from None
