"""The steps of an optimizer: canaries join the sum of the examples, and the audit observes the noised gradient.

A step moves the model against its gradient, so canaries are subtracted from the sum, and the audit observes minus the
noised gradient.
"""

from collections.abc import Callable
from functools import partial
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

OVERWRITTEN = (
    "the per-example gradients of the last step were overwritten in place, and their clipped sum was still to be computed: "
    "assign new ones, or pass audited(deferred=False)"
)
MOST_LATER = 1 << 24  # numbers of a step's per-example gradients that are kept until its measurement: 64 MB


class Step(NamedTuple):
    """A step's noise multiplier, the divisor of its sum, and in the units of the release its clip norm and noise."""

    noise: float
    divisor: float
    clip_norm: float
    noise_std: float


class AuditedSteps:
    """Puts canaries into an optimizer's steps, and observes each release.

    With `scale`, canaries enter the clip that many times longer than the clip norm: all of a step's, or `through_clip` of
    them that the audit's key draws. The others join the clipped sum.
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
        through_clip: int | None,
        note: Callable[[Step], dict[str, Any]],
    ) -> None:
        self._optimizer, self._audit, self._gradients = optimizer, audit, gradients
        self._selection, self._faults, self._recorder = selection, faults, recorder
        self._scale, self._through_clip, self._note = scale, through_clip, note
        self._replays = replays
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
        self._real_state_dict = self._replace("state_dict", self._state_dict)
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
        """Count the examples of a step, and sum them as they should be clipped.

        A step that Opacus skips keeps its sum for the next one.
        """
        if isinstance(self._selection, RowSelection):
            before = self._examples if self._optimizer._is_last_step_skipped else 0
            self._examples = before + self._gradients.examples()
        is_complete = not self._optimizer._check_skip_next_step(pop_next=False)
        if is_complete:
            self._replayed = self._replays.take(self._audit.last_round + 1)
        if self._scale is not None:
            sums = self._clipped_sum()
            if callable(sums):
                self._others = sums
            elif not is_complete:
                self._clipped = sums
            else:
                self._others, self._clipped = self._gradients.combined(sums), None
        return self._real_pre_step(*args, **kwargs)

    def _clipped_sum(self) -> "list[Any] | Callable[[], Any]":
        """The clipped sum of this step's examples so far, computed here because the optimizer's own clip is under test.

        If the whole step is one small batch, a function that computes it beside the training.
        """
        optimizer = self._optimizer
        pairs = zip(optimizer.grad_samples, optimizer.params, strict=True)
        samples = [g.reshape(len(g), p.numel()) for g, p in pairs]  # a step may have no examples
        earlier = [p.summed_grad for p in optimizer.params]
        if self._clipped is not None:
            earlier = self._clipped  # not the optimizer's own sum of earlier physical batches
        norm = float(optimizer.max_grad_norm)
        waits = self._gradients.clips_later and not self._faults.zero_gradients.remain
        is_whole = earlier[0] is None and not optimizer._check_skip_next_step(pop_next=False)
        if waits and is_whole and sum(map(torch.numel, samples)) <= MOST_LATER:
            return partial(_later_sum, samples, norm, [g._version for g in samples])
        current = _sum_of_clipped(samples, norm)
        return current if earlier[0] is None else [a + b.reshape(-1) for a, b in zip(current, earlier, strict=True)]

    def _signal_skip_step(self, do_skip: bool = True) -> None:
        """Pass on BatchMemoryManager's signal whether a batch ends a step."""
        assert isinstance(self._selection, RowSelection)
        self._real_signal(do_skip)
        self._selection.picked.on_skip_signal(ends_step=not do_skip)

    def _add_noise(self) -> None:
        """Let canaries join the complete clipped sum, then add the noise. Opacus calls this once per step."""
        if self._optimizer.step_hook != self._after_noise:
            raise RuntimeError(HOOK_REPLACED)
        if self._audit.watch.active:
            self._audit.flush()  # an alarm of the last step stops this one before it has noise
        self._present = self._selection.canaries(self._examples)
        groups = [group for group in [*self._selection.repeats, self._present] if group.size]
        if self._scale is None:
            self._others = self._gradients.kept("others", self._gradients.sums())
        elif self._gradients.joins and groups:
            groups = self._clip_canaries(groups, self._scale * float(self._optimizer.max_grad_norm))
        if self._gradients.joins and groups:
            size = self._faults.clip_norm * self._gradients.clip_in_sum
            for canaries in groups:
                self._gradients.subtract(self._gradients.sums(), self._audit, canaries, size)
        self._real_add_noise()

    def _clip_canaries(self, groups: list[Indices], size: float) -> list[Indices]:
        """Let the optimizer clip canaries as the rows of one more batch; those that are left must join its sum."""
        few, rest = groups, list[Indices]()
        if self._through_clip is not None:
            *rest, present = groups
            drawn = self._audit.schedule.drawn(self._audit.last_round + 1, present, self._through_clip)
            chosen = set(drawn.tolist())
            few, rest = [drawn], [*rest, np.array([i for i in present.tolist() if i not in chosen], np.int32)]
        rows = [self._gradients.rows(self._audit, group.tolist(), -size) for group in few]  # a step goes against them
        params = self._optimizer.params
        of_examples = [p.grad_sample for p in params]
        for p, gradients, *parts in zip(params, of_examples, *rows, strict=True):
            last = gradients[-1] if isinstance(gradients, list) else gradients
            p.grad_sample = torch.cat([part.to(last.dtype).reshape(-1, *last.shape[1:]) for part in parts])
        self._optimizer.clip_and_accumulate()
        for p, gradients in zip(params, of_examples, strict=True):
            p.grad_sample = gradients
        return [group for group in rest if group.size]

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
        divisor = -step.divisor * self._gradients.clip_in_sum
        if callable(others) and (step.noise or self._present.size):
            return lambda: others() / divisor
        if self._faults.zero_gradients.remain:
            self._faults.zero_gradients.check(self._gradients.parts(others))
        if not (step.noise or self._present.size):
            self.without_others += 1
            return None
        self._gradients.divide(others, divisor)
        return others

    def _state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's state for a checkpoint, once all steps until now are in the log on disk."""
        self._audit.flush(sync=True)
        return self._real_state_dict(*args, **kwargs)

    def _refuse_unseen_step(self, *_: Any) -> None:
        """Stop a step of the optimizer inside, unless the audit observed its release."""
        seen, self._was_observed = self._was_observed, False
        if not seen:
            raise RuntimeError(UNSEEN_STEP)


def _sum_of_clipped(samples: list[Any], clip_norm: float) -> list[Any]:
    """The sum of examples, each clipped to at most `clip_norm`, from a matrix of gradients for each parameter."""
    norms = torch.stack([g.norm(2, dim=1) for g in samples]).norm(2, dim=0)
    factors = (clip_norm / norms).clamp(max=1.0)  # norm 0 gives inf, clamped to 1
    return [factors.to(g.dtype) @ g for g in samples]


def _later_sum(samples: list[Any], clip_norm: float, versions: list[int]) -> Any:
    """The same as one vector, unless the gradients were overwritten since."""
    total = torch.cat(_sum_of_clipped(samples, clip_norm))
    if [g._version for g in samples] != versions:
        raise ValueError(OVERWRITTEN)
    samples.clear()  # the next step's gradients take their memory
    return total
