"""What a claim on a run of jax_privacy means: the accountant's epsilon, with its adjacency, committed to before step 1."""

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from requires import require

require("jax_privacy")
from jax_privacy.experimental import accounting  # noqa: E402
from jax_training import DELTA, EVENT, EXAMPLES, PARAMS, RATE, SETTINGS, STEPS, banded_plan, gaussian, legs  # noqa: E402

from coalmine import Claim, mechanism_epsilon  # noqa: E402
from coalmine.integrations.jax_privacy import audited, known_steps_claim  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
REPLACE = dp.NeighboringRelation.REPLACE_ONE
FIXED = accounting.fixed_dpsgd_event(1.0, STEPS, dataset_size=EXAMPLES, batch_size=60)


def picks(size=None):
    """Batches of a Poisson sample, or of a fixed size."""
    rng = np.random.default_rng(2)
    for _ in range(STEPS):
        yield np.flatnonzero(rng.random(EXAMPLES) < RATE) if size is None else rng.permutation(EXAMPLES)[:size]


def run(privatizer, batches=None, **options):
    """Steps with a small gradient, and the result."""
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, jnp.float32), PARAMS)
    state, update = privatizer.init(params), jax.jit(privatizer.update)
    for indices in picks() if batches is None else batches:
        _, state = update(params, privatizer.next_step(state, indices))
    return privatizer.audit.finish(noise_state=state, **options)


def scheduled(stddev):
    """A privatizer whose noise changes from step to step."""

    def update(grads, state, params=None):
        key, step = state
        key, own = jax.random.split(key)
        leaves, treedef = jax.tree.flatten(grads)
        keys = jax.random.split(own, len(leaves))
        noise = [stddev(step) * jax.random.normal(each, leaf.shape) for each, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.map(jnp.add, grads, treedef.unflatten(noise)), (key, step + 1)  # type: ignore[attr-defined]

    return optax.GradientTransformation(lambda _: (jax.random.key(4), jnp.zeros((), jnp.int32)), update)


def terms(privatizer):
    claim = privatizer.audit.claim
    return round(claim.epsilon, 2), claim.delta, claim.unit, claim.adjacency, claim.bare


def test_the_event_is_a_claim_that_is_committed_to():
    assert terms(gaussian()) == (4.69, DELTA, "row", "add or remove one", True)
    assert terms(gaussian(neighboring_relation=REPLACE)) == (6.40, DELTA, "row", "replace one", True)
    plan = banded_plan()
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(RATE, dp.GaussianDpEvent(1.0)), STEPS)
    one_band = audited(plan, PARAMS, num_examples=EXAMPLES, dp_event=event, noising_matrix=np.eye(STEPS), **SETTINGS)
    assert terms(one_band.noise_addition_transform) == (4.69, DELTA, "row", "zero out one", True)
    full = gaussian(dp_event=dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), STEPS)).audit.claim
    assert (full.participations, full.counts_sampling) == (STEPS, False)
    assert terms(gaussian(claim=3.0))[:4] == (3.0, DELTA, "row", "add or remove one")


@pytest.mark.full
def test_a_number_is_the_accountants_epsilon_of_the_steps_that_ran():
    result = run(gaussian(claim=4.7))
    assert (result.verdict.outcome, legs(result)) == (
        "PASS",
        dict.fromkeys(("accounting", "noise", "sampling"), "PASS"),
    )
    assert (result.claim.epsilon, result.claim.sampling.rounds, result.claim.noise_multiplier) == (4.7, STEPS, 1.0)
    assert "for one row, added or removed" in str(result)
    small = run(gaussian(claim=3.0))
    assert (small.verdict.outcome, small.verdict.code) == ("VIOLATION", "accounting")


@pytest.mark.full
def test_a_replace_one_claim_is_the_headline_and_needs_the_noise_of_its_accountant():
    result = run(gaussian(neighboring_relation=REPLACE))
    assert (round(result.claim.epsilon, 2), result.claim.adjacency) == (6.40, "replace one")
    assert result.verdict.outcome == "PASS"
    assert result.verdict.finding.claimed_epsilon == pytest.approx(4.69, abs=0.01)
    assert "sampling counted (Poisson sampling with probability 0.1 in 40 steps, replace one)" in result.details()
    assert "epsilon 6.403 if one row is replaced needs the noise that has epsilon 4.688" in "\n".join(result.notes)
    assert "for one row, replaced" in str(result)
    # add or remove alone would allow this noise
    assert run(gaussian(neighboring_relation=REPLACE, stddev=0.8, dp_event=EVENT)).verdict.outcome == "VIOLATION"


