"""Trees of arrays: a round trip keeps the numbers, and unsupported trees are rejected with a one-line error."""

import collections
import types
import warnings

import numpy as np
import pytest

from coalmine.measure.trees import Tree

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

Pair = collections.namedtuple("Pair", ["first", "second"])


def arrays(*shapes, dtype=np.float32):
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def test_names_are_the_keys_joined_by_dots():
    one, two, three, four = arrays((2, 3), 4, (), 0)
    tree = Tree({"block": [{"w": one}, (two,)], 7: three, "none": None, "empty": four})
    assert tree.layers == [("block.0.w", 6), ("block.1.0", 4), ("7", 1), ("empty", 0)]
    assert tree.dim == 11


def test_a_single_array_is_a_valid_model():
    (array,) = arrays((5, 4))
    tree = Tree(array)
    assert tree.layers == [("parameters", 20)]
    assert np.array_equal(tree.from_vector(tree.vector("model", array)), array)


CONTAINERS = {
    "dict": lambda a, b, c: {"a": a, "nested": {"b": b}, "c": c},
    "list": lambda a, b, c: [a, [b], c],
    "tuple": lambda a, b, c: (a, (b,), c),
    "namedtuple": lambda a, b, c: Pair(a, Pair(b, c)),
    "ordered": lambda a, b, c: collections.OrderedDict(z=a, y=b, x=c),
    "defaultdict": lambda a, b, c: collections.defaultdict(list, {"a": a, "b": b, "c": c}),
    "mapping proxy": lambda a, b, c: types.MappingProxyType({"a": a, "b": b, "c": c}),
    "with nothing": lambda a, b, c: {"a": a, "gone": None, "rest": [b, None, c]},
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_unflattening_restores_the_container_types(container):
    parameters = CONTAINERS[container](*arrays((3, 2), 5, ()))
    tree = Tree(parameters)
    again = tree.from_vector(tree.vector("model", parameters))
    assert jax.tree.structure(again) == jax.tree.structure(parameters)
    leaves, expected = jax.tree.leaves(again), jax.tree.leaves(parameters)
    if container == "mapping proxy":  # jax treats it as a leaf
        leaves, expected = list(again.values()), list(parameters.values())  # type: ignore[attr-defined]
    assert type(again) is type(parameters)
    for leaf, original in zip(leaves, expected, strict=True):
        assert leaf.dtype == original.dtype
        assert np.array_equal(leaf, original)


def test_a_mapping_that_cannot_be_rebuilt_becomes_a_dict():
    class Own(collections.abc.Mapping):
        def __init__(self, one, two):
            self.arrays = {"one": one, "two": two}

        def __getitem__(self, key):
            return self.arrays[key]

        def __iter__(self):
            return iter(self.arrays)

        def __len__(self):
            return len(self.arrays)

    parameters = Own(*arrays(3, 4))
    tree = Tree(parameters)
    again = tree.from_vector(tree.vector("model", parameters))
    assert type(again) is dict
    assert all(np.array_equal(again[key], parameters[key]) for key in parameters)


LEAVES = {
    "float32": lambda v: v.astype(np.float32),
    "float64": lambda v: v,
    "float16": lambda v: v.astype(np.float16),
    "big-endian": lambda v: v.astype(">f4"),
    "transposed": lambda v: np.asfortranarray(v),
    "reversed": lambda v: v[::-1],
    "every second": lambda v: np.repeat(v, 2, axis=0)[::2],
    "read-only": lambda v: np.broadcast_to(v[:1], v.shape),
    "bfloat16 of numpy": lambda v: v.astype(jax.numpy.bfloat16),
    "tensor": torch.from_numpy,
    "half tensor": lambda v: torch.from_numpy(v).half(),
    "bfloat16 tensor": lambda v: torch.from_numpy(v).bfloat16(),
    "transposed tensor": lambda v: torch.from_numpy(v.T.copy()).t(),
    "parameter": lambda v: torch.nn.Parameter(torch.from_numpy(v)),
    "negated view": lambda v: torch.complex(torch.from_numpy(v), torch.from_numpy(v)).conj().imag,
    "jax": lambda v: jax.numpy.asarray(v, jax.numpy.float32),
    "bfloat16 of jax": lambda v: jax.numpy.asarray(v, jax.numpy.bfloat16),
}


def values(leaf):
    """A leaf's numbers, converted by its own framework."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().resolve_neg().double().numpy()
    return np.asarray(leaf).astype(np.float64)


@pytest.mark.parametrize("other", ["float32", "tensor", "jax"])
@pytest.mark.parametrize("kind", LEAVES)
def test_flattening_and_unflattening_keep_the_numbers(kind, other):
    """Also next to a leaf of another framework."""
    rng = np.random.default_rng(2)
    leaf, beside = LEAVES[kind](rng.normal(size=(6, 5))), LEAVES[other](rng.normal(size=(4, 3)))
    if kind == "parameter" and other == "tensor":
        beside.requires_grad_()  # otherwise it would be frozen
    tree = Tree({"leaf": leaf, "beside": beside})
    vector = tree.vector("model", {"leaf": leaf, "beside": beside})
    expected = np.concatenate([values(leaf).ravel(), values(beside).ravel()])
    assert np.array_equal(values(vector), expected)
    again = tree.from_vector(vector)
    for name, original in (("leaf", leaf), ("beside", beside)):
        assert isinstance(again[name], jax.Array) == isinstance(original, jax.Array)
        assert isinstance(again[name], torch.Tensor) == isinstance(original, torch.Tensor)
        assert again[name].dtype == original.dtype
        assert again[name].shape == original.shape
        assert np.array_equal(values(again[name]), values(original))


def test_a_single_leaf_is_not_copied_unless_it_must_be():
    (array,) = arrays(50)
    assert np.shares_memory(Tree([array]).vector("model", [array]), array)
    backwards = array[::-1]
    assert not np.shares_memory(Tree([array]).vector("model", [backwards]), array)
    whole = np.arange(50)
    assert Tree([array]).vector("model", [whole]).dtype == np.float64


def test_integers_and_booleans_become_zeros():
    norm = torch.nn.BatchNorm1d(6)
    tree = Tree(norm.state_dict() | {"flags": torch.ones(3, dtype=torch.bool), "steps": np.arange(4)})
    assert [name for name, _ in tree.layers] == ["weight", "bias", "running_mean", "running_var"]
    again = tree.from_vector(torch.ones(tree.dim))
    assert again["num_batches_tracked"].shape == ()
    assert again["num_batches_tracked"].dtype == torch.int64
    for name in ("num_batches_tracked", "flags", "steps"):
        assert not again[name].any()


def test_frozen_parameters_get_no_canary():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(False)
    assert [name for name, _ in Tree(dict(model.named_parameters())).layers] == ["1.weight", "1.bias"]
    assert len(Tree(model.state_dict()).layers) == 4  # a state dict does not say what is trained
    tree = Tree({"base": torch.zeros(9).to(torch.float8_e4m3fn), "adapter": torch.zeros(5, requires_grad=True)})
    assert tree.layers == [("adapter", 5)]
    assert tree.from_vector(torch.ones(5))["base"].dtype == torch.float8_e4m3fn


def lazy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(torch.nn.LazyLinear(3).named_parameters())


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(5), 1.0, 0, torch.quint8)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def deleted():
    array = jax.numpy.zeros(5)
    array.delete()
    return array


def endless():
    parameters = [np.zeros(3)]
    parameters.append(parameters)
    return parameters


REFUSED = {
    "a module": (lambda: torch.nn.Linear(3, 3), "named_parameters"),
    "a generator": (lambda: torch.nn.Linear(3, 3).named_parameters(), "named_parameters"),
    "text": (lambda: {"a": "weights"}, "at a"),
    "a number": (lambda: {"a": [np.zeros(3), 2.5]}, "at a.1"),
    "objects": (lambda: {"a": np.zeros(3, object)}, "at a"),
    "a shape": (lambda: {"a": jax.ShapeDtypeStruct((3,), np.float32)}, "at a"),
    "complex": (lambda: {"a": np.zeros(3, complex)}, "complex128"),
    "complex tensor": (lambda: {"a": torch.zeros(3, dtype=torch.complex64)}, "complex64"),
    "complex of jax": (lambda: {"a": jax.numpy.zeros(3, jax.numpy.complex64)}, "complex64"),
    "float8": (lambda: {"a": torch.zeros(3).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
    "float8 of jax": (lambda: {"a": jax.numpy.zeros(3, jax.numpy.float8_e4m3fn)}, "float8_e4m3fn"),
    "long double": (lambda: {"a": np.zeros(3, np.longdouble)}, "float32 or float64"),
    "a random key": (lambda: {"a": jax.random.key(0)}, "leave it out"),
    "masked": (lambda: {"a": np.ma.masked_array(np.zeros(3), [1, 0, 0])}, "fill its masked entries"),
    "sparse": (lambda: {"a": torch.zeros(3).to_sparse()}, "to_dense"),
    "nested": (lambda: {"a": nested()}, "to_dense"),
    "quantized": (lambda: {"a": quantized()}, "dequantize"),
    "without memory": (lambda: {"a": torch.zeros(3, device="meta")}, "meta"),
    "uninitialized": (lazy, "run the model once"),
    "deleted": (lambda: {"a": deleted()}, "deleted or donated"),
    "in itself": (endless, "at most 100 deep"),
    "two of one name": (lambda: {"a.b": np.zeros(3), "a": {"b": np.zeros(4)}}, "'a.b' comes twice"),
    "one number and one text": (lambda: {1: np.zeros(3), "1": np.zeros(4)}, "'1' comes twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_model_is_rejected_with_one_line(case):
    make, expected = REFUSED[case]
    parameters = make()
    with pytest.raises(ValueError) as refused:
        Tree(parameters)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_traced_value_is_rejected_with_one_line():
    def step(weights):
        Tree({"weights": weights})
        return weights

    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(step)(jax.numpy.zeros(5))


SQUARE = np.zeros((6, 8), np.float32)
TIED = {
    "one object": lambda w: (w, w),
    "transposed": lambda w: (w, w.T),
    "another shape": lambda w: (w, w.reshape(-1)),
    "a part": lambda w: (w, w[2:]),
    "overlapping parts": lambda w: (w[:4], w[3:]),
    "a column of it": lambda w: (w, w[:, 3]),
}
UNTIED = {
    "neighbouring rows": lambda w: (w[:3], w[3:]),
    "neighbouring columns": lambda w: (w[:, :3], w[:, 3:]),
    "of every second row": lambda w: (w[::2], w[1::2]),
    "empty": lambda w: (w, w[:0], w[:0]),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("case", [*TIED, *UNTIED])
def test_tied_weights_are_rejected_and_adjacent_views_are_not(case, kind):
    whole = SQUARE.copy() if kind == "numpy" else torch.from_numpy(SQUARE.copy())
    parameters = dict(zip("abc", (TIED | UNTIED)[case](whole), strict=False))
    if case in UNTIED:
        assert Tree(parameters).dim == SQUARE.size
        return
    with pytest.raises(ValueError, match="a and b do \\(tied weights\\)"):
        Tree(parameters)


def test_one_jax_array_under_two_names_is_two_parameters():
    """A jax array is immutable, so training makes two arrays of it."""
    zeros = jax.numpy.zeros(7)
    assert Tree({"a": zeros, "b": zeros}).dim == 14
