"""A run of each integration, recorded as its page says, verifies with exit code 0: `coalmine verify` finds all it needs."""

import json
import re

import numpy as np
import pytest
from requires import require

from coalmine import Audit, read_seed, write_seed
from coalmine.cli.main import main


def opacus(directory, seed_file, optimizer=None):
    torch = require("torch")
    require("opacus")
    from opacus_training import make

    from coalmine.integrations.opacus import audited

    model, optimizer_, loss, loader, _ = make(examples=200, batch=50)
    if optimizer is not None:
        optimizer_.original_optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    settings = {"canaries": 20, "seed_file": seed_file, "delta": 1e-5, "claim": 20.0, "steps": 4}
    audit = audited(optimizer_, model, data_loader=loader, directory=directory, **settings).audit
    for data, labels in loader:
        optimizer_.zero_grad()
        loss(model(data), labels).backward()
        optimizer_.step()
    audit.finish()
    audit.close()


def adam(directory, seed_file):
    opacus(directory, seed_file, "Adam")


def trainer(directory, seed_file):
    for module in ("torch", "opacus", "transformers", "peft"):
        require(module)
    from lora_training import make, trainer_of

    from coalmine.integrations.transformers import audited

    callback = audited(canaries=20, seed_file=seed_file, delta=1e-5, claim=30.0, directory=directory)
    trainer_of(make(), callback, directory.parent, steps=3).train()
    callback.finish()
    callback.audit.close()


def jax_privacy(directory, seed_file):
    require("jax_privacy")
    from jax_training import POISSON, gaussian, train

    settings = {"seed": None, "seed_file": seed_file, "canaries": 100, "claim": 30.0, "directory": directory}
    privatizer = gaussian(**settings)
    privatizer.audit.finish(**train(privatizer, POISSON))
    privatizer.audit.close()


def flower(directory, seed_file):
    require("flwr")
    from flower_training import (
        REAL,
        SMALL,
        LoopGrid,
        client_app,
        initial_arrays,
        nodes,
        server_side,
        small_run,
    )

    from coalmine.integrations.flower import audited

    settings = {"canaries": 12, "seed_file": seed_file, "delta": 1e-5, "claim": 30.0, "directory": directory}
    strategy = audited(server_side(REAL), initial_arrays(SMALL), mode="extra", **settings)
    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)))
    strategy.audit.finish()
    strategy.audit.close()


def loop(directory, seed_file):
    """As in docs/how-to/verification.md."""
    rng, model, rounds = np.random.default_rng(0), np.ones(2_000), 4
    with Audit(
        model.size,
        canaries=50,
        seed=read_seed(seed_file),
        delta=1e-5,
        rounds=rounds,
        claim=5.0,
        directory=directory,
    ) as audit:
        audit.commit_to(initial=model)
        for number in range(1, rounds + 1):
            present = audit.canaries_in_round(number)
            delta = (audit.updates(present, 1.0) + rng.normal(size=model.size)) / 10
            audit.observe_round(number, delta, present=present, noise_std=0.1, clip_norm=0.1)
            model = model + 0.5 * delta
        audit.observe_final(model)
        audit.finish()


@pytest.fixture
def verify(tmp_path, capsys, monkeypatch):
    """A function that trains by one of the recipes, and then verifies: exit code, and status by check."""
    write_seed(tmp_path / "seed")

    def call(recipe):
        recipe(tmp_path / "run", tmp_path / "seed")
        printed = capsys.readouterr().err
        record = json.loads((tmp_path / "run" / "audit" / "record.json").read_text())
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        digests = record["commitment"]["statement_sha256"], result["log_digest"]
        known = ["--seed-file", str(tmp_path / "seed"), "--commitment", digests[0], "--log-digest", digests[1]]
        if opening := re.search(r"store this opening elsewhere: (\w+)", printed):
            known += ["--opening", opening[1]]
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(tmp_path / "run"), *known, "--json"])
        return ended.value.code, json.loads(capsys.readouterr().out), [digest in printed for digest in digests]

    return call


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "recipe", [opacus, adam, pytest.param(trainer, marks=pytest.mark.full), jax_privacy, flower, loop]
)
def test_a_finished_run_verifies(recipe, verify):
    code, checks, printed = verify(recipe)
    open_ones = {name: check for name, check in checks.items() if not check["held"]}
    assert code == 0, open_ones
    beyond = {"sum"} if recipe in (adam, trainer) else {"training"} if recipe is loop else set()
    assert set(open_ones) == beyond
    assert not any(check["possible"] for check in open_ones.values())
    assert printed == [recipe is not loop] * 2
