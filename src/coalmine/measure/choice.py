"""Which measurer a model needs."""

from typing import Any, SupportsIndex

from coalmine.measure.blocks import BlockMeasurer
from coalmine.measure.flat import FlatMeasurer
from coalmine.measure.layout import Layout
from coalmine.measure.measurer import Measurer
from coalmine.measure.ranks import Ranks
from coalmine.measure.replicas import ReplicaMeasurer
from coalmine.measure.settings import Settings


def measurer_of(
    settings: Settings, seed: SupportsIndex | bytes, layout: Layout | None = None, ranks: Ranks | None = None
) -> Measurer[Any]:
    """The measurer of a flat vector, or of the model with this layout; ValueError if the canaries do not fit in memory."""
    try:
        if layout is not None and ranks is not None and (settings.blocks or ranks.several):
            kind = ReplicaMeasurer if settings.replicated else BlockMeasurer
            return kind(layout.tree, settings, seed=seed, ranks=ranks, on_host=layout.on_host)
        return FlatMeasurer(settings, seed=seed, tree=None if layout is None else layout.tree)
    except MemoryError:
        raise ValueError(
            f"{settings.total:,} canaries of {settings.dim:,} numbers do not fit in memory: use fewer"
        ) from None
