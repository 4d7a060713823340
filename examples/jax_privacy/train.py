"""DP-SGD or BandMF (DP-FTRL) on handwritten digits with jax_privacy."""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig
from sklearn.datasets import load_digits

from coalmine.integrations.jax_privacy import audited, known_steps_claim

DELTA, EXPECTED_BATCH = 1e-5, 150


def loss(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of a network with one hidden layer."""
    hidden = jax.nn.relu(images @ params["hidden"] + params["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], labels).mean()


def main(steps: int, bands: int, noise_multiplier: float, out: Path) -> None:
    """Train, print the audit's result, and save the model."""
    digits = load_digits()
    images, labels = (digits.data[:1500] / 16).astype(np.float32), digits.target[:1500]
    keys = jax.random.split(jax.random.key(1), 2)
    params = {
        "hidden": 0.1 * jax.random.normal(keys[0], (64, 128)),
        "bias": jnp.zeros(128),
        "out": 0.1 * jax.random.normal(keys[1], (128, 10)),
    }
    strategy = np.cumprod([1.0, *(1 - 0.5 / np.arange(1, bands))])  # the square root of the matrix of prefix sums
    config = BandMFExecutionPlanConfig(
        strategy=strategy / np.linalg.norm(strategy),
        iterations=steps,
        epsilon=None,
        delta=None,
        noise_multiplier=noise_multiplier,
        sampling_prob=EXPECTED_BATCH * bands / len(images),
        noise_seed=2,
    )
    plan = config.plan
    settings = {"claim": known_steps_claim(plan, DELTA) if bands > 1 else None, "directory": out}
    plan = audited(plan, params, num_examples=len(images), seed_file="canary-seed", delta=DELTA, **settings)
    privatizer, optimizer = plan.noise_addition_transform, optax.sgd(0.5 / EXPECTED_BATCH)
    gradient = plan.clipped_grad(loss, batch_argnums=(1, 2), microbatch_size=50)

    @jax.jit
    def step(params, noise_state, optimizer_state, images, labels, padding):
        clipped = gradient(params, images, labels, is_padding_example=padding)
        noised, noise_state = privatizer.update(clipped, noise_state)
        updates, optimizer_state = optimizer.update(noised, optimizer_state)
        return optax.apply_updates(params, updates), noise_state, optimizer_state

    noise_state, optimizer_state = privatizer.init(params), optimizer.init(params)
    for indices in plan.batch_selection_strategy.batch_iterator(len(images), rng=3):
        noise_state = privatizer.next_step(noise_state)
        batch = np.zeros(300, np.int64)  # one compiled step for batches of any size
        batch[: len(indices)] = indices
        padding = np.arange(300) >= len(indices)
        params, noise_state, optimizer_state = step(
            params, noise_state, optimizer_state, images[batch], labels[batch], padding
        )
    print(privatizer.audit.finish(noise_state=noise_state, params=params, task="digits"))
    test_images = (digits.data[1500:] / 16).astype(np.float32)
    scores = jax.nn.relu(test_images @ params["hidden"] + params["bias"]) @ params["out"]
    print(f"accuracy {(scores.argmax(axis=1) == digits.target[1500:]).mean():.1%}")
    out.mkdir(parents=True, exist_ok=True)
    np.savez(out / "digits.npz", **params)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bands", type=int, default=1, help="1 is DP-SGD, more is BandMF")
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("runs/jax_privacy"))
    options = parser.parse_args()
    main(options.steps, options.bands, options.noise_multiplier, options.out)
