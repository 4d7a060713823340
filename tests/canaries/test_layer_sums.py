"""Sums over parts of a vector, in a few launches on a CUDA device, agree with those of each part alone."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from coalmine.canaries.layer_sums_triton import LayerSums
from coalmine.measure.arrays import on_numpy, on_torch
from coalmine.measure.noise_law import NoiseParts


@pytest.mark.parametrize("with_total", [True, False])
@pytest.mark.parametrize("layers", [(7,), (5, 40_000, 1, 16_384, 16_385, 0, 7), (1,) * 300, (4096, 8, 10_000_000, 12)])
def test_sums_of_all_layers_agree_with_those_of_each(layers, with_total):
    generator = torch.Generator().manual_seed(1)
    vector, others, total = (torch.randn(sum(layers), generator=generator) for _ in range(3))
    rest = (vector - others).double()
    pairs = [(vector, vector), (rest, rest), (others, others), (rest, total), (total, total)][: 5 if with_total else 3]
    products = [(one.double() * other.double()).split(layers) for one, other in pairs]
    wanted = torch.tensor([[float(part.sum()) for part in row] for row in products], dtype=torch.float64)
    sizes = torch.tensor([[float(part.abs().sum()) for part in row] for row in products], dtype=torch.float64)
    given = [each.cuda() for each in (vector, others, total)]
    sums = LayerSums(layers, torch.device("cuda"))
    left, found = sums(given[0], given[1], given[2] if with_total else None)
    assert torch.equal(left, given[0] - given[1])
    assert found.shape == wanted.shape
    assert ((found.cpu() - wanted).abs() <= 1e-6 * sizes).all()  # float32 keeps 7 digits
    _, again = sums(given[0], given[1], given[2] if with_total else None)
    assert torch.equal(found, again)  # added in the same order every time


def test_a_vector_that_is_not_aligned():
    vector = torch.randn(10_001, generator=torch.Generator().manual_seed(2)).cuda()[1:]
    _, found = LayerSums((4_000, 6_000), vector.device)(vector, torch.zeros_like(vector), None)
    wanted = torch.stack([part.double().square().sum() for part in vector.split((4_000, 6_000))])
    torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "layers", [(3_000,), (5_000, 300, 5_000, 40_000, 300, 7, 40_000), (700,) * 200, (10_000_000, 12)]
)
def test_sums_of_the_noise_agree_with_those_of_each_part_in_double_precision(layers):
    dim = sum(layers)
    parts = NoiseParts.of([(str(i), size) for i, size in enumerate(layers)], dim)
    vector = torch.randn(dim + 1, generator=torch.Generator().manual_seed(3))[1:]
    wanted = on_numpy.law_sums(vector.double().numpy(), parts.groups, parts.pairs)
    sizes = on_numpy.law_sums(vector.double().abs().numpy(), parts.groups, parts.pairs)
    found = on_torch.law_sums(vector.cuda(), parts.groups, parts.pairs)
    assert found.shape == wanted.shape
    assert (abs(found - wanted) <= 2e-6 * sizes).all()  # float32 keeps 7 digits
    assert (found == on_torch.law_sums(vector.cuda(), parts.groups, parts.pairs)).all()


def test_noise_in_double_precision_on_a_device_is_summed_by_torch():
    parts = NoiseParts.of([("a", 2_000), ("b", 3_000)], 5_000)
    vector = torch.randn(5_000, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    found = on_torch.law_sums(vector.cuda(), parts.groups, parts.pairs)
    assert found == pytest.approx(on_numpy.law_sums(vector.numpy(), parts.groups, parts.pairs), rel=1e-12)


def test_groups_are_standardised_on_a_device_as_on_the_host():
    parts = NoiseParts.of([("a", 2_000), ("b", 3_000), ("c", 301)], 5_301)
    vector = torch.randn(5_301, generator=torch.Generator().manual_seed(5))
    stds = [1.5, 0.25, 3.0]
    found = on_torch.scaled(vector.cuda(), parts.groups, stds).cpu().numpy()
    assert (found == on_numpy.scaled(vector.numpy(), parts.groups, stds)).all()
