"""Measure a model in blocks, block by block: no array of the model's size is allocated or sent to another process.

Each process measures its own blocks. It sends only sums to the others: products with the canaries, and a few lengths.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.canaries.blocked import BlockedCanaries
from coalmine.canaries.rotation_numpy import threads
from coalmine.measure.arrays import host_numbers
from coalmine.measure.block_sums import BlockParts, LayerSquares, VectorSums, length_of, squares_of
from coalmine.measure.coordinate_sums import CoordinateSums
from coalmine.measure.measurer import NOTHING_LEFT, Length, Measured, Measurer, NoisePlan
from coalmine.measure.noise_law import (
    MANY_COORDINATES,
    LawSizes,
    NoiseParts,
    law_record,
    law_sums,
    resolution_of,
    zero_width,
)
from coalmine.measure.ranks import Ranks
from coalmine.measure.round import Final, Round
from coalmine.measure.round_facts import RoundFacts
from coalmine.measure.settings import Settings
from coalmine.measure.stretches import (
    Stretch,
    block_stretches,
    clip_stretches,
    empty_working_array,
    gather_block,
    subtract_piece,
    write_piece,
)
from coalmine.measure.trees import Tree
from coalmine.measure.vectors import copied, difference

# The canaries' part of a residual, in standard deviations of its squared length, below which their mean is accurate enough.
SMALL_PART = 0.05
LARGEST_SINGLE = 1e30  # largest entry of a sketch that is stored in single precision
Rows = dict[str, Any]


@dataclass(frozen=True)
class MeasuredBlocks(Measured):
    """A round's lengths over all processes, and this process's rows of the release and of all other updates.

    `others_squares` are squared lengths of the other updates by layer. `noise_sums` are squared lengths of the residual by
    layer, then of parts of blocks, and sketches; for replicas, the other updates in the sample.
    """

    rows: Rows
    others: Rows | None
    others_squares: Floats
    noise_sums: Floats


class BlockMeasurer(Measurer[MeasuredBlocks]):
    """The blocks of a model in this process, their canaries, and their measurements."""

    def __init__(
        self, tree: Tree, settings: Settings, *, seed: SupportsIndex | bytes, ranks: Ranks, on_host: bool = True
    ) -> None:
        super().__init__(settings, seed)
        self.tree: Tree = tree
        self._ranks = ranks
        self._on_host = on_host  # whether the whole model is, in every process: then the law is measured in every round
        leaf_sizes = settings.shards[ranks.rank] if settings.shards else tuple(size for _, size in settings.layers)
        first, stop = _blocks_of(settings, ranks.rank)
        self._block_numbers = range(first, stop)  # of this process's blocks, counted over all processes
        sizes = settings.block_sizes[first:stop]
        self.canaries = BlockedCanaries(settings.total, sizes, seed=seed, first=first, dim=settings.dim)
        self._stretches = block_stretches(settings, leaf_sizes, sizes)
        self._block_noise_parts = NoiseParts.of_blocks(settings)
        self._model_noise_parts = NoiseParts.of_all(settings)

    def sum_of_canaries(self, indices: list[int], size: float, like: Any = None) -> Any:
        """The sum of the canaries at `indices`, each of norm `size`, in the model's structure; `like` is not needed."""
        return self.tree.rebuild(self.write_canaries(indices, size, self.tree.empty_rows()))

    def write_canaries(self, indices: list[int], size: float, rows: Rows) -> Rows:
        """Write the sum of the canaries at `indices`, each of norm `size`, into rows, block by block, and return them."""
        with ThreadPoolExecutor(threads()) as pool:  # new memory is slow to write; a GPU's work stays in this thread
            for block, stretches in enumerate(self._stretches):
                total = self.canaries.combine(block, indices, like=self._like(block, rows), unit=True)
                write = partial(_write_stretch, rows, total, size * float(self.canaries.shares[block]))
                list((pool.map if self._on_host else map)(write, stretches))
        return rows

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks, which wait for this rank's part of a round, that this rank failed."""
        self._coordinate_sums = None

        def fail() -> Floats:
            raise error

        if self._ranks.several:
            self._ranks.sum_of(self._round_size, fail, number=0, arguments={})

    @property
    def _round_size(self) -> int:
        """How many numbers the processes sum in a round."""
        settings = self._settings
        vectors = 2 * (settings.total + 2 * len(settings.block_sizes))
        return vectors + len(settings.layers) + self._noise_size  # lengths of `others` by layer

    @property
    def _noise_size(self) -> int:
        return len(self._settings.layers) + self._parts_size

    @property
    def _parts_size(self) -> int:
        """The number of lengths in parts of blocks, plus the number of entries of sketches."""
        blocks = len(self._settings.block_sizes)
        return blocks * (self._settings.chunks + self._settings.sketch) if self._settings.in_blocks else 0

    def read(self, model_delta: Any, others: Any, *, own: bool) -> tuple[Any, Any]:
        """The two arguments of a round unchanged: `round` checks them, together with the other ranks'."""
        return model_delta, others

    def round(self, model_delta: Any, others: Any, facts: RoundFacts, order: int) -> Round:
        """The record of a round. Every process gets one; of a replicated model, only rank 0's has the law of the noise."""
        try:
            return self._record(self._measured(model_delta, others, facts), facts, order)
        except Exception:
            self._coordinate_sums = None  # on every rank: all of them fail together
            raise

    def _measured(self, model_delta: Any, others: Any, facts: RoundFacts) -> MeasuredBlocks:
        settings, rows = self._settings, dict[str, Rows]()

        def measure() -> Floats:
            rows["delta"] = self.tree.rows("model_delta", model_delta)
            if others is not None:
                rows["others"] = self.tree.rows("others", others)
            return self._round_sums(rows["delta"], rows.get("others"), facts.number)

        arguments = vars(facts) | {"present": facts.indices, "others": others is not None}
        sums = self._ranks.sum_of(self._round_size, measure, number=facts.number, arguments=arguments)
        size = settings.total + 2 * len(settings.block_sizes)
        edges = np.cumsum([size, size, len(settings.layers)])
        release_sums, residual_sums, others_squares, noise_sums = np.split(sums, edges)
        self._check(noise_sums)
        release, residual = length_of("model_delta", release_sums, settings), None
        if others is not None and release.norm:
            residual = self._residual_length(residual_sums)
            if residual.norm == 0:
                raise ValueError(NOTHING_LEFT)
        return MeasuredBlocks(release, residual, rows["delta"], rows.get("others"), others_squares, noise_sums)

    def _check(self, noise_sums: Floats) -> None:
        """Replicas check that they have the same release."""

    def final(self, model: Any, initial: Any = None) -> Final:
        """The record of the final model."""
        settings = self._settings
        size = settings.total + 2 * len(settings.block_sizes)

        def measure_model() -> Floats:
            return self._vector_sums("model", self._gatherer(self.tree.rows("model", model)))

        def measure_update() -> Floats:
            rows, first = self.tree.rows("model", model), self.tree.rows("initial", initial)
            squares = self._layer_squares(rows, first) / (self._ranks.size if settings.replicated else 1)
            return np.concatenate([self._vector_sums("model - initial", self._gatherer(rows, (first, 1.0))), squares])

        arguments = {"initial": initial is not None}
        sums = self._ranks.sum_of(size, measure_model, number=0, arguments=arguments)
        last = length_of("model", sums, settings)
        if last.norm == 0:
            raise ValueError("model must not be zero, which has no direction; was the model ever updated?")
        record = Final(norm=last.norm, cosines=last.cosines, block_rests=last.block_rests, **self._last_reading())
        if initial is None:
            return record
        sums = self._ranks.sum_of(size + len(settings.layers), measure_update, number=0, arguments=arguments)
        update, moves = length_of("model - initial", sums[:size], settings), np.sqrt(sums[size:])
        if update.norm == 0:  # the update has no direction, and the gauges of training report that nothing moved
            return replace(record, layer_moves=moves)
        return replace(
            record,
            update_norm=update.norm,
            update_cosines=update.cosines,
            update_block_rests=update.block_rests,
            layer_moves=moves,
        )

    def _round_sums(self, delta: Rows, others: Rows | None, number: int) -> Floats:
        """This process's part of a round's sums: products and lengths of release and residual, and lengths by layer."""
        settings = self._settings
        release_of = self._gatherer(delta)
        residual_of = None if others is None else self._gatherer(delta, (others, 1.0))
        release, residual = self._sums("model_delta", release_of), self._sums("model_delta - others", residual_of)
        layers, parts = LayerSquares(len(settings.layers)), BlockParts(settings)
        undo_momentum = others is not None and settings.momentum > 0 and number > 1 and self._undoes_momentum(number)
        noise_of = self._noise(delta, others, number)
        for block, stretches in enumerate(self._stretches):
            release.add(block, release_of(block))
            if residual_of is None:
                continue
            vector = residual_of(block)
            if not undo_momentum:  # before `residual` overwrites it
                layers.add(vector, stretches)
                parts.add(self._block_numbers[block], vector)
            residual.add(block, vector)
            if undo_momentum:
                vector = noise_of(block)
                layers.add(vector, stretches)
                parts.add(self._block_numbers[block], vector)
        return np.concatenate(
            [release.sums(), residual.sums(), self._others_squares(others), layers.sums(), parts.sums()]
        )

    def _others_squares(self, others: Rows | None) -> Floats:
        return np.zeros(len(self._settings.layers)) if others is None else self._layer_squares(others)

    def _layer_squares(self, rows: Rows, first: Rows | None = None) -> Floats:
        """Squared lengths of this process's part of each layer; with `first`, of the difference from it."""
        together = [[part for block in self._stretches for part in block]]
        by_layer = np.zeros(len(self._settings.layers))
        for stretches in together if first is None else self._stretches:  # a difference takes memory, so block by block
            parts = [rows[part.name][part.in_leaf] for part in stretches]
            if first is not None:
                parts = [difference(one, first[at.name][at.in_leaf]) for one, at in zip(parts, stretches, strict=True)]
            np.add.at(by_layer, [part.layer for part in stretches], host_numbers(squares_of(parts)))
        return by_layer

    def _sums(self, name: str, gather: Callable[[int], Any] | None) -> VectorSums:
        return VectorSums(self.canaries, self._settings, self._block_numbers, gather, name)

    def _vector_sums(self, name: str, gather: Callable[[int], Any]) -> Floats:
        """This process's part of a vector's sums."""
        sums = self._sums(name, gather)
        for block in range(len(self._stretches)):
            if self._is_mine(block):
                sums.add(block, gather(block))
        return sums.sums()

    def _is_mine(self, block: int) -> bool:
        """Whether this process measures the block. Replicas share the blocks of a vector that all of them have."""
        del block
        return True

    def _residual_length(self, sums: Floats) -> Length:
        return length_of("model_delta - others", sums, self._settings)

    def _measures_cheaply(self, measured: MeasuredBlocks, facts: RoundFacts) -> bool:
        return self._on_host

    def _residual_fields(self, measured: MeasuredBlocks) -> dict[str, Any]:
        return {"layer_others": np.sqrt(measured.others_squares)}

    def _subtracts_canaries(self, measured: MeasuredBlocks, plan: NoisePlan, facts: RoundFacts) -> bool:
        """Whether canaries are subtracted. Otherwise their mean square corrects the lengths, which is accurate enough."""
        if self._settings.dim <= MANY_COORDINATES or plan.full:
            return True
        assert measured.residual is not None
        scale = measured.residual.rest / math.sqrt(self._settings.free)
        share = math.sqrt(2 * len(facts.indices) / self._settings.dim) * plan.canary_size / scale
        return abs(share) >= SMALL_PART

    def _mean_square(self, facts: RoundFacts, plan: NoisePlan) -> float:
        """The mean square that the present canaries add to a coordinate."""
        return plan.canary_size * plan.canary_size * len(facts.indices) / self._settings.dim

    def _noise_fields(self, measured: MeasuredBlocks, plan: NoisePlan, facts: RoundFacts) -> dict[str, Any]:
        settings, layers = self._settings, len(self._settings.layers)
        mean, subtract = self._mean_square(facts, plan), self._subtracts_canaries(measured, plan, facts)
        layer_sums, part_sums = np.split(measured.noise_sums, [layers])
        layer_sizes = np.array([dim for _, dim in settings.layers])
        record: dict[str, Any] = {"layer_rests": np.sqrt(np.maximum(layer_sums - mean * layer_sizes, 0.0))}
        record |= self._parts_record(part_sums, mean)
        if not subtract:
            self._follow_blocks(measured.rows, measured.others, facts)
            if not plan.measures_law:
                return record | self._coordinate_reading(facts.number)
        sizes = (
            LawSizes.of(settings, self._block_noise_parts, full=plan.full, sizes=2 if facts.indices else 1)
            if plan.measures_law
            else LawSizes({}, [])
        )
        sums = self._ranks.sum_of(
            sizes.total + (layers + self._parts_size if subtract else 0),
            lambda: self._law_sums(measured, plan, sizes, facts, subtract=subtract),
            number=facts.number,
            arguments={"present": facts.indices},
        )
        law, layer_sums, part_sums = np.split(sums, [sizes.total, sizes.total + layers])
        if subtract:
            record["layer_rests"] = np.sqrt(np.maximum(layer_sums, 0.0))
            record |= self._parts_record(part_sums, 0.0)
        record |= self._coordinate_reading(facts.number)
        if not plan.measures_law:
            return record
        shared, by_block = sizes.unpack(law[2:])
        record |= {"rounding": float(law[0]), "lattice": float(law[1])}
        return record | law_record(by_block, shared, self._model_noise_parts, full=plan.full, exact=plan.exact)

    def _new_sums(self) -> CoordinateSums | None:
        """None for several processes under correlated noise: they do not undo its correlation together."""
        if self._ranks.several and self._settings.noise is not None:
            return None
        blocks = [
            [(part.layer, part.offset, part.offset + part.stop - part.start) for part in stretches]
            for stretches in self._stretches
        ]
        return CoordinateSums(self._settings, self._key, blocks, len(self._settings.layers))

    def _follow_release(self, measured: MeasuredBlocks, facts: RoundFacts) -> dict[str, Any]:
        self._follow_blocks(measured.rows, None, facts)
        return self._coordinate_reading(facts.number)

    def _copied_release(self, measured: MeasuredBlocks) -> Any:
        return {name: copied(row) for name, row in measured.rows.items()}

    def _follow_blocks(self, delta: Rows, others: Rows | None, facts: RoundFacts) -> None:
        """Add the round's noise to the sums that follow each coordinate, with negligible canaries or all other updates."""
        if self._coordinate_sums is None:
            return
        for block, (stretches, place) in enumerate(zip(self._stretches, self._coordinate_sums.places, strict=True)):
            inner = tuple(clip_stretches(stretches, place))
            noise = self._noise(delta, others, facts.number, inner)(block)
            self._follow(block, noise, delta, others, facts, whole=False)

    def _follow(
        self,
        block: int,
        noise: Any,
        delta: Rows,
        others: Rows | None,
        facts: RoundFacts,
        *,
        whole: bool = True,
    ) -> None:
        """Add one block's noise. It is the block's, or if not `whole` that of the followed stretch."""
        sums = self._coordinate_sums
        if sums is None:
            return
        place = sums.places[block]
        inner = tuple(clip_stretches(self._stretches[block], place))
        added = sums.add(
            facts.number,
            block,
            noise[place] if whole else noise,
            gather_block(delta, inner),
            others=None if others is None else gather_block(others, inner),
            stated=facts.noise_std,
            factor=1 + self._settings.momentum,
        )
        if not added:
            sums.leave_out(block, waiting=added is None)

    def _reading(self, number: int) -> dict[str, Any]:
        sums, ranks = self._coordinate_sums, self._ranks
        assert sums is not None

        def measure() -> Floats:
            extremes = np.zeros((ranks.size, CoordinateSums.EXTREMES))
            extremes[ranks.rank] = sums.extremes()
            return np.concatenate([extremes.ravel(), sums.counts()])

        shared = ranks.size * CoordinateSums.EXTREMES
        numbers = ranks.sum_of(shared + sums.counts_size, measure, number=number, arguments={})
        extremes = numbers[:shared].reshape(-1, CoordinateSums.EXTREMES)
        return {"law_coordinates": sums.reading(extremes, numbers[shared:])}

    def _parts_record(self, part_sums: Floats, mean: float) -> dict[str, Any]:
        """Lengths of parts of blocks, corrected for the canaries' mean square, and sketches."""
        settings = self._settings
        if not settings.in_blocks:
            return {}
        sizes = np.repeat([size // settings.chunks for size in settings.block_sizes], settings.chunks)
        squares, sketches = np.split(part_sums, [len(sizes)])
        if not np.isfinite(part_sums).all() or float(np.abs(sketches).max()) > LARGEST_SINGLE:
            return {}  # near the limits of single precision
        return {
            "chunk_rests": np.sqrt(np.maximum(squares - mean * sizes, 0.0)),
            "block_sketches": sketches.astype(np.float32),
        }

    def _law_sums(
        self, measured: MeasuredBlocks, plan: NoisePlan, sizes: LawSizes, facts: RoundFacts, *, subtract: bool
    ) -> Floats:
        """This process's part of the sums that describe the noise."""
        delta, others, present = measured.rows, measured.others, facts.indices
        assert others is not None
        settings, count, number = self._settings, len(self._settings.block_sizes), facts.number
        layers, parts, resolution = LayerSquares(len(settings.layers)), BlockParts(settings), np.zeros(2)
        shared, by_block = sizes.zeros()
        noise_of = self._noise(delta, others, number)
        for block, stretches in enumerate(self._stretches):
            place = settings.law_stretches[self._block_numbers[block]]
            inner = tuple(clip_stretches(stretches, place))
            followed = [gather_block(others, inner, own=True)] if plan.full else []
            if subtract:
                total = self.canaries.combine(block, present, like=self._like(block, delta)) if present else None
                noise = noise_of(block)
                if total is not None:
                    followed.append(copied(total[place]))
                    noise = subtract_piece(noise, slice(0, len(noise)), total, plan.canary_size)
                    del total
                layers.add(noise, stretches)
                parts.add(self._block_numbers[block], noise)
                self._follow(block, noise, delta, others, facts)
                if not plan.measures_law:
                    continue
                noise = copied(noise[place])
            else:  # the canaries are negligible
                noise = self._noise(delta, others, number, inner)(block)
            resolution += self._resolution(delta, others, inner)
            sums = law_sums(
                noise,
                gather_block(delta, inner, own=True) if plan.full else noise,
                self._block_noise_parts[self._block_numbers[block]],
                full=plan.full,
                exact=plan.exact,
                sizes=followed,
                width=zero_width(settings.law_dim),
                blocks=count,
            )
            del noise
            block_sums = by_block[self._block_numbers[block]]
            for name, values in sums.items():
                if name in shared:
                    shared[name] += values
                elif name in block_sums and values.size:
                    block_sums[name][:] = values
        found = [resolution, *shared.values(), *(array for block_sums in by_block for array in block_sums.values())]
        return np.concatenate([*found, layers.sums(), parts.sums()] if subtract else found)

    def _resolution(self, delta: Rows, others: Rows, stretches: Sequence[Stretch]) -> Floats:
        """How coarsely the release and `others` were rounded: the mean over leaves, weighted by size."""
        resolution = np.zeros(2)
        for part in stretches:
            steps = [resolution_of(rows[part.name][part.in_leaf]) for rows in (delta, others)]
            finite = [step for step in steps if step is not None]
            share = (part.stop - part.start) / self._settings.law_dim
            resolution += share * np.array([sum(finite), 12 * min(finite, default=0.0)])
        return resolution

    def _noise(
        self, delta: Rows, others: Rows | None, number: int, stretches: Sequence[Stretch] | None = None
    ) -> Callable[[int], Any]:
        """A function that returns the noise in a block: the release minus `others` and minus the previous round's momentum.

        With `stretches`, only these.
        """
        subtrahends = [] if others is None else [(others, 1.0)]
        if self._settings.momentum and self._previous is not None and self._previous.number == number - 1:
            subtrahends.append((self._previous.release, self._settings.momentum))
        return self._gatherer(delta, *subtrahends, only=stretches)

    def _gatherer(
        self, rows: Rows | None, *subtrahends: tuple[Rows, float], only: Sequence[Stretch] | None = None
    ) -> Callable[[int], Any]:
        """A function that returns one block's vector: of `rows` (zero if None), minus each subtrahend times its factor.

        On a GPU the vector is in the canaries' own buffer: the next vector overwrites it, and so does `products`.
        """

        def gather(block: int) -> Any:
            stretches = self._stretches[block] if only is None else only
            source = subtrahends[0][0] if rows is None else rows
            buffer = self.canaries.room(block, self._like(block, source)) if only is None else None
            vector = gather_block(source, stretches, own=bool(subtrahends), into=buffer)
            if rows is None:
                vector *= 0.0
            for other, factor in subtrahends:
                for part in stretches:
                    vector = subtract_piece(vector, part.in_block, other[part.name][part.in_leaf], factor)
            return vector

        return gather

    def _like(self, block: int, rows: Rows) -> Any:
        """An empty array of the type and precision for computing with a block of these rows."""
        return empty_working_array([rows[part.name] for part in self._stretches[block]])


def _blocks_of(settings: Settings, rank: int) -> tuple[int, int]:
    """The first block of a process, and the one after its last."""
    sizes = settings.block_sizes
    if not settings.shards:
        return 0, len(sizes)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    totals = np.concatenate([[0], np.cumsum([sum(sizes) for sizes in settings.shards])])
    first, stop = np.searchsorted(edges, totals[rank : rank + 2])
    return int(first), int(stop)


def _write_stretch(rows: dict[str, Any], total: Any, factor: float, part: Stretch) -> None:
    rows[part.name] = write_piece(rows[part.name], part.in_leaf, total[part.in_block], factor)
