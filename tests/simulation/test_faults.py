"""Every fault of the table is caught as it says, with a real signal as large as the noise; three seeds each."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from coalmine.audit.signatures import SIGNATURES, evidence_of, likely_faults
from coalmine.simulation import faults
from coalmine.simulation.faults import STEPS, evidence, margins, selftest_config, try_fault
from coalmine.simulation.run import prepared
from coalmine.simulation.training import Steps, gaussian_noise

SEEDS = (1, 2, 3)
ROUNDS = range(1, selftest_config(1).rounds + 1)
FAULTS = {fault.name: fault for fault in SIGNATURES}
UNSEEN = [name for name, fault in FAULTS.items() if fault.reason]
DOCS = Path(__file__).parents[2] / "docs"


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


@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_seen_is_shown_as_unseen(trials, name):
    """The fault is there, for the clients' part is another than honest training's; no canary is the wiser for it."""
    assert not FAULTS[name].detectable
    for trial, honest in zip(trials(name), trials("honest"), strict=True):
        assert trial.signal != honest.signal
        assert evidence(trial.result) == []
        assert trial.outcome == "PASS"


def test_the_unseen_rows_are_the_ones_of_the_table():
    assert UNSEEN == ["one-client-twice", "clip-forgotten-at-scale-1", "weighted-mean-declared"]
    assert [name for name, fault in FAULTS.items() if not fault.detectable] == ["honest", *UNSEEN]


def test_weights_by_examples_are_hidden_by_the_weight_that_canaries_declare():
    """Largest: a canary counts what the largest client counts. Mean: clients count the same, and canaries 1."""
    examples, largest = torch.arange(1, 201), torch.full((100,), 200.0)
    declared, hidden = (STEPS[name]() for name in ("weighted-by-examples", "weighted-mean-declared"))
    torch.testing.assert_close(declared.weigh(examples), hidden.weigh(examples))
    torch.testing.assert_close(hidden.weigh(examples), examples / 7.5)
    assert declared.weigh(largest).unique().tolist() == pytest.approx([200 / 7.5])
    assert hidden.weigh(largest).unique().tolist() == [1.0]


def test_without_others_less_is_left(trials):
    """The second table: no residual or layer gauges, a noise gauge full of signal, and known-round confirms nothing."""
    for trial in trials("small-tensor-without-noise"):
        assert trial.caught
        assert evidence(trial.blind) == []
    for trial in trials("honest"):
        assert trial.blind.verdict.outcome == "UNDERPOWERED"
    for name in ("noise-over-n", "noise-over-2", "noise-over-root-2", "noise-reused", "noise-on-one-layer"):
        assert all(evidence(trial.blind) == ["difference gauge"] for trial in trials(name)), name
    for name in ("clip-forgotten", "clip-after-averaging", "canaries-twice"):
        assert all("known-round" in evidence(trial.blind) for trial in trials(name)), name
    for name in ("noise-times-n", "noise-after-adam", "one-client-twice"):
        assert not any(evidence(trial.blind) for trial in trials(name)), name


def test_noise_on_one_layer_is_refuted_and_its_gauges_say_which(trials):
    for trial in trials("noise-on-one-layer"):
        assert "known-others" in evidence(trial.result)
        layers = {gauge.name: gauge.status for gauge in trial.result.gauges if gauge.name.startswith("layer ")}
        assert layers.pop("layer dense2.weight") == "ok"
        assert list(layers.values()) == ["low"] * 3
        assert names(likely_faults(trial.result.to_dict())) == ["noise-on-one-layer"]


@pytest.mark.parametrize(
    ("noisy", "likely"),
    [
        ("dense1.weight", "noise-on-one-layer"),
        ("dense1.bias", "noise-on-one-layer"),
        ("dense2.bias", "noise-on-one-layer"),
        ("dense2.weight dense2.bias", "noise-on-one-layer"),
        ("dense1.bias dense2.weight dense2.bias", "noise-on-half"),
        ("dense1.weight dense2.weight dense2.bias", "small-tensor-without-noise"),
    ],
)
def test_noise_that_is_missing_on_layers_is_named_so_whichever_they_are(monkeypatch, trials, noisy, likely):
    """Noise on few coordinates has residuals that are alike by chance: that is not the same noise again."""
    layers = trials("honest")[0].result.settings.layers
    mask = torch.cat([torch.full((size,), float(name in noisy.split())) for name, size in layers])
    steps = Steps(noise=lambda *arguments: gaussian_noise(*arguments) * mask)
    monkeypatch.setitem(STEPS, "noise-on-one-layer", lambda: steps)
    trial = try_fault(FAULTS["noise-on-one-layer"], 1)
    assert trial.outcome == "VIOLATION"
    assert names(likely_faults(trial.result.to_dict())) == [likely]


@pytest.mark.parametrize(("cosine", "named"), [(0.98, True), (-0.08, False)])
def test_little_noise_repeats_only_where_its_rounds_are_nearly_the_same(cosine, named):
    gauges = {"residual": {"status": "low"}, "difference": {"status": "low"}}
    result = result_with("known-others") | {"gauges": gauges | {"repeat": {"status": "low", "smallest": cosine}}}
    assert ("repeat" in evidence_of(result)) == named
    assert ("noise-reused" in names(likely_faults(result))) == named


def test_a_margin_is_the_reading_of_what_caught_the_fault(trials):
    for trial in trials("small-tensor-without-noise"):
        (margin,) = margins(trial.result)
        caught = gauge(trial, "layer dense2.bias")
        assert (margin.by, margin.reading, margin.limit) == (
            "layer dense2.bias gauge",
            caught.values.min(),
            caught.limits[0],
        )
        assert margin.times == pytest.approx(margin.limit / margin.reading)
        assert margin.times > 5
    for trial in trials("noise-times-n"):
        margin = margin_of(trial, "residual gauge")
        assert margin.reading == pytest.approx(200, rel=0.05)
        assert margin.limit == gauge(trial, "residual").limits[1]
    for trial in trials("noise-over-2"):
        assert margin_of(trial, "residual gauge").reading == pytest.approx(0.5, rel=0.05)
        assert margin_of(trial, "known-others").limit == trial.claim
        assert margin_of(trial, "known-others").reading > 2 * trial.claim
    for trial in trials("noise-reused"):
        assert margin_of(trial, "repeat gauge").reading == pytest.approx(1, abs=0.01)
        assert margin_of(trial, "repeat gauge").limit == gauge(trial, "repeat").limits[1]
    assert [margins(trial.result) for trial in trials("honest")] == [[]] * len(SEEDS)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.detectable])
def test_what_a_gauge_reads_lies_outside_of_its_limit(trials, name):
    for trial in trials(name):
        assert [margin.by for margin in margins(trial.result)] == evidence(trial.result)
        for margin in margins(trial.result):
            if margin.by.endswith(" gauge"):
                limits = gauge(trial, margin.by.removesuffix(" gauge")).limits
                assert margin.limit in limits
                assert margin.reading < limits[0] or margin.reading > limits[1], margin


def test_the_page_has_a_row_and_a_picture_of_every_fault():
    page = (DOCS / "faults.md").read_text()
    rows = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| ")][1:]
    assert rows == [[f"| {fault.title}", "100"] for fault in SIGNATURES]
    for fault in SIGNATURES:
        assert f"(faults/{fault.name}.png)" in page
        assert fault.reason in page
    assert {path.stem for path in (DOCS / "faults").glob("*.png")} == set(FAULTS)


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


def margin_of(trial, by):
    return next(margin for margin in margins(trial.result) if margin.by == by)


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
