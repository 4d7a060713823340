"""The path of one round, whatever holds the model: lengths, canaries, the noise's law, the sums that follow coordinates.

A measurer reads the arrays of a round in its own way (`flat` one vector, `blocks` many, over processes too) and returns its
lengths as a `Measured`. The record is made of those here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, SupportsIndex, TypeVar

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.canaries import RotatedCanaries
from coalmine.canaries.secret import SecretBytes
from coalmine.measure.canary_size import canary_size
from coalmine.measure.coordinate_sums import CoordinateSums
from coalmine.measure.expensive_rounds import ExpensiveRounds
from coalmine.measure.noise_law import MANY_COORDINATES
from coalmine.measure.round import Final, Round, Singles
from coalmine.measure.round_facts import RoundFacts
from coalmine.measure.schedule import schedule_key
from coalmine.measure.settings import Settings
from coalmine.measure.trees import Tree
from coalmine.measure.vectors import single_precision

NOT_COMPILED = "only rotated canaries of a model in one block can be compiled into a training step"
NOTHING_LEFT = "model_delta and others are equal, so no noise and no canary is left; check both arguments"


@dataclass(frozen=True)
class Length:
    """A vector's norm, its norm orthogonal to the observed canaries (whole and by block), and its cosines."""

    norm: float
    rest: float
    cosines: Singles
    block_rests: Floats | None = None

    def fields(self, prefix: str = "") -> dict[str, Any]:
        """The fields of a round's record."""
        return {f"{prefix}{name}": value for name, value in vars(self).items()}

    def products(self, present: list[int]) -> Floats:
        """The vector's products with these canaries."""
        return np.asarray(self.cosines[present], np.float64) * self.norm


@dataclass(frozen=True)
class Measured:
    """The lengths of a round's release and, if all other updates are known, of its residual: the release without them."""

    release: Length
    residual: Length | None


@dataclass(frozen=True)
class NoisePlan:
    """How a round's noise is measured."""

    full: bool  # also by the expensive gauges
    exact: bool  # the canaries have their declared norm
    measures_law: bool
    canary_size: float  # the norm of each present canary


@dataclass(frozen=True)
class Previous:
    """The previous round, to undo a server's momentum: its number, a copy of its release, its products with the canaries."""

    number: int
    release: Any
    products: Floats


Held = TypeVar("Held", bound=Measured)


