"""The interface of both kinds: backends, dtypes, devices, and errors that state the requirement."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coalmine.canaries import RotatedCanaries, SphereCanaries

BOTH = pytest.mark.parametrize("kind", [RotatedCanaries, SphereCanaries])
NUMPY_FLOATS = [np.float16, np.float32, np.float64]
TORCH_FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def test_import_loads_neither_torch_nor_scipy_stats():
    code = "import sys, coalmine.canaries as c; c.RotatedCanaries(2, 9, seed=0).cosines(range(9)); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "scipy.stats"} & set(loaded)


@BOTH
def test_the_seed_is_never_printed(kind):
    canaries = kind(3, 10, seed=123456789)
    assert repr(canaries) == f"{kind.__name__}(count=3, dim=10)"
    assert "123456789" not in str(vars(canaries))


@BOTH
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_and_pickling_are_rejected(kind, copied):
    with pytest.raises(TypeError, match=f"^{kind.__name__} cannot be copied or pickled: .*again from the seed"):
        copied(kind(3, 10, seed=1))


@BOTH
def test_combine_sums_canaries(kind):
    canaries = kind(5, 1000, seed=1)
    assert (canaries.canary(3) == canaries.combine([3])).all()
    assert np.linalg.norm(canaries.canary(3)) == pytest.approx(1, abs=1e-12)
    together = canaries.canary(1) + canaries.canary(4)
    np.testing.assert_allclose(canaries.combine([4, 1]), together, atol=1e-14)
    assert not canaries.combine([]).any()


@BOTH
@pytest.mark.parametrize("indices", [(0, 2), [0, 2], {0, 2}, range(0, 3, 2), np.array([0, 2]), torch.tensor([0, 2])])
def test_indices_may_be_any_sequence_of_integers(kind, indices):
    canaries = kind(3, 50, seed=1)
    np.testing.assert_allclose(canaries.combine(indices), canaries.canary(0) + canaries.canary(2), atol=1e-15)
    assert (canaries.canary(np.int64(1)) == canaries.canary(1)).all()


@BOTH
@pytest.mark.parametrize("dtype", NUMPY_FLOATS)
def test_numpy_input_gives_numpy_output(kind, dtype):
    canaries = kind(5, 1000, seed=1)
    vector = np.random.default_rng(0).standard_normal(1000).astype(dtype)
    cosines = canaries.cosines(vector)
    assert isinstance(cosines, np.ndarray)
    assert cosines.dtype == np.float64
    assert cosines.shape == (5,)
    exact = canaries.cosines(vector.astype(np.float64))
    assert np.linalg.norm(cosines - exact) <= 1e-6 * np.linalg.norm(exact)
    assert canaries.canary(0, like=vector).dtype == dtype
    assert canaries.combine([1, 2], like=vector).dtype == dtype
    assert canaries.canary(0).dtype == np.float64


@BOTH
@pytest.mark.parametrize("dtype", TORCH_FLOATS)
def test_torch_input_gives_torch_output_and_the_same_canaries(kind, dtype):
    canaries = kind(5, 1000, seed=1)
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    cosines = canaries.cosines(vector)
    assert cosines.dtype == torch.float64
    assert cosines.device == vector.device
    exact = canaries.cosines(vector.double().numpy())
    assert np.linalg.norm(cosines.numpy() - exact) <= 1e-6 * np.linalg.norm(exact)
    total = canaries.combine([1, 2], like=vector)
    assert total.dtype == dtype
    expected = canaries.combine([1, 2])
    rounding = 1e-6 if dtype in (torch.float32, torch.float64) else 2 * torch.finfo(dtype).eps
    assert np.linalg.norm(total.double().numpy() - expected) <= rounding * np.linalg.norm(expected)


@BOTH
def test_vectors_of_other_layouts_and_dtypes_are_accepted(kind):
    canaries = kind(5, 100, seed=1)
    vector = np.random.default_rng(0).standard_normal(200)
    exact = canaries.cosines(vector[::2].copy())
    np.testing.assert_allclose(canaries.cosines(vector[::2]), exact)
    np.testing.assert_allclose(canaries.cosines(vector[::2].astype(">f8")), exact)
    np.testing.assert_allclose(canaries.cosines(torch.from_numpy(vector)[::2]), exact)
    np.testing.assert_allclose(canaries.cosines(torch.from_numpy(vector[::2].copy()).requires_grad_()), exact)
    whole = np.arange(-50, 50)
    np.testing.assert_allclose(canaries.cosines(whole), canaries.cosines(whole.astype(np.float64)))
    np.testing.assert_allclose(canaries.cosines(torch.from_numpy(whole)), canaries.cosines(whole))


@BOTH
def test_the_vector_is_not_modified(kind):
    vector = np.random.default_rng(0).standard_normal(500)
    before = vector.copy()
    kind(5, 500, seed=1).cosines(vector)
    assert (vector == before).all()


@BOTH
@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-30, 1e30, 1e200, 1e305])
def test_cosines_do_not_depend_on_the_vectors_norm(kind, scale):
    canaries = kind(5, 100, seed=1)
    vector = np.random.default_rng(0).standard_normal(100)
    np.testing.assert_allclose(canaries.cosines(vector * scale), canaries.cosines(vector), rtol=1e-9)
    if 1e-38 < scale < 1e38:
        single = (vector * scale).astype(np.float32)
        np.testing.assert_allclose(canaries.cosines(single), canaries.cosines(vector), atol=1e-6)
        np.testing.assert_allclose(canaries.cosines(torch.from_numpy(single)), canaries.cosines(vector), atol=1e-6)


@BOTH
@given(count=st.integers(-5, 0))
def test_fewer_than_one_canary_is_rejected(kind, count):
    with pytest.raises(ValueError, match=f"count must be at least 1, got {count}"):
        kind(count, 10, seed=0)


@BOTH
@given(dim=st.integers(2, 10**12), more=st.integers(1, 10**6))
def test_more_canaries_than_dimensions_are_rejected(kind, dim, more):
    with pytest.raises(ValueError, match=f"count must be at most dim, got {dim + more} canaries in dimension {dim}"):
        kind(dim + more, dim, seed=0)


@BOTH
@given(dim=st.integers(-5, 1))
def test_fewer_than_two_dimensions_are_rejected(kind, dim):
    with pytest.raises(ValueError, match="dim must be at least 2"):
        kind(1, dim, seed=0)


@BOTH
@pytest.mark.parametrize("seed", [-1, 2**128, 0.5, "text", None, b""])
def test_bad_seeds_are_rejected(kind, seed):
    with pytest.raises(ValueError, match="seed must"):
        kind(1, 10, seed=seed)


@BOTH
@given(index=st.integers().filter(lambda number: not 0 <= number < 7))
def test_an_index_out_of_range_is_rejected(kind, index):
    with pytest.raises(ValueError, match=rf"index must lie in 0\.\.6, got {index}"):
        kind(7, 10, seed=0).canary(index)
    with pytest.raises(ValueError, match=rf"indices must lie in 0\.\.6, got {index}"):
        kind(7, 10, seed=0).combine([1, index])


@BOTH
@pytest.mark.parametrize("index", [1.0, "1", None])
def test_an_index_that_is_not_an_integer_is_rejected(kind, index):
    with pytest.raises(ValueError, match="index must be a whole number"):
        kind(7, 10, seed=0).canary(index)
    with pytest.raises(ValueError, match="indices must be a list of whole numbers"):
        kind(7, 10, seed=0).combine([index])


@BOTH
@pytest.mark.parametrize("indices", [3, None, np.array(3), np.zeros((2, 2), int), np.array([0.0])])
def test_indices_that_are_not_a_list_are_rejected(kind, indices):
    with pytest.raises(ValueError, match="indices must be a list of whole numbers"):
        kind(7, 10, seed=0).combine(indices)


@BOTH
@given(indices=st.lists(st.integers(0, 6), min_size=2).filter(lambda numbers: len(set(numbers)) < len(numbers)))
def test_a_repeated_index_is_rejected(kind, indices):
    with pytest.raises(ValueError, match="indices must differ, got"):
        kind(7, 10, seed=0).combine(indices)


@BOTH
@given(length=st.integers(0, 30).filter(lambda length: length != 10))
@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_a_vector_of_the_wrong_length_is_rejected(kind, make, length):
    with pytest.raises(ValueError, match=rf"vector must have shape \(10,\).*got \({length},\)"):
        kind(7, 10, seed=0).cosines(make(length))


@BOTH
@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_a_vector_of_the_wrong_shape_is_rejected(kind, make):
    with pytest.raises(ValueError, match=r"got \(2, 5\); flatten it first"):
        kind(7, 10, seed=0).cosines(make((2, 5)))
    with pytest.raises(ValueError, match=r"got \(\)"):
        kind(7, 10, seed=0).cosines(make(()))


@BOTH
@given(
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
    place=st.integers(0, 9),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
)
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_a_vector_that_is_not_finite_is_rejected(kind, convert, value, place, dtype):
    vector = np.ones(10, dtype=dtype)
    vector[place] = value
    with pytest.raises(ValueError, match="vector must be finite, got NaN or infinity in 1 of 10 entries"):
        kind(7, 10, seed=0).cosines(convert(vector))


def test_a_long_vector_that_is_not_finite_is_rejected():
    vector = np.ones(300_000, dtype=np.float32)
    vector[-1] = np.nan
    with pytest.raises(ValueError, match="in 1 of 300000 entries"):
        RotatedCanaries(7, 300_000, seed=0).cosines(vector)


@BOTH
@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_a_zero_vector_is_rejected(kind, make):
    with pytest.raises(ValueError, match=r"vector must not be zero.*was the model ever updated\?"):
        kind(7, 10, seed=0).cosines(make(10))


@BOTH
@pytest.mark.parametrize(
    "vector", [np.ones(10, bool), np.ones(10, complex), ["x"] * 10, torch.ones(10, dtype=torch.bool), None]
)
def test_vectors_that_are_not_real_numbers_are_rejected(kind, vector):
    with pytest.raises(ValueError, match="vector must be real numbers"):
        kind(7, 10, seed=0).cosines(vector)


@BOTH
@pytest.mark.parametrize("like", [np.ones(2, int), torch.ones(2, dtype=torch.int32), "cpu", 1.0])
def test_like_must_be_an_array_of_floats(kind, like):
    with pytest.raises(ValueError, match="like must be"):
        kind(7, 10, seed=0).canary(0, like=like)
