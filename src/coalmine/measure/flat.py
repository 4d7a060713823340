"""Measure a model that is one vector: at once, in a thread, or on its GPU in parallel with the work that follows."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.canaries import RotatedCanaries, SphereCanaries
from coalmine.canaries.array_types import is_tensor, same_kind
from coalmine.canaries.base import usable
from coalmine.canaries.kept_rows import KeptRows
from coalmine.measure.arrays import arrays_of, is_on_device, numpy_vector, use_one_core
from coalmine.measure.measurer import NOTHING_LEFT, Length, Measured, Measurer, NoisePlan
from coalmine.measure.noise_law import NoiseParts, measure_law, resolution_of
from coalmine.measure.round import Final, Round, Singles
from coalmine.measure.round_facts import RoundFacts
from coalmine.measure.scale import SMALLEST
from coalmine.measure.settings import Settings
from coalmine.measure.trees import Tree
from coalmine.measure.vectors import (
    checked_length,
    copied,
    difference,
    host_vector,
    layer_norms,
    model_sha256,
    single_precision,
    vector_norm,
)

# Share of the canaries in the residual's squared length, below which coordinates are followed with them.
SMALL_SHARE = 1e-3


@dataclass(frozen=True)
class MeasuredVectors(Measured):
    """A round's vectors: its release, all other updates, what is left, and the present canaries' sum, if it is known."""

    vector: Any
    others: Any
    rest: Any
    total: Any

    @property
    def resolution(self) -> dict[str, float]:
        """The rounding of release and others."""
        finite = [step for step in (resolution_of(self.vector), resolution_of(self.others)) if step is not None]
        return {"rounding": sum(finite), "lattice": 12 * min(finite, default=0.0)}


@dataclass(frozen=True)
class MeasuredOnGpu(MeasuredVectors):
    """Vectors of which a GPU has computed `numbers`: beside lengths, the squared norms of the residual by layer."""

    numbers: dict[str, Floats]
    aside: Callable[[], Any]


class FlatMeasurer(Measurer[MeasuredVectors]):
    """The canaries of one vector, and its measurements. With a `tree`, the vector is a model's, in one block."""

    def __init__(self, settings: Settings, *, seed: SupportsIndex | bytes, tree: Tree | None = None) -> None:
        super().__init__(settings, seed)
        self.tree = tree
        kind = RotatedCanaries if settings.kind == "rotated" else SphereCanaries
        self.canaries: RotatedCanaries | SphereCanaries = kind(settings.total, settings.dim, seed=seed)
        self._kept_rows = KeptRows(self.canaries.rows, settings.canaries, settings.dim)
        self._parts = NoiseParts.of_all(settings)
        self._layer_sizes = tuple(size for _, size in settings.layers)
        self._sums = deque[tuple[list[int], Any]](maxlen=2)  # of present canaries, or of two parts of them
        self._worker: ThreadPoolExecutor | None = None

    def sum_of_canaries(self, indices: list[int], size: float, like: Any = None) -> Any:
        """The sum of the canaries at `indices`, each of norm `size`, like the model or of the kind of `like`."""
        template = like if self.tree is None else self.tree.vector_like
        total = self.canaries.combine(indices, like=template)
        if total.dtype.itemsize >= 4:  # the round will need it again; half precision would show in the gauges
            self._sums.append((indices, host_vector("updates", total)))
        return total * size if self.tree is None else self.tree.from_vector(total, size)

    def rows_of(self, indices: list[int], size: float, like: Any) -> Any:
        """The canaries at `indices`, each of norm `size`, as the rows of a matrix of the kind of `like`."""
        if not self._kept_rows.keeps(like):
            return arrays_of(like).stacked([self.canaries.combine([index], like=like) * size for index in indices])
        rows = self._kept_rows.of(indices)
        if len(set(indices)) == len(indices):
            self._sums.append((indices, rows.sum(axis=0)))  # the round will need it
        rows *= np.float32(size)
        return same_kind(rows, like)

    def sum_of_rows(self, indices: list[int], size: float, like: Any) -> Any:
        """The sum of the canaries at `indices`, each of norm `size`, of the kind of `like`."""
        if self.tree is not None or not self._kept_rows.keeps(like):
            return self.sum_of_canaries(indices, size, like)
        total = self._kept_rows.sum_of(indices)
        self._sums.append((indices, total))
        return same_kind(total * np.float32(size), like)

    def read(self, model_delta: Any, others: Any, *, own: bool) -> tuple[Any, Any]:
        """The two arguments of a round as vectors; ValueError if they are none. With `own`, a model's are copies."""
        model_delta = self._vector("model_delta", model_delta, own=own)
        return model_delta, others if others is None or callable(others) else self._vector("others", others, own=own)

    def round(self, model_delta: Any, others: Any, facts: RoundFacts, order: int) -> Round:
        """The record of a round, the `order`-th that was not skipped, from vectors that were `read`."""
        return self._round(model_delta, others, facts, order, self._pop_sum(facts.indices))

    def round_later(
        self,
        model_delta: Any,
        others: Any,
        facts: RoundFacts,
        order: int,
        *,
        copy: bool,
        then: Callable[[Round], Round] = lambda item: item,
    ) -> Callable[[], Round] | None:
        """As `round`, but the measurement is only started: the function that comes back waits for the record.

        With `copy` the caller may change the vectors at once. `then` gets the record in the thread that measures it, if it
        is one. None if this round must be measured at once.
        """
        if self._settings.kind != "rotated" or self._settings.momentum:
            return None
        copy = copy and self.tree is None  # a tree's vector is a copy already
        if is_tensor(model_delta) and is_on_device(model_delta):
            return self._round_on_gpu(model_delta, others, facts, order, copy=copy)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "coalmine-audit", initializer=use_one_core)
        given = (model_delta, others)
        if copy:  # the caller's own arrays, which may be overwritten
            given = copied(model_delta), others if others is None or callable(others) else copied(others)
        arguments = (*given, facts, order, self._pop_sum(facts.indices))
        waits = self._worker.submit(lambda: then(self._round(*arguments))).result
        if self._kept_rows.is_growing:
            self._worker.submit(self._kept_rows.make_more)
        return waits

    def final(self, model: Any, initial: Any = None) -> Final:
        """The record of the final model."""
        model = self._vector("model", model)
        norm = vector_norm("model", model)
        cosines, sha256 = self._single_cosines(model), model_sha256(single_precision(model))
        record = Final(norm=norm, cosines=cosines, sha256=sha256, **self._last_reading())
        if initial is None:
            return record
        moved = difference(model, self._vector("initial", initial))
        update_norm = vector_norm("model - initial", moved)
        moves = layer_norms(moved, self._layer_sizes or [self._settings.dim])
        if update_norm == 0:  # nothing moved, so there is no direction to compare with: the gauges of training say so
            return replace(record, layer_moves=moves)
        return replace(record, update_norm=update_norm, update_cosines=self._single_cosines(moved), layer_moves=moves)

    def _vector(self, name: str, value: Any, *, own: bool = False) -> Any:
        """An argument as a vector of the model's size; ValueError if it is none. With `own`, a model's is a copy."""
        vector = host_vector(name, value)
        if self.tree is not None:
            vector = self.tree.vector(name, vector, own=own)
        checked_length(name, vector, self._settings.dim)
        return vector

    def _single_cosines(self, vector: Any) -> Singles:
        return np.asarray(numpy_vector(self.canaries.cosines(vector)), dtype=np.float32)

    def _pop_sum(self, present: list[int]) -> Any:
        """The present canaries' sum, if it was computed since the last round, whole or in two parts."""
        sums = list(self._sums)
        self._sums.clear()
        if sums and sums[-1][0] == present:
            return sums[-1][1]
        if len(sums) == 2 and sorted(sums[0][0] + sums[1][0]) == sorted(present):
            return sums[0][1] + sums[1][1]
        return None

    def _round(self, model_delta: Any, others: Any, facts: RoundFacts, order: int, total: Any) -> Round:
        """The record of a round; `total` is the sum of the present canaries, if it is known."""
        norm = vector_norm("model_delta", model_delta)
        if norm == 0:
            return Round(number=facts.number, skipped=True)
        facts.check_released()
        if callable(others):
            others = self._vector("others", others())
        present, left, rest_norm = facts.indices, None, 0.0
        if others is not None:
            left = difference(model_delta, others)
            rest_norm = vector_norm("model_delta - others", left)
            if rest_norm == 0:
                raise ValueError(NOTHING_LEFT)
        cosines = self.canaries.cosines_of_each([model_delta] if left is None else [model_delta, left])
        release = self._length(numpy_vector(cosines[0]), norm, model_delta, present)
        residual = None
        if left is not None:
            residual = self._length(numpy_vector(cosines[1]), rest_norm, left, present)
            if self._settings.kind == "sphere" and present:
                residual = self._without_each_other(left, residual, present)
        return self._record(MeasuredVectors(release, residual, model_delta, others, left, total), facts, order)

    def _round_on_gpu(
        self, model_delta: Any, others: Any, facts: RoundFacts, order: int, *, copy: bool
    ) -> Callable[[], Round] | None:
        """Start to measure a round on its GPU; None if the GPU cannot do it beside its other work."""
        assert isinstance(self.canaries, RotatedCanaries)
        present, tensor = facts.indices, partial(arrays_of(model_delta).tensor, device=model_delta.device)
        delta = tensor(model_delta)
        rest = None if others is None else tensor(others)
        layers = self._layer_sizes if rest is not None else ()
        total = None
        if rest is not None and present:
            taken = self._pop_sum(present)
            total = self.canaries.combine(present, like=delta) if taken is None else tensor(taken)
        measurement = self.canaries.measure_later(delta, rest, total, layers, copy=copy)
        if measurement is None:
            if total is not None:
                self._sums.append((present, total))  # for the measurement that follows
            return None
        return lambda: self._round_from_gpu(measurement, facts, order)

    def _round_from_gpu(self, measurement: Any, facts: RoundFacts, order: int) -> Round:
        """The record of a round from the measurements of a GPU."""
        numbers, present = measurement.numbers(), facts.indices
        norm, rest_norm = float(numbers["norm"][0]), float(numbers.get("residual_norm", np.ones(1))[0])
        others = measurement.others if measurement.plan.others else None
        if not usable(norm) or not usable(rest_norm):  # zeros, NaN, or numbers near the limits of their range
            return self._round(measurement.vector, others, facts, order, None)
        release, residual = self._length(numbers["cosines"], norm), None
        if others is not None:
            residual = self._length(numbers["residual_cosines"], rest_norm)
        total = measurement.total if present else None
        vectors = (measurement.vector, others, None, total)
        with measurement.aside():
            return self._record(MeasuredOnGpu(release, residual, *vectors, numbers, measurement.aside), facts, order)

    def _length(self, cosines: Floats, norm: float, vector: Any = None, present: Sequence[int] = ()) -> Length:
        """A vector's length, from its cosines; for sphere canaries also the vector and the present canaries."""
        if self._settings.kind == "rotated":
            observed = cosines[: self._settings.canaries]
            share = 1 - float(observed @ observed)
        else:
            along, square = self._along_present(vector, list(present))
            share = 1 - along * along * square / (norm * norm)
        # without noise only rounding errors are left: scores are then huge, but not infinite
        return Length(norm, norm * math.sqrt(max(share, SMALLEST)), cosines.astype(np.float32))

    def _along_present(self, vector: Any, present: list[int]) -> tuple[float, float]:
        """The coefficient of the present canaries' sum in a vector, and that sum's squared norm."""
        if not present:
            return 0.0, 0.0
        total = numpy_vector(self.canaries.combine(present))
        square = float(total @ total)
        return float(numpy_vector(vector) @ total) / square, square

    def _without_each_other(self, vector: Any, residual: Length, present: list[int]) -> Length:
        """The residual with each sphere canary's cosine after subtracting the other present ones, which overlap with it."""
        size, _ = self._along_present(vector, present)
        total = numpy_vector(self.canaries.combine(present))
        overlap = np.asarray(self.canaries.cosines(total)) * np.linalg.norm(total)
        overlap[present] -= 1.0
        along = residual.cosines.astype(np.float64) * residual.norm - size * overlap
        length = math.hypot(residual.rest, size)
        return Length(length, residual.rest, (along / length).astype(np.float32))

    def _measures_cheaply(self, measured: MeasuredVectors, facts: RoundFacts) -> bool:
        """On a CPU, if the noise is computed in any case, or for one subtraction."""
        if isinstance(measured, MeasuredOnGpu) or is_on_device(measured.rest):
            return False
        return measured.total is not None or not facts.indices or bool(self._settings.layers)

    def _residual_fields(self, measured: MeasuredVectors) -> dict[str, Any]:
        return {} if isinstance(measured, MeasuredOnGpu) else dict(measured.resolution)

    def _noise_fields(self, measured: MeasuredVectors, plan: NoisePlan, facts: RoundFacts) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if isinstance(measured, MeasuredOnGpu):
            noise, total, fields = self._noise_on_gpu(measured, plan, facts)
        else:
            noise, total = self._noise(measured, plan, facts)
            if self._settings.layers:
                fields["layer_rests"] = layer_norms(noise, self._layer_sizes)
                fields["layer_others"] = layer_norms(measured.others, self._layer_sizes)
        if plan.measures_law:
            sizes = [size for size in (measured.others, total) if size is not None]
            fields |= measure_law(noise, measured.vector, self._parts, full=plan.full, exact=plan.exact, sizes=sizes)
        return fields | self._follow_vector(noise, measured.vector, measured.others, facts)

    def _noise(self, measured: MeasuredVectors, plan: NoisePlan, facts: RoundFacts) -> tuple[Any, Any]:
        """The residual without momentum and canaries, and the sum of the canaries, unless they were negligible."""
        noise, total, present = measured.rest, measured.total, facts.indices
        if self._settings.momentum and self._previous is not None:
            noise = difference(noise, self._previous.release * self._settings.momentum)
        if not present:
            return noise, None
        assert measured.residual is not None
        needed = plan.measures_law or self._settings.layers or total is not None
        if not needed and len(present) * plan.canary_size**2 < SMALL_SHARE * measured.residual.rest**2:
            return noise, None
        if total is None:
            total = self.canaries.combine(present, like=noise)
        return difference(noise, total * plan.canary_size), total

    def _noise_on_gpu(
        self, measured: MeasuredOnGpu, plan: NoisePlan, facts: RoundFacts
    ) -> tuple[Any, Any, dict[str, Any]]:
        """The same, and the fields of its lengths by layer, which the GPU has computed."""
        numbers, size, fields = measured.numbers, plan.canary_size, dict[str, Any]()
        if self._settings.layers:
            square = numbers["rests"] - 2 * size * numbers.get("overlaps", 0.0) + size**2 * numbers.get("totals", 0.0)
            fields["layer_rests"] = np.sqrt(np.maximum(square, 0.0))
            fields["layer_others"] = np.sqrt(numbers["others"])
        if plan.measures_law:
            fields |= measured.resolution
        noise = measured.vector - measured.others
        if facts.indices:
            noise.sub_(measured.total, alpha=size)
        return noise, measured.total, fields

    def _follow_release(self, measured: MeasuredVectors, facts: RoundFacts) -> dict[str, Any]:
        noise = measured.vector
        if self._settings.momentum and self._previous is not None:
            noise = difference(noise, self._previous.release * self._settings.momentum)
        on_gpu = isinstance(measured, MeasuredOnGpu)
        if facts.indices and measured.total is not None and facts.clip_declared and not on_gpu:
            noise = difference(noise, measured.total * facts.clip_norm)
        return self._follow_vector(noise, measured.vector, None, facts)

    def _copied_release(self, measured: MeasuredVectors) -> Any:
        return copied(measured.vector)
