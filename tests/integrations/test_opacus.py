import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from requires import require

torch = require("torch")
require("opacus")
from click.testing import CliRunner  # noqa: E402
from opacus import PrivacyEngine  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402
from opacus_training import (  # noqa: E402
    WARNINGS,
    dimension,
    forget_clip,
    halve_noise,
    make,
    quoted,
    run_epoch,
    spare_last_bias,
    start,
    train,
)  # fmt: skip
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from coalmine import Audit, Claim, mechanism_epsilon  # noqa: E402
from coalmine.cli.compare import compare  # noqa: E402
from coalmine.estimators.sampling import Poisson  # noqa: E402
from coalmine.evidence.ladder import ladder  # noqa: E402
from coalmine.integrations.opacus import audited, named_layers, unaudited  # noqa: E402
from coalmine.integrations.opacus.gradients import OneProcess  # noqa: E402
from coalmine.integrations.opacus.steps import _later_sum  # noqa: E402
from coalmine.integrations.recorder import RunRecorder  # noqa: E402
from coalmine.integrations.setup import refuse_result  # noqa: E402
from coalmine.log.run_directory import RunDirectory  # noqa: E402
from coalmine.verification import verify_run  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # models are small: threads would wait for each other
    yield
    torch.set_num_threads(before)


def cosines(audit):
    return np.array([item.cosines for item in audit.log.rounds()])


def residual_cosines(audit):
    return np.array([item.residual_cosines for item in audit.log.rounds()])


def audit_of(optimizer, canaries=20):
    return Audit(dimension(optimizer), canaries=canaries, seed=b"tests only", delta=1e-5)


def test_known_others_agrees_with_the_accountant_on_learnable_data():
    """All examples in all steps: without amplification, accountant, mechanism and audit give the same epsilon."""
    _, result, engine = train()
    claim = result.claim
    assert claim == Claim(
        engine.get_epsilon(1e-5), participations=5, delta=1e-5, unit="row", adjacency="add or remove one"
    )
    assert claim.epsilon == pytest.approx(mechanism_epsilon(1.0, delta=1e-5, participations=5), rel=0.01)
    row = result.adversaries["known-others"].headline
    assert row.estimate.interval.low <= claim.epsilon <= row.estimate.interval.high
    assert row.presentations == 5
    assert result.verdict.outcome == "PASS"
    assert "final-update" in result.adversaries
    gauges = {gauge.name: gauge for gauge in result.gauges}
    assert gauges["dilution"].largest > 3  # the weaker rungs cannot see through such a large signal
    assert gauges["residual"].status == "ok"


def test_the_final_model_moves_towards_the_canaries():
    """A step goes against its gradient, so canaries are subtracted from the gradient and added to the model."""
    audit, _, _ = train(learnable=False, canaries=100)
    found = {scores.rung: scores for scores in ladder(audit.log, audit.settings)}
    scores = found["final-update"].observed  # mean √5/√(1 + dilution) without sign errors
    assert scores.mean() > 1.5
    assert abs(found["final-update"].unobserved.mean()) < 5 / np.sqrt(found["final-update"].unobserved.size)


