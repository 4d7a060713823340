"""The privacy statement of a run with Opacus says what its config says."""

import tomllib
from contextlib import nullcontext
from importlib.metadata import version

import pytest
from requires import require

require("opacus")
from opacus_training import WARNINGS, start  # noqa: E402
from statements import complete, values  # noqa: E402

from coalmine.report.statement import read_statement  # noqa: E402
from coalmine.report.statement_facts import read_facts  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*WARNINGS)


def test_a_statement_names_the_unit_that_a_row_holds(tmp_path):
    sizes = {"examples": 200, "batch": 40, "canaries": 40, "steps": 4}
    optimizer, _ = start(**sizes, observe=True, directory=tmp_path, unit=" diary entry")
    result = optimizer.audit.finish()
    assert result.notes[-1].startswith("privacy unit: one diary entry (a row of the data set)")
    optimizer.audit.directory.close()
    statement = read_statement(tmp_path)
    assert statement.items["guarantee.unit"].value == "diary entry"
    assert statement.items["guarantee.unit_details"].text == "One row of the data set holds one diary entry."
    assert statement.items["guarantee.adjacency"].text == "add/remove: with and without one diary entry"
    assert "for one diary entry" in statement.summary[0]
    assert statement.meaning_title == "What this means for one diary entry"
    assert "each of 100 diary entries to decide which take part" in statement.guess_sentence
    for unit, fits in (("example", True), ("document", False), ("client", False)):
        facts = tmp_path / "facts.toml"
        facts.write_text(f'[guarantee]\nunit = "{unit}"\n')
        with nullcontext() if fits else pytest.raises(ValueError, match="'diary entry' in the run"):
            assert read_statement(tmp_path, read_facts(facts)).items["guarantee.unit"].value == "diary entry"


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
