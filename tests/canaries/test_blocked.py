"""Blocked canaries are orthonormal, each block has its own rotation, and their cosines follow the null law."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from coalmine.canaries import BlockedCanaries, RotatedCanaries
from coalmine.canaries.blocked import LARGEST_BLOCK, cut_into_blocks
from coalmine.estimators.null import CosineNull

UNEVEN = (64, 201, 500)


def dense(canaries, blocks):
    """Every canary as a row."""
    return np.stack([np.concatenate([canaries.combine(b, [i]) for b in range(blocks)]) for i in range(canaries.count)])


@pytest.mark.parametrize("sizes", [(300,), UNEVEN, (128, 128), tuple(range(20, 60))])
def test_canaries_are_orthonormal_and_each_block_holds_its_share_of_them(sizes):
    canaries = BlockedCanaries(20, sizes, seed=5)
    rows = dense(canaries, len(sizes))
    np.testing.assert_allclose(rows @ rows.T, np.eye(20), atol=1e-12)
    for piece, size in zip(np.split(rows, np.cumsum(sizes)[:-1], axis=1), sizes, strict=True):
        np.testing.assert_allclose(piece @ piece.T, np.eye(20) * size / sum(sizes), atol=1e-12)


def test_products_agree_with_the_unit_vectors_of_the_block():
    canaries, rng = BlockedCanaries(20, UNEVEN, seed=5), np.random.default_rng(1)
    for block, size in enumerate(UNEVEN):
        vector = rng.normal(size=size)
        units = np.stack([canaries.combine(block, [i]) for i in range(20)]) / math.sqrt(size / sum(UNEVEN))
        np.testing.assert_allclose(canaries.products(block, vector), units @ vector, atol=1e-11)


def test_cosines_agree_with_dense_canaries():
    canaries, rng = BlockedCanaries(20, UNEVEN, seed=5), np.random.default_rng(1)
    vector = rng.normal(size=sum(UNEVEN))
    expected = dense(canaries, 3) @ vector / np.linalg.norm(vector)
    np.testing.assert_allclose(canaries.cosines(vector), expected, atol=1e-12)
    for size in (1e-250, 1e250):
        np.testing.assert_allclose(canaries.cosines(vector * size), expected, atol=1e-12)


def test_a_sum_of_canaries_is_the_sum_of_their_blocks():
    canaries = BlockedCanaries(20, UNEVEN, seed=5)
    rows = dense(canaries, 3)
    total = np.concatenate([canaries.combine(block, [0, 3, 19]) for block in range(3)])
    np.testing.assert_allclose(total, rows[0] + rows[3] + rows[19], atol=1e-12)


def test_one_block_equals_the_rotation_of_the_whole_vector_bit_for_bit():
    one, whole = BlockedCanaries(30, [1_000], seed=b"a seed"), RotatedCanaries(30, 1_000, seed=b"a seed")
    vector = np.random.default_rng(2).normal(size=1_000)
    assert (one.combine(0, [4, 7]) == whole.combine([4, 7])).all()
    np.testing.assert_allclose(one.cosines(vector), whole.cosines(vector), rtol=1e-12)


def test_blocks_of_one_size_have_different_rotations():
    """With one shared key, canary i would be the same in both (cosine 1); if independent, the largest of 50 is small."""
    canaries = BlockedCanaries(50, [400, 400, 400], seed=3)
    rows = dense(canaries, 3).reshape(50, 3, 400) * math.sqrt(3)
    for one, two in ((0, 1), (0, 2), (1, 2)):
        cosines = rows[:, one] @ rows[:, two].T
        assert np.abs(cosines).max() < CosineNull(400).ppf(1 - 1e-4 / 2_500)
        assert np.std(cosines) == pytest.approx(1 / 20, rel=0.1)


def test_a_vector_repeated_in_every_block_has_the_usual_variance():
    """Its projection on a canary has variance ‖v‖²/d; with one key for all blocks it would be five times as large."""
    piece = np.random.default_rng(4).normal(size=160)
    vector = np.tile(piece, 5)
    cosines = np.concatenate([BlockedCanaries(8, [160] * 5, seed=seed).cosines(vector) for seed in range(150)])
    assert np.mean(cosines**2) * 800 == pytest.approx(1, abs=4 * math.sqrt(2 / cosines.size))


@pytest.mark.parametrize("block", [0, 1, 2])
def test_the_cosine_with_a_vector_in_one_block_is_scaled_by_the_blocks_share(block):
    """Exactly CosineNull(d_b)·√(d_b/d), also for a single coordinate in a block of 64."""
    vector = np.zeros(sum(UNEVEN))
    vector[[0, *np.cumsum(UNEVEN)][block] + 11] = -2.0
    cosines = np.concatenate([BlockedCanaries(4, UNEVEN, seed=seed).cosines(vector) for seed in range(200)])
    law = CosineNull(UNEVEN[block], scale=math.sqrt(UNEVEN[block] / sum(UNEVEN)))
    assert stats.kstest(cosines, law.cdf).pvalue > 1e-3
    assert np.mean(cosines**2) * sum(UNEVEN) == pytest.approx(1, abs=4 * math.sqrt(2 / cosines.size))


def test_a_process_generates_only_its_own_blocks():
    whole = BlockedCanaries(20, UNEVEN, seed=5)
    part = BlockedCanaries(20, UNEVEN[1:], seed=5, first=1, dim=sum(UNEVEN))
    alone = BlockedCanaries(20, UNEVEN[:1], seed=5, dim=sum(UNEVEN))
    vector = np.random.default_rng(2).normal(size=500)
    assert (part.combine(1, [2, 5]) == whole.combine(2, [2, 5])).all()
    assert (part.products(1, vector) == whole.products(2, vector)).all()
    assert (alone.combine(0, [2, 5]) == whole.combine(0, [2, 5])).all()  # one block here, several in the model
    assert BlockedCanaries(20, [], seed=5, first=3, dim=700).sizes == ()  # a process may hold nothing


def test_canaries_depend_only_on_the_seed():
    def first(seed):
        return BlockedCanaries(5, UNEVEN, seed=seed).combine(1, [0])

    assert (first(1) == first(1)).all()
    assert abs(first(1) @ first(2)) * sum(UNEVEN) / 201 < 0.5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_tensors_and_arrays_give_the_same_results(dtype, tolerance):
    canaries = BlockedCanaries(20, UNEVEN, seed=5)
    vector = np.random.default_rng(2).normal(size=201)
    found = canaries.products(1, torch.tensor(vector, dtype=dtype))
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), canaries.products(1, vector), atol=100 * tolerance)
    total = canaries.combine(1, [3, 4], like=torch.empty(0, dtype=dtype))
    assert total.dtype == dtype
    np.testing.assert_allclose(total.numpy(), canaries.combine(1, [3, 4]), atol=tolerance)


@pytest.mark.parametrize("dim", [2, 1_000, LARGEST_BLOCK, LARGEST_BLOCK + 1, 10**9, 7 * LARGEST_BLOCK])
def test_a_model_is_split_into_the_fewest_nearly_equal_blocks(dim):
    sizes = cut_into_blocks(dim)
    assert sum(sizes) == dim
    assert max(sizes) <= LARGEST_BLOCK
    assert max(sizes) - min(sizes) <= 1
    assert (len(sizes) - 1) * LARGEST_BLOCK < dim


def test_an_empty_model_has_no_blocks():
    assert cut_into_blocks(0) == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((65, UNEVEN), "count must be at most the smallest block, got 65 in one of 64"),
        ((0, UNEVEN), "count must be at least 1, got 0"),
        ((1, (64, 1)), "the size of a block must be at least 2, got 1"),
    ],
)
def test_invalid_blocks_are_rejected(arguments, words):
    with pytest.raises(ValueError, match=words):
        BlockedCanaries(*arguments, seed=5)


def test_blocks_larger_than_the_model_are_rejected():
    with pytest.raises(ValueError, match="dim must be at least the total size of the blocks, 765, got 700"):
        BlockedCanaries(5, UNEVEN, seed=5, dim=700)


def test_a_vector_of_the_wrong_length_is_rejected():
    canaries = BlockedCanaries(5, UNEVEN, seed=5)
    with pytest.raises(ValueError, match="201"):
        canaries.products(1, np.ones(200))
    with pytest.raises(ValueError, match="765"):
        canaries.cosines(np.ones(764))


def test_a_zero_vector_has_no_cosine():
    canaries = BlockedCanaries(5, UNEVEN, seed=5)
    with pytest.raises(ValueError, match="vector must not be zero"):
        canaries.cosines(np.zeros(sum(UNEVEN)))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            canaries.cosines(np.full(sum(UNEVEN), bad))


def test_a_zero_block_is_allowed():
    vector = np.zeros(sum(UNEVEN))
    vector[64:] = 1.0
    assert np.isfinite(BlockedCanaries(5, UNEVEN, seed=5).cosines(vector)).all()


def test_the_key_is_neither_printed_nor_copied():
    canaries = BlockedCanaries(5, UNEVEN, seed=5)
    assert repr(canaries) == "BlockedCanaries(count=5, dim=765, blocks=3)"
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="make it again from the seed"):
            make(canaries)


@pytest.mark.parametrize(
    ("block", "indices", "line"),
    [
        (2, [0], "block must lie in 0..1, got 2"),
        (-1, [0], "block must lie in 0..1, got -1"),
        (0, [3], "indices must lie in 0..2, got 3"),
        (0, [1, 1], "indices must differ, got 1 twice"),
        (0, [0.5], "indices must be a list of whole numbers"),
    ],
)
def test_a_sum_of_unknown_canaries_or_blocks_is_rejected(block, indices, line):
    with pytest.raises(ValueError, match=line):
        BlockedCanaries(3, [100, 100], seed=1).combine(block, indices)
