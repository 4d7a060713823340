# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The parts of the CNN's step as Triton kernels: as cnn_ops, without writing patches to memory.

A convolution is a matrix product whose left factor is read directly from the maps. The client is one axis of the grid, so
each client has its own kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coalmine.simulation.models.model import Dropout

_ROWS, _DEPTH = 128, 64


@triton.jit
def _convolve(maps, kernel, bias, out, per_client: tl.constexpr, side: tl.constexpr,
              inputs: tl.constexpr, outputs: tl.constexpr, rows: tl.constexpr, precision: tl.constexpr):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    inner: tl.constexpr = side - 2
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    there = m < per_client * inner * inner
    picture, place = m // (inner * inner), m % (inner * inner)
    base = ((picture * side + place // inner) * side + place % inner) * inputs
    c, o = tl.arange(0, inputs), tl.arange(0, outputs)
    maps += client * per_client * side * side * inputs
    kernel += client * outputs * 9 * inputs
    total = tl.zeros((rows, outputs), tl.float32)
    for k in tl.static_range(9):
        x = tl.load(
            maps + (base + (k // 3 * side + k % 3) * inputs)[:, None] + c[None, :], mask=there[:, None], other=0.0
        )
        w = tl.load(kernel + o[None, :] * (9 * inputs) + k * inputs + c[:, None])
        total = tl.dot(x, w, total, input_precision=precision)
    total += tl.load(bias + client * outputs + o)[None, :]
    out += client * per_client * inner * inner * outputs
    tl.store(out + m[:, None] * outputs + o[None, :], total, mask=there[:, None])


@triton.jit
def _through_relu(slopes, kernel, maps, out, per_client: tl.constexpr, side: tl.constexpr,
                  inputs: tl.constexpr, outputs: tl.constexpr, rows: tl.constexpr, precision: tl.constexpr):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    inner: tl.constexpr = side - 2
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    there = m < per_client * side * side
    picture, place = m // (side * side), m % (side * side)
    y, x = place // side, place % side
    c, o = tl.arange(0, inputs), tl.arange(0, outputs)
    slopes += client * per_client * inner * inner * outputs
    kernel += client * outputs * 9 * inputs
    total = tl.zeros((rows, inputs), tl.float32)
    for k in tl.static_range(9):
        down, right = y - k // 3, x - k % 3
        inside = there & (down >= 0) & (down < inner) & (right >= 0) & (right < inner)
        at = ((picture * inner + down) * inner + right) * outputs
        s = tl.load(slopes + at[:, None] + o[None, :], mask=inside[:, None], other=0.0)
        w = tl.load(kernel + o[:, None] * (9 * inputs) + k * inputs + c[None, :])
        total = tl.dot(s, w, total, input_precision=precision)
    at = client * per_client * side * side * inputs + m[:, None] * inputs + c[None, :]
    alive = tl.load(maps + at, mask=there[:, None], other=0.0) > 0
    tl.store(out + at, tl.where(alive, total, 0.0), mask=there[:, None])


@triton.jit
def _kernel_gradient(maps, slopes, out, per_part: tl.constexpr, side: tl.constexpr,
                     inputs: tl.constexpr, outputs: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr):  # fmt: skip
    """The gradient of one place of the kernel from `per_part` pictures of a client."""
    k, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    inner: tl.constexpr = side - 2
    length: tl.constexpr = per_part * inner * inner
    c, o = tl.arange(0, inputs), tl.arange(0, outputs)
    maps += part * per_part * side * side * inputs + (k // 3 * side + k % 3) * inputs
    slopes += part * length * outputs
    total = tl.zeros((outputs, inputs), tl.float32)
    for start in range(0, length, depth):
        m = start + tl.arange(0, depth)
        there = m < length
        picture, place = m // (inner * inner), m % (inner * inner)
        base = ((picture * side + place // inner) * side + place % inner) * inputs
        x = tl.load(maps + base[:, None] + c[None, :], mask=there[:, None], other=0.0)
        s = tl.load(slopes + m[:, None] * outputs + o[None, :], mask=there[:, None], other=0.0)
        total = tl.dot(tl.trans(s), x, total, input_precision=precision)
    tl.store(out + (part * outputs + o[:, None]) * (9 * inputs) + k * inputs + c[None, :], total)


@triton.jit
def _scrambled(words, shift: tl.constexpr, factor: tl.constexpr):
    return (words ^ (words >> shift)) * factor


@triton.jit
def _key(seed, step, salt):
    low = ((seed & 0x7FFFFFFF) + step * 16 + salt).to(tl.uint32, bitcast=False)
    return _scrambled(_scrambled(low, 16, 2246822507), 13, 3266489909)


@triton.jit
def _kept(place, seed, step, salt, threshold):
    """Whether dropout keeps a place: the hash of models.base.dropout_mask."""
    first, second = _key(seed, step, 2 * salt), _key(seed >> 32, step, 2 * salt + 1)
    hashed = _scrambled(place.to(tl.uint32) ^ first, 16, 2246822507) ^ second
    hashed = _scrambled(hashed, 13, 3266489909)
    hashed = hashed ^ (hashed >> 16)
    return hashed.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def _dropped(out, seeds, steps, length, salt, threshold, factor, block: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * block + tl.arange(0, block)
    kept = _kept(at, tl.load(seeds + client), tl.load(steps), salt, threshold)
    tl.store(out + client * length + at, tl.where(kept, factor, 0.0), mask=at < length)


@triton.jit
def _pool(maps, out, which, seeds, steps, per_client, threshold, factor,
          half: tl.constexpr, width: tl.constexpr, channels: tl.constexpr):  # fmt: skip
    row, picture = tl.program_id(1), tl.program_id(0).to(tl.int64)
    client, slot = picture // per_client, picture % per_client
    x, c = tl.arange(0, width), tl.arange(0, channels)
    there = (x < half)[:, None] & (c >= 0)[None, :]
    at = maps + ((picture * 2 * half + 2 * row) * 2 * half + 2 * x)[:, None] * channels + c[None, :]
    best = tl.load(at, mask=there, other=0.0)
    found = tl.zeros((width, channels), tl.int8)
    for k in tl.static_range(1, 4):
        value = tl.load(at + (k // 2 * 2 * half + k % 2) * channels, mask=there, other=0.0)
        found = tl.where(value > best, k, found).to(tl.int8)
        best = tl.maximum(best, value)
    place = c[None, :] * (half * half) + row * half + x[:, None]
    length: tl.constexpr = channels * half * half
    kept = _kept(slot * length + place, tl.load(seeds + client), tl.load(steps), 0, threshold)
    value = tl.where(kept & (best > 0), best * factor, 0.0)
    tl.store(out + picture * length + place, value, mask=there)
    tl.store(which + picture * length + place, found, mask=there)


@triton.jit
def _unpool(slopes, pooled, which, out, factor,
            half: tl.constexpr, width: tl.constexpr, channels: tl.constexpr):  # fmt: skip
    row, picture = tl.program_id(1), tl.program_id(0).to(tl.int64)
    x, c = tl.arange(0, width), tl.arange(0, channels)
    there = (x < half)[:, None] & (c >= 0)[None, :]
    place = picture * channels * half * half + c[None, :] * (half * half) + row * half + x[:, None]
    slope = tl.load(slopes + place, mask=there, other=0.0) * factor
    slope = tl.where(tl.load(pooled + place, mask=there, other=0.0) > 0, slope, 0.0)
    found = tl.load(which + place, mask=there, other=0)
    at = out + ((picture * 2 * half + 2 * row) * 2 * half + 2 * x)[:, None] * channels + c[None, :]
    for k in tl.static_range(4):
        tl.store(at + (k // 2 * 2 * half + k % 2) * channels, tl.where(found == k, slope, 0.0), mask=there)


def convolve(maps: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """cnn_ops.convolve."""
    count, side, _, inputs = maps.shape
    clients, outputs = kernel.shape[:2]
    out = maps.new_empty(count, side - 2, side - 2, outputs)
    grid = (triton.cdiv(count // clients * (side - 2) ** 2, _ROWS), clients)
    shape = (count // clients, side, inputs, outputs, _ROWS, _precision())
    _convolve[grid](maps, kernel, bias.contiguous(), out, *shape, num_warps=4)
    return out


def kernel_gradient(maps: Tensor, slopes: Tensor, clients: int) -> Tensor:
    """cnn_ops.kernel_gradient."""
    count, side, _, inputs = maps.shape
    outputs, per_client = slopes.shape[3], count // clients
    parts = next(number for number in (4, 2, 1) if per_client % number == 0)
    out = maps.new_empty(clients, parts, outputs, 9 * inputs)
    shape = (per_client // parts, side, inputs, outputs, _DEPTH, _precision())
    _kernel_gradient[(9, clients * parts)](maps, slopes, out, *shape, num_warps=4)
    return out.sum(dim=1)


def through_relu(slopes: Tensor, kernel: Tensor, maps: Tensor) -> Tensor:
    """cnn_ops.through_relu."""
    count, side, _, inputs = maps.shape
    clients, outputs = kernel.shape[:2]
    out = torch.empty_like(maps)
    grid = (triton.cdiv(count // clients * side**2, _ROWS), clients)
    shape = (count // clients, side, inputs, outputs, _ROWS, _precision())
    _through_relu[grid](slopes, kernel, maps, out, *shape, num_warps=4)
    return out


def pool(maps: Tensor, dropout: Dropout, seeds: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """cnn_ops.pool."""
    count, side, _, channels = maps.shape
    half, per_client = side // 2, count // len(seeds)
    out = maps.new_empty(len(seeds), per_client, channels * half * half)
    which = torch.empty_like(out, dtype=torch.int8)
    shape = (half, triton.next_power_of_2(half), channels)
    _pool[(count, half)](maps, out, which, seeds, step, per_client, _threshold(dropout), _factor(dropout.rate), *shape)
    return out, which


def unpool(slopes: Tensor, pooled: Tensor, which: Tensor, rate: float, channels: int) -> Tensor:
    """cnn_ops.unpool."""
    half = round((slopes.shape[2] / channels) ** 0.5)
    count = slopes.shape[0] * slopes.shape[1]
    out = slopes.new_empty(count, 2 * half, 2 * half, channels)
    shape = (half, triton.next_power_of_2(half), channels)
    _unpool[(count, half)](slopes, pooled, which, out, _factor(rate), *shape)
    return out


def dropped(dropout: Dropout, seeds: Tensor, step: Tensor, count: int, salt: int) -> Tensor:
    """cnn_ops.dropped."""
    out = torch.empty(len(seeds), count, *dropout.shape, device=seeds.device)
    length = out[0].numel()
    grid = (triton.cdiv(length, 1024), len(seeds))
    _dropped[grid](out, seeds, step, length, salt, _threshold(dropout), _factor(dropout.rate), 1024)
    return out


def _threshold(dropout: Dropout) -> int:
    return round(dropout.rate * 2**32) - 2**31


def _factor(rate: float) -> float:
    return 1 / (1 - rate)


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
