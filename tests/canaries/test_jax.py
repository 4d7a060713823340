"""Canaries on jax arrays equal those of numpy and torch: outside jit, under tracing, and on several devices."""

import os
import subprocess
import sys

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from coalmine.canaries import RotatedCanaries, SphereCanaries, rotation_jax, rotation_numpy
from coalmine.canaries.blocked import BlockedCanaries
from coalmine.canaries.rotation import draw_rotation

BOTH = pytest.mark.parametrize("kind", [RotatedCanaries, SphereCanaries])
# Just above, at and below a power of two, and dims with coordinates left over from the shuffle's blocks.
DIMS = [1_000, 1_024, 1_025, 200_003]


def vector_of(dim: int) -> np.ndarray:
    return np.random.default_rng(dim).normal(size=dim).astype(np.float32)


def relative_error(found, expected) -> float:
    """The largest error, in units of a typical cosine."""
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max() / np.std(np.asarray(expected)))


@pytest.mark.parametrize("dim", DIMS)
def test_cosines_agree_with_numpy_and_torch(dim):
    canaries, vector = RotatedCanaries(500, dim, seed=dim), vector_of(dim)
    exact = canaries.cosines(vector.astype(np.float64))
    traced = jax.jit(canaries.cosines)(vector)
    assert relative_error(traced, exact) < 5e-6  # single-precision rounding over log2(dim) steps
    for found in (traced, canaries.cosines(jnp.asarray(vector)), canaries.cosines(torch.from_numpy(vector))):
        np.testing.assert_allclose(np.asarray(found), exact, atol=1e-6)


def test_cosines_agree_for_the_large_model():
    """The dimension of the speed benchmark, with enough canaries to reach into the last transform."""
    dim, vector = 4_050_748, vector_of(4_050_748)
    canaries = RotatedCanaries(2_000, dim, seed=1)
    found = rotation_jax.cosines(canaries._jax_tables(jnp.asarray(vector)), vector, count=2_000)[0]
    assert relative_error(found, canaries.cosines(vector.astype(np.float64))) < 5e-6


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("count", [17, 900])
def test_traced_functions_agree_with_numpy(dim, count):
    """Few and many columns: some counts need the last transform of the rotation, others stop before it."""
    rotation = draw_rotation(dim, 12345)
    tables, vector = rotation_jax.draw_tables(rotation), vector_of(dim)
    exact = rotation_numpy.products(rotation, vector.astype(np.float64), count)
    np.testing.assert_allclose(rotation_jax.products(tables, vector, count=count), exact, atol=5e-5)
    indices = list(range(0, count, 3))
    weights = np.zeros(count, np.float32)
    weights[indices] = 1.0
    total = rotation_jax.combine(tables, weights, dim=dim)
    np.testing.assert_allclose(total, rotation_numpy.combine(rotation, indices, np.float64), atol=1e-6)


def test_combine_is_the_transpose_of_products():
    dim, count = 70_001, 40
    tables, rng = rotation_jax.draw_tables(draw_rotation(dim, 3)), np.random.default_rng(3)
    vector, weights = vector_of(dim), rng.normal(size=count).astype(np.float32)
    left = np.asarray(rotation_jax.combine(tables, weights, dim=dim), np.float64) @ vector
    right = np.asarray(rotation_jax.products(tables, vector, count=count), np.float64) @ weights
    assert left == pytest.approx(right, rel=1e-5)


def test_one_compilation_serves_every_rotation_of_a_dimension():
    dim = 70_003  # has leftover coordinates, which each rotation places differently
    places = set()
    rotation_jax.products.clear_cache()  # type: ignore[attr-defined]
    for key in range(5):
        rotation = draw_rotation(dim, key)
        places |= {stage.insert for stage in rotation.stages}
        rotation_jax.products(rotation_jax.draw_tables(rotation), vector_of(dim), count=10)
    assert len(places) > 5
    assert rotation_jax.products._cache_size() == 1  # type: ignore[attr-defined]


