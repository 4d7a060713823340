"""The privacy statement of a run with Flower says what its config says."""

import tomllib
from importlib.metadata import version

import pytest
from requires import require

require("flwr")
from flower_training import REAL, LoopGrid, client_app, finish_as_stated, nodes, server_side, small_audit, small_run  # noqa: E402
from statements import complete, values  # noqa: E402

from coalmine.integrations.flower import audited  # noqa: E402
from coalmine.report.statement import read_statement  # noqa: E402
from coalmine.report.statement_facts import facts_from_dict  # noqa: E402


def test_a_statement_of_flower_says_what_the_config_says(tmp_path):
    audit = small_audit(directory=tmp_path)
    strategy = audited(server_side(REAL, noise=0.7, clip=0.4), audit=audit, mode="extra")
    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)))
    result = finish_as_stated(strategy)
    audit.directory.close()
    privacy, statement = tomllib.loads((tmp_path / "config.toml").read_text())["privacy"], complete(tmp_path)
    assert values(statement, "mechanism.clip_norm", "mechanism.noise_multiplier", "guarantee.delta") == {
        "mechanism.clip_norm": privacy["clip_norm"],
        "mechanism.noise_multiplier": privacy["noise_multiplier"],
        "guarantee.delta": privacy["delta"],
    }
    assert (privacy["clip_norm"], privacy["noise_multiplier"]) == (0.4, 0.7)
    assert values(statement, "mechanism.library", "mechanism.library_version", "guarantee.unit") == {
        "mechanism.library": "flwr",
        "mechanism.library_version": version("flwr"),
        "guarantee.unit": "client",
    }
    assert statement.items["guarantee.trust_model"].value == "central"
    assert statement.items["guarantee.epsilon"].value == result.claim.epsilon
    assert statement.items["accounting.participations"].value == result.claim.participations == 3
    assert statement.items["guarantee.mu"].value == pytest.approx(3**0.5 / 0.7, rel=1e-9)
    assert not statement.items["mechanism.generator"].stated
    for part, fact in [("guarantee", {"unit": "example"}), ("mechanism", {"library_version": "0"})]:
        with pytest.raises(ValueError, match=f"{part}.{next(iter(fact))} is"):
            read_statement(tmp_path, facts_from_dict({part: fact}))
