"""The CNN's hand-written step against nn.Module, backward() and torch.optim.SGD."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coalmine.simulation.batches import Batches, draw_batches
from coalmine.simulation.engines import ClientSettings, Engine, Examples, client_engine
from coalmine.simulation.engines.fast.cnn_step import convolutional_step
from coalmine.simulation.engines.fast.processes import Processes
from coalmine.simulation.engines.plain.one_by_one import OneByOne
from coalmine.simulation.models import Model, cnn_dropout


@pytest.fixture
def pictures() -> Examples:
    """Images with noise on the left and uniform grey on the right, where all four inputs of a pool are equal."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.rand(60, 1, 28, 28, generator=generator)
    inputs[..., 14:] = 0.3
    return Examples(inputs, torch.randint(10, (60,), generator=generator))


def batches_of(*sizes: int, batch_size: int = 8) -> Batches:
    rng = np.random.default_rng(5)
    owned = [rng.choice(60, size, replace=False) for size in sizes]
    return draw_batches(owned, epochs=1, batch_size=batch_size, rng=rng)


def start(model: Model) -> Tensor:
    return model.initial(torch.Generator().manual_seed(1)) + 0.01  # nonzero biases


def collected(engine: Engine, vector: Tensor, batches: Batches) -> Tensor:
    try:
        return torch.cat([chunk.clone() for chunk in engine.updates(vector, batches)])
    finally:
        engine.close()


def plain_updates(vector: Tensor, batches: Batches, pictures: Examples, client: ClientSettings) -> Tensor:
    """The updates by plain PyTorch, with the dropout masks that the model generates for the client's seed."""
    rows = []
    for number, seed in enumerate(batches.dropout_seeds):
        bottom = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        middle, top = nn.Sequential(nn.Linear(9216, 128), nn.ReLU()), nn.Linear(128, 10)
        net = nn.Sequential(bottom, nn.Flatten(), middle, top).to(vector.dtype)
        nn.utils.vector_to_parameters(vector.clone(), net.parameters())
        optimizer = torch.optim.SGD(net.parameters(), lr=client.learning_rate, momentum=client.momentum)
        for step, count in enumerate(batches.counts[number]):
            if count:
                index = torch.from_numpy(batches.examples[number, step, :count])
                flat, hidden = cnn_dropout().masks(torch.tensor([seed]), step, int(count))
                optimizer.zero_grad()
                logits = top(middle(bottom(pictures.inputs[index]).flatten(1) * flat[0]) * hidden[0])
                nn.functional.cross_entropy(logits, pictures.labels[index]).backward()
                optimizer.step()
        rows.append(nn.utils.parameters_to_vector(net.parameters()).detach() - vector)
    return torch.stack(rows)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ragged_clients_train_as_if_one_at_a_time(momentum, pictures):
    """In fp64, where rounding changes neither the sign of an activation nor the maximum of a pool."""
    pictures = Examples(pictures.inputs.double(), pictures.labels)
    client = ClientSettings(learning_rate=0.1, momentum=momentum, batch_size=8)
    vector, batches = start(cnn_dropout()).double(), batches_of(3, 17, 0)
    found = collected(OneByOne(cnn_dropout(), pictures, client, step=convolutional_step), vector, batches)
    torch.testing.assert_close(found, plain_updates(vector, batches, pictures, client), rtol=1e-9, atol=1e-12)
    assert not found[2].any()


def test_memory_format_does_not_change_the_step(pictures):
    """In fp32, with the library's own kernels, to their precision."""
    client = ClientSettings(learning_rate=0.05)
    vector, batches = start(cnn_dropout()), batches_of(16, batch_size=16)
    engine = OneByOne(cnn_dropout(), pictures, client, step=convolutional_step)
    expected = plain_updates(vector, batches, pictures, client)
    torch.testing.assert_close(collected(engine, vector, batches), expected, rtol=1e-3, atol=1e-6)
    last = Examples(pictures.inputs.to(memory_format=torch.channels_last), pictures.labels)
    engine = OneByOne(cnn_dropout(), last, client, step=convolutional_step)
    torch.testing.assert_close(collected(engine, vector, batches), expected, rtol=1e-3, atol=1e-6)


def test_updates_do_not_depend_on_the_process_that_trains_a_client(pictures):
    """Bit for bit, with every update in its client's row although the largest clients train first."""
    model, client = cnn_dropout(), ClientSettings(learning_rate=0.05, batch_size=8)
    vector, batches = start(model), batches_of(3, 17, 9, 20)
    engine = Processes(model, pictures, client, jobs=2, memory_limit=1, step=convolutional_step)
    again = torch.cat([chunk.clone() for chunk in engine.updates(vector, batches)])
    assert torch.equal(collected(engine, vector, batches), again)
    alone = collected(OneByOne(model, pictures, client, step=convolutional_step), vector, batches)
    assert torch.equal(again, alone)


def test_model_structure_selects_the_engine(pictures):
    client = ClientSettings()
    models = cnn_dropout(), replace(cnn_dropout(), structure=None)
    written, general = (client_engine("auto", model, pictures, client) for model in models)
    assert written.description == "one by one, written out for the CNN"
    assert general.description == "one by one, by autograd"
    both = client_engine("one-by-one", cnn_dropout(), pictures, client, jobs=2)
    assert both.description == "one by one, written out for the CNN, in 2 processes"
