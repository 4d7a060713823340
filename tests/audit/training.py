"""A plain DP-FedAvg in numpy, as a user would write it: the oracle of the audit tests."""

import numpy as np

from coalmine import Audit

SEED = b"tests only"


def train(
    *,
    dim=10_000,
    rounds=20,
    noise_multiplier=1.0,
    presentations=1,
    canaries=1_000,
    clients=100,
    clip_norm=2.0,
    signal=1.0,
    momentum=0.0,
    seed=0,
    give_others=True,
    give_noise=True,
    noise=None,
    audit=None,
    **settings,
):
    """Algorithms 2 and 3 with a drifting real signal, `signal` times as long as the noise; returns the finished audit."""
    rng = np.random.default_rng(seed)
    audit = audit or Audit(
        dim, canaries=canaries, seed=SEED + bytes([seed % 256]), delta=1e-6, rounds=rounds,
        presentations=presentations, momentum=momentum, **settings,
    )  # fmt: skip
    initial = rng.normal(size=dim)
    model, velocity = initial.copy(), np.zeros(dim)
    drift = rng.normal(size=dim)
    for t in range(1, rounds + 1):
        drift = 0.9 * drift + np.sqrt(1 - 0.9**2) * rng.normal(size=dim)  # real updates correlate between rounds
        present = audit.canaries_in_round(t)
        n = clients + len(present)
        others = signal * noise_multiplier * clip_norm * drift
        draw = rng.normal(size=dim) if noise is None else noise(t, rng, dim)
        total = others + audit.updates(present, clip_norm) + noise_multiplier * clip_norm * draw
        velocity = momentum * velocity + total / n
        model = model + 0.5 * velocity
        audit.observe_round(
            t,
            velocity if momentum else total / n,
            present=present,
            others=others / n if give_others else None,
            noise_std=noise_multiplier * clip_norm / n if give_noise else None,
        )
    audit.observe_final(model, initial=initial)
    return audit
