"""Training loops with jax_privacy that put canaries in wrongly, or release noise twice: none of them can pass."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from requires import require

require("jax_privacy")
import jax_privacy  # noqa: E402
from jax_privacy import batch_selection, noise_addition  # noqa: E402
from jax_privacy.experimental import accounting  # noqa: E402
from jax_training import EXAMPLES, PARAMS, POISSON, RATE, canaries_in_step, gaussian, loss, train  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
FEW = 12
TWICE_AS_LONG = r"canaries are (1\.9|2\.?[0-2]?)\d* clip norms long"
FEW_STEPS = batch_selection.CyclicPoissonSampling(sampling_prob=RATE, iterations=FEW)


def clipped(function, **options):
    return jax_privacy.clipped_grad(function, l2_clip_norm=1.0, batch_argnums=(1, 2, 3), microbatch_size=20, **options)


def short_run(rows_of_canaries=canaries_in_step, wrap=lambda function: function, clip_norm=1.0):
    privatizer = gaussian(
        through_clip=True,
        canaries=300,
        clip_norm=clip_norm,
        stddev=clip_norm,
        dp_event=accounting.dpsgd_event(1.0, FEW, sampling_prob=RATE),
    )
    grad_fn = clipped(wrap(privatizer.canary_loss(loss)))
    options = {"grad_fn": grad_fn, "through_clip": True, "rows_of_canaries": rows_of_canaries}
    return privatizer.audit.finish(**train(privatizer, FEW_STEPS, **options))


def item(result, name):
    return next(item for item in result.audited if item.name == name)


def test_canaries_that_are_never_added_do_not_pass():
    """The audit computes the others as the input less the canaries that it expects in it."""
    privatizer = gaussian(through_clip=True, canaries=300)
    grad_fn = clipped(privatizer.canary_loss(loss))
    run = train(privatizer, POISSON, grad_fn=grad_fn, through_clip=True, rows_of_canaries=lambda _: [])
    result = privatizer.audit.finish(**run)
    assert result["known-others"].epsilon > 4 * result["known-round"].epsilon
    assert result.verdict.outcome == "UNDERPOWERED"
    assert (result.verdict.code, result.verdict.finding.gauge) == ("gauge", "canaries in the release")
    assert item(result, "clipping").status == "failed"
    assert "the privatizer's input holds 0% of the canaries" in item(result, "clipping").detail


def lost_later(privatizer):
    canaries = privatizer.canaries_in_step
    return canaries if privatizer.audit.last_round < 5 else canaries[:0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "detail"),
    [
        pytest.param({"rows_of_canaries": lost_later}, r"input holds \d\d?% of the canaries", id="lost after step 5"),
        *(
            pytest.param(options, detail, id=name, marks=pytest.mark.full)
            for name, options, detail in (
                ("two rows each", {"rows_of_canaries": lambda p: np.repeat(p.canaries_in_step, 2)}, TWICE_AS_LONG),
                (
                    "every other one",
                    {"rows_of_canaries": lambda p: p.canaries_in_step[::2]},
                    r"input holds [3-6]\d% of the canaries",
                ),
                (
                    "another canary's",
                    {"rows_of_canaries": lambda p: (p.canaries_in_step + 1) % 300},
                    "input holds [0-9]% of the canaries",
                ),
                (
                    "weight 0",
                    {"wrap": lambda function: lambda *args: jnp.where(args[-1] < 0, 1.0, 0.0).sum() * function(*args)},
                    "input holds [0-9]% of the canaries",
                ),
                ("another clip", {"clip_norm": 0.5}, TWICE_AS_LONG),
            )
        ),
    ],
)
def test_canaries_that_are_not_in_the_input_as_expected_fail_the_clip(options, detail):
    result = short_run(**options)
    clipping = item(result, "clipping")
    assert clipping.status == "failed"
    assert re.search(detail, clipping.detail), clipping.detail
    assert result.verdict.outcome != "PASS"


def test_canaries_among_long_gradients_are_not_seen_and_not_vouched_for():
    """Three canaries of norm 1 in sums of 60 equal gradients of norm 1."""
    privatizer = gaussian(through_clip=True, canaries=10, dp_event=None)
    state, params = privatizer.init(PARAMS), jax.tree.map(jnp.asarray, PARAMS)
    long = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 60 / np.sqrt(3_100), jnp.float32), PARAMS)
    rows = privatizer.audit.core.schedule.rows(EXAMPLES)
    for _ in range(3):
        state = privatizer.next_step(state, rows[:3])
        joined = jax.tree.map(lambda grad, canary: grad - canary, long, state.canaries)
        _, state = privatizer.update(joined, state, params)
    clipping = item(privatizer.audit.finish(noise_state=state), "clipping")
    assert clipping.status == "failed"
    assert "canaries cannot be seen in the privatizer's input" in clipping.detail


def test_groups_of_several_rows_are_refused():
    """`canary_loss` would read the first row of the group alone."""
    privatizer = gaussian(through_clip=True, canaries=300)
    group = jax_privacy.clipped_grad(
        privatizer.canary_loss(loss), l2_clip_norm=1.0, batch_argnums=(1, 2, 3), keep_batch_dim=False
    )
    params = jax.tree.map(jnp.asarray, PARAMS)
    batch = jnp.zeros((1, 8, 30)), jnp.zeros((1, 8), int), jnp.full((1, 8), -1)
    with pytest.raises(ValueError, match="must be a row that is clipped by itself, got a group of 8 rows"):
        jax.jit(group)(params, *batch)


@pytest.mark.full
def test_a_row_without_a_batch_axis_is_a_row():
    privatizer = gaussian(through_clip=True, canaries=300)
    single = jax_privacy.clipped_grad(
        privatizer.canary_loss(loss), l2_clip_norm=1.0, batch_argnums=(1, 2, 3), keep_batch_dim=False
    )
    params = jax.tree.map(jnp.asarray, PARAMS)
    total = single(params, jnp.zeros((2, 30)), jnp.zeros(2, int), jnp.array([7, 9]))
    expected = privatizer.audit.core.updates([7, 9], 1.0)
    np.testing.assert_allclose(total["w"], -expected["w"], atol=1e-6)


def test_a_privatizer_called_twice_in_a_step_is_refused():
    privatizer, params = gaussian(), jax.tree.map(jnp.asarray, PARAMS)
    _, state = privatizer.update(params, privatizer.next_step(privatizer.init(params), [1]))
    _, state = privatizer.update(params, state)
    with pytest.raises(ValueError, match="comes from step 2, and the audit waits for step 1"):
        privatizer.next_step(state, [2])


@pytest.mark.full
@pytest.mark.parametrize("through_clip", [False, True])
def test_the_sum_of_the_examples_is_that_without_an_audit(through_clip):
    """The release is the plain privatizer's, less the canaries: same noise, and the same sum to rounding."""
    params, rng = jax.tree.map(jnp.asarray, PARAMS), np.random.default_rng(0)
    features, labels = rng.normal(size=(35, 30)).astype(np.float32), rng.integers(100, size=35)
    plain = jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    privatizer = gaussian(through_clip=through_clip, canaries=300)
    inner = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(7))
    state, own, model = privatizer.init(params), inner.init(params), privatizer.audit
    rows = model.core.schedule.rows(EXAMPLES)
    for _ in range(3):
        state = privatizer.next_step(state, rows[:5])
        alone = plain(params, features, labels)
        clipped_sum = alone
        if through_clip:
            numbers = np.concatenate([np.full(35, -1), privatizer.canaries_in_step])
            padded = (
                np.concatenate([features, np.zeros((5, 30), np.float32)]),
                np.concatenate([labels, np.zeros(5, int)]),
            )
            clipped_sum = clipped(privatizer.canary_loss(loss))(params, *padded, numbers)
        noised, state = privatizer.update(clipped_sum, state)
        expected, own = inner.update(alone, own)
        canaries = model.core.updates(range(5), 1.0)
        np.testing.assert_allclose(noised["w"] + canaries["w"], expected["w"], atol=2e-5)
        np.testing.assert_allclose(noised["b"][0] + canaries["b/0"], expected["b"][0], atol=2e-5)


