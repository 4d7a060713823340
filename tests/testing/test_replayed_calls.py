"""A check calls the function again without one client: it sees what clients do to each other, and counts each exactly."""

import itertools

import numpy as np
import pytest
from aggregators import DELTA, clip, multiplier, noised_mean, noised_sum

from coalmine import mechanism_epsilon
from coalmine.testing import check_private

CLAIM = {"epsilon": 3.0, "delta": DELTA, "dim": 1_000, "clients": 40}


def checked(release, **options):
    result = check_private(release, **CLAIM | options)
    return result, next(item for item in result.audited if item.name == "rows")


def clip_of_the_sum(updates):
    return clip(updates.sum(axis=0)[None])


def one_counts_twice(updates):
    kept = clip(updates)
    kept[7] *= 2
    return kept


def centred(updates):
    return clip(updates - updates.mean(axis=0))


def at_the_mean_norm(updates):
    """A clip at the mean of all norms, and at most at the clip norm."""
    return clip(updates, min(1.0, np.linalg.norm(updates, axis=1).mean()))


RARE = [pytest.param(each, marks=pytest.mark.full) for each in (centred, at_the_mean_norm)]


@pytest.mark.parametrize("fault", [clip_of_the_sum, one_counts_twice, *RARE])
def test_a_client_that_moves_others_or_counts_twice_is_refuted_and_the_clip_alone_is_not(fault):
    """A clip of the sum with noise of its size, and one of 40 clients that counts twice: no canary's score shows them."""
    result, item = checked(noised_sum(1, clipped=fault))
    honest, other = checked(noised_sum(1))
    assert result.verdict.outcome == "VIOLATION"
    assert result.verdict.code == "row"
    assert result.trainer.check.likely_fault
    assert item.status == "failed"
    assert (honest.verdict.outcome, other.status) == ("PASS", "checked")


@pytest.mark.full
def test_the_measured_epsilon_is_that_of_the_client_that_counts_twice():
    result, _ = checked(noised_sum(1, clipped=one_counts_twice), dim=4_000)
    truth = float(mechanism_epsilon(multiplier() / 2, delta=DELTA))
    low, high = result.interval
    assert low < truth < high
    assert result.epsilon == pytest.approx(truth, rel=0.03)


def quantile(seed):
    """A clip norm that is estimated privately in each call: the noise is sized by it, and a client moves it."""
    rng = np.random.default_rng(seed)

    def release(updates):
        share = (np.linalg.norm(updates, axis=1) > 1).mean() + 0.01 * rng.standard_normal()
        norm = np.exp(0.1 * share)
        return clip(updates, norm).sum(axis=0) + norm * 1.02 * multiplier() * rng.standard_normal(updates.shape[1])

    return release


def drifting(seed):
    """An adaptive clip norm, which is kept from call to call."""
    rng, state = np.random.default_rng(seed), {"norm": 1.0}

    def release(updates):
        norm = state["norm"]
        below = (np.linalg.norm(updates, axis=1) <= norm).mean()
        state["norm"] *= np.exp(-0.05 * (below - 0.5))
        return clip(updates, norm).sum(axis=0) + norm * multiplier() * rng.standard_normal(updates.shape[1])

    return release


class Counting:
    """Noise that is seeded by a secret and the number of the call."""

    def __init__(self):
        self.numbers = itertools.count(1)
        self.call = 0

    def __call__(self, updates):
        self.call += 1
        noise = np.random.default_rng([20, self.call]).standard_normal(updates.shape[1])
        return clip(updates).sum(axis=0) + multiplier() * noise


def of_global_numpy(updates):
    return clip(updates).sum(axis=0) + multiplier() * np.random.normal(size=updates.shape[1])  # noqa: NPY002


def of_torch(updates):
    import torch

    return clip(updates).sum(axis=0) + multiplier() * torch.randn(updates.shape[1]).numpy()


def of_jax(seed):
    import jax

    key = jax.random.key(seed)

    def release(updates):
        nonlocal key
        key, own = jax.random.split(key)
        return clip(updates).sum(axis=0) + multiplier() * np.asarray(jax.random.normal(own, (updates.shape[1],)))

    return release


def weighted(seed):
    rng = np.random.default_rng(seed)

    def release(updates, weights):
        noise = 4 * multiplier() * rng.standard_normal(updates.shape[1])
        return ((clip(updates) * weights[:, None]).sum(axis=0) + noise) / weights.sum()

    return release