@pytest.mark.parametrize("learnable", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_half_the_noise_is_a_violation(learnable, mode):
    _, result, engine = train(learnable=learnable, mode=mode, fault=halve_noise)
    assert engine.get_epsilon(1e-5) < 12  # the accountant did not notice
    assert result.verdict.outcome == "VIOLATION"
    assert result.adversaries["known-others"].verdict.outcome == "VIOLATION"
    residual = next(gauge for gauge in result.gauges if gauge.name == "residual")
    assert residual.status == "low"
    assert residual.largest == pytest.approx(0.5, abs=0.02)


def test_a_gauge_detects_half_the_noise_where_others_hide_it():
    """Without known-others, the weaker rungs miss it on learnable data; a gauge does not."""
    _, result, _ = train(fault=halve_noise)
    assert result.adversaries["known-round"].verdict.outcome != "VIOLATION"
    assert next(gauge for gauge in result.gauges if gauge.name == "difference").status == "low"


@pytest.mark.parametrize(
    "other",
    [
        {"mode": "ghost"},
        *(
            pytest.param(other, marks=pytest.mark.full)
            for other in ({"physical": 32}, {"physical": 32, "mode": "ghost"})
        ),
    ],
)
def test_modes_and_physical_batches_give_the_same_cosines(other):
    """Each logical batch gets noise once, after the canaries: the same seed gives the same cosines for every mode."""
    settings = {"steps": 6, "examples": 200, "batch": 100, "sampling_probability": 0.5, "canaries": 100}
    plain, _, engine = train(**settings)
    same, _, other_engine = train(**settings, **other)
    assert cosines(same) == pytest.approx(cosines(plain), abs=1e-5)
    assert residual_cosines(same) == pytest.approx(residual_cosines(plain), abs=1e-5)
    assert other_engine.accountant.history == engine.accountant.history == [(1.0, 0.5, 6)]


@pytest.mark.parametrize("deferred", [False, True])
def test_vectors_kept_between_steps_give_the_same_log(deferred, monkeypatch):
    """On a GPU they are kept, so that a step makes no views of hundreds of parameters."""

    def log_digest(*, keep):
        monkeypatch.setattr(OneProcess, "reuses_memory", property(lambda _: keep, lambda _, value: None), raising=False)
        model, optimizer, loss, loader, _ = make(examples=200, batch=100)
        layers = named_layers(optimizer, model)
        audit = Audit(
            dimension(optimizer), canaries=50, seed=b"tests only", delta=1e-5, layers=layers, deferred=deferred
        )
        audited(optimizer, model, audit=audit, sampling_probability=0.5, through_clip=False)
        run_epoch(model, optimizer, loss, loader, audit, 4)
        run_epoch(model, optimizer, loss, loader, audit, 4)
        assert len(audit.log.numbers) == 4
        return audit.log.digest

    assert log_digest(keep=True) == log_digest(keep=False)


def statuses(result):
    return {item.name: item.status for item in result.audited}


def test_ghost_clipping_at_a_larger_norm_than_the_noise_is_sized_for_is_a_violation():
    """Opacus's own clip schedules change the optimizer's norm, and not the one that the model clips at."""

    def shrink(optimizer):
        optimizer.max_grad_norm = 0.4

    assert train(mode="ghost")[1].verdict.outcome == "PASS"
    assert train(mode="ghost", fault=shrink)[1].verdict.outcome == "VIOLATION"
    assert train(mode="hooks", fault=shrink)[1].verdict.outcome == "PASS"  # there it is the optimizer that clips


@pytest.mark.full
def test_a_sum_longer_than_its_clipped_examples_can_be_is_no_pass(monkeypatch):
    """Canaries behind a forgotten clip do not see it; the length of the sum does."""
    monkeypatch.setattr("coalmine.integrations.opacus.options.MOST_THROUGH_CLIP", 0)
    settings = {"examples": 400, "batch": 100, "canaries": 200, "steps": 8, "observe": True}
    assert train(**settings, through_clip=None)[1].verdict.outcome == "PASS"
    replayed = train(**settings, through_clip=None, fault=forget_clip)[1]
    assert (replayed.verdict.outcome, replayed.verdict.code) == ("VIOLATION", "row")
    result = train(**settings, through_clip=None, fault=forget_clip, replay=False)[1]
    assert (result.verdict.outcome, result.verdict.code) == ("UNDERPOWERED", "pipeline")
    assert statuses(result)["clipping"] == "failed"
    assert "times as long as if each had been clipped" in result.verdict.reason


@pytest.mark.full
def test_a_clip_that_fails_in_an_earlier_physical_batch_is_detected():
    """Canaries are in the last one, but the clipped sum is computed again for all of them."""

    def longer_at_first(optimizer):
        real = optimizer.clip_and_accumulate

        def clip():
            norm = optimizer.max_grad_norm
            if optimizer._check_skip_next_step(pop_next=False):
                optimizer.max_grad_norm = 50 * norm
            real()
            optimizer.max_grad_norm = norm

        optimizer.clip_and_accumulate = clip

    settings = {"examples": 400, "batch": 100, "canaries": 200, "steps": 8, "observe": True, "physical": 30}
    assert train(**settings, through_clip=True)[1].verdict.outcome == "PASS"
    assert train(**settings, through_clip=True, fault=longer_at_first)[1].verdict.outcome != "PASS"


@pytest.mark.full
def test_batches_without_an_audited_step_are_no_pass():
    """A loop that trains on some batches without the private optimizer, or that leaves small batches out."""

    def result(*, skip):
        model, optimizer, loss, loader, _ = make(examples=400, batch=40)
        claim = quoted(rate=0.1, steps=29)
        audited(optimizer, model, data_loader=loader, canaries=200, seed=b"tests only", delta=1e-5, claim=claim)
        for epoch in range(3):
            for number, (data, labels) in enumerate(loader):
                if not (skip and number % 3 == 1) and not (epoch == 0 and number == 0):  # it may begin in mid-epoch
                    optimizer.zero_grad()
                    loss(model(data), labels).backward()
                    optimizer.step()
            for _ in loader:
                pass  # a pass without steps, to evaluate
        return optimizer.audit.finish()

    assert result(skip=False).verdict.outcome == "PASS"
    left_out = result(skip=True)
    assert (left_out.verdict.outcome, left_out.verdict.code) == ("UNDERPOWERED", "pipeline")
    assert statuses(left_out)["sampler"] == "failed"
    assert "differs from it (sampler)" in left_out.verdict.reason
    assert "took no audited step for them" in left_out.verdict.reason


@pytest.mark.full
@pytest.mark.parametrize("leave", ["break", pytest.param("zip", marks=pytest.mark.full)])
def test_a_loop_that_leaves_each_epoch_early_can_pass(leave):
    """It fetches one batch too many in each epoch, and takes no step for it."""
    model, optimizer, loss, loader, _ = make(examples=400, batch=40)
    claim = quoted(rate=0.1, steps=32)
    audited(optimizer, model, data_loader=loader, canaries=200, seed=b"tests only", delta=1e-5, claim=claim)
    for _ in range(4):
        batches = zip(loader, range(8), strict=False) if leave == "zip" else ((batch, 0) for batch in loader)
        for number, ((data, labels), _) in enumerate(batches):
            if leave == "break" and number >= 8:
                break
            optimizer.zero_grad()
            loss(model(data), labels).backward()
            optimizer.step()
        del batches
    result = optimizer.audit.finish()
    assert statuses(result)["sampler"] == "checked"
    assert result.verdict.outcome == "PASS"


def test_a_restart_remembers_what_failed_before_it(tmp_path):
    settings = {"canaries": 50, "seed": b"tests only", "delta": 1e-5, "directory": tmp_path}
    model, optimizer, loss, loader, engine = make(examples=400, batch=40)
    audited(optimizer, model, data_loader=loader, **settings)
    for number, (data, labels) in enumerate(loader):
        if number != 1:
            optimizer.zero_grad()
            loss(model(data), labels).backward()
            optimizer.step()
    optimizer.audit.close()
    model, optimizer, loss, loader, later = make(examples=400, batch=40, seed=1)
    later.accountant.history = list(engine.accountant.history)
    audited(optimizer, model, data_loader=loader, **settings)
    run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=12)
    assert statuses(optimizer.audit.finish())["sampler"] == "failed"


def test_a_restart_without_another_step_keeps_what_the_log_shows(tmp_path):
    settings = {"canaries": 50, "seed": b"tests only", "delta": 1e-5, "directory": tmp_path}
    for restarted in (False, True):
        model, optimizer, loss, loader, _ = make(examples=400, batch=40)
        audited(optimizer, model, data_loader=loader, **settings)
        if not restarted:
            run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=8)
            optimizer.audit.close()
    with pytest.warns(UserWarning, match="the accountant counted 0 steps, and the audit observed 8"):
        result = optimizer.audit.finish(claim=30.0)
    found = {item.name: (item.status, item.detail) for item in result.audited}
    assert found["clipping"] == ("not checked", "no step since the restart")
    assert found["others"][0] == found["tensors"][0] == "checked"
    assert result.verdict is not None
    assert not any("observed no step" in note for note in result.notes)


