"""Claims from dp-accounting's events, against closed forms, quadrature and other accountants."""

import dp_accounting as dp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from coalmine import Claim, FixedSize, Poisson, amplified_epsilon, mechanism_epsilon
from coalmine.verdict.event_claims import as_add_or_remove, claim_of_event, replace_one_epsilon

DELTA = 1e-5
ADD, ZERO, REPLACE = (dp.NeighboringRelation[name] for name in ("ADD_OR_REMOVE_ONE", "REPLACE_SPECIAL", "REPLACE_ONE"))
GAUSSIAN = dp.GaussianDpEvent(1.0)
STEPS = dp.SelfComposedDpEvent(GAUSSIAN, 40)
SAMPLED = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, GAUSSIAN), 40)
FIXED = dp.SelfComposedDpEvent(dp.SampledWithoutReplacementDpEvent(600, 60, GAUSSIAN), 40)


@pytest.mark.full
def test_gaussian_steps_have_the_closed_forms_epsilon():
    """Adding one example moves a sum by one clip norm, replacing one by two: half the noise multiplier."""
    for relation, adjacency in ((ADD, "add or remove one"), (ZERO, "zero out one")):
        claim = claim_of_event(STEPS, DELTA, relation)
        assert claim.epsilon == pytest.approx(float(mechanism_epsilon(1.0, delta=DELTA, participations=40)), rel=1e-3)
        assert (claim.participations, claim.sensitivity, claim.adjacency) == (40, None, adjacency)
        assert claim.counts_sampling is False
        assert not claim.bare
    claim = claim_of_event(STEPS, DELTA, REPLACE)
    assert claim.epsilon == pytest.approx(float(mechanism_epsilon(0.5, delta=DELTA, participations=40)), rel=1e-3)
    assert claim.epsilon == pytest.approx(133.1, abs=0.05)
    assert (claim.sensitivity, claim.adjacency) == (pytest.approx(2 * np.sqrt(40)), "replace one")
    # dp-accounting's RDP accountant takes the noise multiplier over two clip norms: another claim
    rdp = dp.rdp.RdpAccountant(neighboring_relation=REPLACE).compose(STEPS).get_epsilon(DELTA)
    assert rdp == pytest.approx(48.8, abs=0.05)


def test_poisson_sampled_steps_are_an_amplified_claim():
    claim = Claim.from_event(SAMPLED, DELTA, ZERO, unit="example", sampler_observed=True)
    assert claim.epsilon == pytest.approx(float(amplified_epsilon(1.0, Poisson(0.1, 40), DELTA)), rel=2e-3)
    assert claim == Claim(
        claim.epsilon,
        sampling=Poisson(0.1, 40),
        noise_multiplier=1.0,
        sampler_observed=True,
        delta=DELTA,
        unit="example",
        adjacency="zero out one",
    )
    replaced = claim_of_event(SAMPLED, DELTA, REPLACE)
    assert (round(claim.epsilon, 2), round(replaced.epsilon, 2)) == (4.69, 6.40)
    assert replaced.adjacency == "replace one"
    assert Claim.from_dict(replaced.to_dict()) == replaced


def test_replace_one_epsilon_of_one_round_is_that_of_the_mixture():
    """One example adds +1 in the one data set and -1 in the other, each with probability q."""
    noise, rate, delta = 1.0, 0.3, 1e-3
    x = np.linspace(-12, 12, 400_001)
    one, other = ((1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, mean, noise) for mean in (1, -1))

    def beyond(epsilon):
        return np.trapezoid(np.maximum(one - np.exp(epsilon) * other, 0), x) - delta

    exact = brentq(beyond, 0.01, 20)
    assert replace_one_epsilon(noise, Poisson(rate, 1), delta) == pytest.approx(exact, abs=2e-3)


