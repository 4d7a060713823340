"""Replays some of an optimizer's steps without one row: the same hooks, the same clip, the same random numbers.

A step is replayed after its last backward pass and before its clip. The neighbour keeps the batch's shape: the row's content
is zeros, and the gradient of its outputs is 0. Everything that a replay touches is restored.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

from coalmine.argument_checks import Floats, one_line, short_repr
from coalmine.integrations.opacus.captured import (
    Capture,
    CapturedPass,
    by_another_axis,
    by_row,
    generators_of,
    output_tensors,
)
from coalmine.integrations.opacus.faults import Faults
from coalmine.integrations.opacus.gradients import OneProcess
from coalmine.integrations.opacus.selection import RowSelection, Selection
from coalmine.measure.ranks import Ranks
from coalmine.replay.neighbours import copied, mapped, row_count
from coalmine.replay.plan import ReplayPlan, rows_of
from coalmine.replay.randomness import Draws, Randomness
from coalmine.replay.state import OF_TORCH, Attributes, Remembered
from coalmine.replay.step import Comparison, Run
from coalmine.replay.witness import read_step, unshown, witness
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.replayed_rows import UNTESTED, ReplayedRows, ReplayedStep

Loss = Callable[[Any, Any], Any]
MOST_OUTPUTS = 4096  # numbers of each row's output that are compared
LARGEST = 1 << 27  # parameters of a model whose sums are compared on the host
LARGEST_FROZEN = (
    1 << 18
)  # numbers of a frozen parameter that is compared: statistics are small, matrices of base models not
SUM_OVER_ROWS = "the loss was taken as a sum over rows"


def checked_replay(replay: Any, model: Any, data_loader: Any) -> "bool | Loss":
    """The option `replay` of `audited`; TypeError for anything else."""
    if isinstance(replay, bool):
        return replay
    if not callable(replay):
        raise TypeError(f"replay must be True, False, or a function of model and batch, got {short_repr(replay)}")
    if not isinstance(model, torch.nn.Module):
        raise ValueError("replay=lambda model, batch: loss needs the model: audited(optimizer, model, …)")
    if data_loader is None:
        raise ValueError(
            "replay=lambda model, batch: loss needs data_loader, from which it takes the batches of a step"
        )
    given: Loss = replay
    return given


class Replays:
    """The replays of a run: which steps are due, what they showed, and why there are none."""

    def __init__(
        self,
        optimizer: DPOptimizer,
        model: Any,
        gradients: OneProcess,
        selection: Selection,
        faults: Faults,
        *,
        key: bytes,
        planned: int | None,
        replay: "bool | Loss",
        names: Callable[[], list[str]],
        earlier: list[dict[str, Any]],
    ) -> None:
        self._optimizer, self._model, self._gradients = optimizer, model, gradients
        self._selection, self._faults, self._key, self._names = selection, faults, key, names
        self._loss = replay if callable(replay) else None
        self.plan = ReplayPlan.of(planned, key)
        self._obstacle = _obstacle(optimizer, model, gradients, replay)
        self.steps = [step for line in earlier if (step := read_step(line.get("replayed"))) is not None]
        self.passes = sum(line["replay_passes"] for line in earlier if isinstance(line.get("replay_passes"), int))
        self._done = max((step.step for step in self.steps), default=0)
        self._capture = None if self._obstacle else Capture(model)

    def prepare(self, step: int) -> None:
        """Before a step: capture its passes if it is due."""
        if self._capture is None:
            return
        if self.plan.is_due(step, self._done):
            self._capture.start()
            self._capture.begin_step()
        elif self._capture.active:
            self._capture.stop()

    def release(self) -> None:
        if self._capture is not None:
            self._capture.stop()

    def take(self, step: int) -> dict[str, Any]:
        """Replay a step whose gradients are complete, if it is due; returns what its line of metrics holds."""
        if self._capture is None or not self._capture.active:
            return {}
        count = self._rows()
        if count < 2:  # a row alone can move no other; the next step is due
            return {}
        problem = None if self._loss else self._capture.problem(count)
        found = unshown(step, problem) if problem else self._replayed(step, count)
        self.steps.append(found)
        self._done = step
        return {"replayed": found.to_dict(), "replay_passes": self._last_passes}

    _last_passes = 0

    def _rows(self) -> int:
        """The rows of the batch whose gradients the parameters hold: the last one of a step."""
        for p in self._optimizer.params:
            for name in ("grad_sample", "_norm_sample"):
                rows = getattr(p, name, None)
                if rows is not None:
                    return len(rows[-1]) if isinstance(rows, list) else len(rows)
        return 0

    def _replayed(self, step: int, count: int) -> ReplayedStep:
        assert self._capture is not None
        before = Randomness(generators_of(self._model))
        with warnings.catch_warnings(action="ignore"), _Held(self._optimizer, self._model, self._faults) as held:
            try:
                runner = self._runner(held, count)
                rows = rows_of(step, count, self.plan.rows, self._key)
                clip_norm = self._faults.clip_norm * self._gradients.clip_in_sum
                comparison = Comparison(runner, runner.batch, clip_norm, "add-remove", None, most_cases=self.plan.rows)
                outcome = comparison.of_rows(rows, extremes=True)
                self._last_passes = runner.passes
                self.passes += runner.passes
                return witness(step, outcome, precision=runner.precision)
            except Exception as error:  # whatever it is, the training goes on
                return unshown(
                    step, f"the step could not be replayed ({type(error).__name__}: {one_line(str(error))[:200]})"
                )
            finally:
                before.restore()

    def _runner(self, held: "_Held", count: int) -> "_Runner":
        assert self._capture is not None
        if self._loss is None:
            assert self._capture.taken is not None
            return _CapturedRunner(held, self._names(), self._capture.taken, count)
        assert isinstance(self._selection, RowSelection)
        randomness = (
            Randomness(generators_of(self._model)) if self._capture.taken is None else self._capture.taken.randomness
        )
        batch = self._selection.picked.fetch(count)
        device = self._optimizer.params[0].device
        moved = mapped(batch, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
        return _LossRunner(held, self._names(), self._loss, moved, randomness)

    def item(self, ranks: Ranks) -> AuditedItem:
        """What the replays of all ranks showed; call it on every rank."""
        own = {"steps": [step.to_dict() for step in self.steps], "passes": self.passes}
        everywhere = ranks.gather(lambda: own)
        steps = [step for each in everywhere for values in each["steps"] if (step := read_step(values)) is not None]
        if self._obstacle is not None and not steps:
            return AuditedItem("rows", "not checked", f"{self._obstacle}: {UNTESTED}")
        replayed = ReplayedRows(
            steps=tuple(sorted(steps, key=lambda step: step.step)),
            passes=sum(each["passes"] for each in everywhere),
            assumes=None if self._loss else SUM_OVER_ROWS,
        )
        return AuditedItem.of_rows(replayed)


class _Held:
    """The state of optimizer and model at the end of a step's last backward pass, which every run starts from."""

    def __init__(self, optimizer: DPOptimizer, model: torch.nn.Module, faults: Faults) -> None:
        self.optimizer, self.model, self._faults = optimizer, model, faults
        self._parameters = [
            (p, p.grad, dict(vars(p))) for p in {id(p): p for p in [*model.parameters(), *optimizer.params]}.values()
        ]
        self._modules = [Attributes(part, skip=OF_TORCH) for part in model.modules()]
        self._optimizer_state = Attributes(optimizer)
        trained = {id(p) for p in optimizer.params}
        frozen = [each for each in model.parameters() if id(each) not in trained and each.numel() <= LARGEST_FROZEN]
        self._frozen = {id(each) for each in frozen}
        kept = [*(each for each in model.buffers() if id(each) not in trained), *frozen]
        self._buffers = [(each, each.detach().clone()) for each in kept]
        self._asked = faults.asked_for_norms
        self.remembered = Remembered(model, LARGEST_FROZEN)

    def __enter__(self) -> "_Held":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put everything back, the per-example gradients of the step included."""
        self._restore_modules()
        for p, grad, attributes in self._parameters:
            vars(p).clear()
            vars(p).update(attributes)
            p.grad = grad
        self._faults.asked_for_norms = self._asked

    def rewind(self) -> None:
        """The state before the step's last forward pass: the sums of its earlier passes stay."""
        self._restore_modules()
        for p, _, attributes in self._parameters:
            vars(p).clear()
            vars(p).update(attributes)
            p.grad = None
            for name in ("_norm_sample", "_current_grad_sample"):
                vars(p).pop(name, None)
            if "grad_sample" in attributes:
                samples = attributes["grad_sample"]
                earlier = [each.detach() for each in samples[:-1]] if isinstance(samples, list) else []
                p.grad_sample = earlier or None
            if attributes.get("summed_grad") is not None:
                p.summed_grad = attributes["summed_grad"].detach().clone()

    def _restore_modules(self) -> None:
        self._optimizer_state.restore()
        for part in self._modules:
            part.restore()
        for buffer, content in self._buffers:
            buffer.data.copy_(content)

    def written(self) -> dict[str, Any]:
        """What is saved with the model besides its trained parameters; a frozen one may hold running statistics."""
        pairs = self.model.named_parameters(remove_duplicate=False)
        parameters = {name for name, each in pairs if id(each) not in self._frozen}
        state = self.model.state_dict()
        return {
            name: each.detach().clone()
            for name, each in state.items()
            if name not in parameters and isinstance(each, torch.Tensor)
        }


