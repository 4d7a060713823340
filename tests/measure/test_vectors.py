"""Lengths and differences of long vectors in numpy and torch."""

import itertools

import numpy as np
import pytest

from coalmine.measure.arrays import many_parts, on_numpy
from coalmine.measure.noise_law import rounding_step
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_many_small_parts_are_summed_together_like_one_by_one(dtype):
    """Lengths, the noise's law, steps of rounding and squares of coordinates of 300 parts, of which some are empty."""
    rng = np.random.default_rng(3)
    sizes = [*rng.integers(0, 90, 300).tolist(), 40]
    vector = rng.normal(size=sum(sizes)).astype(dtype)
    vector[: sizes[0] + sizes[1] + sizes[2]] = 0.0
    edges = np.cumsum([0, *sizes]).tolist()
    parts = [vector[one:two] for one, two in itertools.pairwise(edges)]
    expected = [np.linalg.norm(part.astype(np.float64)) for part in parts]
    assert many_parts.are_many(sizes, len(vector))
    np.testing.assert_allclose(layer_norms(vector, sizes), expected, rtol=1e-12)
    np.testing.assert_allclose(layer_norms(torch.from_numpy(vector), sizes), expected, rtol=1e-12)
    whole = [slice(one, two) for one, two in itertools.pairwise(edges) if two > one]
    pairs = [(one, slice(two.start, two.start + one.stop - one.start)) for one, two in zip(whole, whole[9:], strict=False)
             if one.stop - one.start <= two.stop - two.start]  # fmt: skip
    together = on_numpy.law_sums(vector, whole, pairs)
    np.testing.assert_allclose(together, on_numpy.list_law_sums(vector, whole, pairs), rtol=2e-5, atol=1e-3)
    np.testing.assert_allclose(
        on_numpy.group_squares(vector, whole), [float(vector[g] @ vector[g]) for g in whole], 1e-5
    )
    scales = rng.uniform(0.5, 2, len(whole)).tolist()
    total = on_numpy.squares_added(None, vector, vector, whole, scales, None)
    by_one = [np.square(vector[g].astype(np.float64) * scale) for g, scale in zip(whole, scales, strict=True)]
    np.testing.assert_allclose(total, np.concatenate(by_one), rtol=1e-5)


def test_steps_of_rounding_by_part_are_those_of_each_part():
    rng = np.random.default_rng(5)
    values = torch.from_numpy(rng.normal(size=2_000).astype(np.float32))
    mixed = torch.cat([values[:500].bfloat16().float(), values[500:1_000], values[1_000:1_500].half().float()]).numpy()
    mixed = np.concatenate([mixed, np.zeros(20, np.float32), np.full(30, 0.5, np.float32)])
    sizes = [100, 400, 0, 500, 250, 250, 20, 30]
    ends = np.cumsum(sizes)[:-1]
    expected = [rounding_step(part, grid=False)[0] for part in np.split(mixed, ends)]
    np.testing.assert_array_equal(many_parts.relative_steps(mixed, sizes), expected)
