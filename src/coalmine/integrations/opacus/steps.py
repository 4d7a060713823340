"""The steps of an optimizer: canaries join the sum of the examples, and the audit observes the noised gradient.

A step moves the model against its gradient, so canaries are subtracted from the sum, and the audit observes minus the
noised gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from opacus.optimizers import DPOptimizer

from coalmine.audit import Audit
from coalmine.integrations.opacus.accounting import update_noise_multiplier
from coalmine.integrations.opacus.faults import Faults
from coalmine.integrations.opacus.gradients import OneProcess
from coalmine.integrations.opacus.replay import Replays
from coalmine.integrations.opacus.selection import RowSelection, Selection
from coalmine.integrations.recorder import RunRecorder
from coalmine.measure.schedule import Indices
from coalmine.measure.vectors import NotFiniteError

HOOK_REPLACED = (
    "attach_step_hook replaced the audit's hook, so this step would not be audited: call it before audited(), which goes on "
    "calling that hook"
)
METHOD_REPLACED = (
    "add_noise or pre_step of the optimizer was replaced, so this step would not be audited: replace it before audited(), "
    "which goes on calling it"
)
UNSEEN_STEP = (
    "this step moves the weights, but the audit saw no release: call step() of the optimizer that audited() returned, and "
    "make_private before audited(); unaudited(optimizer) ends the audit"
)


class Step(NamedTuple):
    """A step's noise multiplier, the divisor of its sum, and in the units of the release its clip norm and noise."""

    noise: float
    divisor: float
    clip_norm: float
    noise_std: float


