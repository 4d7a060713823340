"""A frozen parameter may hold running statistics: replay leaves it as it is, and sees that it follows a row."""

import pytest

pytest.importorskip("opacus")
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

from coalmine.integrations.opacus import audited
from coalmine.result.audit_result import AuditResult

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Centred(torch.nn.Module):
    """Subtracts a running mean, kept in a parameter that is not trained."""

    def __init__(self, *, follows: bool) -> None:
        super().__init__()
        self.follows = follows
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        self.centre = torch.nn.Parameter(torch.full((16,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x - self.centre.detach().clone())
        if self.follows:
            self.centre.data.mul_(0.9).add_(x.detach().mean(dim=0), alpha=0.1)
        return y


def _trained(*, follows: bool, replay: bool) -> tuple[torch.Tensor, AuditResult]:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(160, 16), torch.randint(0, 4, (160,)))
    model = Centred(follows=follows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=40),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    settings = {"canaries": 60, "seed": b"sixteen bytes of", "delta": 1e-5, "claim": 50.0}
    optimizer = audited(optimizer, private, data_loader=loader, replay=replay, progress=False, **settings)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(private(x), y).backward()
        optimizer.step()
    return model.centre.detach().clone(), optimizer.audit.finish()


def _rows(result: AuditResult) -> str:
    return next(item.status for item in result.audited if item.name == "rows")


def test_a_frozen_parameter_that_follows_rows_is_left_as_it_is_and_seen() -> None:
    plain, _ = _trained(follows=True, replay=False)
    replayed, result = _trained(follows=True, replay=True)
    assert torch.equal(plain, replayed)
    assert _rows(result) == "failed"
    assert result.verdict is not None
    assert result.verdict.outcome != "PASS"


def test_a_frozen_parameter_that_stays_is_no_fault() -> None:
    _, result = _trained(follows=False, replay=True)
    assert _rows(result) == "checked"