class _Runner:
    """Runs the step's last passes, clips, and returns the sum before the noise."""

    takes_weights, resizes = True, False

    def __init__(self, held: _Held, names: list[str], batch: Any, randomness: Randomness) -> None:
        self._held, self._names, self.batch, self._randomness = held, names, batch, randomness
        self.unit, self.precision, self.draws, self.passes = 0.0, 0.0, False, 0

    def run(self, batch: Any, weights: Any = None, after: Mapping[str, Any] | None = None) -> Run:
        """One run; `weights` are 1 for each row unless given, and `after` is what an earlier run left in attributes."""
        self._held.rewind()
        self._held.remembered.write(after or {})
        self._randomness.restore()
        optimizer, draws = self._held.optimizer, Draws()
        self.passes += 1
        with torch.enable_grad():
            outputs = self._backward(batch, weights)
        if isinstance(optimizer, DPOptimizerFastGradientClipping):
            optimizer.accumulate()
        else:
            optimizer.clip_and_accumulate()
        self.draws |= draws.happened()
        pairs = zip(self._names, optimizer.params, strict=True)
        release = {name: _numbers(p.summed_grad) for name, p in pairs}
        self.unit = max([self.unit, *(float(torch.finfo(p.summed_grad.dtype).eps) for p in optimizer.params)])
        self.precision = max(self.precision, *(float(torch.finfo(p.dtype).eps) for p in optimizer.params))
        return Run(release, self._held.written(), outputs, self._held.remembered.read())

    def _backward(self, batch: Any, weights: Any) -> "tuple[Floats, ...]":
        raise NotImplementedError


