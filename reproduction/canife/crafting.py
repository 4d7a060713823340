"""Craft canaries: samples whose gradient is orthogonal to those of a pool and at least as long as the clip norm."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coalmine.argument_checks import nonnegative_array, one_number, whole_number
from coalmine.simulation.clipping import clip_factors
from reproduction.canife.gradients import Gradients, SampleGradients


@dataclass(frozen=True, kw_only=True)
class CanifeSettings:
    """Settings for crafting and auditing; the defaults are those of the paper's comparison (Section 5.3).

    `design_rate` is Adam's learning rate for crafting, which neither paper states.
    """

    noise_multiplier: float
    clip_norm: float = 1.0
    batch_size: int = 128
    pool_size: int = 512  # held-out examples; the canary's gradient becomes orthogonal to theirs
    design_steps: int = 2500
    design_rate: float = 0.03
    audit_every: int = 100  # rounds
    scores: int = 100  # of each kind, with and without the canary, in each audited round

    def __post_init__(self) -> None:
        nonnegative_array("noise_multiplier", one_number("noise_multiplier", self.noise_multiplier))
        for name in ("clip_norm", "design_rate"):
            if not one_number(name, getattr(self, name)) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name, minimum in (("batch_size", 1), ("pool_size", 1), ("design_steps", 0), ("audit_every", 1)):
            whole_number(name, getattr(self, name), minimum=minimum)
        whole_number("scores", self.scores, minimum=10)  # with fewer, a bound at 95 % is not informative

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.clip_norm

    def audited(self, rounds: int) -> range:
        """The audited rounds: the first, and every `audit_every`-th after it."""
        return range(1, whole_number("rounds", rounds, minimum=1) + 1, self.audit_every)


@dataclass(frozen=True)
class CraftedCanaries:
    """One canary for each model: a sample and its soft label, with its gradient.

    `update` is its clipped gradient, models × dim, and `norm` is the gradient's norm before clipping. `losses` are the
    losses during crafting, steps × models.
    """

    sample: Tensor
    label: Tensor
    gradient: Gradients
    update: Tensor
    norm: Tensor
    losses: Tensor


def craft_canaries(
    gradients: SampleGradients,
    vectors: Tensor,
    pool: Gradients,
    *,
    sample: Tensor,
    label: Tensor,
    settings: CanifeSettings,
) -> CraftedCanaries:
    """Craft a canary for each model in `vectors` with `design_steps` steps of Adam.

    `sample` and `label` are the starting points, models × ….

    The loss is Σ ⟨uᵢ, u⟩² + max(C − ‖u‖, 0)², with uᵢ the pool's clipped gradients and u the canary's (CANIFE's
    Section 3.2), in units of the clip norm. Samples may take any value, since a rogue client can send any. The label is
    optimised through its logits, so it stays a distribution over the classes.
    """
    sample = sample.detach().clone().requires_grad_()
    logits = (label + 1e-2).log().detach().requires_grad_()
    shares = clip_factors(pool.norms(), settings.clip_norm)
    optimizer = torch.optim.Adam([sample, logits], lr=settings.design_rate)
    losses = torch.empty(settings.design_steps, len(vectors), device=vectors.device)
    for step in range(settings.design_steps):
        canary = gradients(vectors, sample.unsqueeze(1), logits.softmax(dim=1).unsqueeze(1))
        loss = _loss(pool, shares, canary, settings.clip_norm)
        losses[step] = loss.detach()
        sample.grad, logits.grad = torch.autograd.grad(loss.sum(), [sample, logits])
        optimizer.step()
    label = logits.detach().softmax(dim=1)
    gradient = gradients(vectors, sample.detach().unsqueeze(1), label.unsqueeze(1))
    norm = gradient.norms()
    update = gradient.weighted_sum(clip_factors(norm, settings.clip_norm))
    return CraftedCanaries(sample.detach(), label, gradient, update, norm.squeeze(1), losses)


def interference(gradients: Gradients, canary: Gradients) -> Tensor:
    """For each model, the mean absolute cosine of its canary with the other samples' gradients."""
    cosines = gradients.products(canary) / (gradients.norms() * canary.norms())
    return cosines.nan_to_num(0.0).abs().mean(dim=1)


def _loss(pool: Gradients, shares: Tensor, canary: Gradients, clip_norm: float) -> Tensor:
    norm = canary.norms()
    products = pool.products(canary) * shares * (clip_norm / norm).clamp(max=1.0)
    shortfall = (clip_norm - norm).clamp(min=0.0).squeeze(1)
    return (products / clip_norm**2).square().sum(dim=1) + (shortfall / clip_norm).square()
