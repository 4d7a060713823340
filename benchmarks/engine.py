"""Training the clients of a round against plain PyTorch, one client at a time, with the same work in the same run.

The floor is arithmetic. Forward and backward pass of the MLP take 0.9 MFlop per step and client, those of the CNN 1.15
GFlop: 1.02 for the second convolution and 0.11 for the first dense layer, whose 4.7 MB of weights are read three times and
written once. For the MLP, plain PyTorch spends its time on calls, so it pays to train clients together. For the CNN, it
spends its time on convolutions, which already run near the peak of a core in the right memory layout. The gains come from
that layout, no waiting between cores, no unnecessary work around the convolutions, and no memory freed in between.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from coalmine.canaries.array_types import cores
from coalmine.simulation.batches import Batches, draw_batches
from coalmine.simulation.engines import ClientSettings, Engine, Examples, client_engine
from coalmine.simulation.models import Model, cnn_dropout, mlp

MLP_BAR, CNN_BAR = 10.0, 1.2
CLIENT = ClientSettings(learning_rate=0.05)


def plain(net: nn.Module, vector: Tensor, batches: Batches, examples: Examples) -> float:
    """Train one client after another with nn.Module and torch.optim; return the norm of the summed updates."""
    total = torch.zeros_like(vector)
    for steps in batches.examples:
        nn.utils.vector_to_parameters(vector.clone(), net.parameters())
        optimizer = torch.optim.SGD(net.parameters(), lr=CLIENT.learning_rate)
        for step in steps:
            index = torch.from_numpy(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(examples.inputs[index]), examples.labels[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        total += nn.utils.parameters_to_vector(net.parameters()).detach() - vector
    return float(total.norm())


def ours(engine: Engine, vector: Tensor, batches: Batches) -> float:
    total = torch.zeros_like(vector)
    for updates in engine.updates(vector, batches):
        total += updates.sum(dim=0)
    return float(total.norm())


def seconds(call: Callable[[], float]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(model: Model, net: nn.Module, examples: Examples, *, clients: int, steps: int, repeats: int) -> float:
    """The speed relative to plain PyTorch; the two alternate, so that a noisy machine affects both."""
    rng = np.random.default_rng(0)
    owned = [rng.choice(len(examples), 16 * steps, replace=False) for _ in range(clients)]
    batches = draw_batches(owned, epochs=1, batch_size=16, rng=rng)
    vector = model.initial(torch.Generator().manual_seed(0))
    engine = client_engine("auto", model, examples, CLIENT, jobs=cores())
    try:
        ours(engine, vector, batches), plain(net, vector, batches, examples)
        pairs = [
            (seconds(lambda: plain(net, vector, batches, examples)), seconds(lambda: ours(engine, vector, batches)))
            for _ in range(repeats)
        ]
    finally:
        engine.close()
    slow, fast = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)  # a busy machine only adds time
    print(f"{model.name}, {clients} clients, {steps} steps of 16: {engine.description}", flush=True)
    print(f"  plain PyTorch {1e3 * slow:.1f} ms, coalmine {1e3 * fast:.1f} ms, ratio {slow / fast:.2f}", flush=True)
    return slow / fast


def pictures(count: int) -> Examples:
    generator = torch.Generator().manual_seed(0)
    return Examples(torch.rand(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator))


def plain_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def main() -> int:
    generator = torch.Generator().manual_seed(0)
    digits = Examples(torch.rand(1500, 64, generator=generator), torch.randint(10, (1500,), generator=generator))
    perceptron = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    small = measure(mlp(64, 128, 10), perceptron, digits, clients=50, steps=5, repeats=15)
    large = measure(cnn_dropout(), plain_cnn(), pictures(1500), clients=12, steps=7, repeats=5)
    print(f"ratios {small:.1f} (bar {MLP_BAR:g}) and {large:.2f} (bar {CNN_BAR:g})")
    return 0 if small >= MLP_BAR and large >= CNN_BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
