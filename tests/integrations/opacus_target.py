"""DP-SGD whose noise Opacus chooses for a target epsilon, with an audit that was told the target as its claim."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from coalmine.integrations.opacus import audited

SETTINGS = {"canaries": 300, "seed": b"tests only", "delta": 1e-5, "through_clip": False}
EPOCHS, STEPS, RATE = 6, 60, 0.1


class Run:
    """A model whose noise `make_private_with_epsilon` chose, for six epochs of ten steps."""

    def __init__(self, *, accountant="rdp", target=3.0, audit=True, seed=0, **settings):
        torch.manual_seed(seed)
        data = TensorDataset(torch.randn(500, 50), torch.randint(0, 10, (500,)))
        model = nn.Sequential(nn.Linear(50, 158), nn.ReLU(), nn.Linear(158, 10))
        self.engine = PrivacyEngine(accountant=accountant)
        self.model, self.optimizer, self.loader = self.engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=50),
            target_epsilon=target,
            target_delta=1e-5,
            epochs=EPOCHS,
            max_grad_norm=1.0,
        )
        if audit:
            self.audited(**settings)

    def audited(self, **settings):
        audited(self.optimizer, self.model, **SETTINGS | {"data_loader": self.loader, "claim": 3.0} | settings)

    def train(self, epochs=EPOCHS, scheduler=None):
        for _ in range(epochs):
            for data, labels in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(data), labels).backward()
                self.optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return self

    def finish(self, **facts):
        return self.optimizer.audit.finish(**facts)
