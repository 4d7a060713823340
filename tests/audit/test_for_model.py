"""Audits of model trees agree with audits of the flat vector, and in blocks with dense canaries."""

import math
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from coalmine import Audit, BandedNoise, Claim, Poisson, TreeNoise, mechanism_epsilon, read_seed
from coalmine.canaries import BlockedCanaries
from coalmine.cli import main as cli
from coalmine.log.rounds_file import encode

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

SEED, DELTA, CANARIES, UNOBSERVED = b"a seed of these tests", 1e-5, 40, 80
SHAPES = {
    "embedding": (40, 30),
    "layers": [{"w": (30, 50), "b": (50,)}, {"w": (50, 20), "b": (20,)}],
    "scale": (),
    "no": (0, 3),
}
DIM = 40 * 30 + 30 * 50 + 50 + 50 * 20 + 20 + 1
BLOCKS = [1_000, 1_271, 1_500]
MIXED = {"embedding": "float16", "scale": "float64"}
assert sum(BLOCKS) == DIM


def drawn(seed, make, scale=1.0):
    """A model of random numbers, each leaf made by `make(array, dtype name)`."""
    rng = np.random.default_rng(seed)

    def build(shape, name):
        if isinstance(shape, dict):
            return {key: build(child, key) for key, child in shape.items()}
        if isinstance(shape, list):
            return [build(child, name) for child in shape]
        return make(np.asarray(scale * rng.normal(size=shape)), MIXED.get(name, "float32"))

    return build(SHAPES, "")


def of_jax(array, dtype):
    return jax.numpy.asarray(array, {"float64": "float32", "float16": "bfloat16"}.get(dtype, dtype))


KINDS = {
    "numpy": lambda array, dtype: array.astype(dtype),
    "numpy in double": lambda array, dtype: array,
    "numpy in bfloat16": lambda array, dtype: array.astype(jax.numpy.bfloat16),
    "torch": lambda array, dtype: torch.from_numpy(array).to(getattr(torch, dtype)),
    "torch in bfloat16": lambda array, dtype: torch.from_numpy(array).bfloat16(),
    "torch, transposed": lambda array, dtype: (
        torch.from_numpy(array.T.copy()).to(getattr(torch, dtype)).T
        if array.ndim == 2
        else torch.from_numpy(array).to(getattr(torch, dtype))
    ),
    "torch, with gradients": lambda array, dtype: torch.from_numpy(array).to(getattr(torch, dtype)).requires_grad_(),
    "jax": of_jax,
}


def leaves(tree):
    """A tree's leaves in the audit's order: the order of insertion, where jax sorts by key."""
    if isinstance(tree, dict):
        return [leaf for child in tree.values() for leaf in leaves(child)]
    if isinstance(tree, list | tuple):
        return [leaf for child in tree for leaf in leaves(child)]
    return [tree]


def numbers(leaf):
    """A leaf's numbers in float64, converted by its own framework."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().double().numpy()
    return np.asarray(leaf).astype(np.float64)


def flat(tree):
    """A tree's numbers as one flat vector."""
    return np.concatenate([numbers(leaf).ravel() for leaf in leaves(tree)])


