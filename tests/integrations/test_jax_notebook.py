"""The notebook of jax_privacy: it was executed, is small, and still runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from requires import require

NOTEBOOK = Path(__file__).parents[2] / "examples" / "jax_privacy" / "audit.ipynb"


@pytest.fixture(scope="module")
def code():
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_was_executed_and_is_small(code):
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    printed = ["".join(text for output in cell["outputs"] for text in output["text"]) for cell in code]
    assert printed[1].startswith("PASS\n")
    assert printed[2].startswith("VIOLATION of the noise leg")
    assert printed[3].startswith("VIOLATION of the sampling leg")
    assert NOTEBOOK.stat().st_size < 20_000


@pytest.mark.slow
def test_the_notebook_runs(code, tmp_path):
    """A process of its own: one that holds JAX's threads must not fork, and later tests do."""
    require("jax_privacy")
    program = "\n".join("".join(cell["source"]) for cell in code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "PASS\n" in done.stdout
    assert "VIOLATION of the noise leg" in done.stdout
    assert "VIOLATION of the sampling leg" in done.stdout
