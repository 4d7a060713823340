"""Models that jax holds on devices: measured there, and recorded as numpy records them. A CPU stands in for the device."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from coalmine import Audit
from coalmine.canaries import rotation_jax

SHAPES = {"w": (60, 70), "b": (70,), "out": (70, 10)}
DIM = sum(int(np.prod(shape)) for shape in SHAPES.values())
SETTINGS = {"canaries": 40, "unobserved": 100, "seed": 3, "delta": 1e-5, "rounds": 4}


@pytest.fixture
def devices(monkeypatch):
    """Every jax array counts as one on a device; the sizes of those that are read on the host are kept."""
    read = []
    value = ArrayImpl._value

    def watched(array):
        read.append(array.size)
        return value.fget(array)

    monkeypatch.setattr(rotation_jax, "on_cpu", lambda array: False)
    monkeypatch.setattr(ArrayImpl, "_value", property(watched))
    return read


def train(audit, place, *, flat=False):
    """Four rounds of known noise; `place` makes the arrays that the audit sees."""
    rng = np.random.default_rng(1)

    def noise():
        tree = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        return np.concatenate([row.ravel() for row in tree.values()]) if flat else tree

    add = (lambda *trees: sum(trees)) if flat else lambda *trees: {name: sum(t[name] for t in trees) for name in SHAPES}
    for number in range(1, 5):
        present, others = audit.canaries_in_round(number), noise()
        updates = audit.updates(present, 1.0, like=place(np.zeros(1, np.float32)) if flat else None)
        release = add(jax.tree.map(np.asarray, updates), others, noise())
        audit.observe_round(
            number,
            jax.tree.map(place, release),
            present=present,
            others=jax.tree.map(place, others),
            noise_std=1.0,
            clip_norm=1.0,
        )
    audit.observe_final(jax.tree.map(place, release), initial=jax.tree.map(place, others))
    return audit


def model(place):
    return {name: place(np.zeros(shape, np.float32)) for name, shape in SHAPES.items()}


def assert_same_records(one, other):
    for mine, yours in zip(one.log.rounds(), other.log.rounds(), strict=True):
        for name, expected in vars(yours).items():
            found = vars(mine)[name]
            if expected is None or isinstance(expected, str | dict):
                assert found == expected, name
                continue
            if name in ("law_counts", "law_zeros"):  # a value may lie just on the other side of an edge
                assert np.abs(np.asarray(found) - np.asarray(expected)).sum() <= 4, name
            else:
                close = {"rtol": 1e-4, "atol": 2e-4 if name.startswith("law") else 2e-6}
                np.testing.assert_allclose(np.asarray(found, float), np.asarray(expected, float), err_msg=name, **close)
    np.testing.assert_allclose(one.log.final.update_cosines, other.log.final.update_cosines, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("blocks", [None, [3_000, DIM - 3_000]], ids=["one block", "two blocks"])
def test_a_model_on_a_device_has_the_records_of_numpy(devices, blocks):
    expected = train(Audit.for_model(model(np.asarray), blocks=blocks, **SETTINGS), np.asarray)
    devices.clear()
    audit = Audit.for_model(model(jnp.asarray), blocks=blocks, deferred=True, **SETTINGS)
    found = train(audit, jnp.asarray)
    assert_same_records(found, expected)
    assert found.settings == expected.settings
    assert found.result(claim=5.0).verdict.outcome == expected.result(claim=5.0).verdict.outcome


@pytest.mark.slow
def test_a_flat_vector_on_a_device_has_the_records_of_numpy(devices):
    expected = train(Audit(DIM, **SETTINGS), np.asarray, flat=True)
    assert_same_records(train(Audit(DIM, **SETTINGS), jnp.asarray, flat=True), expected)


@pytest.mark.full
def test_only_scores_reach_the_host(devices):
    """Of 70,000 coordinates at most a sample of a few thousand is read, in any round."""
    shapes = {"w": (300, 200), "b": (10_000,)}
    rng = np.random.default_rng(2)
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    audit = Audit.for_model(params, canaries=100, seed=4, delta=1e-5, rounds=2)
    present = audit.canaries_in_round(1)
    release = jax.tree.map(jnp.add, params, audit.updates(present, 1.0))
    devices.clear()
    audit.observe_round(1, release, present=present, others=params, noise_std=1.0, clip_norm=1.0)
    audit.observe_final(release, initial=params)
    assert devices
    assert max(devices) <= 4_500 < audit.settings.dim / 15


def test_canaries_of_a_device_are_those_of_numpy(devices):
    here, there = (Audit.for_model(model(place), **SETTINGS) for place in (np.asarray, jnp.asarray))
    found = there.updates([1, 5], 2.0)
    assert all(isinstance(leaf, jax.Array) for leaf in found.values())
    for name, expected in here.updates([1, 5], 2.0).items():
        np.testing.assert_allclose(found[name], expected, atol=1e-6)


def test_vectors_that_are_not_finite_are_refused_on_a_device(devices):
    audit = Audit.for_model(model(jnp.asarray), **SETTINGS)
    good = jax.tree.map(jnp.ones_like, model(jnp.asarray))
    with pytest.raises(ValueError, match=r"^model_delta must be finite"):
        audit.observe_round(1, good | {"b": good["b"].at[3].set(jnp.nan)}, present=[])
    with pytest.raises(ValueError, match=r"^model_delta and others are equal"):
        audit.observe_round(1, good, present=[], others=good)
    audit.observe_round(1, jax.tree.map(jnp.zeros_like, good), present=[])
    assert audit.last_round == 1


@pytest.mark.slow
def test_sharded_and_replicated_arrays_are_measured_where_they_are():
    """On eight devices: the canaries are those of ShardedCanaries, and the result is that of the parts as blocks."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    script = Path(__file__).parent / "jax_eight_devices.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | flags, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same\n"