def combined(function, *trees):
    """Apply a function leaf by leaf to trees of the same structure."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: combined(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, list):
        return [combined(function, *children) for children in zip(*trees, strict=True)]
    return function(*trees)


def audit_of(model, **settings):
    given = {"canaries": CANARIES, "unobserved": UNOBSERVED, "seed": SEED, "delta": DELTA, "rounds": 6} | settings
    return Audit.for_model(model, **given)


def dense_canaries(model, blocks):
    """All canaries as rows, observed ones first, generated one at a time by an audit that observes all of them."""
    audit = audit_of(model, canaries=CANARIES + UNOBSERVED, unobserved=20, blocks=blocks)
    return np.array([flat(audit.update(index, 1.0)) for index in range(CANARIES + UNOBSERVED)])


@pytest.mark.parametrize("blocks", [None, BLOCKS])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_have_the_structure_types_and_devices_of_the_model(kind, blocks):
    model = drawn(1, KINDS[kind])
    audit = audit_of(model, blocks=blocks)
    for update in (audit.update(3, 2.0), audit.updates([1, 5], 1.0)):
        assert jax.tree.structure(update) == jax.tree.structure(model)
        for made, given in zip(leaves(update), leaves(model), strict=True):
            assert isinstance(made, jax.Array) == isinstance(given, jax.Array)
            assert isinstance(made, torch.Tensor) == isinstance(given, torch.Tensor)
            assert (made.dtype, made.shape) == (given.dtype, given.shape)
            if isinstance(given, torch.Tensor):
                assert made.device == given.device
                assert not made.requires_grad
            if isinstance(given, jax.Array):
                assert made.sharding == given.sharding
    assert np.linalg.norm(flat(audit.update(3, 2.0))) == pytest.approx(2.0, rel=3e-3)
    assert [name for name, _ in audit.settings.layers] == [
        "embedding", "layers.0.w", "layers.0.b", "layers.1.w", "layers.1.b", "scale",
    ]  # fmt: skip


def train(audit, model, *, rounds=4, noise=1.0, like=None, momentum=0.0, silent=None, first=1, clip=1.0):
    """Train honestly with other clients, canaries and fresh noise; yield each round's noise."""
    before = None
    for number in range(1, rounds + 1):
        present = audit.canaries_in_round(number)
        rng = np.random.default_rng(number)
        fresh = combined(lambda leaf: np.asarray(noise * rng.normal(size=leaf.shape)), model)  # noqa: B023
        others = combined(lambda leaf: np.asarray(0.3 * rng.normal(size=leaf.shape)), model)  # noqa: B023
        if silent is not None:
            fresh[silent] = 0 * fresh[silent]
        if number < first:
            continue
        canaries = audit.updates(present, clip)
        delta = combined(lambda *parts: sum(numbers(part) for part in parts), canaries, fresh, others)
        if momentum and before is not None:
            delta = combined(lambda one, two: one + momentum * two, delta, before)
        before = delta
        cast = (lambda tree: tree) if like is None else partial(combined, like)
        audit.observe_round(
            number, cast(delta), present=present, others=cast(others), noise_std=1.0, clip_norm=clip, participants=100
        )
        yield fresh


def trained(*arguments, **options):
    return list(train(*arguments, **options))


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_a_model_in_one_block_gives_the_audit_of_its_flat_vector(kind):
    """Settings, canaries, records and result agree bit for bit."""
    model = drawn(1, KINDS[kind])
    double = kind != "jax"  # numpy and torch models have a float64 leaf
    audit = audit_of(model)
    vector = Audit(
        DIM, canaries=CANARIES, unobserved=UNOBSERVED, seed=SEED, delta=DELTA, rounds=6, layers=audit.settings.layers
    )
    assert audit.settings == vector.settings
    row = np.empty(0, np.float64 if double else np.float32)

    def as_row(tree):
        found = flat(tree).astype(row.dtype)
        return torch.from_numpy(found) if kind == "torch" else found

    expected = vector.updates([0, 7], 1.0, like=row)
    for made, wanted in zip(leaves(audit.updates([0, 7], 1.0)), _cut(expected, model), strict=True):
        assert np.array_equal(numbers(made), numbers(wanted))
    for number in (1, 2, 3):
        present = audit.canaries_in_round(number)
        assert present.tolist() == vector.canaries_in_round(number).tolist()
        delta, others = drawn(10 + number, KINDS[kind]), drawn(20 + number, KINDS[kind], scale=0.5)
        told = {"present": present, "noise_std": 0.9, "clip_norm": 1.0}
        audit.observe_round(number, delta, others=others, **told)
        vector.observe_round(number, as_row(delta), others=as_row(others), **told)
    last, initial = drawn(2, KINDS[kind]), drawn(3, KINDS[kind])
    audit.observe_final(last, initial=initial)
    vector.observe_final(as_row(last), initial=as_row(initial))
    assert audit.log_digest == vector.log_digest
    assert audit.result(claim=5.0).to_dict() == vector.result(claim=5.0).to_dict()