class Measurer(ABC, Generic[Held]):
    """Makes the canaries' updates, and the records of rounds and of the final model."""

    canaries: Any  # as the user's own attacks get them
    tree: Tree | None  # of the model, unless it is given as one vector

    def __init__(self, settings: Settings, seed: SupportsIndex | bytes) -> None:
        self._settings = settings
        self._key = SecretBytes(schedule_key(seed))
        self._expensive_rounds = ExpensiveRounds(settings, self._key)
        self._coordinate_sums: CoordinateSums | None = None  # of the rounds since the last restart
        self._previous: Previous | None = None

    @property
    def rotated_canaries(self) -> RotatedCanaries:
        """The canaries, for a framework's compiler; ValueError if they cannot be compiled."""
        if not isinstance(self.canaries, RotatedCanaries):
            raise ValueError(NOT_COMPILED)
        return self.canaries

    @abstractmethod
    def sum_of_canaries(self, indices: list[int], size: float, like: Any = None) -> Any:
        """The sum of the canaries at `indices`, each of norm `size`."""

    def sum_of_rows(self, indices: list[int], size: float, like: Any) -> Any:
        """As `sum_of_canaries`, of the kind of `like`; the canaries may be those that `rows_of` keeps."""
        return self.sum_of_canaries(indices, size, like)

    def rows_of(self, indices: list[int], size: float, like: Any) -> Any:
        """The canaries at `indices`, each of norm `size`, as the rows of a matrix of the kind of `like`."""
        raise ValueError(f"rows need a model in one block, got one in {len(self._settings.block_sizes)}")

    @abstractmethod
    def read(self, model_delta: Any, others: Any, *, own: bool) -> tuple[Any, Any]:
        """The arguments of a round as `round` takes them; with `own`, the caller may change the originals."""

    def refuse(self, error: Exception) -> None:
        """What the caller states about a round is invalid, so it will not be measured."""

    @abstractmethod
    def round(self, model_delta: Any, others: Any, facts: RoundFacts, order: int) -> Round:
        """The record of a round, the `order`-th that was not skipped."""

    def round_later(
        self,
        model_delta: Any,
        others: Any,
        facts: RoundFacts,
        order: int,
        *,
        copy: bool,
        then: Callable[[Round], Round],
    ) -> Callable[[], Round] | None:
        """Start to measure a round. The function that comes back waits for its record; None if `round` must measure it.

        With `copy` the caller may change the vectors at once. `others` may be a function that returns it. A thread that
        measures the round also calls `then` with its record.
        """

    @abstractmethod
    def final(self, model: Any, initial: Any = None) -> Final:
        """The record of the final model."""

    def pieces(self, name: str, model: Any) -> Iterator[Singles]:
        """The model's numbers in this process, in the order of the coordinates, in single precision."""
        if self.tree is None:
            yield single_precision(model)
        else:
            rows = self.tree.rows(name, model)
            yield from (single_precision(rows[layer]) for layer, _ in self.tree.layers)

    def from_row(self, row: Singles) -> Any:
        """The inverse of `pieces`, for the whole model in one row."""
        return row if self.tree is None else self.tree.from_vector(row)

    def forget(self) -> None:
        """Forget the previous round, because it was rewound."""
        self._previous = self._coordinate_sums = None

    def _record(self, measured: Held, facts: RoundFacts, order: int) -> Round:
        """The record of a round from its lengths, with what else its arrays tell about the noise."""
        settings = self._settings
        if measured.release.norm == 0:
            return Round(number=facts.number, skipped=True)
        facts.check_released()
        sums = self._coordinate_sums
        if sums is None or sums.is_out_of_order(facts.number):
            self._coordinate_sums = self._new_sums()
        record = measured.release.fields()
        if measured.residual is not None:
            record |= measured.residual.fields("residual_") | self._residual_fields(measured)
            if self._undoes_momentum(facts.number):
                record |= self._noise_fields(measured, self._plan(measured, facts, order), facts)
        elif facts.noise_std and self._follows_releases and self._undoes_momentum(facts.number):
            record |= self._follow_release(measured, facts)
        if settings.momentum:
            products = measured.release.cosines.astype(np.float64) * measured.release.norm
            self._previous = Previous(facts.number, self._copied_release(measured), products)
        return Round(**vars(facts), **record)

    def _plan(self, measured: Held, facts: RoundFacts, order: int) -> NoisePlan:
        """How the noise of this round is measured. Its law always is, unless the model is large and that is expensive."""
        full, present, settings = order in self._expensive_rounds, facts.indices, self._settings
        measures_law = settings.dim <= MANY_COORDINATES or full or self._measures_cheaply(measured, facts)
        plan = NoisePlan(full, True, measures_law, 0.0)
        if not present:
            return plan
        assert measured.residual is not None
        products = measured.residual.products(present)
        if settings.momentum and self._previous is not None:
            products = products - settings.momentum * self._previous.products[present]
        size, declared = canary_size(products, measured.residual.rest, facts, settings)
        return replace(plan, exact=declared, canary_size=size)

    def _undoes_momentum(self, number: int) -> bool:
        """Whether the momentum of the previous round can be subtracted, or there is none. A restart has lost that round."""
        if not self._settings.momentum or number == 1:
            return True
        return self._previous is not None and self._previous.number == number - 1

    @property
    def _follows_releases(self) -> bool:
        """Whether coordinates are followed where all other updates are not known."""
        return self._settings.noise is None

    def _new_sums(self) -> CoordinateSums | None:
        """Sums that follow each coordinate, from the next round on; None if this audit does not follow them."""
        return CoordinateSums.of_vector(self._settings, self._key)

    def _follow_vector(self, noise: Any, release: Any, others: Any, facts: RoundFacts) -> dict[str, Any]:
        """Add the noise of a round that is one vector to the sums; their reading, if it is time for one."""
        sums = self._coordinate_sums
        if sums is None:
            return {}
        place, factor = sums.places[0], 1 + self._settings.momentum
        own = None if others is None else others[place]
        added = sums.add(
            facts.number, 0, noise[place], release[place], others=own, stated=facts.noise_std, factor=factor
        )
        return self._coordinate_reading(facts.number) if added else {}

    def _coordinate_reading(self, number: int) -> dict[str, Any]:
        """The reading of the sums after a round, if it is time for one."""
        sums = self._coordinate_sums
        return self._reading(number) if sums is not None and sums.end(number) else {}

    def _last_reading(self) -> dict[str, Any]:
        """The reading of the sums after the last round, unless that round has it."""
        sums = self._coordinate_sums
        return self._reading(0) if sums is not None and sums.is_unread else {}

    def _reading(self, number: int) -> dict[str, Any]:
        """The reading of the sums. Several processes share it, so they state the round."""
        del number
        assert self._coordinate_sums is not None
        return {"law_coordinates": self._coordinate_sums.read()}

    @abstractmethod
    def _measures_cheaply(self, measured: Held, facts: RoundFacts) -> bool:
        """Whether the law of the noise costs little in this round, however large the model is."""

    @abstractmethod
    def _residual_fields(self, measured: Held) -> dict[str, Any]:
        """What is recorded of a residual even if momentum cannot be undone."""

    @abstractmethod
    def _noise_fields(self, measured: Held, plan: NoisePlan, facts: RoundFacts) -> dict[str, Any]:
        """The fields on the noise, the residual without canaries and momentum: lengths by layer, its law, the sums."""

    @abstractmethod
    def _follow_release(self, measured: Held, facts: RoundFacts) -> dict[str, Any]:
        """Follow the coordinates of a release whose other updates are not known; they only add to its squares."""

    @abstractmethod
    def _copied_release(self, measured: Held) -> Any:
        """A copy of the release, from which the next round's momentum is undone."""