class _CapturedRunner(_Runner):
    """Sends the captured gradients of the outputs back through a new forward pass."""

    def __init__(self, held: _Held, names: list[str], captured: CapturedPass, count: int) -> None:
        super().__init__(held, names, captured.inputs(count), captured.randomness)
        self._captured, self._count = captured, count
        self._coefficients: torch.Tensor | None = None  # of ghost clipping, in the step itself
        self.precision = max((float(torch.finfo(kind).eps) for _, kind in captured.autocast), default=0.0)

    def _backward(self, batch: Any, weights: Any) -> "tuple[Floats, ...]":
        captured, model = self._captured, self._held.model
        args, kwargs = captured.arguments(batch)
        with ExitStack() as stack:
            for device, kind in captured.autocast:
                stack.enter_context(torch.autocast(device, dtype=kind))
            output = model(*args, **kwargs)
        tensors = output_tensors(output)
        kept = torch.ones(self._count) if weights is None else weights
        self._send_back(tensors, captured.gradients[0], kept, retain=len(captured.gradients) > 1)
        if len(captured.gradients) > 1:
            self._send_clipped(tensors, captured.gradients[1], kept)
        used = [tensors[place] for place in sorted(captured.gradients[0])]
        return _output_rows(used, self._count)

    def _send_back(
        self, tensors: list[torch.Tensor], gradients: dict[int, torch.Tensor], weights: Any, *, retain: bool
    ) -> None:
        pairs = [(tensors[place], by_row(gradient, weights)) for place, gradient in sorted(gradients.items())]
        torch.autograd.backward([each for each, _ in pairs], [each for _, each in pairs], retain_graph=retain)

    def _send_clipped(self, tensors: list[torch.Tensor], gradients: dict[int, torch.Tensor], weights: Any) -> None:
        """The second backward pass of ghost clipping, whose gradients the first one's norms have shortened."""
        model: Any = self._held.model
        for p in model.parameters():
            p.grad = None
        now = model.get_clipping_coef().detach()
        if self._coefficients is None:
            self._coefficients = now
        change = torch.nan_to_num(now / self._coefficients, nan=1.0, posinf=1.0).reshape(-1).to(weights.device)
        model.disable_hooks()
        try:
            self._send_back(tensors, gradients, weights * change.to(weights.dtype), retain=False)
        finally:
            model.enable_hooks()


