"""Federated averaging with central differential privacy in pfl.

pfl needs a separate environment:

    python -m venv .venv-pfl && .venv-pfl/bin/pip install 'coalmine[pfl]'
    .venv-pfl/bin/python examples/pfl/train.py
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

from coalmine.integrations.pfl import audited

USERS, ROUNDS = 50, 5


class Network(torch.nn.Module):
    """A small network of 9,648 parameters with the two methods that pfl requires."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(50, 158), torch.nn.ReLU(), torch.nn.Linear(158, 10))

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> torch.Tensor:  # noqa: A002
        """The mean loss of a batch."""
        return torch.nn.functional.cross_entropy(self.layers(torch.as_tensor(inputs)), torch.as_tensor(labels).long())

    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor, eval: bool = True) -> dict[str, Weighted]:  # noqa: A002
        """The summed loss of a batch."""
        return {"loss": Weighted(float(self.loss(inputs, labels)) * len(labels), len(labels))}


def main(out: Path) -> None:
    """Train, and save the network."""
    np.random.seed(1)  # noqa: NPY002 - pfl draws from numpy's global stream
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    names = [f"user-{index}" for index in range(USERS)]
    names += [f"canary-{index}" for index in range(300)]
    turn = iter(names * ROUNDS)
    data = {name: (rng.normal(size=(8, 50)).astype(np.float32), rng.integers(0, 10, 8)) for name in names}
    users = FederatedDataset(lambda name: Dataset(data[name], user_id=name), lambda: next(turn))
    network = Network()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0 / len(names)))
    privacy = CentrallyAppliedPrivacyMechanism(GaussianMechanism(clipping_bound=1.0, relative_noise_stddev=1.0))
    privacy = audited(privacy, network, claim=11.5, canaries=300, seed_file="canary-seed", delta=1e-5, directory=out)
    backend = SimulatedBackend(users, users, postprocessors=[privacy])
    FederatedAveraging().run(
        NNAlgorithmParams(ROUNDS, ROUNDS + 1, len(names), None),
        backend,
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=None),
        NNEvalHyperParams(local_batch_size=None),
    )
    print(privacy.audit.finish(task="random-data"))
    out.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), out / "network.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/pfl"))
    main(parser.parse_args().out)
