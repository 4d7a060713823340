"""The privacy statement of a run with jax_privacy says what its config says."""

import tomllib
from importlib.metadata import version

import pytest
from requires import require

require("jax_privacy")
from jax_training import POISSON, RATE, STEPS, gaussian, train  # noqa: E402
from statements import complete, values  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


@pytest.mark.full
def test_a_statement_of_jax_privacy_says_what_the_config_says(tmp_path):
    privatizer = gaussian(directory=tmp_path, canaries=60)
    result = privatizer.audit.finish(**train(privatizer, POISSON))
    privatizer.audit.directory.close()
    privacy, statement = tomllib.loads((tmp_path / "config.toml").read_text())["privacy"], complete(tmp_path)
    assert values(statement, "mechanism.clip_norm", "mechanism.noise_multiplier", "guarantee.delta") == {
        "mechanism.clip_norm": privacy["clip_norm"],
        "mechanism.noise_multiplier": privacy["noise_multiplier"],
        "guarantee.delta": privacy["delta"],
    }
    assert values(statement, "mechanism.library", "mechanism.library_version", "mechanism.precision") == {
        "mechanism.library": "jax-privacy",
        "mechanism.library_version": version("jax-privacy"),
        "mechanism.precision": "float32",
    }
    assert statement.items["guarantee.unit"].value == "example"
    assert statement.items["guarantee.trust_model"].value == "central"
    assert statement.items["guarantee.epsilon"].value == result.claim.epsilon
    assert values(statement, "accounting.accountant", "accounting.accountant_version") == {
        "accounting.accountant": "dp-accounting PLD",
        "accounting.accountant_version": version("dp-accounting"),
    }
    sampling = statement.items["accounting.sampling"]
    assert sampling.text == f"Poisson sampling with probability {RATE} in {STEPS} rounds"
    assert sampling.basis == "observed"
    assert not statement.items["mechanism.generator"].stated
    assert not statement.items["accounting.clipping"].stated  # canaries entered after the clip
