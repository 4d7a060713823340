"""One client at a time, for any model: the reference, and the fastest engine for large models on a CPU."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from coalmine.simulation.batches import Batches
from coalmine.simulation.engines.plain.engine import ClientSettings, Examples
from coalmine.simulation.models import Masks, Model
from coalmine.simulation.population import Indices

# A step of SGD for one client, in place: model, weights, velocities (with momentum), settings, inputs, labels, masks.
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
    """A step for any model, with autograd."""
    leaves = [weight.requires_grad_() for weight in weights.values()]
    loss = model.loss((model.logits_alone or model.logits)(weights, inputs, masks), labels)
    directions = torch.autograd.grad(loss, leaves)
    with torch.no_grad():
        if velocities is not None:
            velocity_list = list(velocities.values())
            torch._foreach_mul_(velocity_list, client.momentum)
            torch._foreach_add_(velocity_list, directions)
            directions = tuple(velocity_list)
        torch._foreach_add_(leaves, directions, alpha=-client.learning_rate)


class OneByOne:
    """Trains one client after another in this process."""

    def __init__(self, model: Model, examples: Examples, client: ClientSettings, *, step: Step = autograd_step) -> None:
        self.model, self.examples, self.client, self.step = model, examples, client, step

    @property
    def description(self) -> str:
        return f"one by one, {describe_step(self.step)}"

    def updates(self, model_vector: Tensor, batches: Batches) -> Iterator[Tensor]:
        for number in range(len(batches)):
            rows = batches.examples[number], batches.counts[number], int(batches.dropout_seeds[number])
            update = torch.empty_like(model_vector)
            train_client(self.model, self.examples, self.client, self.step, model_vector, *rows, update)
            yield update.unsqueeze(0)

    def close(self) -> None:
        pass


def describe_step(step: Step) -> str:
    """A short description of how a step is computed."""
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
    initial, output = model.split(model_vector), model.split(update)
    for name, weight in weights.items():
        torch.sub(weight.detach(), initial[name], out=output[name])


def channels_last(tensor: Tensor) -> Tensor:
    """A copy. Images and kernels get channels last, which is faster for convolutions on a CPU."""
    return tensor.clone(memory_format=torch.channels_last if tensor.ndim == 4 else torch.preserve_format)
