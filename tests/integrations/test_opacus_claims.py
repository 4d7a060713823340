"""What is claimed before training is what is judged: an epsilon of Opacus's accountant, one row, sampling counted."""

import functools
import json

import numpy as np
import pytest
from requires import require

torch = require("torch")
require("opacus")
from opacus import PrivacyEngine  # noqa: E402
from opacus.accountants import PRVAccountant, RDPAccountant  # noqa: E402
from opacus.accountants.analysis import rdp  # noqa: E402
from opacus.schedulers import ExponentialGradClip, ExponentialNoise, StepNoise  # noqa: E402
from opacus_target import EPOCHS, RATE, STEPS, Run  # noqa: E402
from opacus_training import WARNINGS, make, quoted, run_epoch, start  # noqa: E402

from coalmine import Audit, Claim, ViolationError, mechanism_epsilon  # noqa: E402
from coalmine.estimators.sampling import Poisson  # noqa: E402
from coalmine.integrations.opacus import audited, unaudited  # noqa: E402
from coalmine.verification import verify_run  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*WARNINGS, "ignore:GDP accounting is experimental")


@pytest.fixture(autouse=True, scope="module")
def _account_once():
    """Most tests search the noise of the same epsilon, which takes as long as the training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rdp, "_compute_rdp", functools.cache(rdp._compute_rdp))
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def judged(result):
    return str(result.verdict.outcome), result.verdict.code


@pytest.mark.parametrize(
    "spelled",
    [
        "3",
        Claim(3.0, delta=1e-5, unit="row"),
        *(pytest.param(number, marks=pytest.mark.full) for number in (3.0, 3, np.float32(3.0))),
    ],
)
def test_the_target_epsilon_is_the_claim_and_an_honest_run_keeps_it(spelled, tmp_path):
    result = Run(claim=spelled, directory=tmp_path).train().finish()
    assert judged(result) == ("PASS", "legs")
    assert result.claim.sampling == Poisson(RATE, rounds=STEPS)
    line = "claimed epsilon 3 at delta 1e-05: one row, whole training, sampling counted"
    assert line in result.details()
    committed = json.loads((tmp_path / "audit" / "record.json").read_text())["statement"]["claim"]
    stated = {name: committed[name] for name in ("epsilon", "delta", "unit", "adjacency", "sampling")}
    assert stated == {
        "epsilon": 3.0, "delta": 1e-5, "unit": "row", "adjacency": "add or remove one", "sampling": None,
    }  # fmt: skip
    checks = {check.name: check for check in verify_run(tmp_path, b"tests only")}
    assert checks["claim"].held, checks["claim"].detail
    assert checks["result"].held, checks["result"].detail


def test_noise_that_is_halved_after_the_audit_began_is_named_and_never_passes():
    """Nobody claimed the epsilon of the weaker noise, although every step states it."""
    for claim, expected in ((None, ("UNDERPOWERED", "no claim")), (3.0, ("VIOLATION", "bound"))):
        run = Run(claim=claim)
        full = run.optimizer.noise_multiplier
        run.optimizer.noise_multiplier /= 2
        result = run.train().finish()
        assert judged(result)[0] == expected[0]
        changed = f"{full:.4g} then, {full / 2:.4g} in 60 steps, first in step 1"
        assert f"the noise multiplier changed since audited(): {changed}" in result.notes
        quotes = (
            f"the accountant (opacus RDPAccountant) quotes epsilon {run.engine.get_epsilon(1e-5):.3g} after training"
        )
        assert quotes + (", which nobody claimed" if claim is None else ", more than the claimed 3") in result.notes


@pytest.mark.full
def test_a_claim_made_after_training_is_judged_and_named():
    result = Run(claim=None).train().finish(claim=3.0)
    assert judged(result)[0] == "PASS"
    assert any("the claim 3 was made after training" in note for note in result.notes)
    run = Run().train()
    assert run.finish(claim=3.0).notes == run.finish().notes  # the same claim again
    with pytest.raises(
        ValueError, match="committed to the claim 3 before round 1, so finish cannot judge another, got 5"
    ):
        run.finish(claim=5.0)


@pytest.mark.parametrize(("accountant", "expected"), [("prv", "PASS"), ("gdp", "VIOLATION")])
def test_the_noise_of_another_accountant_is_judged(accountant, expected):
    """Opacus says of its GDP accountant that it can underestimate: here 3 for 3.6."""
    result = Run(accountant=accountant).train().finish()
    assert judged(result) == (expected, "legs" if expected == "PASS" else "accounting")


def epsilon_of(noises, steps_each):
    accountant = PRVAccountant()
    accountant.history = [(noise, RATE, steps_each) for noise in noises]
    return accountant.get_epsilon(1e-5)


@pytest.mark.parametrize(
    "kind",
    ["step", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("exponential", "growing"))],
)
def test_a_schedule_of_the_noise_is_judged_by_its_composition(kind):
    run = Run(audit=False)
    first = run.optimizer.noise_multiplier
    gamma = {"exponential": 0.8, "step": 0.5, "growing": 1.2}[kind]
    noises = [first * gamma ** (epoch // 3 if kind == "step" else epoch) for epoch in range(EPOCHS)]
    exact = epsilon_of(noises, 10)
    assert abs(exact - 3) > 1

    def result(claim):
        run = Run(claim=claim)
        kinds = {"step": lambda optimizer: StepNoise(optimizer, step_size=3, gamma=gamma)}
        scheduler = kinds.get(kind, lambda optimizer: ExponentialNoise(optimizer, gamma=gamma))(run.optimizer)
        return run.train(scheduler=scheduler).finish()

    honest = result(exact)
    assert judged(honest)[0] == "PASS"
    low, high = sorted(noises[1:] if kind != "step" else noises[3:])[:: EPOCHS - 2 if kind != "step" else 2]
    shown = f"{low:.4g}" if kind == "step" else f"{low:.4g} to {high:.4g}"
    assert any(f"changed since audited(): {first:.4g} then, {shown} in" in note for note in honest.notes)
    assert judged(result(0.8 * exact))[0] == "VIOLATION"


def test_a_schedule_of_the_clip_norm_keeps_the_claim_and_is_named():
    run = Run()
    result = run.train(scheduler=ExponentialGradClip(run.optimizer, gamma=0.9)).finish()
    assert judged(result)[0] == "PASS"
    assert any(
        "the clip norm changed since audited(): 1 then, 0.5905 to 0.9 in 50 steps" in note for note in result.notes
    )


@pytest.mark.full
def test_a_sampling_rate_that_changes_is_named_and_no_pass():
    run = Run()
    run.train(epochs=3)
    run.loader.batch_sampler.sample_rate = 0.2
    result = run.train(epochs=3).finish()
    assert judged(result)[0] != "PASS"
    assert any("the sampling rate changed since audited(): 0.1 then, 0.2 in" in note for note in result.notes)


def test_two_rates_that_the_accountant_counts_are_neither_refuted_nor_confirmed():
    """The hook of another loader: no scheme describes the whole run."""
    run = Run(claim=6.0)
    accountant = run.engine.accountant
    real, rates = accountant.step, iter([0.1] * 30 + [0.2] * 30)
    accountant.step = lambda *, noise_multiplier, sample_rate: real(
        noise_multiplier=noise_multiplier, sample_rate=next(rates)
    )
    result = run.train().finish()
    assert judged(result) == ("UNDERPOWERED", "sampler not observed")
    assert result.claim.sampling == Poisson(0.1, rounds=60)


def test_a_sampler_that_is_not_observed_gives_at_most_underpowered():
    """The number counts sampling, so it is not refuted as the mechanism's."""
    result = Run(data_loader=None, sampling_probability=RATE).train().finish()
    assert judged(result) == ("UNDERPOWERED", "sampler not observed")


