"""An Opacus optimizer under test: its clip and noise, in every mode that clips per-example gradients."""

import numpy as np
import pytest
from requires import require

require("opacus")
import torch  # noqa: E402
from opacus import PrivacyEngine  # noqa: E402
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer  # noqa: E402

from coalmine import mechanism_noise  # noqa: E402
from coalmine.testing import assert_private, check_private  # noqa: E402
from coalmine.testing.opacus import optimizer_release  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")
NOISE = float(mechanism_noise(3.0, delta=1e-5))
CLAIM = {"epsilon": 3.0, "delta": 1e-5, "aggregate": "sum"}


@pytest.fixture(autouse=True)
def _fixed_noise():
    torch.manual_seed(0)


def network():
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.ReLU(), torch.nn.Linear(60, 10))


def make(kind=DPOptimizer, *, noise=NOISE, norm=1.0, **settings):
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    return kind(optimizer, noise_multiplier=noise, max_grad_norm=norm, expected_batch_size=64, **settings)


def adaptive(**settings):
    bounds = {"max_clipbound": 10.0, "min_clipbound": 0.1, "clipbound_learning_rate": 0.2}
    return make(AdaClipDPOptimizer, target_unclipped_quantile=0.5, unclipped_num_std=5.0, **bounds, **settings)


def per_layer(**settings):
    sizes = [p.numel() for p in network().parameters()]
    return make(DPPerLayerOptimizer, norm=[np.sqrt(size / sum(sizes)) for size in sizes], **settings)


def dim_of(optimizer):
    return sum(p.numel() for p in optimizer.params)


@pytest.mark.parametrize("maker", [make, adaptive, per_layer])
def test_an_honest_optimizer_passes_and_half_its_noise_fails(maker):
    optimizer = maker()
    assert_private(optimizer_release(optimizer), dim=dim_of(optimizer), **CLAIM)
    optimizer.noise_multiplier /= 2
    with pytest.raises(AssertionError, match="half of it is missing"):
        assert_private(optimizer_release(optimizer), dim=dim_of(optimizer), **CLAIM)


def test_an_optimizer_that_does_not_clip_fails():
    optimizer = make()

    def sum_only():
        for p in optimizer.params:
            p.summed_grad = p.grad_sample.sum(0)

    optimizer.clip_and_accumulate = sum_only
    with pytest.raises(AssertionError, match="updates are not clipped"):
        assert_private(optimizer_release(optimizer), dim=dim_of(optimizer), **CLAIM)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_release_without_noise_is_the_sum_of_the_clipped_gradients(reduction):
    """Oracle: numpy, for every divisor of the optimizer."""
    optimizer = make(noise=0.0, norm=2.0, loss_reduction=reduction)
    rows = np.random.default_rng(1).normal(size=(5, dim_of(optimizer)))
    rows[0] *= 1.0 / np.linalg.norm(rows[0])  # at most the clip norm, so it is not clipped
    clipped = rows * np.minimum(1.0, 2.0 / np.linalg.norm(rows, axis=1))[:, None]
    np.testing.assert_allclose(optimizer_release(optimizer)(rows), clipped.sum(axis=0), atol=1e-5)


def test_the_optimizer_of_make_private_is_not_modified():
    """Neither parameters, gradients, clip norm nor the accountant's history change."""
    model, data = network(), torch.utils.data.TensorDataset(torch.randn(64, 40), torch.zeros(64, dtype=torch.long))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16),
        noise_multiplier=NOISE,
        max_grad_norm=1.0,
    )
    inputs, labels = next(iter(loader))
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    before = [(p.detach().clone(), p.grad.clone(), p.grad_sample.clone()) for p in optimizer.params]
    hook = optimizer.step_hook
    optimizer_release(optimizer)(np.eye(3, dim_of(optimizer)))
    for p, (value, gradient, samples) in zip(optimizer.params, before, strict=True):
        assert torch.equal(p, value)
        assert torch.equal(p.grad, gradient)
        assert torch.equal(p.grad_sample, samples)
        assert p.summed_grad is None
    assert optimizer.step_hook is hook
    assert engine.accountant.history == []
    optimizer.step()  # training continues
    assert engine.accountant.history[0][2] == 1


def test_an_adaptive_clip_starts_every_call_from_the_same_norm():
    optimizer = adaptive()
    release, row = optimizer_release(optimizer), 10 * np.eye(1, dim_of(optimizer))
    for _ in range(3):
        release(row)
    assert optimizer.max_grad_norm == 1.0
    assert (optimizer.sample_size, optimizer.unclipped_num) == (0, 0)


def test_unsupported_optimizers_are_rejected_with_a_remedy():
    with pytest.raises(TypeError, match="optimizer must be the one that make_private returned"):
        optimizer_release(torch.optim.SGD(network().parameters(), 0.1))
    with pytest.raises(ValueError, match='grad_sample_mode="hooks"'):
        optimizer_release(make(DPOptimizerFastGradientClipping))
    with pytest.raises(ValueError, match="leaves 76% of a canary's length"):
        optimizer_release(make(DPPerLayerOptimizer, norm=[0.5] * 4))
    with pytest.raises(ValueError, match="pass dim=3070"):
        check_private(optimizer_release(make()), dim=2_000, **CLAIM)
    with pytest.raises(ValueError, match="pass clip_norm=20"):
        check_private(optimizer_release(make(norm=20.0)), dim=3_070, **CLAIM)
    optimizer = make()
    optimizer.signal_skip_step()
    with pytest.raises(ValueError, match="outside of BatchMemoryManager"):
        optimizer_release(optimizer)(np.eye(2, 3_070))
