"""Every engine against plain PyTorch: one client at a time, nn.Module, torch.optim.SGD."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coalmine.simulation.batches import Batches, draw_batches
from coalmine.simulation.engines import ClientSettings, Engine, Examples, client_engine, example_engine
from coalmine.simulation.engines.fast.cnn_clients import CnnTogether
from coalmine.simulation.engines.fast.dense_clients import DenseTogether
from coalmine.simulation.engines.plain.one_by_one import OneByOne
from coalmine.simulation.engines.plain.vectorized import VectorizedTogether
from coalmine.simulation.models import Model, cnn_dropout, mlp

SIZES = (1, 33, 5, 16, 17, 0, 50)  # examples of each client: less than a batch, exactly one, several, and none


@pytest.fixture
def examples() -> Examples:
    generator = torch.Generator().manual_seed(3)
    return Examples(torch.rand(200, 6, generator=generator), torch.randint(4, (200,), generator=generator))


def ragged_batches(sizes: tuple[int, ...] = SIZES, *, epochs: int = 2, batch_size: int = 16) -> Batches:
    rng = np.random.default_rng(5)
    owned = [rng.choice(200, size, replace=False) for size in sizes]
    return draw_batches(owned, epochs=epochs, batch_size=batch_size, rng=rng)


def collected(engine: Engine, vector: Tensor, batches: Batches) -> Tensor:
    try:
        return torch.cat([chunk.clone() for chunk in engine.updates(vector, batches)])
    finally:
        engine.close()


def plain_updates(vector: Tensor, batches: Batches, examples: Examples, client: ClientSettings) -> Tensor:
    """The oracle for mlp(6, 8, 5, 4), whose weights are transposed relative to nn.Linear."""
    rows = []
    for client_number in range(len(batches)):
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4))
        start = 0
        for layer in net[::2]:  # type: ignore[attr-defined]
            inputs, outputs = layer.in_features, layer.out_features
            layer.weight.data = vector[start : start + inputs * outputs].view(inputs, outputs).T.clone()
            layer.bias.data = vector[start + inputs * outputs : start + (inputs + 1) * outputs].clone()
            start += (inputs + 1) * outputs
        optimizer = torch.optim.SGD(net.parameters(), lr=client.learning_rate, momentum=client.momentum)
        for step, count in zip(batches.examples[client_number], batches.counts[client_number], strict=True):
            if count:
                index = torch.from_numpy(step[:count])
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(examples.inputs[index]), examples.labels[index]).backward()
                optimizer.step()
        flat = [torch.cat([layer.weight.data.T.flatten(), layer.bias.data]) for layer in net[::2]]  # type: ignore[attr-defined]
        rows.append(torch.cat(flat) - vector)
    return torch.stack(rows)


ENGINES = {
    "dense": lambda *parts: DenseTogether(*parts, memory_limit=1),
    "vectorized": lambda *parts: VectorizedTogether(*parts, memory_limit=1),
    "one by one": lambda *parts: OneByOne(*parts),
}


@pytest.mark.parametrize(("name", "momentum"), [(name, momentum) for name in ENGINES for momentum in (0.0, 0.9)])
def test_ragged_clients_train_as_if_one_at_a_time(name, momentum, examples):
    client = ClientSettings(learning_rate=0.5, momentum=momentum)
    model = mlp(6, 8, 5, 4)
    vector = model.initial(torch.Generator().manual_seed(1)) + 0.1
    batches = ragged_batches()
    found = collected(ENGINES[name](model, examples, client), vector, batches)
    torch.testing.assert_close(found, plain_updates(vector, batches, examples, client), rtol=1e-4, atol=1e-6)
    assert not found[5].any()  # a client without examples sends zeros


@pytest.mark.parametrize("kind", [DenseTogether, VectorizedTogether])
def test_a_memory_limit_changes_the_chunks_but_not_the_updates(kind, examples):
    model, client, batches = mlp(6, 8, 5, 4), ClientSettings(), ragged_batches()
    vector = model.initial(torch.Generator().manual_seed(1))
    small = kind(model, examples, client, memory_limit=2.1 * _bytes_each(kind, model, examples) / 2**30)
    chunks = [chunk.clone() for chunk in small.updates(vector, batches)]
    assert [len(chunk) for chunk in chunks] == [2, 2, 2, 1]
    whole = collected(kind(model, examples, client, memory_limit=1), vector, batches)
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=1e-5, atol=1e-7)


def _bytes_each(kind: type, model: Model, examples: Examples) -> float:
    """Memory per client, from the number of clients that an engine fits into a GiB."""
    return 2**30 / kind(model, examples, ClientSettings(), memory_limit=1).chunk


@pytest.fixture
def pictures() -> Examples:
    generator = torch.Generator().manual_seed(3)
    return Examples(torch.rand(200, 1, 28, 28, generator=generator), torch.randint(10, (200,), generator=generator))


def test_the_cnn_drops_the_same_activations_in_every_engine(pictures):
    model, client, batches = cnn_dropout(), ClientSettings(learning_rate=0.05), ragged_batches((3, 20), epochs=1)
    vector = model.initial(torch.Generator().manual_seed(1))
    alone = collected(OneByOne(model, pictures, client), vector, batches)
    other = VectorizedTogether(model, pictures, client, memory_limit=1)
    torch.testing.assert_close(collected(other, vector, batches), alone, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_hand_written_cnn_step_matches_autograd(momentum, pictures):
    """Ragged clients, several steps, chunks of two clients, in fp64, where rounding changes no activation's sign."""
    pictures = Examples(pictures.inputs.double(), pictures.labels)
    model = cnn_dropout()
    client = ClientSettings(learning_rate=0.1, momentum=momentum, batch_size=8)
    vector = model.initial(torch.Generator().manual_seed(1)).double()
    batches = ragged_batches((3, 20, 9), epochs=1, batch_size=8)
    alone = collected(OneByOne(model, pictures, client), vector, batches)
    written = CnnTogether(model, pictures, client, memory_limit=0.07)
    assert written.chunk == 2
    torch.testing.assert_close(collected(written, vector, batches), alone, rtol=1e-6, atol=1e-8)