def _cut(row, model):
    """A flat row as the leaves of a model."""
    place = 0
    for leaf in leaves(model):
        size = math.prod(leaf.shape)
        part, place = row[place : place + size].reshape(leaf.shape), place + size
        if isinstance(leaf, torch.Tensor):
            yield torch.from_numpy(part.copy()).to(leaf.dtype)
        else:
            yield part.astype(leaf.dtype)


def scale_of(vector, canaries, blocks):
    """The std of an absent canary's projection (the null of blocked canaries), and the block lengths behind it."""
    start, variance, rests = 0, 0.0, []
    for size in blocks:
        place = slice(start, start + size)
        units = canaries[:CANARIES, place] / math.sqrt(size / DIM)
        rest = float(vector[place] @ vector[place] - np.sum((units @ vector[place]) ** 2))
        variance += size / DIM * rest / (size - CANARIES)
        rests.append(math.sqrt(rest))
        start += size
    return math.sqrt(variance), np.array(rests)


@pytest.mark.parametrize("kind", ["numpy", "numpy in double", "torch", "torch in bfloat16", "torch, transposed", "jax"])
def test_blocks_agree_with_dense_canaries_and_plain_dot_products(kind):
    canaries = dense_canaries(drawn(1, KINDS["numpy in double"]), BLOCKS)
    assert np.abs(canaries @ canaries.T - np.eye(len(canaries))).max() < 1e-12
    model = drawn(1, KINDS[kind])
    audit = audit_of(model, blocks=BLOCKS)
    assert audit.settings.blocks == tuple(BLOCKS)
    delta, others, last = drawn(5, KINDS[kind]), drawn(6, KINDS[kind], scale=0.5), drawn(7, KINDS[kind])
    present = [2, 11, 17]
    audit.observe_round(1, delta, present=present, others=others, noise_std=1.1, clip_norm=0.1)
    audit.observe_final(last, initial=model)
    (item,), final = list(audit.log.rounds()), audit.log.final
    left = flat(delta) - flat(others)
    moved = flat(last) - flat(model)
    for vector, norm, cosines, rest, block_rests in (
        (flat(delta), item.norm, item.cosines, item.rest, item.block_rests),
        (left, item.residual_norm, item.residual_cosines, item.residual_rest, item.residual_block_rests),
        (flat(last), final.norm, final.cosines, None, final.block_rests),
        (moved, final.update_norm, final.update_cosines, None, final.update_block_rests),
    ):
        length = np.linalg.norm(vector)
        scale, rests = scale_of(vector, canaries, BLOCKS)
        assert norm == pytest.approx(length, rel=1e-6)
        assert np.abs(cosines - canaries @ vector / length).max() < 2e-7  # kept in single precision
        assert block_rests == pytest.approx(rests, rel=1e-6)
        if rest is not None:
            assert rest / math.sqrt(audit.settings.free) == pytest.approx(scale, rel=1e-6)
    noise = left - 0.1 * canaries[present].sum(axis=0)
    edges = np.cumsum([size for _, size in audit.settings.layers])[:-1]
    wanted = [np.linalg.norm(part) for part in np.split(noise, edges)]
    assert item.layer_rests == pytest.approx(wanted, rel=1e-5)


def test_a_sum_of_canaries_is_the_sum_of_its_updates():
    model = drawn(1, KINDS["numpy in double"])
    audit = audit_of(model, blocks=BLOCKS)
    one_by_one = sum(flat(audit.update(index, 2.0, scale=3.0)) for index in (4, 9, 30))
    assert flat(audit.updates([4, 9, 30], 2.0, scale=3.0)) == pytest.approx(one_by_one, abs=1e-14)
    assert not flat(audit.updates([], 1.0)).any()


