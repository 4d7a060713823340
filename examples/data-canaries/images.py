"""What does a network tell about single images? A small CNN on Fashion-MNIST with canaries of images, with DP or without."""

import argparse
import gzip
import sys
import warnings

import numpy as np
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import coalmine
from coalmine import data_canaries
from coalmine.data.folders import data_folder
from coalmine.integrations.opacus import audited

DELTA = 1e-5


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first images of Fashion-MNIST, and their labels."""
    folder = data_folder() / "fashion-mnist"
    names = (("t10k-images-idx3-ubyte.gz", 16), ("t10k-labels-idx1-ubyte.gz", 8))
    pixels, labels = (
        np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=start) for name, start in names
    )
    return pixels.reshape(-1, 1, 28, 28)[:count].astype(np.float32) / 255, labels[:count].astype(np.int64)


def network() -> nn.Module:
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32 * 25, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def main(options: argparse.Namespace) -> None:
    """Insert canaries, train, and print what the model's outputs tell about them."""
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    inputs, labels = images(options.rows)
    seed = coalmine.read_seed("canary-seed")
    canaries = data_canaries.patterns(inputs, count=options.canaries, classes=10, seed=seed)
    print(f"commitment {canaries.commitment}")
    train = canaries.insert(TensorDataset(torch.tensor(inputs), torch.tensor(labels)))
    model, loss = network(), nn.CrossEntropyLoss()
    if options.without_dp:
        optimizer, loader = torch.optim.Adam(model.parameters(), 2e-3), DataLoader(train, batch_size=64, shuffle=True)
    else:
        model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(train, batch_size=500),
            target_epsilon=options.epsilon,
            target_delta=DELTA,
            epochs=options.epochs,
            max_grad_norm=1.0,
        )
        settings = {"canaries": 500, "seed": seed, "delta": DELTA, "steps": options.epochs * len(loader)}
        optimizer = audited(
            optimizer, model, claim=options.epsilon, data_loader=loader, data_canaries=canaries, **settings
        )
    for _ in range(options.epochs):
        for batch, targets in loader:
            optimizer.zero_grad()
            loss(model(batch), targets).backward()
            optimizer.step()
    if options.without_dp:
        print(canaries.result(canaries.score(model), delta=DELTA, claim=options.epsilon))
    else:
        print(optimizer.audit.finish(task="Fashion-MNIST"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000, help="images to train on")
    parser.add_argument("--canaries", type=int, default=1_000, help="images that a coin inserts or leaves out")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--epsilon", type=float, default=4.0, help="claimed, and without --without-dp trained for")
    parser.add_argument("--without-dp", action="store_true", help="train without clip and noise")
    try:
        main(parser.parse_args())
    except (OSError, ValueError) as error:
        sys.exit(f"images.py: {error}")
