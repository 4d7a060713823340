"""Audits and estimators accept jax arrays and give the same results as for numpy arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coalmine import (
    Audit,
    Gaussian,
    anderson_darling,
    compare_estimators,
    epsilon_estimate,
    epsilon_lower_bound,
    estimate_from_final,
    estimate_from_iterates,
    gaussian_epsilon,
    mechanism_epsilon,
    plan_audit,
)

DIM = 3_000


def scores(number=300, mean=1.0):
    return np.random.default_rng(number).normal(mean, 1.0, size=number).astype(np.float32)


@pytest.mark.parametrize(
    "estimate",
    [
        lambda values: epsilon_estimate(values, null=Gaussian(0.0, 1.0), delta=1e-5),
        lambda values: epsilon_lower_bound(values, null=Gaussian(0.0, 1.0), delta=1e-5),
        lambda values: estimate_from_final(values / 64, dim=4_096, delta=1e-5),
        lambda values: estimate_from_iterates(values, values - 1, delta=1e-5),
        lambda values: compare_estimators(values[:100], values[100:] - 1, delta=1e-5),
        lambda values: anderson_darling(values),
        lambda values: mechanism_epsilon(abs(values[0]) + 1, delta=1e-5),
        lambda values: gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(values[1], 1.0), delta=1e-5),
    ],
)
def test_estimators_accept_jax_arrays(estimate):
    assert repr(estimate(jnp.asarray(scores()))) == repr(estimate(scores()))


def test_planning_accepts_jax_numbers():
    assert plan_audit(jnp.asarray(1_000), dim=jnp.asarray(DIM), delta=1e-5) == plan_audit(1_000, dim=DIM, delta=1e-5)


def run(kind, **options):
    audit = Audit(DIM, canaries=200, seed=3, delta=1e-5, rounds=3, **options)
    rng = np.random.default_rng(3)
    for number in (1, 2, 3):
        present, others = audit.canaries_in_round(number), rng.normal(size=DIM).astype(np.float32)
        total = np.asarray(audit.updates(present, 1.0, like=kind(np.empty(0, np.float32))))
        delta = others + total + rng.normal(size=DIM).astype(np.float32)
        audit.observe_round(number, kind(delta), present=present, others=kind(others), noise_std=1.0, clip_norm=1.0)
    audit.observe_final(kind(delta), initial=kind(others))
    return audit


@pytest.mark.parametrize("options", [{}, {"layers": [("a", 1_000), ("b", 2_000)]}, {"deferred": True}])
def test_a_flat_model_may_be_a_jax_array(options):
    assert run(jnp.asarray, **options).log_digest == run(np.asarray, **options).log_digest


def test_traced_and_deleted_arrays_are_refused():
    audit = Audit(DIM, canaries=20, seed=3, delta=1e-5, rounds=3)
    with pytest.raises(
        ValueError, match=r"^model_delta must be a plain array, got a value that jax traces: call the audit"
    ):
        jax.jit(lambda delta: audit.observe_round(1, delta, present=[]))(jnp.ones(DIM))
    gone = jnp.ones(DIM)
    gone.delete()
    with pytest.raises(
        ValueError, match=r"^others must be a plain array, got a jax array that was deleted or donated$"
    ):
        audit.observe_round(1, jnp.ones(DIM), present=[], others=gone)
    assert audit.last_round == 0
