"""jax-privacy 2.0: clipped gradients, and a privatizer that adds the noise."""

import jax
import jax.numpy as jnp
import numpy as np

from studies.field.project import Check, Project, part


def clipped_sum(noise):
    clip = part("jax_privacy", "clipped_grad")(lambda w, x: jnp.vdot(w, x), l2_clip_norm=1.0, batch_argnums=1)
    privatizer = part("jax_privacy", "noise_addition").gaussian_privatizer(stddev=noise, prng_key=jax.random.key(0))
    state = [privatizer.init(jnp.zeros(1_000))]

    def release(rows):
        released, state[0] = privatizer.update(clip(jnp.zeros(1_000), jnp.asarray(rows, jnp.float32)), state[0])
        return np.asarray(released)

    return release


PROJECT = Project(
    packages=("jax-privacy==2.0.0",),
    where="jax_privacy/noise_addition, gaussian_privatizer",
    claim="`l2_clip_norm` bounds a row of the sum, and `stddev` is the noise's (documentation of both)",
    checks=(
        Check(name="clipped_grad and gaussian_privatizer", make=clipped_sum, expected="PASS",
              why="each row is clipped, noise on the sum", options={"dim": 1_000, "aggregate": "sum"}),
    ),
)  # fmt: skip
