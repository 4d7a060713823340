"""Faults that no single kind of call reveals: all calls are compared with each other."""

import zlib

import numpy as np
import pytest

from coalmine import mechanism_noise
from coalmine.testing import check_private

EPSILON, DELTA, DIM = 3.0, 1e-5, 2_000
STD = mechanism_noise(EPSILON, delta=DELTA)


def norms(updates):
    return np.linalg.norm(updates, axis=1, keepdims=True)


def clipped(updates):
    return updates / np.maximum(norms(updates), 1.0)


class Reused:
    """Noise that is reused for several calls, possibly with changing sign."""

    def __init__(self, every, sign=1):
        self.rng, self.every, self.sign, self.calls = np.random.default_rng(11), every, sign, 0

    def __call__(self, updates):
        if self.calls % self.every == 0:
            self.noise = STD * self.rng.normal(size=updates.shape[1])
        else:
            self.noise = self.sign * self.noise
        self.calls += 1
        return clipped(updates).sum(axis=0) + self.noise


@pytest.mark.parametrize(
    "release", [Reused(2), Reused(5), Reused(8), Reused(2, sign=-1)], ids=["2", "5", "8", "antithetic"]
)
def test_noise_reused_in_the_next_calls_fails(release):
    result = check_private(release, epsilon=EPSILON, delta=DELTA, dim=DIM)
    assert result.verdict.outcome == "VIOLATION"
    assert {"repeat", "difference", "repeat of any"} & {
        result.verdict.facts.get("gauge"),
        *(name.removeprefix("the ").removesuffix(" gauge") for name in result.verdict.evidence),
    }
    assert "is repeated" in result.trainer.check.likely_fault


RNG = np.random.default_rng(12)


def fresh(size):
    return STD * RNG.normal(size=size)


FAULTS = {
    "scaled by the largest norm": (lambda u: (u * min(1, 1 / norms(u).max())).sum(0) + fresh(DIM), "row"),
    "clipped from 2 on": (lambda u: np.where(norms(u) > 2, u / norms(u), u).sum(0) + fresh(DIM), "mean"),
    "clipped from 9.9 on": (lambda u: np.where(norms(u) > 9.9, u / norms(u), u).sum(0) + fresh(DIM), "mean"),
    "noise by the largest norm": (
        lambda u: clipped(u).sum(0) + norms(clipped(u)).max() * fresh(DIM),
        "noise follows data",
    ),
    "clipped only if most are long": (lambda u: (clipped(u) if norms(u).mean() > 1 else u).sum(0) + fresh(DIM), "mean"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_updates_of_several_lengths_reveal_faults(name):
    release, code = FAULTS[name]
    result = check_private(release, epsilon=EPSILON, delta=DELTA, dim=DIM)
    assert result.verdict.outcome != "PASS"
    assert result.verdict.code in (code, "bound", "round")
    assert result.trainer.check.likely_fault


def test_noise_seeded_by_the_updates_fails_even_with_few_clients():
    std = mechanism_noise(20.0, delta=DELTA)

    def release(updates):
        rng = np.random.default_rng(zlib.crc32(updates.tobytes()))
        return clipped(updates).sum(axis=0) + std * rng.normal(size=updates.shape[1])

    result = check_private(release, epsilon=20.0, delta=DELTA, dim=DIM, clients=5)
    assert (result.verdict.outcome, result.verdict.finding.gauge) == ("VIOLATION", "repeat")


def test_noise_in_half_of_the_dimensions_fails():
    basis = np.linalg.qr(np.random.default_rng(13).normal(size=(1_000, 500)))[0]
    rng = np.random.default_rng(14)

    def release(updates):
        return clipped(updates).sum(axis=0) + basis @ (np.sqrt(2) * STD * rng.normal(size=500))

    assert check_private(release, epsilon=EPSILON, delta=DELTA, dim=1_000).verdict.outcome != "PASS"


@pytest.mark.parametrize("seed", range(6))
def test_a_release_in_whole_numbers_passes(seed):
    rng, dim = np.random.default_rng(seed), 5_000

    def release(updates):
        return np.rint(clipped(updates).sum(axis=0) + STD * rng.normal(size=dim))

    assert check_private(release, epsilon=EPSILON, delta=DELTA, dim=dim, seed=seed).verdict.outcome == "PASS"


def endless(_):
    found = []
    found.append(found)
    return found


class Broken:
    def __array__(self, *_, **__):
        raise OverflowError("too large")


@pytest.mark.parametrize(
    ("release", "settings", "said"),
    [
        (endless, {}, "nested too deeply"),
        (lambda _: Broken(), {}, "release must return an array of real numbers"),
        (np.sum, {"adjacency": np.zeros(3)}, "adjacency must be"),
        (np.sum, {"aggregate": np.zeros(3)}, "aggregate must be"),
        (np.sum, {"updates": np.zeros(3)}, "updates must be"),
        (np.sum, {"progress": 3}, "progress must be a function"),
        (np.sum, {"epsilon": float("nan")}, "epsilon must be finite"),
        (np.sum, {"epsilon": -1.0}, "epsilon must be above 0"),
        (np.sum, {"dim": 10**12}, "clients times dim must be at most"),
        (np.sum, {"dim": None, "shapes": [(10.7, 50)]}, "shapes must list the shape of each layer"),
        (np.sum, {"like": np.zeros(3, bool)}, "like must hold floating-point numbers"),
    ],
)
def test_bad_input_is_one_line(release, settings, said):
    with pytest.raises((ValueError, TypeError), match=said) as error:
        check_private(release, **({"epsilon": EPSILON, "delta": DELTA, "dim": DIM} | settings))
    assert "\n" not in str(error.value)


class AdaptiveClip:
    """The clip norm follows the median of the norms, and the noise follows the clip norm, or only as far as 1."""

    def __init__(self, *, seed, follows=True):
        self.rng, self.norm, self.follows = np.random.default_rng(seed), 0.1, follows

    def __call__(self, updates):
        noise = STD * self.rng.normal(size=updates.shape[1]) * (self.norm if self.follows else min(self.norm, 1.0))
        released = (updates / np.maximum(norms(updates) / self.norm, 1.0)).sum(axis=0) + noise
        self.norm *= np.exp(0.2 * (np.mean(norms(updates) > self.norm) - 0.5))
        return released


@pytest.mark.parametrize("seed", range(3))
def test_an_adaptive_clip_norm_passes_if_its_noise_follows_it(seed):
    """The clip norm, and the noise, differ by a factor of ten and more between the calls of one check."""
    honest = check_private(AdaptiveClip(seed=seed), epsilon=EPSILON, delta=DELTA, dim=DIM)
    assert (honest.verdict.outcome, honest.notes) == ("PASS", ())
    capped = AdaptiveClip(seed=seed, follows=False)
    assert check_private(capped, epsilon=EPSILON, delta=DELTA, dim=DIM).verdict.outcome == "VIOLATION"
