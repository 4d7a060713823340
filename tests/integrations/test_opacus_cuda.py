"""Opacus on a CUDA device: the audit measures a step during the next one, and keeps its vectors between steps."""

import numpy as np
import pytest
from requires import require

torch = require("torch")
require("opacus")
from opacus_training import WARNINGS, make  # noqa: E402

from coalmine import Claim, mechanism_epsilon  # noqa: E402
from coalmine.canaries import rotation_torch  # noqa: E402
from coalmine.integrations.opacus import audited, gradients  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(*WARNINGS),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 6


def trained(*, mode="hooks", noise=1.0, through_clip=False, frozen=False, **settings):
    model, optimizer, loss, loader, _ = make(examples=400, batch=200, mode=mode)
    model.cuda()
    torch.cuda.manual_seed(3)
    optimizer.generator = torch.Generator("cuda").manual_seed(4)
    real = optimizer.add_noise

    def add_noise():
        stated, optimizer.noise_multiplier = optimizer.noise_multiplier, noise * optimizer.noise_multiplier
        real()
        optimizer.noise_multiplier = stated

    optimizer.add_noise = add_noise
    audited(
        optimizer,
        model,
        sampling_probability=0.5,
        canaries=400,
        seed=b"tests only",
        delta=1e-5,
        through_clip=through_clip,
        **settings,
    )
    batches = [batch for batch in loader if len(batch[0])]
    torch.manual_seed(5)
    for step in range(STEPS):
        data, labels = (each.cuda() for each in batches[step % len(batches)])
        optimizer.zero_grad()
        (loss(model(data), labels) * (0.0 if frozen else 1.0)).backward()
        optimizer.step()
    return optimizer


def rounds(optimizer):
    return list(optimizer.audit.log.rounds())


def assert_same(one, other):
    assert len(one) == len(other) == STEPS
    for first, second in zip(one, other, strict=True):
        assert first.present.tolist() == second.present.tolist()
        np.testing.assert_allclose(first.cosines, second.cosines, atol=1e-6)
        np.testing.assert_allclose(first.residual_cosines, second.residual_cosines, atol=1e-6)
        np.testing.assert_allclose(first.layer_rests, second.layer_rests, rtol=1e-5)
        np.testing.assert_allclose(first.layer_others, second.layer_others, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("mode", "through_clip"), [("hooks", False), ("hooks", True), ("ghost", False)])
def test_a_step_measured_during_the_next_one_has_the_same_numbers(mode, through_clip, monkeypatch):
    kept = trained(mode=mode, through_clip=through_clip)
    assert kept.add_noise.__self__._gradients.reuses_memory
    monkeypatch.setattr(gradients, "MOST_KEPT", 0)
    fresh = trained(mode=mode, through_clip=through_clip, deferred=False)
    assert not fresh.add_noise.__self__._gradients.reuses_memory
    assert_same(rounds(kept), rounds(fresh))
    monkeypatch.setattr(rotation_torch, "_GRAPH", 0)  # as if the vectors were too long to keep
    streamed = trained(mode=mode, through_clip=through_clip)
    assert_same(rounds(streamed), rounds(fresh))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_honest_noise_passes_and_half_of_it_does_not(mode):
    claim = Claim.mechanism(mechanism_epsilon(1.0, delta=1e-5, participations=STEPS), participations=STEPS)
    assert trained(mode=mode, claim=claim).audit.finish().verdict.outcome == "PASS"
    assert trained(mode=mode, claim=claim, noise=0.5).audit.finish().verdict.outcome == "VIOLATION"


def test_parameters_without_a_gradient_are_named_although_nothing_waits_for_the_device():
    optimizer = trained(frozen=True)
    with pytest.warns(
        UserWarning, match="received noise although their gradient was 0 in every step: 0.weight, 0.bias"
    ):
        optimizer.audit.finish()


class Middle(torch.nn.Module):  # type: ignore[name-defined]
    """Dropout, whose masks come from the GPU's generator; rows see each other if `coupled`."""

    def __init__(self, net, *, coupled):
        super().__init__()
        self.net, self.coupled = net, coupled

    def forward(self, x):
        kept = torch.nn.functional.dropout(x, 0.3, self.training)
        return self.net(kept - kept.mean(0, keepdim=True) if self.coupled else kept)


def replayed(*, coupled, autocast=False, mode="hooks", **settings):
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(7)
    torch.cuda.manual_seed_all(7)
    body = torch.nn.Sequential(torch.nn.Linear(30, 60), torch.nn.ReLU(), torch.nn.Linear(60, 5))
    net = Middle(body, coupled=coupled).cuda()
    data = TensorDataset(10 * torch.randn(400, 30), torch.randint(0, 5, (400,)))
    made = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        criterion=torch.nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=80),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    model, optimizer, loader = made[0], made[1], made[-1]
    loss = made[2] if len(made) == 4 else torch.nn.CrossEntropyLoss()
    audited(
        optimizer, model, data_loader=loader, canaries=30, seed=b"tests only", delta=1e-5, through_clip=False,
        steps=10_000, **settings,
    )  # fmt: skip
    for rows, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            value = loss(model(rows.cuda()), labels.cuda())
        value.backward()
        optimizer.step()
    return optimizer, [p.detach().clone() for p in model.parameters()]


def rows_item(optimizer):
    return next(item for item in optimizer.audit.finish().audited if item.name == "rows")


@pytest.mark.parametrize(("mode", "autocast"), [("hooks", False), ("hooks", True), ("ghost", False)])
def test_steps_on_a_gpu_are_replayed_with_its_own_random_numbers(mode, autocast):
    """Honest rows move one clip norm at most, rows that see each other more, and training is the one without replays."""
    torch.backends.cuda.matmul.allow_tf32 = False
    honest, weights = replayed(coupled=False, mode=mode, autocast=autocast)
    item = rows_item(honest)
    assert item.status == "checked", item.detail
    assert item.replayed.worst.factor <= 1 + item.replayed.worst.tolerance
    found, _ = replayed(coupled=True, mode=mode, autocast=autocast)
    assert rows_item(found).status == "failed"
    assert rows_item(found).replayed.worst.factor > 1.2
    _, without = replayed(coupled=False, mode=mode, autocast=autocast, replay=False)
    assert all(torch.equal(one, other) for one, other in zip(weights, without, strict=True))