def test_adaptive_ghost_clipping_clips():
    """Its loss computes the coefficients itself, from the norms."""
    from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(400, 50), torch.randint(0, 10, (400,)))
    model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 10))
    model, optimizer, loss, loader = PrivacyEngineAdaptiveClipping().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=40),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
        target_unclipped_quantile=0.5,
        min_clipbound=0.1,
        max_clipbound=10.0,
        clipbound_learning_rate=0.2,
        max_clipbound_learning_rate=0.2,
        unclipped_num_std=5.0,
    )
    audited(optimizer, model, data_loader=loader, canaries=50, seed=b"tests only", delta=1e-5)
    run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=6)
    assert statuses(optimizer.audit.finish())["clipping"] == "not checked"


def test_parameters_that_are_unfrozen_later_are_named():
    model, optimizer, loss, loader, _ = make(examples=200, batch=50)
    model.extra = nn.Parameter(torch.zeros(3), requires_grad=False)
    audited(optimizer, model, data_loader=loader, canaries=50, seed=b"tests only", delta=1e-5)
    run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=3)
    model.extra.requires_grad = True
    with pytest.warns(UserWarning, match="require gradients but are not in the optimizer: extra"):
        optimizer.audit.finish()


def test_an_audit_without_a_step_says_so():
    model, optimizer, _, loader, _ = make(examples=200, batch=50)
    audited(optimizer, model, data_loader=loader, canaries=50, seed=b"tests only", delta=1e-5)
    result = optimizer.audit.finish()
    assert "the audit observed no step of the optimizer" in result.notes
    assert not any("noise multiplier is 0" in note for note in result.notes)
    assert "checked" not in {status for name, status in statuses(result).items() if name != "participations"}


def test_a_rejected_setting_leaves_the_loader_free():
    model, optimizer, _, loader, _ = make(examples=200, batch=50)
    settings = {"data_loader": loader, "canaries": 50, "seed": b"tests only", "delta": 1e-5}
    with pytest.raises(ValueError, match="on_violation must be"):
        audited(optimizer, model, on_violation="shout", **settings)
    audited(optimizer, model, **settings)


@pytest.mark.parametrize("epsilon", [0, -1.0, float("nan"), "x"])
def test_an_accounted_epsilon_must_be_positive(epsilon):
    model, optimizer, loss, loader, _ = make(examples=200, batch=50)
    audited(optimizer, model, data_loader=loader, canaries=50, seed=b"tests only", delta=1e-5)
    run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=2)
    with pytest.raises((TypeError, ValueError), match="accounted_epsilon must be"):
        optimizer.audit.finish(accounted_epsilon=epsilon)


@pytest.mark.full
def test_canaries_are_sampled_like_examples():
    """Poisson: presentations are binomial, and each group recovers the mechanism's epsilon for its number."""
    audit, result, engine = train(steps=30, examples=500, batch=50, sampling_probability=0.1, canaries=600)
    present = [item.present.size for item in audit.log.rounds()]
    assert np.mean(present) == pytest.approx(60, abs=5 * np.sqrt(600 * 0.1 * 0.9 / 30))
    shown = {s.presentations: s for s in ladder(audit.log, audit.settings) if s.rung == "known-others"}
    for times, scores in shown.items():
        assert scores.observed.mean() == pytest.approx(np.sqrt(times), abs=4.5 / np.sqrt(scores.observed.size))
    times = max(shown)
    mechanism = Claim.mechanism(mechanism_epsilon(1.0, delta=1e-5, participations=times), participations=times)
    assert audit.result(claim=mechanism).verdict.outcome == "PASS"
    assert len(result.adversaries["known-others"].rows) == 3  # the most common numbers, if sampling decides them
    assert result.claim.sampling == Poisson(0.1, rounds=30)
    assert engine.get_epsilon(1e-5) == pytest.approx(result.claim.epsilon)
    assert result.claim.epsilon < mechanism.epsilon
    assert result.verdict.outcome == "UNDERPOWERED"  # the sampler was not observed
    assert {name: str(leg.outcome) for name, leg in result.legs.items()} == {
        "accounting": "PASS", "noise": "PASS", "sampling": "UNDERPOWERED",
    }  # fmt: skip


class Recorder:
    """Keeps the audited items that a recorder receives."""

    def __init__(self, monkeypatch):
        real = RunRecorder.finish

        def finish(recorder, claim, run, **more):
            self.items = {item.name: item for item in run.items}
            return real(recorder, claim, run, **more)

        monkeypatch.setattr(RunRecorder, "finish", finish)


@pytest.mark.full
def test_a_bias_of_ten_numbers_without_noise_is_a_violation():
    """`audited` has a gauge for every parameter, so 10 of 9,648 numbers without noise are detected."""
    optimizer, _ = start(fault=spare_last_bias)
    result = optimizer.audit.finish()
    gauges = {gauge.name: gauge for gauge in result.gauges}
    assert [name for name in gauges if name.startswith("layer ")] == [
        "layer 0.weight", "layer 0.bias", "layer 2.weight", "layer 2.bias",
    ]  # fmt: skip
    assert gauges["layer 2.bias"].status == "low"
    assert result.verdict.outcome == "VIOLATION"
    assert "2.bias" in result.details()


