import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from requires import require

torch = require("torch")
require("opacus")
from click.testing import CliRunner  # noqa: E402
from opacus_training import dimension, forget_clip, halve_noise, make, run_epoch, train  # noqa: E402

from coalmine import Audit, Claim, mechanism_epsilon  # noqa: E402
from coalmine.audit.adversaries import ladder  # noqa: E402
from coalmine.cli.compare import compare  # noqa: E402
from coalmine.integrations.opacus import attach  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:divide by zero encountered in log",  # Opacus, at sample rate 1
    "ignore:Secure RNG turned off",
    "ignore:Optimal order is",
    "ignore:Full backward hook",
    "ignore:.*alphas",
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small models: threads would only wait for each other
    yield
    torch.set_num_threads(before)


def cosines(audit):
    return np.array([item.cosines for item in audit.log.rounds()])


def residual_cosines(audit):
    return np.array([item.residual_cosines for item in audit.log.rounds()])


def audit_of(optimizer, canaries=20):
    return Audit(dimension(optimizer), canaries=canaries, seed=b"tests only", delta=1e-5)


def test_known_others_meets_the_accountant_on_learnable_data():
    """All examples in all steps: nothing is amplified, so accountant, mechanism and audit speak of one epsilon."""
    audit, attached, engine = train()
    claim = attached.noise_claim()
    assert claim.epsilon == pytest.approx(mechanism_epsilon(1.0, delta=1e-5, participations=5))
    assert engine.get_epsilon(1e-5) == pytest.approx(claim.epsilon, rel=0.01)
    result = audit.result(claim=claim)
    row = result.adversaries["known-others"].headline
    assert row.estimate.interval.low <= claim.epsilon <= row.estimate.interval.high
    assert row.presentations == 5
    assert result.verdict.outcome == "PASS"
    assert "final-update" in result.adversaries
    gauges = {gauge.name: gauge for gauge in result.gauges}
    assert gauges["dilution"].largest > 3  # the real signal is large: the weaker rungs are blind here
    assert gauges["residual"].status == "ok"


def test_the_final_model_moves_towards_the_canaries():
    """A step goes against its gradient, so canaries are subtracted there, and the model has them with a plus."""
    audit, _, _ = train(learnable=False, canaries=100)
    found = {scores.rung: scores for scores in ladder(audit.log, audit.settings)}
    scores = found["final-update"].observed  # mean √5/√(1 + dilution) without sign errors
    assert scores.mean() > 1.5
    assert abs(found["final-update"].unobserved.mean()) < 5 / np.sqrt(found["final-update"].unobserved.size)