def test_the_cnn_matches_the_papers(pictures):
    """320 + 18,496 + 1,179,776 + 1,290 parameters, and the logits of the same network from torch.nn."""
    model = cnn_dropout()
    assert [size for _, size in model.sizes] == [288, 32, 18432, 64, 1179648, 128, 1280, 10]
    assert model.dim == 1_199_882
    assert cnn_dropout(62).dim == 1_206_590
    vector = model.initial(torch.Generator().manual_seed(1))
    net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    net.extend([nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)])
    nn.utils.vector_to_parameters(vector, net.parameters())
    torch.testing.assert_close(model.logits(model.split(vector), pictures.inputs[:5], ()), net(pictures.inputs[:5]))


def test_dropout_masks_keep_the_mean():
    masks = cnn_dropout().masks(torch.arange(10) * 2**40 + 7, 3, 50)
    for mask, rate in zip(masks, (0.25, 0.5), strict=True):
        kept = (mask > 0).double().mean()
        assert abs(kept - (1 - rate)) < 4 * (rate * (1 - rate) / mask.numel()) ** 0.5
        torch.testing.assert_close(mask.max(), torch.tensor(1 / (1 - rate)))


def test_dropout_masks_of_clients_steps_and_layers_are_uncorrelated():
    """A client's masks are the same alone, among others, and in a smaller batch."""
    model, seeds = cnn_dropout(), torch.tensor([5, 6, 2**61 + 3, 5 + 2**33])
    first, dense = model.masks(seeds, 0, 16)
    later = model.masks(seeds, torch.tensor([1]), 16)[0]
    streams = [*first.flatten(1), *later.flatten(1), first[0].flatten().roll(1), first[0].flatten().roll(9216)]
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert correlations.abs().max() < 5 / streams[0].numel() ** 0.5
    assert torch.equal(model.masks(seeds[2:3], 0, 7)[0][0], first[2, :7])
    assert abs(float(torch.corrcoef(torch.stack([first[0, :, :128].flatten(), dense[0].flatten()]))[0, 1])) < 0.1


@pytest.mark.parametrize("model", [mlp(6, 8, 4), cnn_dropout()], ids=["mlp", "cnn"])
def test_per_example_updates_add_up_to_minus_the_gradient_of_the_sum(model, examples, pictures):
    data = examples if model.layers else pictures
    vector = model.initial(torch.Generator().manual_seed(1))
    batches = ragged_batches((1,) * 9, epochs=1, batch_size=1)
    rows = collected(example_engine(model, data, memory_limit=4 * 4 * model.dim * 4 / 2**30), vector, batches)
    assert rows.shape == (9, model.dim)
    index = torch.from_numpy(batches.examples[:, 0, 0])
    masks = [mask[:, 0] for mask in model.masks(torch.from_numpy(batches.dropout_seeds), 0, 1)]
    leaf = vector.clone().requires_grad_()
    logits = model.logits(model.split(leaf), data.inputs[index], masks)
    nn.functional.cross_entropy(logits, data.labels[index], reduction="sum").backward()
    torch.testing.assert_close(rows.sum(dim=0), -leaf.grad, rtol=1e-3, atol=1e-5)


def test_auto_selects_the_faster_engine_and_describes_it(examples, pictures):
    client = ClientSettings()
    assert "together" in client_engine("auto", mlp(6, 8, 4), examples, client).description
    convolutions = client_engine("auto", cnn_dropout(), pictures, client)
    assert convolutions.description == "one by one, written out for the CNN"
    with pytest.raises(ValueError, match="engine must be one of auto, together, one-by-one, got 'fast'"):
        client_engine("fast", mlp(6, 8, 4), examples, client)


def test_batches_contain_every_example_once_per_epoch():
    owned = [np.arange(10, 17), np.arange(40, 41), np.arange(0)]
    batches = draw_batches(owned, epochs=3, batch_size=3, rng=np.random.default_rng(0))
    assert batches.counts[0].tolist() == [3, 3, 1] * 3
    assert batches.counts[1].tolist() == [1] * 3 + [0] * 6
    assert batches.steps.tolist() == [9, 3, 0]
    for epoch in range(3):
        assert sorted(_examples_of(batches, 0, range(3 * epoch, 3 * epoch + 3))) == list(range(10, 17))
    orders = [tuple(_examples_of(batches, 0, range(3 * epoch, 3 * epoch + 3))) for epoch in range(3)]
    assert len(set(orders)) == 3


def _examples_of(batches: Batches, client: int, steps: range) -> Iterator[int]:
    for step in steps:
        yield from batches.examples[client, step, : batches.counts[client, step]].tolist()
