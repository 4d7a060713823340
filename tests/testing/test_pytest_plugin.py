"""The pytest plugin, in separate pytest runs."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
TESTS = """
import numpy as np
import pytest

rng = np.random.default_rng(1)

def noised_sum(updates, std=1.4):
    clipped = updates / np.maximum(np.linalg.norm(updates, axis=1, keepdims=True), 1.0)
    return clipped.sum(axis=0) + std * rng.standard_normal(updates.shape[1])

def half_the_noise(updates):
    return noised_sum(updates, std=0.7)

def test_private(assert_private):
    assert assert_private(noised_sum, dim=500, epsilon=3.0, delta=1e-5).verdict.outcome == "PASS"

def test_not_private(assert_private):
    assert_private(half_the_noise, dim=500, epsilon=3.0, delta=1e-5)

def test_other():
    pass

@pytest.mark.privacy
def test_marked_by_hand():
    pass
"""


def run_pytest(folder, *arguments):
    (folder / "test_mine.py").write_text(TESTS)
    plugin = ["-p", "no:coalmine", "-p", "_coalmine_pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *plugin,
        "--strict-markers",
        "-W",
        "error",
        "-q",
        *arguments,
        str(folder),
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_plugin_provides_fixture_marker_and_properties(tmp_path):
    done = run_pytest(tmp_path, "--junit-xml", str(tmp_path / "out.xml"))
    assert "1 failed, 3 passed" in done.stdout
    assert "half_the_noise is not (3, 1e-05)-private for one call: VIOLATION" in done.stdout
    assert "likely fault: the noise is" in done.stdout
    assert "mechanism_check.py" not in done.stdout.split("short test summary")[0]  # the traceback ends in the test
    found = {
        case.get("name"): {prop.get("name"): prop.get("value") for prop in case.iter("property")}
        for case in ElementTree.parse(tmp_path / "out.xml").iter("testcase")
    }
    assert found["test_private"]["coalmine.noised_sum.verdict"] == "PASS"
    assert 2 < float(found["test_private"]["coalmine.noised_sum.epsilon"]) < 4
    assert found["test_not_private"]["coalmine.half_the_noise.verdict"] == "VIOLATION"
    assert float(found["test_not_private"]["coalmine.half_the_noise.epsilon"]) > 5
    assert found["test_other"] == {}


def test_the_marker_selects_the_tests_that_use_the_fixture(tmp_path):
    done = run_pytest(tmp_path, "-m", "privacy", "--collect-only")
    assert "test_private" in done.stdout
    assert "test_marked_by_hand" in done.stdout
    assert "test_other" not in done.stdout


def test_loading_the_plugin_loads_neither_coalmine_nor_scipy():
    code = "import sys, _coalmine_pytest; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "_coalmine_pytest" in loaded
    assert not {"coalmine", "scipy", "numpy"} & set(loaded)


def test_the_entry_point_names_the_module():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\ncoalmine = "_coalmine_pytest"' in text
    installed = [point for point in metadata.entry_points(group="pytest11") if point.name == "coalmine"]
    assert all(point.value == "_coalmine_pytest" for point in installed)
