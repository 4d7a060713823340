"""Rotations of blocks with shared scratch memory on a CUDA device; benchmarks/blocked_cuda.py measures time and memory."""

import numpy as np
import pytest
import torch

from coalmine.canaries import rotation_numpy
from coalmine.canaries.rotation import draw_rotation
from coalmine.canaries.rotation_torch import BlockRotations

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KEY = 0x0123456789ABCDEF_FEDCBA9876543210
# Powers of two, their neighbours and odd sizes; from 65,536 on the shuffle moves blocks, and some coordinates remain.
DIMS = (32, 63, 1000, 4096, 4097, 40_000, 65_535, 65_536, 70_001, 2**17 - 1, 300_007, 1_206_591, 2**21, 2**21 - 1)


def _vector(dim, seed=0):
    return np.random.default_rng(seed).standard_normal(dim)


def _error(result, exact):
    """The largest error, in units of the typical size of an entry."""
    return np.abs(result.double().cpu().numpy() - exact).max() / np.sqrt(np.mean(np.square(exact)))


@CUDA
@pytest.mark.parametrize("dim", DIMS)
def test_signs_and_shuffles_equal_numpys_bit_for_bit(dim):
    rotation_triton = pytest.importorskip("coalmine.canaries.rotation_triton", reason="needs Triton")
    rotation = draw_rotation(dim, KEY + dim)
    blocks = rotation_triton.TritonBlocks(dim, 3, torch.device("cuda"))
    blocks.load(blocks.prepare(rotation))
    signs = np.unpackbits(blocks.draw_signs(rotation).cpu().numpy().view(np.uint8), axis=-1, bitorder="little")
    for number, (stage, tables) in enumerate(zip(rotation.stages, blocks._tables(rotation), strict=True)):
        for drawn, packed, count in ((0, stage.opening, dim), (1, stage.closing, rotation.size)):
            np.testing.assert_array_equal(
                signs[number, drawn, :count], np.unpackbits(packed, count=count, bitorder="little")
            )
        np.testing.assert_array_equal(tables.order.cpu()[: len(stage.order)], stage.order)
        assert tables.insert[0].item() == stage.insert * rotation.block