def strict(seed):
    """A clip that divides by the norm, as Flower's does."""
    rng = np.random.default_rng(seed)

    def release(updates):
        norms = [float(np.linalg.norm(row)) for row in updates]
        kept = [row * min(1.0, 1 / norm) for row, norm in zip(updates, norms, strict=True)]
        return np.sum(kept, axis=0) + multiplier() * rng.standard_normal(updates.shape[1])

    return release


HONEST = {
    "mean": (lambda: noised_mean(2), {}),
    "replace-one": (lambda: noised_sum(2, factor=2.0), {"adjacency": "replace-one"}),
    "one client": (lambda: noised_sum(2), {"clients": 1}),
    "no clip": (lambda: noised_sum(2, clipped=lambda updates: updates), {"scale": 1.0}),
    "layers": (lambda: by_layers(2), {"shapes": [(20, 30), (400,)], "dim": None}),
    "single precision": (lambda: single(2), {"like": np.zeros(1, np.float32)}),
    "drifting clip norm": (lambda: drifting(2), {}),
    "private quantile": (lambda: quantile(2), {}),
    "own seed for each call": (Counting, {}),
    "numpy's global generator": (lambda: of_global_numpy, {}),
    "weights": (lambda: weighted(2), {"weights": [4.0] * 10 + [1.0] * 30}),
    "division by the norm": (lambda: strict(2), {}),
}


def by_layers(seed):
    rng = np.random.default_rng(seed)

    def release(updates):
        rows = clip(np.stack([np.concatenate([part.ravel() for part in update]) for update in updates]))
        total = rows.sum(axis=0) + multiplier() * rng.standard_normal(rows.shape[1])
        return [total[:600].reshape(20, 30), total[600:]]

    return release


def single(seed):
    release = noised_sum(seed)
    return lambda updates: release(updates).astype(np.float32)


QUICK = ("private quantile", "replace-one", "division by the norm")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in HONEST]
)
def test_honest_functions_are_not_refuted(name):
    make, options = HONEST[name]
    result, item = checked(make(), **options)
    assert result.verdict.outcome != "VIOLATION"
    assert item.status == ("not checked" if name == "private quantile" else "checked")


@pytest.mark.full
@pytest.mark.parametrize("make", [lambda: of_torch, lambda: of_jax(3)])
def test_generators_of_other_libraries_are_restored(make):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    result, item = checked(make())
    assert (result.verdict.outcome, item.status) == ("PASS", "checked")


@pytest.mark.full
def test_a_little_less_noise_is_seen_too():
    """The change has no noise in it, and the noise is measured in all coordinates: 6 % less is seen in every run."""
    for seed in range(3):
        assert checked(noised_sum(seed, factor=0.94), dim=4_000)[0].verdict.outcome == "VIOLATION"
        assert checked(noised_sum(seed), dim=4_000)[0].verdict.outcome == "PASS"


def test_what_cannot_be_repeated_is_not_checked():
    def fresh(updates):
        return clip(updates).sum(axis=0) + multiplier() * np.random.default_rng().standard_normal(updates.shape[1])

    result, item = checked(fresh)
    assert (result.verdict.outcome, item.status) == ("PASS", "not checked")
    assert item.detail.startswith("the function does not repeat with the same random numbers")


def test_a_function_that_takes_no_such_updates_is_not_checked():
    def only_canaries(updates):
        if np.linalg.matrix_rank(updates) < len(updates):
            raise RuntimeError("rows are aligned")
        return release(updates)

    release = noised_sum(4)
    result, item = checked(only_canaries)
    assert (result.verdict.outcome, item.status) == ("PASS", "not checked")
    assert "RuntimeError: rows are aligned" in item.detail


def test_the_function_s_state_is_as_if_it_had_not_been_replayed():
    counting, rng = Counting(), np.random.default_rng(5)
    release = noised_sum(1)
    result, _ = checked(counting)
    assert counting.call == result.trainer.check.calls

    def noised(updates):
        return release(updates) + 0 * rng.standard_normal()

    result, _ = checked(noised)
    twin = np.random.default_rng(5)
    twin.standard_normal(result.trainer.check.calls)
    assert rng.standard_normal() == twin.standard_normal()


def test_what_a_function_refers_to_may_contain_itself_or_be_large():
    """Neither is copied; both stay as they are."""
    table = {"data": [1.0]}
    table["itself"] = table
    rng, large = np.random.default_rng(6), np.zeros(1 << 25, np.int8)

    def release(updates):
        table["calls"] = table.get("calls", 0) + 1
        return clip(updates).sum(axis=0) + (multiplier() + large[0]) * rng.standard_normal(updates.shape[1])

    result, item = checked(release)
    assert (result.verdict.outcome, item.status) == ("PASS", "checked")
    assert table["itself"] is table
