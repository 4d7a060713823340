"""Canaries on a CUDA device; benchmarks/canaries_cuda.py checks more dims and measures the time."""

import numpy as np
import pytest
import torch

from coalmine.canaries import RotatedCanaries, SphereCanaries

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KINDS = pytest.mark.parametrize("kind", [RotatedCanaries, SphereCanaries])


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [2, 9, 33, 1009, 8000, 70_001])
def test_canaries_equal_those_on_the_cpu(kind, dim, dtype):
    canaries = kind(min(dim, 50), dim, seed=1)
    vector = torch.randn(dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    cosines = canaries.cosines(vector.cuda())
    assert cosines.is_cuda
    assert cosines.dtype == torch.float64
    expected = canaries.cosines(vector.double())
    assert (cosines.cpu() - expected).norm() <= 1e-6 * expected.norm()
    total = canaries.combine([0, 1], like=vector.cuda())
    assert total.is_cuda
    assert total.dtype == dtype
    exact = torch.from_numpy(canaries.combine([0, 1]))
    rounding = 1e-6 if dtype != torch.bfloat16 else 2 * torch.finfo(dtype).eps
    assert (total.cpu().double() - exact).norm() <= rounding * exact.norm()


def test_calls_do_not_overwrite_each_other():
    """Cosines of earlier calls do not change, although every call replays the same CUDA graph."""
    canaries = RotatedCanaries(50, 10_000, seed=1)
    vectors = [torch.randn(10_000, device="cuda") for _ in range(3)]
    together = [canaries.cosines(vector) for vector in vectors]
    for vector, cosines in zip(vectors, together, strict=True):
        np.testing.assert_allclose(cosines.cpu(), canaries.cosines(vector.double().cpu()), atol=1e-6)


@KINDS
@pytest.mark.parametrize(("value", "message"), [(np.nan, "must be finite"), (np.inf, "must be finite"), (0, "zero")])
def test_zero_and_non_finite_vectors_are_rejected(kind, value, message):
    vector = torch.zeros(1000, device="cuda")
    vector[3] = value
    with pytest.raises(ValueError, match=message):
        kind(5, 1000, seed=0).cosines(vector)
