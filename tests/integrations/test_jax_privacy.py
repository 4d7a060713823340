"""jax_privacy with canaries: verdicts of honest and of broken pipelines, and a state that works under jit."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from requires import require

jax_privacy = require("jax_privacy")
from jax_privacy import batch_selection, noise_addition  # noqa: E402
from jax_privacy.experimental import accounting  # noqa: E402
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig  # noqa: E402
from jax_privacy.matrix_factorization import toeplitz  # noqa: E402

from coalmine import Audit, BandedNoise, mechanism_epsilon  # noqa: E402
from coalmine.integrations.jax_privacy import AuditState, audited, banded_noise  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
EXAMPLES, STEPS, RATE, DELTA = 600, 40, 0.1, 1e-5
PARAMS = {"w": np.zeros((30, 100), np.float32), "b": [np.zeros(100, np.float32)]}
EVENT = accounting.dpsgd_event(1.0, STEPS, sampling_prob=RATE)
POISSON = batch_selection.CyclicPoissonSampling(sampling_prob=RATE, iterations=STEPS)
BANDS = np.array([1.0, 0.5, 0.375]) / np.linalg.norm([1.0, 0.5, 0.375])
SETTINGS = {"canaries": 500, "seed": 5, "delta": DELTA}


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(EXAMPLES, 30)).astype(np.float32), rng.integers(100, size=EXAMPLES)


def loss(params, features, labels):
    return optax.softmax_cross_entropy_with_integer_labels(features @ params["w"] + params["b"][0], labels).mean()


def train(privatizer, strategy, *, grad_fn=None, batches=None, largest=160, through_clip=False):
    """Train with an audited privatizer, and return what `finish` needs."""
    grad_fn = grad_fn or jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    features, labels = data()

    @jax.jit
    def step(params, noise_state, *batch, padding):
        clipped = grad_fn(params, *batch, is_padding_example=padding)
        noised, noise_state = privatizer.update(sum_of_clipped_grads=clipped, noise_state=noise_state)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, noised), noise_state

    params = jax.tree.map(jnp.asarray, PARAMS)
    noise_state = privatizer.init(params)
    for indices in batches or strategy.batch_iterator(EXAMPLES, rng=1):
        noise_state = privatizer.next_step(noise_state, indices)
        rows = np.zeros(largest, np.int64)
        rows[: len(indices)] = indices
        batch, used = [features[rows], labels[rows]], len(indices)
        if through_clip:
            numbers = np.full(largest, -1)
            numbers[used : used + len(privatizer.canaries_in_step)] = privatizer.canaries_in_step
            batch, used = [*batch, numbers], used + len(privatizer.canaries_in_step)
        params, noise_state = step(params, noise_state, *batch, padding=np.arange(largest) >= used)
    return {"noise_state": noise_state, "params": params}


def gaussian(stddev=1.0, **options):
    """An audited Gaussian privatizer whose noise is `stddev`, where 1 is stated."""
    inner = noise_addition.gaussian_privatizer(stddev=stddev, prng_key=jax.random.key(7))
    given = {"stddev": 1.0, "clip_norm": 1.0, "num_examples": EXAMPLES, "dp_event": EVENT, **SETTINGS}
    return audited(inner, PARAMS, **given | options)


def legs(result):
    return {name: leg.outcome for name, leg in result.legs.items()}


def test_honest_training_passes_on_the_accountants_epsilon():
    privatizer = gaussian()
    result = privatizer.audit.finish(**train(privatizer, POISSON))
    assert result.verdict.outcome == "PASS"
    assert result.claim.amplified
    assert set(legs(result).values()) == {"PASS"}
    rung = result["known-others"]
    exact = mechanism_epsilon(1.0, delta=DELTA, participations=rung.headline.presentations)
    assert rung.interval[0] <= exact <= rung.interval[1]
    assert next(item for item in result.audited if item.name == "clipping").status == "not checked"


def test_half_the_noise_is_a_violation_of_the_noise_leg():
    privatizer = gaussian(stddev=0.5)
    result = privatizer.audit.finish(**train(privatizer, POISSON))
    assert result.verdict.outcome == "VIOLATION"
    assert legs(result)["noise"] == "VIOLATION"


@pytest.mark.parametrize("clips", [True, False], ids=["clip", "no clip"])
def test_canaries_through_the_clip_show_whether_it_clips(clips):
    """Without a clip each canary is ten times as long as the noise is made for."""
    privatizer = gaussian(through_clip=True, canaries=300)
    wrapped = privatizer.canary_loss(loss)
    grad_fn = jax_privacy.clipped_grad(
        wrapped, l2_clip_norm=1.0 if clips else np.inf, batch_argnums=(1, 2, 3), microbatch_size=20
    )
    result = privatizer.audit.finish(**train(privatizer, POISSON, grad_fn=grad_fn, through_clip=True))
    assert result.verdict.outcome == ("PASS" if clips else "VIOLATION")
    assert legs(result) == {"accounting": "PASS", "noise": "PASS" if clips else "VIOLATION", "sampling": "PASS"}
    assert next(item for item in result.audited if item.name == "clipping").status == "checked"


@pytest.mark.parametrize(
    "strategy",
    [
        batch_selection.BallsInBinsSampling(iterations=STEPS, cycle_length=10),
        batch_selection.CyclicPoissonSampling(sampling_prob=0.13, iterations=STEPS),
    ],
    ids=["balls in bins", "higher rate"],
)
def test_another_batch_selection_than_accounted_is_a_violation_of_the_sampling_leg(strategy):
    privatizer = gaussian()
    result = privatizer.audit.finish(**train(privatizer, strategy))
    assert result.verdict.outcome == "VIOLATION"
    assert legs(result)["sampling"] == "VIOLATION"


def test_batches_of_a_fixed_size_bar_a_pass_on_poisson_sampling():
    """Each example is picked as often as accounted; the sizes of the batches show that the scheme is another."""
    privatizer = gaussian()
    result = privatizer.audit.finish(
        **train(privatizer, batch_selection.FixedBatchSampling(batch_size=60, iterations=STEPS))
    )
    assert legs(result) == {"accounting": "PASS", "noise": "PASS", "sampling": "UNDERPOWERED"}
    assert "fixed" in result.legs["sampling"].reason


def banded_plan(noise_multiplier=2.0, **options):
    return BandMFExecutionPlanConfig(
        strategy=BANDS,
        iterations=STEPS,
        epsilon=None,
        delta=None,
        noise_multiplier=noise_multiplier,
        sampling_prob=0.3,
        noise_seed=3,
        **options,
    ).plan


def test_banded_plan_meets_the_analytical_epsilon():
    """Steps of an example are at least as far apart as there are bands, so ‖Cu‖² is the number of its steps."""
    plan = audited(banded_plan(), PARAMS, num_examples=EXAMPLES, **SETTINGS)
    privatizer = plan.noise_addition_transform
    grad_fn = plan.clipped_grad(loss, batch_argnums=(1, 2))
    result = privatizer.audit.finish(**train(privatizer, plan.batch_selection_strategy, grad_fn=grad_fn))
    assert result.verdict.outcome == "PASS"
    rung = result["known-others"]
    exact = mechanism_epsilon(2.0 / np.sqrt(rung.headline.presentations), delta=DELTA)
    assert rung.interval[0] <= exact <= rung.interval[1]
    assert rung.epsilon == pytest.approx(exact, rel=0.15)
    assert next(item for item in result.audited if item.name == "sampler").status == "not checked"


def test_banded_plan_with_half_the_noise_is_a_violation():
    """The accountant's event still has the noise that was asked for."""
    halved = banded_plan(noise_multiplier=1.0)
    plan = audited(halved, PARAMS, num_examples=EXAMPLES, dp_event=banded_plan().dp_event, **SETTINGS)
    privatizer = plan.noise_addition_transform
    result = privatizer.audit.finish(**train(privatizer, plan.batch_selection_strategy))
    assert result.verdict.outcome == "VIOLATION"