def test_named_layers_accepts_a_module_a_dict_and_a_state_dict():
    model, optimizer, _, _, _ = make(examples=50, batch=50)
    expected = [("0.weight", 7900), ("0.bias", 158), ("2.weight", 1580), ("2.bias", 10)]
    assert dict(model.named_parameters()).keys() >= {"_module.0.weight"}  # GradSampleModule's names
    for given in (model, model._module, dict(model.named_parameters()), model.named_parameters(), model.state_dict()):
        assert named_layers(optimizer, given) == expected
    other = nn.Sequential(nn.Linear(50, 158), nn.ReLU(), nn.Linear(158, 10))
    with pytest.raises(ValueError, match=r"the one of shape \(158, 50\): pass the model that make_private returned"):
        named_layers(optimizer, other)
    for wrong in (None, 3, {}, {"0.weight": 7900}, optimizer):
        with pytest.raises(TypeError, match="model must be a torch module or map parameter names to tensors"):
            named_layers(optimizer, wrong)


def test_audited_requires_exactly_one_seed(tmp_path):
    model, optimizer, _, _, _ = make(examples=50, batch=50)
    settings = {"canaries": 20, "delta": 1e-5, "sampling_probability": 1.0}
    file = tmp_path / "seed"
    file.write_text("17\n")
    with pytest.raises(ValueError, match="exactly one of seed and seed_file must be given, got neither"):
        audited(optimizer, model, **settings)
    with pytest.raises(ValueError, match="exactly one of seed and seed_file must be given, got both"):
        audited(optimizer, model, seed=17, seed_file=file, **settings)
    from_file = audited(optimizer, model, seed_file=file, **settings).audit
    given = audited(unaudited(optimizer), model, seed=17, **settings).audit
    assert given.core.update(0, 1.0) == pytest.approx(from_file.core.update(0, 1.0))


def test_audited_rejects_invalid_settings_before_the_directory_is_created(tmp_path):
    model, optimizer, _, _, _ = make(examples=50, batch=50)
    settings = {"canaries": 20, "seed": 1, "delta": 1e-5, "sampling_probability": 1.0, "directory": tmp_path / "run"}
    for changes in ({"sampling_probability": 0.0}, {"scale": 0.5}, {"canaries": 3}, {"delta": 2.0}):
        with pytest.raises(ValueError, match="must"):
            audited(optimizer, model, **settings | changes)
    with pytest.raises(TypeError, match="model must be"):
        audited(optimizer, 3, **settings)
    assert not (tmp_path / "run").exists()


def test_canaries_go_through_the_clip_by_default(monkeypatch):
    received = Recorder(monkeypatch)
    optimizer, _ = start(canaries=100)
    result = optimizer.audit.finish()
    assert {item.scale for item in optimizer.audit.log.rounds()} == {10.0}
    assert received.items["clipping"].status == "checked"
    assert result.verdict.outcome == "PASS"
    assert received.items["clipping"].detail.startswith("4 canaries of each step entered the optimizer's clip 10 times")
    optimizer, _ = start(canaries=100, fault=forget_clip, learnable=False)
    assert optimizer.audit.finish().verdict.outcome == "VIOLATION"
    optimizer, _ = start(canaries=100, fault=forget_clip)
    assert optimizer.audit.finish().verdict.outcome != "PASS"


def test_the_key_draws_the_few_canaries_that_the_optimizer_clips():
    """The optimizer gets one more batch, of four rows in every step, and not the same ones; or of all of them."""

    def batches(through_clip):
        sizes, rows = [], []

        def count(optimizer):
            real = optimizer.clip_and_accumulate

            def clip():
                first = optimizer.params[0].grad_sample
                sizes.append(len(first))
                if len(first) < 50:
                    rows.append(first.clone())
                real()

            optimizer.clip_and_accumulate = clip

        start(canaries=12, examples=50, batch=50, steps=3, fault=count, through_clip=through_clip, replay=False)
        return sizes, rows

    sizes, few = batches(None)
    assert sizes == [50, 4] * 3
    assert batches(None)[1][0].equal(few[0])
    assert not few[1].equal(few[0])
    sizes, _ = batches("all")
    assert sizes == [50, 12] * 3


@pytest.mark.parametrize("physical", [None, 32])
def test_a_step_measured_beside_the_training_has_the_same_log(physical):
    """A thread sums the clipped examples, measures the round and encodes it; the log is the same bit for bit."""

    def digest(deferred):
        model, optimizer, loss, loader, _ = make(examples=200, batch=100)
        settings = {"canaries": 50, "seed": b"tests only", "delta": 1e-5, "data_loader": loader, "deferred": deferred}
        audited(optimizer, model, **settings)
        assert optimizer.audit.core.deferred is (deferred is not False)
        while optimizer.audit.last_round < 6:
            if physical is None:
                run_epoch(model, optimizer, loss, loader, optimizer.audit, 6)
                continue
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
            ) as smaller:
                run_epoch(model, optimizer, loss, smaller, optimizer.audit, 6)
        return optimizer.audit.log.digest

    assert digest(None) == digest(False)


def test_gradients_overwritten_in_place_are_an_error():
    """Their clipped sum is computed during the next step."""
    model, optimizer, loss, loader, _ = make(examples=50, batch=50)
    audited(optimizer, model, sampling_probability=1.0, canaries=20, seed=b"tests only", delta=1e-5)
    for step in (1, 2):  # then every gradient is known not to be 0 always
        run_epoch(model, optimizer, loss, loader, optimizer.audit, step)
    optimizer.audit.flush()
    worker = optimizer.audit.core.measurer._worker
    busy = Event()
    worker.submit(busy.wait)
    run_epoch(model, optimizer, loss, loader, optimizer.audit, 3)
    for p in optimizer.params:
        p.grad_sample.mul_(2)
    busy.set()
    with pytest.raises(ValueError, match=r"were overwritten in place.*or pass audited\(deferred=False\)"):
        optimizer.audit.flush()


def test_gradients_are_let_go_once_they_are_summed():
    """Otherwise the next step's gradients cannot take their memory, and each of its pages is new."""
    samples = [torch.ones(3, 4), 2 * torch.ones(3, 1)]
    total = _later_sum(samples, 1.0, [each._version for each in samples])
    torch.testing.assert_close(total, 3 * torch.tensor([1.0, 1, 1, 1, 2]) / 8**0.5)
    assert samples == []


