"""An audited privatizer of jax_privacy: its sums, its state under jit, and its noising matrix."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from requires import require

from resumed import comparable

require("jax_privacy")
from jax_privacy import noise_addition  # noqa: E402
from jax_privacy.matrix_factorization import toeplitz  # noqa: E402
from jax_training import BANDS, EXAMPLES, PARAMS, POISSON, SETTINGS, gaussian  # noqa: E402

from coalmine import Audit, BandedNoise, Claim, mechanism_epsilon  # noqa: E402
from coalmine.integrations.jax_privacy import AuditState, audited, banded_noise, named_leaves  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


@pytest.mark.parametrize("normalised", [False, True])
def test_the_noising_matrix_of_a_banded_strategy_is_inverted(normalised):
    """jax_privacy's Toeplitz matrix C is the inverse of its noising matrix."""
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
    """3,000 steps, for which no full matrix is built; the last columns are normalised."""
    matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(BANDS), 3_000)
    noise, length = banded_noise(matrix, 3_000)
    assert (noise.rounds, noise.bands) == (3_000, 3)
    assert length == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(noise.unit, BANDS, atol=1e-5)
    plain, _ = banded_noise(toeplitz.inverse_as_streaming_matrix(jnp.asarray(BANDS)), 3_000)
    assert plain.rounds == 3_002


def test_unsupported_noising_matrices_are_rejected():
    with pytest.raises(ValueError, match="must be finite and lower triangular"):
        banded_noise(np.ones((3, 3)), None)
    with pytest.raises(ValueError, match="must be a banded Toeplitz matrix"):
        banded_noise(np.linalg.inv(np.array([[1.0, 0, 0], [0.5, 1, 0], [0.2, 0.9, 1]])), None)
    with pytest.raises(TypeError, match=r"number of steps .*: pass steps="):
        banded_noise(toeplitz.inverse_as_streaming_matrix(jnp.asarray(BANDS)), None)


def test_the_sum_contains_the_canaries_and_the_privatizers_noise():
    """With the same key, the release equals the plain privatizer's minus the canaries of the batch."""
    inner = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(7))
    privatizer = gaussian()
    params = jax.tree.map(jnp.asarray, PARAMS)
    grads = jax.tree.map(lambda leaf: 0.1 * jnp.ones_like(leaf), params)
    batch = np.arange(50)
    state = privatizer.next_step(privatizer.init(params), batch)
    noised, state = jax.jit(privatizer.update)(grads, state)
    plain, _ = inner.update(grads, inner.init(params))
    twin = Audit.for_model({"b/0": PARAMS["b"][0], "w": PARAMS["w"]}, **SETTINGS)
    present = np.flatnonzero(np.isin(twin.schedule.rows(EXAMPLES), batch))
    assert 20 < len(present) < 50
    total = twin.updates(present, 1.0)
    np.testing.assert_allclose(noised["w"], plain["w"] - total["w"], atol=1e-6)
    np.testing.assert_allclose(noised["b"][0], plain["b"][0] - total["b/0"], atol=1e-6)
    assert not np.asarray(state.canaries["w"]).any()
    np.testing.assert_allclose(state.others["w"], -0.1)
    np.testing.assert_array_equal(state.model_delta["w"], -noised["w"])


@pytest.mark.full
def test_a_watched_strategy_tells_the_audit_its_batches():
    """The record is that of batches which are passed by hand, and the batches are those of the strategy itself."""

    def run(watched):
        privatizer, params = gaussian(), jax.tree.map(jnp.asarray, PARAMS)
        state, update = privatizer.init(params), jax.jit(privatizer.update)
        strategy = privatizer.watched(POISSON) if watched else POISSON
        seen = []
        for indices in itertools.islice(strategy.batch_iterator(EXAMPLES, rng=1), 3):
            state = privatizer.next_step(state, *([] if watched else [indices]))
            seen.append(indices)
            _, state = update(params, state)
        privatizer.record(state)
        assert privatizer.audit.last_round == 3
        return seen, privatizer.audit.core.log_digest

    (batches, digest), (expected, by_hand) = run(True), run(False)
    for one, other in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert digest == by_hand


def test_a_watched_strategy_keeps_its_attributes_and_refuses_what_it_cannot_follow():
    privatizer, params = gaussian(), jax.tree.map(jnp.asarray, PARAMS)
    watched, state = privatizer.watched(POISSON), privatizer.init(params)
    assert (watched.sampling_prob, watched.iterations) == (POISSON.sampling_prob, POISSON.iterations)
    with pytest.raises(ValueError, match=r"must have the num_examples of audited\(\), 600, got 599"):
        next(watched.batch_iterator(599))
    batches = watched.batch_iterator(EXAMPLES, rng=1)
    next(batches)
    skipped_to = next(batches)
    with pytest.raises(ValueError, match="gave 2 batches since the last step: call next_step for each, or pass"):
        privatizer.next_step(state)
    _, state = privatizer.update(params, privatizer.next_step(state, skipped_to))
    with pytest.raises(TypeError, match=r"take batches from privatizer\.watched\(strategy\), or pass them"):
        privatizer.next_step(state)
    with pytest.raises(TypeError, match=r"takes a strategy of jax_privacy\.batch_selection that selects examples"):
        privatizer.watched([1, 2])
    coins = gaussian(num_examples=None, sampling_probability=0.2, dp_event=None)
    with pytest.raises(ValueError, match=r"needs audited\(…, num_examples=\)"):
        next(coins.watched(POISSON).batch_iterator(EXAMPLES))


