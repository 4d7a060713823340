"""A round of a model in blocks, measured block by block: nothing of the model's size is made, or sent to another process.

Each process measures the blocks that it holds. What leaves it are sums: products with the canaries, and a few lengths.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.audit.noise_law import (
    MANY_COORDINATES,
    NoiseParts,
    block_sizes,
    is_full,
    is_on_device,
    law_record,
    law_sums,
    measure_law,
    resolution_of,
    summed_sizes,
    zero_width,
)
from coalmine.audit.ranks import Ranks
from coalmine.audit.trees import Stretch, Tree, fill, gathered, take_away, template
from coalmine.audit.vectors import (
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
from coalmine.audit.views import SMALLEST, block_scale
from coalmine.canaries import philox
from coalmine.canaries.array_types import euclidean_norm
from coalmine.canaries.base import usable
from coalmine.canaries.blocked import BlockedCanaries
from coalmine.canaries.philox import key_from_seed
from coalmine.canaries.rotation_numpy import threads
from coalmine.canaries.secret import secret_seed
from coalmine.storage.record import Settings
from coalmine.storage.rounds_file import Final, Round, Singles

SMALL_PART = (
    0.05  # of the canaries in a residual, in standard deviations of its squared length: then their mean is enough
)
LARGEST_SINGLE = 1e30  # a canary's measured length, beyond which single precision overflows
SAME_RELEASE = 1e-5  # relative difference of a length that every process should see alike


class Pieces:
    """The blocks of a model that this process holds, and what is measured of them."""

    def __init__(
        self, tree: Tree, settings: Settings, *, seed: SupportsIndex | bytes, ranks: Ranks, on_host: bool = True
    ) -> None:
        self.tree, self._settings, self._ranks = tree, settings, ranks
        self._on_host = on_host  # all of the model, in every process: then the law is cheap enough for every round
        self._seed = secret_seed(seed)
        held = settings.shards[ranks.rank] if settings.shards else tuple(size for _, size in settings.layers)
        first, stop = _blocks_of(settings, ranks.rank)
        self._numbers = range(first, stop)  # of the blocks here, among all
        self.canaries = BlockedCanaries(
            settings.total, settings.block_sizes[first:stop], seed=seed, first=first, dim=settings.dim
        )
        self._stretches = _stretches(settings, held, settings.block_sizes[first:stop])
        self._all_parts = NoiseParts.of_blocks(settings)
        self._whole = NoiseParts.of_all(settings)
        self._before: tuple[int, dict[str, Any], Floats] | None = None

    def sum_of_canaries(self, indices: list[int], size: float) -> Any:
        """The sum of the canaries at `indices`, each of norm `size`, in the model's structure."""
        rows = self.tree.empty_rows()
        with ThreadPoolExecutor(threads()) as pool:
            each = (
                pool.map if self._on_host else map
            )  # fresh memory is slow to touch; a GPU's work stays in this thread
            for block, stretches in enumerate(self._stretches):
                like = template([rows[part.name] for part in stretches])
                total = self.canaries.combine(block, indices, like=like, unit=True)
                write = partial(_write, rows, total, size * float(self.canaries.shares[block]))
                list(each(write, stretches))
        return self.tree.rebuilt(rows)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks, which wait for this one's part of a round, that it will not come."""

        def fail() -> Floats:
            raise error

        if self._ranks.several:
            self._ranks.sum_of(self._round_size, fail, number=0, told={})

    @property
    def _round_size(self) -> int:
        """How many numbers are summed over processes in a round."""
        settings = self._settings
        vectors = 2 * (settings.total + 2 * len(settings.block_sizes))
        vectors += len(settings.layers)  # lengths of everybody else's part
        if settings.replicated:
            return vectors + settings.law_dim + 2 * self._ranks.size
        return vectors + len(settings.layers) + self._parts_size

    @property
    def _parts_size(self) -> int:
        """How many numbers there are of lengths in parts of blocks, and of sketches."""
        blocks = len(self._settings.block_sizes)
        return blocks * (self._settings.chunks + self._settings.sketch) if self._settings.in_blocks else 0

    def forget(self) -> None:
        """Forget the round before, which was rewound."""
        self._before = None

    def round(self, model_delta: Any, others: Any, present: list[int], facts: dict[str, Any], order: int) -> Round:
        """The record of a round, which every process has in the end."""
        settings, count = self._settings, self._settings.total
        told = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in facts.items()}
        told["others"] = others is not None
        given: dict[str, dict[str, Any]] = {}

        def measure() -> Floats:
            given["delta"] = self.tree.rows("model_delta", model_delta)
            if others is not None:
                given["others"] = self.tree.rows("others", others)
            return self._measured(given["delta"], given.get("others"), facts["number"])

        blocks = len(settings.block_sizes)
        layers = settings.law_dim if settings.replicated else len(settings.layers)
        sums = self._ranks.sum_of(self._round_size, measure, number=facts["number"], told=told)
        places = np.cumsum([count + 2 * blocks, count + 2 * blocks, len(settings.layers), layers])
        release, left, squares, beside, rest = np.split(sums, places)
        if settings.replicated:
            _check_same(rest.reshape(-1, 2))
        whole = _Length.of("model_delta", release, settings)
        if whole.norm == 0:
            return Round(number=facts["number"], skipped=True)
        record: dict[str, Any] = {
            "norm": whole.norm,
            "rest": whole.rest,
            "cosines": whole.cosines,
            "block_rests": whole.block_rests,
        }
        if others is not None:
            residual = self._residual(left)
            if residual.norm == 0:
                raise ValueError(
                    "model_delta and others are equal: no noise and no canary is left; are they what they say?"
                )
            record |= {
                f"residual_{name}": getattr(residual, name) for name in ("norm", "rest", "cosines", "block_rests")
            }
            record |= self._beside(given, residual, beside, rest, present, facts, order)
            # Of a replicated model each process knows its own part: by the triangle inequality the sum is no longer.
            record["layer_others"] = np.sqrt(squares * (self._ranks.size if settings.replicated else 1))
        if settings.momentum:
            copies = {name: copied(row) for name, row in given["delta"].items()}
            self._before = (facts["number"], copies, whole.cosines.astype(np.float64) * whole.norm)
        return Round(**facts, **record)

    def final(self, model: Any, initial: Any = None) -> Final:
        """The record of the final model."""
        settings = self._settings
        size = settings.total + 2 * len(settings.block_sizes)

        def of_model() -> Floats:
            return self._vector_sums("model", self._gatherer(self.tree.rows("model", model)))

        def of_update() -> Floats:
            rows, first = self.tree.rows("model", model), self.tree.rows("initial", initial)
            squares = self._leaf_squares(rows, first) / (self._ranks.size if settings.replicated else 1)
            return np.concatenate([self._vector_sums("model - initial", self._gatherer(rows, (first, 1.0))), squares])

        told = {"initial": initial is not None}
        found = self._ranks.sum_of(size, of_model, number=0, told=told)
        last = _Length.of("model", found, settings)
        _refuse_zero("model", last.norm)
        if initial is None:
            return Final(norm=last.norm, cosines=last.cosines, block_rests=last.block_rests)
        found = self._ranks.sum_of(size + len(settings.layers), of_update, number=0, told=told)
        moved, moves = _Length.of("model - initial", found[:size], settings), np.sqrt(found[size:])
        if moved.norm == 0:  # nothing moved, so there is no direction to compare with: the gauges of training say so
            return Final(norm=last.norm, cosines=last.cosines, block_rests=last.block_rests, layer_moves=moves)
        return Final(
            norm=last.norm,
            cosines=last.cosines,
            block_rests=last.block_rests,
            update_norm=moved.norm,
            update_cosines=moved.cosines,
            update_block_rests=moved.block_rests,
            layer_moves=moves,
        )

    def _measured(self, delta: dict[str, Any], others: dict[str, Any] | None, number: int) -> Floats:
        """What this process has to add: products and lengths of the release, of the residual, and of its layers."""
        settings, ranks = self._settings, self._ranks
        release_of = self._gatherer(delta)
        left_of = None if others is None else self._gatherer(delta, (others, 1.0))
        if settings.replicated and ranks.rank > 0 and others is not None:
            left_of = self._gatherer(None, (others, 1.0))  # the release itself is rank 0's part
        release, left = self._sums("model_delta", release_of), self._sums("model_delta - others", left_of)
        layers, parts_of, lengths = _LayerSquares(len(settings.layers)), self._block_parts(), []
        undone = others is not None and settings.momentum > 0 and number > 1 and self._undoes_momentum(number)
        noise_of = self._noise(delta, others or {}, number)
        for block, stretches in enumerate(self._stretches):
            vector = release_of(block)
            if settings.replicated:
                lengths.append(_lazy_square(vector))
            if self._is_mine(block):
                release.add(block, vector)
            if left_of is None:
                continue
            vector = left_of(block)
            if not settings.replicated and not undone:  # before it is overwritten
                layers.add(vector, stretches)
                parts_of.add(self._numbers[block], vector)
            left.add(block, vector)
            if undone:
                vector = noise_of(block)
                layers.add(vector, stretches)
                parts_of.add(self._numbers[block], vector)
        squares = np.zeros(len(settings.layers)) if others is None else self._leaf_squares(others)
        parts = [release.numbers(), left.numbers(), squares]
        if not settings.replicated:
            return np.concatenate([*parts, layers.numbers(), parts_of.numbers()])
        places = self._sampled(number)
        sample = np.zeros(settings.law_dim) if others is None else numpy_vector(gathered(others, places))
        if not np.isfinite(sample).all():
            raise NotFiniteError("others must be finite, got NaN or infinity in it")
        own = np.zeros((ranks.size, 2))
        seen = numpy_vector(gathered(delta, places))
        own[ranks.rank] = _numbers(lengths).sum(), float(seen @ np.cos(np.arange(len(seen))))
        return np.concatenate([*parts, sample, own.ravel()])

    def _leaf_squares(self, rows: dict[str, Any], first: dict[str, Any] | None = None) -> Floats:
        """Squared lengths of this process's part of each layer, or of its difference from `first`."""
        stretches = [part for block in self._stretches for part in block]
        parts = [rows[part.name][part.here] for part in stretches]
        if first is not None:
            others = [first[part.name][part.here] for part in stretches]
            parts = [difference(one, other) for one, other in zip(parts, others, strict=True)]
        if parts and all(is_tensor(part) and is_on_device(part) and part.device == parts[0].device for part in parts):
            torch = sys.modules["torch"]
            squares = np.square(numpy_vector(torch.stack(torch._foreach_norm(parts, 2, torch.float64))))
        else:
            squares = _numbers([_safe_square(_single(part)) for part in parts])
        found = np.zeros(len(self._settings.layers))
        np.add.at(found, [part.layer for part in stretches], squares)
        return found

    def _block_parts(self) -> "_BlockParts":
        return _BlockParts(self._settings)

    def _sampled(self, number: int) -> tuple[Stretch, ...]:
        """The sample of a replicated model in a round: another one in each, unless rounds must be compared."""
        still = self._settings.noise is not None or self._settings.momentum > 0
        return _sampled_stretches(self._settings, self._seed, 0 if still else number)

    def _sums(self, name: str, gather: "Callable[[int], Any] | None") -> "_VectorSums":
        return _VectorSums(self.canaries, self._settings, self._numbers, gather, name)

    def _vector_sums(self, name: str, gather: Callable[[int], Any]) -> Floats:
        """The sums of a vector that every process holds its own blocks of, or of which replicas share the work."""
        sums = self._sums(name, gather)
        for block in range(len(self._stretches)):
            if self._is_mine(block):
                sums.add(block, gather(block))
        return sums.numbers()

    def _is_mine(self, block: int) -> bool:
        """Whether this process measures a block of a vector that all replicas have."""
        return not self._settings.replicated or block % self._ranks.size == self._ranks.rank

    def _residual(self, sums: Floats) -> "_Length":
        """The residual's length: where every process has a part of it, that along the unobserved canaries."""
        settings = self._settings
        if not settings.replicated:
            return _Length.of("model_delta - others", sums, settings)
        along = sums[: settings.total]
        unseen, seen = along[settings.canaries :], along[: settings.canaries]
        rest = math.sqrt(max(float(np.mean(unseen**2)), SMALLEST * float(along @ along)) * settings.free)
        norm = math.hypot(rest, float(np.linalg.norm(seen)))
        cosines = along / norm if norm else along
        return _Length(norm, rest, cosines.astype(np.float32), None)

    def _beside(
        self,
        given: dict[str, dict[str, Any]],
        residual: "_Length",
        beside: Floats,
        parts: Floats,
        present: list[int],
        facts: dict[str, Any],
        order: int,
    ) -> dict[str, Any]:
        """Lengths by layer, and in some rounds the law of the noise: what is left when the canaries are taken out too.

        `beside` are the squared lengths of the layers or, of a replicated model, what everybody else adds up to in a sample,
        `parts` the squared lengths in parts of blocks, and the blocks' sketches.
        """
        settings = self._settings
        if not self._undoes_momentum(facts["number"]):
            return {}
        scale = residual.rest / math.sqrt(settings.free)
        size, declared = 0.0, True
        if present:
            along = residual.cosines[present].astype(np.float64) * residual.norm
            if settings.momentum and self._before is not None:
                along = along - settings.momentum * self._before[2][present]
            size, declared = canary_size(along, residual.rest, facts, settings)
        full = is_full(order, settings.dim)
        measures_law = settings.dim <= MANY_COORDINATES or full or self._on_host
        strength = math.sqrt(2 * len(present) / settings.dim) * size / scale
        exactly = settings.dim <= MANY_COORDINATES or full or abs(strength) >= SMALL_PART
        plan = _LawPlan(full, declared, measures_law, size, exactly)
        if settings.replicated:
            return self._sampled_law(given, beside, present, plan, facts["number"])
        mean = self._mean_square(present, size)
        sizes = np.array([layer for _, layer in settings.layers])
        found: dict[str, Any] = {"layer_rests": np.sqrt(np.maximum(beside - mean * sizes, 0.0))}
        found |= self._parts_record(parts, mean)
        if not measures_law and not exactly:
            return found
        summed = summed_sizes(full=full, sizes=2 if present else 1) if measures_law else {}
        slots = self._slots(full=full) if measures_law else []
        law = 2 + sum(summed.values()) + sum(sum(wanted.values()) for wanted in slots)
        plan = replace(plan, summed=summed, slots=slots)
        sums = self._ranks.sum_of(
            law + (len(settings.layers) + self._parts_size if exactly else 0),
            lambda: self._law_numbers(given, present, plan, facts["number"]),
            number=facts["number"],
            told={"present": present},
        )
        if exactly:
            found["layer_rests"] = np.sqrt(np.maximum(sums[law : law + len(settings.layers)], 0.0))
            found |= self._parts_record(sums[law + len(settings.layers) :], 0.0)
        if not measures_law:
            return found
        found |= {"rounding": float(sums[0]), "lattice": float(sums[1])}
        together, rest = _unpacked(sums[2:law], summed)
        blocks = []
        for wanted in slots:
            own, rest = _unpacked(rest, wanted)
            blocks.append(own)
        return found | law_record(blocks, together, self._whole, full=full, exact=declared)

    def _parts_record(self, parts: Floats, mean: float) -> dict[str, Any]:
        """Lengths in parts of blocks, less what canaries add on average, and sketches."""
        settings = self._settings
        if not settings.in_blocks:
            return {}
        sizes = np.repeat([size // settings.chunks for size in settings.block_sizes], settings.chunks)
        squares, sketches = np.split(parts, [len(sizes)])
        if not np.isfinite(parts).all() or float(np.abs(sketches).max()) > LARGEST_SINGLE:
            return {}  # at the end of single precision's range
        return {
            "chunk_rests": np.sqrt(np.maximum(squares - mean * sizes, 0.0)),
            "block_sketches": sketches.astype(np.float32),
        }

    def _mean_square(self, present: list[int], size: float) -> float:
        """What the present canaries add to the square of a coordinate, on average."""
        return size * size * len(present) / self._settings.dim

    def _sampled_law(
        self,
        given: dict[str, dict[str, Any]],
        others: Floats,
        present: list[int],
        plan: "_LawPlan",
        number: int,
    ) -> dict[str, Any]:
        """The same of a replicated model, from a sample of its coordinates: rank 0, which writes it down, measures it."""
        settings, stretches = self._settings, self._sampled(number)
        if self._ranks.rank:
            return {}
        release = numpy_vector(gathered(given["delta"], stretches))
        noise, sizes = release - others, [others]
        if settings.momentum and number > 1 and self._before is not None:
            noise = noise - settings.momentum * numpy_vector(gathered(self._before[1], stretches))
        mean = self._mean_square(present, plan.size)
        if present and plan.exactly:
            rows = {name: row[:0] for name, row in given["delta"].items()}
            total = self._sampled_canaries(present, rows, stretches)
            sizes.append(total)
            noise, mean = noise - total * plan.size, 0.0
        squares = [float(noise[part.there] @ noise[part.there]) - mean * (part.stop - part.start) for part in stretches]
        found: dict[str, Any] = {"layer_rests": np.sqrt(np.maximum(squares, 0.0))}
        if plan.measures_law:
            steps = self._resolution(given, stretches)
            found |= {"rounding": float(steps[0]) * self._ranks.size, "lattice": float(steps[1])}
            found |= measure_law(noise, release, self._whole, full=plan.full, exact=plan.exact, sizes=sizes)
        return found

    def _sampled_canaries(self, present: list[int], like: dict[str, Any], sampled: Sequence[Stretch]) -> Floats:
        """The sum of the present canaries in the sample."""
        found = np.zeros(self._settings.law_dim)
        for block, stretches in enumerate(self._stretches):
            wanted = [(part, one) for part in stretches for one in sampled if part.layer == one.layer]
            pairs = [(part, one, max(part.start, one.start), min(part.stop, one.stop)) for part, one in wanted]
            if not any(first < last for *_, first, last in pairs):
                continue
            total = self.canaries.combine(block, present, like=template([like[part.name] for part in stretches]))
            for part, one, first, last in pairs:
                if first < last:
                    here = total[part.place + first - part.start : part.place + last - part.start]
                    found[one.place + first - one.start : one.place + last - one.start] = numpy_vector(here)
        return found

    def _slots(self, *, full: bool) -> list[dict[str, int]]:
        """How many numbers every block of every process has for itself."""
        places = self._settings.law_stretches
        return [
            block_sizes(part, dim=place.stop - place.start, number=number, blocks=len(places), full=full)
            for number, (part, place) in enumerate(zip(self._all_parts, places, strict=True))
        ]

    def _law_numbers(
        self, given: dict[str, dict[str, Any]], present: list[int], plan: "_LawPlan", number: int
    ) -> Floats:
        """What this process adds to the measurement of the noise itself."""
        settings, count = self._settings, len(self._settings.block_sizes)
        layers, parts_of, resolution = _LayerSquares(len(settings.layers)), self._block_parts(), np.zeros(2)
        together = {name: np.zeros(wanted) for name, wanted in plan.summed.items()}
        own = [{name: np.zeros(wanted) for name, wanted in sizes.items()} for sizes in plan.slots]
        noise_of = self._noise(given["delta"], given["others"], number)
        for block, stretches in enumerate(self._stretches):
            place = settings.law_stretches[self._numbers[block]]
            inner = tuple(_cut(stretches, place))
            sizes = [gathered(given["others"], inner, own=True)] if plan.full else []
            if plan.exactly:
                total = (
                    self.canaries.combine(block, present, like=self._like(block, given["delta"])) if present else None
                )
                noise = noise_of(block)
                if total is not None:
                    sizes.append(copied(total[place]))
                    noise = take_away(noise, slice(0, len(noise)), total, plan.size)
                    del total
                layers.add(noise, stretches)
                parts_of.add(self._numbers[block], noise)
                if not plan.measures_law:
                    continue
                noise = copied(noise[place])
            else:  # canaries are a trace of it
                noise = self._noise(given["delta"], given["others"], number, inner)(block)
            resolution += self._resolution(given, inner)
            found = law_sums(
                noise,
                gathered(given["delta"], inner, own=True) if plan.full else noise,
                self._all_parts[self._numbers[block]],
                full=plan.full,
                exact=plan.exact,
                sizes=sizes,
                width=zero_width(settings.law_dim),
                blocks=count,
            )
            del noise
            slot = own[self._numbers[block]]
            for name, values in found.items():
                if name in together:
                    together[name] += values
                elif name in slot and values.size:
                    slot[name][:] = values
        parts = [resolution, *together.values(), *(array for slot in own for array in slot.values())]
        return np.concatenate([*parts, layers.numbers(), parts_of.numbers()] if plan.exactly else parts)

    def _resolution(self, given: dict[str, dict[str, Any]], stretches: Sequence[Stretch]) -> Floats:
        """How coarsely release and others were rounded, each leaf by itself, weighted by its share of the model."""
        found = np.zeros(2)
        for part in stretches:
            steps = [resolution_of(given[kind][part.name][part.here]) for kind in ("delta", "others")]
            finite = [step for step in steps if step is not None]
            share = (part.stop - part.start) / self._settings.law_dim
            found += share * np.array([sum(finite), 12 * min(finite, default=0.0)])
        return found

    def _undoes_momentum(self, number: int) -> bool:
        """Whether the round can be seen without the momentum of the one before."""
        if not self._settings.momentum or number == 1:
            return True
        return self._before is not None and self._before[0] == number - 1

    def _noise(
        self,
        delta: dict[str, Any],
        others: dict[str, Any],
        number: int,
        stretches: Sequence[Stretch] | None = None,
    ) -> Callable[[int], Any]:
        """Block by block: the release less everybody else's part, and less the momentum of the round before.

        With `stretches`, of those alone.
        """
        less = [(others, 1.0)]
        if self._settings.momentum and self._before is not None and self._before[0] == number - 1:
            less.append((self._before[1], self._settings.momentum))
        return self._gatherer(delta, *less, only=stretches)

    def _gatherer(
        self, rows: dict[str, Any] | None, *less: tuple[dict[str, Any], float], only: Sequence[Stretch] | None = None
    ) -> Callable[[int], Any]:
        """A function that makes one block's vector of some rows, less others times a factor, when it is asked for.

        On a GPU it is where canaries take it without a copy: the next one overwrites it, and so do its products.
        """

        def gather(block: int) -> Any:
            stretches = self._stretches[block] if only is None else only
            given = less[0][0] if rows is None else rows
            room = self.canaries.room(block, self._like(block, given)) if only is None else None
            vector = gathered(given, stretches, own=bool(less), into=room)
            if rows is None:
                vector *= 0.0
            for other, factor in less:
                for part in stretches:
                    vector = take_away(vector, part.there, other[part.name][part.here], factor)
            return vector

        return gather

    def _like(self, block: int, rows: dict[str, Any]) -> Any:
        """An empty array of the kind that a block of these rows is computed in."""
        return template([rows[part.name] for part in self._stretches[block]])


@dataclass(frozen=True)
class _Length:
    """A vector's length, its length off the observed canaries, in all and by block, and its cosines with all canaries."""

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


def canary_size(along: Floats, rest: float, facts: dict[str, Any], settings: Settings) -> tuple[float, bool]:
    """How much of each present canary a round holds: as declared where that is credible, else as measured.

    `along` are the projections on the canaries, `rest` is the vector's length off them.
    """
    measured, clip = float(along.mean()), float(facts["clip_norm"])
    error = rest / math.sqrt(settings.free * len(along))
    if facts["clip_declared"] and abs(measured - clip) <= CREDIBLE_STDS * error:
        return clip, True
    return measured, False


CREDIBLE_STDS = 4.0  # by which a canary's measured length may differ from the declared one


def _blocks_of(settings: Settings, rank: int) -> tuple[int, int]:
    """The first block that a process holds, and the one after its last."""
    sizes = settings.block_sizes
    if not settings.shards:
        return 0, len(sizes)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    totals = np.concatenate([[0], np.cumsum([sum(held) for held in settings.shards])])
    first, stop = np.searchsorted(edges, totals[rank : rank + 2])
    return int(first), int(stop)


def _sampled_stretches(settings: Settings, seed: SupportsIndex | bytes, number: int) -> tuple[Stretch, ...]:
    """A stretch of each layer whose noise is measured; where it begins is as secret as the canaries."""
    key, found, place = key_from_seed(seed), [], 0
    for layer, ((name, whole), (_, size)) in enumerate(zip(settings.layers, settings.gauged_layers, strict=True)):
        index = layer + len(settings.layers) * number
        word = int(philox.words(key, domain=philox.SAMPLED_PLACES, dim=settings.dim, index=index, count=1)[0])
        start = word * (whole - size + 1) >> 64
        found.append(Stretch(name, layer, start, start + size, place))
        place += size
    return tuple(found)


def _cut(stretches: Sequence[Stretch], place: slice) -> Iterator[Stretch]:
    """The stretches within a part of a block, in the places of that part."""
    for part in stretches:
        first, last = max(part.there.start, place.start), min(part.there.stop, place.stop)
        if first < last:
            moved = first - part.there.start
            yield Stretch(
                part.name, part.layer, part.start + moved, part.start + moved + last - first, first - place.start
            )


def _stretches(settings: Settings, held: Sequence[int], sizes: Sequence[int]) -> list[tuple[Stretch, ...]]:
    """For each block of a process the stretches of leaves that it is made of."""
    edges = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    found: list[list[Stretch]] = [[] for _ in sizes]
    place = 0
    for layer, ((name, _), size) in enumerate(zip(settings.layers, held, strict=True)):
        start = 0
        while start < size:
            block = int(np.searchsorted(edges, place, side="right")) - 1
            taken = min(size - start, int(edges[block + 1]) - place)
            found[block].append(Stretch(name, layer, start, start + taken, place - int(edges[block])))
            start, place = start + taken, place + taken
    return [tuple(parts) for parts in found]


class _VectorSums:
    """Products of a vector with all canaries, then of each block the squared length off the observed ones, and the whole.

    Blocks come one after another; nothing that lies on a GPU is waited for before the end.
    """

    def __init__(
        self,
        canaries: BlockedCanaries,
        settings: Settings,
        numbers: range,
        gather: Callable[[int], Any] | None,
        name: str,
    ) -> None:
        self._name = name
        self._canaries, self._settings, self._numbers, self._gather = canaries, settings, numbers, gather
        self._slow = False
        self._blocks: list[int] = []
        self._products: list[Any] = []
        self._squares: list[Any] = []
        self._alongs: list[Any] = []

    def add(self, block: int, vector: Any) -> None:
        """Take the next block."""
        square = _lazy_square(vector)
        self._blocks.append(block)
        if not is_on_device(vector) and square != 0 and not usable(math.sqrt(max(float(square), 0.0))):
            self._slow = True  # nothing of such a vector is transformed as it is
        if self._slow:
            return
        products = self._canaries.products(block, vector)
        seen = products[: self._settings.canaries]
        self._squares.append(square)
        self._alongs.append(seen @ seen)
        share = float(self._canaries.shares[block])
        if not self._products or _place(products) != _place(self._products[-1]):
            self._products.append(products * share)
        elif is_tensor(products):
            self._products[-1].add_(products, alpha=share)
        else:
            self._products[-1] += products * share

    def numbers(self) -> Floats:
        """The sums, on the host; ValueError if they are not finite."""
        if self._slow:
            return self._slow_numbers()
        count, total = self._settings.total, len(self._settings.block_sizes)
        found = np.zeros(count + 2 * total)
        for products in self._products:
            found[:count] += numpy_vector(products)
        squares, alongs = _numbers(self._squares), _numbers(self._alongs)
        lengths = np.sqrt(np.maximum(squares, 0.0))
        if not np.isfinite(found).all() or not all(length == 0 or usable(length) for length in lengths.tolist()):
            return self._slow_numbers()
        for block, square, along in zip(self._blocks, squares, alongs, strict=True):
            place = count + self._numbers[block]
            found[place], found[place + total] = max(square - along, SMALLEST * square), square
        return found

    def _slow_numbers(self) -> Floats:
        """The same where lengths are at the ends of single precision's range."""
        assert self._gather is not None
        count, observed, total = self._settings.total, self._settings.canaries, len(self._settings.block_sizes)
        found = np.zeros(count + 2 * total)
        for block in self._blocks:
            vector = numpy_vector(self._gather(block))
            if not np.isfinite(vector).all():
                raise NotFiniteError(f"{self._name} must be finite, got NaN or infinity in it")
            products = self._canaries.slow_products(block, vector)
            found[:count] += products * float(self._canaries.shares[block])
            with np.errstate(over="ignore"):
                square, along = float(vector @ vector), float(products[:observed] @ products[:observed])
            place = count + self._numbers[block]
            found[place], found[place + total] = max(square - along, SMALLEST * square), square
        return found


class _BlockParts:
    """Squared lengths in equal parts of blocks, and sketches of blocks: sums of every so-manieth number, every other minus.

    Two blocks with the same noise have the same sketch; a constant has none.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: list[tuple[int, Any, Any]] = []

    def add(self, number: int, vector: Any) -> None:
        """Take a block, counted over all processes."""
        if not self._settings.in_blocks:
            return
        chunks, size = self._settings.chunks, self._settings.sketch
        each, rows = len(vector) // chunks, len(vector) // (2 * size)
        parts = vector[: each * chunks].reshape(chunks, each)
        pairs = vector[: rows * 2 * size].reshape(rows, 2, size)
        if is_device_jax(vector):
            self._found.append((number, *jax_measures().block_parts(vector, chunks=chunks, sketch=size)))
            return
        if is_tensor(vector):
            torch = sys.modules["torch"]
            squares, sums = torch.linalg.vector_norm(parts, dim=1).double() ** 2, pairs.sum(0).double()
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                squares = np.array([euclidean_norm(part) ** 2 for part in parts])
                sums = pairs.sum(axis=0, dtype=np.float64)
        with np.errstate(invalid="ignore"):  # infinities, which the lengths have told of
            self._found.append((number, squares, sums[0] - sums[1]))

    def numbers(self) -> Floats:
        """Of all blocks, zeros where other processes hold them."""
        settings = self._settings
        if not settings.in_blocks:
            return np.zeros(0)
        blocks = len(settings.block_sizes)
        squares, sketches = np.zeros((blocks, settings.chunks)), np.zeros((blocks, settings.sketch))
        for number, lengths, sketch in self._found:
            squares[number], sketches[number] = numpy_vector(lengths), numpy_vector(sketch)
        return np.concatenate([squares.ravel(), sketches.ravel()])


class _LayerSquares:
    """Squared lengths by layer, from one block after another."""

    def __init__(self, layers: int) -> None:
        self._found = np.zeros(layers)
        self._layers: list[int] = []
        self._squares: list[Any] = []

    def add(self, vector: Any, stretches: Sequence[Stretch]) -> None:
        """Take the next block."""
        self._layers += [part.layer for part in stretches]
        self._squares += [_safe_square(vector[part.there]) for part in stretches]

    def numbers(self) -> Floats:
        """The squared lengths, on the host."""
        np.add.at(self._found, self._layers, _numbers(self._squares))
        return self._found


@dataclass(frozen=True)
class _LawPlan:
    """What is measured of the noise in a round, and how many numbers of each kind."""

    full: bool
    exact: bool
    measures_law: bool
    size: float  # of each present canary, to be subtracted
    exactly: bool = True  # else what canaries add to a length is taken as what it is on average, which is enough
    summed: dict[str, int] = field(default_factory=dict)
    slots: list[dict[str, int]] = field(default_factory=list)


def _write(rows: dict[str, Any], total: Any, factor: float, part: Stretch) -> None:
    rows[part.name] = fill(rows[part.name], part.here, total[part.there], factor)


def _place(vector: Any) -> Any:
    return vector.device if is_tensor(vector) or is_device_jax(vector) else None


def _lazy_square(vector: Any) -> Any:
    """The squared length, in float64; on a GPU in few launches, and not waited for."""
    if is_device_jax(vector):
        return jax_measures().length(vector) ** 2
    if not is_tensor(vector):
        return euclidean_norm(vector) ** 2
    if vector.device.type == "cpu":
        return tensor_norm(vector) ** 2
    return sys.modules["torch"].linalg.vector_norm(vector).double() ** 2


def _safe_square(vector: Any) -> Any:
    """The same on the host for a vector of any length; on a GPU nothing is looked at, so as not to wait."""
    square = _lazy_square(vector)
    if is_on_device(vector) or usable(math.sqrt(float(square))):
        return square
    exact = numpy_vector(vector)  # squares underflow or overflow in single precision
    with np.errstate(over="ignore"):
        return float(exact @ exact)


def _single(vector: Any) -> Any:
    """An array of half precision in single precision: numpy knows no bfloat16, and sums float16 in float16."""
    held = is_tensor(vector) or is_device_jax(vector) or vector.dtype.itemsize > 2
    return vector if held else np.asarray(vector, dtype=np.float32)


def _numbers(values: Sequence[Any]) -> Floats:
    """Numbers of the host; those of one device are waited for together."""
    tensors = [value for value in values if is_tensor(value)]
    if tensors and len(tensors) == len(values) and len({value.device for value in tensors}) == 1:
        torch = sys.modules["torch"]
        return numpy_vector(torch.stack([value.double() for value in tensors]))
    if any(is_device_jax(value) for value in values):
        return np.asarray(jax_measures().numbers(list(values)))
    return np.array([float(value) for value in values], dtype=np.float64)


def _unpacked(numbers: Floats, sizes: dict[str, int]) -> tuple[dict[str, Floats], Floats]:
    found, place = {}, 0
    for name, size in sizes.items():
        found[name], place = numbers[place : place + size], place + size
    return found, numbers[place:]


def _check_same(seen: Floats) -> None:
    """Where every process holds the whole model, refuse a release that is not the same in all of them.

    `seen` are each process's squared length of the release, and a weighted sum of its sample.
    """
    lengths = np.sqrt(seen[:, 0])
    apart = np.maximum(np.abs(lengths - lengths[0]), np.abs(seen[:, 1] - seen[0, 1]))
    if float(apart.max()) > SAME_RELEASE * float(lengths.max()):
        raise ValueError(
            "model_delta must be the same on every rank of a replicated model, but rank "
            f"{int(np.argmax(apart))} has another than rank 0"
        )


def _refuse_zero(name: str, norm: float) -> None:
    if norm == 0:
        raise ValueError(f"{name} must not be zero, which has no direction; was the model ever updated?")