def test_a_checkpoint_of_the_optimizer_waits_for_the_log(tmp_path):
    model, optimizer, loss, loader, _ = make(examples=50, batch=50)
    settings = {"canaries": 20, "seed": b"tests only", "delta": 1e-5, "directory": tmp_path, "claim": 9.0}
    audited(optimizer, model, sampling_probability=1.0, **settings)
    for step in (1, 2, 3):
        run_epoch(model, optimizer, loss, loader, optimizer.audit, step)
        optimizer.state_dict()
        assert RunDirectory(tmp_path).read_log().numbers == list(range(1, step + 1))


def test_a_log_behind_its_checkpoint_is_refused(tmp_path):
    """The accountant was restored after step 3, and the log has lost that step."""
    model, optimizer, loss, loader, engine = make(examples=50, batch=50)
    settings = {"canaries": 20, "seed": b"tests only", "delta": 1e-5, "directory": tmp_path, "claim": 9.0}
    audited(optimizer, model, data_loader=loader, **settings)
    for step in (1, 2, 3):
        run_epoch(model, optimizer, loss, loader, optimizer.audit, step)
    restored = engine.accountant.state_dict()
    optimizer.audit.rewind_to(2)
    optimizer.audit.close()
    model, optimizer, loss, loader, engine = make(examples=50, batch=50)
    engine.accountant.load_state_dict(restored)
    audited(optimizer, model, data_loader=loader, **settings)
    with pytest.raises(
        RuntimeError, match=r"counted 3 steps before this one.*log ends with step 2: restart from a checkpoint"
    ):
        run_epoch(model, optimizer, loss, loader, optimizer.audit, 3)


def test_canaries_behind_the_clip_do_not_check_clipping(monkeypatch):
    received = Recorder(monkeypatch)
    optimizer, _ = start(canaries=100, fault=forget_clip, through_clip=False)
    optimizer.audit.finish()
    assert {item.scale for item in optimizer.audit.log.rounds()} == {1.0}
    assert received.items["clipping"].status == "not checked"
    assert received.items["clipping"].detail == "canaries entered after the clip; use through_clip=True"


def test_the_result_lists_what_was_audited():
    optimizer, _ = start(canaries=100, through_clip=False, steps=2)
    listed = optimizer.audit.finish().to_dict()["audited"]
    assert listed["clipping"]["status"] == "not checked"
    assert listed["sampler"]["status"] == "not checked"
    assert listed["weights"]["status"] == "does not apply"
    assert listed["others"]["status"] == "checked"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mode": "ghost"}, "ghost mode has no per-example gradients"),
        ({"clipping": "per_layer", "clip_norm": [1.0] * 4}, "not one of each layer"),
        ({"clipping": "adaptive", "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2,
          "max_clipbound": 10.0, "min_clipbound": 0.01, "unclipped_num_std": 1.0}, "count them as clipped examples"),
        ({"canaries": 2_000}, "about 2,000 canaries per step in 9,648 parameters are expensive"),
    ],
)  # fmt: skip
def test_canaries_enter_behind_an_unsuitable_clip(settings, reason, monkeypatch):
    received = Recorder(monkeypatch)
    optimizer, _ = start(steps=1, **{"canaries": 20} | settings)
    optimizer.audit.finish()
    assert received.items["clipping"].status == "not checked"
    assert reason in received.items["clipping"].detail


def test_an_audit_without_layers_does_not_check_tensors(monkeypatch):
    received = Recorder(monkeypatch)
    model, optimizer, loss, loader, _ = make(examples=50, batch=50)
    audited(optimizer, audit=audit_of(optimizer), sampling_probability=1.0)
    run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=1)
    optimizer.audit.finish()
    assert received.items["tensors"].status == "not checked"
    assert received.items["sampler"].status == "not checked"
    assert received.items["weights"].status == "does not apply"
    assert received.items["others"].status == "checked"


