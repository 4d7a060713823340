"""The time that the audit adds to a DP-SGD step in jax_privacy: a network of one million parameters, 1,000 canaries.

Plain and audited steps alternate, so that other load on the machine affects both equally.
"""

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from jax_privacy import noise_addition

from coalmine.integrations.jax_privacy import audited

SIZES = [(512, 1024), (1024, 512), (512, 10)]
EXAMPLES = 4_096
BAR, LONG_BAR = 0.15, 0.03  # share of a step, and of one that takes ten times as long


def main(arguments: list[str] | None = None) -> int:
    """Print the shares next to their bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args(arguments)
    params = [jax.random.normal(jax.random.key(i), size) * 0.02 for i, size in enumerate(SIZES)]

    def loss(params: Any, features: Any, labels: Any) -> Any:
        for weights in params[:-1]:
            features = jax.nn.relu(features @ weights)
        return optax.softmax_cross_entropy_with_integer_labels(features @ params[-1], labels).mean()

    gradient = jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), microbatch_size=8)
    plain = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(1))
    options: dict[str, Any] = {"stddev": 1.0, "clip_norm": 1.0, "num_examples": EXAMPLES, "seed": 1, "delta": 1e-5}
    watched = audited(plain, params, canaries=1_000, **options)
    optimizer, rng = optax.sgd(0.1), np.random.default_rng(0)
    features = rng.normal(size=(given.batch, 512)).astype(np.float32)
    labels = jnp.zeros(given.batch, jnp.int32)

    def compiled(privatizer: Any) -> Any:
        @jax.jit
        def step(params: Any, noise_state: Any, state: Any) -> Any:
            noised, noise_state = privatizer.update(gradient(params, features, labels), noise_state)
            updates, state = optimizer.update(noised, state)
            return optax.apply_updates(params, updates), noise_state, state

        return step

    runs: dict[str, Any] = {
        name: [compiled(privatizer), (params, privatizer.init(params), optimizer.init(params)), []]
        for name, privatizer in (("plain", plain), ("audited", watched))
    }
    for number in range(given.steps + 2):
        indices = rng.choice(EXAMPLES, given.batch, replace=False)
        for name, run in runs.items():
            step, (model, noise_state, state), taken = run
            start = np.array([time.perf_counter(), time.process_time()])
            if name == "audited":
                noise_state = watched.next_step(noise_state, indices)
            run[1] = jax.block_until_ready(step(model, noise_state, state))
            if number >= 2:  # the first ones compile
                taken.append(np.array([time.perf_counter(), time.process_time()]) - start)
    seconds, busy = ({name: float(np.median(run[2], axis=0)[kind]) for name, run in runs.items()} for kind in (0, 1))
    added = seconds["audited"] - seconds["plain"]
    shares = {f"a step of {seconds['plain']:.2f} s": (added / seconds["plain"], BAR)}
    shares["a step ten times longer"] = (added / seconds["plain"] / 10, LONG_BAR)
    for what, (share, bar) in shares.items():
        print(f"the audit adds {1e3 * added:.0f} ms, {share:.1%} of {what} (bar: at most {bar:.0%})")
    share = busy["audited"] / busy["plain"] - 1
    print(f"processor time of a step: {busy['plain']:.2f} s, and {share:.1%} more with the audit (all cores together)")
    return int(any(share > bar for share, bar in shares.values()))


if __name__ == "__main__":
    sys.exit(main())