def test_rounds_are_measured_beside_the_next_step_unless_somebody_waits_for_an_alarm():
    assert gaussian().audit.core.deferred
    assert not gaussian(on_violation="warn").audit.core.deferred


def test_a_checkpoint_is_resumed_if_its_step_was_recorded(tmp_path):
    """Killed after `record`: the round is on the disk, and the run goes on from the state."""
    params, batches = jax.tree.map(jnp.asarray, PARAMS), list(POISSON.batch_iterator(EXAMPLES, rng=1))[:3]
    privatizer = gaussian(directory=tmp_path / "run", seed=b"a secret of mine")
    state = privatizer.init(params)
    for batch in batches[:2]:
        _, state = privatizer.update(params, privatizer.next_step(state, batch))
    privatizer.record(state)
    privatizer.audit.directory.close()  # as a killed process leaves it
    again = gaussian(directory=tmp_path / "run", seed=b"a secret of mine")
    _, state = again.update(params, again.next_step(state, batches[2]))
    again.record(state)
    assert [entry.number for entry in again.audit.log.rounds()] == [1, 2, 3]


def test_an_example_twice_in_a_batch_counts_twice():
    privatizer, params = gaussian(), jax.tree.map(jnp.asarray, PARAMS)
    row = int(privatizer.audit.core.schedule.rows(EXAMPLES)[3])
    once = privatizer.next_step(privatizer.init(params), [row]).canaries["w"]
    twice = privatizer.next_step(privatizer.init(params), [row, row, -1]).canaries["w"]
    np.testing.assert_allclose(twice, 2 * once, atol=1e-7)


@pytest.mark.full
def test_the_privatizer_works_in_a_chain_and_with_donated_state():
    privatizer, params = gaussian(), jax.tree.map(jnp.asarray, PARAMS)
    chain = optax.chain(privatizer, optax.sgd(0.1))
    own, *rest = chain.init(params)
    step = jax.jit(lambda grads, state: chain.update(grads, state), donate_argnums=1)
    for number in range(3):
        state = (privatizer.next_step(own, np.arange(number, EXAMPLES, 7)), *rest)
        _, (own, *rest) = step(params, state)
    privatizer.next_step(own, [])
    assert privatizer.audit.last_round == 3


def test_a_given_audit_can_be_used():
    own = Audit.for_model(named_leaves(PARAMS), deferred=True, **SETTINGS)
    privatizer = gaussian(audit=own, canaries=None, seed=None, delta=None)
    params = jax.tree.map(jnp.asarray, PARAMS)
    state, update = privatizer.init(params), jax.jit(privatizer.update)
    for batch in ([1, 2, 3], [4, 5]):
        _, state = update(params, privatizer.next_step(state, batch))
    privatizer.next_step(state, [])
    assert privatizer.audit.core is own
    assert [entry.participants for entry in own.log.rounds()] == [3, 2]
    none = {"canaries": None, "seed": None, "delta": None}
    for wrong in (Audit(3_100, **SETTINGS), Audit.for_model({"w": PARAMS["w"]}, **SETTINGS)):
        with pytest.raises(ValueError, match=r"must be made by Audit\.for_model\(named_leaves\(params\), …\)"):
            gaussian(audit=wrong, **none)
    banded = Audit.for_model(named_leaves(PARAMS), noise=BandedNoise(rounds=9, coefficients=(1.0, 0.5)), **SETTINGS)
    with pytest.raises(ValueError, match="must be made with noise=None, like the privatizer's"):
        gaussian(audit=banded, **none)


@pytest.mark.full
def test_a_sampling_probability_can_replace_batches():
    claim = Claim.mechanism(float(mechanism_epsilon(1.0, delta=1e-5, participations=12)), participations=12)
    privatizer = gaussian(num_examples=None, sampling_probability=0.2, dp_event=None, canaries=300, claim=claim)
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


@pytest.mark.full
def test_a_resumed_run_records_the_same_as_an_uninterrupted_one(tmp_path):
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
            # The checkpoint after the second step is written when that step is recorded.
            state, first = kept, 2
        for batch in batches[first:]:
            _, state = update(params, privatizer.next_step(state, batch))
        privatizer.next_step(state, [])
        privatizer.audit.close()
        return comparable(tmp_path / directory / "audit" / "rounds.log")

    assert run("whole", stop=False) == run("resumed", stop=True)


def test_steps_that_the_audit_missed_are_rejected():
    privatizer, params = gaussian(), jax.tree.map(jnp.asarray, PARAMS)
    state = privatizer.init(params)
    _, unseen = privatizer.update(params, state)
    with pytest.raises(ValueError, match="comes from step 1, and the audit has recorded 0 steps: call next_step"):
        privatizer.next_step(unseen, [1])
    _, once = privatizer.update(params, privatizer.next_step(state, [1]))
    _, twice = privatizer.update(params, once)
    with pytest.raises(ValueError, match="comes from step 2, and the audit waits for step 1"):
        privatizer.next_step(twice, [1])
    with pytest.raises(ValueError, match="a state that jax traces: call it outside of jit"):
        jax.jit(lambda given: privatizer.next_step(given, [1]))(once)
    with pytest.raises(TypeError, match="needs the indices of the batch: take batches"):
        privatizer.next_step(once)
    with pytest.raises(TypeError, match=r"finish needs the state after the last step"):
        privatizer.audit.finish()
    with pytest.raises(ValueError, match=r"indices must lie in 0\.\.599, got 600"):
        privatizer.next_step(once, [600])


def test_invalid_arguments_are_rejected():
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