@pytest.mark.parametrize("learnable", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_noise_silently_halved_is_a_violation(learnable, mode):
    audit, attached, engine = train(learnable=learnable, mode=mode, fault=halve_noise)
    assert engine.get_epsilon(1e-5) < 12  # the accountant saw nothing
    result = audit.result(claim=attached.noise_claim())
    assert result.verdict.outcome == "VIOLATION"
    assert result.adversaries["known-others"].verdict.outcome == "VIOLATION"
    residual = next(gauge for gauge in result.gauges if gauge.name == "residual")
    assert residual.status == "low"
    assert residual.largest == pytest.approx(0.5, abs=0.02)


def test_halved_noise_shows_in_the_gauge_where_others_hide_it():
    """Without known-others the estimate of the weaker rungs misses it on learnable data; a gauge does not."""
    audit, attached, _ = train(fault=halve_noise)
    result = audit.result(claim=attached.noise_claim())
    assert result.adversaries["known-round"].verdict.outcome != "VIOLATION"
    assert next(gauge for gauge in result.gauges if gauge.name == "difference").status == "low"


@pytest.mark.parametrize("other", [{"mode": "ghost"}, {"physical": 32}, {"physical": 32, "mode": "ghost"}])
def test_modes_and_physical_batches_make_no_difference(other):
    """One noise a logical batch, drawn after the canaries: same seed, same cosines, whatever way the sum was had."""
    settings = {"steps": 6, "examples": 200, "batch": 100, "sample_rate": 0.5, "canaries": 100}
    plain, _, engine = train(**settings)
    same, _, other_engine = train(**settings, **other)
    assert cosines(same) == pytest.approx(cosines(plain), abs=1e-5)
    assert residual_cosines(same) == pytest.approx(residual_cosines(plain), abs=1e-5)
    assert other_engine.accountant.history == engine.accountant.history == [(1.0, 0.5, 6)]


def test_canaries_are_drawn_as_examples_are():
    """Poisson: how often a canary is shown is binomial, and each group meets the mechanism at its own number."""
    audit, attached, engine = train(steps=30, examples=500, batch=50, sample_rate=0.1, canaries=600)
    present = [item.present.size for item in audit.log.rounds()]
    assert np.mean(present) == pytest.approx(60, abs=5 * np.sqrt(600 * 0.1 * 0.9 / 30))
    shown = {s.presentations: s for s in ladder(audit.log, audit.settings) if s.rung == "known-others"}
    for times, scores in shown.items():
        assert scores.observed.mean() == pytest.approx(np.sqrt(times), abs=4.5 / np.sqrt(scores.observed.size))
    result = audit.result(claim=attached.noise_claim())
    assert result.verdict.outcome == "PASS"
    assert len(result.adversaries["known-others"].rows) >= 4
    amplified = Claim(epsilon=engine.get_epsilon(1e-5), accounting="amplified")
    judged = audit.result(claim=amplified)
    assert amplified.epsilon < attached.noise_claim().epsilon
    assert judged.verdict.outcome == "UNDERPOWERED"  # not refuted, and nothing here could confirm it
    assert "not about an attacker who knows the rounds" in judged.adversaries["known-others"].verdict.reason


def test_through_the_clip():
    """Canaries ten times too long come out of an honest clip at the clip norm; a forgotten clip is a violation."""
    audit, attached, _ = train(through_clip=True, canaries=100)
    result = audit.result(claim=attached.noise_claim())
    assert result.verdict.outcome == "PASS"
    assert next(gauge for gauge in result.gauges if gauge.name == "residual").status == "ok"
    audit, attached, _ = train(through_clip=True, canaries=100, fault=forget_clip)
    assert audit.result(claim=attached.noise_claim()).verdict.outcome == "VIOLATION"


def test_a_forgotten_clip_is_invisible_behind_it():
    audit, attached, _ = train(canaries=100, fault=forget_clip)
    assert audit.result(claim=attached.noise_claim()).adversaries["known-others"].verdict.outcome != "VIOLATION"


def test_through_the_clip_or_behind_it_is_the_same_when_the_clip_is_right():
    settings = {"steps": 4, "examples": 200, "batch": 100, "sample_rate": 0.5, "canaries": 50, "physical": 32}
    behind, _, _ = train(**settings)
    through, _, _ = train(**settings, through_clip=True)
    assert cosines(through) == pytest.approx(cosines(behind), abs=2e-5)
    assert residual_cosines(through) == pytest.approx(residual_cosines(behind), abs=2e-5)


def test_adaptive_clipping_is_judged_by_the_noise_of_its_gradients():
    settings = {
        "clipping": "adaptive", "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0, "min_clipbound": 0.01, "unclipped_num_std": 1.0,
    }  # fmt: skip
    audit, attached, _ = train(**settings)
    update_noise = (1 - 1 / 4) ** -0.5
    claim = attached.noise_claim()
    assert claim.epsilon == pytest.approx(mechanism_epsilon(update_noise, delta=1e-5, participations=5))
    norms = [item.clip_norm for item in audit.log.rounds()]
    assert len(set(norms)) == len(norms)
    result = audit.result(claim=claim)
    assert result.verdict.outcome == "PASS"
    assert next(gauge for gauge in result.gauges if gauge.name == "residual").status == "ok"


def test_without_noise_and_without_canaries_in_a_step_the_audit_goes_on():
    audit, _, _ = train(noise_multiplier=0.0, sample_rate=0.001, canaries=10, steps=2)
    assert audit.last_round == 2


def test_detached_the_optimizer_is_as_it_was():
    model, optimizer, loss, loader, engine = make(examples=50, batch=50)
    audit = audit_of(optimizer)
    hook = optimizer.step_hook
    attached = attach(optimizer, audit, sample_rate=1.0, through_clip=True)
    attached.detach()
    attached.detach()  # nothing is left to take out
    assert optimizer.step_hook is hook
    assert not {"add_noise", "clip_and_accumulate"} & vars(optimizer).keys()
    run_epoch(model, optimizer, loss, loader, audit, steps=1)
    assert audit.last_round == 0
    assert engine.accountant.history == [(1.0, 1.0, 1)]


def test_an_audit_goes_on_after_a_restart(tmp_path):
    model, optimizer, loss, loader, _ = make(examples=50, batch=50)
    initial = torch.cat([p.detach().reshape(-1) for p in optimizer.params]).clone()
    settings = {"canaries": 20, "seed": b"tests only", "delta": 1e-5, "directory": tmp_path}
    audit = Audit(dimension(optimizer), **settings)
    attached = attach(optimizer, audit, sample_rate=1.0)
    run_epoch(model, optimizer, loss, loader, audit, steps=1)
    attached.detach()
    audit.directory.close()
    again = Audit(dimension(optimizer), **settings)
    attached = attach(optimizer, again, sample_rate=1.0)
    run_epoch(model, optimizer, loss, loader, again, steps=2)
    assert again.last_round == 2
    attached.finish(initial=initial)
    assert attached.noise_claim().participations == 2  # the round before the restart counts
    assert "final-update" in again.result().adversaries


def test_a_finished_audit_is_refused_before_training(tmp_path):
    """As in a second run of a script in the same folder: better now than in its first step."""
    model, optimizer, loss, loader, _ = make(examples=50, batch=50)
    for directory, says in [(tmp_path, f"{tmp_path} holds a finished audit: name another"), (None, "make a new one")]:
        settings = {"canaries": 20, "seed": b"tests only", "delta": 1e-5, "directory": directory}
        audit = Audit(dimension(optimizer), **settings)
        attached = attach(optimizer, audit, sample_rate=1.0)
        run_epoch(model, optimizer, loss, loader, audit, steps=1)
        attached.finish()
        attached.detach()
        if directory is not None:
            audit.directory.close()
            audit = Audit(dimension(optimizer), **settings)
        with pytest.raises(ValueError, match=says):
            attach(optimizer, audit, sample_rate=1.0)
        audit.rewind_to(1)
        attach(optimizer, audit, sample_rate=1.0).detach()


def test_what_cannot_be_audited_is_refused():
    _, optimizer, _, _, _ = make(examples=50, batch=50)
    audit = audit_of(optimizer)
    with pytest.raises(ValueError, match="make_private"):
        attach(optimizer.original_optimizer, audit, sample_rate=1.0)
    with pytest.raises(ValueError, match=r"sample_rate must lie in \(0, 1\]"):
        attach(optimizer, audit, sample_rate=0.0)
    with pytest.raises(ValueError, match="scale needs through_clip"):
        attach(optimizer, audit, sample_rate=1.0, scale=10.0)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="scale must be "):
            attach(optimizer, audit, sample_rate=1.0, through_clip=True, scale=scale)
    with pytest.raises(ValueError, match="must have dim = 9"):
        attach(optimizer, Audit(100, canaries=10, seed=1, delta=1e-5), sample_rate=1.0)
    _, ghost, _, _, _ = make(examples=50, batch=50, mode="ghost")
    with pytest.raises(ValueError, match="through_clip needs rows"):
        attach(ghost, audit, sample_rate=1.0, through_clip=True)
    attached = attach(optimizer, audit, sample_rate=1.0)
    with pytest.raises(ValueError, match="audited already"):
        attach(optimizer, audit, sample_rate=1.0)
    with pytest.raises(ValueError, match="one noise multiplier"):
        attached.noise_claim()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_example(tmp_path, mode):
    """Trains on digits, keeps its noise claim, and the accountant's smaller epsilon is not refuted."""
    require("sklearn")
    script = Path(__file__).parents[2] / "examples" / "opacus" / "train.py"
    done = subprocess.run(
        [sys.executable, str(script), "--epochs", "2", "--mode", mode, "--out", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["verdict"] == "PASS"
    assert (result["trainer"], result["task"]) == ("opacus", "digits")
    assert result["accounted_epsilon"] < result["claimed_epsilon"]
    assert result["if_accounted_were_claimed"]["verdict"] != "VIOLATION"
    assert result["rounds"] == len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 20
    check_analytical_epsilon(tmp_path, result)


def check_analytical_epsilon(directory, result):
    """That of canaries shown as often as the headline's, in `coalmine compare` too; the claim is for the most shown."""
    headline = result["adversaries"]["known-others"]
    assert headline["presentations"] == result["presentations"] < result["most_presentations"]
    assert result["claim_participations"] == result["most_presentations"]
    for key, times in [("analytical_epsilon", "presentations"), ("most_exposed_epsilon", "most_presentations")]:
        assert result[key] == mechanism_epsilon(1.0, delta=1e-5, participations=result[times])
    assert result["most_exposed_epsilon"] == result["claimed_epsilon"]
    assert headline["interval"][0] <= result["analytical_epsilon"] <= headline["interval"][1]
    (shown,) = json.loads(CliRunner().invoke(compare, ["--json", str(directory)]).stdout)
    assert (shown["presentations"], shown["analytical_epsilon"]) == (
        headline["presentations"], result["analytical_epsilon"]
    )  # fmt: skip
