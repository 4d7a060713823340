"""The audit of a pfl mechanism changes no real user's update, nor the noise. In an environment of its own."""

import numpy as np
import pytest

pytest.importorskip("pfl", reason="pfl is not installed; python -m studies.other_frameworks runs this")
import torch
from pfl.common_types import Population
from pfl.context import CentralContext, UserContext
from pfl.internal.ops import pytorch_ops, selector
from pfl.metrics import Metrics
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.laplace_mechanism import LaplaceMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl.stats import MappedVectorStatistics

from coalmine.integrations.pfl import audited

USERS, CANARIES, CLIP = 8, 10, 1.5
MECHANISMS = {
    "Gaussian": lambda: GaussianMechanism(CLIP, 0.7),
    "Laplace": lambda: LaplaceMechanism(CLIP, 20.0),
}
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor")


@pytest.fixture(autouse=True)
def _torch_operations(monkeypatch):
    """As importing pfl's PyTorchModel does."""
    monkeypatch.setattr(selector, "_framework_module", pytorch_ops)


def model():
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 4))


def updates(number):
    """Updates of real users, some of which are longer than the clip norm."""
    rng = np.random.default_rng(number)
    for user in range(USERS):
        yield {
            name: torch.as_tensor(0.02 * (user + 1) * rng.normal(size=tuple(part.shape)), dtype=torch.float32)
            for name, part in model().named_parameters()
        }


def round_of(mechanism, number, canaries):
    """What is released, and the users' sum before the noise, with the same seeds whether there are canaries or not."""
    total, parts = None, [(f"user-{user}", update) for user, update in enumerate(updates(number))]
    zeros = {name: torch.zeros_like(part) for name, part in model().named_parameters()}
    for user, update in [*parts, *((f"canary-{index}", zeros) for index in range(canaries))]:
        context = UserContext(num_datapoints=1, seed=number, user_id=user)
        stats = MappedVectorStatistics({name: part.clone() for name, part in update.items()}, weight=2.0)
        one, _ = mechanism.postprocess_one_user(stats=stats, user_context=context)
        assert one.weight == 2.0
        total = one if total is None else total + one
    before = flat(total)
    central = CentralContext(
        current_central_iteration=number,
        do_evaluation=False,
        cohort_size=USERS + CANARIES,
        population=Population.TRAIN,
        algorithm_params=None,
        model_train_params=None,
        seed=100 + number,
    )
    released, _ = mechanism.postprocess_server(stats=total, central_context=central, aggregate_metrics=Metrics())
    return flat(released), before


def flat(stats):
    return torch.cat([part.reshape(-1) for part in stats.get_weights()[1]]).double()


@pytest.mark.parametrize("kind", MECHANISMS)
def test_users_and_noise_are_those_without_the_audit(kind):
    """To rounding, once the canaries are taken out, in each of three rounds."""
    plain = CentrallyAppliedPrivacyMechanism(MECHANISMS[kind]())
    settings = {} if kind == "Gaussian" else {"clip_norm": CLIP}
    watched = audited(
        CentrallyAppliedPrivacyMechanism(MECHANISMS[kind]()),
        model(),
        canaries=CANARIES,
        seed=b"tests only",
        delta=1e-5,
        progress=False,
        **settings,
    )
    for number in range(1, 4):
        expected, alone = round_of(plain, number, 0)
        found, together = round_of(watched, number, CANARIES)
        assert float(alone.norm()) > 0.1
        np.testing.assert_allclose(found - together, expected - alone, atol=1e-5)  # the noise
        if kind == "Gaussian":  # the Laplace mechanism clips another norm than that of a canary
            canaries = torch.as_tensor(watched.audit.core.updates(range(CANARIES), CLIP))
            np.testing.assert_allclose(together - canaries, alone, atol=1e-5)
    assert watched.audit.last_round == 3


def test_a_round_that_cannot_be_audited_stops_the_training_in_one_line():
    watched = audited(
        CentrallyAppliedPrivacyMechanism(MECHANISMS["Gaussian"]()), model(), canaries=CANARIES, seed=1, delta=1e-5
    )
    round_of(watched, 1, CANARIES)
    broken = MappedVectorStatistics({name: part.detach() * np.nan for name, part in model().named_parameters()})
    watched.privacy.postprocess_server = lambda **kwargs: (broken, Metrics())
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        round_of(watched, 2, CANARIES)
