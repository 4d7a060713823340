"""Replayed rows of jax_privacy, and replies of Flower, pfl and NVFlare."""

import numpy as np
import pytest
from requires import require

from coalmine.testing import replay

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


@pytest.mark.full
def test_the_privatized_function_of_jax_privacy_is_replayed():
    require("jax_privacy")
    import jax
    import jax.numpy as jnp
    import jax_privacy
    from jax_training import PARAMS, POISSON, STEPS, data, gaussian, loss, train

    features, labels = data()
    params = jax.tree.map(jnp.asarray, PARAMS)
    batch = (20 * features[:24], labels[:24])

    def centred(params, features, labels):
        return loss(params, features - features.mean(axis=0), labels)

    def summed(one_by_one, kind):
        clipped = jax_privacy.clipped_grad(kind, l2_clip_norm=1.0, batch_argnums=(1, 2))

        def step(batch, weights):
            rows = batch[0] if one_by_one else batch[0] - batch[0].mean(axis=0)
            return clipped(params, rows, batch[1], is_padding_example=weights == 0)

        return step

    outcomes = []
    for one_by_one in (True, False):
        privatizer = gaussian(claim=30.0)
        ended = train(privatizer, POISSON)
        found = privatizer.audit.replay(summed(one_by_one, loss), batch, rows=4)
        result = privatizer.audit.finish(**ended)
        item = next(item for item in result.audited if item.name == "rows")
        outcomes.append((item.status, item.replayed.worst.factor))
        assert len(found.rows) >= 4
    assert outcomes[0][0] == "checked"
    assert outcomes[0][1] == pytest.approx(1.0, abs=1e-3)
    assert outcomes[1][0] == "failed"
    assert outcomes[1][1] > 1.1
    assert STEPS == 40


def updates(clients=12, dim=60):
    rng = np.random.default_rng(2)
    rows = 3 * rng.normal(size=(clients, dim))
    rows[0] = 0
    rows[0, 3] = 50  # one-hot, and long
    rows[1:6] = -rows[1]  # aligned with each other
    return rows


@pytest.mark.parametrize("where", ["server", "client"])
def test_the_aggregates_of_flower_are_replayed_with_a_zero_reply(where):
    """The noise is drawn from numpy's generator, so the same round comes again, and the replies stay as many."""
    require("flwr")
    from flwr.clientapp.mod import fixedclipping_mod
    from flwr.serverapp import strategy as flower

    from coalmine.testing.flower import strategy_release

    rows = updates()
    kinds = {
        "server": flower.DifferentialPrivacyServerSideFixedClipping,
        "client": flower.DifferentialPrivacyClientSideFixedClipping,
    }
    strategy = kinds[where](flower.FedAvg(fraction_evaluate=0.0), 1.0, 1.0, len(rows))
    options = {"adjacency": "zero-out", "clip_norm": 1 / len(rows), "rows": 6, "tolerance": 1e-3}
    found = replay(strategy_release(strategy, mods=[fixedclipping_mod] * (where == "client")), rows, **options)
    assert found.repeats
    assert found.factor == pytest.approx(1.0, abs=1e-3)
    if where == "client":
        unclipped = replay(strategy_release(strategy), rows, **options)
        assert unclipped.factor > 10


def test_the_mechanism_of_pfl_is_replayed_with_a_zero_reply():
    pytest.importorskip("pfl", reason="pfl is not installed; python -m studies.other_frameworks runs this")
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    from coalmine.testing.pfl import mechanism_release

    release = mechanism_release(CentrallyAppliedPrivacyMechanism(GaussianMechanism(1.0, 1.0)))
    found = replay(release, updates(), adjacency="zero-out", rows=6)
    assert found.repeats
    assert found.factor == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("fault", [False, True])
def test_a_clip_by_the_median_of_all_replies_moves_too_far(fault):
    def aggregate(rows):
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        limit = np.median(norms) if fault else 1.0
        return (rows * np.minimum(1, limit / np.maximum(norms, 1e-12))).sum(axis=0)

    found = replay(aggregate, updates(), adjacency="zero-out")
    assert found.is_counterexample == fault
