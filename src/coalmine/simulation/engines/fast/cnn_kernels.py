# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The operations of cnn_ops as Triton kernels, which do not write patches to memory.

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
    valid = m < per_client * inner * inner
    picture, position = m // (inner * inner), m % (inner * inner)
    base = ((picture * side + position // inner) * side + position % inner) * inputs
    c, o = tl.arange(0, inputs), tl.arange(0, outputs)
    maps += client * per_client * side * side * inputs
    kernel += client * outputs * 9 * inputs
    total = tl.zeros((rows, outputs), tl.float32)
    for k in tl.static_range(9):
        x = tl.load(
            maps + (base + (k // 3 * side + k % 3) * inputs)[:, None] + c[None, :], mask=valid[:, None], other=0.0
        )
        w = tl.load(kernel + o[None, :] * (9 * inputs) + k * inputs + c[:, None])
        total = tl.dot(x, w, total, input_precision=precision)
    total += tl.load(bias + client * outputs + o)[None, :]
    out += client * per_client * inner * inner * outputs
    tl.store(out + m[:, None] * outputs + o[None, :], total, mask=valid[:, None])


@triton.jit
def _input_gradient(grads, kernel, maps, out, per_client: tl.constexpr, side: tl.constexpr,
                  inputs: tl.constexpr, outputs: tl.constexpr, rows: tl.constexpr, precision: tl.constexpr):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    inner: tl.constexpr = side - 2
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    valid = m < per_client * side * side
    picture, position = m // (side * side), m % (side * side)
    y, x = position // side, position % side
    c, o = tl.arange(0, inputs), tl.arange(0, outputs)
    grads += client * per_client * inner * inner * outputs
    kernel += client * outputs * 9 * inputs
    total = tl.zeros((rows, inputs), tl.float32)
    for k in tl.static_range(9):
        down, right = y - k // 3, x - k % 3
        inside = valid & (down >= 0) & (down < inner) & (right >= 0) & (right < inner)
        offset = ((picture * inner + down) * inner + right) * outputs
        s = tl.load(grads + offset[:, None] + o[None, :], mask=inside[:, None], other=0.0)
        w = tl.load(kernel + o[:, None] * (9 * inputs) + k * inputs + c[None, :])
        total = tl.dot(s, w, total, input_precision=precision)
    offset = client * per_client * side * side * inputs + m[:, None] * inputs + c[None, :]
    is_positive = tl.load(maps + offset, mask=valid[:, None], other=0.0) > 0
    tl.store(out + offset, tl.where(is_positive, total, 0.0), mask=valid[:, None])


@triton.jit
def _kernel_gradient(maps, grads, out, per_part: tl.constexpr, side: tl.constexpr,
                     inputs: tl.constexpr, outputs: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr):  # fmt: skip
    """The gradient at one position of the kernel from `per_part` pictures of a client."""
    k, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    inner: tl.constexpr = side - 2
    length: tl.constexpr = per_part * inner * inner
    c, o = tl.arange(0, inputs), tl.arange(0, outputs)
    maps += part * per_part * side * side * inputs + (k // 3 * side + k % 3) * inputs
    grads += part * length * outputs
    total = tl.zeros((outputs, inputs), tl.float32)
    for start in range(0, length, depth):
        m = start + tl.arange(0, depth)
        valid = m < length
        picture, position = m // (inner * inner), m % (inner * inner)
        base = ((picture * side + position // inner) * side + position % inner) * inputs
        x = tl.load(maps + base[:, None] + c[None, :], mask=valid[:, None], other=0.0)
        s = tl.load(grads + m[:, None] * outputs + o[None, :], mask=valid[:, None], other=0.0)
        total = tl.dot(tl.trans(s), x, total, input_precision=precision)
    tl.store(out + (part * outputs + o[:, None]) * (9 * inputs) + k * inputs + c[None, :], total)


@triton.jit
def _scramble(words, shift: tl.constexpr, factor: tl.constexpr):
    return (words ^ (words >> shift)) * factor


@triton.jit
def _key(seed, step, salt):
    low = ((seed & 0x7FFFFFFF) + step * 16 + salt).to(tl.uint32, bitcast=False)
    return _scramble(_scramble(low, 16, 2246822507), 13, 3266489909)


@triton.jit
def _is_kept(position, seed, step, salt, threshold):
    """Whether dropout keeps a position, by the hash of models.model.dropout_mask."""
    first, second = _key(seed, step, 2 * salt), _key(seed >> 32, step, 2 * salt + 1)
    hashed = _scramble(position.to(tl.uint32) ^ first, 16, 2246822507) ^ second
    hashed = _scramble(hashed, 13, 3266489909)
    hashed = hashed ^ (hashed >> 16)
    return hashed.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def _dense_mask(out, seeds, steps, length, salt, threshold, factor, block: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0) * block + tl.arange(0, block)
    kept = _is_kept(offset, tl.load(seeds + client), tl.load(steps), salt, threshold)
    tl.store(out + client * length + offset, tl.where(kept, factor, 0.0), mask=offset < length)


@triton.jit
def _pool(maps, out, argmax, seeds, steps, per_client, threshold, factor,
          half: tl.constexpr, width: tl.constexpr, channels: tl.constexpr):  # fmt: skip
    row, picture = tl.program_id(1), tl.program_id(0).to(tl.int64)
    client, slot = picture // per_client, picture % per_client
    x, c = tl.arange(0, width), tl.arange(0, channels)
    valid = (x < half)[:, None] & (c >= 0)[None, :]
    offset = maps + ((picture * 2 * half + 2 * row) * 2 * half + 2 * x)[:, None] * channels + c[None, :]
    best = tl.load(offset, mask=valid, other=0.0)
    best_position = tl.zeros((width, channels), tl.int8)
    for k in tl.static_range(1, 4):
        value = tl.load(offset + (k // 2 * 2 * half + k % 2) * channels, mask=valid, other=0.0)
        best_position = tl.where(value > best, k, best_position).to(tl.int8)
        best = tl.maximum(best, value)
    position = c[None, :] * (half * half) + row * half + x[:, None]
    length: tl.constexpr = channels * half * half
    kept = _is_kept(slot * length + position, tl.load(seeds + client), tl.load(steps), 0, threshold)
    value = tl.where(kept & (best > 0), best * factor, 0.0)
    tl.store(out + picture * length + position, value, mask=valid)
    tl.store(argmax + picture * length + position, best_position, mask=valid)


@triton.jit
def _unpool(grads, pooled, argmax, out, factor,
            half: tl.constexpr, width: tl.constexpr, channels: tl.constexpr):  # fmt: skip
    row, picture = tl.program_id(1), tl.program_id(0).to(tl.int64)
    x, c = tl.arange(0, width), tl.arange(0, channels)
    valid = (x < half)[:, None] & (c >= 0)[None, :]
    position = picture * channels * half * half + c[None, :] * (half * half) + row * half + x[:, None]
    grad = tl.load(grads + position, mask=valid, other=0.0) * factor
    grad = tl.where(tl.load(pooled + position, mask=valid, other=0.0) > 0, grad, 0.0)
    best_position = tl.load(argmax + position, mask=valid, other=0)
    offset = out + ((picture * 2 * half + 2 * row) * 2 * half + 2 * x)[:, None] * channels + c[None, :]
    for k in tl.static_range(4):
        tl.store(offset + (k // 2 * 2 * half + k % 2) * channels, tl.where(best_position == k, grad, 0.0), mask=valid)


def convolve(maps: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """See cnn_ops.convolve."""
    count, side, _, inputs = maps.shape
    clients, outputs = kernel.shape[:2]
    out = maps.new_empty(count, side - 2, side - 2, outputs)
    grid = (triton.cdiv(count // clients * (side - 2) ** 2, _ROWS), clients)
    shape = (count // clients, side, inputs, outputs, _ROWS, _precision())
    _convolve[grid](maps, kernel, bias.contiguous(), out, *shape, num_warps=4)
    return out


def kernel_gradient(maps: Tensor, grads: Tensor, clients: int) -> Tensor:
    """See cnn_ops.kernel_gradient."""
    count, side, _, inputs = maps.shape
    outputs, per_client = grads.shape[3], count // clients
    parts = next(number for number in (4, 2, 1) if per_client % number == 0)
    out = maps.new_empty(clients, parts, outputs, 9 * inputs)
    shape = (per_client // parts, side, inputs, outputs, _DEPTH, _precision())
    _kernel_gradient[(9, clients * parts)](maps, grads, out, *shape, num_warps=4)
    return out.sum(dim=1)


def input_gradient(grads: Tensor, kernel: Tensor, maps: Tensor) -> Tensor:
    """See cnn_ops.input_gradient."""
    count, side, _, inputs = maps.shape
    clients, outputs = kernel.shape[:2]
    out = torch.empty_like(maps)
    grid = (triton.cdiv(count // clients * side**2, _ROWS), clients)
    shape = (count // clients, side, inputs, outputs, _ROWS, _precision())
    _input_gradient[grid](grads, kernel, maps, out, *shape, num_warps=4)
    return out


def pool(maps: Tensor, dropout: Dropout, seeds: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """See cnn_ops.pool."""
    count, side, _, channels = maps.shape
    half, per_client = side // 2, count // len(seeds)
    out = maps.new_empty(len(seeds), per_client, channels * half * half)
    argmax = torch.empty_like(out, dtype=torch.int8)
    shape = (half, triton.next_power_of_2(half), channels)
    _pool[(count, half)](maps, out, argmax, seeds, step, per_client, _threshold(dropout), _factor(dropout.rate), *shape)
    return out, argmax


def unpool(grads: Tensor, pooled: Tensor, argmax: Tensor, rate: float, channels: int) -> Tensor:
    """See cnn_ops.unpool."""
    half = round((grads.shape[2] / channels) ** 0.5)
    count = grads.shape[0] * grads.shape[1]
    out = grads.new_empty(count, 2 * half, 2 * half, channels)
    shape = (half, triton.next_power_of_2(half), channels)
    _unpool[(count, half)](grads, pooled, argmax, out, _factor(rate), *shape)
    return out


def dense_mask(dropout: Dropout, seeds: Tensor, step: Tensor, count: int, salt: int) -> Tensor:
    """See cnn_ops.dense_mask."""
    out = torch.empty(len(seeds), count, *dropout.shape, device=seeds.device)
    length = out[0].numel()
    grid = (triton.cdiv(length, 1024), len(seeds))
    _dense_mask[grid](out, seeds, step, length, salt, _threshold(dropout), _factor(dropout.rate), 1024)
    return out


def _threshold(dropout: Dropout) -> int:
    return round(dropout.rate * 2**32) - 2**31


def _factor(rate: float) -> float:
    return 1 / (1 - rate)


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