@pytest.mark.parametrize("noise", [1.0, *(pytest.param(noise, marks=pytest.mark.full) for noise in (None, 0.8))])
def test_a_replace_one_claim_needs_the_noise_of_its_accountant(noise):
    """Whatever noise is stated, the claim under add or remove has the noise at which replace-one gives the claim."""
    claimed = Claim(6.40, sampling=Poisson(0.1, 40), noise_multiplier=noise, adjacency="replace one")
    equivalent = as_add_or_remove(claimed, DELTA)
    assert equivalent.epsilon == pytest.approx(float(amplified_epsilon(1.0, Poisson(0.1, 40), DELTA)), rel=5e-3)
    assert (equivalent.noise_multiplier, equivalent.adjacency) == (noise, "add or remove one")
    other = Claim(3.0, sampling=Poisson(0.1, 40))
    assert as_add_or_remove(other, DELTA) is other


def test_batches_of_a_fixed_size_have_their_noise_over_two_clip_norms():
    claim = claim_of_event(FIXED, DELTA, REPLACE)
    assert (claim.sampling, claim.noise_multiplier) == (FixedSize(60, 600, 40), 2.0)
    assert claim.epsilon == pytest.approx(float(amplified_epsilon(2.0, FixedSize(60, 600, 40), DELTA)), rel=1e-2)
    with pytest.raises(ValueError, match=r"under NeighboringRelation\.REPLACE_ONE only"):
        claim_of_event(FIXED, DELTA, ADD)


@pytest.mark.full
def test_rounds_of_different_noise_are_one_claim_without_a_noise_multiplier():
    """ε of the whole list, which lies between those of its largest and its smallest noise."""
    parts = [dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(noise)) for noise in (1.0, 1.5, 1.0, 0.9)]
    claim = claim_of_event(dp.ComposedDpEvent(parts), DELTA, ADD)
    assert (claim.sampling, claim.noise_multiplier) == (Poisson(0.1, 4), None)
    low, high = (float(amplified_epsilon(noise, Poisson(0.1, 4), DELTA)) for noise in (1.5, 0.9))
    assert low < claim.epsilon < high
    equal = claim_of_event(dp.ComposedDpEvent([SAMPLED, SAMPLED.event, dp.ComposedDpEvent([SAMPLED])]), DELTA, ADD)
    assert (equal.sampling, equal.noise_multiplier) == (Poisson(0.1, 81), 1.0)
    scheduled = claim_of_event(dp.ComposedDpEvent([GAUSSIAN, dp.GaussianDpEvent(2.0)]), DELTA, ADD)
    together = float(mechanism_epsilon(1 / np.sqrt(1 + 0.25), delta=DELTA))
    assert scheduled.epsilon == pytest.approx(together, rel=1e-3)


@pytest.mark.parametrize(
    "event",
    [
        dp.LaplaceDpEvent(1.0),
        dp.PoissonSampledDpEvent(0.1, dp.LaplaceDpEvent(1.0)),
        dp.SampledWithReplacementDpEvent(600, 60, GAUSSIAN),
        dp.GaussianDpEvent(0.0),
        dp.ComposedDpEvent([]),
        dp.SelfComposedDpEvent(dp.NonPrivateDpEvent(), 3),
        dp.TruncatedSubsampledGaussianDpEvent(600, 0.1, 80, 1.0),
        3.0,
    ],
    ids=lambda event: type(event).__name__,
)
def test_other_events_are_refused_with_what_to_write_instead(event):
    with pytest.raises(ValueError, match=r"an event must compose Gaussian events .* claim=Claim\.mechanism\(10\.0\)"):
        claim_of_event(event, DELTA, ADD)


def test_an_event_without_its_relation_or_of_mixed_sampling_is_refused():
    with pytest.raises(ValueError, match=r"neighboring_relation must be one of NeighboringRelation\.ADD_OR_REMOVE_ONE"):
        claim_of_event(SAMPLED, DELTA, "add")
    with pytest.raises(ValueError, match="must be sampled alike"):
        claim_of_event(dp.ComposedDpEvent([SAMPLED, STEPS]), DELTA, ADD)
    with pytest.raises(ValueError, match="delta"):
        claim_of_event(SAMPLED, 0.0, ADD)
    assert claim_of_event(SAMPLED, DELTA, "REPLACE_SPECIAL").adjacency == "zero out one"
