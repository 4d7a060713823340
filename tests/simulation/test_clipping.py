import math

import numpy as np
import pytest
import torch

from coalmine import mechanism_epsilon
from coalmine.simulation.clipping import AdaptiveClipping, FixedClipping, clip_factors


def test_clip_shrinks_long_vectors_and_keeps_short_ones():
    vectors = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [0.6, 0.8]])
    clipped = vectors * clip_factors(torch.linalg.vector_norm(vectors, dim=1), 1.0)[:, None]
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.6, 0.8]]))


@pytest.mark.parametrize("quantile", [0.3, 0.5])
def test_an_adaptive_clip_converges_to_the_quantile(quantile):
    """100 log-normal norms per round: after the first rounds the clip norm stays near their quantile."""
    norms = np.exp(np.random.default_rng(0).normal(1.0, 0.5, (200, 100)))
    clipping = AdaptiveClipping(0.1, 1.0, quantile=quantile, count_noise=5.0)
    clip_norm, seen = clipping.clip_norm, []
    for number, row in enumerate(norms):
        generator = torch.Generator().manual_seed(number)
        clip_norm = clipping.next_norm(clip_norm, int((row <= clip_norm).sum()), len(row), generator)
        seen.append(clip_norm)
    # A round's share has std 0.05; the geometric step averages it, so 100 rounds determine the norm to about 2 %.
    assert np.mean(np.log(seen[100:])) == pytest.approx(np.log(np.quantile(norms, quantile)), abs=0.06)


def test_one_step_of_the_adaptive_clip_is_geometric():
    clipping = AdaptiveClipping(2.0, 0.0, quantile=0.5, rate=0.2, count_noise=1.0)
    step = clipping.next_norm(2.0, 30, 40, torch.Generator())  # without noise: share 0.75
    assert step == pytest.approx(2.0 * math.exp(-0.2 * 0.25))


@pytest.mark.parametrize(("noise", "count_noise"), [(1.0, 2.5), (0.16, 1.7), (4.0, 2.01)])
def test_update_and_count_noise_compose_to_the_noise_multiplier(noise, count_noise):
    """Two Gaussian mechanisms with shifts 1/z_Δ and 1/(2σ_b) compose into one with the root of the sum of squares."""
    clipping = AdaptiveClipping(1.0, noise, count_noise=count_noise)
    shift = math.hypot(1 / clipping.update_noise_multiplier, 1 / clipping.count_noise_multiplier)
    assert mechanism_epsilon(1 / shift, delta=1e-6) == pytest.approx(mechanism_epsilon(noise, delta=1e-6), rel=1e-12)
    assert clipping.update_noise_multiplier > noise


def test_the_count_is_noised_with_its_std():
    clipping = AdaptiveClipping(1.0, 1.0, rate=1.0, count_noise=3.0)
    steps = [clipping.next_norm(1.0, 50, 100, torch.Generator().manual_seed(number)) for number in range(2000)]
    noise = -100 * np.log(steps)  # share minus quantile is the noise
    assert noise.std() == pytest.approx(3.0, rel=4 / math.sqrt(2 * 2000))
    assert abs(noise.mean()) < 4 * 3.0 / math.sqrt(2000)


def test_count_noise_that_leaves_none_for_the_updates_is_rejected():
    with pytest.raises(ValueError, match=r"must be above half of the noise multiplier, 0.5, got 0.5"):
        AdaptiveClipping(1.0, 1.0, count_noise=0.5)


def test_noise_multiplier_zero_adds_no_noise():
    assert AdaptiveClipping(1.0, 0.0).update_noise_multiplier == 0
    assert FixedClipping(1.0, 0.7).update_noise_multiplier == 0.7
    assert FixedClipping(1.0, 0.7).next_norm(1.0, 3, 4, torch.Generator()) == 1.0