def test_batches_closer_than_the_bands_are_named():
    plan = audited(banded_plan(), PARAMS, num_examples=EXAMPLES, **SETTINGS)
    privatizer = plan.noise_addition_transform
    every = batch_selection.CyclicPoissonSampling(sampling_prob=0.25, iterations=STEPS)
    run = train(privatizer, every, largest=260)
    with pytest.warns(UserWarning, match="the batches expose an example more than the accountant allows for"):
        privatizer.audit.finish(**run)


@pytest.mark.parametrize("normalised", [False, True])
def test_noising_matrix_of_a_banded_strategy(normalised):
    """C as jax_privacy defines it, Toeplitz, is the inverse of its noising matrix."""
    matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(BANDS), 12 if normalised else None)
    noise, length = banded_noise(matrix, 12)
    strategy = np.array(toeplitz.materialize_lower_triangular(jnp.asarray(BANDS), 12), np.float64)
    if normalised:
        strategy /= np.linalg.norm(strategy, axis=0)
    assert isinstance(noise, BandedNoise)
    np.testing.assert_allclose(length * noise.matrix()[:12, :12], strategy, atol=1e-5)
    dense, dense_length = banded_noise(np.linalg.inv(strategy), None)
    np.testing.assert_allclose(dense_length * dense.matrix()[:12, :12], strategy, atol=1e-9)
    assert banded_noise(jnp.eye(5) / 2, None) == (None, 2.0)