def test_double_precision_where_jax_has_it():
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # type: ignore[attr-defined]  # where jax 0.7 has it
    with wide(True):
        rotation, vector = draw_rotation(3_001, 8), np.random.default_rng(8).normal(size=3_001)
        found = rotation_jax.products(rotation_jax.draw_tables(rotation), vector, count=700)
        np.testing.assert_allclose(found, rotation_numpy.products(rotation, vector, 700), atol=1e-12)
        total = RotatedCanaries(5, 3_001, seed=8).combine([1, 2], like=jnp.zeros(1))
        assert total.dtype == np.float64
        np.testing.assert_array_equal(total, RotatedCanaries(5, 3_001, seed=8).combine([1, 2]))


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_results_are_jax_arrays_on_the_device_of_the_input(kind, dtype):
    canaries, vector = kind(7, 3_000, seed=2), jnp.asarray(vector_of(3_000), dtype)
    found = canaries.cosines(vector)
    assert isinstance(found, jax.Array)
    assert found.device == vector.device
    exact = canaries.cosines(np.asarray(vector.astype(jnp.float32)))
    np.testing.assert_allclose(found, exact, atol=1e-6)
    for total in (canaries.combine([0, 5], like=vector), canaries.canary(3, like=vector)):
        assert isinstance(total, jax.Array)
        assert total.dtype == dtype
        assert total.device == vector.device
    np.testing.assert_allclose(
        np.asarray(canaries.canary(3, like=vector), np.float32),
        canaries.canary(3),
        atol=1e-3 if dtype != jnp.float32 else 1e-7,
    )


def test_canaries_under_tracing_equal_those_outside():
    canaries, vector = RotatedCanaries(7, 3_000, seed=2), jnp.asarray(vector_of(3_000))
    inside = jax.jit(lambda v: (canaries.combine([0, 5], like=v), canaries.canary(3, like=v)))(vector)
    np.testing.assert_allclose(inside[0], canaries.combine([0, 5]), atol=1e-7)
    np.testing.assert_allclose(inside[1], canaries.canary(3), atol=1e-7)
    with pytest.raises(ValueError, match="value that jax traces: call them outside of jit"):
        jax.jit(SphereCanaries(7, 3_000, seed=2).cosines)(vector)


@pytest.mark.parametrize("factor", [1e-30, 1e-18, 1e18, 1e30])
def test_lengths_are_accurate_at_the_ends_of_single_precision(factor):
    canaries, vector = RotatedCanaries(20, 5_000, seed=4), vector_of(5_000)
    exact = canaries.cosines(vector)
    scaled = jnp.asarray(vector * np.float32(factor))
    np.testing.assert_allclose(canaries.cosines(scaled), exact, atol=1e-6)
    np.testing.assert_allclose(jax.jit(canaries.cosines)(scaled), exact, atol=1e-6)


@BOTH
def test_bad_jax_arrays_are_rejected(kind):
    canaries = kind(3, 100, seed=1)
    with pytest.raises(ValueError, match=r"^vector must have shape \(100,\), .* got \(10, 10\); flatten it first$"):
        canaries.cosines(jnp.ones((10, 10)))
    with pytest.raises(ValueError, match=r"^vector must be real numbers, got dtype bool$"):
        canaries.cosines(jnp.ones(100, bool))
    with pytest.raises(ValueError, match=r"^vector must not be zero"):
        canaries.cosines(jnp.zeros(100))
    with pytest.raises(ValueError, match=r"^vector must be finite, got NaN or infinity in 1 of 100 entries$"):
        canaries.cosines(jnp.ones(100).at[3].set(jnp.nan))
    with pytest.raises(ValueError, match=r"^like must be of a floating-point dtype"):
        canaries.combine([0], like=jnp.zeros(3, jnp.int32))
    gone = jnp.ones(100)
    gone.delete()
    with pytest.raises(ValueError, match=r"deleted or donated$"):
        canaries.cosines(gone)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_arrays_on_an_accelerator_agree_with_numpy_and_are_checked(monkeypatch, dtype):
    """The code of accelerators, on a CPU device."""
    monkeypatch.setattr(rotation_jax, "on_cpu", lambda array: False)
    canaries, vector = RotatedCanaries(20, 5_000, seed=4), jnp.asarray(vector_of(5_000), dtype)
    found = canaries.cosines(vector)
    assert isinstance(found, jax.Array)
    assert relative_error(found, canaries.cosines(np.asarray(vector.astype(jnp.float32)))) < 1e-5
    with pytest.raises(ValueError, match=r"^vector must not be zero"):
        canaries.cosines(jnp.zeros(5_000, dtype))
    with pytest.raises(ValueError, match=r"^vector must be finite, got NaN or infinity in 1 of 5000 entries$"):
        canaries.cosines(vector.at[3].set(jnp.inf))


def test_zeros_under_tracing_give_nan():
    found = jax.jit(RotatedCanaries(3, 100, seed=1).cosines)(jnp.zeros(100))
    assert np.isnan(found).all()


