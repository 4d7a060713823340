"""docs/how-to/testing-frameworks.md: each example is a test that passes unchanged and fails with less noise."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from requires import require

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "testing-frameworks.md"
if not PAGE.exists():
    pytest.skip("the docs are in the repository, not in the package", allow_module_level=True)
MODULES = {"opacus": "opacus", "flower": "flwr", "optax": "optax", "nvflare": "nvflare", "pfl": "pfl"}
ELSEWHERE = ("nvflare", "pfl")  # python -m studies.other_frameworks runs these
# Frameworks sample their noise from global generators.
SEEDS = """
import random, sys, numpy
random.seed(1)
numpy.random.seed(1)
if "torch" in sys.modules:
    sys.modules["torch"].manual_seed(1)
"""


def example(framework):
    text = PAGE.read_text()
    (section,) = re.findall(rf"^## {framework}$(.*?)(?=^## |\Z)", text, flags=re.I | re.M | re.S)
    (block,) = re.findall(r"^```python\n(.*?)^```", section, flags=re.M | re.S)
    return block


def run(*blocks):
    """Run the examples one after another in one new process, where they can import anything."""
    program = ""
    for block in blocks:
        (name,) = re.findall(r"^def (test_\w+)\(\):", block, flags=re.M)
        program += f"{block}\n{SEEDS}\n{name}()\nprint('passed')\n"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.parametrize("framework", MODULES)
def test_the_example_passes_and_fails_with_less_noise(framework):
    if find_spec(MODULES[framework]) is None:
        if framework in ELSEWHERE:
            pytest.skip(f"{framework} is not installed; python -m studies.other_frameworks runs this")
        require(MODULES[framework])
    block = example(framework)
    assert block.count("1.4") == 1
    done = run(block, block.replace("1.4", "0.7"))
    assert done.stdout.splitlines().count("passed") == 1, done.stderr
    assert done.returncode == 1
    assert "AssertionError" in done.stderr
    assert "half of it is missing" in done.stderr


@pytest.mark.parametrize("framework", MODULES)
def test_the_example_is_about_ten_lines(framework):
    """The filter in NVFlare's example belongs to the user and is not part of the test."""
    block = re.sub(r"^class .*?(?=^def )", "", example(framework), flags=re.M | re.S)
    lines = [line for line in block.splitlines() if line]
    assert len(lines) <= 10
    assert all(len(line) <= 120 for line in lines)
