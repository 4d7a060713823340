import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from requires import require

torch = require("torch")
require("opacus")
require("transformers")
require("peft")
from lora_training import WARNINGS, frozen, halve_noise, make, plain_loop, rows_of, trainer_of  # noqa: E402
from opacus_training import quoted  # noqa: E402

from coalmine import ViolationError  # noqa: E402
from coalmine.estimators.sampling import Poisson  # noqa: E402
from coalmine.integrations.transformers import audited, next_token_loss  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*WARNINGS)
SETTINGS = {"canaries": 20, "seed": b"tests only", "delta": 1e-5, "claim": 30.0}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scores(audit):
    rounds = list(audit.log.rounds())
    present = [item.present.tolist() for item in rounds]
    return present, np.array([[item.cosines, item.residual_cosines] for item in rounds])


@pytest.mark.parametrize("mode", ["hooks", pytest.param("ghost", marks=pytest.mark.full)])
def test_the_trainer_gives_the_scores_of_the_plain_loop(mode, tmp_path):
    case = make(mode=mode)
    loop = plain_loop(case, steps=6, **SETTINGS)
    callback = audited(**SETTINGS)
    trainer_of(make(mode=mode), callback, tmp_path, steps=6).train()
    (present, expected), (same, actual) = scores(loop), scores(callback.audit)
    assert present == same
    assert actual.shape == expected.shape == (6, 2, loop.settings.total)
    assert np.abs(actual - expected).max() < 1e-5
    result, expected = callback.finish(), loop.finish()
    assert result.verdict.outcome == expected.verdict.outcome
    assert {gauge.name for gauge in result.gauges} == {gauge.name for gauge in expected.gauges}


@pytest.mark.full
def test_the_directory_of_a_trainer_holds_its_run(tmp_path):
    callback = audited(**SETTINGS, directory=tmp_path / "run")
    trainer_of(make(), callback, tmp_path, steps=2).train()
    callback.finish(task="LoRA")
    assert (tmp_path / "run" / "result.json").exists()
    with pytest.raises(ValueError, match="has audited a training already"):
        trainer_of(make(), callback, tmp_path, steps=2).train()


@pytest.mark.full
def test_a_trainer_that_starts_again_forgets_the_rounds_after_its_checkpoint(tmp_path):
    for steps in (3, 2):
        callback = audited(**SETTINGS, directory=tmp_path / "run")
        trainer_of(make(), callback, tmp_path, steps=steps).train()
        assert callback.audit.last_round == steps
        callback.audit.close()


@pytest.mark.full
def test_a_refused_second_training_leaves_the_first_audit(tmp_path):
    callback = audited(**SETTINGS)
    trainer = trainer_of(make(), callback, tmp_path, steps=2)
    trainer.train()
    with pytest.raises(ValueError, match="has audited a training already"):
        trainer.train()
    assert callback.finish().rounds == 2
    twice = audited(**SETTINGS)
    trainer = trainer_of(make(), twice, tmp_path, steps=2)
    trainer.callback_handler.callbacks.append(twice)
    with pytest.raises(ValueError, match="twice: add it once"):
        trainer.train()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_trainer_resumes_in_the_middle_of_an_epoch_with_the_audits_directory(mode, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    callback = audited(**SETTINGS, directory=tmp_path / "run")
    trainer_of(make(rows=100, mode=mode), callback, tmp_path, steps=5, **saving).train()
    callback.audit.close()
    checkpoint = str(tmp_path / "trainer" / "checkpoint-3")
    with pytest.raises(ValueError, match="resumes after step 3, but the audit has observed 0 steps"):
        trainer_of(make(rows=100, mode=mode), audited(**SETTINGS), tmp_path, steps=6).train(checkpoint)
    callback = audited(**SETTINGS, directory=tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="resumes an audit of 3 steps, but the accountant has counted 0"):
        trainer_of(make(rows=100, mode=mode), callback, tmp_path, steps=6).train(checkpoint)
    assert callback.audit.last_round == 6


@pytest.mark.full
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_trainer_evaluates_during_training(mode, tmp_path):
    case, callback = make(mode=mode), audited(**SETTINGS)
    evaluating = {"eval_dataset": case.rows, "eval_strategy": "steps", "eval_steps": 4}
    trainer = trainer_of(case, callback, tmp_path, steps=8, **evaluating)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)
    assert callback.finish().rounds == 8