@pytest.mark.parametrize("sizes", [[3_000], [1_000, 70_001]])
def test_blocked_canaries_agree_with_numpy(sizes):
    canaries = BlockedCanaries(50, sizes, seed=6)
    for block, size in enumerate(sizes):
        vector = vector_of(size)
        exact = canaries.products(block, vector)
        for found in (
            canaries.products(block, jnp.asarray(vector)),
            jax.jit(lambda v, b=block: canaries.products(b, v))(vector),
        ):
            assert isinstance(found, jax.Array)
            np.testing.assert_allclose(found, exact, atol=2e-5)
        total = canaries.combine(block, [1, 7])
        like = jnp.zeros(1)
        np.testing.assert_allclose(canaries.combine(block, [1, 7], like=like), total, atol=1e-7)
        traced = jax.jit(lambda v, b=block: canaries.combine(b, [1, 7], like=v))(like)
        np.testing.assert_allclose(traced, total, atol=1e-6)
    whole = vector_of(sum(sizes))
    np.testing.assert_allclose(canaries.cosines(jnp.asarray(whole)), canaries.cosines(whole), atol=1e-7)


def on_eight_devices(code: str) -> str:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | flags, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_eight_devices_give_the_cosines_of_one():
    code = """
import jax, jax.numpy as jnp, numpy as np
from coalmine.canaries import RotatedCanaries, rotation_jax
from jax.sharding import NamedSharding, PartitionSpec as P
assert len(jax.devices()) == 8
dim = 80_000
canaries = RotatedCanaries(100, dim, seed=9)
vector = np.random.default_rng(9).normal(size=dim).astype(np.float32)
exact = canaries.cosines(vector)
mesh = jax.make_mesh((8,), ("d",))
sharded = jax.device_put(vector, NamedSharding(mesh, P("d")))
for device in (jax.devices()[0], jax.devices()[5]):
    placed = jax.device_put(vector, device)
    assert canaries.cosines(placed).device == device
    np.testing.assert_allclose(canaries.cosines(placed), exact, atol=1e-7)
    tables = canaries._jax_tables(placed)
    found = rotation_jax.cosines(tables, placed, count=100)[0]
    assert found.device == device
    np.testing.assert_allclose(found, exact, atol=1e-6)
for found in (canaries.cosines(sharded), jax.jit(canaries.cosines)(sharded)):
    np.testing.assert_allclose(found, exact, atol=1e-6)
print("same")
"""
    assert on_eight_devices(code) == "same\n"


@pytest.mark.full
def test_sharded_canaries_equal_blocked_canaries_and_transfer_only_scores():
    code = """
import re
import jax, jax.numpy as jnp, numpy as np
from coalmine.canaries import sharded_jax
from coalmine.canaries.sharded_jax import ShardedCanaries
from jax.sharding import NamedSharding, PartitionSpec as P
sharded_jax.LARGEST_BLOCK = 3_000  # so that each device has several blocks
rng = np.random.default_rng(9)
for axes, names, spec, shape in [((8,), ("d",), P("d"), (160, 250)), ((4, 2), ("a", "b"), P("b", "a"), (100, 400))]:
    mesh = jax.make_mesh(axes, names)
    values = rng.normal(size=shape).astype(np.float32)
    array = jax.device_put(values, NamedSharding(mesh, spec))
    canaries = ShardedCanaries(100, array, seed=9)
    assert len(canaries.blocks.sizes) == 16, canaries.blocks
    on = {shard.device: np.asarray(shard.data).reshape(-1) for shard in array.addressable_shards}
    flat = np.concatenate([on[device] for device in mesh.devices.flat])
    exact = canaries.blocks.cosines(flat.astype(np.float64))
    np.testing.assert_allclose(canaries.cosines(array), exact, atol=1e-6)
    np.testing.assert_allclose(jax.jit(canaries.cosines)(array), exact, atol=1e-6)
    np.testing.assert_allclose(canaries.products(array), exact * np.linalg.norm(flat), atol=1e-4)
    total = canaries.combine(np.arange(100) == 7)
    assert total.sharding.is_equivalent_to(array.sharding, 2)
    on = {shard.device: np.asarray(shard.data).reshape(-1) for shard in total.addressable_shards}
    expected = np.concatenate([canaries.blocks.combine(b, [7]) for b in range(16)])
    np.testing.assert_allclose(np.concatenate([on[device] for device in mesh.devices.flat]), expected, atol=1e-6)
    text = canaries._products.lower(canaries._tables, array).compile().as_text()
    moved = re.findall(r"= (\\S+) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)", text)
    assert moved and all(kind == "all-reduce" and shape.startswith("f32[100]") for shape, kind in moved), moved
    text = canaries._combine.lower(canaries._tables, jnp.zeros(100)).compile().as_text()
    assert not re.search("all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter", text)
    for bad, message in [
        (values, "NamedSharding"),
        (jax.device_put(values, NamedSharding(mesh, P())), "in 1 parts"),
    ]:
        try:
            ShardedCanaries(10, bad, seed=1)
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)
print("same")
"""
    assert on_eight_devices(code) == "same\n"
