"""Lengths and differences of long vectors in numpy and torch."""

import numpy as np
import pytest

from coalmine.measure.vectors import difference, layer_norms, vector_norm

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("size", [1e-25, 1e-10, 1.0, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_are_accurate_at_the_ends_of_the_range(size, dtype):
    """Also where the squares of float32 values underflow or overflow."""
    vector = torch.from_numpy(size * np.random.default_rng(1).normal(size=10_000)).to(dtype)
    expected = np.sqrt(np.square(vector.double().numpy()).sum())
    assert vector_norm("it", vector) == pytest.approx(expected, rel=1e-6)
    assert vector_norm("it", vector.numpy()) == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(
        layer_norms(vector, [5_000, 5_000]), layer_norms(vector.numpy(), [5_000, 5_000]), rtol=1e-6
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_vector_that_is_not_finite_is_rejected(wrong):
    vector = torch.ones(10_000)
    vector[4_321] = wrong
    with pytest.raises(ValueError, match="it must be finite, got NaN or infinity in it"):
        vector_norm("it", vector)
    with pytest.raises(ValueError, match="it must be finite, got NaN or infinity in it"):
        vector_norm("it", vector.numpy())


def test_zeros_have_length_zero():
    assert vector_norm("it", torch.zeros(10_000)) == 0.0


def test_a_difference_keeps_the_precision_of_the_first():
    first, second = torch.full((5,), 3.0), np.ones(5)
    assert difference(first, second).dtype == torch.float32
    assert difference(second, first).tolist() == [-2.0] * 5
    assert difference(first.numpy(), torch.ones(5, dtype=torch.float64)).tolist() == [2.0] * 5
