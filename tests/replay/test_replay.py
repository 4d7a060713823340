"""Replay of any step: each fault beside its honest twin, frozen randomness, and state that is restored bit for bit."""

import json
import random
from typing import Any

import numpy as np
import pytest
from requires import require

from coalmine.testing import replay

ROWS, DIM = 24, 40


def updates(seed=1, length=3.0):
    """Rows of different lengths around `length`: some are clipped at 1 and some are not."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(ROWS, DIM)) / np.sqrt(DIM)
    return rows * rng.uniform(0.1, length, size=(ROWS, 1))


def norms(rows):
    return np.linalg.norm(rows, axis=1, keepdims=True)


def clipped(rows, limit: Any = 1.0):
    return rows * np.minimum(1.0, limit / np.maximum(norms(rows), 1e-12))


def honest_sum(rows):
    return clipped(rows).sum(axis=0)


def mean_subtracted(rows):
    return honest_sum(rows - rows.mean(axis=0))


def softmax_over_rows(rows):
    weights = np.exp(rows - rows.max(axis=0))
    return honest_sum(len(rows) * rows * weights / weights.sum(axis=0))


def routed_by_capacity(rows):
    """The half of the rows with the larger gate goes through, twice as large."""
    gate = rows.sum(axis=1, keepdims=True)
    return clipped(rows * np.where(gate >= np.median(gate), 1.0, -1.0)).sum(axis=0)


def normalised_by_weights(rows):
    """Each row's loss has a weight of its own, and all are divided by the batch's sum of weights."""
    weights = np.abs(rows[:, :1])
    return clipped(30 * rows * weights / weights.sum()).sum(axis=0)


def clipped_by_microbatch(rows, size=4):
    parts = [rows[start : start + size].mean(axis=0) for start in range(0, len(rows), size)]
    return clipped(np.array(parts)).sum(axis=0)


def clipped_by_batch(rows):
    return clipped(rows.sum(axis=0)[None])[0]


def clipped_by_tensor(rows):
    """Two tensors, each clipped at the norm that the claim has for both together."""
    return {"first": clipped(rows[:, :20]).sum(axis=0), "second": clipped(rows[:, 20:]).sum(axis=0)}


def clipped_at_the_median(rows):
    return clipped(rows, np.median(norms(rows))).sum(axis=0)


def shared_counted_twice(rows):
    """The norm counts a shared parameter once, the sum twice."""
    return 2 * honest_sum(rows)


def layer_without_clip(rows):
    return {"clipped": clipped(rows[:, :30]).sum(axis=0), "lost": rows[:, 30:].sum(axis=0)}


def divided_by_real_size(rows):
    """A mean in units of the expected one; it moves twice as far if the rows oppose each other."""
    return ROWS * honest_sum(rows) / len(rows)


def gradients_never_cleared(rows):
    total, gradient = np.zeros(DIM), np.zeros(DIM)
    for row in rows:
        gradient = gradient + row
        total = total + clipped(gradient[None])[0]
    return total


def auxiliary_loss(rows):
    """Load balancing is added to the clipped sum, outside of the clip."""
    return honest_sum(rows) + rows.mean(axis=0) * 3


def by_tensor_in_parts(rows):
    limit = 1 / np.sqrt(2)
    return {"first": clipped(rows[:, :20], limit).sum(axis=0), "second": clipped(rows[:, 20:], limit).sum(axis=0)}


FAULTS = [
    mean_subtracted,
    softmax_over_rows,
    routed_by_capacity,
    normalised_by_weights,
    clipped_by_microbatch,
    clipped_by_batch,
    clipped_by_tensor,
    clipped_at_the_median,
    shared_counted_twice,
    layer_without_clip,
    gradients_never_cleared,
    auxiliary_loss,
]


@pytest.mark.parametrize("step", FAULTS, ids=lambda step: step.__name__)
def test_a_row_that_moves_more_than_the_clip_norm_is_a_counterexample(step):
    found = replay(step, updates(), rows=6)
    assert found.is_counterexample
    assert not found.ok
    assert found.factor > 1.05
    assert found.worst.tensors
    assert "multiplier z counts as z/" in str(found)


@pytest.mark.parametrize("step", [honest_sum, by_tensor_in_parts], ids=lambda step: step.__name__)
@pytest.mark.parametrize("adjacency", ["zero-out", "add-remove", "replace-one"])
def test_honest_sums_have_no_alarm(step, adjacency):
    found = replay(step, updates(), rows=ROWS, adjacency=adjacency)
    assert found.ok
    assert found.problems() == []
    assert 0.5 < found.factor <= 1 + found.tolerance < 1 + 1e-10


@pytest.mark.parametrize("row", [0, 7, ROWS - 1])
def test_the_change_by_a_row_is_its_clipped_length(row):
    """Oracle: min(‖g‖, 1)."""
    rows = updates()
    found = replay(honest_sum, rows, rows=[row], extremes=False)
    assert found.rows[0].change == pytest.approx(min(1.0, float(np.linalg.norm(rows[row]))), rel=1e-12)


def test_a_mean_without_a_reply_is_not_the_neighbour_under_zero_out():
    """Left out, a reply moves an honest mean by up to 2 clip norms; replaced by zeros, by at most 1."""
    rows = np.concatenate([-np.ones((ROWS - 1, DIM)), np.ones((1, DIM))])

    def mean(replies):
        return clipped(replies).mean(axis=0)

    dropped = replay(mean, rows, rows=[ROWS - 1], clip_norm=1 / ROWS, extremes=False)
    assert dropped.factor == pytest.approx(2.0, rel=1e-6)
    zeroed = replay(mean, rows, rows=[ROWS - 1], clip_norm=1 / ROWS, adjacency="zero-out")
    assert zeroed.ok
    assert zeroed.factor == pytest.approx(1.0)


def test_division_by_the_real_size_is_named():
    rows = np.concatenate([-np.ones((ROWS - 1, DIM)), np.ones((1, DIM))])
    assert replay(divided_by_real_size, rows, rows=[ROWS - 1]).factor > 1.9
    assert replay(divided_by_real_size, rows, adjacency="zero-out").ok

    def weighted(given, weights, size=None):
        return (clipped(given) * weights[:, None]).sum(axis=0) * ROWS / (size or len(given))

    found = replay(weighted, updates())
    assert not found.is_counterexample
    assert found.divisor == pytest.approx((ROWS - 1) / ROWS)
    assert "divided by the number of rows" in str(found)
    assert replay(lambda given, weights: weighted(given, weights, ROWS), updates()).ok


def test_noise_only_where_the_sum_is_not_zero_is_found():
    rows = np.zeros((ROWS, DIM))
    rows[:, 0] = 0.5
    rows[3, 10:20] = 0.1  # only this row has these words

    def noised(given, *, everywhere):
        total = honest_sum(given)
        noise = np.random.normal(size=DIM)  # noqa: NPY002
        return total + (noise if everywhere else noise * (total != 0))

    assert replay(lambda given: noised(given, everywhere=True), rows, rows=[3]).ok
    assert replay(lambda given: noised(given, everywhere=False), rows, rows=[3]).factor > 1.5


def test_padding_that_counts_is_found():
    """Each row's mean is over the longest row of the batch, so the longest one moves all others."""
    tokens = np.random.default_rng(2).integers(1, 9, size=(ROWS, 12))
    tokens[1:, 4:] = 0

    def step(rows, *, counted):
        rows = rows[:, : np.flatnonzero((rows != 0).any(axis=0)).max() + 1]
        hidden = np.sin(np.arange(10)[:, None] * np.arange(1, DIM + 1))[rows] * (rows != 0)[..., None]
        length = rows.shape[1] if counted else np.maximum((rows != 0).sum(axis=1)[:, None], 1)
        return clipped(hidden.sum(axis=1) / length / 4).sum(axis=0)

    assert replay(lambda rows: step(rows, counted=False), tokens).ok
    assert replay(lambda rows: step(rows, counted=True), tokens, rows=[5]).is_counterexample  # the longest is tried too


