"""Measure a model in blocks, block by block: no array of the model's size is allocated or sent to another process.

Each process measures its own blocks. It sends only sums to the others: products with the canaries, and a few lengths.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.canaries import philox
from coalmine.canaries.array_types import euclidean_norm
from coalmine.canaries.base import usable
from coalmine.canaries.blocked import BlockedCanaries
from coalmine.canaries.philox import key_from_seed
from coalmine.canaries.rotation_numpy import threads
from coalmine.canaries.secret import SecretBytes, secret_seed
from coalmine.measure.canary_size import canary_size
from coalmine.measure.coordinate_sums import CoordinateSums
from coalmine.measure.expensive_rounds import ExpensiveRounds
from coalmine.measure.flat import NOT_COMPILED
from coalmine.measure.noise_law import (
    MANY_COORDINATES,
    NoiseParts,
    block_sizes,
    is_on_device,
    law_record,
    law_sums,
    measure_law,
    resolution_of,
    summed_sizes,
    zero_width,
)
from coalmine.measure.ranks import Ranks
from coalmine.measure.round import Final, Round, Singles
from coalmine.measure.round_facts import RoundFacts
from coalmine.measure.scale import SMALLEST, block_scale
from coalmine.measure.schedule import schedule_key
from coalmine.measure.settings import Settings
from coalmine.measure.trees import Stretch, Tree, empty_working_array, gather_block, subtract_piece, write_piece
from coalmine.measure.vectors import (
    LONGEST,
    SHORTEST,
    NotFiniteError,
    copied,
    difference,
    is_device_jax,
    is_tensor,
    jax_measures,
    numpy_vector,
    tensor_norm,
)

# The canaries' part of a residual, in standard deviations of its squared length, below which their mean is accurate enough.
SMALL_PART = 0.05
LARGEST_SINGLE = 1e30  # largest entry of a sketch that is stored in single precision
SAME_RELEASE = 1e-5  # relative difference up to which the releases of two processes count as equal


class BlockMeasurer:
    """The blocks of a model in this process, their canaries, and their measurements."""

    def __init__(
        self, tree: Tree, settings: Settings, *, seed: SupportsIndex | bytes, ranks: Ranks, on_host: bool = True
    ) -> None:
        self.tree, self._settings, self._ranks = tree, settings, ranks
        self._on_host = on_host  # whether the whole model is, in every process: then the law is measured in every round
        self._seed = secret_seed(seed)
        self._key = SecretBytes(schedule_key(seed))
        self._expensive_rounds = ExpensiveRounds(settings, self._key)
        self._coordinate_sums: CoordinateSums | None = None  # of the rounds since the last restart
        leaf_sizes = settings.shards[ranks.rank] if settings.shards else tuple(size for _, size in settings.layers)
        first, stop = _blocks_of(settings, ranks.rank)
        self._block_numbers = range(first, stop)  # of this process's blocks, counted over all processes
        self.canaries = BlockedCanaries(
            settings.total, settings.block_sizes[first:stop], seed=seed, first=first, dim=settings.dim
        )
        self._stretches = _block_stretches(settings, leaf_sizes, settings.block_sizes[first:stop])
        self._block_noise_parts = NoiseParts.of_blocks(settings)
        self._model_noise_parts = NoiseParts.of_all(settings)
        # The previous round, for momentum: its number, its rows, and its products with the canaries.
        self._previous: tuple[int, dict[str, Any], Floats] | None = None

    @property
    def rotated_canaries(self) -> NoReturn:
        """A ValueError: no framework's compiler can take canaries in blocks."""
        raise ValueError(NOT_COMPILED)

    def sum_of_canaries(self, indices: list[int], size: float, like: Any = None) -> Any:
        """The sum of the canaries at `indices`, each of norm `size`, in the model's structure; `like` is not needed."""
        rows = self.tree.empty_rows()
        with ThreadPoolExecutor(threads()) as pool:
            # Threads, because the first write to new memory is slow; a GPU's work stays in this thread.
            apply = pool.map if self._on_host else map
            for block, stretches in enumerate(self._stretches):
                like = empty_working_array([rows[part.name] for part in stretches])
                total = self.canaries.combine(block, indices, like=like, unit=True)
                write = partial(_write_stretch, rows, total, size * float(self.canaries.shares[block]))
                list(apply(write, stretches))
        return self.tree.rebuild(rows)

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
        vectors += len(settings.layers)  # lengths of `others`
        if settings.replicated:
            return vectors + settings.law_dim + 2 * self._ranks.size
        return vectors + len(settings.layers) + self._parts_size

    @property
    def _parts_size(self) -> int:
        """The number of lengths in parts of blocks, plus the number of entries of sketches."""
        blocks = len(self._settings.block_sizes)
        return blocks * (self._settings.chunks + self._settings.sketch) if self._settings.in_blocks else 0

    def forget(self) -> None:
        """Forget the previous round, because it was rewound."""
        self._previous = self._coordinate_sums = None

    def read(self, model_delta: Any, others: Any, *, own: bool) -> tuple[Any, Any]:
        """The two arguments of a round unchanged: `round` checks them, together with the other ranks'."""
        return model_delta, others

    def round_later(
        self, model_delta: Any, others: Any, facts: RoundFacts, order: int, *, copy: bool
    ) -> Callable[[], Round] | None:
        """None: blocks are measured at once."""
        return None

    def round(self, model_delta: Any, others: Any, facts: RoundFacts, order: int) -> Round:
        """The record of a round. Every process gets one; of a replicated model, only rank 0's has the law of the noise."""
        sums = self._coordinate_sums
        if sums is None or sums.is_out_of_order(facts.number):
            self._coordinate_sums = self._new_sums()
        try:
            return self._round(model_delta, others, facts, order)
        except Exception:
            self._coordinate_sums = None  # on every rank: all of them fail together
            raise

    def _round(self, model_delta: Any, others: Any, facts: RoundFacts, order: int) -> Round:
        settings, count = self._settings, self._settings.total
        arguments = vars(facts) | {"present": facts.indices, "others": others is not None}
        rows: dict[str, dict[str, Any]] = {}

        def measure() -> Floats:
            rows["delta"] = self.tree.rows("model_delta", model_delta)
            if others is not None:
                rows["others"] = self.tree.rows("others", others)
            return self._round_sums(rows["delta"], rows.get("others"), facts.number)

        blocks = len(settings.block_sizes)
        layers = settings.law_dim if settings.replicated else len(settings.layers)
        sums = self._ranks.sum_of(self._round_size, measure, number=facts.number, arguments=arguments)
        edges = np.cumsum([count + 2 * blocks, count + 2 * blocks, len(settings.layers), layers])
        release_sums, residual_sums, others_squares, layer_sums, last_sums = np.split(sums, edges)
        if settings.replicated:
            _check_same_release(last_sums.reshape(-1, 2))
        release = _Length.of("model_delta", release_sums, settings)
        if release.norm == 0:
            return Round(number=facts.number, skipped=True)
        record: dict[str, Any] = {
            "norm": release.norm,
            "rest": release.rest,
            "cosines": release.cosines,
            "block_rests": release.block_rests,
        }
        if others is not None:
            residual = self._residual_length(residual_sums)
            if residual.norm == 0:
                raise ValueError(
                    "model_delta and others are equal, so no noise and no canary is left; check both arguments"
                )
            record |= {
                f"residual_{name}": getattr(residual, name) for name in ("norm", "rest", "cosines", "block_rests")
            }
            record |= self._residual_record(rows, residual, layer_sums, last_sums, facts, order)
            # In a replicated model each process has a part of `others`: the triangle inequality bounds their sum.
            record["layer_others"] = np.sqrt(others_squares * (self._ranks.size if settings.replicated else 1))
        elif facts.noise_std and self._follows_releases and self._undoes_momentum(facts.number):
            self._follow_blocks(rows["delta"], None, facts)
            record |= self._coordinate_reading(facts.number)
        if settings.momentum:
            copies = {name: copied(row) for name, row in rows["delta"].items()}
            self._previous = (facts.number, copies, release.cosines.astype(np.float64) * release.norm)
        return Round(**vars(facts), **record)

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
        last = _Length.of("model", sums, settings)
        _check_not_zero("model", last.norm)
        followed = self._last_reading()
        if initial is None:
            return Final(norm=last.norm, cosines=last.cosines, block_rests=last.block_rests, **followed)
        sums = self._ranks.sum_of(size + len(settings.layers), measure_update, number=0, arguments=arguments)
        update, moves = _Length.of("model - initial", sums[:size], settings), np.sqrt(sums[size:])
        if update.norm == 0:  # the update has no direction, and the gauges of training report that nothing moved
            return Final(
                norm=last.norm, cosines=last.cosines, block_rests=last.block_rests, layer_moves=moves, **followed
            )
        return Final(
            **followed,
            norm=last.norm,
            cosines=last.cosines,
            block_rests=last.block_rests,
            update_norm=update.norm,
            update_cosines=update.cosines,
            update_block_rests=update.block_rests,
            layer_moves=moves,
        )

    def _round_sums(self, delta: dict[str, Any], others: dict[str, Any] | None, number: int) -> Floats:
        """This process's part of a round's sums: products and lengths of release and residual, and lengths by layer."""
        settings, ranks = self._settings, self._ranks
        release_of = self._gatherer(delta)
        residual_of = None if others is None else self._gatherer(delta, (others, 1.0))
        if settings.replicated and ranks.rank > 0 and others is not None:
            residual_of = self._gatherer(None, (others, 1.0))  # rank 0 adds the release itself
        release, residual = self._sums("model_delta", release_of), self._sums("model_delta - others", residual_of)
        layers, block_parts, lengths = _LayerSquares(len(settings.layers)), _BlockParts(self._settings), []
        undo_momentum = others is not None and settings.momentum > 0 and number > 1 and self._undoes_momentum(number)
        noise_of = self._noise(delta, others or {}, number)
        for block, stretches in enumerate(self._stretches):
            vector = release_of(block)
            if settings.replicated:
                lengths.append(_lazy_square(vector))
            if self._is_mine(block):
                release.add(block, vector)
            if residual_of is None:
                continue
            vector = residual_of(block)
            if not settings.replicated and not undo_momentum:  # before `residual` overwrites it
                layers.add(vector, stretches)
                block_parts.add(self._block_numbers[block], vector)
            residual.add(block, vector)
            if undo_momentum:
                vector = noise_of(block)
                layers.add(vector, stretches)
                block_parts.add(self._block_numbers[block], vector)
        squares = np.zeros(len(settings.layers)) if others is None else self._layer_squares(others)
        sums = [release.sums(), residual.sums(), squares]
        if not settings.replicated:
            return np.concatenate([*sums, layers.sums(), block_parts.sums()])
        stretches = self._sample(number)
        sample = np.zeros(settings.law_dim) if others is None else numpy_vector(gather_block(others, stretches))
        if not np.isfinite(sample).all():
            raise NotFiniteError("others must be finite, got NaN or infinity in it")
        fingerprints = np.zeros((ranks.size, 2))  # see `_check_same_release`
        release_sample = numpy_vector(gather_block(delta, stretches))
        weights = np.cos(np.arange(len(release_sample)))
        fingerprints[ranks.rank] = _to_host(lengths).sum(), float(release_sample @ weights)
        return np.concatenate([*sums, sample, fingerprints.ravel()])

    def _layer_squares(self, rows: dict[str, Any], first: dict[str, Any] | None = None) -> Floats:
        """Squared lengths of this process's part of each layer; with `first`, of the difference from it."""
        stretches = [part for block in self._stretches for part in block]
        parts = [rows[part.name][part.in_leaf] for part in stretches]
        if first is not None:
            others = [first[part.name][part.in_leaf] for part in stretches]
            parts = [difference(one, other) for one, other in zip(parts, others, strict=True)]
        if parts and all(is_tensor(part) and is_on_device(part) and part.device == parts[0].device for part in parts):
            torch = sys.modules["torch"]
            squares = np.square(numpy_vector(torch.stack(torch._foreach_norm(parts, 2, torch.float64))))
        else:
            squares = _to_host([_safe_square(_at_least_single(part)) for part in parts])
        by_layer = np.zeros(len(self._settings.layers))
        np.add.at(by_layer, [part.layer for part in stretches], squares)
        return by_layer

    def _sample(self, number: int) -> tuple[Stretch, ...]:
        """The sampled coordinates of a replicated model: new ones in each round, unless rounds must be compared."""
        return _sampled_stretches(self._settings, self._seed, 0 if self._sample_is_fixed else number)

    @property
    def _sample_is_fixed(self) -> bool:
        return self._settings.noise is not None or self._settings.momentum > 0

    def _sums(self, name: str, gather: "Callable[[int], Any] | None") -> "_VectorSums":
        return _VectorSums(self.canaries, self._settings, self._block_numbers, gather, name)

    def _vector_sums(self, name: str, gather: Callable[[int], Any]) -> Floats:
        """This process's part of a vector's sums: of its own blocks, or of its share of the blocks of a replicated model."""
        sums = self._sums(name, gather)
        for block in range(len(self._stretches)):
            if self._is_mine(block):
                sums.add(block, gather(block))
        return sums.sums()

    def _is_mine(self, block: int) -> bool:
        """Whether this process measures the block. Replicas share the blocks of a vector that all of them have."""
        return not self._settings.replicated or block % self._ranks.size == self._ranks.rank

    def _residual_length(self, sums: Floats) -> "_Length":
        """The residual's length. In a replicated model, it is estimated from the products with the unobserved canaries."""
        settings = self._settings
        if not settings.replicated:
            return _Length.of("model_delta - others", sums, settings)
        products = sums[: settings.total]
        unobserved, observed = products[settings.canaries :], products[: settings.canaries]
        rest = math.sqrt(max(float(np.mean(unobserved**2)), SMALLEST * float(products @ products)) * settings.free)
        norm = math.hypot(rest, float(np.linalg.norm(observed)))
        cosines = products / norm if norm else products
        return _Length(norm, rest, cosines.astype(np.float32), None)

    def _residual_record(
        self,
        rows: dict[str, dict[str, Any]],
        residual: "_Length",
        layer_sums: Floats,
        part_sums: Floats,
        facts: RoundFacts,
        order: int,
    ) -> dict[str, Any]:
        """The fields of a round's record on the residual: lengths by layer, and in some rounds the law of the noise.

        The noise is the residual minus the canaries. `layer_sums` are the squared lengths of the layers or, in a replicated
        model, `others` in the sample. `part_sums` are the squared lengths of parts of blocks, and the blocks' sketches.
        """
        settings, present = self._settings, facts.indices
        if not self._undoes_momentum(facts.number):
            return {}
        scale = residual.rest / math.sqrt(settings.free)
        size, declared = 0.0, True
        if present:
            products = residual.cosines[present].astype(np.float64) * residual.norm
            if settings.momentum and self._previous is not None:
                products = products - settings.momentum * self._previous[2][present]
            size, declared = canary_size(products, residual.rest, facts, settings)
        full = order in self._expensive_rounds
        measures_law = settings.dim <= MANY_COORDINATES or full or self._on_host
        strength = math.sqrt(2 * len(present) / settings.dim) * size / scale
        subtract_canaries = settings.dim <= MANY_COORDINATES or full or abs(strength) >= SMALL_PART
        plan = _LawPlan(full, declared, measures_law, size, subtract_canaries)
        if settings.replicated:
            return self._sampled_law(rows, layer_sums, plan, facts)
        mean = self._mean_square(present, size)
        layer_sizes = np.array([dim for _, dim in settings.layers])
        record: dict[str, Any] = {"layer_rests": np.sqrt(np.maximum(layer_sums - mean * layer_sizes, 0.0))}
        record |= self._parts_record(part_sums, mean)
        if not subtract_canaries:
            self._follow_blocks(rows["delta"], rows["others"], facts)
            if not measures_law:
                return record | self._coordinate_reading(facts.number)
        shared_sizes = summed_sizes(full=full, sizes=2 if present else 1) if measures_law else {}
        block_sum_sizes = self._block_sum_sizes(full=full) if measures_law else []
        law_size = 2 + sum(shared_sizes.values()) + sum(sum(sizes.values()) for sizes in block_sum_sizes)
        plan = replace(plan, shared_sizes=shared_sizes, block_sum_sizes=block_sum_sizes)
        sums = self._ranks.sum_of(
            law_size + (len(settings.layers) + self._parts_size if subtract_canaries else 0),
            lambda: self._law_sums(rows, plan, facts),
            number=facts.number,
            arguments={"present": present},
        )
        if subtract_canaries:
            record["layer_rests"] = np.sqrt(np.maximum(sums[law_size : law_size + len(settings.layers)], 0.0))
            record |= self._parts_record(sums[law_size + len(settings.layers) :], 0.0)
        record |= self._coordinate_reading(facts.number)
        if not measures_law:
            return record
        record |= {"rounding": float(sums[0]), "lattice": float(sums[1])}
        shared, remaining = _unpack(sums[2:law_size], shared_sizes)
        blocks = []
        for sizes in block_sum_sizes:
            block_sums, remaining = _unpack(remaining, sizes)
            blocks.append(block_sums)
        return record | law_record(blocks, shared, self._model_noise_parts, full=full, exact=declared)

    def _new_sums(self) -> CoordinateSums | None:
        """Sums that follow each coordinate, from the next round on; None if this audit does not follow them.

        Several processes do not undo the correlation of the noise together. Replicas follow only a sample that stays the
        same.
        """
        settings = self._settings
        if settings.replicated:
            fixed = settings.law_dim == settings.dim or self._sample_is_fixed
            return CoordinateSums.of_vector(settings, self._key) if fixed else None
        if self._ranks.several and settings.noise is not None:
            return None
        blocks = [
            [(part.layer, part.offset, part.offset + part.stop - part.start) for part in stretches]
            for stretches in self._stretches
        ]
        return CoordinateSums(settings, self._key, blocks, len(settings.layers))

    @property
    def _follows_releases(self) -> bool:
        """Whether coordinates are followed where all other updates are not known."""
        return self._settings.noise is None and not self._settings.replicated

    def _follow_blocks(self, delta: dict[str, Any], others: dict[str, Any] | None, facts: RoundFacts) -> None:
        """Add the round's noise to the sums that follow each coordinate, with negligible canaries or all other updates."""
        if self._coordinate_sums is None:
            return
        for block, (stretches, place) in enumerate(zip(self._stretches, self._coordinate_sums.places, strict=True)):
            inner = tuple(_clip_stretches(stretches, place))
            noise = self._noise(delta, others, facts.number, inner)(block)
            self._follow(block, noise, delta, others, facts, whole=False)

    def _follow(
        self,
        block: int,
        noise: Any,
        delta: dict[str, Any],
        others: dict[str, Any] | None,
        facts: RoundFacts,
        *,
        whole: bool = True,
    ) -> None:
        """Add one block's noise. It is the block's, or if not `whole` that of the followed stretch."""
        sums = self._coordinate_sums
        if sums is None:
            return
        place = sums.places[block]
        inner = tuple(_clip_stretches(self._stretches[block], place))
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

    def _coordinate_reading(self, number: int) -> dict[str, Any]:
        """The reading of the sums after a round, if it is time for one; the processes share it."""
        sums, replicated = self._coordinate_sums, self._settings.replicated
        if sums is None or (replicated and self._ranks.rank) or not sums.end(number):
            return {}
        return self._shared_reading(number)

    def _last_reading(self) -> dict[str, Any]:
        """The reading of the sums after the last round, unless that round has it."""
        sums = self._coordinate_sums
        return self._shared_reading(0) if sums is not None and sums.is_unread else {}

    def _shared_reading(self, number: int) -> dict[str, Any]:
        sums, ranks = self._coordinate_sums, self._ranks
        assert sums is not None
        if self._settings.replicated:
            return {"law_coordinates": sums.read()} if ranks.rank == 0 else {}

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

    def _mean_square(self, present: list[int], size: float) -> float:
        """The mean square that the present canaries add to a coordinate."""
        return size * size * len(present) / self._settings.dim

    def _sampled_law(
        self,
        rows: dict[str, dict[str, Any]],
        others: Floats,
        plan: "_LawPlan",
        facts: RoundFacts,
    ) -> dict[str, Any]:
        """The same for a replicated model, from a sample of its coordinates. Only rank 0, which records it, measures it."""
        settings, number, present = self._settings, facts.number, facts.indices
        stretches = self._sample(number)
        if self._ranks.rank:
            return {}
        release = numpy_vector(gather_block(rows["delta"], stretches))
        noise, sizes = release - others, [others]
        if settings.momentum and number > 1 and self._previous is not None:
            noise = noise - settings.momentum * numpy_vector(gather_block(self._previous[1], stretches))
        mean = self._mean_square(present, plan.canary_size)
        if present and plan.subtract_canaries:
            like = {name: row[:0] for name, row in rows["delta"].items()}
            total = self._sampled_canaries(present, like, stretches)
            sizes.append(total)
            noise, mean = noise - total * plan.canary_size, 0.0
        squares = [
            float(noise[part.in_block] @ noise[part.in_block]) - mean * (part.stop - part.start) for part in stretches
        ]
        record: dict[str, Any] = {"layer_rests": np.sqrt(np.maximum(squares, 0.0))}
        if plan.measures_law:
            steps = self._resolution(rows, stretches)
            record |= {"rounding": float(steps[0]) * self._ranks.size, "lattice": float(steps[1])}
            record |= measure_law(
                noise, release, self._model_noise_parts, full=plan.full, exact=plan.exact, sizes=sizes
            )
        return record | self._follow_sample(noise, release, others, facts)

    def _follow_sample(self, noise: Floats, release: Floats, others: Floats, facts: RoundFacts) -> dict[str, Any]:
        """Follow the sampled coordinates of a replicated model, if they are the same in every round."""
        sums = self._coordinate_sums
        if sums is None:
            return {}
        place, factor = sums.places[0], 1 + self._settings.momentum
        added = sums.add(
            facts.number, 0, noise[place], release[place], others=others[place], stated=facts.noise_std, factor=factor
        )
        return self._coordinate_reading(facts.number) if added else {}

    def _sampled_canaries(self, present: list[int], like: dict[str, Any], sampled: Sequence[Stretch]) -> Floats:
        """The sum of the present canaries in the sample."""
        sample = np.zeros(self._settings.law_dim)
        for block, stretches in enumerate(self._stretches):
            pairs = [(part, one) for part in stretches for one in sampled if part.layer == one.layer]
            overlaps = [(part, one, max(part.start, one.start), min(part.stop, one.stop)) for part, one in pairs]
            if not any(first < last for *_, first, last in overlaps):
                continue
            total = self.canaries.combine(
                block, present, like=empty_working_array([like[part.name] for part in stretches])
            )
            for part, one, first, last in overlaps:
                if first < last:
                    piece = total[part.offset + first - part.start : part.offset + last - part.start]
                    sample[one.offset + first - one.start : one.offset + last - one.start] = numpy_vector(piece)
        return sample

    def _block_sum_sizes(self, *, full: bool) -> list[dict[str, int]]:
        """For every block of every process, the sizes of the sums that are kept for each block."""
        places = self._settings.law_stretches
        return [
            block_sizes(part, dim=place.stop - place.start, number=number, blocks=len(places), full=full)
            for number, (part, place) in enumerate(zip(self._block_noise_parts, places, strict=True))
        ]

    def _law_sums(self, rows: dict[str, dict[str, Any]], plan: "_LawPlan", facts: RoundFacts) -> Floats:
        """This process's part of the sums that describe the noise."""
        present = facts.indices
        settings, count, number = self._settings, len(self._settings.block_sizes), facts.number
        layers, block_parts, resolution = _LayerSquares(len(settings.layers)), _BlockParts(settings), np.zeros(2)
        shared = {name: np.zeros(size) for name, size in plan.shared_sizes.items()}
        by_block = [{name: np.zeros(size) for name, size in sizes.items()} for sizes in plan.block_sum_sizes]
        noise_of = self._noise(rows["delta"], rows["others"], number)
        for block, stretches in enumerate(self._stretches):
            place = settings.law_stretches[self._block_numbers[block]]
            inner = tuple(_clip_stretches(stretches, place))
            sizes = [gather_block(rows["others"], inner, own=True)] if plan.full else []
            if plan.subtract_canaries:
                like = self._like(block, rows["delta"])
                total = self.canaries.combine(block, present, like=like) if present else None
                noise = noise_of(block)
                if total is not None:
                    sizes.append(copied(total[place]))
                    noise = subtract_piece(noise, slice(0, len(noise)), total, plan.canary_size)
                    del total
                layers.add(noise, stretches)
                block_parts.add(self._block_numbers[block], noise)
                self._follow(block, noise, rows["delta"], rows["others"], facts)
                if not plan.measures_law:
                    continue
                noise = copied(noise[place])
            else:  # the canaries are negligible
                noise = self._noise(rows["delta"], rows["others"], number, inner)(block)
            resolution += self._resolution(rows, inner)
            sums = law_sums(
                noise,
                gather_block(rows["delta"], inner, own=True) if plan.full else noise,
                self._block_noise_parts[self._block_numbers[block]],
                full=plan.full,
                exact=plan.exact,
                sizes=sizes,
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
        parts = [resolution, *shared.values(), *(array for block_sums in by_block for array in block_sums.values())]
        return np.concatenate([*parts, layers.sums(), block_parts.sums()] if plan.subtract_canaries else parts)

    def _resolution(self, rows: dict[str, dict[str, Any]], stretches: Sequence[Stretch]) -> Floats:
        """How coarsely the release and `others` were rounded: the mean over leaves, weighted by size."""
        resolution = np.zeros(2)
        for part in stretches:
            steps = [resolution_of(rows[kind][part.name][part.in_leaf]) for kind in ("delta", "others")]
            finite = [step for step in steps if step is not None]
            share = (part.stop - part.start) / self._settings.law_dim
            resolution += share * np.array([sum(finite), 12 * min(finite, default=0.0)])
        return resolution

    def _undoes_momentum(self, number: int) -> bool:
        """Whether the momentum of the previous round can be subtracted, or there is none."""
        if not self._settings.momentum or number == 1:
            return True
        return self._previous is not None and self._previous[0] == number - 1

    def _noise(
        self,
        delta: dict[str, Any],
        others: dict[str, Any] | None,
        number: int,
        stretches: Sequence[Stretch] | None = None,
    ) -> Callable[[int], Any]:
        """A function that returns the noise in a block: the release minus `others` and minus the previous round's momentum.

        With `stretches`, only these.
        """
        subtrahends = [] if others is None else [(others, 1.0)]
        if self._settings.momentum and self._previous is not None and self._previous[0] == number - 1:
            subtrahends.append((self._previous[1], self._settings.momentum))
        return self._gatherer(delta, *subtrahends, only=stretches)

    def _gatherer(
        self,
        rows: dict[str, Any] | None,
        *subtrahends: tuple[dict[str, Any], float],
        only: Sequence[Stretch] | None = None,
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

    def _like(self, block: int, rows: dict[str, Any]) -> Any:
        """An empty array of the type and precision for computing with a block of these rows."""
        return empty_working_array([rows[part.name] for part in self._stretches[block]])


@dataclass(frozen=True)
class _Length:
    """A vector's norm, its norm orthogonal to the observed canaries (whole and by block), and its cosines."""

    norm: float
    rest: float
    cosines: Singles
    block_rests: Floats | None

    @classmethod
    def of(cls, name: str, sums: Floats, settings: Settings) -> "_Length":
        blocks = len(settings.block_sizes)
        products, rests, squares = np.split(sums, [settings.total, settings.total + blocks])
        norm = math.sqrt(float(squares.sum()))
        if norm == 0:
            return cls(0.0, 0.0, products.astype(np.float32), None)
        if not np.isfinite(norm):
            raise NotFiniteError(
                f"{name} must be finite, got NaN or infinity in it, or numbers too large to be squared"
            )
        if not SHORTEST < norm < LONGEST:
            raise ValueError(f"{name} must have a length between {SHORTEST:g} and {LONGEST:g}, got {norm:.3g}")
        lengths = np.sqrt(rests)
        scale, _, _ = block_scale(lengths, settings)
        several = len(settings.blocks) > 1
        return cls(
            norm, scale * math.sqrt(settings.free), (products / norm).astype(np.float32), lengths if several else None
        )


def _blocks_of(settings: Settings, rank: int) -> tuple[int, int]:
    """The first block of a process, and the one after its last."""
    sizes = settings.block_sizes
    if not settings.shards:
        return 0, len(sizes)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    totals = np.concatenate([[0], np.cumsum([sum(sizes) for sizes in settings.shards])])
    first, stop = np.searchsorted(edges, totals[rank : rank + 2])
    return int(first), int(stop)


def _sampled_stretches(settings: Settings, seed: SupportsIndex | bytes, number: int) -> tuple[Stretch, ...]:
    """A stretch of each layer, whose noise is measured. Its start is as secret as the canaries."""
    key, sampled, offset = key_from_seed(seed), [], 0
    for layer, ((name, whole), (_, size)) in enumerate(zip(settings.layers, settings.gauged_layers, strict=True)):
        index = layer + len(settings.layers) * number
        word = int(philox.words(key, domain=philox.SAMPLED_PLACES, dim=settings.dim, index=index, count=1)[0])
        start = word * (whole - size + 1) >> 64
        sampled.append(Stretch(name, layer, start, start + size, offset))
        offset += size
    return tuple(sampled)


def _clip_stretches(stretches: Sequence[Stretch], place: slice) -> Iterator[Stretch]:
    """The stretches inside the range `place` of a block, with offsets from the start of that range."""
    for part in stretches:
        first, last = max(part.in_block.start, place.start), min(part.in_block.stop, place.stop)
        if first < last:
            shift = first - part.in_block.start
            yield Stretch(
                part.name, part.layer, part.start + shift, part.start + shift + last - first, first - place.start
            )


def _block_stretches(settings: Settings, leaf_sizes: Sequence[int], sizes: Sequence[int]) -> list[tuple[Stretch, ...]]:
    """For each block of a process, the stretches of leaves that make it up."""
    edges = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    blocks: list[list[Stretch]] = [[] for _ in sizes]
    place = 0
    for layer, ((name, _), size) in enumerate(zip(settings.layers, leaf_sizes, strict=True)):
        start = 0
        while start < size:
            block = int(np.searchsorted(edges, place, side="right")) - 1
            length = min(size - start, int(edges[block + 1]) - place)
            blocks[block].append(Stretch(name, layer, start, start + length, place - int(edges[block])))
            start, place = start + length, place + length
    return [tuple(parts) for parts in blocks]


class _VectorSums:
    """Sums of a vector: its products with all canaries, and for each block the squared length.

    The squared length is stored twice: orthogonal to the observed canaries, and whole. Blocks are added in order. On a GPU,
    only `sums` waits for results.
    """

    def __init__(
        self,
        canaries: BlockedCanaries,
        settings: Settings,
        block_numbers: range,
        gather: Callable[[int], Any] | None,
        name: str,
    ) -> None:
        self._name = name
        self._canaries, self._settings, self._block_numbers, self._gather = canaries, settings, block_numbers, gather
        self._needs_exact = False
        self._blocks: list[int] = []
        self._products: list[Any] = []
        self._squares: list[Any] = []
        self._alongs: list[Any] = []

    def add(self, block: int, vector: Any) -> None:
        """Add the next block."""
        square = _lazy_square(vector)
        self._blocks.append(block)
        if not is_on_device(vector) and square != 0 and not usable(math.sqrt(max(float(square), 0.0))):
            self._needs_exact = True  # the rotation would overflow or underflow
        if self._needs_exact:
            return
        products = self._canaries.products(block, vector)
        observed = products[: self._settings.canaries]
        self._squares.append(square)
        self._alongs.append(observed @ observed)
        share = float(self._canaries.shares[block])
        if not self._products or _device_of(products) != _device_of(self._products[-1]):
            self._products.append(products * share)
        elif is_tensor(products):
            self._products[-1].add_(products, alpha=share)
        else:
            self._products[-1] += products * share

    def sums(self) -> Floats:
        """The sums, on the host. Raises ValueError if they are not finite."""
        if self._needs_exact:
            return self._exact_sums()
        count, total = self._settings.total, len(self._settings.block_sizes)
        sums = np.zeros(count + 2 * total)
        for products in self._products:
            sums[:count] += numpy_vector(products)
        squares, alongs = _to_host(self._squares), _to_host(self._alongs)
        lengths = np.sqrt(np.maximum(squares, 0.0))
        if not np.isfinite(sums).all() or not all(length == 0 or usable(length) for length in lengths.tolist()):
            return self._exact_sums()
        for block, square, along in zip(self._blocks, squares, alongs, strict=True):
            place = count + self._block_numbers[block]
            sums[place], sums[place + total] = max(square - along, SMALLEST * square), square
        return sums

    def _exact_sums(self) -> Floats:
        """The same for lengths near the limits of single precision."""
        assert self._gather is not None
        count, observed, total = self._settings.total, self._settings.canaries, len(self._settings.block_sizes)
        sums = np.zeros(count + 2 * total)
        for block in self._blocks:
            vector = numpy_vector(self._gather(block))
            if not np.isfinite(vector).all():
                raise NotFiniteError(f"{self._name} must be finite, got NaN or infinity in it")
            products = self._canaries.slow_products(block, vector)
            sums[:count] += products * float(self._canaries.shares[block])
            with np.errstate(over="ignore"):
                square, along = float(vector @ vector), float(products[:observed] @ products[:observed])
            place = count + self._block_numbers[block]
            sums[place], sums[place + total] = max(square - along, SMALLEST * square), square
        return sums


class _BlockParts:
    """Squared lengths of equal parts of blocks, and sketches of blocks.

    A sketch sums the numbers at regular intervals with alternating signs. Blocks with the same noise have the same sketch,
    and a constant vector has a sketch of zeros.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._measured: list[tuple[int, Any, Any]] = []

    def add(self, number: int, vector: Any) -> None:
        """Add a block. Its number counts over all processes."""
        if not self._settings.in_blocks:
            return
        chunks, size = self._settings.chunks, self._settings.sketch
        each, rows = len(vector) // chunks, len(vector) // (2 * size)
        parts = vector[: each * chunks].reshape(chunks, each)
        pairs = vector[: rows * 2 * size].reshape(rows, 2, size)
        if is_device_jax(vector):
            self._measured.append((number, *jax_measures().block_parts(vector, chunks=chunks, sketch=size)))
            return
        if is_tensor(vector):
            torch = sys.modules["torch"]
            squares, sums = torch.linalg.vector_norm(parts, dim=1).double() ** 2, pairs.sum(0).double()
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                squares = np.array([euclidean_norm(part) ** 2 for part in parts])
                sums = pairs.sum(axis=0, dtype=np.float64)
        with np.errstate(invalid="ignore"):  # infinities, which the lengths report
            self._measured.append((number, squares, sums[0] - sums[1]))

    def sums(self) -> Floats:
        """The numbers of all blocks, with zeros for blocks of other processes."""
        settings = self._settings
        if not settings.in_blocks:
            return np.zeros(0)
        blocks = len(settings.block_sizes)
        squares, sketches = np.zeros((blocks, settings.chunks)), np.zeros((blocks, settings.sketch))
        for number, lengths, sketch in self._measured:
            squares[number], sketches[number] = numpy_vector(lengths), numpy_vector(sketch)
        return np.concatenate([squares.ravel(), sketches.ravel()])


class _LayerSquares:
    """Squared lengths by layer, summed over blocks."""

    def __init__(self, layers: int) -> None:
        self._totals = np.zeros(layers)
        self._layers: list[int] = []
        self._squares: list[Any] = []

    def add(self, vector: Any, stretches: Sequence[Stretch]) -> None:
        """Add the next block."""
        self._layers += [part.layer for part in stretches]
        self._squares += [_safe_square(vector[part.in_block]) for part in stretches]

    def sums(self) -> Floats:
        """The squared lengths, on the host."""
        np.add.at(self._totals, self._layers, _to_host(self._squares))
        return self._totals


@dataclass(frozen=True)
class _LawPlan:
    """Which measurements of the noise a round takes, and the sizes of their sums."""

    full: bool
    exact: bool  # the canaries have their declared norm
    measures_law: bool
    canary_size: float  # the norm of each present canary
    subtract_canaries: bool = (
        True  # otherwise lengths are corrected by the canaries' mean square, which is accurate enough
    )
    shared_sizes: dict[str, int] = field(default_factory=dict)  # of sums over all blocks
    block_sum_sizes: list[dict[str, int]] = field(default_factory=list)  # of sums that are kept for each block


def _write_stretch(rows: dict[str, Any], total: Any, factor: float, part: Stretch) -> None:
    rows[part.name] = write_piece(rows[part.name], part.in_leaf, total[part.in_block], factor)


def _device_of(vector: Any) -> Any:
    return vector.device if is_tensor(vector) or is_device_jax(vector) else None


def _lazy_square(vector: Any) -> Any:
    """The squared length in float64. On a GPU it takes few kernel launches and does not wait for the result."""
    if is_device_jax(vector):
        return jax_measures().length(vector) ** 2
    if not is_tensor(vector):
        return euclidean_norm(vector) ** 2
    if vector.device.type == "cpu":
        return tensor_norm(vector) ** 2
    return sys.modules["torch"].linalg.vector_norm(vector).double() ** 2


def _safe_square(vector: Any) -> Any:
    """The squared length of a vector of any norm on the host. On a GPU it is not checked, to avoid waiting."""
    square = _lazy_square(vector)
    if is_on_device(vector) or usable(math.sqrt(float(square))):
        return square
    exact = numpy_vector(vector)  # squares underflow or overflow in single precision
    with np.errstate(over="ignore"):
        return float(exact @ exact)


def _at_least_single(vector: Any) -> Any:
    """The array in at least single precision: numpy has no bfloat16, and sums float16 in float16."""
    unchanged = is_tensor(vector) or is_device_jax(vector) or vector.dtype.itemsize > 2
    return vector if unchanged else np.asarray(vector, dtype=np.float32)


def _to_host(values: Sequence[Any]) -> Floats:
    """The numbers on the host. Those on one device are transferred together."""
    tensors = [value for value in values if is_tensor(value)]
    if tensors and len(tensors) == len(values) and len({value.device for value in tensors}) == 1:
        torch = sys.modules["torch"]
        return numpy_vector(torch.stack([value.double() for value in tensors]))
    if any(is_device_jax(value) for value in values):
        return np.asarray(jax_measures().numbers(list(values)))
    return np.array([float(value) for value in values], dtype=np.float64)


def _unpack(numbers: Floats, sizes: dict[str, int]) -> tuple[dict[str, Floats], Floats]:
    """The arrays of these sizes at the start of `numbers`, by name, and the remaining numbers."""
    arrays, place = {}, 0
    for name, size in sizes.items():
        arrays[name], place = numbers[place : place + size], place + size
    return arrays, numbers[place:]


def _check_same_release(fingerprints: Floats) -> None:
    """Raise ValueError if the processes of a replicated model have different releases.

    `fingerprints` has, for each process, the squared length of its release and a weighted sum of its sample.
    """
    lengths = np.sqrt(fingerprints[:, 0])
    differences = np.maximum(np.abs(lengths - lengths[0]), np.abs(fingerprints[:, 1] - fingerprints[0, 1]))
    if float(differences.max()) > SAME_RELEASE * float(lengths.max()):
        raise ValueError(
            "model_delta must be the same on every rank of a replicated model, but rank "
            f"{int(np.argmax(differences))} has another one than rank 0"
        )


def _check_not_zero(name: str, norm: float) -> None:
    if norm == 0:
        raise ValueError(f"{name} must not be zero, which has no direction; was the model ever updated?")
