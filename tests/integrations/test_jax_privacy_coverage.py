"""Coverage of the known-others interval over many honest runs of jax_privacy."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from requires import require

require("jax_privacy")
from jax_privacy import noise_addition  # noqa: E402
from jax_privacy.matrix_factorization import toeplitz  # noqa: E402
from jax_training import BANDS  # noqa: E402

from coalmine import mechanism_epsilon  # noqa: E402
from coalmine.integrations.jax_privacy import audited  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning"),
]
RUNS, STEPS, EXAMPLES, DELTA = 200, 8, 160, 1e-5
PARAMS = {"w": np.zeros((30, 25), np.float32), "b": np.zeros(50, np.float32)}


@pytest.mark.parametrize(("bands", "noise"), [(1, 1.0), (3, 2.0)], ids=["DP-SGD", "BandMF"])
def test_known_others_interval_covers_the_mechanisms_epsilon(bands, noise):
    """200 runs of 800 parameters and 80 canaries. An example is in every bands-th step by a coin of its own, so ‖Cu‖² is
    the number of its steps, where columns are normalised. The joint region of mean and spread covers at least 95 %."""
    params, covered = jax.tree.map(jnp.asarray, PARAMS), 0
    for run in range(RUNS):
        if bands == 1:
            inner, correlated = noise_addition.gaussian_privatizer(stddev=noise, prng_key=jax.random.key(run)), {}
        else:
            matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(BANDS), STEPS)
            inner = noise_addition.matrix_factorization_privatizer(
                stddev=noise, noising_matrix=matrix, prng_key=jax.random.key(run)
            )
            correlated = {"noising_matrix": matrix, "steps": STEPS}
        settings = {"canaries": 80, "seed": run, "delta": DELTA, "num_examples": EXAMPLES}
        privatizer = audited(inner, params, stddev=noise, clip_norm=1.0, **correlated, **settings)
        rng, state = np.random.default_rng(run), privatizer.init(params)
        group = rng.integers(bands, size=EXAMPLES)
        for number in range(STEPS):
            picked = np.flatnonzero((group == number % bands) & (rng.random(EXAMPLES) < 0.5))
            grads = jax.tree.map(lambda leaf, rng=rng: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), PARAMS)
            _, state = privatizer.update(grads, privatizer.next_step(state, picked))
        rung = privatizer.audit.finish(noise_state=state)["known-others"]
        exact = mechanism_epsilon(noise, delta=DELTA, participations=rung.headline.presentations)
        covered += rung.interval[0] <= exact <= rung.interval[1]
    print(f"the interval covers in {covered} of {RUNS} runs")
    assert covered >= RUNS * 0.95 - 2 * np.sqrt(RUNS * 0.95 * 0.05)
