"""jax_privacy with canaries through the clip, and with the correlated noise of an execution plan."""

import re

import numpy as np
import pytest
from requires import require

require("jax_privacy")
import jax_privacy  # noqa: E402
from jax_privacy import batch_selection  # noqa: E402
from jax_training import DELTA, EXAMPLES, PARAMS, POISSON, SETTINGS, STEPS, banded_plan, gaussian, legs, loss, train  # noqa: E402

from coalmine import mechanism_epsilon  # noqa: E402
from coalmine.integrations.jax_privacy import audited, known_steps_claim  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


@pytest.mark.full
@pytest.mark.parametrize("clips", [True, False], ids=["clip", "no clip"])
def test_canaries_through_the_clip_reveal_a_missing_clip(clips):
    """Without a clip, each canary is ten times as long as the noise assumes."""
    privatizer = gaussian(through_clip=True, canaries=300)
    wrapped = privatizer.canary_loss(loss)
    grad_fn = jax_privacy.clipped_grad(
        wrapped, l2_clip_norm=1.0 if clips else np.inf, batch_argnums=(1, 2, 3), microbatch_size=20
    )
    result = privatizer.audit.finish(**train(privatizer, POISSON, grad_fn=grad_fn, through_clip=True))
    assert result.verdict.outcome == ("PASS" if clips else "VIOLATION")
    assert legs(result) == {"accounting": "PASS", "noise": "PASS" if clips else "VIOLATION", "sampling": "PASS"}
    clipping = next(item for item in result.audited if item.name == "clipping")
    assert clipping.status == ("checked" if clips else "failed")
    assert clips or re.search(
        r"canaries are (9\.\d+|10(\.\d)?) clip norms long in the privatizer's input", clipping.detail
    )


@pytest.mark.full
def test_a_banded_plan_recovers_the_analytical_epsilon():
    """An example's steps are separated by at least the number of bands, so ‖Cu‖² is the number of its steps."""
    claim = known_steps_claim(banded_plan(), DELTA)
    plan = audited(banded_plan(), PARAMS, num_examples=EXAMPLES, claim=claim, **SETTINGS)
    privatizer = plan.noise_addition_transform
    grad_fn = plan.clipped_grad(loss, batch_argnums=(1, 2))
    result = privatizer.audit.finish(**train(privatizer, plan.batch_selection_strategy, grad_fn=grad_fn))
    assert result.verdict.outcome == "PASS"
    rung = result["known-others"]
    exact = mechanism_epsilon(2.0 / np.sqrt(rung.headline.presentations), delta=DELTA)
    assert rung.interval[0] <= exact <= rung.interval[1]
    assert rung.epsilon == pytest.approx(exact, rel=0.15)
    assert next(item for item in result.audited if item.name == "sampler").status == "not checked"
    assert (result.claim.adjacency, result.claim.unit, result.claim.accounting) == ("zero out one", "row", "mechanism")
    assert result.claim.epsilon == pytest.approx(mechanism_epsilon(2.0, delta=DELTA, participations=14))


@pytest.mark.full
def test_banded_plan_with_half_the_noise_is_a_violation():
    """The claim is that of the plan with the requested noise."""
    halved = banded_plan(noise_multiplier=1.0)
    claim = known_steps_claim(banded_plan(), DELTA)
    plan = audited(halved, PARAMS, num_examples=EXAMPLES, claim=claim, **SETTINGS)
    privatizer = plan.noise_addition_transform
    result = privatizer.audit.finish(**train(privatizer, plan.batch_selection_strategy))
    assert result.verdict.outcome == "VIOLATION"


@pytest.mark.full
def test_batches_closer_than_the_bands_are_named():
    plan = audited(banded_plan(), PARAMS, num_examples=EXAMPLES, **SETTINGS)
    privatizer = plan.noise_addition_transform
    every = batch_selection.CyclicPoissonSampling(sampling_prob=0.25, iterations=STEPS)
    run = train(privatizer, every, largest=260)
    with pytest.warns(UserWarning, match="the batches expose an example more than the accountant allows for"):
        privatizer.audit.finish(**run)
