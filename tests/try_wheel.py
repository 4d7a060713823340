"""Run by `make wheel` in an environment with only the wheel and its core dependencies."""

import importlib.util
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import coalmine

AGGREGATE = """
import numpy as np

rng = np.random.default_rng(1)


def release(updates):
    clipped = updates / np.maximum(np.linalg.norm(updates, axis=1, keepdims=True), 1.0)
    return clipped.sum(axis=0) + rng.normal(scale=1.4, size=updates.shape[1])
"""


def main() -> None:
    assert importlib.util.find_spec("torch") is None, "this environment must not contain extras"
    assert "src" not in coalmine.__file__.split("/"), coalmine.__file__
    null, alternative = coalmine.Gaussian(0, 0.541), coalmine.Gaussian(1, 0.541)
    assert round(coalmine.gaussian_epsilon(null, alternative, delta=1e-6), 2) == 10.0
    for command in (
        ["--version"],
        ["mechanism-epsilon", "--epsilon", "3", "--delta", "1e-6", "--json"],
        ["audit-gaussian-mechanism", "--runs", "2"],
    ):
        subprocess.run([sys.executable, "-m", "coalmine", *command], check=True, stdout=subprocess.DEVNULL)
    plugins = [point.value for point in metadata.entry_points(group="pytest11") if point.name == "coalmine"]
    assert plugins == ["_coalmine_pytest"], plugins
    assert importlib.util.find_spec("_coalmine_pytest") is not None, "the pytest plugin must be in the wheel"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mine.py").write_text(AGGREGATE)
        check = ["check", "mine:release", "--epsilon", "3", "--delta", "1e-5", "--dim", "500"]
        command = [sys.executable, "-m", "coalmine", *check]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    print(f"coalmine {coalmine.__version__}: the wheel works without extras")


if __name__ == "__main__":
    main()
