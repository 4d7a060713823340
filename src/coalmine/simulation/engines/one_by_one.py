"""Any model, one client at a time: the plain way, and for large models on a CPU the fast one."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from coalmine.simulation.batches import Batches
from coalmine.simulation.engines.base import ClientSettings, Examples
from coalmine.simulation.models import Model
from coalmine.simulation.population import Indices


class OneByOne:
    """One client after another, in this process."""

    def __init__(self, model: Model, examples: Examples, client: ClientSettings) -> None:
        self.model, self.client = model, client
        self.examples = Examples(images_last(examples.inputs), examples.labels)

    @property
    def description(self) -> str:
        return "one by one"

    def updates(self, model_vector: Tensor, batches: Batches) -> Iterator[Tensor]:
        for number in range(len(batches)):
            rows = batches.examples[number], batches.counts[number], int(batches.dropout_seeds[number])
            yield train_client(self.model, self.examples, self.client, model_vector, *rows).unsqueeze(0)

    def close(self) -> None:
        pass


def train_client(
    model: Model,
    examples: Examples,
    client: ClientSettings,
    model_vector: Tensor,
    steps: Indices,
    counts: Indices,
    dropout_seed: int,
) -> Tensor:
    """One client's update: its model after its steps of SGD less the model that it was sent."""
    parameters = {name: images_last(tensor.clone()) for name, tensor in model.split(model_vector).items()}
    velocities = [torch.zeros_like(tensor) for tensor in parameters.values()] if client.momentum else None
    generator = torch.Generator(model_vector.device).manual_seed(dropout_seed)
    for tensor in parameters.values():
        tensor.requires_grad_()
    for step, count in zip(steps, counts, strict=True):
        if not count:
            break
        index = torch.from_numpy(step[:count]).to(model_vector.device)
        # Masks for a whole batch whatever its size, as the clients that train together draw them.
        masks = [mask[:count] for mask in model.draw_masks(generator, len(step))]
        loss = functional.cross_entropy(model.logits(parameters, examples.inputs[index], masks), examples.labels[index])
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            if velocities is not None:
                torch._foreach_mul_(velocities, client.momentum)
                torch._foreach_add_(velocities, gradients)
            moves = gradients if velocities is None else velocities
            torch._foreach_add_(list(parameters.values()), moves, alpha=-client.learning_rate)
    trained = torch.cat([tensor.detach().reshape(-1) for tensor in parameters.values()])
    return trained.sub_(model_vector)


def images_last(tensor: Tensor) -> Tensor:
    """Images and kernels with their channels last, which convolutions on a CPU read faster; all else as it came."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
