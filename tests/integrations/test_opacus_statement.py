"""The privacy statement of a run with Opacus says what its config says."""

import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from requires import require

require("opacus")
from opacus_training import WARNINGS, start  # noqa: E402
from statements import complete, values  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


def test_a_statement_of_opacus_says_what_the_config_says(tmp_path):
    sizes = {"examples": 200, "batch": 40, "canaries": 40, "steps": 4, "clip_norm": 0.5, "noise_multiplier": 0.8}
    optimizer, _ = start(**sizes, observe=True, directory=tmp_path)
    result = optimizer.audit.finish()
    optimizer.audit.directory.close()
    privacy, statement = tomllib.loads((tmp_path / "config.toml").read_text())["privacy"], complete(tmp_path)
    assert values(statement, "mechanism.clip_norm", "mechanism.noise_multiplier", "guarantee.delta") == {
        "mechanism.clip_norm": privacy["clip_norm"],
        "mechanism.noise_multiplier": privacy["noise_multiplier"],
        "guarantee.delta": privacy["delta"],
    }
    assert values(statement, "mechanism.library", "mechanism.library_version", "mechanism.precision") == {
        "mechanism.library": "opacus",
        "mechanism.library_version": version("opacus"),
        "mechanism.precision": "float32",
    }
    assert statement.items["guarantee.unit"].value == "example"
    assert statement.items["guarantee.trust_model"].value == "central"
    assert statement.items["guarantee.epsilon"].value == result.claim.epsilon
    assert "not cryptographic" in statement.items["mechanism.generator"].text
    assert statement.items["accounting.clipping"].basis == "observed"
    assert statement.items["accounting.accountant"].value == "opacus PRVAccountant"
    assert statement.items["accounting.accountant_version"].value == version("opacus")
    expected = f"Poisson sampling with probability {privacy['sampling_probability']:g} in 4 rounds"
    assert (statement.items["accounting.sampling"].text, result.claim.amplified) == (expected, True)
