"""A Flower strategy under test: each call is one round in memory, with the clients' mods."""

import logging
import math
import random

import numpy as np
import pytest
from requires import require

require("flwr")
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod  # noqa: E402
from flwr.serverapp.strategy import (  # noqa: E402
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
)
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from coalmine import mechanism_epsilon, mechanism_noise  # noqa: E402
from coalmine.testing import assert_private, check_private  # noqa: E402
from coalmine.testing.flower import strategy_release  # noqa: E402

NOISE, CLIENTS = float(mechanism_noise(3.0, delta=1e-5)), 50
CHECK = {"epsilon": 3.0, "delta": 1e-5, "dim": 3_000, "clients": CLIENTS, "aggregate": "mean"}
SERVER, CLIENT = DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyClientSideFixedClipping


@pytest.fixture(autouse=True)
def _seeded_and_quiet():
    """Flower samples nodes and noise from global generators and logs every step."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def fedavg(**settings):
    return FedAvg(fraction_evaluate=0.0, **settings)


@pytest.mark.parametrize(
    ("wrapper", "mods"), [(SERVER, ()), pytest.param(CLIENT, [fixedclipping_mod], marks=pytest.mark.full)]
)
def test_an_honest_wrapper_passes_and_half_its_noise_fails(wrapper, mods):
    strategy = wrapper(fedavg(), NOISE, 1.0, CLIENTS)
    assert_private(strategy_release(strategy, mods=mods), **CHECK)
    strategy.noise_multiplier /= 2
    with pytest.raises(AssertionError, match="half of it is missing"):
        assert_private(strategy_release(strategy, mods=mods), **CHECK)


def test_a_clip_missing_from_the_mods_is_detected():
    strategy = CLIENT(fedavg(), NOISE, 1.0, CLIENTS)
    with pytest.raises(AssertionError, match="updates are not clipped"):
        assert_private(strategy_release(strategy), **CHECK)


def test_noise_after_the_server_optimizer_fails():
    """Flower scales its noise for a mean, and Adam's step is much longer."""
    strategy = SERVER(FedAdam(fraction_evaluate=0.0), NOISE, 1.0, CLIENTS)
    assert check_private(strategy_release(strategy), **CHECK).epsilon > 10


@pytest.mark.full
def test_unequal_weights_fail_and_equal_ones_pass():
    strategy = SERVER(fedavg(), NOISE, 1.0, CLIENTS)
    assert_private(strategy_release(strategy), weights=[7.0] * CLIENTS, **CHECK)
    with pytest.raises(AssertionError, match="the largest weight counts for more"):
        assert_private(strategy_release(strategy), weights=[10.0] * 5 + [1.0] * 45, **CHECK)


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrapper", "mods"),
    [
        (DifferentialPrivacyServerSideAdaptiveClipping, ()),
        (DifferentialPrivacyClientSideAdaptiveClipping, [adaptiveclipping_mod]),
    ],
)
def test_adaptive_wrappers_add_noise_for_the_norm_after_the_round(wrapper, mods):
    """If all updates are clipped, a round multiplies the norm by exp(-.2 · .5), and the noise uses the new norm."""
    spread = CLIENTS / 20  # Flower's noise on the number of clipped updates
    effective = (NOISE**-2 - (2 * spread) ** -2) ** -0.5 * math.exp(-0.1)
    reached = float(mechanism_epsilon(effective, delta=1e-5))
    assert reached > 3.2
    strategy = wrapper(fedavg(), NOISE, CLIENTS, initial_clipping_norm=1.0)
    claim = CHECK | {"epsilon": 1.05 * reached}  # the noisy count changes a round's norm by a percent
    assert_private(strategy_release(strategy, mods=mods), **claim)
    assert strategy.clipping_norm == 1.0
    with pytest.raises(AssertionError, match="VIOLATION"):
        assert_private(strategy_release(strategy, mods=mods), **CHECK)


@pytest.mark.full
def test_local_privacy_is_tested_with_one_client():
    """LocalDpMod's formula gives more noise than ε = 3 needs; at half the sensitivity it gives too little."""
    strategy = fedavg(min_train_nodes=1, min_available_nodes=1)
    one = CHECK | {"clients": 1, "dim": 1_000}
    assert_private(strategy_release(strategy, mods=[LocalDpMod(1.0, 1.0, 3.0, 1e-5)]), **one)
    with pytest.raises(AssertionError, match="VIOLATION"):
        assert_private(strategy_release(strategy, mods=[LocalDpMod(1.0, 0.5, 3.0, 1e-5)]), **one)


def test_the_release_without_noise_is_the_mean_of_the_clipped_updates():
    """Oracle: numpy, for a model of two arrays far from 0, over two rounds."""
    rng = np.random.default_rng(1)
    model = {"first": rng.normal(size=(10, 7)), "last": rng.normal(size=5)}
    release = strategy_release(SERVER(fedavg(), 0.0, 2.0, 6), model=model)
    for _ in range(2):
        rows = rng.normal(size=(6, 75))
        rows[0] /= np.linalg.norm(rows[0])
        clipped = rows * np.minimum(1.0, 2.0 / np.linalg.norm(rows, axis=1))[:, None]
        np.testing.assert_allclose(release(rows), clipped.mean(axis=0), atol=1e-12)
    weights = np.array([3.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    expected = weights @ clipped / weights.sum()
    np.testing.assert_allclose(release(rows, weights), expected, atol=1e-12)


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.7, 1.0])
def test_a_strategy_that_samples_gets_enough_nodes(fraction):
    """Each row is sent exactly once for every sampling fraction."""
    strategy = fedavg(fraction_train=fraction, min_available_nodes=2, min_train_nodes=2)
    rows = np.eye(7, 20)
    np.testing.assert_allclose(strategy_release(strategy)(rows), rows.mean(axis=0), atol=1e-7)


def test_unsupported_strategies_are_rejected_with_a_remedy():
    with pytest.raises(TypeError, match="strategy must be a strategy of flwr"):
        strategy_release("FedAvg")
    for mods in (fixedclipping_mod, ["fixedclipping_mod"]):
        with pytest.raises(TypeError, match="mods must list the mods of your ClientApp"):
            strategy_release(fedavg(), mods=mods)
    strategy = SERVER(fedavg(), 1.0, 1.0, 70)
    with pytest.raises(ValueError, match="num_sampled_clients, by which it divides its noise; got 50: pass clients=70"):
        check_private(strategy_release(strategy), **CHECK)
    with pytest.raises(ValueError, match="it sent 60 to 60 nodes; pass clients=60"):
        strategy_release(fedavg(min_train_nodes=60))(np.eye(50, 100))
    with pytest.raises(ValueError, match="a mod answered with an error: "):
        strategy_release(fedavg(), mods=[fixedclipping_mod])(np.eye(5, 100))
    with pytest.raises(ValueError, match=r"weights must be 5, one for each client, got shape \(4,\)"):
        strategy_release(fedavg())(np.eye(5, 100), np.ones(4))


def test_no_flower_identity_remains_in_the_process():
    TaskIdentity.run_id = None
    strategy_release(fedavg())(np.eye(5, 100))
    with pytest.raises(RuntimeError, match="run_id is not set"):
        TaskIdentity.run_id  # noqa: B018
