"""Coverage of the known-others interval over many honest runs of jax_privacy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from requires import require

require("jax_privacy")
from jax_privacy import noise_addition  # noqa: E402

from coalmine import mechanism_epsilon  # noqa: E402
from coalmine.integrations.jax_privacy import audited  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning"),
]
RUNS, STEPS, EXAMPLES, DELTA = 200, 8, 160, 1e-5
PARAMS = {"w": np.zeros((30, 25), np.float32), "b": np.zeros(50, np.float32)}


def test_known_others_interval_covers_the_mechanisms_epsilon():
    """200 runs of DP-SGD with 800 parameters and 80 canaries. The joint region of mean and spread covers at least 95 %."""
    params, covered = jax.tree.map(jnp.asarray, PARAMS), 0
    for run in range(RUNS):
        inner = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(run))
        settings = {"canaries": 80, "seed": run, "delta": DELTA, "num_examples": EXAMPLES}
        privatizer = audited(inner, params, stddev=1.0, clip_norm=1.0, **settings)
        rng, state = np.random.default_rng(run), privatizer.init(params)
        for _ in range(STEPS):
            picked = np.flatnonzero(rng.random(EXAMPLES) < 0.5)
            grads = jax.tree.map(lambda leaf, rng=rng: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), PARAMS)
            _, state = privatizer.update(grads, privatizer.next_step(state, picked))
        rung = privatizer.audit.finish(noise_state=state)["known-others"]
        exact = mechanism_epsilon(1.0, delta=DELTA, participations=rung.headline.presentations)
        covered += rung.interval[0] <= exact <= rung.interval[1]
    print(f"the interval covers in {covered} of {RUNS} runs")
    assert covered >= RUNS * 0.95 - 2 * np.sqrt(RUNS * 0.95 * 0.05)
