"""Audit Opacus: canaries take part in steps as examples do, and every noised gradient is observed.

    model, optimizer, loader = PrivacyEngine().make_private(...)
    audit = Audit(sum(p.numel() for p in optimizer.params), canaries=1_000, seed=..., delta=1e-5)
    attached = attach(optimizer, audit, sample_rate=1 / len(loader))
    ...  # train as ever
    print(attached.finish())

A canary is drawn with the examples' own probability in each step, so canaries are shown unequally often; the audit judges
the noise at each number of presentations. Canaries are subtracted from gradients, for a step goes against them: what is
added to the model, and observed, is minus the gradient.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import torch
    from opacus.optimizers import (
        AdaClipDPOptimizer,
        DistributedDPOptimizer,
        DPOptimizer,
        DPOptimizerFastGradientClipping,
        DPPerLayerOptimizer,
        FSDPOptimizerFastGradientClipping,
    )
    from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import DistributedDPOptimizerFastGradientClipping
except ImportError as error:
    raise ImportError("auditing Opacus needs: pip install 'coalmine[opacus]'") from error

from coalmine.audit.audit import Audit
from coalmine.audit.result import AuditResult
from coalmine.audit.schedule import Indices
from coalmine.audit.verdict import Claim
from coalmine.checks import one_number, shown
from coalmine.integrations.checks import positive
from coalmine.integrations.claims import noise_claim
from coalmine.integrations.journal import Journal

DISTRIBUTED = (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    FSDPOptimizerFastGradientClipping,
)


def attach(
    optimizer: DPOptimizer,
    audit: Audit,
    *,
    sample_rate: float,
    through_clip: bool = False,
    scale: float | None = None,
    rng: np.random.Generator | None = None,
) -> "Attachment":
    """Put the audit's canaries into every step from here on, and observe what each step releases.

    `sample_rate` is the probability of an example to be in a step. Canaries enter the clipped sum, as one example's clipped
    gradient each, so hooks and ghost modes, BatchMemoryManager and an adaptive clip norm are all alike. With `through_clip`
    they enter before the clip, `scale` (10) times too long, and the clip is audited too: hooks mode with flat clipping only,
    and one transform for each canary in the step. The accountant's hook goes on being called. Which canaries are in a step
    follows from the audit's seed, or is drawn from `rng`.
    """
    _check_optimizer(optimizer, audit, through_clip)
    _check_unfinished(audit)
    rate = one_number("sample_rate", sample_rate)
    if not 0 < rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], got {rate}")
    if scale is not None and not through_clip:
        raise ValueError("a scale needs through_clip=True: behind the clip a canary is as long as the clip allows")
    length = positive("scale", 10.0 if scale is None else scale) if through_clip else None
    return Attachment(optimizer, audit, rate, length, rng)


class Attachment:
    """An audit in an optimizer. `finish` observes the final model; `detach` leaves the optimizer as it was."""

    def __init__(
        self,
        optimizer: DPOptimizer,
        audit: Audit,
        sample_rate: float,
        scale: float | None,
        rng: np.random.Generator | None,
    ) -> None:
        self._optimizer, self._audit, self._rate, self._scale, self._rng = optimizer, audit, sample_rate, scale, rng
        self._initial = self._parameters() if audit.last_round == 0 else None
        self._noise_multipliers: set[float] = set()
        self._present: Indices = np.zeros(0, dtype=np.int32)
        self._others: Any = None
        self._journal = Journal(audit, self._settings())
        self._own: dict[str, Any] = {}  # what the optimizer had of its own under the names put over
        self._real_add_noise = self._put("add_noise", self._add_noise)
        self._real_clip = self._put("clip_and_accumulate", self._clip_and_accumulate) if scale is not None else None
        self._real_hook = optimizer.step_hook
        optimizer.attach_step_hook(self._after_noise)

    def finish(
        self,
        *,
        claim: Claim | float | None = None,
        accounted: float | None = None,
        initial: Any = None,
        task: str | None = None,
    ) -> AuditResult:
        """Observe the final model and return what was found; in a run directory, write it too, under the task's name.

        The claim is by default that of the optimizer's own settings, `noise_claim`; `accounted`, the accountant's epsilon,
        is judged beside it on the rungs that it speaks of. `initial` is needed only after a restart, for `final-update`.
        """
        first = self._initial if initial is None else initial
        self._audit.observe_final(self._parameters(), initial=first)
        smallest = min(self._noise_multipliers, default=0.0)
        noise = smallest if len(self._noise_multipliers) == 1 else None
        if claim is None and noise:
            claim = self.noise_claim()
        return self._journal.finish(claim, noise=noise, accounted=accounted, task=task, noise_multiplier=smallest)

    def noise_claim(self) -> Claim:
        """The claim that the optimizer's settings make: this noise multiplier, in every step."""
        if len(self._noise_multipliers) != 1:
            raise ValueError(
                f"the noise claim needs one noise multiplier in all steps, got {sorted(self._noise_multipliers)}; "
                "claim an epsilon of your own"
            )
        return noise_claim(self._audit, next(iter(self._noise_multipliers)))

    def detach(self) -> None:
        """Take the audit out of the optimizer, if it is still in; the accountant's hook stays."""
        if not self._own:
            return
        for name, own in self._own.items():
            delattr(self._optimizer, name)
            if own is not None:
                setattr(self._optimizer, name, own)
        self._own = {}
        self._optimizer.step_hook = self._real_hook

    def _put(self, name: str, ours: Callable[[], None]) -> Callable[[], None]:
        real: Callable[[], None] = getattr(self._optimizer, name)
        self._own[name] = vars(self._optimizer).get(name)
        setattr(self._optimizer, name, ours)
        return real

    def _clip_and_accumulate(self) -> None:
        """The optimizer's own clip, with the canaries among the last physical batch of a step."""
        assert self._real_clip is not None
        assert self._scale is not None
        if not self._optimizer._check_skip_next_step(pop_next=False):
            self._draw()
            self._others = -self._clipped_sum()
            if self._present.size:
                size = float(self._optimizer.max_grad_norm)
                rows = [self._audit.update(i, size, scale=self._scale, like=self._others) for i in self._present]
                _append_rows(self._optimizer.params, -torch.stack(rows))
        self._real_clip()

    def _add_noise(self) -> None:
        """Once a step, on the clipped sum of all its examples."""
        if self._scale is None:
            self._draw()
            self._others = -torch.cat([p.summed_grad.reshape(-1) for p in self._optimizer.params])
            if self._present.size:
                canaries = self._audit.updates(self._present, float(self._optimizer.max_grad_norm), like=self._others)
                for p, part in zip(self._optimizer.params, _parts(canaries, self._optimizer.params), strict=True):
                    p.summed_grad -= part.view_as(p.summed_grad)
        self._real_add_noise()

    def _after_noise(self, optimizer: DPOptimizer) -> None:
        if self._real_hook is not None:
            self._real_hook(optimizer)
        divisor = 1.0
        if optimizer.loss_reduction == "mean":
            divisor = float(optimizer.expected_batch_size * optimizer.accumulated_iterations)
        clip_norm = float(optimizer.max_grad_norm) / divisor
        noise = _update_noise_multiplier(optimizer)
        self._noise_multipliers.add(noise)
        self._audit.observe_round(
            self._audit.last_round + 1,
            -torch.cat([p.grad.reshape(-1) for p in optimizer.params]),
            present=self._present,
            others=self._others / divisor if noise or self._present.size else None,  # else nothing is left to see
            noise_std=noise * clip_norm,
            clip_norm=clip_norm,
        )
        self._others = None
        self._journal.add_round(self._audit.last_round, canaries=int(self._present.size), clip_norm=clip_norm * divisor)

    def _draw(self) -> None:
        if self._rng is None:
            self._present = self._audit.sampled_canaries(self._audit.last_round + 1, self._rate)
        else:
            drawn = self._rng.random(self._audit.settings.canaries) < self._rate
            self._present = np.flatnonzero(drawn).astype(np.int32)

    def _clipped_sum(self) -> Any:
        """What the clip makes of this step's examples if it is right: our own, for theirs is on trial."""
        samples = [g.reshape(len(g), -1) for g in self._optimizer.grad_samples]
        norms = torch.stack([g.norm(2, dim=1) for g in samples]).norm(2, dim=0)
        factors = (float(self._optimizer.max_grad_norm) / norms).clamp(
            max=1.0
        )  # norm 0 gives inf, which the clamp makes 1
        here = torch.cat([factors.to(g.dtype) @ g for g in samples])
        before = [p.summed_grad for p in self._optimizer.params]
        return here if before[0] is None else here + torch.cat([part.reshape(-1) for part in before])

    def _settings(self) -> dict[str, Any]:
        optimizer = self._optimizer
        privacy = {
            "noise_multiplier": float(optimizer.noise_multiplier),
            "clip_norm": float(optimizer.max_grad_norm),
            "sample_rate": self._rate,
            "delta": self._audit.settings.delta,
        }
        canaries = {"count": self._audit.settings.canaries, "through_clip": self._scale is not None}
        return {"trainer": "opacus", "privacy": privacy, "canaries": canaries}

    def _parameters(self) -> Any:
        return torch.cat([p.detach().reshape(-1) for p in self._optimizer.params]).clone()


