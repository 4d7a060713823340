import numpy as np
import pytest

from coalmine import Audit
from coalmine.evidence.gauges.training import ALL_NOISE, FEWEST_ROUNDS, Training
from coalmine.log.recorded import WithoutOthers
from coalmine.verification import verify_run

GRADIENT, MOVED, SIGNAL, TRAINED = (
    each.name for each in (Training.GRADIENT, Training.MOVED, Training.SIGNAL, Training.TRAINED)
)
LAYERS = [("embedding", 1_200), ("lora_A", 500), ("lora_B", 300)]
DIM = 2_000
STD = 0.01  # of the noise in a release


def honest(rng, t):
    """Small gradients that are sparse in the embedding; lora_A has none in the first two rounds."""
    parts = [np.zeros(1_200), rng.normal(size=500) * 0.005, rng.normal(size=300) * 0.02]
    parts[0][rng.integers(0, 1_200, size=3)] = 0.3
    if t <= 2:
        parts[1][:] = 0
    return np.concatenate(parts)


def train(others_of=honest, moved=1.0, *, rounds=12, seed=0, layers=LAYERS, final=True, make=None, **settings):
    """An audit of a loop with noise multiplier 1; `moved` times its steps is how far the model gets."""
    rng = np.random.default_rng(seed)
    given = {"canaries": 60, "seed": b"tests only", "delta": 1e-5, "rounds": rounds} | settings
    audit = Audit(DIM, layers=layers, **given) if make is None else make(**given)
    model = initial = rng.normal(size=DIM)
    for t in range(1, rounds + 1):
        present = audit.canaries_in_round(t)
        others = others_of(rng, t)
        canaries = np.concatenate(list(_flat(audit.updates(present, clip_norm=1.0))))
        release = (canaries + others + rng.normal(size=DIM)) / 100
        audit.observe_round(
            t, _like(audit, release), present=present, others=_like(audit, others / 100), noise_std=STD, clip_norm=0.01
        )
        model = model + moved * release
    if final:
        audit.observe_final(_like(audit, model), initial=_like(audit, initial))
    return audit


def _flat(value):
    return [np.asarray(part).ravel() for part in value.values()] if isinstance(value, dict) else [np.asarray(value)]


def _like(audit, vector):
    if not isinstance(audit.update(0, 1.0), dict):
        return vector
    edges = np.cumsum([size for _, size in LAYERS])[:-1]
    return dict(zip([name for name, _ in LAYERS], np.split(vector, edges), strict=True))


def by_name(result):
    return {gauge.name: gauge for gauge in result.gauges}


def test_honest_runs_are_never_flagged():
    for seed in range(10):
        result = train(seed=seed, rounds=8).result(claim=8.0)
        gauges = by_name(result)
        assert [gauges[name].status for name in (MOVED, GRADIENT, SIGNAL)] == ["ok"] * 3, seed
        assert not any(note.startswith("training") for note in result.notes)


def test_weights_that_never_move_bar_a_pass_and_are_named():
    assert train().result(claim=8.0).verdict.outcome == "PASS"
    result = train(moved=0.0).result(claim=8.0)
    assert (result.verdict.outcome, result.verdict.code) == ("UNDERPOWERED", "training")
    assert "no weight moved" in result.verdict.reason
    assert by_name(result)[MOVED].largest == 0
    assert any("all 3 layers never moved" in note for note in result.notes)
    assert "final-update" not in result.adversaries


def test_missing_noise_is_still_a_violation_when_nothing_moved():
    result = train(moved=0.0).result(claim=1.0)
    assert result.verdict.outcome == "VIOLATION"


def test_one_layer_that_never_moved_is_named_and_the_verdict_stands():
    scale = np.concatenate([np.ones(1_200), np.zeros(500), np.ones(300)])
    result = train(moved=scale).result(claim=8.0)
    assert result.verdict.outcome == "PASS"
    assert by_name(result)[MOVED].status == "warning"
    assert any("1 of 3 layers (lora_A) never moved" in note for note in result.notes)


def test_a_layer_without_a_gradient_is_named():
    def no_adapter(rng, t):
        return np.concatenate([honest(rng, t)[:1_200], np.zeros(500), honest(rng, t)[1_700:]])

    result = train(no_adapter).result(claim=8.0)
    assert by_name(result)[GRADIENT].largest == pytest.approx(2 / 3)
    assert any("1 of 3 layers (lora_A) received noise, but no gradient in 12 rounds" in n for n in result.notes)
    assert result.verdict.outcome == "PASS"


