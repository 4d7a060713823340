"""Run by `make wheel` where only the wheel is installed: without extras, then, as `try_wheel.py cli`, with that extra."""

import importlib.util
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np

import coalmine

CLI = sys.argv[1:] == ["cli"]
AGGREGATE = """
import numpy as np

rng = np.random.default_rng(1)


def release(updates):
    clipped = updates / np.maximum(np.linalg.norm(updates, axis=1, keepdims=True), 1.0)
    return clipped.sum(axis=0) + rng.normal(scale=1.4, size=updates.shape[1])
"""


def main() -> None:
    absent = ("torch", "jinja2", "matplotlib", *(() if CLI else ("click", "rich")))
    assert not any(map(importlib.util.find_spec, absent)), "this environment must not contain other extras"
    assert "src" not in coalmine.__file__.split("/"), coalmine.__file__
    packages = {file.parts[0] for file in metadata.files("coalmine") or ()}
    assert "reproduction" not in packages, "the paper's experiments must not be in the wheel"
    null, alternative = coalmine.Gaussian(0, 0.541), coalmine.Gaussian(1, 0.541)
    assert round(coalmine.gaussian_epsilon(null, alternative, delta=1e-6), 2) == 10.0
    plugins = [point.value for point in metadata.entry_points(group="pytest11") if point.name == "coalmine"]
    assert plugins == ["_coalmine_pytest"], plugins
    assert importlib.util.find_spec("_coalmine_pytest") is not None, "the pytest plugin must be in the wheel"
    with tempfile.TemporaryDirectory() as folder:
        if CLI:
            try_commands(folder)
        else:
            try_audit()
            try_missing_commands()
    print(f"coalmine {coalmine.__version__}: the wheel works {'with its commands' if CLI else 'without extras'}")


def try_audit() -> None:
    """An audit in a loop: what it found, as text and as a dict."""
    rng = np.random.default_rng(1)
    audit = coalmine.Audit(3_000, canaries=100, seed=b"a secret", delta=1e-5, rounds=12)
    model = np.zeros(3_000)
    for t in range(1, 13):
        present, noise = audit.canaries_in_round(t), rng.normal(size=model.size)
        delta = audit.updates(present, clip_norm=1.0) + noise
        audit.observe_round(t, delta, present=present, others=0 * noise, noise_std=1.0, clip_norm=1.0)
        model = model + delta
    audit.observe_final(model)
    result = audit.result(claim=coalmine.mechanism_epsilon(1.0, delta=1e-5))
    assert "known-round" in result.details()
    assert result.to_dict()["adversaries"]


def try_missing_commands() -> None:
    """Without the extra, the command says in one line what to install."""
    for command in ([sys.executable, "-m", "coalmine"], [str(Path(sys.executable).with_name("coalmine"))]):
        done = subprocess.run([*command, "run"], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        assert "pip install 'coalmine[cli]'" in done.stderr, done.stderr


def try_commands(folder: str) -> None:
    """Commands that need no other extra; the others name theirs in one line."""
    Path(folder, "mine.py").write_text(AGGREGATE)
    for command in (
        ["--version"],
        ["epsilon", "--epsilon", "3", "--delta", "1e-6", "--json"],
        ["plan", "--dim", "10000", "--delta", "1e-6"],
        ["check", "mine:release", "--epsilon", "3", "--delta", "1e-5", "--dim", "500"],
    ):
        subprocess.run([sys.executable, "-m", "coalmine", *command], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    done = subprocess.run([sys.executable, "-m", "coalmine", "run"], capture_output=True, text=True, cwd=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert "pip install 'coalmine[simulation]'" in done.stderr, done.stderr


if __name__ == "__main__":
    main()
