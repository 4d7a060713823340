"""An accountant's claims against the cohorts that the simulation really samples."""

import dataclasses

import numpy as np
import pytest

from coalmine import FixedSize, Poisson, Shuffled, amplified_epsilon, mechanism_epsilon
from coalmine.simulation import RunConfig, simulate
from coalmine.simulation.cohorts import Cohort, plan_cohorts, sampling_of
from coalmine.simulation.config_sources import merged, task_defaults
from coalmine.simulation.training_run import prepared

CHEAP = {"task": {"max_examples_per_client": 4}, "privacy": {"noise_multiplier": 1.0}}


def config(kind, pattern, *, per_round=20, canaries=150, rounds=30, **changes):
    chosen = {
        "rounds": rounds,
        "participation": {"kind": kind, "clients_per_round": per_round},
        "canaries": {"pattern": pattern, "count": canaries},
    }
    made = RunConfig.from_dict(merged(merged(merged(task_defaults("digits"), CHEAP), chosen), changes))
    return dataclasses.replace(made, engine=made.engine.resolved())


def cohorts_of(settings, population):
    cohorts = plan_cohorts(settings, population, lambda number: np.arange(0))
    return [cohorts.of_round(number) for number in range(1, settings.rounds + 1)]


@pytest.mark.parametrize("pattern", ["clients", "replace"])
@pytest.mark.parametrize("canaries", [20, 70])
def test_fixed_size_claims_match_every_cohort(pattern, canaries):
    """The cohort grows with the population: with 70 canaries and 200 clients it is 27 of 270."""
    settings = config("fixed", pattern, canaries=canaries)
    scheme = sampling_of(settings, 200)
    everybody = 200 + (canaries if pattern == "clients" else 0)
    assert isinstance(scheme, FixedSize)
    assert (scheme.population, scheme.rounds) == (everybody, 30)
    assert {len(cohort) for cohort in cohorts_of(settings, 200)} == {scheme.size}


@pytest.mark.parametrize("pattern", ["clients", "replace"])
def test_clients_and_canaries_have_the_claimed_poisson_rate(pattern):
    settings = config("poisson", pattern, rounds=2_000)
    scheme = sampling_of(settings, 200)
    assert scheme == Poisson(0.1, rounds=2_000)
    cohorts = cohorts_of(settings, 200)
    clients = 200 - (150 if pattern == "replace" else 0)
    for count, size in ((150, [len(c.canaries) for c in cohorts]), (clients, [len(c.clients) for c in cohorts])):
        error = np.sqrt(0.1 * 0.9 * count / 2_000)
        assert np.mean(size) == pytest.approx(0.1 * count, abs=4 * error)


@pytest.mark.parametrize(("per_round", "canaries"), [(20, 150), (30, 150), (150, 37), (199, 10)])
def test_shuffled_epochs_include_every_canary_once(per_round, canaries):
    """Also if the last cohort of an epoch is short, and if additional canaries change its length."""
    epoch = sampling_of(config("shuffled", "clients", per_round=per_round, canaries=canaries), 200)
    assert isinstance(epoch, Shuffled)
    settings = config("shuffled", "clients", per_round=per_round, canaries=canaries, rounds=3 * epoch.rounds)
    scheme = sampling_of(settings, 200)
    assert scheme == Shuffled(epoch.rounds, 3)
    present = [cohort.canaries for cohort in cohorts_of(settings, 200)]
    for first in range(0, settings.rounds, scheme.rounds):
        assert sorted(np.concatenate(present[first : first + scheme.rounds])) == list(range(canaries))
    assert sampling_of(dataclasses.replace(settings, rounds=settings.rounds + 1), 200) == Shuffled(epoch.rounds, 4)


def test_poisson_sums_are_divided_by_the_expected_number():
    """Otherwise a canary's length in the sum would reveal the number of participants."""
    settings = config("poisson", "clients", rounds=3)
    with prepared(settings, None, None) as training:
        list(training.rounds(training.initial_state()))
        rounds = list(training.audit.log.rounds())
        cohorts = [training.cohorts.of_round(number) for number in (1, 2, 3)]
    assert [item.participants for item in rounds] == [len(cohort) for cohort in cohorts]
    assert len({len(cohort) for cohort in cohorts}) > 1
    assert {item.clip_norm for item in rounds} == {settings.privacy.clip_norm / 35}
    assert config("fixed", "clients").divisor == "actual"


def test_the_count_of_an_adaptive_clip_does_not_reveal_the_cohort_size():
    """It counts b - 1/2 for each participant, so that an empty round leaves the share at one half."""
    settings = config("poisson", "clients", rounds=1, privacy={"clipping": "adaptive", "noise_multiplier": 0.0})
    nobody = np.arange(0)
    with prepared(settings, None, None) as training:
        training.cohorts = dataclasses.replace(training.cohorts, of_round=lambda number: Cohort(nobody, nobody))
        state = training.initial_state()
        training.round(state)
    assert state.clip_norm == settings.privacy.clip_norm


@pytest.mark.parametrize(
    ("kind", "pattern", "claim", "outcome", "code"),
    [
        ("poisson", "replace", {"accountant": True}, "PASS", "legs"),
        pytest.param("fixed", "clients", {"accountant": True}, "PASS", "legs", marks=pytest.mark.full),
        ("shuffled", "clients", {"accountant": True}, "PASS", "legs"),
        ("shuffled", "clients", {"epsilon": 9.0, "amplified": True}, "UNDERPOWERED", "range"),
        pytest.param(
            "fixed", "clients", {"epsilon": 15.0, "amplified": True}, "UNDERPOWERED", "range", marks=pytest.mark.full
        ),
        ("fixed", "clients", {"epsilon": 2.0, "amplified": True}, "VIOLATION", "accounting"),
        ("poisson", "spread", {"accountant": True}, "UNDERPOWERED", "sampler not observed"),
    ],
)
def test_verdicts_on_amplified_claims(kind, pattern, claim, outcome, code):
    """Three epochs of ten rounds. A claim passes at the upper end of the accountant's range, and never within it."""
    found = simulate(config(kind, pattern, claim=claim, canaries=150 if pattern == "replace" else 400))
    verdict = found.verdict
    assert (verdict.outcome, verdict.code) == (outcome, code), verdict.reason
    unamplified = mechanism_epsilon(1.0, delta=1e-6, participations=3)
    if kind == "shuffled":
        accounted = amplified_epsilon(1.0, Shuffled(10, 3), 1e-6)
        assert accounted.low < 9.0 < accounted.high == unamplified
    if "accountant" in claim and pattern != "spread":
        assert found.legs.keys() == {"accounting", "noise", "sampling"}


def test_a_bare_number_counts_poisson_sampling_that_picks_the_canaries():
    accounted = simulate(config("poisson", "replace", claim={"accountant": True}, canaries=150)).claim
    bare = simulate(config("poisson", "replace", claim={"epsilon": accounted.epsilon}, canaries=150))
    assert bare.claim.sampling == accounted.sampling
    assert (bare.verdict.outcome, bare.verdict.code) == ("PASS", "legs")
    explicit = {"epsilon": accounted.epsilon, "mechanism": True}
    mechanism = simulate(config("poisson", "replace", claim=explicit, canaries=150))
    assert mechanism.claim.sampling is None
    assert mechanism.verdict.outcome == "VIOLATION"
    spread = simulate(config("poisson", "spread", claim={"epsilon": accounted.epsilon}, canaries=150))
    assert spread.claim.sampling is None
