"""Lengths and products by layer are those of each layer alone."""

import pytest
import torch

from coalmine.canaries.rotation_torch import layer_products, layer_squares


@pytest.mark.parametrize("layers", [(7,), (5, 40_000, 1, 16_384, 16_385, 0, 7), (1,) * 300])
def test_numbers_of_all_layers_agree_with_those_of_each(layers):
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(sum(layers), generator=generator) for _ in range(2))
    parts = list(zip(one.double().split(layers), other.double().split(layers), strict=True))
    squares = torch.stack([a.square().sum() for a, _ in parts])
    torch.testing.assert_close(layer_squares(one, layers), squares, rtol=1e-6, atol=0)
    products = torch.stack([(a * b).sum() for a, b in parts])
    sizes = torch.stack([a.square().sum() + b.square().sum() for a, b in parts])
    assert ((layer_products(one, other, layers) - products).abs() <= 1e-6 * sizes).all()  # float32 keeps 7 digits


def test_layers_of_zeros_have_length_zero():
    assert layer_squares(torch.zeros(10), (4, 6)).tolist() == [0.0, 0.0]
