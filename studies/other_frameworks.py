"""The examples of pfl and NVFlare, each in its own environment, and a newer release of Flower.

    python -m studies.other_frameworks

pfl needs an older dp-accounting than the rest, so the tests cannot run these examples. Environments are created once, under
studies/out. The study fails if an example does not run, or if a second run in the same directory is not rejected.

- pfl adds noise with multiplier 1 in five rounds. Its audit must end in PASS, its intervals must cover the mechanism's
  epsilon, and each tensor must have a noise gauge.
- NVFlare neither clips nor adds noise. Each of ten canaries must have the cosine 1/√10 with their sum.
- The tests of pfl's mechanisms and of NVFlare's filters, the tests that an audit changes no other user's part of a round,
  and the examples of docs/how-to/testing-frameworks.md must pass.
- Flower's newer release is installed without its requirements, which contradict those of the rest, and runs on the
  packages of this environment. The tests of claims in Flower, and of its accountant, must pass with it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from coalmine import mechanism_epsilon

ROOT = Path(__file__).parents[1]
OUT = ROOT / "studies" / "out" / "frameworks"
TORCH = "torch==2.13.0"  # as in constraints.txt, whose other versions require another dp-accounting
TOOLS = ["pytest", "hypothesis"]
NEXT_FLOWER = "flwr==1.42.*"
EXAMPLES = {"pfl": "examples/pfl/train.py", "nvflare": "examples/nvflare/job.py"}


def environment(name: str) -> Path:
    """The interpreter of an environment with coalmine and one framework."""
    return make_environment(OUT / f"{name}-venv", TORCH, *TOOLS, "--editable", f"{ROOT}[{name}]")


def make_environment(home: Path, *packages: str) -> Path:
    """The interpreter of an environment with these pip packages, created once."""
    python, done = home / "bin" / "python", home / "installed"
    if not done.exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        done.touch()
    return python


def try_example(name: str) -> dict[str, Any]:
    """Run the example twice and return the first run's result and whether the second run was rejected."""
    directory = OUT / name
    subprocess.run(["rm", "-rf", directory], check=True)
    (OUT / "canary-seed").write_text("the seed of this study\n")
    command = [environment(name), ROOT / EXAMPLES[name], "--out", directory]
    subprocess.run(command, check=True, cwd=OUT)
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    again = subprocess.run(command, check=False, cwd=OUT, capture_output=True, text=True)
    return found | {"refused": again.returncode != 0 and "holds a finished audit" in again.stderr}


def run_tests(name: str) -> bool:
    """Whether the tests that need this framework pass in its environment."""
    tests = [f"tests/testing/test_{name}_release.py", "tests/testing/test_framework_docs.py"]
    tests.append(f"tests/integrations/test_{name}_unharmed.py")
    options = ["-q", "-p", "no:cacheprovider", "-k", name]
    return subprocess.run([environment(name), "-m", "pytest", *options, *tests], check=False, cwd=ROOT).returncode == 0


def next_flower_passes() -> bool:
    """Whether the tests of claims in Flower pass with its newer release, on the packages of this environment."""
    home = OUT / "next-flower"
    if not home.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", home, NEXT_FLOWER]
        subprocess.run(install, check=True)
    path = os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])
    no_skips = os.environ | {"PYTHONPATH": path, "COALMINE_FORBID_SKIPS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    wanted = [["tests/integrations/test_flower_participations.py"]]
    wanted.append(["tests/integrations/test_flower_coverage.py", "-k", "accountant"])
    return all(
        subprocess.run([*command, *tests], check=False, cwd=ROOT, env=no_skips).returncode == 0 for tests in wanted
    )


def failures(name: str, result: dict[str, Any]) -> list[str]:
    """The requirements that the example's result does not meet."""
    rounds, told = {"pfl": 5, "nvflare": 3}[name], (result["rounds"], result["presentations"])
    bad = [] if told == (rounds, rounds) else [f"rounds and presentations are {told}, both must be {rounds}"]
    if not result.get("refused", True):
        bad.append("a second run in the same directory is not refused")
    adversaries = result["adversaries"]
    if name == "nvflare":
        cosine = adversaries["all-iterates"]["mean"] if "all-iterates" in adversaries else math.nan
        if not abs(cosine * math.sqrt(10) - 1) < 0.01:
            bad.append(f"a canary's largest cosine is {cosine:.4f} on average, it must be {1 / math.sqrt(10):.4f}")
        return bad
    if result["verdict"] != "PASS":
        bad.append(f"the verdict is {result['verdict']}, it must be PASS")
    if "layers" not in result["gauges"]:
        bad.append("no tensor has a noise gauge")
    truth = float(mechanism_epsilon(1.0, delta=1e-5, participations=rounds))
    for rung in ("known-round", "known-others"):
        low, high = adversaries[rung]["interval"] if rung in adversaries else (math.nan, math.nan)
        if not low <= truth <= high:
            bad.append(f"{rung}: {low:.3g} … {high:.3g} does not cover {truth:.3g}")
    return bad


def main() -> int:
    """Run both examples, and the tests with the newer Flower."""
    OUT.mkdir(parents=True, exist_ok=True)
    bad = []
    for name in EXAMPLES:
        try:
            result = try_example(name)
            read = {rung: found["epsilon"] for rung, found in result["adversaries"].items()}
            print(f"{name}: {result['rounds']} rounds, verdict {result['verdict']}, {read}", flush=True)
            bad += [f"{name}: {text}" for text in failures(name, result)]
            bad += [] if run_tests(name) else [f"{name}: its tests fail"]
        except (subprocess.CalledProcessError, OSError, KeyError) as error:
            bad.append(f"{name}: failed ({error!r})")
    bad += [] if next_flower_passes() else [f"{NEXT_FLOWER}: the tests of claims in Flower fail"]
    print("\n".join(bad) if bad else "every bar met")
    return bool(bad)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.exit(main())
