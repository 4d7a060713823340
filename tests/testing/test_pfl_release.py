"""pfl mechanisms under test. pfl needs a separate environment: `python -m studies.other_frameworks` runs these."""

import numpy as np
import pytest

pytest.importorskip("pfl", reason="pfl is not installed; python -m studies.other_frameworks runs this")
from pfl.metrics import Metrics
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

from coalmine import mechanism_noise
from coalmine.testing import assert_private, check_private
from coalmine.testing.pfl import mechanism_release

NOISE = float(mechanism_noise(3.0, delta=1e-5))
CHECK = {"epsilon": 3.0, "delta": 1e-5, "dim": 2_000, "aggregate": "sum"}


@pytest.fixture(autouse=True)
def _fixed_noise():
    np.random.seed(0)  # noqa: NPY002 - pfl draws from this stream


class Unclipped(GaussianMechanism):
    def constrain_sensitivity(self, statistics, name_formatting_fn=None, seed=None):
        return statistics, Metrics()


def central(kind=GaussianMechanism, *, clip_norm=1.0, noise=NOISE):
    return CentrallyAppliedPrivacyMechanism(kind(clip_norm, noise))


def test_an_honest_mechanism_passes():
    assert_private(mechanism_release(central()), **CHECK)
    model = {"first": np.zeros((30, 60)), "last": np.zeros(200)}
    assert_private(mechanism_release(central(), model=model), **CHECK)


@pytest.mark.parametrize(
    ("mechanism", "fault"), [(central(noise=NOISE / 2), "half of it is missing"), (central(Unclipped), "not clip")]
)
def test_half_the_noise_and_a_missing_clip_fail(mechanism, fault):
    with pytest.raises(AssertionError, match=fault):
        assert_private(mechanism_release(mechanism), **CHECK)


def test_a_local_mechanism_is_tested_with_one_client():
    """It adds noise to every user's update, so the sum of a hundred has ten times the noise."""
    assert_private(mechanism_release(GaussianMechanism(1.0, NOISE)), clients=1, **CHECK)
    with pytest.raises(AssertionError, match="VIOLATION"):
        assert_private(mechanism_release(GaussianMechanism(1.0, NOISE / 2)), clients=1, **CHECK)
    assert check_private(mechanism_release(GaussianMechanism(1.0, NOISE)), **CHECK).epsilon < 0.5


def test_the_release_without_noise_is_the_sum_of_the_clipped_updates():
    rows = np.random.default_rng(1).normal(size=(4, 50))
    rows[0] /= np.linalg.norm(rows[0])
    clipped = rows * np.minimum(1.0, 2.0 / np.linalg.norm(rows, axis=1))[:, None]
    release = mechanism_release(central(clip_norm=2.0, noise=0.0), model={"w": np.zeros((5, 10))})
    np.testing.assert_allclose(release(rows), clipped.sum(axis=0), atol=1e-6)


def test_unsupported_mechanisms_are_rejected_with_a_remedy():
    with pytest.raises(TypeError, match="mechanism must be a postprocessor of pfl"):
        mechanism_release(print)
    with pytest.raises(ValueError, match="pass clip_norm=20"):
        check_private(mechanism_release(central(clip_norm=20.0)), **CHECK)