class _LossRunner(_Runner):
    """Computes the loss of a batch anew, with the user's own function. A row's gradient is left out where it is clipped."""

    def __init__(self, held: _Held, names: list[str], loss: Loss, batch: Any, randomness: Randomness) -> None:
        super().__init__(held, names, batch, randomness)
        self._loss, self._count = loss, row_count(batch)

    def _backward(self, batch: Any, weights: Any) -> "tuple[Floats, ...]":
        model: Any = self._held.model
        seen: list[Any] = []
        kept = torch.ones(self._count) if weights is None else weights
        handle = model.register_forward_hook(lambda _model, _args, output: seen.extend(output_tensors(output)))
        ghost = isinstance(self._held.optimizer, DPOptimizerFastGradientClipping)
        try:
            if ghost:
                real = model.get_clipping_coef
                model.get_clipping_coef = lambda: by_row(real(), kept)
            self._loss(model, copied(batch)).backward()  # which may take its labels out
        finally:
            handle.remove()
            vars(model).pop("get_clipping_coef", None)
        if not ghost:
            for p in self._held.optimizer.params:
                several = isinstance(p.grad_sample, list)
                last = by_row(p.grad_sample[-1] if several else p.grad_sample, kept)
                p.grad_sample = [*p.grad_sample[:-1], last] if several else last
        return _output_rows(seen[:1], self._count)  # the loss shows what the others do


def _obstacle(optimizer: DPOptimizer, model: Any, gradients: OneProcess, replay: Any) -> str | None:
    """Why no step of this run can be replayed; None if steps can be."""
    if replay is False:
        return "replay=False"
    if not isinstance(model, torch.nn.Module):
        return "audited() was not given the model, as a torch module"
    if gradients.sharded:
        return "the model is in shards"
    if not getattr(model, "batch_first", True):
        return "the model has its batch on another axis than the first (batch_first=False)"
    dim = sum(p.numel() for p in optimizer.params)
    return f"the model has {dim:,} parameters, too many to compare on the host" if dim > LARGEST else None


def _numbers(tensor: torch.Tensor) -> Floats:
    flat: Floats = tensor.detach().reshape(-1).cpu().double().numpy()
    return flat


def _output_rows(tensors: list[torch.Tensor], count: int) -> "tuple[Floats, ...]":
    """Up to 4,096 numbers of each row of each output."""
    found = []
    for place, each in enumerate(tensors):
        if not each.dim() or not each.is_floating_point() or len(each) % count:
            continue
        if by_another_axis(place, each, count):
            continue
        rows = each.detach().reshape(count, -1)
        found.append(_numbers(rows[:, :: -(-rows.shape[1] // MOST_OUTPUTS)].contiguous()).reshape(count, -1))
    return tuple(found)
