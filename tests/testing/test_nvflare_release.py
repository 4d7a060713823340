"""NVFlare filters under test. They need a separate environment: `python -m studies.other_frameworks` runs them."""

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed; python -m studies.other_frameworks runs this")
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

from coalmine import mechanism_noise
from coalmine.testing import assert_private, check_private
from coalmine.testing.nvflare import filter_release

NOISE = float(mechanism_noise(3.0, delta=1e-5))
CHECK = {"epsilon": 3.0, "delta": 1e-5, "dim": 2_000, "clients": 1, "aggregate": "sum"}


@pytest.fixture(autouse=True)
def _fixed_noise():
    np.random.seed(0)  # noqa: NPY002 - filters of NVFlare draw from this stream


class GaussianFilter(DXOFilter):
    """A site's clip and noise, as users write it."""

    def __init__(self, noise_multiplier, clip_norm=1.0):
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)
        self.noise_multiplier, self.clip_norm = noise_multiplier, clip_norm

    def process_dxo(self, dxo, shareable, fl_ctx):
        norm = np.sqrt(sum(np.sum(values**2) for values in dxo.data.values()))
        factor, normal = min(1.0, self.clip_norm / norm), np.random.normal
        dxo.data = {
            name: values * factor + normal(scale=self.noise_multiplier, size=values.shape)
            for name, values in dxo.data.items()
        }
        return dxo


class DropFirst(DXOFilter):
    def __init__(self):
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)

    def process_dxo(self, dxo, shareable, fl_ctx):
        dxo.data = dict(list(dxo.data.items())[1:])
        return dxo


def test_an_honest_filter_passes():
    assert_private(filter_release(GaussianFilter(NOISE)), **CHECK)


def test_an_honest_filter_passes_on_a_model_of_two_arrays():
    model = {"first": np.zeros((30, 60), dtype=np.float32), "last": np.zeros(200)}
    assert_private(filter_release(GaussianFilter(NOISE), model=model), **CHECK)


@pytest.mark.parametrize(
    ("filter_", "fault"),
    [(GaussianFilter(NOISE / 2), "half of it is missing"), (GaussianFilter(NOISE, 1e9), "not clipped")],
)
def test_half_the_noise_and_a_missing_clip_fail(filter_, fault):
    with pytest.raises(AssertionError, match=fault):
        assert_private(filter_release(filter_), **CHECK)


def test_percentile_privacy_adds_no_noise_and_fails():
    assert check_private(filter_release(PercentilePrivacy()), **CHECK).epsilon > 100


def test_svt_privacy_exceeds_its_epsilon():
    """Its `epsilon` covers only the selection of coordinates, not the release of their values."""
    result = check_private(filter_release(SVTPrivacy()), **CHECK | {"epsilon": 0.1})
    assert str(result.verdict.outcome) == "VIOLATION"


def test_the_filters_run_in_order_for_each_site_and_the_replies_are_summed():
    rows = np.random.default_rng(1).normal(size=(3, 50))
    release = filter_release(GaussianFilter(0.0, 2.0), GaussianFilter(0.0, 1.0), model={"w": np.zeros(50)})
    np.testing.assert_allclose(release(rows), (rows / np.linalg.norm(rows, axis=1)[:, None]).sum(axis=0), atol=1e-12)


def test_unsupported_filters_are_rejected_with_a_remedy():
    with pytest.raises(TypeError, match="filters must be filters of NVFlare, at least one"):
        filter_release()
    with pytest.raises(TypeError, match="filters must be filters of NVFlare, at least one"):
        filter_release(print)
    model = {"first": np.zeros(10), "last": np.zeros(10)}
    with pytest.raises(ValueError, match="every array, or canaries are incomplete: first, last; got last"):
        filter_release(DropFirst(), model=model)(np.ones((1, 20)))
