"""Arrays that no real client trains, though Flower's wrappers add noise to them as to every other array."""

from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import Array

from coalmine.integrations.flower.layout import array_values


class FrozenArrays:
    """The arrays that were the same in every real client's reply as in the model sent to it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._unchanged = list(names)
        self._replies = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Their names; none before the first reply."""
        return tuple(self._unchanged) if self._replies else ()

    def compare(self, sent: Mapping[str, Array], reply: Mapping[str, Array]) -> None:
        """Drop the arrays that this reply changed. Arrays that changed once are not read again."""
        self._replies += 1
        self._unchanged = [name for name in self._unchanged if name in reply and _same(sent[name], reply[name])]


def _same(first: Array, second: Array) -> bool:
    """Whether two arrays hold the same numbers; equal bytes settle it without reading them."""
    return first.data == second.data or np.array_equal(array_values(first), array_values(second))