@CUDA
@pytest.mark.parametrize("dim", [2, 9, 63, 4097, 40_000, 65_536, 70_001, 2**17 - 1, 2**21 - 1])
def test_products_and_sums_agree_with_float64_on_the_cpu(dim):
    """With few columns, which need only part of the last stage unless dim is a power of two, and with all columns."""
    rotation, vector = draw_rotation(dim, KEY), _vector(dim)
    exact = rotation_numpy.products(rotation, vector, dim)
    rotations = BlockRotations(torch.device("cuda"))
    given = torch.from_numpy(vector).float().cuda()
    kept = given.clone()
    typical = np.sqrt(np.mean(np.square(exact)))
    for count in sorted({min(dim, 20), max(1, dim - rotation.size), dim}):
        for _ in range(3):  # the first call compiles, later ones replay
            products = rotations.products(rotation, given, count)
            assert products.dtype == torch.float64
            assert products.is_cuda
            error = products.cpu().numpy() - exact[:count]
            assert np.sqrt(np.mean(np.square(error))) < 1e-6 * typical
        indices = sorted({0, count // 2, count - 1})
        expected = rotation_numpy.combine(rotation, indices, np.float64)
        for _ in range(3):
            total = rotations.combine(rotation, indices, torch.float32)
            assert _error(total, expected) < 1e-5
            assert np.linalg.norm(total.cpu().numpy() - expected) < 1e-6 * np.linalg.norm(expected)
    assert torch.equal(given, kept)


@CUDA
def test_float64_vectors_stay_float64():
    rotation, vector = draw_rotation(70_001, KEY), _vector(70_001)
    rotations = BlockRotations(torch.device("cuda"))
    products = rotations.products(rotation, torch.from_numpy(vector).cuda(), 50)
    assert _error(products, rotation_numpy.products(rotation, vector, 50)) < 1e-12
    total = rotations.combine(rotation, [3, 5], torch.float64)
    assert total.dtype == torch.float64
    assert _error(total, rotation_numpy.combine(rotation, [3, 5], np.float64)) < 1e-12


@CUDA
def test_bfloat16_sums_are_rounded_float32_sums():
    rotation = draw_rotation(70_001, KEY)
    rotations = BlockRotations(torch.device("cuda"))
    total = rotations.combine(rotation, [3, 5], torch.bfloat16)
    assert torch.equal(total, rotations.combine(rotation, [3, 5], torch.float32).bfloat16())


@CUDA
def test_blocks_of_different_sizes_can_be_interleaved():
    """Twelve blocks with different keys and alternating sizes, all queued before any result is read."""
    dims = [9, 40_000, 1000, 40_001, 131_071, 40_000, 20, 131_071, 131_070, 65_536, 40_001, 300_007]
    rotations = BlockRotations(torch.device("cuda"))
    blocks = [(draw_rotation(dim, KEY + number), _vector(dim, number)) for number, dim in enumerate(dims)]
    given = [torch.from_numpy(vector).float().cuda() for _, vector in blocks]
    for _ in range(3):
        queued = []
        for (rotation, _), vector in zip(blocks, given, strict=True):
            room = rotations.room(rotation)
            room.copy_(vector)
            queued.append(
                (
                    rotations.products(rotation, room, min(rotation.dim, 100)),
                    rotations.combine(rotation, [1, 4], torch.float32),
                )
            )
        for (rotation, vector), (products, total) in zip(blocks, queued, strict=True):
            exact = rotation_numpy.products(rotation, vector, min(rotation.dim, 100))
            assert _error(products, exact) < 5e-6
            assert _error(total, rotation_numpy.combine(rotation, [1, 4], np.float64)) < 1e-5


@CUDA
def test_calls_on_two_streams_do_not_overwrite_each_other():
    rotations = BlockRotations(torch.device("cuda"))
    blocks = [draw_rotation(2**20 - 1, KEY + number) for number in range(2)]
    vectors = [torch.randn(2**20 - 1, device="cuda", generator=_generator(number)) for number in range(2)]
    expected = [rotations.products(one, vector, 100) for one, vector in zip(blocks, vectors, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(rotations.products(blocks[turn % 2], vectors[turn % 2], 100))
    torch.cuda.synchronize()
    for turn, result in enumerate(results):
        assert torch.equal(result, expected[turn % 2])


@CUDA
def test_memory_does_not_grow_with_the_number_of_blocks():
    """Forty blocks of 2^20 - 1 numbers: memory for two of them in float32, and three shuffles of 65,535 entries each."""
    pytest.importorskip("coalmine.canaries.rotation_triton", reason="needs Triton")
    dim, count = 2**20 - 1, 40
    blocks = [draw_rotation(dim, KEY + number) for number in range(count)]
    rotations = BlockRotations(torch.device("cuda"))
    rotations.products(blocks[0], torch.ones(dim, device="cuda"), 500)  # allocates what Triton and torch keep
    del rotations
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rotations = BlockRotations(torch.device("cuda"))
    for rotation in blocks:
        room = rotations.room(rotation)
        room.fill_(1.0)
        rotations.products(rotation, room, 500)
    extra = torch.cuda.max_memory_allocated() - before
    shuffles = 3 * 2 * 65_535
    assert extra < 2.5 * 4 * dim + count * shuffles + 2**23  # half a block for signs, 8 MiB while a shuffle is sorted


def _generator(seed):
    return torch.Generator("cuda").manual_seed(seed)


@pytest.mark.parametrize("dim", [9, 1000, 70_001])
def test_plain_torch_agrees_with_numpy_without_triton(dim):
    rotation, vector = draw_rotation(dim, KEY), _vector(dim)
    rotations = BlockRotations(torch.device("cpu"))
    room = rotations.room(rotation)
    assert room.shape == (dim,)
    exact = rotation_numpy.products(rotation, vector, 9)
    assert _error(rotations.products(rotation, torch.from_numpy(vector), 9), exact) < 1e-12
    products = rotations.products(rotation, torch.from_numpy(vector).float(), 9)
    assert products.dtype == torch.float64
    assert _error(products, exact) < 1e-5
    assert "opening" not in vars(rotation.stages[0])  # signs are not cached
    expected = rotation_numpy.combine(rotation, [0, 8], np.float64)
    assert _error(rotations.combine(rotation, [0, 8], torch.float64), expected) < 1e-12
    assert rotations.combine(rotation, [0, 8], torch.bfloat16).dtype == torch.bfloat16