class Gated(nn.Module):
    """A model with a branch whose factor is 0, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.body, self.branch, self.frozen = nn.Linear(50, 10), nn.Linear(50, 10), nn.Linear(10, 10)
        self.frozen.requires_grad_(False)

    def forward(self, rows):
        return self.frozen(self.body(rows) + 0.0 * self.branch(rows))


def test_parameters_that_get_noise_without_a_gradient_are_named(tmp_path):
    """So are parameters that need gradients but are not in the optimizer. A properly frozen layer is not named."""
    torch.manual_seed(0)
    model = Gated()
    beside = nn.Linear(3, 3)
    loader = DataLoader(TensorDataset(torch.randn(50, 50), torch.randint(0, 10, (50,))), batch_size=50)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    names = dict(model.named_parameters()) | {"beside.weight": beside.weight}
    settings = {"canaries": 20, "seed": 1, "delta": 1e-5, "sampling_probability": 1.0, "directory": tmp_path}
    optimizer = audited(optimizer, names, **settings)
    for step in range(1, 6):
        run_epoch(model, optimizer, nn.CrossEntropyLoss(), loader, optimizer.audit, steps=step)
    with pytest.warns(UserWarning, match="these parameters") as caught:
        result = optimizer.audit.finish()
    texts = [str(item.message) for item in caught]
    assert texts == json.loads((tmp_path / "result.json").read_text())["warnings"]
    assert "gradient was 0 in every step: branch.weight, branch.bias; " in texts[0]
    assert "not in the optimizer: beside.weight; " in texts[1]
    assert "frozen" not in " ".join(texts)
    assert [f"warning: {text}" for text in texts] == list(result.notes[-2:])


def test_the_accountants_epsilon_is_printed_and_the_run_verifies(tmp_path):
    """With or without a directory; result.json still follows from the rounds."""
    for directory in (None, tmp_path):
        optimizer, engine = start(canaries=100, steps=2, directory=directory)
        result = optimizer.audit.finish()
        line = f"the accountant (opacus PRVAccountant) quotes epsilon {engine.get_epsilon(1e-5):.3g} after training"
        assert line in result.notes
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["trainer_notes"][0] == line
    assert stored["accounted_epsilon"] == engine.get_epsilon(1e-5)
    checks = {check.name: check for check in verify_run(tmp_path, bytes([0]) + b"tests only")}
    assert checks["commitment"].held
    assert checks["result"].held, checks["result"].detail


OBSERVED = {"observe": True, "examples": 500, "batch": 50, "canaries": 300, "steps": 10, "through_clip": False}


def test_a_claimed_number_is_read_as_the_accountants_epsilon(tmp_path):
    """One number and the loader are given: noise, rate and the steps that ran come from the accountant and the log."""
    optimizer, engine = start(**OBSERVED, directory=tmp_path)
    result = optimizer.audit.finish()
    assert result.claim == Claim(
        engine.get_epsilon(1e-5),
        sampling=Poisson(0.1, rounds=10),
        noise_multiplier=1.0,
        sampler_observed=True,
        delta=1e-5,
        unit="row",
        adjacency="add or remove one",
    )
    assert result.verdict.outcome == "PASS"
    assert {name: leg.outcome for name, leg in result.legs.items()} == dict.fromkeys(
        ("accounting", "noise", "sampling"), "PASS"
    )
    low, high = result["unknown-round"].interval
    assert low <= result.claim.epsilon <= high
    assert result.to_dict()["audited"]["sampler"]["status"] == "checked"
    sizes = [item.participants for item in optimizer.audit.log.rounds()]
    assert np.mean(sizes) == pytest.approx(50, abs=4 * np.sqrt(45 / 10))
    checks = {check.name: check for check in verify_run(tmp_path, bytes([0]) + b"tests only")}
    assert checks["result"].held, checks["result"].detail


def test_half_the_noise_violates_the_accountants_claim(tmp_path):
    optimizer, _ = start(**OBSERVED, fault=halve_noise, directory=tmp_path)
    verdict = optimizer.audit.finish().verdict
    assert (verdict.outcome, verdict.part) == ("VIOLATION", "noise")


def test_shuffling_under_the_poisson_accountant_is_a_violation():
    """With `poisson_sampling=False` the accountant is unchanged, but every row is in one step of an epoch."""
    optimizer, _ = start(**OBSERVED, poisson=False)
    result = optimizer.audit.finish()
    assert result.claim.sampling == Poisson(0.1, rounds=10)
    assert {item.participants for item in optimizer.audit.log.rounds()} == {50}
    times = np.bincount(np.concatenate([item.present for item in optimizer.audit.log.rounds()]))
    assert times.tolist() == [1] * 300
    assert (result.verdict.outcome, result.verdict.part) == ("VIOLATION", "sampling")


def test_steps_missing_from_the_accountant_give_a_warning(tmp_path):
    """For example after a restart that restores only the model: the accountant's epsilon covers only the last steps."""
    settings = {"canaries": 50, "seed": 1, "delta": 1e-5, "directory": tmp_path, "through_clip": False, "claim": 3.0}
    for steps in (2, 4):
        model, optimizer, loss, loader, engine = make(examples=200, batch=50)
        audited(optimizer, model, data_loader=loader, **settings)
        early = pytest.warns(
            RuntimeWarning, match="resumes an audit of 2 steps, but the accountant has counted 0 steps"
        )
        with early if steps == 4 else nullcontext():
            run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=steps)
        if steps == 2:
            optimizer.audit.close()
    assert engine.accountant.history == [(1.0, 0.25, 2)]
    with pytest.warns(
        UserWarning, match="the accountant counted 2 steps, and the audit observed 4; restore the accountant"
    ):
        result = optimizer.audit.finish()
    assert result.claim.sampling == Poisson(0.25, rounds=4)


def test_without_the_accountants_hook_the_steps_are_counted():
    model, optimizer, loss, loader, engine = make(examples=200, batch=50)
    hook = optimizer.step_hook
    optimizer.attach_step_hook(lambda given: hook(given))
    audited(optimizer, model, data_loader=loader, canaries=50, seed=1, delta=1e-5, claim=4.0)
    run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=3)
    result = optimizer.audit.finish(accounted_epsilon=engine.get_epsilon(1e-5))
    assert f"the accountant quotes epsilon {engine.get_epsilon(1e-5):.3g} after training" in " ".join(result.notes)
    claim = result.claim
    assert claim.sampling == Poisson(0.25, rounds=3)
    assert (claim.noise_multiplier, claim.sampler_observed) == (1.0, True)


def test_without_noise_the_result_says_that_no_privacy_is_promised():
    optimizer, _ = start(noise_multiplier=0.0, sampling_probability=0.001, canaries=10, steps=2)
    printed = optimizer.audit.finish(accounted_epsilon=float("inf")).details()
    assert "known-others omits 2 of 2 steps: they had no noise and no canary" in printed
    assert "the noise multiplier is 0, so the optimizer's settings promise no privacy" in printed
    assert "quotes epsilon inf after training: it claims no privacy" in printed