def test_noising_matrix_of_a_long_run_is_read_from_its_first_steps():
    """3,000 steps, of which no matrix is made; the columns of the last ones are normalised."""
    matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(BANDS), 3_000)
    noise, length = banded_noise(matrix, 3_000)
    assert (noise.rounds, noise.bands) == (3_000, 3)
    assert length == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(noise.unit, BANDS, atol=1e-5)
    plain, _ = banded_noise(toeplitz.inverse_as_streaming_matrix(jnp.asarray(BANDS)), 3_000)
    assert plain.rounds == 3_002


def test_noising_matrices_that_cannot_be_audited():
    with pytest.raises(ValueError, match="must be finite and lower triangular"):
        banded_noise(np.ones((3, 3)), None)
    with pytest.raises(ValueError, match="must be a banded Toeplitz matrix"):
        banded_noise(np.linalg.inv(np.array([[1.0, 0, 0], [0.5, 1, 0], [0.2, 0.9, 1]])), None)
    with pytest.raises(TypeError, match=r"number of steps .*: pass steps="):
        banded_noise(toeplitz.inverse_as_streaming_matrix(jnp.asarray(BANDS)), None)


def test_the_sum_holds_the_canaries_and_the_privatizers_own_noise():
    """With the same key, the release is that of the plain privatizer less the canaries of the batch."""
    inner = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(7))
    privatizer = gaussian()
    params = jax.tree.map(jnp.asarray, PARAMS)
    grads = jax.tree.map(lambda leaf: 0.1 * jnp.ones_like(leaf), params)
    batch = np.arange(50)
    state = privatizer.next_step(privatizer.init(params), batch)
    noised, state = jax.jit(privatizer.update)(grads, state)
    plain, _ = inner.update(grads, inner.init(params))
    twin = Audit.for_model({"b/0": PARAMS["b"][0], "w": PARAMS["w"]}, **SETTINGS)
    present = np.flatnonzero(np.isin(twin.canary_rows(EXAMPLES), batch))
    assert 20 < len(present) < 50
    total = twin.updates(present, 1.0)
    np.testing.assert_allclose(noised["w"], plain["w"] - total["w"], atol=1e-6)
    np.testing.assert_allclose(noised["b"][0], plain["b"][0] - total["b/0"], atol=1e-6)
    assert not np.asarray(state.canaries["w"]).any()
    np.testing.assert_allclose(state.others["w"], -0.1)
    np.testing.assert_array_equal(state.model_delta["w"], -noised["w"])


def test_examples_that_are_twice_in_a_batch_count_twice():
    privatizer, params = gaussian(), jax.tree.map(jnp.asarray, PARAMS)
    row = int(privatizer.audit.canary_rows(EXAMPLES)[3])
    once = privatizer.next_step(privatizer.init(params), [row]).canaries["w"]
    twice = privatizer.next_step(privatizer.init(params), [row, row, -1]).canaries["w"]
    np.testing.assert_allclose(twice, 2 * once, atol=1e-7)


def test_works_in_a_chain_and_with_donated_state():
    privatizer, params = gaussian(), jax.tree.map(jnp.asarray, PARAMS)
    chain = optax.chain(privatizer, optax.sgd(0.1))
    own, *rest = chain.init(params)
    step = jax.jit(lambda grads, state: chain.update(grads, state), donate_argnums=1)
    for number in range(3):
        state = (privatizer.next_step(own, np.arange(number, EXAMPLES, 7)), *rest)
        _, (own, *rest) = step(params, state)
    privatizer.next_step(own, [])
    assert privatizer.audit.last_round == 3


