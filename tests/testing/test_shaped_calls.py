"""Updates of special shapes, and single clients: faults that dense canaries cannot see."""

import numpy as np
import pytest
from aggregators import DELTA, clip, multiplier, noised_sum
from scipy.stats import kstest

from coalmine.testing import check_private
from coalmine.testing.shaped_calls import LEVEL, ShapedCall, judge_shaped, shaped_patterns

DIM = 2_000
CLAIM = {"epsilon": 3.0, "delta": DELTA, "dim": DIM}


def l1(updates):
    """The L2 norm of a dense Gaussian vector, estimated from its L1 norm."""
    return np.abs(updates).sum(axis=1, keepdims=True) * np.sqrt(np.pi / 2 / updates.shape[1])


def by_norm(norm):
    return lambda updates: updates / np.maximum(1.0, norm(updates))


def part(share):
    """The norm of the first coordinates only."""
    return lambda updates: np.linalg.norm(updates[:, : int(share * updates.shape[1])], axis=1, keepdims=True)


def largest(updates):
    return np.abs(updates).max(axis=1, keepdims=True) * np.sqrt(updates.shape[1]) / 4


def all_but_the_last(updates):
    return np.hstack([clip(updates[:, :-1]), updates[:, -1:]])


def first_client_five_times(updates):
    return np.vstack([clip(updates), np.repeat(clip(updates)[:1], 4, axis=0)])


def noise_where(touched):
    """Noise on the coordinates that `touched` takes from the sum."""

    def make(seed):
        rng = np.random.default_rng(seed)

        def release(updates):
            total = clip(updates).sum(axis=0)
            return total + multiplier() * rng.normal(size=total.size) * touched(total)

        return release

    return make


def blocks(total):
    return np.repeat(np.any(total.reshape(-1, 50) != 0, axis=1), 50)


def layers(total):
    return np.repeat([np.any(total[:1_600] != 0), np.any(total[1_600:] != 0)], [1_600, 400])


def clipped_by(clipped):
    return lambda seed: noised_sum(seed, clipped=clipped)


FAULTS = {
    "noise where the sum is not 0": (noise_where(lambda total: total != 0), "where no client contributes"),
    "noise in blocks that are not 0": (noise_where(blocks), "where no client contributes"),
    "noise in layers that are not 0": (noise_where(layers), "where no client contributes"),
    "scaled L1 norm": (clipped_by(by_norm(l1)), "does not bound every shape of update"),
    "norm of the first 95 %": (clipped_by(by_norm(part(0.95))), "does not bound every shape of update"),
    "norm of the first half": (clipped_by(by_norm(part(0.5))), ""),
    "scaled largest value": (clipped_by(by_norm(largest)), ""),
    "the last coordinate": (clipped_by(all_but_the_last), ""),
    "one client five times": (clipped_by(first_client_five_times), ""),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", range(2))
def test_a_fault_that_dense_canaries_miss_is_a_violation(name, seed):
    make, fault = FAULTS[name]
    result = check_private(make(seed), **CLAIM, seed=seed)
    assert result.verdict.outcome == "VIOLATION"
    assert fault in (result.trainer.check.likely_fault or "")


@pytest.mark.parametrize("seed", range(10))
def test_a_variance_taken_for_a_standard_deviation_is_a_violation(seed):
    """Its epsilon is 3.6. Of 20 such checks, 19 must fail; these are 10 of them."""
    result = check_private(noised_sum(seed, factor=multiplier() ** -0.5), **CLAIM, seed=seed)
    assert result.verdict.outcome == "VIOLATION"


def test_a_whole_number_release_passes_although_many_coordinates_are_0():
    release = noised_sum(1)
    assert check_private(lambda updates: np.rint(release(updates)), **CLAIM).verdict.outcome == "PASS"


@pytest.mark.parametrize(("clients", "dim"), [(100, 5_000), (10, 20), (1, 20), (25, 50), (33, 99), (1, 4_096)])
def test_shaped_updates_are_orthonormal_and_leave_half_of_the_coordinates_empty(clients, dim):
    for pattern in shaped_patterns(clients, dim, 1.0):
        found = [pattern.units(b"seed", call) for call in range(6)]
        for units in found:
            np.testing.assert_allclose(units @ units.T, np.eye(clients), atol=1e-12)
            if pattern.name != "flat":
                assert np.count_nonzero(~units.any(axis=0)) >= dim // 2
        if pattern.name == "sparse":
            assert np.count_nonzero(~(found[0].any(axis=0) | found[1].any(axis=0))) < 2 * clients
        assert np.any(found[0] != pattern.units(b"another", 0))


@pytest.mark.parametrize("index", range(3))
def test_honest_shaped_calls_are_refuted_at_most_at_their_level(index):
    """400 honest patterns of three calls: mean scores follow the claim, and none is refuted at 1e-4 (p = 0.96)."""
    rng, noise, scores, refuted = np.random.default_rng(index), 1.4, [], 0
    pattern = shaped_patterns(20, 200, 1.0)[index]
    for run in range(400):
        calls = []
        for call in range(3):
            units = pattern.units(run.to_bytes(4), call)
            calls.append(ShapedCall.of(units.sum(axis=0) + noise * rng.normal(size=200), units))
        refuted += judge_shaped(calls, 1 / noise) is not None
        scores += [float(np.mean(call.along)) for call in calls]
    assert refuted <= 1
    assert kstest((np.array(scores) - 1) / (noise / np.sqrt(20)), "norm").pvalue > 1e-3
    assert LEVEL == 1e-4