@pytest.mark.parametrize("batches", ["fresh", pytest.param("the same", marks=pytest.mark.full)])
def test_noise_that_comes_again_after_a_restart_bars_a_pass(tmp_path, batches):
    """Steps 4 to 6 are released twice with the key of the checkpoint. The same release again tells nothing new."""
    params, rng = jax.tree.map(jnp.asarray, PARAMS), np.random.default_rng(3)
    picked = [np.flatnonzero(rng.random(EXAMPLES) < RATE) for _ in range(12)]
    settings = {"directory": tmp_path / "run", "seed": b"a secret of mine", "canaries": 200}

    def steps(privatizer, state, chosen):
        update = jax.jit(privatizer.update)
        for number in chosen:
            grads = jax.tree.map(lambda leaf, n=number: jnp.full(leaf.shape, 0.01 * n, jnp.float32), PARAMS)
            _, state = update(grads, privatizer.next_step(state, picked[number]))
        return state

    privatizer = gaussian(**settings)
    checkpoint = steps(privatizer, privatizer.init(params), range(3))
    privatizer.record(checkpoint)
    state = steps(privatizer, checkpoint, range(3, 6))
    privatizer.record(state)
    privatizer.audit.directory.close()
    privatizer = gaussian(**settings)
    again = range(6, 9) if batches == "fresh" else range(3, 6)
    state = steps(privatizer, checkpoint, again)
    if batches == "fresh":  # the fault is kept in the metrics
        privatizer.record(state)
        privatizer.next_step(state, picked[9])
        privatizer.audit.directory.close()
        privatizer = gaussian(**settings)
    with pytest.warns(UserWarning, match="the accountant counts 40 steps, and the audit observed 6"):
        law = item(privatizer.audit.finish(noise_state=state), "noise law")
    if batches == "the same":
        assert law.status != "failed"
        return
    assert law.status == "failed"
    assert law.detail.startswith("the noise of 3 steps came again after a restart, with other batches")
