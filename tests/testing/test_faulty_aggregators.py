"""Faulty aggregation functions fail, and the message names the fault."""

import numpy as np
import pytest
from aggregators import DELTA, clip, multiplier, noised_mean, noised_sum, with_noise

from coalmine.testing import assert_private

CLAIM = {"epsilon": 3.0, "delta": DELTA, "dim": 2_000}


def by_layer(updates):
    return np.concatenate([clip(part) for part in np.split(updates, 4, axis=1)], axis=1)


def clipped_mean(updates):
    noise = np.random.default_rng().standard_normal(updates.shape[1])
    return clip(updates.mean(axis=0)[None])[0] + multiplier() / len(updates) * noise


def noise_before_clip(seed):
    rng = np.random.default_rng(seed)
    return lambda updates: clip(updates + multiplier() * rng.standard_normal(updates.shape)).sum(axis=0)


def noise_by_norms(seed):
    rng = np.random.default_rng(seed)

    def release(updates):
        size = np.minimum(np.linalg.norm(updates, axis=1), 1.0).mean()
        return clip(updates).sum(axis=0) + multiplier() * size * rng.standard_normal(updates.shape[1])

    return release


FAULTS = {
    "no clip": (noised_sum(1, clipped=lambda updates: updates), "updates are not clipped"),
    "clip of the mean": (clipped_mean, "does not bound each client's update"),
    "clip by coordinate": (noised_sum(1, clipped=lambda u: np.clip(u, -1, 1)), "does not bound each client's update"),
    "clip by layer": (noised_sum(1, clipped=by_layer), "does not bound each client's update"),
    "noise over 2": (noised_sum(1, factor=0.5), "half of it is missing"),
    "noise over n": (noised_mean(1, factor=0.01), "divided by the number of clients twice"),
    "no noise": (noised_sum(1, factor=0.0), "there is no noise"),
    "fixed seed": (lambda updates: noised_sum(5)(updates), "is repeated in another"),
    "Laplace": (with_noise(1, lambda rng, size: rng.laplace(size=size) / np.sqrt(2)), "heavier tails"),
    "uniform": (with_noise(1, lambda rng, size: rng.uniform(-1, 1, size) * np.sqrt(3)), "lighter tails"),
    "half the coordinates": (
        with_noise(1, lambda rng, size: rng.standard_normal(size) * (np.arange(size) < size // 2)),
        "some coordinates have no noise",
    ),
    "coarse grid": (with_noise(1, lambda rng, size: np.round(rng.standard_normal(size) * 2) / 2), "takes few values"),
    "pairs": (with_noise(1, lambda rng, size: np.repeat(rng.standard_normal(size // 2), 2)), "random number"),
    "noise before the clip": (noise_before_clip(1), "added to an update before the clip"),
    "noise by norms": (noise_by_norms(1), "the noise depends on the updates"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_aggregator_fails_and_its_fault_is_named(name):
    release, fault = FAULTS[name]
    with pytest.raises(AssertionError) as failed:
        assert_private(release, **CLAIM)
    text = str(failed.value)
    assert "VIOLATION" in text or "UNDERPOWERED" in text
    assert "measured epsilon: " in text
    assert fault in text.split("likely fault: ")[1].split("\n")[0]
