"""The array libraries have the same operations, with the same arguments and the same results."""

import inspect

import numpy as np
import pytest

from coalmine.measure.arrays import arrays_of, number_kind, on_jax, on_numpy, on_torch

torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
LIBRARIES = {"torch": (on_torch, torch.from_numpy), "jax": (on_jax, jnp.asarray)}
GROUPS = (slice(0, 700), slice(700, 2000))
PAIRS = ((slice(0, 300), slice(700, 1000)),)


def public(module):
    named = inspect.getmembers(module, inspect.isfunction)
    own = [(name, f) for name, f in named if f.__module__ == module.__name__ and not name.startswith("_")]
    return {name: list(inspect.signature(f).parameters) for name, f in own}


def test_every_library_has_the_operations_of_the_others():
    everywhere = set(public(on_numpy)) & set(public(on_torch))
    assert len(everywhere) > 20
    for module in (on_torch, on_jax):
        found = public(module) | {
            name: list(inspect.signature(getattr(module, name)).parameters) for name in everywhere
        }
        assert {name: found[name] for name in everywhere} == {name: public(on_numpy)[name] for name in everywhere}


@pytest.mark.parametrize("library", LIBRARIES)
def test_operations_give_the_same_numbers(library):
    arrays, make = LIBRARIES[library]
    row, other = np.random.default_rng(1).normal(size=(2, 2000)).astype(np.float32)
    made, beside = make(row.copy()), make(other.copy())
    for name, arguments in {
        "norm": (), "norms": ([700, 1300],), "square": (), "group_squares": (GROUPS,), "law_sums": (GROUPS, PAIRS),
        "strongest_lag": (2048,),
    }.items():  # fmt: skip
        expected = getattr(on_numpy, name)(row, *arguments)
        np.testing.assert_allclose(
            np.asarray(getattr(arrays, name)(made, *arguments)), expected, rtol=2e-5, err_msg=name
        )
    np.testing.assert_allclose(np.asarray(arrays.difference(made, beside)), row - other)
    standard = np.asarray(arrays.scaled(made, GROUPS, [2.0, 3.0]))
    np.testing.assert_allclose(
        standard, on_numpy.scaled(row, GROUPS, [2.0, 3.0]), rtol=3e-7
    )  # float32 rounds at 1.2e-7
    np.testing.assert_allclose(arrays.follows(made, beside), on_numpy.follows(row, other), rtol=1e-3)
    for found, expected in zip(
        arrays.block_parts(made, chunks=4, sketch=100), on_numpy.block_parts(row, chunks=4, sketch=100), strict=True
    ):
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-5)
    sizes, places, signs = (np.asarray(each) for each in arrays.largest(made, count=20))
    order = np.argsort(np.abs(row))[-20:]
    assert set(places.tolist()) == set(order.tolist())
    np.testing.assert_array_equal(sizes * signs, row[places])


@pytest.mark.parametrize("library", LIBRARIES)
def test_pieces_are_joined_put_and_subtracted(library):
    arrays, make = LIBRARIES[library]
    like, places = arrays.empty(make(np.zeros(1, np.float32)), double=False), [slice(0, 3), slice(3, 5)]
    joined = arrays.joined([make(np.ones(3, np.float16)), make(np.full(2, 2, np.float32))], places, like)
    assert np.asarray(joined).tolist() == [1, 1, 1, 2, 2]
    joined = arrays.put(joined, places[1], np.array([3.0, 4.0]), 2.0)
    joined = arrays.subtract(joined, places[0], np.ones(3), 0.5)
    assert np.asarray(joined).tolist() == [0.5, 0.5, 0.5, 6, 8]
    total = arrays.added(make(np.ones(2)), make(np.ones(2)), 3.0)
    assert np.asarray(total).tolist() == [4, 4]


def test_the_kind_of_numbers():
    kinds = {np.float16: "f", np.int8: "i", np.uint8: "u", np.bool_: "b", np.complex64: "c"}
    assert all(number_kind(np.zeros(1, dtype)) == kind for dtype, kind in kinds.items())
    assert number_kind(jnp.zeros(1, jnp.bfloat16)) == number_kind(torch.zeros(1, dtype=torch.bfloat16)) == "f"
    assert [number_kind(torch.zeros(1, dtype=kind)) for kind in (torch.int32, torch.bool, torch.cfloat)] == [
        "i",
        "b",
        "c",
    ]
    assert arrays_of(np.zeros(1)) is on_numpy
    assert arrays_of(jnp.zeros(1)) is on_numpy  # numpy reads it without a copy
