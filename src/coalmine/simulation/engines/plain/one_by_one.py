"""One client at a time, for any model: the reference, and the fastest way for large models on a CPU."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from coalmine.simulation.batches import Batches
from coalmine.simulation.engines.plain.engine import ClientSettings, Examples
from coalmine.simulation.models import Masks, Model
from coalmine.simulation.population import Indices

# One client's step of SGD in place: model, weights, velocities if there is momentum, settings, inputs, labels, masks.
Step = Callable[[Model, Mapping[str, Tensor], Mapping[str, Tensor] | None, ClientSettings, Tensor, Tensor, Masks], None]


def autograd_step(
    model: Model,
    weights: Mapping[str, Tensor],
    velocities: Mapping[str, Tensor] | None,
    client: ClientSettings,
    inputs: Tensor,
    labels: Tensor,
    masks: Masks,
) -> None:
    """The step of any model, by autograd."""
    leaves = [weight.requires_grad_() for weight in weights.values()]
    loss = model.loss((model.logits_alone or model.logits)(weights, inputs, masks), labels)
    moves = torch.autograd.grad(loss, leaves)
    with torch.no_grad():
        if velocities is not None:
            moving = list(velocities.values())
            torch._foreach_mul_(moving, client.momentum)
            torch._foreach_add_(moving, moves)
            moves = tuple(moving)
        torch._foreach_add_(leaves, moves, alpha=-client.learning_rate)


class OneByOne:
    """One client after another, in this process."""

    def __init__(self, model: Model, examples: Examples, client: ClientSettings, *, step: Step = autograd_step) -> None:
        self.model, self.examples, self.client, self.step = model, examples, client, step

    @property
    def description(self) -> str:
        return f"one by one, {described(self.step)}"

    def updates(self, model_vector: Tensor, batches: Batches) -> Iterator[Tensor]:
        for number in range(len(batches)):
            rows = batches.examples[number], batches.counts[number], int(batches.dropout_seeds[number])
            update = torch.empty_like(model_vector)
            train_client(self.model, self.examples, self.client, self.step, model_vector, *rows, update)
            yield update.unsqueeze(0)

    def close(self) -> None:
        pass


def described(step: Step) -> str:
    """How a step is computed, in a few words."""
    return "by autograd" if step is autograd_step else "written out for the CNN"


def train_client(
    model: Model,
    examples: Examples,
    client: ClientSettings,
    step: Step,
    model_vector: Tensor,
    batches: Indices,
    counts: Indices,
    dropout_seed: int,
    update: Tensor,
) -> None:
    """Write one client's update: its model after its steps of SGD minus the model it was sent."""
    weights = {name: channels_last(tensor) for name, tensor in model.split(model_vector).items()}
    velocities = {name: torch.zeros_like(tensor) for name, tensor in weights.items()} if client.momentum else None
    seeds = torch.tensor([dropout_seed], device=model_vector.device)
    for number, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        if not count:
            break
        index = torch.from_numpy(batch[:count]).to(model_vector.device)
        masks = [mask[0] for mask in model.masks(seeds, number, int(count))]
        inputs, labels = channels_last(examples.inputs[index]), examples.labels[index]
        step(model, weights, velocities, client, inputs, labels, masks)
    sent, written = model.split(model_vector), model.split(update)
    for name, weight in weights.items():
        torch.sub(weight.detach(), sent[name], out=written[name])


def channels_last(tensor: Tensor) -> Tensor:
    """A copy; images and kernels with channels last, which is faster for convolutions on a CPU."""
    return tensor.clone(memory_format=torch.channels_last if tensor.ndim == 4 else torch.preserve_format)
