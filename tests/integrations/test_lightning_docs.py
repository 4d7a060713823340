"""The callback for Lightning in docs/how-to/fine-tuning.md, with a training loop that calls it as Lightning does."""

import re
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("opacus")

from opacus_training import WARNINGS, make, quoted

pytestmark = pytest.mark.filterwarnings(*WARNINGS)

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fine-tuning.md"
STEPS = 10


@pytest.fixture
def callback(monkeypatch):
    """The page's class: a subclass of Lightning's own if it is installed, else of a class without methods."""
    stand_in = types.ModuleType("lightning")
    stand_in.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    try:
        import lightning  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "lightning", stand_in)
    code = re.search(r"^```python\n(.*?)^```", PAGE.read_text().partition("## Lightning")[2], flags=re.M | re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict = {}
    exec(code, names)
    return names["Audit"]


def test_the_callback_of_the_page_audits_every_step(callback, capsys):
    model, optimizer, loss, loader, _ = make(examples=500, batch=50)
    claim = quoted(rate=1 / len(loader), steps=STEPS)
    audit = callback(loader, canaries=300, seed=b"a secret of this test", delta=1e-5, claim=claim, progress=False)
    trainer = types.SimpleNamespace(optimizers=[optimizer])
    audit.on_train_start(trainer, model)
    for data, labels in loader:  # Lightning passes a closure to the step

        def closure(data=data, labels=labels):
            optimizer.zero_grad()
            result = loss(model(data), labels)
            result.backward()
            return result

        trainer.optimizers[0].step(closure)
    audit.on_train_end(trainer, model)
    printed = capsys.readouterr().out
    assert re.match("PASS: |UNDERPOWERED: ", printed)
    assert f"in {STEPS} steps" in printed