def test_a_round_in_blocks_allocates_no_vector_of_the_models_size():
    """A block's transform needs two vectors of the block's size, besides the block and its residual.

    The sums that follow each coordinate are one vector of the model's size, which the first round allocates.
    """
    dim, blocks = 1 << 23, 16
    rng = np.random.default_rng(0)
    delta, others = ({str(i): rng.normal(size=dim // 32).astype(np.float32) for i in range(32)} for _ in range(2))
    audit = Audit.for_model(
        delta, canaries=100, unobserved=100, seed=SEED, delta=DELTA, blocks=[dim // blocks] * blocks, rounds=100
    )
    audit.observe_round(1, delta, present=[1], others=others, noise_std=1.0, clip_norm=1.0)
    tracemalloc.start()
    try:
        audit.observe_round(2, delta, present=[1], others=others, noise_std=1.0, clip_norm=1.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [item.law_counts is None for item in audit.log.rounds()][1]  # in others the law of the noise is measured
    assert peak < 0.5 * 4 * dim


@pytest.mark.parametrize("like", [None, of_jax, KINDS["torch in bfloat16"]], ids=["float64", "jax", "bfloat16"])
def test_an_honest_training_passes_and_its_noise_is_measured(like):
    model = drawn(1, KINDS["numpy"] if like is None else like)
    audit = audit_of(model, blocks=BLOCKS, rounds=4)
    noise = trained(audit, model, like=None if like is None else lambda leaf: like(np.asarray(leaf), "float32"))
    result = audit.result(claim=float(mechanism_epsilon(1.0, delta=DELTA)))
    assert result.verdict.outcome == "PASS", result.verdict.reason
    low, high = result.adversaries["known-others"].headline.estimate.interval
    assert low <= mechanism_epsilon(1.0, delta=DELTA) <= high
    for item, fresh in zip(audit.log.rounds(), noise, strict=True):
        norms = [np.linalg.norm(leaf) for leaf in leaves(fresh) if leaf.size]
        assert item.layer_rests[:-1] == pytest.approx(norms[:-1], rel=0.02)


def test_half_the_noise_is_a_violation():
    model = drawn(1, KINDS["numpy"])
    audit = audit_of(model, blocks=BLOCKS, rounds=4)
    trained(audit, model, noise=0.5)
    assert audit.result(claim=float(mechanism_epsilon(1.0, delta=DELTA))).verdict.outcome == "VIOLATION"


def test_one_leaf_without_noise_is_a_violation():
    model = drawn(1, KINDS["numpy"])
    audit = audit_of(model, blocks=BLOCKS, rounds=4)
    trained(audit, model, silent="scale")
    result = audit.result(claim=float(mechanism_epsilon(1.0, delta=DELTA)))
    assert result.verdict.outcome == "VIOLATION"
    assert "scale" in result.details()


@pytest.mark.parametrize("blocks", [None, BLOCKS])
def test_momentum_is_undone(blocks):
    model = drawn(1, KINDS["numpy in double"])
    audit = audit_of(model, blocks=blocks, rounds=4, momentum=0.9, unobserved=200)
    noise = trained(audit, model, momentum=0.9)
    for item, fresh in zip(audit.log.rounds(), noise, strict=True):
        norms = [np.linalg.norm(leaf) for leaf in leaves(fresh) if leaf.size]
        assert item.layer_rests == pytest.approx(norms, rel=1e-5)
    result = audit.result(claim=float(mechanism_epsilon(1.0, delta=DELTA)))
    assert result.verdict.outcome == "PASS", result.verdict.reason


@pytest.mark.parametrize("law", [TreeNoise(rounds=4), BandedNoise.for_prefix_sums(4, bands=2)], ids=["tree", "bands"])
def test_correlated_noise_is_whitened(law):
    model = drawn(1, KINDS["numpy in double"])
    audit = audit_of(model, blocks=BLOCKS, rounds=4, noise=law, unobserved=400)
    rng = np.random.default_rng(3)
    fresh = np.linalg.solve(law.matrix(), 2.0 * rng.normal(size=(4, DIM)))
    for number in (1, 2, 3, 4):
        present = audit.canaries_in_round(number)
        delta = audit.updates(present, 1.0)
        place = 0
        for leaf in leaves(delta):
            leaf += fresh[number - 1, place : place + leaf.size].reshape(leaf.shape)
            place += leaf.size
        zeros = combined(np.zeros_like, delta)
        std = 2.0 * law.std(number)
        audit.observe_round(number, delta, present=present, others=zeros, noise_std=std, clip_norm=1.0)
    result = audit.result(claim=Claim(epsilon=float(mechanism_epsilon(2.0, delta=DELTA)), sensitivity=1.0))
    row = result.adversaries["known-others"].headline
    low, high = row.estimate.interval
    assert low <= mechanism_epsilon(2.0 / row.sensitivity, delta=DELTA) <= high
    assert result.verdict.outcome != "VIOLATION"


def test_presentations_and_sampling_follow_the_schedule_of_a_flat_audit():
    model = drawn(1, KINDS["numpy"])
    for settings in ({"presentations": [1, 3]}, {"sampling": Poisson(0.5, 6)}):
        audit = audit_of(model, blocks=BLOCKS, **settings)
        vector = Audit(DIM, canaries=CANARIES, seed=SEED, delta=DELTA, rounds=6, **settings)
        for number in range(1, 7):
            assert audit.canaries_in_round(number).tolist() == vector.canaries_in_round(number).tolist()
        trained(audit, model, rounds=6)
        result = audit.result()
        assert ("unknown-round" in result.adversaries) == ("sampling" in settings)
        assert len(audit.log.numbers) == 6


def assert_same_records(resumed, whole):
    """Equal records, but for the sums that follow each coordinate: they are in memory only, so a restart begins anew."""
    for item, other in zip(resumed.log.rounds(), whole.log.rounds(), strict=True):
        left, right = (replace(each, law_coordinates=None) for each in (item, other))
        assert encode("round", left, b"") == encode("round", right, b"")


def test_resuming_gives_the_same_records_and_rejects_another_layout(tmp_path):
    model = drawn(1, KINDS["numpy in double"])
    whole = audit_of(model, blocks=BLOCKS, rounds=4)
    trained(whole, model)
    with audit_of(model, blocks=BLOCKS, rounds=4, directory=tmp_path / "run") as audit:
        trained(audit, model, rounds=2)
    with audit_of(model, blocks=BLOCKS, rounds=4, directory=tmp_path / "run") as audit:
        assert audit.last_round == 2
        trained(audit, model, first=3)
        assert_same_records(audit, whole)
        assert audit.settings == whole.settings
        audit.rewind_to(3)
        assert audit.last_round == 3
    for other in (
        {"blocks": BLOCKS[::-1]},
        {"blocks": None},
        {"blocks": BLOCKS, "model": combined(np.ravel, model) | {"scale": np.zeros(2)}},
    ):
        with pytest.raises(ValueError) as refused:
            audit_of(other.pop("model", model), rounds=4, directory=tmp_path / "run", **other)
        assert "\n" not in str(refused.value)


def test_a_resumed_audit_continues_bit_for_bit(tmp_path):
    model = drawn(1, KINDS["numpy in double"])
    whole = audit_of(model, blocks=BLOCKS, rounds=4)
    trained(whole, model)
    with audit_of(model, blocks=BLOCKS, rounds=4, directory=tmp_path) as audit:
        trained(audit, model, rounds=2)
    resumed = audit_of(model, blocks=BLOCKS, rounds=4, directory=tmp_path)
    trained(resumed, model, first=3)
    assert_same_records(resumed, whole)
    again, uninterrupted = (each.result(claim=5.0).to_dict() for each in (resumed, whole))
    changed = ("gauges", "notes")  # of the sums that follow each coordinate
    assert {name for name in again if again[name] != uninterrupted[name]} <= set(changed)
    assert any(
        "after a restart they are followed anew: rounds 1 to 2, then rounds 3 to 4" in note for note in again["notes"]
    )


@pytest.fixture
def finished(tmp_path):
    """A finished run in blocks, its final model as a flat vector, and the seed file."""
    # a new seed in every run of this test would give another verdict once in a while
    (tmp_path / "seed").write_text("7c1f0e35a9b84d2296d3e8f4b05a6c1d\n")
    model = drawn(1, KINDS["numpy in double"])
    settings = {"seed": read_seed(tmp_path / "seed"), "directory": tmp_path / "run", "rounds": 4}
    claim = float(mechanism_epsilon(1.0, delta=DELTA))
    with audit_of(model, blocks=BLOCKS, claim=claim, **settings) as audit:
        trained(audit, model)
        audit.observe_final(model, initial=drawn(2, KINDS["numpy in double"]))
        result = audit.finish()
        noted = ["--commitment", audit.commitment.statement_sha256, "--log-digest", audit.log_digest]
    np.save(tmp_path / "model.npy", flat(model))
    return tmp_path, result, noted


def called(*arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return stop.value.code


def test_a_run_directory_in_blocks_can_be_verified_and_reported(finished, capsys):
    folder, result, noted = finished
    verify = ["verify", folder / "run", "--seed-file", folder / "seed"]
    assert called(*verify, "--model", folder / "model.npy", *noted) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if "DOES NOT HOLD" in line] == []
    assert any(line.startswith("cosines") and "holds" in line for line in lines)
    np.save(folder / "model.npy", np.roll(np.load(folder / "model.npy"), 1))
    assert called(*verify, "--model", folder / "model.npy", *noted) == 1
    assert "another model or another seed" in capsys.readouterr().out
    assert called("report", folder / "run") == 0
    page = (folder / "run" / "report.html").read_text()
    assert result.verdict.outcome in page
    assert result.verdict.outcome == "PASS"
    assert called("verdict", folder / "run") == 0


def test_custom_scores_receive_the_model_and_its_canaries():
    model = drawn(1, KINDS["numpy in double"])
    given = []

    def attack(number, model_delta, canaries, previous):
        given.append((number, model_delta, canaries, previous))
        row = model_delta if isinstance(model_delta, np.ndarray) else flat(model_delta)
        return canaries.cosines(row)

    for blocks in (None, BLOCKS):
        given.clear()
        audit = audit_of(model, blocks=blocks, scores={"mine": attack})
        trained(audit, model, rounds=2)
        items = list(audit.log.rounds())
        assert [number for number, *_ in given] == [1, 2]
        assert given[0][3] is None
        assert given[1][3] == pytest.approx(items[0].scores["mine"])
        assert isinstance(given[0][2], BlockedCanaries) == (blocks is not None)
        for item in items:
            assert item.scores["mine"] == pytest.approx(item.cosines, abs=1e-6)
        assert "mine" in audit.result().adversaries


def at(name, change):
    """A function that changes one leaf of a model."""
    return lambda tree: tree | {name: change(tree[name])}


def with_nan(array):
    array = np.array(array)
    array.flat[3] = np.nan
    return array


def deleted(array):
    made = jax.numpy.asarray(array)
    made.delete()
    return made


BAD = {
    "nothing": (lambda tree: None, "a dict"),
    "a list": (lambda tree: list(tree.values()), "a dict"),
    "an array": (lambda tree: tree["embedding"], "a dict"),
    "a missing key": (lambda tree: {key: value for key, value in tree.items() if key != "scale"}, "'scale' is missing"),
    "another key": (lambda tree: tree | {"head": tree["embedding"]}, "'head' is not in it"),
    "a missing entry": (at("layers", lambda layers: layers[:1]), "2 entries at layers"),
    "a nested missing key": (at("layers", lambda layers: [layers[0], {"w": layers[1]["w"]}]), "at layers.1: 'b'"),
    "a dict for a leaf": (at("scale", lambda leaf: {"leaf": leaf}), "an array at scale"),
    "a number for a leaf": (at("embedding", lambda leaf: 3.0), "at embedding, got 3.0"),
    "another shape": (at("embedding", np.transpose), "shape (40, 30) at embedding, got (30, 40)"),
    "flattened": (at("embedding", np.ravel), "shape (40, 30)"),
    "NaN": (at("embedding", with_nan), "must be finite"),
    "NaN in a tensor": (at("embedding", lambda leaf: torch.from_numpy(with_nan(leaf))), "must be finite"),
    "infinity": (at("embedding", lambda leaf: np.where(leaf == leaf[2, 2], np.inf, leaf)), "must be finite"),
    "infinities": (at("embedding", lambda leaf: np.where(leaf > 1, np.inf, -np.inf)), "must be finite"),
    "too large": (at("embedding", lambda leaf: leaf.astype(float) * 1e200), "must be finite"),
    "masked": (at("embedding", lambda leaf: np.ma.masked_array(leaf, leaf > 1)), "masked entries"),
    "sparse": (at("embedding", lambda leaf: torch.from_numpy(leaf).to_sparse()), "to_dense"),
    "without memory": (at("embedding", lambda leaf: torch.from_numpy(leaf).to("meta")), "meta device"),
    "complex": (at("embedding", lambda leaf: leaf.astype(complex)), "real numbers at embedding, got complex"),
    "a complex tensor": (at("embedding", lambda leaf: torch.from_numpy(leaf).to(torch.complex64)), "real numbers"),
    "flags": (at("embedding", lambda leaf: leaf > 0), "real numbers at embedding, got bool"),
    "text": (at("embedding", lambda leaf: leaf.astype(str)), "a plain array at embedding"),
    "deleted": (at("embedding", deleted), "deleted or donated"),
}  # fmt: skip


@pytest.mark.parametrize("blocks", [None, BLOCKS])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_value_is_rejected_and_not_recorded(case, blocks):
    change, expected = BAD[case]
    make = lambda array, dtype: array.astype(np.float32)  # noqa: E731
    model = drawn(1, make)
    audit = audit_of(model, blocks=blocks)
    calls = {
        "model_delta": lambda bad: audit.observe_round(1, bad, present=[0]),
        "others": lambda bad: audit.observe_round(1, model, present=[0], others=bad),
        "model": lambda bad: audit.observe_final(bad),
        "initial": lambda bad: audit.observe_final(model, initial=bad),
    }
    for name, call in calls.items():
        if case == "nothing" and name in ("others", "initial"):
            continue  # `others` is optional
        with pytest.raises(ValueError) as refused:
            call(change(drawn(5, make)))
        message = str(refused.value)
        assert name in message
        assert expected in message or (case == "too large" and "must have a length between" in message)
        assert "\n" not in message
        assert audit.last_round == 0
        assert audit.log.final is None
    audit.observe_round(1, model, present=[0])


SETTINGS = {
    "blocks that do not add up": ({"blocks": [1_000, 1_000]}, f"add up to the {DIM} coordinates"),
    "no blocks": ({"blocks": []}, f"add up to the {DIM} coordinates"),
    "a number of blocks": ({"blocks": 3}, "list the sizes of blocks, got 3"),
    "a size in halves": ({"blocks": [1_000.5, DIM - 1_000.5]}, "whole number"),
    "a small block": ({"blocks": [300, DIM - 300]}, "at least 8 coordinates for each observed canary"),
    "too many unobserved": ({"blocks": BLOCKS, "unobserved": 961}, "the smallest block - canaries = 960, got 961"),
    "too many canaries": ({"canaries": DIM}, "must leave 10 directions"),
    "an integer for reduce": ({"reduce": 3}, "rank"),
    "a score that is no function": ({"scores": {"mine": 3}}, "must be callable"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_invalid_settings_are_rejected_before_the_directory_is_created(case, tmp_path):
    settings, expected = SETTINGS[case]
    with pytest.raises(ValueError) as refused:
        audit_of(drawn(1, KINDS["numpy"]), directory=tmp_path / "run", **settings)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_updates_of_a_tree_reject_like():
    with pytest.raises(ValueError, match="like is for flat vectors"):
        audit_of(drawn(1, KINDS["numpy"]), blocks=BLOCKS).updates([0], 1.0, like=np.zeros(DIM))


LENGTHS = {
    "a leaf of zeros": at("embedding", np.zeros_like),
    "a huge leaf": at("embedding", lambda leaf: leaf * 1e30),
    "a tiny leaf": at("embedding", lambda leaf: leaf * 1e-30),
    "tiny leaves": lambda tree: combined(lambda leaf: leaf * 1e-60, tree),
    "huge leaves": lambda tree: combined(lambda leaf: leaf * 1e60, tree),
}


def in_single(array, dtype):
    return array.astype(np.float32)


@pytest.mark.parametrize(
    ("case", "make"),
    [(case, KINDS["numpy in double"]) for case in LENGTHS] + [(case, in_single) for case in list(LENGTHS)[:3]],
)
def test_lengths_at_the_ends_of_the_range_are_measured(case, make):
    canaries = dense_canaries(drawn(1, KINDS["numpy in double"]), BLOCKS)
    model = LENGTHS[case](drawn(1, make))
    audit = audit_of(model, blocks=BLOCKS)
    halves = combined(lambda leaf: leaf / 2, model)
    audit.observe_round(1, model, present=[], others=halves, clip_norm=1.0)
    (item,) = audit.log.rounds()
    length = np.linalg.norm(flat(model))
    assert item.norm == pytest.approx(length, rel=1e-6)
    assert np.abs(item.cosines - canaries @ flat(model) / length).max() < 2e-7
    assert item.residual_norm == pytest.approx(length / 2, rel=1e-6)
    norms = [np.linalg.norm(numbers(leaf)) for leaf in leaves(halves) if numbers(leaf).size]
    assert item.layer_rests == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("blocks", [None, BLOCKS])
def test_a_round_of_zeros_counts_as_skipped(blocks):
    model = drawn(1, KINDS["numpy"])
    audit = audit_of(model, blocks=blocks)
    audit.observe_round(1, combined(np.zeros_like, model), present=[])
    assert audit.last_round == 1
    assert len(audit.log.observed) == 0
    with pytest.raises(ValueError, match="are equal"):
        audit.observe_round(2, model, present=[0], others=model)


def test_integer_counters_of_a_state_dict_are_not_audited():
    network = torch.nn.Sequential(torch.nn.Linear(60, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 30))
    state = network.state_dict()
    audit = Audit.for_model(state, canaries=20, seed=SEED, delta=DELTA, blocks=[2_000, 1_830])
    update = audit.update(0, 1.0)
    assert list(update) == list(state)
    assert update["1.num_batches_tracked"].dtype == torch.int64
    assert update["1.num_batches_tracked"] == 0
    network.load_state_dict({name: value + update[name] for name, value in state.items()})
    audit.observe_round(1, update, present=[0])
    (item,) = audit.log.rounds()
    assert item.cosines[0] == pytest.approx(1.0, abs=1e-6)


def test_frozen_parameters_get_no_canary_and_no_gauge():
    network = torch.nn.Sequential(torch.nn.Linear(60, 40), torch.nn.Linear(40, 30))
    network[0].requires_grad_(False)
    audit = Audit.for_model(dict(network.named_parameters()), canaries=20, seed=SEED, delta=DELTA)
    assert audit.settings.layers == (("1.weight", 1_200), ("1.bias", 30))
    update = audit.update(0, 1.0)
    assert not update["0.weight"].any()
    assert np.linalg.norm(flat(update)) == pytest.approx(1.0, rel=1e-6)
