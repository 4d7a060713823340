"""The user's own attacks: functions that score every canary in every round."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, WrongTypeError
from coalmine.measure.arrays import numpy_vector
from coalmine.measure.round import Round, Singles

Attack = Callable[..., npt.ArrayLike]


class OwnScores:
    """The attacks by name, and each one's scores of the round before. It is false if there are none."""

    def __init__(self, attacks: Mapping[str, Attack] | None, *, reserved: Collection[str] = ()) -> None:
        """The names of rungs are `reserved`: verdicts depend on them."""
        if attacks is not None and not isinstance(attacks, Mapping):
            raise WrongTypeError(f"scores must map names to attacks, got {type(attacks).__name__}")
        for name, attack in (attacks or {}).items():
            if name in reserved:
                raise ValueError(
                    f"scores must not be named like a rung of the ladder, got {name!r}; give it another name"
                )
            if not callable(attack):
                raise WrongTypeError(f"scores[{name!r}] must be callable, got {type(attack).__name__}")
        self._attacks = dict(attacks or {})
        self._previous: dict[str, Floats] = {}

    def __bool__(self) -> bool:
        return bool(self._attacks)

    def recall(self, rounds: Iterable[Round]) -> None:
        """Take the previous scores from the rounds of a log, which is read only if there are attacks."""
        self._previous = {}
        if self._attacks:
            for item in rounds:
                self._previous |= {name: np.asarray(own, np.float64) for name, own in item.scores.items()}

    def added_to(self, item: Round, model_delta: Any, canaries: Any, total: int) -> Round:
        """A round's record with the attacks' scores of all `total` canaries."""
        if item.skipped or not self._attacks:
            return item
        own = {name: self._scores(name, item.number, model_delta, canaries, total) for name in self._attacks}
        self._previous |= {name: values.astype(np.float64) for name, values in own.items()}
        return replace(item, scores=own)

    def _scores(self, name: str, number: int, model_delta: Any, canaries: Any, total: int) -> Singles:
        returned = self._attacks[name](number, model_delta, canaries, self._previous.get(name))
        values = np.asarray(numpy_vector(returned), dtype=np.float64)
        if values.shape != (total,):
            raise ValueError(f"scores of {name!r} must be one for each of {total} canaries, got shape {values.shape}")
        if not np.isfinite(values).all():
            raise ValueError(f"scores of {name!r} must be finite, got NaN or infinity in round {number}")
        return values.astype(np.float32)
