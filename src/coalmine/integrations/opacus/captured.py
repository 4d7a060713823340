"""What a step's last forward pass took and gave: its inputs, the random state, and the gradient of its outputs, row by row.

Hooks on the model capture it, and only in a step that is going to be replayed. Nothing that the training computes changes.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from coalmine.replay.neighbours import mapped
from coalmine.replay.randomness import Randomness, is_generator

LOSS_INSIDE = (
    "the model computes its loss itself, so it has no gradient of outputs by row: pass replay=lambda model, batch: loss"
)
NO_BACKWARD = "no gradient of the model's outputs was seen in the step"
SEVERAL = "the model was called {} times before one backward pass: pass replay=lambda model, batch: loss"
NO_ROWS = "none of the model's inputs has a first axis of {} rows: pass replay=lambda model, batch: loss"


class CapturedPass:
    """One forward pass: the model's arguments, the random state before it, and the gradients of its outputs.

    `gradients` has one dictionary for each backward pass, from the place of an output tensor to its gradient: one, or two
    with ghost clipping.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], generators: Iterable[Any] = ()) -> None:
        self.args, self.kwargs = mapped((args, kwargs), _copy)
        self.randomness = Randomness(generators)
        self.autocast = _autocast()
        self.gradients: list[dict[int, torch.Tensor]] = []
        self.counts: dict[int, int] = {}

    def note_gradient(self, place: int, gradient: torch.Tensor) -> None:
        number = self.counts.get(place, 0)
        self.counts[place] = number + 1
        while len(self.gradients) <= number:
            self.gradients.append({})
        self.gradients[number][place] = gradient.detach().clone()

    def problem(self, rows: int) -> str | None:
        """Why this pass cannot be replayed row by row; None if it can."""
        if not self.gradients:
            return NO_BACKWARD
        if any(gradient.dim() == 0 for gradients in self.gradients for gradient in gradients.values()):
            return LOSS_INSIDE
        listed = [pair for gradients in self.gradients for pair in gradients.items()]
        if any(len(gradient) % rows or by_another_axis(place, gradient, rows) for place, gradient in listed):
            return f"the model's outputs do not have a first axis of {rows} rows: pass replay=lambda model, batch: loss"
        return None if self.inputs(rows) else NO_ROWS.format(rows)

    def inputs(self, rows: int) -> dict[str, torch.Tensor]:
        """The arguments whose first axis counts the rows, by their place."""
        found: dict[str, torch.Tensor] = {}
        _walk(
            (self.args, self.kwargs),
            lambda place, leaf: found.setdefault(str(place), leaf) if _counts(leaf, rows) else None,
        )
        return found

    def arguments(self, inputs: dict[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other rows, as copies: a model may change them in place."""
        given: tuple[tuple[Any, ...], dict[str, Any]] = _walk(
            (self.args, self.kwargs), lambda place, leaf: _copy(inputs.get(str(place), leaf))
        )
        return given


class Capture:
    """The hooks on a model, while they are needed. `taken` is the last forward pass that has gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self.taken: CapturedPass | None = None
        self._open: CapturedPass | None = None
        self.waiting = 0  # forward passes since the last one that got gradients

    @property
    def active(self) -> bool:
        return bool(self._handles)

    def start(self) -> None:
        """Capture the forward passes from now on."""
        if not self.active:
            before, after = _Hook(self._before), _Hook(self._after)
            self._handles = [
                self._model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                self._model.register_forward_hook(after, with_kwargs=True),
            ]

    def stop(self) -> None:
        """Remove the hooks, and forget what they captured."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.taken, self._open, self.waiting = [], None, None, 0

    def problem(self, rows: int) -> str | None:
        """Why the captured pass cannot be replayed; None if it can."""
        if self.taken is None:
            return NO_BACKWARD
        return SEVERAL.format(self.waiting + 1) if self.waiting else self.taken.problem(rows)

    def begin_step(self) -> None:
        """Forget the passes so far: a step begins."""
        self.taken, self.waiting = None, 0

    def _before(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open = CapturedPass(args, kwargs, generators_of(self._model)) if torch.is_grad_enabled() else None

    def _after(self, _model: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
        captured, self._open = self._open, None
        if captured is None:
            return None
        if self.taken is not None and not self.taken.gradients:
            self.waiting += 1
        self.taken = captured
        tensors: list[torch.Tensor] = []
        _walk(output, lambda _, leaf: tensors.append(leaf) if _has_gradient(leaf) else None)
        if len(tensors) == 1:
            _hook(tensors[0], lambda gradient: captured.note_gradient(0, gradient))
            return None
        return _watched(output, captured.note_gradient)


def generators_of(model: torch.nn.Module) -> list[Any]:
    """The random generators that parts of a model hold as attributes."""
    held = [value for part in model.modules() for value in vars(part).values()]
    return list({id(each): each for each in held if is_generator(each)}.values())


def by_another_axis(place: int, output: torch.Tensor, rows: int) -> bool:
    """Whether an output but the first may have its rows on the second axis, as the last states of layers do."""
    return place > 0 and output.dim() >= 3 and output.shape[1] == rows


def by_row(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A gradient times the weight of each row, where every row has as many entries of the first axis; exact zeros at 0."""
    repeated = weights.repeat_interleave(len(gradient) // len(weights)).to(gradient.device)
    kept = repeated.reshape(-1, *[1] * (gradient.dim() - 1))
    return torch.where(kept == 0, torch.zeros_like(gradient), gradient * kept.to(gradient.dtype))


def output_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of an output that have a gradient, in order."""
    found: list[torch.Tensor] = []
    _walk(output, lambda _, leaf: found.append(leaf) if _has_gradient(leaf) else None)
    return found


def _watched(output: Any, note: Callable[[int, torch.Tensor], None]) -> Any:
    """The output with a view of each tensor: a tensor from which another output is made gets only its own gradient."""
    places = iter(range(1 << 30))

    def watch(_: int, leaf: Any) -> Any:
        if not _has_gradient(leaf):
            return leaf
        place, seen = next(places), leaf.view_as(leaf)
        _hook(seen, lambda gradient: note(place, gradient))
        return seen

    return _walk(output, watch)


def _hook(tensor: Any, function: Callable[[torch.Tensor], Any]) -> None:
    tensor.register_hook(function)


class _Hook:
    """A hook that a copy of the model does not have: copying or saving a model must not copy its audit."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return None if self._function is None else self._function(*args)

    def __deepcopy__(self, _memo: Any) -> "_Hook":
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()


def _walk(value: Any, change: Callable[[int, Any], Any]) -> Any:
    """The same structure with each leaf changed, given its place."""
    places = iter(range(1 << 30))
    return mapped(value, lambda leaf: change(next(places), leaf))


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _counts(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == rows


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _autocast() -> Iterable[tuple[str, torch.dtype]]:
    """The devices for which autocast is on, with its precision."""
    devices = ("cpu", "cuda")
    return [(each, torch.get_autocast_dtype(each)) for each in devices if torch.is_autocast_enabled(each)]
