import hashlib

import numpy as np
import pytest
import torch

from coalmine.canaries import SphereCanaries


@pytest.mark.parametrize("dim", [2, 3, 1000, 40_001, 70_000])
def test_cosines_agree_with_dot_products(dim):
    """Above 32,768 coordinates a canary is generated in chunks."""
    canaries = SphereCanaries(2 if dim == 2 else 3, dim, seed=1)
    columns = np.array([canaries.canary(index) for index in range(canaries.count)])
    np.testing.assert_allclose(np.linalg.norm(columns, axis=1), 1, rtol=1e-14)
    vector = np.random.default_rng(dim).standard_normal(dim)
    np.testing.assert_allclose(canaries.cosines(vector), columns @ vector / np.linalg.norm(vector), atol=1e-13)
    np.testing.assert_allclose(canaries.combine([0, 1]), columns[0] + columns[1], atol=1e-14)


def test_a_canary_does_not_depend_on_the_number_of_canaries():
    assert (SphereCanaries(1, 100, seed=2).canary(0) == SphereCanaries(100, 100, seed=2).canary(0)).all()


def test_torch_generates_the_same_canaries():
    """The code path of devices, run on the CPU."""
    canaries = SphereCanaries(4, 1001, seed=b"x")
    vector = torch.randn(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cosines, norm = canaries._cosines_torch(vector)
    np.testing.assert_allclose(cosines, canaries.cosines(vector), atol=1e-14)
    assert norm == pytest.approx(float(vector.norm()))
    np.testing.assert_allclose(canaries._sum_torch([1, 3], vector.device), canaries.combine([1, 3]), atol=1e-14)


def test_the_canaries_of_a_seed_never_change():
    """Canaries are part of the public interface; rounded, since machines differ in the last bits."""
    digest = hashlib.sha256()
    for dim in (17, 1000, 70_001):
        for index in (0, 16):
            rounded = np.round(SphereCanaries(17, dim, seed=20240).canary(index) * 12_345_678.9).astype("<i8")
            digest.update(rounded.tobytes())
    assert digest.hexdigest() == "b1aade948994bc428ebd658aae01fcfee10b08b6ee6b8309a47819abdde2b713"