def test_extreme_rows_find_what_the_real_rows_do_not():
    rows = updates(length=0.5)
    assert replay(lambda given: given.sum(axis=0), rows, extremes=False).ok
    found = replay(lambda given: given.sum(axis=0), rows)
    assert found.worst.kind == "100 times as large"
    assert found.is_counterexample


def test_frozen_randomness_is_restored():
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002
    own = np.random.default_rng(6)
    before = (random.getstate(), np.random.get_state()[1].tolist(), own.bit_generator.state)  # noqa: NPY002

    def step(rows):
        noise = np.random.normal() + own.normal(size=DIM) + random.random()  # noqa: NPY002
        return honest_sum(rows) + noise

    assert replay(step, updates(), generators=[own]).ok
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), own.bit_generator.state)  # noqa: NPY002


def test_a_release_that_does_not_repeat_is_named():
    own = np.random.default_rng(6)
    found = replay(lambda rows: honest_sum(rows) + own.normal(size=DIM), updates())
    assert not found.repeats
    assert not found.ok
    assert not found.is_counterexample
    assert "does not repeat with the same random numbers" in str(found)


def test_what_a_row_writes_elsewhere_is_named():
    statistics: dict[str, Any] = {"mean": np.zeros(DIM), "rounds": 0}

    def step(rows, *, honest):
        statistics["mean"] += 0.1 * (0 if honest else rows.mean(axis=0))
        statistics["rounds"] += 1
        return honest_sum(rows)

    assert replay(lambda rows: step(rows, honest=True), updates(), state=[statistics]).ok
    found = replay(lambda rows: step(rows, honest=False), updates(), state=[statistics])
    assert list(found.leaks) == ["mean"]
    assert "outside of the release: mean" in str(found)
    assert not statistics["mean"].any()
    assert statistics["rounds"] == 0


