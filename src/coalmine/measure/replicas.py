"""Measure a model that every process holds whole: they share its blocks, and rank 0 measures a sample of the noise.

A process knows only its own part of all other updates, so the residual is nowhere as a whole. Its length is that along the
unobserved canaries, and its law that in a sample of the coordinates, of which the other updates are summed.
"""

import math
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.canaries import philox
from coalmine.canaries.philox import key_from_seed
from coalmine.canaries.secret import secret_seed
from coalmine.measure.arrays import arrays_of, host_numbers, numpy_vector
from coalmine.measure.blocks import BlockMeasurer, MeasuredBlocks, Rows
from coalmine.measure.coordinate_sums import CoordinateSums
from coalmine.measure.measurer import Length, NoisePlan
from coalmine.measure.noise_law import measure_law
from coalmine.measure.round_facts import RoundFacts
from coalmine.measure.scale import SMALLEST
from coalmine.measure.settings import Settings
from coalmine.measure.stretches import Stretch, empty_working_array, gather_block
from coalmine.measure.vectors import NotFiniteError

SAME_RELEASE = 1e-5  # relative difference up to which the releases of two processes count as equal


class ReplicaMeasurer(BlockMeasurer):
    """The measurements of one of several processes that hold the whole model."""

    def __init__(self, *arguments: Any, seed: SupportsIndex | bytes, **options: Any) -> None:
        super().__init__(*arguments, seed=seed, **options)
        self._seed = secret_seed(seed)

    @property
    def _noise_size(self) -> int:
        return self._settings.law_dim + 2 * self._ranks.size

    def _is_mine(self, block: int) -> bool:
        return block % self._ranks.size == self._ranks.rank

    def _round_sums(self, delta: Rows, others: Rows | None, number: int) -> Floats:
        """This process's part of a round's sums. The last are `others` in the sample, and fingerprints of the release."""
        ranks, lengths = self._ranks, []
        release_of = self._gatherer(delta)
        residual_of = None if others is None else self._gatherer(delta if ranks.rank == 0 else None, (others, 1.0))
        release, residual = self._sums("model_delta", release_of), self._sums("model_delta - others", residual_of)
        for block in range(len(self._stretches)):
            vector = release_of(block)
            lengths.append(arrays_of(vector).square(vector))
            if self._is_mine(block):
                release.add(block, vector)
            if residual_of is not None:
                residual.add(block, residual_of(block))
        stretches = self._sample(number)
        sums = [release.sums(), residual.sums(), self._others_squares(others)]
        sample = np.zeros(self._settings.law_dim) if others is None else numpy_vector(gather_block(others, stretches))
        if not np.isfinite(sample).all():
            raise NotFiniteError("others must be finite, got NaN or infinity in it")
        fingerprints = np.zeros((ranks.size, 2))  # see `_check`
        release_sample = numpy_vector(gather_block(delta, stretches))
        weights = np.cos(np.arange(len(release_sample)))
        fingerprints[ranks.rank] = host_numbers(lengths).sum(), float(release_sample @ weights)
        return np.concatenate([*sums, sample, fingerprints.ravel()])

    def _check(self, noise_sums: Floats) -> None:
        """ValueError if the processes have different releases.

        The fingerprints are, for each process, the squared length of its release and a weighted sum of its sample.
        """
        fingerprints = noise_sums[self._settings.law_dim :].reshape(-1, 2)
        lengths = np.sqrt(fingerprints[:, 0])
        differences = np.maximum(np.abs(lengths - lengths[0]), np.abs(fingerprints[:, 1] - fingerprints[0, 1]))
        if float(differences.max()) > SAME_RELEASE * float(lengths.max()):
            raise ValueError(
                "model_delta must be the same on every rank of a replicated model, but rank "
                f"{int(np.argmax(differences))} has another one than rank 0"
            )

    def _residual_length(self, sums: Floats) -> Length:
        """The residual's length, estimated from the products with the unobserved canaries."""
        settings, products = self._settings, sums[: self._settings.total]
        unobserved, observed = products[settings.canaries :], products[: settings.canaries]
        rest = math.sqrt(max(float(np.mean(unobserved**2)), SMALLEST * float(products @ products)) * settings.free)
        norm = math.hypot(rest, float(np.linalg.norm(observed)))
        cosines = products / norm if norm else products
        return Length(norm, rest, cosines.astype(np.float32))

    def _residual_fields(self, measured: MeasuredBlocks) -> dict[str, Any]:
        # Each process has a part of `others`: the triangle inequality bounds their sum.
        return {"layer_others": np.sqrt(measured.others_squares * self._ranks.size)}

    @property
    def _follows_releases(self) -> bool:
        return False

    @property
    def _sample_is_fixed(self) -> bool:
        """Whether all rounds have the same sample, so that they can be compared."""
        return self._settings.noise is not None or self._settings.momentum > 0

    def _sample(self, number: int) -> tuple[Stretch, ...]:
        """The sampled coordinates: new ones in each round, unless rounds must be compared."""
        return _sampled_stretches(self._settings, self._seed, 0 if self._sample_is_fixed else number)

    def _new_sums(self) -> CoordinateSums | None:
        """Replicas follow only a sample that stays the same."""
        fixed = self._settings.law_dim == self._settings.dim or self._sample_is_fixed
        return CoordinateSums.of_vector(self._settings, self._key) if fixed else None

    def _reading(self, number: int) -> dict[str, Any]:
        assert self._coordinate_sums is not None
        return {"law_coordinates": self._coordinate_sums.read()} if self._ranks.rank == 0 else {}

    def _noise_fields(self, measured: MeasuredBlocks, plan: NoisePlan, facts: RoundFacts) -> dict[str, Any]:
        """The fields on the noise, from the sample. Only rank 0, which records them, measures it."""
        settings, number, present = self._settings, facts.number, facts.indices
        if self._ranks.rank:
            return {}
        stretches = self._sample(number)
        assert measured.others is not None
        others = measured.noise_sums[: settings.law_dim]
        release = numpy_vector(gather_block(measured.rows, stretches))
        noise, sizes = release - others, [others]
        if settings.momentum and number > 1 and self._previous is not None:
            noise = noise - settings.momentum * numpy_vector(gather_block(self._previous.release, stretches))
        mean = self._mean_square(facts, plan)
        if present and self._subtracts_canaries(measured, plan, facts):
            total = self._sampled_canaries(present, {name: row[:0] for name, row in measured.rows.items()}, stretches)
            sizes.append(total)
            noise, mean = noise - total * plan.canary_size, 0.0
        squares = [
            float(noise[part.in_block] @ noise[part.in_block]) - mean * (part.stop - part.start) for part in stretches
        ]
        record: dict[str, Any] = {"layer_rests": np.sqrt(np.maximum(squares, 0.0))}
        if plan.measures_law:
            steps = self._resolution(measured.rows, measured.others, stretches)
            record |= {"rounding": float(steps[0]) * self._ranks.size, "lattice": float(steps[1])}
            record |= measure_law(
                noise, release, self._model_noise_parts, full=plan.full, exact=plan.exact, sizes=sizes
            )
        return record | self._follow_vector(noise, release, others, facts)

    def _sampled_canaries(self, present: list[int], like: Rows, sampled: Sequence[Stretch]) -> Floats:
        """The sum of the present canaries in the sample."""
        sample = np.zeros(self._settings.law_dim)
        for block, stretches in enumerate(self._stretches):
            pairs = [(part, one) for part in stretches for one in sampled if part.layer == one.layer]
            overlaps = [(part, one, max(part.start, one.start), min(part.stop, one.stop)) for part, one in pairs]
            if not any(first < last for *_, first, last in overlaps):
                continue
            template = empty_working_array([like[part.name] for part in stretches])
            total = self.canaries.combine(block, present, like=template)
            for part, one, first, last in overlaps:
                if first < last:
                    piece = total[part.offset + first - part.start : part.offset + last - part.start]
                    sample[one.offset + first - one.start : one.offset + last - one.start] = numpy_vector(piece)
        return sample


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
