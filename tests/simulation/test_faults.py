"""Every fault of the table is caught as it says, with a real signal as large as the noise; three seeds each."""

import pytest

pytest.importorskip("torch")

from coalmine.audit.signatures import SIGNATURES, evidence_of, likely_faults
from coalmine.simulation.faults import STEPS, evidence, try_fault
from coalmine.simulation.training import Steps

SEEDS = (1, 2, 3)
FAULTS = {fault.name: fault for fault in SIGNATURES}


@pytest.fixture(scope="module")
def trials():
    """Each run is made once, when the first test asks for it."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = [try_fault(FAULTS[name], seed) for seed in SEEDS]
        return made[name]

    return get


def test_an_honest_run_passes(trials):
    for trial in trials("honest"):
        assert trial.outcome == "PASS"
        assert evidence(trial.result) == []
        assert likely_faults(trial.result.to_dict()) == []
        noise = next(gauge for gauge in trial.result.gauges if gauge.name == "noise")
        assert noise.largest > 1.2  # the signal is about as long as the noise: 1.41 if equally so in every round


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.detectable])
def test_a_detectable_fault_is_caught_as_its_signature_says(trials, name):
    for trial in trials(name):
        seen = evidence_of(trial.result.to_dict())
        assert set(FAULTS[name].moves) <= seen, (trial.seed, seen)
        assert not set(FAULTS[name].spares) & seen, (trial.seed, seen)
        likely = likely_faults(trial.result.to_dict())
        assert FAULTS[name].meaning in [fault.meaning for fault in likely], trial.seed


@pytest.mark.parametrize("name", [name for name, f in FAULTS.items() if f.detectable and name != "noise-times-n"])
def test_less_privacy_than_claimed_is_a_violation(trials, name):
    assert [trial.outcome for trial in trials(name)] == ["VIOLATION"] * len(SEEDS)


def test_too_much_noise_is_a_warning_not_a_violation(trials):
    assert [trial.outcome for trial in trials("noise-times-n")] == ["PASS"] * len(SEEDS)


def test_what_cannot_be_seen_is_shown_as_unseen(trials):
    assert FAULTS["one-client-twice"].reason
    for trial in trials("one-client-twice"):
        assert evidence(trial.result) == []


def test_without_others_less_is_left(trials):
    """The second table: the layer gauge and the residual are gone, and known-round confirms nothing."""
    for trial in trials("small-tensor-without-noise"):
        assert trial.caught
        assert evidence(trial.blind) == []
    for trial in trials("honest"):
        assert trial.blind.verdict.outcome == "UNDERPOWERED"
    assert all(evidence(trial.blind) for trial in trials("noise-over-2"))


def test_every_fault_changes_a_step_of_the_honest_loop():
    for name, make in STEPS.items():
        assert (make() == Steps()) == (name == "honest")