def test_a_short_run_names_no_layer():
    """LoRA's A has no gradient before B has moved, so a gradient of 0 in the first rounds says nothing."""
    result = train(rounds=FEWEST_ROUNDS - 1, final=False).result(claim=8.0)
    assert not {MOVED, GRADIENT, SIGNAL} & by_name(result).keys()


def test_no_gradient_anywhere_bars_a_pass_of_a_trained_model_only():
    def nothing(rng, t):
        return np.zeros(DIM)

    result = train(nothing).result(claim=8.0)
    assert (result.verdict.outcome, result.verdict.code) == ("UNDERPOWERED", "training")
    assert "no layer received a gradient" in result.verdict.reason
    assert train(nothing, final=False).result(claim=8.0).verdict.outcome == "PASS"


def test_a_layer_of_noise_alone_is_named():
    def weak(rng, t):
        whole = honest(rng, t)
        whole[1_200:1_700] = 1e-4 / np.sqrt(500)
        return whole

    result = train(weak).result(claim=8.0)
    gauge = by_name(result)[SIGNAL]
    assert gauge.smallest == pytest.approx(1e-4 * np.sqrt(12), rel=1e-6)
    assert gauge.smallest < ALL_NOISE
    assert any("(lora_A) was updated by noise alone" in note for note in result.notes)
    assert result.verdict.outcome == "PASS"


def test_the_signal_is_what_the_best_observer_can_tell():
    """The log likelihood ratio of releases with and without a layer's gradients lies so many standard deviations apart."""
    kept = []

    def remembered(rng, t):
        kept.append(honest(rng, t))
        return kept[-1]

    gauge = by_name(train(remembered).result())[SIGNAL]
    signal = np.concatenate([others[1_200:1_700] for others in kept])  # lora_A, in units of the noise
    rng = np.random.default_rng(1)
    noise = np.array([rng.normal(size=signal.size) @ signal for _ in range(4_000)])
    apart = (signal @ signal) / noise.std()
    assert gauge.smallest == pytest.approx(apart, rel=5 / np.sqrt(2 * 4_000))


def test_a_model_in_blocks_has_the_same_gauges():
    shape = {name: np.zeros(size) for name, size in LAYERS}
    blocks = [700, 1_300]
    cut = train(make=lambda **given: Audit.for_model(shape, blocks=blocks, **given))
    whole = train()
    seen, wanted = by_name(cut.result(claim=8.0)), by_name(whole.result(claim=8.0))
    assert seen[SIGNAL].smallest == pytest.approx(wanted[SIGNAL].smallest, rel=1e-6)
    assert seen[SIGNAL].largest == pytest.approx(wanted[SIGNAL].largest, rel=1e-6)
    frozen = train(moved=0.0, make=lambda **given: Audit.for_model(shape, blocks=blocks, **given)).result(claim=8.0)
    assert frozen.verdict.code == "training"


def test_without_layers_only_the_whole_model_can_be_seen_to_stand_still():
    assert train(layers=None).result(claim=8.0).verdict.outcome == "PASS"
    result = train(layers=None, moved=0.0).result(claim=8.0)
    assert result.verdict.code == "training"
    assert any("the model never moved" in note for note in result.notes)


def test_a_log_without_others_tells_nothing_of_gradients(tmp_path):
    audit = train(directory=tmp_path / "run")
    audit.finish(claim=8.0)
    audit.close()
    assert all(check.held is not False for check in verify_run(tmp_path / "run", b"tests only"))
    assert all(item.layer_others is None for item in WithoutOthers(train().log).rounds())


def test_layers_with_a_gradient_that_never_move_are_no_training():
    """As if one group of parameters had a learning rate of 0: noise alone moves the others."""

    def only_last(rng, t):
        return np.concatenate([np.zeros(1_700), rng.normal(size=300) * 0.02])

    moved = np.concatenate([np.ones(1_700), np.zeros(300)])
    result = train(only_last, moved).result(claim=20.0)
    assert result.verdict.code == "training"
    assert "the layers that received a gradient never moved" in result.verdict.reason
    assert by_name(result)[TRAINED].largest == 0
    assert "training: no layer that received a gradient has moved" in result.notes
    assert TRAINED not in by_name(train(only_last).result(claim=20.0))
