"""Data canaries beside gradient canaries in one audited training."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

pytest.importorskip("opacus")

import opacus_training
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from coalmine import data_canaries
from coalmine.integrations.opacus import audited, unaudited
from coalmine.log.run_directory import RunDirectory
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.findings.records import RecordsAboveClaim
from coalmine.verification.audit_check import verify_run

pytestmark = [pytest.mark.filterwarnings(text) for text in opacus_training.WARNINGS]
SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "result.schema.json"
SEED, OTHER_SEED = b"the seed of gradients", b"the seed of records"
CENTRES = 3 * np.random.default_rng(0).normal(size=(4, 20))


def rows(count):
    rng = np.random.default_rng(count)
    labels = rng.integers(4, size=count)
    return (rng.normal(size=(count, 20)) + CENTRES[labels]).astype(np.float32), labels


def canaries(count=120, **options):
    return data_canaries.mislabelled(*rows(count), count=count, classes=4, seed=OTHER_SEED, **options)


def run(records, *, steps=12, directory=None, score=None, noise=1.0, **settings):
    """An audited training on 200 rows and the canaries that are in."""
    torch.manual_seed(0)
    data = TensorDataset(*map(torch.tensor, rows(200)))
    data = data if records is None else records.insert(data)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 4))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
        data_loader=DataLoader(data, batch_size=len(data) // 4),
        noise_multiplier=noise,
        max_grad_norm=1.0,
    )
    common = {"canaries": 60, "seed": SEED, "delta": 1e-5, "directory": directory, "replay": False, "progress": False}
    optimizer = audited(optimizer, model, data_loader=loader, data_canaries=records, **common | settings)
    while optimizer.audit.last_round < steps:
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if score is not None:
        score(model)
    return optimizer.audit.finish()


def test_one_run_has_both_kinds_of_canaries(tmp_path):
    records = canaries(every=4)
    result = run(records, directory=tmp_path / "run", claim=20.0)
    assert [rung.name for rung in result.records.rungs] == ["black-box", "black-box-iterates"]
    assert result.records["black-box"].total == 120
    assert result.records.commitment == records.commitment
    assert "outputs  " in str(result)
    assert "records: checked (" in result.details()
    stored = RunDirectory(tmp_path / "run").read_result()
    assert AuditResult.from_dict(stored) == result
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(stored)
    (derived,) = [check for check in verify_run(tmp_path / "run", SEED) if check.name == "result"]
    assert derived.held
    assert RunDirectory(tmp_path / "run").read_config()["data_canaries"]["commitment"] == records.commitment


def test_an_audit_without_data_canaries_does_not_mention_them():
    result = run(None, claim=20.0)
    assert result.records is None
    assert "records" not in {item.name for item in result.audited}
    assert "outputs" not in str(result)


def test_outputs_that_give_the_coins_away_refute_the_claim(monkeypatch):
    records = canaries()

    def score(model):
        told = records.coins + 1e-3 * np.arange(len(records)) / len(records)
        monkeypatch.setattr(type(records), "score", lambda self, model, **_: told)

    result = run(records, claim=1.0, score=score, noise=6.0)
    assert isinstance(result.verdict.finding, RecordsAboveClaim)
    assert result.verdict.rung == "black-box"
    assert "outputs of the final model tell" in str(result)


def test_scoring_leaves_the_training_as_it_is():
    """Scoring between steps draws no random number and changes no weight: same seeds, same model."""
    found = []
    for every in (None, 2):
        records = canaries(every=every)
        torch.manual_seed(1)
        result = run(records, score=lambda model: found.append(torch.nn.utils.parameters_to_vector(model.parameters())))
        assert len(result.records.rungs) == (1 if every is None else 2)
    assert torch.equal(*found)


def test_a_run_that_resumes_has_the_scores_from_before(tmp_path):
    records, other = canaries(every=2), canaries(110)
    other.insert((np.zeros((1, 20)), np.zeros(1)))
    data = records.insert(TensorDataset(*map(torch.tensor, rows(200))))
    model = nn.Linear(20, 4)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
        data_loader=DataLoader(data, batch_size=50),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    common = {"data_loader": loader, "canaries": 30, "seed": SEED, "delta": 1e-5, "replay": False, "progress": False}
    for steps in (2, 4):
        optimizer = audited(unaudited(optimizer), model, directory=tmp_path, data_canaries=records, **common)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if optimizer.audit.last_round == steps:
                break
        kept = json.loads((tmp_path / "data-canaries.json").read_text())
        optimizer.audit.close()
    assert list(kept["checkpoints"]) == ["2", "4"]
    assert len(kept["before"]) == 120
    with pytest.raises(ValueError, match="differs in data_canaries"):
        audited(unaudited(optimizer), model, directory=tmp_path, data_canaries=other, **common)


def test_canaries_that_nobody_inserted_are_refused():
    model, optimizer, _, loader, _ = opacus_training.make(examples=100, batch=50)
    common = {"data_loader": loader, "canaries": 20, "seed": SEED, "delta": 1e-5}
    with pytest.raises(ValueError, match=r"train on canaries\.insert"):
        audited(optimizer, model, data_canaries=canaries(), **common)
    inserted = canaries()
    inserted.insert((np.zeros((1, 20)), np.zeros(1)))
    with pytest.raises(TypeError, match="data_canaries need the module"):
        audited(optimizer, dict(model.named_parameters()), data_canaries=inserted, **common)
    with pytest.raises(TypeError, match=r"made by coalmine\.data_canaries, got 3"):
        audited(optimizer, model, data_canaries=3, **common)


@pytest.mark.full
def test_a_trainer_passes_data_canaries_on(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    import lora_training

    from coalmine.integrations.transformers import audited as audited_trainer

    case = lora_training.make()
    tokens = data_canaries.rare_tokens(49, length=12, count=60, seed=OTHER_SEED)
    with pytest.raises(ValueError, match=r"train on canaries\.insert"):
        audited_trainer(canaries=20, seed=SEED, delta=1e-5, data_canaries=tokens)
    case.loader.dataset.input_ids = tokens.insert((case.rows.input_ids, case.rows.labels))[0][:40]
    callback = audited_trainer(canaries=20, seed=SEED, delta=1e-5, replay=False, data_canaries=tokens)
    lora_training.trainer_of(case, callback, tmp_path, steps=2).train()
    (rung,) = callback.finish().records.rungs
    assert (rung.name, rung.total) == ("black-box", 60)