def _check_optimizer(optimizer: DPOptimizer, audit: Audit, through_clip: bool) -> None:
    if not isinstance(optimizer, DPOptimizer):
        raise ValueError(f"optimizer must be Opacus's own, as make_private returns it, got {shown(optimizer)}")
    if isinstance(optimizer, DISTRIBUTED):
        raise ValueError(
            f"{type(optimizer).__name__} sums over processes after its noise: audit one process of it alone"
        )
    if isinstance(getattr(optimizer.add_noise, "__self__", None), Attachment):
        raise ValueError("this optimizer is audited already: detach the first audit")
    dim = sum(p.numel() for p in optimizer.params)
    if dim != audit.settings.dim:
        raise ValueError(f"the audit must have dim = {dim}, as many as the optimizer has parameters, got {audit!r}")
    if through_clip and isinstance(optimizer, DPOptimizerFastGradientClipping | DPPerLayerOptimizer):
        raise ValueError(
            f"through_clip needs rows of grad_sample and one clip norm, which {type(optimizer).__name__} has not; "
            "leave it out, and canaries enter behind the clip"
        )


def _check_unfinished(audit: Audit) -> None:
    """Before training: a step would be refused behind a final model."""
    if audit.log.final is None:
        return
    if audit.directory is None:
        raise ValueError("this audit has observed its final model: make a new one, or rewind_to a round to go on from")
    raise ValueError(f"{audit.directory.path} holds a finished audit: name another directory, or remove it")


def _update_noise_multiplier(optimizer: DPOptimizer) -> float:
    """Of the gradients alone: with an adaptive clip, z_Δ = (z⁻² − (2σ_b)⁻²)^−½, for its count has noise of its own."""
    noise = float(getattr(optimizer, "_adjusted_noise_multiplier", optimizer.noise_multiplier))
    if isinstance(optimizer, AdaClipDPOptimizer) and noise:
        return float((noise**-2 - (2 * float(optimizer.unclipped_num_std)) ** -2) ** -0.5)
    return noise


def _parts(vector: Any, params: list[Any]) -> Any:
    return vector.split([p.numel() for p in params])


def _append_rows(params: list[Any], rows: Any) -> None:
    """Rows, of the whole model's length each, as further examples of the batch that was computed last."""
    for p, part in zip(params, rows.split([p.numel() for p in params], dim=1), strict=True):
        batches = p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample]
        last = batches[-1]
        longer = torch.cat([last, part.to(last.dtype).view(-1, *last.shape[1:])])
        p.grad_sample = [*batches[:-1], longer] if isinstance(p.grad_sample, list) else longer
