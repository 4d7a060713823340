"""Every fault of the table is caught as it says, with a real signal as large as the noise; three seeds each."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from coalmine.audit.signatures import SIGNATURES, evidence_of, likely_faults
from coalmine.simulation import faults
from coalmine.simulation.faults import STEPS, evidence, selftest_config, try_fault
from coalmine.simulation.run import prepared
from coalmine.simulation.training import Steps

SEEDS = (1, 2, 3)
ROUNDS = range(1, selftest_config(1).rounds + 1)
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


def test_the_real_signal_is_longer_than_the_noise_in_every_round(trials):
    """So the faults are caught under dilution; 1.41 is the noise gauge of a signal as long as the noise."""
    for trial in trials("honest"):
        assert len(trial.signal) == len(ROUNDS)
        assert min(trial.signal) >= 1
        assert gauge(trial, "noise").values == pytest.approx([(1 + x * x) ** 0.5 for x in trial.signal], abs=0.05)
        assert gauge(trial, "noise").smallest > 1.41


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
    """The second table: no residual or layer gauges, a noise gauge full of signal, and known-round confirms nothing."""
    for trial in trials("small-tensor-without-noise"):
        assert trial.caught
        assert evidence(trial.blind) == []
    for trial in trials("honest"):
        assert trial.blind.verdict.outcome == "UNDERPOWERED"
    for name in ("noise-over-n", "noise-over-2", "noise-over-root-2", "noise-reused"):
        assert all(evidence(trial.blind) == ["difference gauge"] for trial in trials(name)), name
    for name in ("clip-forgotten", "clip-after-averaging", "canaries-twice"):
        assert all("known-round" in evidence(trial.blind) for trial in trials(name)), name
    for name in ("noise-times-n", "noise-after-adam", "one-client-twice"):
        assert not any(evidence(trial.blind) for trial in trials(name)), name


@pytest.fixture(scope="module")
def rounds():
    """Of each round of a run: the average of what came in, the model delta without its noise, and the clip norm."""
    made = {}

    def get(name):
        if name not in made:
            config = selftest_config(1)
            steps, seen = STEPS[name](), []

            def aggregate(clients, canaries, noise, count, clip_norm):
                model_delta = steps.aggregate(clients, canaries, noise, count, clip_norm)
                seen.append(((clients + canaries) / count, model_delta - noise / count, clip_norm))
                return model_delta

            with prepared(
                replace(config, engine=config.engine.resolved()), None, replace(steps, aggregate=aggregate)
            ) as training:
                for _ in training.rounds(training.initial_state()):
                    pass
            made[name] = seen
        return made[name]

    return get


def test_a_clip_after_averaging_bites_in_every_round(rounds):
    """The average is longer than the clip norm, and is brought to it; single updates are left as they were sent."""
    assert len(rounds("clip-after-averaging")) == len(ROUNDS)
    for mean, released, clip_norm in rounds("clip-after-averaging"):
        assert torch.linalg.vector_norm(mean) > 1.2 * clip_norm
        assert float(torch.linalg.vector_norm(released)) == pytest.approx(clip_norm, rel=1e-3)
        torch.testing.assert_close(released, mean * clip_norm / torch.linalg.vector_norm(mean), rtol=0, atol=1e-6)


def test_a_forgotten_clip_is_another_fault_than_a_clip_after_averaging(rounds, trials):
    """They start from the same updates and release different deltas; only one of them leaves more than noise behind."""
    (mean, forgotten, _), (same_mean, clipped, _) = (
        rounds(name)[0] for name in ("clip-forgotten", "clip-after-averaging")
    )
    torch.testing.assert_close(mean, same_mean)
    torch.testing.assert_close(forgotten, mean, rtol=0, atol=1e-6)
    assert torch.linalg.vector_norm(clipped) < 0.8 * torch.linalg.vector_norm(forgotten)
    for without, after in zip(trials("clip-forgotten"), trials("clip-after-averaging"), strict=True):
        assert gauge(without, "residual").status == gauge(without, "repeat").status == "ok"
        assert gauge(after, "residual").flagged == tuple(ROUNDS)
        assert gauge(after, "residual").status == "warning"
        assert gauge(after, "repeat").smallest > 0.5
        assert "clip-after-averaging" not in names(likely_faults(without.result.to_dict()))
        assert names(likely_faults(after.result.to_dict())) == ["clip-after-averaging"]


def test_a_forgotten_clip_hides_from_canaries_of_the_clip_norm_itself(monkeypatch):
    """Why canaries are sent at ten times the clip norm: at once it, there is nothing to clip."""
    config = selftest_config(1)
    shy = replace(config, canaries=replace(config.canaries, scale=1.0))
    monkeypatch.setattr(faults, "selftest_config", lambda seed: shy)
    assert evidence(try_fault(FAULTS["clip-forgotten"], 1).result) == []


def test_a_run_has_its_signature_whether_or_not_it_shows_what_it_may():
    """Noise after Adam leaves traces in the residuals of some runs; a clip after averaging also lifts known-round."""
    for extra in ([], ["repeat"], ["high residual"], ["repeat", "high residual"]):
        assert "noise-after-adam" in names(likely_faults(result_with("known-others", *extra)))
    found = likely_faults(result_with("known-others", "known-round", "repeat", "high residual"))
    assert names(found) == ["clip-after-averaging"]
    found = likely_faults(result_with("known-others", "known-round", "all-iterates"))
    assert names(found) == ["clip-forgotten", "canaries-twice", "weighted-by-examples"]


def gauge(trial, name):
    return next(gauge for gauge in trial.result.gauges if gauge.name == name)


def names(found):
    return [fault.name for fault in found]


def result_with(*evidence):
    """As much of a result as says this."""
    rungs = [word for word in evidence if word in ("all-iterates", "known-round", "known-others")]
    gauges = {"repeat": "low", "residual": "warning"}
    return {
        "adversaries": {name: {"verdict": "VIOLATION"} for name in rungs},
        "gauges": {word.split()[-1]: {"status": gauges[word.split()[-1]]} for word in evidence if word not in rungs},
    }


def test_every_fault_changes_a_step_of_the_honest_loop():
    for name, make in STEPS.items():
        assert (make() == Steps()) == (name == "honest")