def test_a_directory_with_a_result_is_rejected(tmp_path):
    """pfl and NVFlare make this check; their audits observe no final model."""
    refuse_result(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a finished audit: name another directory, or remove it"):
        refuse_result(tmp_path)


def test_a_forgotten_clip_is_a_violation_if_canaries_go_through_it():
    """An honest clip reduces canaries that are ten times too long to the clip norm; a forgotten clip does not."""
    _, result, _ = train(through_clip=True, canaries=100)
    assert result.verdict.outcome == "PASS"
    assert next(gauge for gauge in result.gauges if gauge.name == "residual").status == "ok"
    _, result, _ = train(through_clip="all", canaries=100, fault=forget_clip)
    assert result.verdict.outcome == "VIOLATION"


def test_canaries_behind_the_clip_do_not_detect_a_forgotten_clip():
    _, result, _ = train(canaries=100, fault=forget_clip)
    assert result.adversaries["known-others"].verdict.outcome != "VIOLATION"


@pytest.mark.full
def test_canaries_through_or_behind_a_correct_clip_give_the_same_result():
    settings = {"steps": 4, "examples": 200, "batch": 100, "sampling_probability": 0.5, "canaries": 50, "physical": 32}
    behind, _, _ = train(**settings)
    for through_clip in (True, "all"):
        through, _, _ = train(**settings, through_clip=through_clip)
        assert cosines(through) == pytest.approx(cosines(behind), abs=2e-5)
        assert residual_cosines(through) == pytest.approx(residual_cosines(behind), abs=2e-5)


def test_adaptive_clipping_is_judged_by_the_noise_of_its_gradients():
    settings = {
        "clipping": "adaptive", "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0, "min_clipbound": 0.01, "unclipped_num_std": 1.0,
    }  # fmt: skip
    update_noise = (1 - 1 / 4) ** -0.5
    audit, result, _ = train(**settings, claim=mechanism_epsilon(update_noise, delta=1e-5, participations=5))
    norms = [item.clip_norm for item in audit.log.rounds()]
    assert len(set(norms)) == len(norms)
    assert result.verdict.outcome == "PASS"
    assert next(gauge for gauge in result.gauges if gauge.name == "residual").status == "ok"


def test_steps_without_noise_and_canaries_are_accepted():
    audit, _, _ = train(noise_multiplier=0.0, sampling_probability=0.001, canaries=10, steps=2)
    assert audit.last_round == 2


def test_unaudited_restores_the_optimizer():
    model, optimizer, loss, loader, engine = make(examples=50, batch=50)
    audit = audit_of(optimizer)
    hook = optimizer.step_hook
    audited(optimizer, audit=audit, sampling_probability=1.0, through_clip=True)
    unaudited(optimizer)
    unaudited(optimizer)  # a second call does nothing
    assert optimizer.step_hook is hook
    assert not {"add_noise", "clip_and_accumulate"} & vars(optimizer).keys()
    run_epoch(model, optimizer, loss, loader, audit, steps=1)
    assert audit.last_round == 0
    assert engine.accountant.history == [(1.0, 1.0, 1)]


def test_an_audit_resumes_after_a_restart(tmp_path):
    model, optimizer, loss, loader, _ = make(examples=50, batch=50)
    initial = torch.cat([p.detach().reshape(-1) for p in optimizer.params]).clone()
    settings = {"canaries": 20, "seed": b"tests only", "delta": 1e-5, "directory": tmp_path, "claim": 9.0}
    audit = Audit(dimension(optimizer), **settings)
    audited(optimizer, audit=audit, sampling_probability=1.0)
    run_epoch(model, optimizer, loss, loader, audit, steps=1)
    unaudited(optimizer)
    audit.directory.close()
    again = Audit(dimension(optimizer), **settings)
    audited(optimizer, audit=again, sampling_probability=1.0)
    run_epoch(model, optimizer, loss, loader, again, steps=2)
    assert again.last_round == 2
    result = optimizer.audit.finish(initial=initial)
    assert result.claim.participations == 2  # includes the round before the restart
    assert "final-update" in again.result().adversaries


def test_a_finished_audit_is_rejected_before_training(tmp_path):
    """For example if a script runs twice in the same folder: it fails before its first step."""
    model, optimizer, loss, loader, _ = make(examples=50, batch=50)
    for directory, says in [(tmp_path, f"{tmp_path} holds a finished audit: name another"), (None, "make a new one")]:
        settings = {"canaries": 20, "seed": b"tests only", "delta": 1e-5, "directory": directory}
        audit = Audit(dimension(optimizer), **settings)
        audited(optimizer, audit=audit, sampling_probability=1.0)
        run_epoch(model, optimizer, loss, loader, audit, steps=1)
        optimizer.audit.finish()
        unaudited(optimizer)
        if directory is not None:
            audit.directory.close()
            audit = Audit(dimension(optimizer), **settings)
        with pytest.raises(ValueError, match=says):
            audited(optimizer, audit=audit, sampling_probability=1.0)
        audit.rewind_to(1)
        (tmp_path / "result.json").unlink()
        unaudited(audited(optimizer, audit=audit, sampling_probability=1.0))
        (tmp_path / "result.json").touch()


def test_a_run_killed_before_its_result_was_written_is_resumed(tmp_path):
    settings = {"canaries": 20, "examples": 50, "batch": 50, "directory": tmp_path, "claim": 9.0}
    optimizer, _ = start(steps=1, **settings)
    optimizer.audit.finish()
    optimizer.audit.close()
    (tmp_path / "result.json").unlink()
    optimizer, _ = start(steps=2, **settings)
    assert optimizer.audit.finish().rounds == 2


def test_audited_returns_the_same_optimizer_and_finish_can_be_repeated(tmp_path):
    """A scheduler or a checkpoint that holds the optimizer is not affected."""
    model, optimizer, loss, loader, _ = make(examples=50, batch=50)
    settings = {"canaries": 20, "seed": 1, "delta": 1e-5, "sampling_probability": 1.0, "directory": tmp_path}
    assert audited(optimizer, model, **settings) is optimizer
    run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=1)
    optimizer.load_state_dict(optimizer.state_dict())
    run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=2)
    result = optimizer.audit.finish()
    stored = (tmp_path / "result.json").read_bytes()
    assert optimizer.audit.finish().to_dict() == result.to_dict()
    assert (tmp_path / "result.json").read_bytes() == stored


def test_audited_rejects_a_finished_directory_and_releases_its_lock(tmp_path):
    optimizer, _ = start(steps=1, canaries=20, examples=50, batch=50, directory=tmp_path)
    optimizer.audit.finish()
    optimizer.audit.directory.close()
    for _ in range(2):  # twice, because the first rejection must release the lock
        with pytest.raises(ValueError, match="holds a finished audit: name another directory"):
            start(steps=1, canaries=20, examples=50, batch=50, directory=tmp_path)


