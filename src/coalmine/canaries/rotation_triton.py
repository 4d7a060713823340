# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""A rotation applied on a CUDA device in float32, by Triton kernels that fuse shuffle and signs into the transforms.

A Walsh-Hadamard transform of 2^21 numbers is two passes: fourteen steps within rows of 2^14 numbers, seven between 128
of them. A step is a sum and a difference of registers, or of what two threads exchange. Products with a Hadamard matrix
on the matrix units took twice as long and rounded more: they want numbers in pieces of bfloat16.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from coalmine.canaries.rotation import Rotation, Stage

SMALLEST_LEVELS = 5  # below, plain torch
_TILE_LEVELS, _ROW_LEVELS = 14, 7  # steps within a tile of neighbours, and at most between rows, in one pass
_TILE_WARPS = 16
_COLUMNS, _ROW_WARPS = 32, 4
_WIDE = 2**30  # from this dim on coordinates are 64-bit numbers

_PLAIN = tl.constexpr(0)  # a pass reads, or writes, the vector that is being transformed
_OPEN = tl.constexpr(1)  # through the shuffle, with the opening signs
_CLOSE = tl.constexpr(2)  # with the closing signs; beyond the first 2^m through the shuffle too


@triton.jit
def _step(x, before: tl.constexpr, after: tl.constexpr):
    """Sums and differences along the middle axis of (before, 2, after)."""
    pairs = tl.permute(tl.reshape(x, (before, 2, after)), (0, 2, 1))
    first, second = tl.split(pairs)
    return tl.permute(tl.join(first + second, first - second), (0, 2, 1))


@triton.jit
def _sign(bits, i):
    return (1 - 2 * ((tl.load(bits + (i >> 5)) >> (i & 31).to(tl.int32)) & 1)).to(tl.float32)


@triton.jit
def _origin(order, i, dim, insert, left_over, block_levels: tl.constexpr):
    """Where the shuffle takes coordinate i from."""
    in_left_over = (i >= insert) & (i < insert + left_over)
    j = tl.where(i >= insert, i - left_over, i)
    j = tl.where(in_left_over, 0, j)
    block = tl.load(order + (j >> block_levels)).to(i.dtype)
    moved = (block << block_levels) + (j & ((1 << block_levels) - 1))
    return tl.where(in_left_over, dim - left_over + i - insert, moved)


@triton.jit
def _read(outer, inner, i, order, opening, closing, dim, size, insert, left_over, scale,
          block_levels: tl.constexpr, how: tl.constexpr):  # fmt: skip
    if how == _PLAIN:
        value = tl.load(inner + i)
    else:
        origin = _origin(order, i, dim, insert, left_over, block_levels)
        if how == _OPEN:
            value = tl.load(outer + origin) * (scale * _sign(opening, i))
        else:
            own = tl.load(inner + i, mask=i < size, other=0.0)
            moved = tl.load(outer + origin, mask=i >= size, other=0.0)
            value = tl.where(i < size, own, moved * _sign(opening, i))
            value = value * (scale * _sign(closing, i - (dim - size)))
    return value


@triton.jit
def _write(value, outer, inner, i, order, opening, closing, dim, size, insert, left_over, scale,
           block_levels: tl.constexpr, how: tl.constexpr):  # fmt: skip
    if how == _PLAIN:
        tl.store(inner + i, value)
    else:
        origin = _origin(order, i, dim, insert, left_over, block_levels)
        if how == _OPEN:
            tl.store(outer + origin, value * (scale * _sign(opening, i)))
        else:
            value = value * (scale * _sign(closing, i - (dim - size)))
            tl.store(inner + i, value, mask=i < size)
            tl.store(outer + origin, value * _sign(opening, i), mask=i >= size)


@triton.jit(do_not_specialize=["first", "insert", "left_over"])
def _tiles(outer, inner, first, order, opening, closing, dim, size, insert, left_over, scale,
           levels: tl.constexpr, block_levels: tl.constexpr, wide: tl.constexpr,
           read: tl.constexpr, write: tl.constexpr):  # fmt: skip
    """The steps within tiles of 2^levels neighbours, from coordinate `first` on."""
    program = tl.program_id(0)
    if wide:
        program = program.to(tl.int64)
    i = first + program * (1 << levels) + tl.arange(0, 1 << levels)
    x = _read(outer, inner, i, order, opening, closing, dim, size, insert, left_over, scale, block_levels, read)
    for level in tl.static_range(levels):
        x = tl.reshape(_step(x, 1 << level, 1 << (levels - 1 - level)), (1 << levels,))
    _write(x, outer, inner, i, order, opening, closing, dim, size, insert, left_over, scale, block_levels, write)


