"""An audit adds its canaries and changes nothing else: rows, noise, batches and the optimizer's state stay the same."""

from contextlib import nullcontext

import pytest
from requires import require

torch = require("torch")
require("opacus")
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402
from opacus_training import WARNINGS, make  # noqa: E402

from coalmine.integrations.opacus import audited  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*WARNINGS)
STEPS, CLIP = 6, 0.5
ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 1.0,
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def record_gradients(optimizer):
    """The noised gradient of every step, and the clip norm, from a hook that is attached before the audit's."""
    recorded, real = [], optimizer.step_hook

    def hook(given):
        real(given)
        recorded.append((torch.cat([p.grad.reshape(-1).clone() for p in given.params]), float(given.max_grad_norm)))

    optimizer.attach_step_hook(hook)
    return recorded


def freeze(optimizer):
    """Steps move nothing, so the gradients of later steps are those of the first weights."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0


def steps_of(*, audit, physical=None, through_clip=None, **settings):
    """Gradients, the audit and everything that it might have touched. All draws come from torch's global generator."""
    model, optimizer, loss, loader, _ = make(examples=200, batch=40, clip_norm=CLIP, **settings)
    optimizer.param_groups[0]["momentum"] = 0.9
    freeze(optimizer)
    recorded = record_gradients(optimizer)
    if audit:
        options = {"canaries": 100, "seed": b"tests only", "delta": 1e-5, "claim": 30.0, "through_clip": through_clip}
        audited(optimizer, model, data_loader=loader, **options)
    manager = nullcontext(loader)
    if physical:
        manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
    with manager as batches:
        for data, labels in batches:
            optimizer.zero_grad()
            loss(model(data), labels).backward()
            optimizer.step()
    with manager as batches:  # a second epoch, left early
        data, labels = next(iter(batches))
        optimizer.zero_grad()
        loss(model(data), labels).backward()
        optimizer.step()
    state = {name: value.shape for each in optimizer.state.values() for name, value in each.items()}
    weights = torch.cat([p.detach().reshape(-1) for p in optimizer.params])
    touched = (state, torch.get_rng_state(), weights)
    return recorded, touched, (optimizer.audit if audit else None), optimizer.expected_batch_size


def largest_difference(plain, with_audit, audit, divisor):
    """Between the gradients, once the canaries are put back, in units of the largest entry."""
    assert len(plain) == len(with_audit) == audit.last_round
    largest = 0.0
    for (expected, _), (found, clip), item in zip(plain, with_audit, audit.log.rounds(), strict=True):
        canaries = torch.as_tensor(audit.core.updates(item.present, clip)) / divisor
        difference = found + canaries.to(found.dtype) - expected
        assert item.present.size == 0 or float(canaries.abs().max()) > 0
        largest = max(largest, float(difference.abs().max() / expected.abs().max()))
    return largest


@pytest.mark.parametrize(
    "settings",
    [
        {"through_clip": True},
        {"through_clip": False},
        {"mode": "ghost"},
        {"mode": "functorch"},
        {"mode": "ew"},
        {"through_clip": True, "physical": 16},
        {"mode": "ghost", "physical": 16},
        {"poisson": False},
        {"clipping": "adaptive"},
        pytest.param({"through_clip": False, "noise_multiplier": 0.0}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_rows_noise_and_batches_are_those_without_the_audit(settings):
    if settings.get("clipping") == "adaptive":
        settings = {"through_clip": False, **ADAPTIVE}
    plain, before, _, divisor = steps_of(audit=False, **settings)
    found, after, audit, _ = steps_of(audit=True, **settings)
    assert sum(item.present.size for item in audit.log.rounds()) > 50
    assert largest_difference(plain, found, audit, divisor) < 1e-5
    assert [clip for _, clip in plain] == [clip for _, clip in found]
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])  # nothing was drawn from torch's generator
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_trainer_trains_on_the_rows_of_the_plain_loop(mode, tmp_path):
    """In a Trainer with its callback, against a loop without any audit."""
    require("transformers")
    require("peft")
    from lora_training import make as make_lora
    from lora_training import trainer_of

    from coalmine.integrations.transformers import audited as callback_of

    case = make_lora(mode=mode, lr=0.0)
    plain = record_gradients(case.optimizer)
    while len(plain) < STEPS:
        for batch in case.loader:
            case.optimizer.zero_grad()
            case.loss(case.model(input_ids=batch["input_ids"]).logits, batch["labels"]).backward()
            case.optimizer.step()
            if len(plain) >= STEPS:
                break
    case = make_lora(mode=mode, lr=0.0)
    found = record_gradients(case.optimizer)
    callback = callback_of(canaries=20, seed=b"tests only", delta=1e-5, claim=30.0)
    trainer_of(case, callback, tmp_path, steps=STEPS).train()
    assert largest_difference(plain, found, callback.audit, case.optimizer.expected_batch_size) < 1e-5