def test_shuffled_batches_refute_a_claim_that_counts_sampling():
    optimizer, _ = start(observe=True, examples=500, batch=50, canaries=300, steps=10, poisson=False)
    verdict = optimizer.audit.finish().verdict
    assert (verdict.outcome, verdict.part) == ("VIOLATION", "sampling")


@pytest.mark.full
def test_more_steps_than_planned_are_counted_and_named():
    result = Run(steps=60).train(epochs=9).finish()
    assert result.claim.sampling == Poisson(RATE, rounds=90)
    assert judged(result)[0] == "VIOLATION"
    assert "90 steps ran, and 60 were planned: the claim is about all that ran" in result.notes
    assert judged(Run(steps=60).train(epochs=5).finish())[0] == "PASS"


@pytest.mark.full
def test_another_delta_than_that_of_the_noise_is_judged_at_the_audits():
    """make_private_with_epsilon does not keep its target_delta, so `audited` cannot compare."""
    result = Run(delta=1e-7).train().finish()
    assert judged(result) == ("VIOLATION", "accounting")


def test_a_claim_states_delta_and_unit():
    result = Run(claim=Claim(3.0, delta=1e-5, unit="document"), delta=None).train().finish()
    assert judged(result)[0] == "PASS"
    assert "one document, whole training, sampling counted" in result.details()
    assert any(note.startswith("privacy unit: one document (a row of the data set)") for note in result.notes)


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (0, "claim must be above 0"),
        (-1.0, "claim must be above 0"),
        (float("nan"), "claim must be finite"),
        (True, "claim must be a number such as 3.0, or a Claim, got True"),
        ("three", "claim must be a number such as 3, or mechanism:3"),
        ([3.0], "claim must be one number"),
        (Claim(3.0, delta=1e-6), "the claim must be at the audit's delta, 1e-05, got one at delta 1e-06"),
    ],
)
def test_a_claim_that_cannot_be_read_is_refused_before_training(claim, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Run(claim=claim, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_an_accountant_of_a_plan_is_a_claim_and_that_of_the_run_is_not():
    run = Run(audit=False)
    for own in (run.engine, run.engine.accountant):
        with pytest.raises(ValueError, match="knows its epsilon only after training: pass the target epsilon"):
            run.audited(claim=own)
    plan = RDPAccountant()
    plan.history = [(run.optimizer.noise_multiplier, RATE, STEPS)]
    run.audited(claim=plan)
    assert run.optimizer.audit.claim.epsilon == plan.get_epsilon(1e-5)
    assert judged(run.train().finish())[0] == "PASS"
    assert judged(Run(claim=None).train().finish(claim=run.engine))[0] == "PASS"


@pytest.mark.full
def test_the_mechanisms_epsilon_is_claimed_with_its_participations():
    run = Run(claim=None).train()
    times = run.finish().to_dict()["adversaries"]["known-others"]["presentations"]
    epsilon = mechanism_epsilon(run.optimizer.noise_multiplier, delta=1e-5, participations=times)
    result = run.finish(claim=Claim.mechanism(epsilon, participations=times))
    assert judged(result)[0] == "PASS"
    assert not result.claim.amplified


def test_all_rows_in_all_steps_are_read_without_sampling():
    optimizer, _ = start(claim=20.0, noise_multiplier=0.8)
    result = optimizer.audit.finish()
    assert (result.claim.participations, result.claim.sampling) == (5, None)
    assert {item.name: item.status for item in result.audited}["participations"] == "checked"


def test_a_resumed_run_keeps_its_claim(tmp_path):
    """Without a claim it keeps the first one; with another it is refused, and both are named."""

    def resume(**more):
        run = Run(directory=tmp_path, **more)  # another seed, or the noise would be repeated
        run.engine.accountant.history = [(run.optimizer.noise_multiplier, RATE, run.optimizer.audit.last_round)]
        return run

    resume().train(epochs=3).optimizer.audit.close()
    with pytest.raises(ValueError, match=r"started with another claim: epsilon 3\.0.*, not epsilon 4\.0"):
        Run(directory=tmp_path, claim=4.0)
    result = resume(claim=None, seed=1).train(epochs=3).finish()
    assert (judged(result)[0], result.claim.epsilon, result.rounds) == ("PASS", 3.0, 60)


def test_a_change_before_a_restart_is_named_after_it(tmp_path):
    run = Run(directory=tmp_path)
    full = run.optimizer.noise_multiplier
    run.optimizer.noise_multiplier /= 2
    run.train(epochs=3).optimizer.audit.close()
    history = run.engine.accountant.history
    run = Run(directory=tmp_path, seed=1)
    run.engine.accountant.history = history
    result = run.train(epochs=3).finish()
    assert judged(result)[0] == "VIOLATION"
    assert any(f"{full / 2:.4g} in 30 steps, first in step 1" in note for note in result.notes)


@pytest.mark.full
def test_on_violation_needs_the_planned_steps_of_a_claim_that_counts_sampling(tmp_path):
    with pytest.raises(ValueError, match="on_violation needs steps=, the number of planned steps"):
        Run(on_violation="raise", directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    result = Run(on_violation="raise", steps=STEPS).train().finish()
    assert judged(result)[0] == "PASS"
    run = Run(on_violation="raise", steps=STEPS)
    run.optimizer.noise_multiplier /= 2
    with pytest.raises(ViolationError):
        run.train()
    assert run.optimizer.audit.last_round <= 10


def test_an_audit_of_your_own_is_watched_with_the_same_reading():
    run = Run(audit=False)
    dim = sum(p.numel() for p in run.optimizer.params)
    own = {"canaries": 300, "seed": b"tests only", "delta": 1e-5, "claim": 3.0, "on_violation": "raise"}
    for steps in (None, STEPS):
        audit = Audit(dim, **own)
        more = {"data_loader": run.loader, "through_clip": False, "steps": steps}
        if steps is None:
            with pytest.raises(ValueError, match="on_violation needs steps="):
                audited(run.optimizer, run.model, audit=audit, **more)
        else:
            audited(run.optimizer, run.model, audit=audit, **more)
    assert judged(run.train().finish())[0] == "PASS"


def hook_replaced(run):
    run.optimizer.attach_step_hook(lambda _: None)


def noise_replaced(run):
    run.optimizer.add_noise = type(run.optimizer).add_noise.__get__(run.optimizer)


def engine_made_again(run):
    _, run.optimizer, run.loader = PrivacyEngine().make_private(
        module=run.model, optimizer=run.optimizer, data_loader=run.loader, noise_multiplier=0.1, max_grad_norm=1.0
    )


@pytest.mark.parametrize("change", [hook_replaced, noise_replaced, engine_made_again])
def test_a_step_that_the_audit_does_not_see_is_an_error(change):
    run = Run().train(epochs=1)
    before, inner = [p.detach().clone() for p in run.model.parameters()], run.optimizer.original_optimizer
    change(run)
    with pytest.raises(RuntimeError, match="audit"):
        run.train(epochs=1)
    with pytest.raises(RuntimeError, match="this step moves the weights, but the audit saw no release"):
        inner.step()
    after = list(run.model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_replaced_hook_is_an_error_in_every_mode(mode):
    model, optimizer, loss, loader, _ = make(examples=200, batch=50, mode=mode)
    audited(optimizer, model, data_loader=loader, canaries=50, seed=b"tests only", delta=1e-5)
    run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=1)
    optimizer.attach_step_hook(lambda _: None)
    with pytest.raises(RuntimeError, match="attach_step_hook replaced the audit's hook"):
        run_epoch(model, optimizer, loss, loader, optimizer.audit, steps=2)


def test_unaudited_ends_the_guard_too():
    run = Run().train(epochs=1)
    unaudited(run.optimizer)
    run.optimizer.attach_step_hook(lambda _: None)
    run.train(epochs=1)
    engine_made_again(run)
    run.train(epochs=1)


def test_the_quoted_epsilon_is_that_of_the_engine():
    """The helper of these tests asks the accountant that a PrivacyEngine has by default."""
    optimizer, engine = start(observe=True, examples=500, batch=50, canaries=50, steps=10)
    assert optimizer.audit.claim.epsilon == quoted(rate=0.1, steps=10) == engine.get_epsilon(1e-5)