def test_ghost_clipping_without_its_loss_is_refused(tmp_path):
    case = make(mode="ghost")
    case.loss = None
    with pytest.raises(ValueError, match="ghost clipping takes place in the loss: pass criterion="):
        trainer_of(case, audited(**SETTINGS), tmp_path, steps=2)
    case.loader = None
    with pytest.raises(TypeError, match="private_loader must be the loader that make_private returned, got None"):
        trainer_of(case, audited(**SETTINGS), tmp_path, steps=2)
    with pytest.raises(TypeError, match=r"audited\(\) takes scale, through_clip, .*canaries.*got data_loader"):
        audited(**SETTINGS, data_loader=case.loader)  # type: ignore[call-arg]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_criterion_around_the_loss_of_ghost_clipping_is_accepted_and_a_plain_one_is_not(wrapped, tmp_path):
    case = make(mode="ghost")
    private = case.loss
    case.loss = (lambda logits, labels: private(logits, labels)) if wrapped else next_token_loss
    callback = audited(**SETTINGS)
    trainer = trainer_of(case, callback, tmp_path, steps=3)
    with nullcontext() if wrapped else pytest.raises(ValueError, match="ghost clipping takes place in the loss"):
        trainer.train()
    assert callback.audit.last_round == (3 if wrapped else 0)


@pytest.mark.full
def test_two_runs_of_a_trainer_have_different_noise_and_batches(tmp_path):
    """Although a Trainer seeds torch's global generator with 42."""

    def first_round():
        case, callback = make(), audited(**SETTINGS)
        case.optimizer.generator = case.loader.batch_sampler.generator = None
        trainer_of(case, callback, tmp_path, steps=4).train()
        assert not any("small number" in note for note in callback.finish().notes)
        return scores(callback.audit)

    (present, one), (other_present, other) = first_round(), first_round()
    assert present != other_present
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("generator", [torch.Generator().manual_seed(42), torch.Generator()])
def test_a_guessable_seed_of_the_noise_is_noted(generator):
    """Every new torch.Generator() has the same seed."""
    case = make()
    case.optimizer.generator = generator
    notes = plain_loop(case, steps=2, **SETTINGS).finish().notes
    assert any("is a small number or torch's default, so anyone can compute the noise" in note for note in notes)


def test_a_loop_that_does_not_clip_has_no_pass():
    """Ghost clipping with the loss that the user had before make_private."""
    case = make(rows=200, batch=50, mode="ghost")
    case.loss = next_token_loss
    with pytest.warns(RuntimeWarning, match="so nothing was clipped: ghost clipping needs the loss"):
        result = plain_loop(case, steps=6, **SETTINGS).finish()
    assert {item.name: item.status for item in result.audited}["clipping"] == "failed"
    assert result.verdict.outcome != "PASS"


def test_a_trainer_judges_the_claim_and_counts_its_steps(tmp_path):
    """A Trainer knows how many steps it plans, so an alarm needs no more than the claim."""
    case = make(rows=200, batch=20)
    epsilon = quoted(rate=0.1, steps=30)
    callback = audited(**SETTINGS | {"canaries": 150, "claim": epsilon}, on_violation="raise")
    trainer_of(case, callback, tmp_path, steps=30).train()
    result = callback.finish()
    assert result.claim.sampling == Poisson(0.1, rounds=30)
    assert result.verdict.outcome == "PASS"
    assert not any("were planned" in note for note in result.notes)


def test_an_alarm_ends_the_training(tmp_path):
    case = make(rows=200, batch=50)
    halve_noise(case.optimizer, 0.05)
    callback = audited(**SETTINGS | {"canaries": 200}, on_violation="raise")
    with pytest.raises(ViolationError):
        trainer_of(case, callback, tmp_path, steps=20).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm must be 0, got 1"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps must be 1.*got 2"),
    ],
)
def test_settings_that_opacus_does_not_account_for_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of(make(), audited(**SETTINGS), tmp_path, steps=2, **changes).train()


def test_a_trainer_without_the_private_parts_is_refused(tmp_path):
    from transformers import Trainer

    case = make()
    trainer = trainer_of(case, audited(**SETTINGS), tmp_path, steps=2)
    plain = {"args": trainer.args, "train_dataset": case.rows, "callbacks": [audited(**SETTINGS)]}
    with pytest.raises(ValueError, match="must train on the loader that make_private returned"):
        Trainer(case.model, optimizers=(case.optimizer, None), **plain).train()
    with pytest.raises(TypeError, match="must have the optimizer that make_private returned"):
        Trainer(case.model, **plain).train()
    with pytest.raises(ValueError, match="begins with the training"):
        audited(**SETTINGS).finish()