class AuditedSteps:
    """Puts canaries into an optimizer's steps, and observes each release.

    With `scale`, canaries enter the clip that many times longer than the clip norm. Otherwise they join the clipped sum.
    `note` takes a step before it is observed, and returns values for its line of metrics.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        audit: Audit,
        gradients: OneProcess,
        selection: Selection,
        faults: Faults,
        recorder: RunRecorder,
        replays: Replays,
        *,
        scale: float | None,
        note: Callable[[Step], dict[str, Any]],
    ) -> None:
        self._optimizer, self._audit, self._gradients = optimizer, audit, gradients
        self._selection, self._faults, self._recorder = selection, faults, recorder
        self._scale, self._note, self._replays = scale, note, replays
        self._replayed: dict[str, Any] = {}  # what the replay of this step showed, for the metrics
        self._examples = 0  # per-example gradients in the step so far
        self._present: Indices = np.zeros(0, dtype=np.int32)
        self._others: Any = None  # the clipped sum of the examples, in the form that the audit takes
        self._clipped: list[Any] | None = None  # of the physical batches so far, one tensor for each parameter
        self._step: Step | None = None
        self._was_observed = False  # whether the step that is being taken was
        self.count = self.without_others = 0  # steps
        self._attach()

    def _attach(self) -> None:
        optimizer, self._replaced = self._optimizer, dict[str, Any]()
        self._real_pre_step = self._replace("pre_step", self._pre_step)
        self._real_add_noise = self._replace("add_noise", self._add_noise)
        completes = self._gradients.observed_after
        self._real_completion = None if completes is None else self._replace(completes, self._complete)
        if isinstance(self._selection, RowSelection):
            self._real_signal = self._replace("signal_skip_step", self._signal_skip_step)
        self._real_hook = optimizer.step_hook
        optimizer.attach_step_hook(self._after_noise)
        self._guard = optimizer.original_optimizer.register_step_pre_hook(self._refuse_unseen_step)

    def _replace(self, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        """Replace a method of the optimizer, and return the original."""
        real: Callable[..., Any] = getattr(self._optimizer, name)
        self._replaced[name] = vars(self._optimizer).get(name)
        setattr(self._optimizer, name, ours)
        return real

    def detach(self) -> None:
        """Restore the optimizer's own methods and hook, and the loader."""
        for name, original in self._replaced.items():
            delattr(self._optimizer, name)
            if original is not None:
                setattr(self._optimizer, name, original)
        if isinstance(self._selection, RowSelection):
            self._selection.picked.release()
        self._faults.release()
        self._replays.release()
        self._optimizer.step_hook = self._real_hook
        self._guard.remove()

    def _pre_step(self, *args: Any, **kwargs: Any) -> Any:
        """Count the examples of a step, and let canaries enter the clip with its last physical batch.

        A step that Opacus skips keeps its sum for the next one.
        """
        if isinstance(self._selection, RowSelection):
            before = self._examples if self._optimizer._is_last_step_skipped else 0
            self._examples = before + self._gradients.examples()
        is_complete = not self._optimizer._check_skip_next_step(pop_next=False)
        if is_complete:
            self._replayed = self._replays.take(self._audit.last_round + 1)
        if self._scale is not None:
            self._clipped = self._clipped_sum()
            if is_complete:
                self._send_through_clip(self._scale)
        return self._real_pre_step(*args, **kwargs)

    def _send_through_clip(self, scale: float) -> None:
        assert self._clipped is not None
        self._present = self._selection.canaries(self._examples)
        self._others, self._clipped = self._gradients.combined(self._clipped), None
        if self._present.size and self._gradients.joins:
            size = -scale * float(self._optimizer.max_grad_norm)  # a step goes against the gradient
            groups = [group.tolist() for group in [*self._selection.repeats, self._present] if group.size]
            rows = [self._gradients.rows(self._audit, group, size) for group in groups]
            _append_rows(self._optimizer.params, rows)

    def _clipped_sum(self) -> list[Any]:
        """The clipped sum of this step's examples so far, computed here because the optimizer's own clip is under test."""
        pairs = zip(self._optimizer.grad_samples, self._optimizer.params, strict=True)
        samples = [g.reshape(len(g), p.numel()) for g, p in pairs]  # a step may have no examples
        norms = torch.stack([g.norm(2, dim=1) for g in samples]).norm(2, dim=0)
        factors = (float(self._optimizer.max_grad_norm) / norms).clamp(max=1.0)  # norm 0 gives inf, clamped to 1
        current = [factors.to(g.dtype) @ g for g in samples]
        earlier = [p.summed_grad for p in self._optimizer.params]
        if self._clipped is not None:
            earlier = self._clipped  # not the optimizer's own sum of earlier physical batches
        return current if earlier[0] is None else [a + b.reshape(-1) for a, b in zip(current, earlier, strict=True)]

    def _signal_skip_step(self, do_skip: bool = True) -> None:
        """Pass on BatchMemoryManager's signal whether a batch ends a step."""
        assert isinstance(self._selection, RowSelection)
        self._real_signal(do_skip)
        self._selection.picked.on_skip_signal(ends_step=not do_skip)

    def _add_noise(self) -> None:
        """Add canaries to the complete clipped sum, then the noise. Opacus calls this once per step."""
        if self._optimizer.step_hook != self._after_noise:
            raise RuntimeError(HOOK_REPLACED)
        if self._scale is None:
            self._present = self._selection.canaries(self._examples)
            sums = self._gradients.sums()
            self._others = self._gradients.kept("others", sums)
            if self._gradients.joins:
                size = self._faults.clip_norm * self._gradients.clip_in_sum
                for canaries in [*self._selection.repeats, self._present]:
                    if canaries.size:
                        self._gradients.subtract(sums, self._audit, canaries, size)
        self._real_add_noise()

    def _after_noise(self, optimizer: DPOptimizer) -> None:
        if self._others is None:
            raise RuntimeError(METHOD_REPLACED)
        if self._real_hook is not None:
            self._real_hook(optimizer)
        divisor, noise = self._gradients.divisor, update_noise_multiplier(optimizer)
        noise_std = noise * float(optimizer.max_grad_norm) / divisor
        self._step = Step(noise, divisor, self._faults.clip_norm / divisor, noise_std)
        if self._real_completion is None:
            self._observe(self._step)

    def _complete(self) -> None:
        """Observe the release, which is complete once the gradients of all ranks are summed, after the step hook."""
        assert self._real_completion is not None
        assert self._step is not None
        with self._gradients.lost_ranks():
            self._real_completion()
        self._observe(self._step)

    def _observe(self, step: Step) -> None:
        self._step, number = None, self._audit.last_round + 1
        self.count += 1
        line = self._note(step)
        others = self._taken_others(step)
        release = self._gradients.kept("release", self._gradients.release())
        self._gradients.divide(release, -1.0)
        try:
            self._audit.observe_round(
                number,
                release,
                present=self._present,
                others=others,
                noise_std=step.noise_std,
                clip_norm=step.clip_norm,
                scale=1.0 if self._scale is None else self._scale,
                participants=self._selection.participants,
                copy=self._gradients.reuses_memory,
            )
        except NotFiniteError as error:
            raise NotFiniteError(
                f"the gradient of step {number}, or of the one before it, is NaN or infinite, so nothing can be released: "
                f"check the loss and the learning rate ({error})"
            ) from None
        self._recorder.add_round(
            self._audit.last_round,
            canaries=int(self._present.size),
            examples=self._selection.participants,
            gradient_noise_multiplier=step.noise,
            **line,
            **self._replayed,
        )
        self._replayed = {}
        self._replays.prepare(self._audit.last_round + 1)
        self._was_observed = True

    def _taken_others(self, step: Step) -> Any:
        """Minus the sum of the examples in the units of the release; None in a step with neither noise nor canaries."""
        others, self._others = self._others, None
        if self._faults.zero_gradients.remain:
            self._faults.zero_gradients.check(self._gradients.parts(others))
        if not (step.noise or self._present.size):
            self.without_others += 1
            return None
        self._gradients.divide(others, -step.divisor * self._gradients.clip_in_sum)
        return others

    def _refuse_unseen_step(self, *_: Any) -> None:
        """Stop a step of the optimizer inside, unless the audit observed its release."""
        seen, self._was_observed = self._was_observed, False
        if not seen:
            raise RuntimeError(UNSEEN_STEP)


def _append_rows(params: list[Any], groups: Sequence[Sequence[Any]]) -> None:
    """Append groups of rows, each a matrix for each parameter, to the last batch as additional examples."""
    for p, *parts in zip(params, *groups, strict=True):
        batches = p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample]
        last = batches[-1]
        longer = torch.cat([last, *(part.to(last.dtype).reshape(-1, *last.shape[1:]) for part in parts)])
        p.grad_sample = [*batches[:-1], longer] if isinstance(p.grad_sample, list) else longer