@triton.jit(do_not_specialize=["first", "insert", "left_over"])
def _rows(outer, inner, first, stride, order, opening, closing, dim, size, insert, left_over, scale,
          levels: tl.constexpr, columns: tl.constexpr, block_levels: tl.constexpr, wide: tl.constexpr,
          read: tl.constexpr, write: tl.constexpr):  # fmt: skip
    """The steps between 2^levels rows that lie `stride` apart, some columns of them, from coordinate `first` on."""
    rows: tl.constexpr = 1 << levels
    program = tl.program_id(0)
    row = tl.arange(0, rows)[:, None]
    if wide:
        program = program.to(tl.int64)
        row = row.to(tl.int64)
    across = stride // columns
    i = first + (program // across) * rows * stride + (program % across) * columns
    i = i + row * stride + tl.arange(0, columns)[None, :]
    x = _read(outer, inner, i, order, opening, closing, dim, size, insert, left_over, scale, block_levels, read)
    for level in tl.static_range(levels):
        x = tl.reshape(_step(x, 1 << level, (rows >> (level + 1)) * columns), (rows, columns))
    _write(x, outer, inner, i, order, opening, closing, dim, size, insert, left_over, scale, block_levels, write)


class TritonRotation:
    """A rotation whose tables lie on a CUDA device."""

    def __init__(self, rotation: "Rotation", device: torch.device) -> None:
        self.rotation = rotation
        self.tables = [_tables(stage, rotation.block, device) for stage in rotation.stages]
        self.passes = _passes(rotation.levels)

    def rotate_back(self, vector: torch.Tensor) -> torch.Tensor:
        """The transposed rotation of a float32 vector, which is left as it is."""
        outer, inner = vector, torch.empty_like(vector)
        for number in range(len(self.tables)):
            self._transform(number, outer, inner, 0, read=1, write=0)
            self._transform(number, outer, inner, self.rotation.dim - self.rotation.size, read=2, write=0)
            outer, inner = inner, torch.empty_like(vector) if outer is vector else outer
        return outer

    def rotate(self, vector: torch.Tensor) -> torch.Tensor:
        """The rotation of a float32 vector, which is overwritten."""
        inner, outer = vector, torch.empty_like(vector)
        for number in reversed(range(len(self.tables))):
            self._transform(number, outer, inner, self.rotation.dim - self.rotation.size, read=0, write=2)
            self._transform(number, outer, inner, 0, read=0, write=1)
            inner, outer = outer, inner
        return inner

    def _transform(
        self, number: int, outer: torch.Tensor, inner: torch.Tensor, first: int, *, read: int, write: int
    ) -> None:
        """One Walsh-Hadamard transform of `inner` from `first` on; its first pass reads, its last writes as told."""
        rotation = self.rotation
        order, opening, closing, insert = self.tables[number]
        shared = (order, opening, closing, rotation.dim, rotation.size, insert, rotation.dim % rotation.block)
        scale = rotation.size**-0.5
        below = 0
        for levels in self.passes:
            how: dict[str, Any] = {
                "levels": levels,
                "block_levels": rotation.block.bit_length() - 1,
                "wide": rotation.dim >= _WIDE,
                "read": read if below == 0 else 0,
                "write": write if below + levels == rotation.levels else 0,
            }
            if below == 0:
                grid = (rotation.size >> levels,)
                _tiles[grid](outer, inner, first, *shared, scale, **how, num_warps=_TILE_WARPS)
            else:
                grid = (rotation.size // _COLUMNS >> levels,)
                how |= {"columns": _COLUMNS, "num_warps": _ROW_WARPS}
                _rows[grid](outer, inner, first, 1 << below, *shared, scale, **how)
            below += levels


def _tables(stage: "Stage", block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    def packed(bits: Any) -> torch.Tensor:
        padded = np.zeros(-(-len(bits) // 4) * 4, np.uint8)
        padded[: len(bits)] = bits
        return torch.from_numpy(padded.view("<i4")).to(device)

    order = torch.from_numpy(stage.order.astype(np.int32)).to(device)
    return order, packed(stage.opening), packed(stage.closing), stage.insert * block


def _passes(levels: int) -> list[int]:
    """How many steps each pass of a transform takes: within tiles, then between rows."""
    tile = min(levels, _TILE_LEVELS)
    count = -(-(levels - tile) // _ROW_LEVELS)
    return [tile, *((levels - tile) // count + (number < (levels - tile) % count) for number in range(count))]
