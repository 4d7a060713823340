"""The bare package: a light import, a version, and subpackages that import in one direction only."""

import ast
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import coalmine

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
HEAVY = {
    "torch",
    "jax",
    "matplotlib",
    "plotly",
    "flwr",
    "pandas",
    "sklearn",
    "dp_accounting",
    "click",
    "rich",
    "jinja2",
}


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def seconds(code: str) -> float:
    """Processor time of a fresh interpreter, which other load on the machine hardly changes."""
    return float(python(f"import time\n{code}\nprint(time.process_time())"))


def test_import_loads_nothing_heavy():
    loaded = python("import sys, coalmine; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert not HEAVY & set(loaded)


@pytest.mark.full
def test_import_costs_at_most_1_3_times_scipy_stats():
    pairs = [(seconds("import coalmine"), seconds("import scipy.stats")) for _ in range(3)]
    ours, theirs = (min(times) for times in zip(*pairs, strict=True))
    assert ours <= 1.3 * theirs


def test_version_equals_the_installed_version():
    assert metadata.version("coalmine") == coalmine.__version__


def test_every_public_name_exists_and_is_documented():
    for name in coalmine.__all__:
        assert getattr(coalmine, name) is not None
        if not name.startswith("__"):
            assert getattr(coalmine, name).__doc__, name


def test_the_methods_that_the_documentation_lists_for_an_audit_exist():
    row = next(
        line for line in (ROOT / "docs/reference/api.md").read_text().splitlines() if line.startswith("| `Audit(")
    )
    listed = re.findall(r"`([a-z_]+)`", row)
    assert {"observe_round", "result", "seed_is_guessable"} <= set(listed)
    assert not [name for name in listed if not hasattr(coalmine.Audit, name)]


def test_subpackages_import_in_one_direction():
    """The layers of the package, checked by import-linter."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_constraints_are_exact_and_portable():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert name
            assert version
            assert not set("+@ /") & set(version)
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_no_file_of_the_package_is_longer_than_500_lines():
    long = {
        str(path.relative_to(ROOT)): count for path in SOURCES if (count := len(path.read_text().splitlines())) > 500
    }
    assert not long


def test_no_class_has_more_than_20_public_methods():
    large = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                public = {name for name in methods if not name.startswith("_")}
                if len(public) > 20:
                    large[f"{path.name}: {node.name}"] = len(public)
    assert not large


def test_at_most_one_function_in_20_has_a_complexity_above_8():
    """`make check` refuses any function above 15."""
    command = [
        "check",
        "src",
        "--select",
        "C901",
        "--config",
        "lint.mccabe.max-complexity=8",
        "--output-format",
        "json",
    ]
    done = subprocess.run([Path(sys.executable).with_name("ruff"), *command], cwd=ROOT, capture_output=True, text=True)
    functions = sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
    )
    assert len(json.loads(done.stdout)) <= functions / 20
