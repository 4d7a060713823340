"""Training with jax_privacy for the tests: a linear classifier of 3,100 parameters on 600 random examples."""

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from jax_privacy import batch_selection, noise_addition
from jax_privacy.experimental import accounting
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig

from coalmine.integrations.jax_privacy import audited

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


def canaries_in_step(privatizer):
    return privatizer.canaries_in_step


def train(privatizer, strategy, *, grad_fn=None, largest=160, through_clip=False, rows_of_canaries=canaries_in_step):
    """Train with an audited privatizer, and return what `finish` needs.

    With `through_clip` the canaries of `rows_of_canaries` are rows of the batch.
    """
    strategy = strategy if hasattr(strategy, "_steps") else privatizer.watched(strategy)
    grad_fn = grad_fn or jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    features, labels = data()

    @jax.jit
    def step(params, noise_state, *batch, padding):
        clipped = grad_fn(params, *batch, is_padding_example=padding)
        noised, noise_state = privatizer.update(sum_of_clipped_grads=clipped, noise_state=noise_state)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, noised), noise_state

    params = jax.tree.map(jnp.asarray, PARAMS)
    noise_state = privatizer.init(params)
    for indices in strategy.batch_iterator(EXAMPLES, rng=1):
        noise_state = privatizer.next_step(noise_state)
        rows = np.zeros(largest, np.int64)
        rows[: len(indices)] = indices
        batch, used = [features[rows], labels[rows]], len(indices)
        if through_clip:
            numbers, canaries = np.full(largest, -1), rows_of_canaries(privatizer)
            numbers[used : used + len(canaries)] = canaries
            batch, used = [*batch, numbers], used + len(canaries)
        params, noise_state = step(params, noise_state, *batch, padding=np.arange(largest) >= used)
    return {"noise_state": noise_state, "params": params}


def gaussian(stddev=1.0, **options):
    """An audited Gaussian privatizer with noise `stddev`, while 1 is stated."""
    inner = noise_addition.gaussian_privatizer(stddev=stddev, prng_key=jax.random.key(7))
    defaults = {"stddev": 1.0, "clip_norm": 1.0, "num_examples": EXAMPLES, "dp_event": EVENT, **SETTINGS}
    return audited(inner, PARAMS, **defaults | options)


def legs(result):
    return {name: leg.outcome for name, leg in result.legs.items()}


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
