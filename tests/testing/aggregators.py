"""Correct and faulty aggregation functions with a fixed seed."""

import numpy as np

from coalmine import mechanism_noise

DELTA = 1e-5


def multiplier(epsilon=3.0):
    return float(mechanism_noise(epsilon, delta=DELTA))


def clip(updates, norm=1.0):
    return updates / np.maximum(1.0, np.linalg.norm(updates, axis=-1, keepdims=True) / norm)


def noised_sum(seed, *, epsilon=3.0, factor=1.0, clipped=clip, norm=1.0):
    """A noised sum, correct at factor 1; `clipped` replaces the clip."""
    rng, std = np.random.default_rng([seed, 7]), factor * norm * multiplier(epsilon)

    def release(updates):
        kept = clip(updates, norm) if clipped is clip else clipped(updates)
        return kept.sum(axis=0) + std * rng.standard_normal(updates.shape[1])

    return release


def not_repeatable(seed, *, factor=1.0, dim=2_000):
    """A noised sum whose generator nobody can restore, so no call of it can be replayed."""
    rng, std = np.random.default_rng([seed, 7]), factor * multiplier()

    def noises():
        while True:
            yield rng.standard_normal(dim)

    draws = noises()
    return lambda updates: clip(updates).sum(axis=0) + std * next(draws)


def noised_mean(seed, *, factor=1.0):
    release = noised_sum(seed, factor=factor)
    return lambda updates: release(updates) / len(updates)


def with_noise(seed, draw):
    """A correct clip with noise of another law: `draw` takes the generator and the size."""
    rng = np.random.default_rng([seed, 8])
    return lambda updates: clip(updates).sum(axis=0) + multiplier() * draw(rng, updates.shape[1])
