"""The time that the audit adds to a DP-SGD step in jax_privacy, for a small network and one of a million parameters.

1,000 canaries. Plain and audited steps alternate, so that other load on the machine affects both equally. Processor time
is that of the calling thread, and of all threads: XLA's own, and the one that measures.
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

CASES = {  # the layers, the batch, and the share of a step that the audit may add
    "small": ([(128, 128), (128, 10)], 192, 0.30),
    "million": ([(512, 1024), (1024, 512), (512, 10)], 64, 0.05),
}
EXAMPLES = 4_096
WARM_UP = 2  # steps, which compile


def main(arguments: list[str] | None = None) -> int:
    """Print the shares next to their bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, help="steps of each kind (200 of the small network, 15 of the large)")
    given = parser.parse_args([] if arguments is None else arguments)
    missed = False
    for name in given.cases:
        missed |= measure(name, steps=given.steps or (200 if name == "small" else 15))
    return int(missed)


def measure(case: str, *, steps: int) -> bool:
    """Print the cost of one case; returns whether its bar was missed."""
    sizes, batch, bar = CASES[case]
    params = [jax.random.normal(jax.random.key(i), size) * 0.02 for i, size in enumerate(sizes)]

    def loss(params: Any, features: Any, labels: Any) -> Any:
        for weights in params[:-1]:
            features = jax.nn.relu(features @ weights)
        return optax.softmax_cross_entropy_with_integer_labels(features @ params[-1], labels).mean()

    gradient = jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), microbatch_size=8)
    plain = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(1))
    options: dict[str, Any] = {"stddev": 1.0, "clip_norm": 1.0, "num_examples": EXAMPLES, "seed": 1, "delta": 1e-5}
    watched = audited(plain, params, canaries=1_000, **options)
    optimizer, rng = optax.sgd(0.1), np.random.default_rng(0)
    features = rng.normal(size=(batch, sizes[0][0])).astype(np.float32)
    labels = jnp.zeros(batch, jnp.int32)

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
    for number in range(steps + WARM_UP):
        indices = rng.choice(EXAMPLES, batch, replace=False)
        for name, run in runs.items():
            step, (model, noise_state, state), taken = run
            start = _times()
            if name == "audited":
                noise_state = watched.next_step(noise_state, indices)
            run[1] = jax.block_until_ready(step(model, noise_state, state))
            if number >= WARM_UP:
                taken.append(_times() - start)
    (wall, own, every), audited_times = (np.median(run[2], axis=0) for run in runs.values())
    shares = audited_times / np.array([wall, own, every]) - 1
    print(
        f"{case}: a step {1e3 * wall:.2f} ms, {shares[0]:.1%} more with the audit (bar: at most {bar:.0%}); processor: its "
        f"thread {1e3 * own:.2f} ms, {shares[1]:.1%} more, of all threads {1e3 * every:.2f} ms, {shares[2]:.1%} more"
    )
    return bool(shares[0] > bar)


def _times() -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.array([time.perf_counter(), time.thread_time(), time.process_time()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
