"""Measure a model that is one vector: at once, in a thread, or on its GPU in parallel with the work that follows."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.canaries import RotatedCanaries, SphereCanaries
from coalmine.canaries.base import usable
from coalmine.canaries.rotation_numpy import stay_in_one_thread
from coalmine.canaries.secret import SecretBytes
from coalmine.measure.canary_size import canary_size
from coalmine.measure.coordinate_sums import CoordinateSums
from coalmine.measure.expensive_rounds import ExpensiveRounds
from coalmine.measure.noise_law import MANY_COORDINATES, NoiseParts, is_on_device, measure_law, resolution_of
from coalmine.measure.round import Final, Round, Singles
from coalmine.measure.round_facts import RoundFacts
from coalmine.measure.scale import SMALLEST
from coalmine.measure.schedule import schedule_key
from coalmine.measure.settings import Settings
from coalmine.measure.trees import Tree, host_vector
from coalmine.measure.vectors import (
    checked_length,
    copied,
    difference,
    has_single_precision,
    layer_norms,
    like_model,
    model_sha256,
    numpy_vector,
    on_gpu,
    single_precision,
    vector_norm,
)

# Share of the canaries in the residual's squared length, below which coordinates are followed with them.
SMALL_SHARE = 1e-3
NOT_COMPILED = "only rotated canaries of a model in one block can be compiled into a training step"


class FlatMeasurer:
    """The canaries of one vector, and its measurements. With a `tree`, the vector is a model's, in one block."""

    def __init__(self, settings: Settings, *, seed: SupportsIndex | bytes, tree: Tree | None = None) -> None:
        self._settings, self._tree = settings, tree
        kind = RotatedCanaries if settings.kind == "rotated" else SphereCanaries
        self.canaries: RotatedCanaries | SphereCanaries = kind(settings.total, settings.dim, seed=seed)
        self._key = SecretBytes(schedule_key(seed))
        self._expensive_rounds = ExpensiveRounds(settings, self._key)
        self._parts = NoiseParts.of_all(settings)
        self._layer_sizes = tuple(size for _, size in settings.layers)
        self._before: _Before | None = None
        self._coordinate_sums: CoordinateSums | None = None  # of the rounds since the last restart
        self._last_sum: tuple[list[int], Any] | None = None
        self._worker: ThreadPoolExecutor | None = None

    @property
    def rotated_canaries(self) -> RotatedCanaries:
        """The canaries, for a framework's compiler; ValueError if they cannot be compiled."""
        if not isinstance(self.canaries, RotatedCanaries):
            raise ValueError(NOT_COMPILED)
        return self.canaries

    def sum_of_canaries(self, indices: list[int], size: float, like: Any = None) -> Any:
        """The sum of the canaries at `indices`, each of norm `size`, like the model or of the kind of `like`."""
        template = like if self._tree is None else self._tree.vector_like()
        total = self.canaries.combine(indices, like=template)
        if has_single_precision(total):  # the round will need it again; half precision would show in the gauges
            self._last_sum = (indices, host_vector("updates", total))
        return total * size if self._tree is None else self._tree.from_vector(total, size)

    def refuse(self, error: Exception) -> None:
        """Nobody waits for this process, so there is nobody to tell that its round is invalid."""

    def read(self, model_delta: Any, others: Any, *, own: bool) -> tuple[Any, Any]:
        """The two arguments of a round as vectors; ValueError if they are none. With `own`, a model's are copies."""
        model_delta, others = host_vector("model_delta", model_delta), host_vector("others", others)
        if self._tree is not None:
            model_delta = self._tree.vector("model_delta", model_delta, own=own)
            others = None if others is None else self._tree.vector("others", others, own=own)
        checked_length("model_delta", model_delta, self._settings.dim)
        if others is not None:
            checked_length("others", others, self._settings.dim)
        return model_delta, others

    def round(self, model_delta: Any, others: Any, facts: RoundFacts, order: int) -> Round:
        """The record of a round, the `order`-th that was not skipped, from vectors that were `read`."""
        return self._round(model_delta, others, facts, order, self._taken_sum(facts.indices))

    def round_later(
        self, model_delta: Any, others: Any, facts: RoundFacts, order: int, *, copy: bool
    ) -> Callable[[], Round] | None:
        """As `round`, but the measurement is only started: the function that comes back waits for the record.

        With `copy` the caller may change the vectors at once. None if this round must be measured at once.
        """
        if self._settings.kind != "rotated" or self._settings.momentum:
            return None
        copy = copy and self._tree is None  # a tree's vector is a copy already
        if on_gpu(model_delta):
            return self._round_on_gpu(model_delta, others, facts, order, copy=copy)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "coalmine-audit", initializer=stay_in_one_thread)
        given = (model_delta, others)
        if copy:  # the caller's own arrays, which may be overwritten
            given = copied(model_delta), None if others is None else copied(others)
        return self._worker.submit(self._round, *given, facts, order, self._taken_sum(facts.indices)).result

    def final(self, model: Any, initial: Any = None) -> Final:
        """The record of the final model."""
        model, initial = host_vector("model", model), host_vector("initial", initial)
        if self._tree is not None:
            model = self._tree.vector("model", model)
            initial = None if initial is None else self._tree.vector("initial", initial)
        checked_length("model", model, self._settings.dim)
        norm = vector_norm("model", model)
        cosines = np.asarray(numpy_vector(self.canaries.cosines(model)), dtype=np.float32)
        sha256 = model_sha256(single_precision(model))
        record = Final(norm=norm, cosines=cosines, sha256=sha256, **self._last_reading())
        if initial is None:
            return record
        checked_length("initial", initial, self._settings.dim)
        moved = difference(model, initial)
        update_norm = vector_norm("model - initial", moved)
        moves = layer_norms(moved, self._layer_sizes or [self._settings.dim])
        if update_norm == 0:  # nothing moved, so there is no direction to compare with: the gauges of training say so
            return replace(record, layer_moves=moves)
        update = np.asarray(numpy_vector(self.canaries.cosines(moved)), dtype=np.float32)
        return replace(record, update_norm=update_norm, update_cosines=update, layer_moves=moves)

    def forget(self) -> None:
        """Forget the previous round, because it was rewound."""
        self._before = self._coordinate_sums = None

    def _round(self, model_delta: Any, others: Any, facts: RoundFacts, order: int, total: Any) -> Round:
        """The record of a round; `total` is the sum of the present canaries, if it is known."""
        norm = vector_norm("model_delta", model_delta)
        if norm == 0:
            return Round(number=facts.number, skipped=True)
        residual = None if others is None else _without(model_delta, others)
        measured = self.canaries.cosines_of_each([model_delta] if residual is None else [model_delta, residual[0]])
        cosines, rest = self._rest_of(numpy_vector(measured[0]), norm, model_delta, facts.indices)
        extra: dict[str, Any] = {}
        if residual is not None:
            vectors = _RoundVectors(model_delta, others, total, order)
            extra = self._residual(*residual, numpy_vector(measured[1]), vectors, facts)
        elif facts.noise_std and self._settings.noise is None and self._undoes_momentum(facts.number):
            extra = self._follow_release(model_delta, total, facts)
        if self._settings.momentum:
            self._before = _Before(facts.number, copied(model_delta), cosines.astype(np.float64) * norm)
        return Round(**vars(facts), norm=norm, rest=rest, cosines=cosines, **extra)

    def _round_on_gpu(
        self, model_delta: Any, others: Any, facts: RoundFacts, order: int, *, copy: bool
    ) -> Callable[[], Round] | None:
        """Start to measure a round on its GPU; None if the GPU cannot do it beside its other work."""
        assert isinstance(self.canaries, RotatedCanaries)
        present = facts.indices
        delta = like_model(model_delta, model_delta)
        rest = None if others is None else like_model(others, delta)
        layers = self._layer_sizes if rest is not None else ()
        total = None
        if rest is not None and present:
            taken = self._taken_sum(present)
            total = self.canaries.combine(present, like=delta) if taken is None else like_model(taken, delta)
        measurement = self.canaries.measure_later(delta, rest, total, layers, copy=copy)
        if measurement is None:
            self._last_sum = (present, total) if total is not None else None  # for the measurement that follows
            return None
        return lambda: self._round_of(measurement, facts, order)

    def _round_of(self, measurement: Any, facts: RoundFacts, order: int) -> Round:
        """The record of a round from the measurements of a GPU."""
        numbers, present = measurement.numbers(), facts.indices
        norm, residual = float(numbers["norm"][0]), float(numbers.get("residual_norm", np.ones(1))[0])
        if not usable(norm) or not usable(residual):  # zeros, NaN, or numbers near the limits of their range
            others = measurement.others if measurement.plan.others else None
            return self._round(measurement.vector, others, facts, order, None)
        cosines, rest = self._rest_of(numbers["cosines"], norm)
        extra: dict[str, Any] = {}
        if "residual_cosines" in numbers:
            own, residual_rest = self._rest_of(numbers["residual_cosines"], residual)
            extra = {"residual_norm": residual, "residual_rest": residual_rest, "residual_cosines": own}
            size, declared = 0.0, True
            if present:
                along = np.asarray(own[present], np.float64) * residual
                size, declared = canary_size(along, residual_rest, facts, self._settings)
            if self._settings.layers:
                square = (
                    numbers["rests"] - 2 * size * numbers.get("overlaps", 0.0) + size**2 * numbers.get("totals", 0.0)
                )
                extra["layer_rests"] = np.sqrt(np.maximum(square, 0.0))
                extra["layer_others"] = np.sqrt(numbers["others"])
            with measurement.aside():
                noise = measurement.vector - measurement.others
                if present:
                    noise.sub_(measurement.total, alpha=size)
                if self._measures_law(order, cheaply=False):
                    total = measurement.total if present else None
                    vectors = _RoundVectors(measurement.vector, measurement.others, total, order)
                    extra |= vectors.resolution | self._law(noise, vectors, exact=declared)
                extra |= self._follow(noise, measurement.vector, measurement.others, facts)
        elif facts.noise_std and self._settings.noise is None:
            with measurement.aside():
                extra |= self._follow(measurement.vector, measurement.vector, None, facts)
        return Round(**vars(facts), norm=norm, rest=rest, cosines=cosines, **extra)

    def _residual(
        self, vector: Any, norm: float, exact: Floats, vectors: "_RoundVectors", facts: RoundFacts
    ) -> dict[str, Any]:
        """The fields of a round's record for the residual, the release without all other updates."""
        present = facts.indices
        cosines, rest = self._rest_of(exact, norm, vector, present)
        if self._settings.kind == "sphere" and present:
            cosines, norm = self._without_each_other(vector, cosines, norm, rest, present)
        fields: dict[str, Any] = {"residual_norm": norm, "residual_rest": rest, "residual_cosines": cosines}
        fields |= vectors.resolution
        along = np.asarray(cosines[present], np.float64) * norm
        if not self._undoes_momentum(facts.number):
            return fields  # undoing momentum needs the previous round, which a restart has lost
        if self._settings.momentum and self._before is not None:
            vector = difference(vector, self._before.model_delta * self._settings.momentum)
            along = along - self._settings.momentum * self._before.along[present]
        cheaply = not is_on_device(vector) and (vectors.total is not None or not present)
        by_layer = bool(self._settings.layers) and not is_on_device(vector)  # the noise is computed in any case
        measures_law = self._measures_law(vectors.order, cheaply=cheaply or by_layer)
        declared, size = True, 0.0
        if present:
            size, declared = canary_size(along, rest, facts, self._settings)
            needed = measures_law or self._settings.layers or vectors.total is not None
            if not needed and len(present) * size * size < SMALL_SHARE * rest * rest:
                return fields | self._follow(vector, vectors.release, vectors.others, facts)
            if vectors.total is None:
                vectors = replace(vectors, total=self.canaries.combine(present, like=vector))
            vector = difference(vector, vectors.total * size)
        if self._settings.layers:
            fields["layer_rests"] = layer_norms(vector, self._layer_sizes)
            fields["layer_others"] = layer_norms(vectors.others, self._layer_sizes)
        if measures_law:
            fields |= self._law(vector, vectors, exact=declared)
        return fields | self._follow(vector, vectors.release, vectors.others, facts)

    def _rest_of(
        self, cosines: Floats, norm: float, vector: Any = None, present: Sequence[int] = ()
    ) -> tuple[Singles, float]:
        """The cosines in single precision, and the norm of their vector orthogonal to the observed canaries."""
        if self._settings.kind == "rotated":
            observed = cosines[: self._settings.canaries]
            share = 1 - float(observed @ observed)
        else:
            along, square = self._along_present(vector, list(present))
            share = 1 - along * along * square / (norm * norm)
        # without noise only rounding errors are left: scores are then huge, but not infinite
        return cosines.astype(np.float32), norm * math.sqrt(max(share, SMALLEST))

    def _along_present(self, vector: Any, present: list[int]) -> tuple[float, float]:
        """The coefficient of the present canaries' sum in a vector, and that sum's squared norm."""
        if not present:
            return 0.0, 0.0
        total = numpy_vector(self.canaries.combine(present))
        square = float(total @ total)
        return float(numpy_vector(vector) @ total) / square, square

    def _without_each_other(
        self, vector: Any, cosines: Singles, norm: float, rest: float, present: list[int]
    ) -> tuple[Singles, float]:
        """Each sphere canary's cosine with the residual after subtracting the other present ones, which overlap with it."""
        size, _ = self._along_present(vector, present)
        total = numpy_vector(self.canaries.combine(present))
        overlap = np.asarray(self.canaries.cosines(total)) * np.linalg.norm(total)
        overlap[present] -= 1.0
        along = cosines.astype(np.float64) * norm - size * overlap
        length = math.hypot(rest, size)
        return (along / length).astype(np.float32), length

    def _undoes_momentum(self, number: int) -> bool:
        """Whether the momentum of the previous round can be subtracted, or there is none."""
        if not self._settings.momentum or number == 1:
            return True
        return self._before is not None and self._before.number == number - 1

    def _taken_sum(self, present: list[int]) -> Any:
        """The present canaries' sum, if the last `updates` computed it; it is kept no longer than its round."""
        last, self._last_sum = self._last_sum, None
        return last[1] if last is not None and last[0] == present else None

    def _law(self, noise: Any, vectors: "_RoundVectors", *, exact: bool) -> dict[str, Any]:
        """The measurements of the noise's law in this round."""
        full = vectors.order in self._expensive_rounds
        sizes = [size for size in (vectors.others, vectors.total) if size is not None]
        return measure_law(noise, vectors.release, self._parts, full=full, exact=exact, sizes=sizes)

    def _measures_law(self, order: int, *, cheaply: bool) -> bool:
        """Whether the noise's law is measured in this round: always, unless the model is large and it is expensive."""
        return cheaply or self._settings.dim <= MANY_COORDINATES or order in self._expensive_rounds

    def _follow_release(self, vector: Any, total: Any, facts: RoundFacts) -> dict[str, Any]:
        """Follow the coordinates of a release whose other updates are not known; they only add to its squares."""
        release = vector
        if self._settings.momentum and self._before is not None:
            vector = difference(vector, self._before.model_delta * self._settings.momentum)
        if facts.indices and total is not None and facts.clip_declared:
            vector = difference(vector, total * facts.clip_norm)
        return self._follow(vector, release, None, facts)

    def _follow(self, noise: Any, release: Any, others: Any, facts: RoundFacts) -> dict[str, Any]:
        """Add a round's noise to the sums that follow each coordinate; their reading, if it is time for one."""
        number, sums = facts.number, self._coordinate_sums
        if sums is None or sums.is_out_of_order(number):
            sums = self._coordinate_sums = CoordinateSums.of_vector(self._settings, self._key)
        place = sums.places[0]
        own = None if others is None else others[place]
        factor = 1 + self._settings.momentum
        added = sums.add(number, 0, noise[place], release[place], others=own, stated=facts.noise_std, factor=factor)
        return {"law_coordinates": sums.read()} if added and sums.end(number) else {}

    def _last_reading(self) -> dict[str, Any]:
        """The reading of the sums after the last round, unless that round has it."""
        sums = self._coordinate_sums
        return {"law_coordinates": sums.read()} if sums is not None and sums.is_unread else {}


def _without(model_delta: Any, others: Any) -> tuple[Any, float]:
    """The residual of a round, its canaries and noise without all other updates, and its norm."""
    vector = difference(model_delta, others)
    norm = vector_norm("model_delta - others", vector)
    if norm == 0:
        raise ValueError("model_delta and others are equal, so no noise and no canary is left; check both arguments")
    return vector, norm


@dataclass(frozen=True)
class _RoundVectors:
    """The vectors of one round: its release, the sum of all other updates, and the present canaries' sum, if known.

    `order` is the number of the round, not counting skipped ones.
    """

    release: Any
    others: Any
    total: Any
    order: int

    @property
    def resolution(self) -> dict[str, float]:
        """The rounding of release and others."""
        release, others = resolution_of(self.release), resolution_of(self.others)
        finite = [step for step in (release, others) if step is not None]
        return {"rounding": sum(finite), "lattice": 12 * min(finite, default=0.0)}


@dataclass(frozen=True)
class _Before:
    """The previous round, to undo a server's momentum: its number, its release, and the products with the canaries."""

    number: int
    model_delta: Any
    along: Floats
