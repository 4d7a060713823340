"""fluke 0.8: DP-FedAvg whose clients train by Opacus."""

from types import SimpleNamespace

import torch

from coalmine.testing.opacus import optimizer_release
from studies.field.project import Check, Project, bare, mocked, part


def client(noise):
    bare("fluke", "fluke.algorithms")
    mocked("fluke.client", "fluke.config", "fluke.data", "fluke.server")
    import sys

    sys.modules["fluke.client"].Client = sys.modules["fluke.server"].Server = object
    sys.modules["fluke.data"].FastDataLoader = type("FastDataLoader", (), {})
    sys.modules["fluke.algorithms"].CentralizedFL = object
    module = torch.nn.Linear(1_000, 1, bias=False)
    data = torch.utils.data.TensorDataset(torch.zeros(200, 1_000), torch.zeros(200, 1))
    own = SimpleNamespace(
        model=SimpleNamespace(_module=module, train=lambda: None),
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        train_set=torch.utils.data.DataLoader(data, batch_size=100),
        hyper_params=SimpleNamespace(noise_mul=noise, max_grad_norm=1.0),
    )
    part("fluke.algorithms.dpfedavg", "DPFedAVGClient")._init_private_engine(own)
    return optimizer_release(own.optimizer)


PROJECT = Project(
    packages=("fluke-fl==0.8.1",), where="fluke/algorithms/dpfedavg.py:69, by Opacus",
    claim="`noise_mul` and `max_grad_norm` of the client, for one of its examples",
    checks=(
        Check(name="a client's step", make=client, expected="PASS", options={"dim": 1_000, "aggregate": "sum"},
              why="Opacus clips each example and adds the noise"),
    ),
)  # fmt: skip