def test_sampling_probability_instead_of_batches():
    privatizer = gaussian(num_examples=None, sampling_probability=0.2, dp_event=None, canaries=300)
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = privatizer.init(params)
    update = jax.jit(privatizer.update)
    for _ in range(20):
        state = privatizer.next_step(state)
        _, state = update(params, state)
    result = privatizer.audit.finish(noise_state=state)
    assert result.verdict.outcome == "PASS"
    assert not result.claim.amplified
    assert next(item for item in result.audited if item.name == "sampler").status == "not checked"


def test_a_resumed_run_records_what_an_uninterrupted_one_does(tmp_path):
    def run(directory, stop):
        params = jax.tree.map(jnp.asarray, PARAMS)
        kept = None
        privatizer = gaussian(directory=tmp_path / directory, seed=b"a secret of mine")
        update = jax.jit(privatizer.update)
        batches = list(POISSON.batch_iterator(EXAMPLES, rng=1))[:6]
        state, first = privatizer.init(params), 0
        if stop:
            for number, batch in enumerate(batches[:4]):
                _, state = update(params, privatizer.next_step(state, batch))
                kept = state if number == 1 else kept
            privatizer.audit.close()
            privatizer = gaussian(directory=tmp_path / directory, seed=b"a secret of mine")
            # The checkpoint after the second step was written when that step was recorded.
            state, first = kept, 2
        for batch in batches[first:]:
            _, state = update(params, privatizer.next_step(state, batch))
        privatizer.next_step(state, [])
        return privatizer.audit.log_digest

    assert run("whole", stop=False) == run("resumed", stop=True)


def test_steps_that_the_audit_missed_are_refused():
    privatizer, params = gaussian(), jax.tree.map(jnp.asarray, PARAMS)
    state = privatizer.init(params)
    _, unseen = privatizer.update(params, state)
    with pytest.raises(ValueError, match="comes from step 1, and the audit knows 0 steps: call next_step"):
        privatizer.next_step(unseen, [1])
    _, once = privatizer.update(params, privatizer.next_step(state, [1]))
    _, twice = privatizer.update(params, once)
    with pytest.raises(ValueError, match="comes from step 2, and the audit waits for step 1"):
        privatizer.next_step(twice, [1])
    with pytest.raises(ValueError, match="a state that jax traces: call it outside of jit"):
        jax.jit(lambda given: privatizer.next_step(given, [1]))(once)
    with pytest.raises(TypeError, match="needs the indices of the batch"):
        privatizer.next_step(once)
    with pytest.raises(TypeError, match=r"finish needs the state after the last step"):
        privatizer.audit.finish()
    with pytest.raises(ValueError, match=r"indices must lie in 0\.\.599, got 600"):
        privatizer.next_step(once, [600])


def test_bad_arguments_are_refused():
    inner = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=1)
    good = {"stddev": 1.0, "clip_norm": 1.0, "num_examples": EXAMPLES, **SETTINGS}
    for options, kind, message in [
        ({"stddev": None}, TypeError, "needs the privatizer's stddev"),
        ({"clip_norm": None}, TypeError, "needs the privatizer's clip_norm"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm"),
        ({"num_examples": None}, TypeError, "either num_examples"),
        ({"sampling_probability": 0.1}, TypeError, "either num_examples"),
        ({"num_examples": 100}, ValueError, "at most the 100 examples"),
        ({"seed": None}, ValueError, "exactly one of seed and seed_file"),
    ]:
        with pytest.raises(kind, match=message):
            audited(inner, PARAMS, **good | options)
    with pytest.raises(TypeError, match="must be an optax transformation or a DPExecutionPlan"):
        audited(PARAMS, PARAMS, **good)
    with pytest.raises(ValueError, match="audited already"):
        audited(audited(inner, PARAMS, **good), PARAMS, **good)
    with pytest.raises(ValueError, match="empty tree"):
        audited(inner, {}, **good)


def test_state_is_a_pytree_of_arrays():
    state = gaussian().init(jax.tree.map(jnp.asarray, PARAMS))
    assert isinstance(state, AuditState)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
