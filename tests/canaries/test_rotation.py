import hashlib

import numpy as np
import pytest
import torch

from coalmine.canaries import RotatedCanaries, rotation_numpy, rotation_torch
from coalmine.canaries.kept_rows import KeptRows
from coalmine.canaries.rotation_rows import LARGEST, RowRotation

DIMS = [2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 97, 255, 256, 257, 1000, 1009]


def matrix(canaries: RotatedCanaries) -> np.ndarray:
    return np.array([canaries.canary(index) for index in range(canaries.count)])


@pytest.mark.parametrize("dim", DIMS)
def test_all_columns_are_orthonormal(dim):
    """R is orthogonal in every dimension: odd, prime, a power of two and one above."""
    columns = matrix(RotatedCanaries(dim, dim, seed=dim))
    np.testing.assert_allclose(columns @ columns.T, np.eye(dim), atol=1e-12)
    np.testing.assert_allclose(columns.T @ columns, np.eye(dim), atol=1e-12)


@pytest.mark.parametrize("dim", [4097, 8000, 65_537, 131_071, 300_007])
def test_some_columns_are_orthonormal(dim):
    """From 65,536 on the shuffle moves blocks and leaves coordinates over; from 2^18 on it uses several threads."""
    canaries = RotatedCanaries(dim, dim, seed=dim)
    chosen = np.unique([0, 1, dim // 3, dim // 2, dim - 2, dim - 1])
    columns = np.array([canaries.canary(index) for index in chosen])
    np.testing.assert_allclose(columns @ columns.T, np.eye(len(chosen)), atol=1e-12)
    expected = np.zeros((len(chosen), dim))
    expected[np.arange(len(chosen)), chosen] = 1.0
    np.testing.assert_allclose([canaries.cosines(column) for column in columns], expected, atol=1e-12)


@pytest.mark.parametrize("dim", [2, 5, 64, 1009, 8000])
def test_cosines_agree_with_dot_products(dim):
    canaries = RotatedCanaries(min(dim, 200), dim, seed=1)
    vector = np.random.default_rng(dim).standard_normal(dim)
    expected = matrix(canaries) @ vector / np.linalg.norm(vector)
    np.testing.assert_allclose(canaries.cosines(vector), expected, atol=1e-13)


@pytest.mark.parametrize("dim", [2, 3, 9, 1000, 70_001])
def test_all_cosines_together_have_norm_1(dim):
    vector = np.random.default_rng(dim).standard_cauchy(dim)
    assert np.linalg.norm(RotatedCanaries(dim, dim, seed=4).cosines(vector)) == pytest.approx(1, abs=1e-12)


def test_a_canary_does_not_depend_on_the_number_of_canaries():
    vector = np.random.default_rng(0).standard_normal(5000)
    few, many = RotatedCanaries(10, 5000, seed=2), RotatedCanaries(5000, 5000, seed=2)
    assert (few.canary(7) == many.canary(7)).all()
    assert (few.cosines(vector) == many.cosines(vector)[:10]).all()


def test_seeds_and_dims_give_different_canaries():
    same = RotatedCanaries(1, 1000, seed=1).canary(0)
    assert (RotatedCanaries(1, 1000, seed=1).canary(0) == same).all()
    for other in (RotatedCanaries(1, 1000, seed=2), RotatedCanaries(1, 1000, seed=b"\1")):
        assert abs(other.canary(0) @ same) < 6 / np.sqrt(1000)
    assert abs(RotatedCanaries(1, 1001, seed=1).canary(0)[:1000] @ same) < 6 / np.sqrt(1000)


@pytest.mark.parametrize("dim", [1000, 70_001, 1_206_590])
def test_float32_cosines_have_float32_accuracy(dim):
    canaries = RotatedCanaries(500, dim, seed=3)
    vector = np.random.default_rng(1).standard_normal(dim).astype(np.float32)
    exact = canaries.cosines(vector.astype(np.float64))
    assert np.linalg.norm(canaries.cosines(vector) - exact) < 1e-6 * np.linalg.norm(exact)
    total = canaries.combine(range(0, 500, 3))
    assert np.linalg.norm(canaries.combine(range(0, 500, 3), like=vector) - total) < 1e-6 * np.linalg.norm(total)


@pytest.mark.parametrize("dim", [2, 3, 5, 8, 97, 8000, 70_001])
def test_plain_torch_applies_the_same_rotation(dim):
    """The code path of devices without Triton kernels, run on the CPU, where tensors usually go through numpy."""
    rotation = RotatedCanaries(1, dim, seed=b"any bytes")._rotation
    vector = np.random.default_rng(dim).standard_normal(dim)
    for ours, theirs in (
        (rotation_numpy.rotate_back(rotation, vector), rotation_torch.rotate_back(rotation, torch.from_numpy(vector))),
        (rotation_numpy.rotate(rotation, vector.copy()), rotation_torch.rotate(rotation, torch.from_numpy(vector))),
    ):
        np.testing.assert_allclose(theirs.numpy(), ours, atol=1e-13)


@pytest.mark.parametrize(
    ("dim", "count"),
    [(3, 1), (97, 33), (97, 34), (1000, 488), (1024, 5), (1024 + 7, 7), (1024 + 7, 8), (70_001, 4465), (70_001, 4466),
     (2**18, 1), (2**18 + 3, 4), (300_000, 37_856), (1_206_590, 2000), (1_206_590, 65_537),
     (1_206_590, 158_014), (1_206_590, 158_015)],
)  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_columns_equal_those_of_the_whole_rotation(dim, count, threads, monkeypatch):
    """With counts on both sides of the limit up to which the last stage is shortened."""
    monkeypatch.setattr(rotation_numpy, "cores", lambda: threads)
    rotation = RotatedCanaries(1, dim, seed=b"any bytes")._rotation
    vector = np.random.default_rng(dim).standard_normal(dim)
    given = vector.copy()
    products = rotation_numpy.products(rotation, vector, count)
    np.testing.assert_array_equal(vector, given)
    np.testing.assert_allclose(products, rotation_numpy.rotate_back(rotation, vector)[:count], rtol=0, atol=1e-12)
    chosen = np.zeros(dim)
    indices = sorted({0, count // 2, count - 1})
    chosen[indices] = 1.0
    total = rotation_numpy.combine(rotation, indices, np.float64)
    np.testing.assert_array_equal(total, rotation_numpy.rotate(rotation, chosen))


@pytest.mark.parametrize("dim", [70_001, 1_206_590])
def test_results_do_not_depend_on_the_number_of_threads(dim, monkeypatch):
    canaries = RotatedCanaries(2000, dim, seed=3)
    vector = np.random.default_rng(1).standard_normal(dim).astype(np.float32)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(rotation_numpy, "cores", lambda threads=threads: threads)
        found.append((canaries.cosines(vector), canaries.combine(range(9), like=vector)))
    for cosines, total in found[1:]:
        np.testing.assert_array_equal(cosines, found[0][0])
        np.testing.assert_array_equal(total, found[0][1])


def test_the_device_code_agrees_with_numpy_on_the_cpu():
    canaries = RotatedCanaries(50, 1000, seed=9)
    vector = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    device = rotation_torch.DeviceRotation(canaries._rotation, torch.device("cpu"))
    cosines, norm = device.cosines(vector, 50)
    np.testing.assert_allclose(cosines, canaries.cosines(vector), atol=1e-14)
    assert norm == pytest.approx(float(vector.norm()))
    np.testing.assert_allclose(device.combine([3, 4], torch.float64), canaries.combine([3, 4]), atol=1e-14)


def test_the_canaries_of_a_seed_never_change():
    """Canaries are part of the public interface; rounded, since machines differ in the last bits."""
    digest = hashlib.sha256()
    for dim in (17, 1000, 70_001):
        for index in (0, 16):
            rounded = np.round(RotatedCanaries(17, dim, seed=20240).canary(index) * 12_345_678.9).astype("<i8")
            digest.update(rounded.tobytes())
    assert digest.hexdigest() == "3f03ff95c49e0b3e9b8607c2dfed17a1efcd4988d18995b5eefeaa71bc793079"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [2, 3, 7, 16, 17, 97, 1000, 4097, 25_450, 32_768, LARGEST])
def test_rows_of_a_small_model_are_transformed_bit_for_bit_like_single_vectors(dim, dtype):
    """With counts on both sides of the limit up to which the last stage is shortened."""
    rotation = RotatedCanaries(1, dim, seed=b"any bytes")._rotation
    rows, tables = np.random.default_rng(dim).standard_normal((3, dim)).astype(dtype), RowRotation(rotation, dtype)
    given = rows.copy()
    for count in {1, max(1, dim - rotation.size), min(dim, dim - rotation.size + 1), dim}:
        expected = [rotation_numpy.products(rotation, row, count) for row in rows]
        np.testing.assert_array_equal(tables.products(rows, count), expected)
        members = [[0, count - 1] if count > 1 else [0], [count // 2], []]
        sums = [rotation_numpy.combine(rotation, each, dtype) for each in members]
        np.testing.assert_array_equal(tables.sums(members), sums)
    np.testing.assert_array_equal(rows, given)


def test_a_large_model_has_no_row_tables():
    with pytest.raises(ValueError, match="at most 65,535"):
        RowRotation(RotatedCanaries(1, LARGEST + 1, seed=1)._rotation, np.float32)


@pytest.mark.parametrize("dim", [300, 70_000])
def test_kept_rows_are_the_canaries_whoever_makes_them(dim):
    canaries = RotatedCanaries(40, dim, seed=1)
    kept, made = KeptRows(canaries.rows, 40, dim), []
    assert not kept.is_growing
    made.append(kept.of([3, 3, 5]))
    rounds = 0
    while kept.is_growing:
        kept.make_more()
        rounds += 1
    assert rounds <= 40
    expected = np.array([canaries.canary(index, like=np.empty(0, np.float32)) for index in range(40)])
    np.testing.assert_array_equal(made[0], expected[[3, 3, 5]])
    np.testing.assert_array_equal(kept.of(range(40)), expected)
    np.testing.assert_allclose(kept.sum_of([1, 39]), expected[1] + expected[39])
