"""Test any private step in torch by a linear probe: a model whose per-example gradient is the example itself.

def make_step(model):
optimizer = ...  # your library's private SGD on model.parameters(), learning rate 1
def step(batch):
optimizer.zero_grad()
model(batch).mean().backward()
optimizer.step()
return step

assert_private(step_release(make_step, [(4_000,), (1_000,)]), epsilon=3.0, delta=1e-5, dim=5_000)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError("testing a step in torch needs: pip install torch") from error

from coalmine.argument_checks import Floats, positive, short_repr
from coalmine.testing.client_rows import Release, client_rows
from coalmine.testing.update_arrays import checked_shapes

__all__ = ["LinearProbe", "state_dicts", "step_release"]
StateDict = Mapping[str, Any]


class LinearProbe(torch.nn.Module):
    """A model whose output for an example is its product with the weights, so that its gradient is the example.

    Each shape is one bias-free linear layer with a single output: whatever a library knows of linear layers, it knows of it.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.sizes = [math.prod(shape) for shape in checked_shapes(shapes) or ()]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(size, 1, bias=False) for size in self.sizes)
        self.clear()

    def forward(self, examples: Any) -> Any:
        parts = examples.reshape(-1, sum(self.sizes)).split(self.sizes, dim=1)
        return torch.stack([layer(part)[:, 0] for layer, part in zip(self.layers, parts, strict=True)]).sum(dim=0)

    @torch.no_grad()
    def clear(self) -> None:
        """Set all weights to zero."""
        for weights in self.parameters():
            weights.zero_()

    def vector(self) -> Floats:
        """All weights as one row."""
        parts = [weights.detach().double().cpu().numpy().reshape(-1) for weights in self.parameters()]
        return np.concatenate(parts)


def step_release(
    make_step: Callable[[LinearProbe], Callable[[Any], Any]],
    shapes: Sequence[Sequence[int]],
    *,
    learning_rate: float = 1.0,
) -> Release:
    """A function from per-example gradients, one row each, to what one private step subtracts from the model.

    `make_step` gets the probe, and returns a function of a batch of examples, a matrix with a row for each. That function
    trains one step as the library's users do: the loss is the mean or the sum of the probe's outputs, and the optimizer is
    SGD without momentum with this learning rate. It is made once and keeps its state, as in training. The probe's weights
    are zero before each step.
    """
    rate, probe = positive("learning_rate", learning_rate), LinearProbe(shapes)
    step = make_step(probe)
    if not callable(step):
        raise TypeError(f"make_step must return a function of a batch, got {short_repr(step)}")

    def release(updates: Any) -> Floats:
        rows = client_rows(updates, dim=sum(probe.sizes))
        probe.clear()
        step(torch.as_tensor(rows, dtype=torch.float32))
        return -probe.vector() / rate

    return release


def state_dicts(
    aggregate: Callable[[list[tuple[int, StateDict]]], StateDict], model: StateDict, *, deltas: bool = False
) -> Release:
    """A function from clients' updates to what an aggregation of state dicts adds to the model.

    `aggregate` takes a list of (number of examples, state dict), one for each client, and returns a state dict. Clients send
    `model` plus their update, or with `deltas` the update alone, and the model is subtracted from what comes back. `weights`
    of `assert_private` become the numbers of examples. Integers and flags, such as counters of batch normalisation, are sent
    as they are and are not tested.
    """
    tested = {name: value for name, value in model.items() if torch.is_tensor(value) and value.is_floating_point()}
    if not tested:
        raise ValueError(f"model must be a state dict with floating-point tensors, got {short_repr(dict(model))}")
    sizes = [value.numel() for value in tested.values()]

    def sent(row: Floats) -> StateDict:
        parts = torch.split(torch.as_tensor(row), sizes)
        changed = {
            name: (part.reshape(value.shape) + (0 if deltas else value)).to(value.dtype)
            for (name, value), part in zip(tested.items(), parts, strict=True)
        }
        return {name: changed.get(name, value) for name, value in model.items()}

    def release(updates: Any, weights: Any = None) -> Floats:
        rows = client_rows(updates, dim=sum(sizes))
        counts = [1] * len(rows) if weights is None else [int(weight) for weight in weights]
        returned = aggregate([(count, sent(row)) for count, row in zip(counts, rows, strict=True)])
        missing = [name for name in tested if name not in returned]
        if missing:
            raise ValueError(f"aggregate must return a state dict of the model, got one without {missing[0]!r}")
        parts = [returned[name].double() - (0 if deltas else value.double()) for name, value in tested.items()]
        return np.concatenate([part.detach().cpu().numpy().reshape(-1) for part in parts])

    return release