def test_the_result_is_json():
    found = replay(mean_subtracted, updates())
    values = json.loads(json.dumps(found.to_dict()))
    assert values["factor"] == found.factor
    assert values["rows"][0]["tensors"][0]["name"] == "release"


def test_a_row_without_finite_numbers_is_named():
    def step(rows):
        return np.where(np.abs(rows).max() > 10, np.nan, 1.0) * honest_sum(rows)

    found = replay(step, updates())
    assert found.not_finite == ("row 0 (100 times as large)",)
    assert "NaN or infinite with row 0 (100 times as large)" in str(found)
    assert not found.ok
    assert "nothing else moved" not in str(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 3}, "step must be a function of a batch, got 3"),
        ({"batch": 3.0}, "batch must hold arrays whose first axis counts the rows"),
        ({"batch": (np.ones((3, 2)), np.ones(4))}, r"got axes of \[3, 4\]"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"rows": [ROWS]}, f"rows must be indices below the batch's {ROWS} rows, got"),
        ({"clip_norm": 0}, "clip_norm must be"),
        ({"adjacency": "none"}, "adjacency must be 'zero-out', 'add-remove' or 'replace-one', got 'none'"),
        ({"step": lambda rows: None}, "pass model= if the release is the change of its weights"),
        ({"step": lambda rows: rows}, "arrays of the same shapes for every batch"),
        ({"step": lambda rows: rows.sum() * np.nan}, "finite numbers for the batch itself"),
        ({"step": lambda rows: "text"}, "step must return an array of numbers"),
        ({"state": [4]}, "state must list models, optimizers"),
        ({"generators": [4]}, "generators must be random generators"),
    ],
)
def test_bad_input_gives_one_clear_line(change, message):
    arguments: dict[str, Any] = {"step": honest_sum, "batch": updates()} | change
    with pytest.raises((ValueError, TypeError), match=message) as error:
        replay(arguments.pop("step"), arguments.pop("batch"), **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.full
def test_a_jax_transformer_with_its_key():
    jax = require("jax")
    jnp = jax.numpy
    key, width, words = jax.random.key(3), 8, 6
    weights = {
        name: jax.random.normal(jax.random.fold_in(key, number), shape) / 3
        for number, (name, shape) in enumerate(
            {"embed": (20, width), "query": (width, width), "value": (width, width), "out": (width, 20)}.items()
        )
    }

    def loss(parameters, tokens):
        hidden = parameters["embed"][tokens]
        scores = jnp.where(tokens != 0, (hidden @ parameters["query"]) @ hidden.T, -1e9)
        hidden = hidden + jax.nn.softmax(scores) @ hidden @ parameters["value"]
        logits = jax.nn.log_softmax(hidden[:-1] @ parameters["out"])
        return -(jnp.take_along_axis(logits, tokens[1:, None], 1)[:, 0] * (tokens[1:] != 0)).sum()

    def step(tokens, key, *, mixed):
        rows = tokens.reshape(words, len(tokens)).T if mixed else tokens  # a wrong reshape: rows hold others' words
        gradients = jax.vmap(jax.grad(loss), (None, 0))(weights, rows)
        length = jnp.sqrt(sum(jnp.square(leaf.reshape(len(tokens), -1)).sum(1) for leaf in jax.tree.leaves(gradients)))
        factor = jnp.minimum(1.0, 1.0 / length)
        keys = jax.random.split(key, len(gradients))
        return {
            name: jnp.einsum("i,i...", factor, leaf) + jax.random.normal(each, leaf.shape[1:])
            for (name, leaf), each in zip(gradients.items(), keys, strict=True)
        }

    tokens = jax.random.randint(key, (12, words), 0, 20)
    assert replay(jax.jit(lambda given: step(given, key, mixed=False)), tokens).ok
    assert replay(jax.jit(lambda given: step(given, key, mixed=True)), tokens).is_counterexample

    def with_metric(given):
        return step(given, key, mixed=False), {"share": (given == 3).mean()}

    assert list(replay(with_metric, tokens, has_aux=True).leaks) == ["aux.share"]
