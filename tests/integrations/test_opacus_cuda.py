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