def test_invalid_settings_are_rejected():
    _, optimizer, _, _, _ = make(examples=50, batch=50)
    audit = audit_of(optimizer)
    with pytest.raises(TypeError, match="make_private"):
        audited(optimizer.original_optimizer, audit=audit, sampling_probability=1.0)
    with pytest.raises(ValueError, match=r"sampling_probability must lie in \(0, 1\]"):
        audited(optimizer, audit=audit, sampling_probability=0.0)
    with pytest.raises(ValueError, match="scale needs through_clip"):
        audited(optimizer, audit=audit, sampling_probability=1.0, through_clip=False, scale=10.0)
    for scale in (0.0, -1.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="scale must be "):
            audited(optimizer, audit=audit, sampling_probability=1.0, through_clip=True, scale=scale)
    with pytest.raises(ValueError, match="must have dim = 9"):
        audited(optimizer, audit=Audit(100, canaries=10, seed=1, delta=1e-5), sampling_probability=1.0)
    _, ghost, _, _, _ = make(examples=50, batch=50, mode="ghost")
    with pytest.raises(ValueError, match="through_clip needs per-example gradients"):
        audited(ghost, audit=audit, sampling_probability=1.0, through_clip=True)
    audited(optimizer, audit=audit, sampling_probability=1.0)
    with pytest.raises(ValueError, match="audited already"):
        audited(optimizer, audit=audit, sampling_probability=1.0)
    with pytest.raises(TypeError, match="needs data_loader, or the sampling_probability of an example"):
        audited(unaudited(optimizer), audit=audit)
    for given, says in [
        ({}, "needs canaries and delta, or an audit of your own"),
        ({"canaries": 20, "delta": 1e-5, "seed": 1}, "needs the model that is trained"),
        ({"audit": 3}, "audit must be a coalmine.Audit, got 3"),
    ]:
        with pytest.raises(TypeError, match=says):
            audited(unaudited(optimizer), sampling_probability=1.0, **given)
    with pytest.raises(ValueError, match="so omit canaries, delta"):
        audited(optimizer, audit=audit, canaries=20, delta=1e-5, sampling_probability=1.0)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_example_passes_and_reports_the_accountants_epsilon(tmp_path, mode):
    """Trains on digits, and claims before training what the accountant quotes after it."""
    require("sklearn")
    script = Path(__file__).parents[2] / "examples" / "opacus" / "train.py"
    (tmp_path / "canary-seed").write_text("the seed of this test\n")
    done = subprocess.run(
        [sys.executable, str(script), "--epochs", "2", "--mode", mode, "--out", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["verdict"] == "PASS"
    assert {name: leg["verdict"] for name, leg in result["legs"].items()} == dict.fromkeys(
        ("accounting", "noise", "sampling"), "PASS"
    )
    assert (result["trainer"], result["task"]) == ("opacus", "digits")
    assert result["accounted_epsilon"] < result["claimed_epsilon"] == 5.6 < result["most_exposed_epsilon"]
    assert f"epsilon {result['accounted_epsilon']:.3g} by the accountant" in done.stdout
    assert result["audited"]["sampler"]["status"] == "checked"
    assert "layer 0.weight" in result["gauges"]["layers"]["statistics"]
    assert "warnings" not in result
    assert result["rounds"] == len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 20
    check_analytical_epsilon(tmp_path, result)


def check_analytical_epsilon(directory, result):
    """Check that it is for the headline's number of presentations, also in `coalmine compare`."""
    headline = result["adversaries"]["known-others"]
    assert headline["presentations"] == result["presentations"] < result["most_presentations"]
    for key, times in [("analytical_epsilon", "presentations"), ("most_exposed_epsilon", "most_presentations")]:
        assert result[key] == mechanism_epsilon(1.0, delta=1e-5, participations=result[times])
    assert headline["interval"][0] <= result["analytical_epsilon"] <= headline["interval"][1]
    (shown,) = json.loads(CliRunner().invoke(compare, ["--json", str(directory)]).stdout)
    assert (shown["presentations"], shown["analytical_epsilon"]) == (
        headline["presentations"], result["analytical_epsilon"]
    )  # fmt: skip


def test_a_gradient_that_is_not_finite_names_its_step():
    model, optimizer, loss, loader, _ = make(examples=200, batch=50)
    audited(optimizer, model, data_loader=loader, canaries=50, seed=b"tests only", delta=1e-5)
    run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=2)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="the gradient of step 4, or of the one before it, is NaN or infinite"):
        run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=4)


def test_arguments_of_the_wrong_type_are_rejected():
    model, optimizer, _, loader, _ = make(examples=200, batch=50)
    with pytest.raises(TypeError, match="optimizer must be the one that make_private returned, got 5"):
        unaudited(5)
    with pytest.raises(TypeError, match="through_clip must be True, False, \"all\" or None, got 'x'"):
        audited(optimizer, model, data_loader=loader, through_clip="x", seed=b"tests only", delta=1e-5)


def test_an_item_that_failed_cannot_be_edited_out_of_the_result(tmp_path):
    model, optimizer, loss, loader, _ = make(examples=400, batch=40)
    settings = {"canaries": 50, "seed": b"tests only", "delta": 1e-5, "directory": tmp_path, "claim": 9.0}
    audited(optimizer, model, data_loader=loader, **settings)
    for number, (data, labels) in enumerate(loader):
        if number % 3 != 1:
            optimizer.zero_grad()
            loss(model(data), labels).backward()
            optimizer.step()
    assert statuses(optimizer.audit.finish())["sampler"] == "failed"
    optimizer.audit.close()
    checks = {check.name: check.held for check in verify_run(tmp_path, b"tests only")}
    assert (checks["trainer"], checks["result"]) == (True, True)
    result = json.loads((tmp_path / "result.json").read_text())
    result["audited"]["sampler"] |= {"status": "checked", "source": "audit"}
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert {check.name: check.held for check in verify_run(tmp_path, b"tests only")}["trainer"] is False
