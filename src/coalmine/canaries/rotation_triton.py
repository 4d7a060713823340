# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""A rotation applied on a CUDA device in float32, by Triton kernels that fuse shuffle and signs into the transforms.

A Walsh-Hadamard transform of 2^21 numbers is two passes: fourteen steps within rows of 2^14 numbers, seven between 128
of them. A step is a sum and a difference of registers, or of what two threads exchange. Products with a Hadamard matrix
on the matrix units took twice as long and rounded more: they need numbers split into pieces of bfloat16.

`TritonRotation` keeps the tables of one rotation. `TritonBlocks` serves one rotation after another with the same
scratch, and draws signs anew for each.
"""

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from coalmine.canaries import philox

if TYPE_CHECKING:
    from coalmine.canaries.rotation import Rotation, Stage

SMALLEST_LEVELS = 5  # below this, plain torch is used
_TILE_LEVELS, _ROW_LEVELS = 14, 7  # steps per pass: within a tile of neighbours, and at most between rows
_TILE_WARPS = 16
_COLUMNS, _ROW_WARPS = 32, 4
_LONG_TILE_LEVELS, _LONG_ROW_LEVELS = 11, 8  # the same for vectors that need three passes
_LONG_TILE_WARPS = 4
_WIDE = 2**30  # from this dim on coordinates are 64-bit numbers
_BLOCK_TILE_LEVELS, _BLOCK_ROW_LEVELS = 10, 7  # the same for blocks: three short passes beat two long ones
_BLOCK_TILE_WARPS = 4
_FOLD_LEVELS = 14  # up to 2^14 columns need only part of the last stage
_FOLD_ROWS, _FOLD_COLUMNS = 16, 1024
_SPREAD, _COUNTERS = 1024, 128  # coordinates, and Philox counters, per program

_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(word) for word in philox.MULTIPLIERS)
_WEYL_0, _WEYL_1 = (tl.constexpr(word) for word in philox.WEYL)
_ROUNDS = tl.constexpr(philox.ROUNDS)

_PLAIN = tl.constexpr(0)  # a pass reads or writes the transformed vector itself,
_OPEN = tl.constexpr(1)  # or through the shuffle, with the opening signs,
_CLOSE = tl.constexpr(2)  # or with the closing signs, and beyond the first 2^m through the shuffle too


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
    """The index from which the shuffle takes coordinate i. `insert` is a number, or a pointer to one."""
    if insert.dtype.is_ptr():
        insert = tl.load(insert).to(i.dtype)
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


@triton.jit(do_not_specialize=["insert", "left_over"])
def _fold(outer, sums, order, opening, dim, insert, left_over, tile,
          rows: tl.constexpr, columns: tl.constexpr, block_levels: tl.constexpr, wide: tl.constexpr):  # fmt: skip
    """Sums of `rows` tiles each of the shuffled vector with its opening signs.

    One row at a time: in a two-dimensional gather Triton 3.6 lays a warp along the column, which took six times as long.
    """
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    start = tl.program_id(1) * rows
    if wide:
        start = start.to(tl.int64)
    total = tl.zeros((columns,), tl.float32)
    for row in tl.static_range(rows):
        i = (start + row) * tile + column
        total += tl.load(outer + _origin(order, i, dim, insert, left_over, block_levels)) * _sign(opening, i)
    tl.store(sums + tl.program_id(1) * tile + column, total)


@triton.jit(do_not_specialize=["insert", "left_over"])
def _spread(outer, folded, order, opening, dim, size, insert, left_over, tile, scale,
            span: tl.constexpr, block_levels: tl.constexpr, wide: tl.constexpr):  # fmt: skip
    """The transpose of the sum of all tiles. Coordinates beyond the first `size` of the shuffled vector are zero."""
    program = tl.program_id(0)
    if wide:
        program = program.to(tl.int64)
    i = program * span + tl.arange(0, span)
    within = i < dim
    i = tl.where(within, i, 0)
    value = tl.load(folded + (i & (tile - 1))) * (scale * _sign(opening, i))
    origin = _origin(order, i, dim, insert, left_over, block_levels)
    tl.store(outer + origin, tl.where(i < size, value, 0.0), mask=within)


@triton.jit(do_not_specialize=["counters", "more_counters", "stride"])
def _draw(words, key, counters, more_counters, stride, dim,
          domain: tl.constexpr, domains: tl.constexpr, span: tl.constexpr):  # fmt: skip
    """The first words of the Philox streams of each stage in one or two domains, as philox.words gives them.

    Stream s begins at words + s * stride and is of stage s // domains.
    """
    stream = tl.program_id(1)
    start = tl.program_id(0) * span
    if stream % domains > 0:
        counters = more_counters
    if start < counters:
        counter = start + tl.arange(0, span)
        c0 = counter.to(tl.uint64)
        c1 = tl.zeros_like(c0) + (stream // domains).to(tl.uint64)
        c2 = tl.zeros_like(c0) + (domain + stream % domains).to(tl.uint64)
        c3 = tl.zeros_like(c0) + dim.to(tl.uint64)
        k0 = tl.load(key).to(tl.uint64, bitcast=True)
        k1 = tl.load(key + 1).to(tl.uint64, bitcast=True)
        for _ in tl.static_range(_ROUNDS):
            high_0, low_0 = tl.umulhi(c0, tl.full(c0.shape, _MULTIPLIER_0, tl.uint64)), c0 * _MULTIPLIER_0
            high_1, low_1 = tl.umulhi(c2, tl.full(c2.shape, _MULTIPLIER_1, tl.uint64)), c2 * _MULTIPLIER_1
            c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
            k0 += _WEYL_0
            k1 += _WEYL_1
        place = words + stream.to(tl.int64) * stride + counter.to(tl.int64) * 4
        within = counter < counters
        tl.store(place, c0.to(tl.int64, bitcast=True), mask=within)
        tl.store(place + 1, c1.to(tl.int64, bitcast=True), mask=within)
        tl.store(place + 2, c2.to(tl.int64, bitcast=True), mask=within)
        tl.store(place + 3, c3.to(tl.int64, bitcast=True), mask=within)


class _Tables(NamedTuple):
    """The tables of a stage on a device; `insert` is a number of coordinates, or a tensor that holds it."""

    order: torch.Tensor
    opening: torch.Tensor
    closing: torch.Tensor
    insert: int | torch.Tensor


class _Shape(NamedTuple):
    """How a transform is cut into passes and programs."""

    passes: list[int]
    tile_warps: int
    tiles_write: bool = False  # a last pass that writes through the shuffle is one of tiles


class TritonRotation:
    """A rotation whose tables lie on a CUDA device."""

    def __init__(self, rotation: "Rotation", device: torch.device) -> None:
        self.rotation = rotation
        self.tables = [_tables(stage, rotation.block, device) for stage in rotation.stages]
        self.shape = _flat_shape(rotation)

    def rotate_back(self, vector: torch.Tensor) -> torch.Tensor:
        """The transposed rotation of a float32 vector, which is not changed."""
        outer, inner = vector, torch.empty_like(vector)
        for tables in self.tables:
            _stage_back(self.rotation, tables, outer, inner, self.shape)
            outer, inner = inner, torch.empty_like(vector) if outer is vector else outer
        return outer

    def products(self, vector: torch.Tensor, count: int) -> torch.Tensor:
        """The first `count` entries of the transposed rotation's image of a float32 vector, which is not changed."""
        rotation = self.rotation
        if count > foldable(rotation):
            return self.rotate_back(vector)[:count]
        outer, inner = vector, torch.empty_like(vector)
        for tables in self.tables[:-1]:
            _stage_back(rotation, tables, outer, inner, self.shape)
            outer, inner = inner, torch.empty_like(vector) if outer is vector else outer
        sums, folded = inner[: max(rotation.dim // _FOLD_ROWS, _tile(rotation))], vector.new_empty(_tile(rotation))
        return _folded_stage(rotation, self.tables[-1], outer, sums, folded)[:count]

    def length_for(self, count: int) -> int:
        """The number of coordinates that `rotate` needs of a vector with zeros after the first `count`."""
        return _tile(self.rotation) if count <= foldable(self.rotation) else self.rotation.dim

    def rotate(self, vector: torch.Tensor) -> torch.Tensor:
        """The rotation of a float32 vector, which is overwritten; coordinates that it lacks are zeros (`length_for`)."""
        rotation, stages = self.rotation, list(reversed(self.tables))
        inner, outer = vector, torch.empty(rotation.dim, dtype=vector.dtype, device=vector.device)
        if vector.numel() < rotation.dim:
            _spread_stage(rotation, stages.pop(0), outer, vector)
            inner, outer = outer, torch.empty_like(outer)
        for tables in stages:
            _stage(rotation, tables, outer, inner, self.shape)
            inner, outer = outer, inner
        return inner


class TritonBlocks:
    """Scratch on a CUDA device for rotations of at most `dim` coordinates and `stages` stages, one after another.

    It holds two float32 vectors and the signs of one rotation. Methods read from and write to these fixed places, so one
    CUDA graph of a method serves all rotations of a dim. `load` selects the rotation.

    The first 2^14 entries of the image need only part of the last stage if its second transform does not reach them:
    they are the transform of the sum of all tiles. `combine` uses the transpose of that.
    """

    def __init__(self, dim: int, stages: int, device: torch.device) -> None:
        self.dim, self.stages, self.device = dim, stages, device
        self.room, self._other = (torch.empty(dim, dtype=torch.float32, device=device) for _ in range(2))
        self._sums = torch.empty(max(dim // _FOLD_ROWS, 1 << _FOLD_LEVELS), dtype=torch.float32, device=device)
        self._folded = torch.empty(1 << _FOLD_LEVELS, dtype=torch.float32, device=device)
        self._signs = torch.empty(2 * stages * _sign_words(dim), dtype=torch.int64, device=device)
        self._loaded = torch.empty(_header(stages) + stages * _order_words(2**16), dtype=torch.int64, device=device)

    def prepare(self, rotation: "Rotation") -> torch.Tensor:
        """Key and shuffles of a rotation on the device, for `load`. An order takes 16 bits per entry."""
        stages, blocks = rotation.stages, rotation.dim // rotation.block
        header, stride = _header(len(stages)), _order_words(blocks)
        key = stages[0].key
        numbers = [key & (2**64 - 1), key >> 64, *(stage.insert * rotation.block for stage in stages)]
        prepared = torch.zeros(header + len(stages) * stride, dtype=torch.int64, device=self.device)
        host = torch.from_numpy(np.array(numbers, np.uint64).view(np.int64))
        prepared[: len(numbers)].copy_(host, non_blocking=True)
        counters = -(-blocks // 4)
        drawn = torch.empty((len(stages), 4 * counters), dtype=torch.int64, device=self.device)
        grid = (-(-counters // _COUNTERS), len(stages))
        how = {"domain": philox.SHUFFLE, "domains": 1, "span": _COUNTERS}
        _draw[grid](drawn, prepared, counters, counters, 4 * counters, rotation.dim, **how)
        for number, stage in enumerate(stages):
            if stage.shuffled:
                unsigned = drawn[number, :blocks] ^ -(2**63)  # sorts like unsigned words
                order = torch.sort(unsigned, stable=True).indices
            else:
                order = torch.arange(blocks, device=self.device)
            prepared[header + number * stride :].view(torch.int16)[:blocks].copy_(order)
        return prepared

    def load(self, prepared: torch.Tensor) -> None:
        """Select the rotation that is applied from now on."""
        self._loaded[: len(prepared)].copy_(prepared)

    def draw_signs(self, rotation: "Rotation") -> torch.Tensor:
        """The signs of the loaded rotation as bits of int64 words: for each stage the opening and the closing ones."""
        streams, stride = 2 * len(rotation.stages), _sign_words(rotation.dim)
        opening, closing = -(-rotation.dim // 256), -(-rotation.size // 256)
        grid = (-(-opening // _COUNTERS), streams)
        how = {"domain": philox.OPENING_SIGNS, "domains": 2, "span": _COUNTERS}
        _draw[grid](self._signs, self._loaded, opening, closing, stride, rotation.dim, **how)
        return self._signs[: streams * stride].view(-1, 2, stride)

    def products(self, rotation: "Rotation", count: int) -> torch.Tensor:
        """The first `count` entries of the transposed rotation's image of `room`, which is overwritten."""
        tables, shape = self._tables(rotation), _block_shape(rotation)
        outer, inner = self.room[: rotation.dim], self._other[: rotation.dim]
        folded = count <= foldable(rotation)
        for stage in tables[:-1] if folded else tables:
            _stage_back(rotation, stage, outer, inner, shape)
            outer, inner = inner, outer
        if not folded:
            return outer[:count]
        return _folded_stage(rotation, tables[-1], outer, self._sums, self._folded)[:count]

    def choose(self, rotation: "Rotation", indices: torch.Tensor, count: int) -> None:
        """Set which of the first `count` columns `combine` adds."""
        chosen = self._folded if count <= foldable(rotation) else self.room[: rotation.dim]
        chosen.zero_().index_fill_(0, indices, 1.0)

    def combine(self, rotation: "Rotation", count: int) -> torch.Tensor:
        """The sum of the columns that `choose` set."""
        tables, shape = self._tables(rotation), _block_shape(rotation)
        inner, outer = self.room[: rotation.dim], self._other[: rotation.dim]
        if count <= foldable(rotation):
            _spread_stage(rotation, tables.pop(), outer, self._folded)
            inner, outer = outer, inner
        for stage in reversed(tables):
            _stage(rotation, stage, outer, inner, shape)
            inner, outer = outer, inner
        return inner

    def _tables(self, rotation: "Rotation") -> list[_Tables]:
        """Draw the signs of the loaded rotation, and return its tables."""
        signs = self.draw_signs(rotation).view(torch.int32)
        header, stride = _header(len(rotation.stages)), _order_words(rotation.dim // rotation.block)
        orders = self._loaded[header : header + len(signs) * stride].view(torch.uint16).view(len(signs), -1)
        inserts = self._loaded[2:header]
        return [_Tables(orders[n], signs[n, 0], signs[n, 1], inserts[n:]) for n in range(len(signs))]


def _stage_back(rotation: "Rotation", tables: _Tables, outer: torch.Tensor, inner: torch.Tensor, shape: _Shape) -> None:
    """One stage of the transposed rotation, from `outer` to `inner`."""
    _transform(rotation, tables, outer, inner, 0, shape, read=1, write=0)
    _transform(rotation, tables, outer, inner, rotation.dim - rotation.size, shape, read=2, write=0)


def _stage(rotation: "Rotation", tables: _Tables, outer: torch.Tensor, inner: torch.Tensor, shape: _Shape) -> None:
    """One stage of the rotation, from `inner`, which is overwritten, to `outer`."""
    _transform(rotation, tables, outer, inner, rotation.dim - rotation.size, shape, read=0, write=2)
    _transform(rotation, tables, outer, inner, 0, shape, read=0, write=1)


def foldable(rotation: "Rotation") -> int:
    """The number of first columns that need only part of the last stage.

    Its second transform does not reach them: they are the transform of the sum of all tiles.
    """
    return min(rotation.dim - rotation.size, _tile(rotation))


def _folded_stage(
    rotation: "Rotation", tables: _Tables, outer: torch.Tensor, sums: torch.Tensor, folded: torch.Tensor
) -> torch.Tensor:
    """The first `foldable` entries that the last stage of the transposed rotation gives of `outer`, in `folded`."""
    tile = _tile(rotation)
    tiles = rotation.size // tile
    how = {"rows": min(_FOLD_ROWS, tiles), "columns": min(_FOLD_COLUMNS, tile), **_kind(rotation)}
    grid = (tile // how["columns"], tiles // how["rows"])
    order, opening, _, insert = tables
    shared = (order, opening, rotation.dim, insert, rotation.dim % rotation.block)
    _fold[grid](outer, sums, *shared, tile, **how)
    torch.sum(sums[: grid[1] * tile].view(-1, tile), 0, out=folded[:tile])
    _transform_folded(rotation, tables, folded)
    return folded[:tile].mul_(rotation.size**-0.5)


def _spread_stage(rotation: "Rotation", tables: _Tables, outer: torch.Tensor, folded: torch.Tensor) -> None:
    """Apply the last stage of the rotation to the first `foldable` coordinates, into `outer`; overwrites `folded`."""
    _transform_folded(rotation, tables, folded)
    shared = (tables.order, tables.opening, rotation.dim, rotation.size, tables.insert, rotation.dim % rotation.block)
    grid = (-(-rotation.dim // _SPREAD),)
    scale = rotation.size**-0.5
    _spread[grid](outer, folded, *shared, _tile(rotation), scale, span=_SPREAD, **_kind(rotation))


def _transform_folded(rotation: "Rotation", tables: _Tables, folded: torch.Tensor) -> None:
    shape = _Shape([_tile(rotation).bit_length() - 1], _TILE_WARPS)
    _transform(rotation, tables, folded, folded, 0, shape, read=0, write=0)


def _transform(
    rotation: "Rotation", tables: _Tables, outer: torch.Tensor, inner: torch.Tensor, first: int, shape: _Shape,
    *, read: int, write: int,
) -> None:  # fmt: skip
    """One Walsh-Hadamard transform of `inner` from `first` on; its first pass uses `read`, its last `write`."""
    order, opening, closing, insert = tables
    shared = (order, opening, closing, rotation.dim, rotation.size, insert, rotation.dim % rotation.block)
    scale = rotation.size**-0.5
    size = 1 << sum(shape.passes)
    passes = list(zip(accumulate(shape.passes, initial=0), shape.passes, strict=False))  # steps before it, and its own
    if write and shape.tiles_write:
        passes = [*passes[1:], passes[0]]
    for number, (below, levels) in enumerate(passes):
        how: dict[str, Any] = {
            "levels": levels,
            "read": read if number == 0 else 0,
            "write": write if number == len(passes) - 1 else 0,
            **_kind(rotation),
        }
        if below == 0:
            grid = (size >> levels,)
            _tiles[grid](outer, inner, first, *shared, scale, **how, num_warps=shape.tile_warps)
        else:
            grid = (size // _COLUMNS >> levels,)
            how |= {"columns": _COLUMNS, "num_warps": _ROW_WARPS}
            _rows[grid](outer, inner, first, 1 << below, *shared, scale, **how)


def _kind(rotation: "Rotation") -> dict[str, Any]:
    return {"block_levels": rotation.block.bit_length() - 1, "wide": rotation.dim >= _WIDE}


def _tile(rotation: "Rotation") -> int:
    return min(rotation.size, 1 << _FOLD_LEVELS)


def _flat_shape(rotation: "Rotation") -> _Shape:
    """Two passes where they suffice. Beyond the second cache, three passes over equally many rows are the fastest."""
    if rotation.levels <= _TILE_LEVELS + _ROW_LEVELS:
        return _Shape(_passes(rotation.levels, _TILE_LEVELS, _ROW_LEVELS), _TILE_WARPS)
    tile = min(max(_LONG_TILE_LEVELS, rotation.levels - 2 * _LONG_ROW_LEVELS), _TILE_LEVELS)
    warps = _LONG_TILE_WARPS if tile == _LONG_TILE_LEVELS else _TILE_WARPS
    return _Shape(_passes(rotation.levels, tile, _LONG_ROW_LEVELS), warps, tiles_write=True)


def _block_shape(rotation: "Rotation") -> _Shape:
    passes = _passes(rotation.levels, _BLOCK_TILE_LEVELS, _BLOCK_ROW_LEVELS)
    return _Shape(passes, _BLOCK_TILE_WARPS, tiles_write=True)


def _sign_words(dim: int) -> int:
    """The number of words for `dim` signs: whole counters of four."""
    return -(-dim // 256) * 4


def _order_words(blocks: int) -> int:
    """The number of words for an order of `blocks` 16-bit entries: even, since kernels need 16-byte alignment."""
    return -(-blocks // 8) * 2


def _header(stages: int) -> int:
    """The number of words before the orders: the key, and where each stage inserts the left-over coordinates."""
    return 2 + stages + stages % 2


def _tables(stage: "Stage", block: int, device: torch.device) -> _Tables:
    def packed(bits: Any) -> torch.Tensor:
        padded = np.zeros(-(-len(bits) // 4) * 4, np.uint8)
        padded[: len(bits)] = bits
        return torch.from_numpy(padded.view("<i4")).to(device)

    order = torch.from_numpy(stage.order.astype(np.int32)).to(device)
    return _Tables(order, packed(stage.opening), packed(stage.closing), stage.insert * block)


def _passes(levels: int, tile_levels: int, row_levels: int) -> list[int]:
    """The number of steps in each pass of a transform: within tiles, then between rows."""
    tile = min(levels, tile_levels)
    count = -(-(levels - tile) // row_levels)
    return [tile, *((levels - tile) // count + (number < (levels - tile) % count) for number in range(count))]
