"""Run by `make wheel` in an environment that holds the wheel and its core dependencies alone."""

import importlib.util
import subprocess
import sys

import coalmine


def main() -> None:
    assert importlib.util.find_spec("torch") is None, "this environment was to hold no extras"
    assert "src" not in coalmine.__file__.split("/"), coalmine.__file__
    null, alternative = coalmine.Gaussian(0, 0.541), coalmine.Gaussian(1, 0.541)
    assert round(coalmine.gaussian_epsilon(null, alternative, delta=1e-6), 2) == 10.0
    for command in (
        ["--version"],
        ["mechanism-epsilon", "--epsilon", "3", "--delta", "1e-6", "--json"],
        ["audit-gaussian-mechanism", "--runs", "2"],
    ):
        subprocess.run([sys.executable, "-m", "coalmine", *command], check=True, stdout=subprocess.DEVNULL)
    print(f"coalmine {coalmine.__version__}: the wheel works without extras")


if __name__ == "__main__":
    main()
