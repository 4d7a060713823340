"""DP-SGD on handwritten digits with Opacus in several processes: DDP, or FSDP2 with --sharded."""

import argparse
import warnings
from pathlib import Path

import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.fsdp_utils import FSDP2Wrapper
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from coalmine.integrations.opacus import audited

DELTA = 1e-5


def main(epochs: int, sharded: bool, out: Path) -> None:
    """Train, and print the audit's result and the accountant's epsilon on rank 0."""
    warnings.filterwarnings("ignore")
    distributed.init_process_group("gloo")  # torchrun sets the rank
    rank = distributed.get_rank()
    torch.manual_seed(1)
    bunch = load_digits()
    data = TensorDataset(torch.tensor(bunch.data / 16, dtype=torch.float32), torch.tensor(bunch.target))
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = FSDP2Wrapper(net) if sharded else DifferentiallyPrivateDistributedDataParallel(net)
    torch.manual_seed(1_000 + rank)  # each rank samples its own rows
    engine = PrivacyEngine()
    model, optimizer, loss, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=180),  # in total over all ranks
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost_fsdp" if sharded else "ghost",
    )
    settings = {"canaries": 500, "seed_file": "canary-seed", "delta": DELTA, "directory": out}
    optimizer = audited(optimizer, model, claim=5.6, data_loader=loader, **settings)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss(model(images), labels).backward()
            optimizer.step()
    result = optimizer.audit.finish(task="digits")
    if rank == 0:
        print(result)
        print(f"epsilon {engine.get_epsilon(DELTA):.3g} by the accountant")
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/opacus-distributed"))
    options = parser.parse_args()
    main(options.epochs, options.sharded, options.out)
