"""DP-SGD on handwritten digits with Opacus."""

import argparse
import warnings
from pathlib import Path

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from coalmine.integrations.opacus import audited

DELTA = 1e-5


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,500 images to train on, 297 to test on."""
    bunch = load_digits()
    images = torch.tensor(bunch.data / 16, dtype=torch.float32)
    labels = torch.tensor(bunch.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def main(epochs: int, noise_multiplier: float, mode: str, out: Path) -> None:
    """Train, print the audit's result and the accountant's epsilon, and save the model."""
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    torch.manual_seed(1)
    train, test = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loss = nn.CrossEntropyLoss()
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        criterion=loss,
        data_loader=DataLoader(train, batch_size=150),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    model, optimizer, *changed, loader = made
    loss = changed[0] if changed else loss  # ghost mode clips in the loss
    settings = {"canaries": 1_000, "seed_file": "canary-seed", "delta": DELTA, "directory": out}
    optimizer = audited(optimizer, model, claim=5.6, data_loader=loader, steps=epochs * len(loader), **settings)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss(model(images), labels).backward()
            optimizer.step()
    print(optimizer.audit.finish(task="digits"))
    correct = (model(test.tensors[0]).argmax(dim=1) == test.tensors[1]).float().mean()
    print(f"accuracy {correct:.1%}; epsilon {engine.get_epsilon(DELTA):.3g} by the accountant")
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), out / "digits.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    parser.add_argument("--mode", choices=["hooks", "ghost"], default="hooks")
    parser.add_argument("--out", type=Path, default=Path("runs/opacus"))
    options = parser.parse_args()
    main(options.epochs, options.noise_multiplier, options.mode, options.out)