def test_the_loss_of_an_example_does_not_depend_on_the_lengths_of_others():
    logits = torch.randn(3, 7, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(1))
    labels[0, 3:] = labels[1, 5:] = -100
    each = [
        torch.nn.functional.cross_entropy(row[:-1], targets[1:], ignore_index=-100)
        for row, targets in zip(logits, labels, strict=True)
    ]
    assert float(next_token_loss(logits, labels)) == pytest.approx(float(sum(each) / 3), rel=1e-6)
    assert float(next_token_loss(logits, torch.full((3, 7), -100))) == 0


def test_weights_that_never_move_are_told_of_early_and_in_the_verdict():
    case = make(rows=40, batch=10)
    frozen(case)
    with pytest.warns(RuntimeWarning, match="after 10 steps no weight has moved"):
        audit = plain_loop(case, steps=11, **SETTINGS)
    with pytest.warns(UserWarning, match="received noise although their gradient was 0"):
        result = audit.finish()  # A has no gradient as long as B is 0
    assert result.verdict.code == "training"
    assert "no weight moved" in result.verdict.reason
    assert any("layers never moved" in note for note in result.notes)


def test_adapters_whose_second_factor_is_frozen_have_no_gradient():
    case = make(rows=40, batch=10, train_only="lora_A")  # B is 0 and stays so
    with pytest.warns(UserWarning, match="received noise although their gradient was 0"):
        result = plain_loop(case, steps=6, **SETTINGS).finish()
    assert result.verdict.code == "training"
    assert "no layer received a gradient" in result.verdict.reason


@pytest.mark.parametrize("name", ["train.py", "trainer.py", "train_sharded.py"])
def test_an_example_has_at_most_five_lines_of_coalmine(name):
    text = (Path(__file__).parents[2] / "examples" / "dp-lora" / name).read_text()
    code = re.sub(r'"""(.*?)"""', "", text, flags=re.DOTALL)
    ours = [line for line in code.splitlines() if re.search(r"coalmine|canar|\baudit(ed)?\b", line, re.IGNORECASE)]
    assert 3 <= len(ours) <= 5, ours


@pytest.mark.slow
def test_faults_of_fine_tuning_are_named_and_honest_runs_pass():
    """A Llama of two layers with 1,000 canaries: the study's own requirements."""
    from studies.fine_tuning import failures, run_all

    assert failures(run_all()) == []


def test_rows_are_cut_and_padded():
    rows = rows_of([[1, 2, 3], [4, 5, 6, 7, 8, 9]], length=4)
    assert rows[0]["labels"].tolist() == [1, 2, 3, -100]
    assert rows[1]["input_ids"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_trainer_replays_rows_with_its_own_loss_and_trains_as_without(mode, tmp_path):
    weights = []
    for replay in (True, False):
        case = make(mode=mode)
        callback = audited(**SETTINGS, replay=replay)
        trainer_of(case, callback, tmp_path, steps=3).train()
        weights.append(torch.cat([p.detach().reshape(-1) for p in case.optimizer.params]))
        result = callback.finish()
        item = next(item for item in result.audited if item.name == "rows")
        if replay:
            assert item.status == "checked", item.detail
            assert "sum over rows" not in item.detail
            assert item.replayed.worst.factor <= 1.001
        else:
            assert item.status == "not checked"
    assert torch.equal(*weights)


def test_the_trainers_own_loss_moves_the_rows_of_others(tmp_path):
    """A mean over all tokens of the batch: the length of one row changes the gradient of the others."""
    case = make(mode="hooks")
    callback = audited(**SETTINGS)
    trainer = trainer_of(case, callback, tmp_path, steps=2)

    def mean_over_tokens(model, inputs, **_):
        logits, labels = model(input_ids=inputs["input_ids"]).logits, inputs["labels"]
        each = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none"
        )
        return 5 * each.sum() / (labels[:, 1:] != -100).sum()

    trainer.compute_loss = callback.compute_loss = mean_over_tokens
    trainer.train()
    item = next(item for item in callback.finish().audited if item.name == "rows")
    assert item.replayed is not None
    assert item.replayed.worst.factor > 1.001
