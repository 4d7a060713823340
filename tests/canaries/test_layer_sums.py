"""Squares and products by layer, in one pass on a CUDA device, are those of each layer alone."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from coalmine.canaries.layer_sums_triton import LayerSums


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
    found = sums(given[0], given[1], given[2] if with_total else None)
    assert found.shape == wanted.shape
    assert ((found.cpu() - wanted).abs() <= 1e-6 * sizes).all()  # float32 keeps 7 digits
    again = sums(given[0], given[1], given[2] if with_total else None)
    assert torch.equal(found, again)  # added in the same order every time


def test_a_vector_that_is_not_aligned():
    vector = torch.randn(10_001, generator=torch.Generator().manual_seed(2)).cuda()[1:]
    found = LayerSums((4_000, 6_000), vector.device)(vector, torch.zeros_like(vector), None)
    wanted = torch.stack([part.double().square().sum() for part in vector.split((4_000, 6_000))])
    torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1], wanted, rtol=1e-6, atol=0)
