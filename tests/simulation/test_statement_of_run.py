"""The privacy statement of `coalmine run` agrees with its config."""

import json
import tomllib

import pytest
from statements import complete, values

from coalmine.log.seed_file import DEMO_SEED
from coalmine.simulation import training_run
from coalmine.simulation.config import RunConfig
from coalmine.simulation.planned_privacy import PlannedPrivacy
from coalmine.verification import verify_run
from coalmine.version import __version__


def config(**changes):
    """A config of four rounds with 20 canaries."""
    given = {
        "rounds": 4,
        "participation": {"clients_per_round": 20},
        "privacy": {"noise_multiplier": 0.7, "clip_norm": 0.3},
        "canaries": {"count": 20},
        "claim": {"analytical": True},
        "engine": {"device": "cpu", "jobs": 1, "threads": 1},
    }
    return RunConfig.from_dict({"schema_version": 1} | given | changes)


KINDS = {
    "client": {},
    "example": {"task": {"level": "example"}},
    "adaptive": {"privacy": {"noise_multiplier": 0.7, "clip_norm": 0.3, "clipping": "adaptive"}},
    "tree": {"privacy": {"noise_multiplier": 0.7, "clip_norm": 0.3, "noise": "tree"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_statement_agrees_with_the_config(tmp_path, kind):
    outcome = training_run.start(config(**KINDS[kind]), tmp_path)
    settings, statement = tomllib.loads((tmp_path / "config.toml").read_text()), complete(tmp_path)
    assert values(statement, "mechanism.clip_norm", "mechanism.noise_multiplier", "guarantee.delta") == {
        "mechanism.clip_norm": settings["privacy"]["clip_norm"],
        "mechanism.noise_multiplier": settings["privacy"]["noise_multiplier"],
        "guarantee.delta": settings["privacy"]["delta"],
    }
    assert values(statement, "mechanism.library", "mechanism.library_version", "guarantee.unit") == {
        "mechanism.library": "coalmine",
        "mechanism.library_version": __version__,
        "guarantee.unit": settings["task"]["level"],
    }
    assert statement.items["guarantee.epsilon"].value == outcome.analytical_epsilon
    assert statement.items["accounting.participations"].value == outcome.trainer.presentations
    assert statement.items["guarantee.mu"].value == pytest.approx(outcome.trainer.sensitivity / 0.7, rel=1e-6)
    assert statement.items["accounting.accountant"].value == "closed form of the Gaussian mechanism, by coalmine"
    for name in ("noise_level", "noise_law", "clipping", "weights", "tensors"):
        assert statement.items[f"accounting.{name}"].basis == "observed"
    assert "anyone who has that file can regenerate the noise" in statement.items["mechanism.generator"].text
    adaptive, tree = kind == "adaptive", kind == "tree"
    assert ("clip's count" in statement.items["mechanism.also_released"].text) is adaptive
    assert ("it then adapts to the updates" in statement.items["mechanism.clip_norm"].detail) is adaptive
    assert ("tree aggregation" in statement.items["mechanism.noise_scheme"].text) is tree


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_verified_and_a_resumed_one_keeps_what_it_committed_to(tmp_path, kind, monkeypatch):
    """Another version of coalmine, or another processor, may describe the pipeline in other words and last digits."""
    training_run.start(config(**KINDS[kind]), tmp_path)
    before = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").unlink()
    section, items = PlannedPrivacy.section, PlannedPrivacy.audited_items
    monkeypatch.setattr(PlannedPrivacy, "section", lambda self, title: section(self, "another title"))
    monkeypatch.setattr(PlannedPrivacy, "audited_items", lambda self: items(self)[:1])
    training_run.resume(tmp_path)
    after = json.loads((tmp_path / "result.json").read_text())
    assert after == before
    monkeypatch.undo()
    seed = DEMO_SEED + config().seed
    checks = verify_run(tmp_path, seed, model=tmp_path / "model.npy")
    assert {check.name for check in checks if check.held is not True} == {"seed", "commitment date", "log date"}