@pytest.mark.full
def test_batches_of_a_fixed_size_are_judged_by_their_own_event_or_not_at_all():
    """Their noise multiplier is over two clip norms. Noise of one clip norm is half of what the accountant counts."""
    result = run(gaussian(dp_event=FIXED, neighboring_relation=REPLACE), picks(60))
    assert result.claim.adjacency == "replace one"
    rdp = dp.rdp.RdpAccountant(neighboring_relation=REPLACE).compose(FIXED)
    assert result.claim.epsilon == pytest.approx(rdp.get_epsilon(DELTA))
    assert result.verdict.outcome == "VIOLATION"
    unread = run(gaussian(dp_event=FIXED), picks(60))
    assert unread.claim is None
    assert unread.verdict is None or unread.verdict.outcome != "PASS"
    assert "the accountant's epsilon has no verdict" in unread.details()


@pytest.mark.full
def test_a_schedule_of_noise_passes_on_the_epsilon_of_its_list():
    """Twenty steps at 1.5 and twenty at 0.9: each is recorded with its own noise."""

    def stddev(step):
        return jnp.where(step < STEPS // 2, 1.5, 0.9)

    halves = [
        dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(RATE, dp.GaussianDpEvent(noise)), STEPS // 2)
        for noise in (1.5, 0.9)
    ]
    event = dp.ComposedDpEvent(halves)
    options = {"clip_norm": 1.0, "num_examples": EXAMPLES, "dp_event": event, **SETTINGS}
    privatizer = audited(scheduled(stddev), PARAMS, stddev=stddev, **options)
    result = run(privatizer)
    stated = [item.noise_std for item in privatizer.audit.log.rounds()]
    assert stated == pytest.approx([1.5] * 20 + [0.9] * 20)
    assert result.verdict.outcome == "PASS"
    too_little = audited(scheduled(lambda step: stddev(step) / 2), PARAMS, stddev=stddev, **options)
    assert run(too_little).verdict.outcome == "VIOLATION"


def test_a_sampler_that_nobody_observes_is_neither_confirmed_nor_refuted():
    privatizer = gaussian(num_examples=None, sampling_probability=RATE, claim=4.7)
    assert run(privatizer, [None] * STEPS).verdict.outcome == "UNDERPOWERED"


def test_a_claim_without_its_accounting_is_refused_with_what_to_write_instead():
    with pytest.raises(
        ValueError, match=r"claim=3 is read as the accountant's epsilon.*event is not known: pass dp_event="
    ):
        gaussian(dp_event=None, claim=3.0)
    with pytest.raises(
        ValueError, match=r"its event is not one of Gaussian noise.*Claim\.mechanism\(3, participations=…\)"
    ):
        gaussian(dp_event=dp.LaplaceDpEvent(1.0), claim=3.0)
    with pytest.raises(ValueError, match=r"correlated noise.*pass claim=known_steps_claim\(plan, delta\)"):
        audited(banded_plan(), PARAMS, num_examples=EXAMPLES, claim=3.0, **SETTINGS)
    with pytest.raises(TypeError, match="an event goes to dp_event="):
        gaussian(claim=EVENT)
    with pytest.raises(ValueError, match="neighboring_relation must be one of"):
        gaussian(neighboring_relation="nobody")
    with pytest.raises(ValueError, match=r"stddev\(step\)"):
        audited(scheduled(abs), PARAMS, stddev=lambda _: -1.0, clip_norm=1.0, num_examples=EXAMPLES, **SETTINGS)
    with pytest.raises(ValueError, match="must be at the audit's delta, 1e-05"):
        gaussian(claim=Claim(3.0, delta=1e-6))


def test_known_steps_of_a_plan_have_the_epsilon_without_sampling():
    """Three bands over 40 steps: an example is in at most 14 of them, three apart, so ‖Cu‖² is 14."""
    claim = known_steps_claim(banded_plan(), DELTA)
    assert claim.epsilon == pytest.approx(float(mechanism_epsilon(2.0, delta=DELTA, participations=14)))
    assert (claim.sensitivity, claim.adjacency, claim.bare) == (pytest.approx(np.sqrt(14)), "zero out one", False)
    replaced = known_steps_claim(EVENT, DELTA, neighboring_relation=REPLACE)
    assert replaced.epsilon == pytest.approx(133.1, abs=0.1)
    assert known_steps_claim(EVENT, DELTA).participations == STEPS
