"""Sums over the blocks of a model: a vector's products with all canaries, and its squared lengths by block, part and layer.

On a GPU nothing waits for results before all blocks are added.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.canaries.base import usable
from coalmine.canaries.blocked import BlockedCanaries
from coalmine.measure.arrays import arrays_of, host_numbers, is_on_device, numpy_vector
from coalmine.measure.measurer import Length
from coalmine.measure.scale import SMALLEST, block_scale
from coalmine.measure.settings import Settings
from coalmine.measure.stretches import Stretch
from coalmine.measure.vectors import NotFiniteError, check_norm


def length_of(name: str, sums: Floats, settings: Settings) -> Length:
    """A vector's length, from its `VectorSums` over all processes."""
    products, rests, squares = np.split(sums, [settings.total, settings.total + len(settings.block_sizes)])
    norm = math.sqrt(float(squares.sum()))
    if norm == 0:
        return Length(0.0, 0.0, products.astype(np.float32))
    check_norm(name, norm)
    lengths = np.sqrt(rests)
    scale, _, _ = block_scale(lengths, settings)
    by_block = lengths if len(settings.blocks) > 1 else None
    return Length(norm, scale * math.sqrt(settings.free), (products / norm).astype(np.float32), by_block)


class VectorSums:
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
        square = arrays_of(vector).square(vector)
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
        arrays = arrays_of(products)
        if not self._products or arrays.device(products) != arrays_of(self._products[-1]).device(self._products[-1]):
            self._products.append(products * share)
        else:
            self._products[-1] = arrays.added(self._products[-1], products, share)

    def sums(self) -> Floats:
        """The sums, on the host. Raises ValueError if they are not finite."""
        if self._needs_exact:
            return self._exact_sums()
        count, total = self._settings.total, len(self._settings.block_sizes)
        sums = np.zeros(count + 2 * total)
        for products in self._products:
            sums[:count] += numpy_vector(products)
        squares, alongs = host_numbers(self._squares), host_numbers(self._alongs)
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


class BlockParts:
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
        chunks, sketch = self._settings.chunks, self._settings.sketch
        self._measured.append((number, *arrays_of(vector).block_parts(vector, chunks=chunks, sketch=sketch)))

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


class LayerSquares:
    """Squared lengths by layer, summed over blocks."""

    def __init__(self, layers: int) -> None:
        self._totals = np.zeros(layers)
        self._layers: list[int] = []
        self._squares: list[Any] = []

    def add(self, vector: Any, stretches: Sequence[Stretch]) -> None:
        """Add the next block."""
        self._layers += [part.layer for part in stretches]
        pieces = [vector[part.in_block] for part in stretches]
        self._squares += [_exact_square(piece, arrays_of(piece).square(piece)) for piece in pieces]

    def sums(self) -> Floats:
        """The squared lengths, on the host."""
        np.add.at(self._totals, self._layers, host_numbers(self._squares))
        return self._totals


def squares_of(parts: Sequence[Any]) -> list[Any]:
    """The squared lengths of vectors of any norm on the host. Those on a GPU are not checked, to avoid waiting."""
    alike = {arrays_of(part) for part in parts}
    found = alike.pop().squares(parts) if len(alike) == 1 else [arrays_of(part).square(part) for part in parts]
    return [_exact_square(part, square) for part, square in zip(parts, found, strict=True)]


def _exact_square(vector: Any, square: Any) -> Any:
    if is_on_device(vector) or usable(math.sqrt(float(square))):
        return square
    exact = numpy_vector(vector)  # squares underflow or overflow in single precision
    with np.errstate(over="ignore"):
        return float(exact @ exact)
