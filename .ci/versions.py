"""Test the package with the lowest versions that pyproject.toml allows, or with the newest available.

    python .ci/versions.py lowest|newest [--python PYTHON] [--extras EXTRAS]

Installs it into a separate environment, build/lowest or build/newest, and runs the tests of everything in these extras.
Then every existing environment verifies honest audits made by this one, and this one verifies theirs. Exit code 1 if
anything fails.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ["pytest", "hypothesis", "mpmath", "jsonschema"]
TESTS = [
    "tests/cli/test_commands.py",
    "tests/cli/test_bad_input.py",
    "tests/cli/test_estimate.py",
    "tests/cli/test_plan.py",
    "tests/cli/test_compare.py",
    "tests/cli/test_verdict.py",
    "tests/cli/test_verify.py",
    "tests/audit/test_schema.py",
    "tests/audit/test_stored_runs.py",
    "tests/audit/test_verification.py",
    "tests/estimators/test_gaussians.py",
    "tests/estimators/test_null.py",
    "tests/log/test_portable.py",
    "tests/log/test_state.py",
]
# matplotlib 3.8 calls functions that newer releases of pyparsing deprecate, and the tests turn warnings into errors.
INDIRECT = ["pyparsing<3.3"]


def main() -> int:
    """Create the environment and run the tests in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("lowest", "newest"))
    parser.add_argument("--python", default=sys.executable, help="Python interpreter of the environment")
    parser.add_argument(
        "--extras", default="cli,report", help="extras to install, separated by commas (default: %(default)s)"
    )
    given = parser.parse_args()
    home = ROOT / "build" / given.kind
    subprocess.run([given.python, "-m", "venv", "--clear", str(home)], check=True)
    python = str(home / "bin" / "python")
    extras = [name for name in given.extras.split(",") if name]
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if given.kind == "lowest":
        constraints = home / "constraints.txt"
        constraints.write_text("\n".join([*lowest_versions(extras), *INDIRECT]) + "\n")
        install += ["--constraint", str(constraints)]
    named = f"[{','.join(extras)}]" if extras else ""
    subprocess.run([*install, f"{ROOT}{named}", *TOOLS], check=True)
    print(subprocess.run([python, "-m", "pip", "list", "--format", "freeze"], capture_output=True, text=True).stdout)
    tested = subprocess.run([python, "-m", "pytest", "-q", "-m", "not slow", *TESTS], cwd=ROOT).returncode
    return int(bool(tested) | (not verified_everywhere(python)))


def verified_everywhere(python: str) -> bool:
    """Whether this environment and every other verify each other's honest audits."""
    pythons = [sys.executable, *(str(ROOT / "build" / kind / "bin" / "python") for kind in ("lowest", "newest"))]
    good = True
    for maker in [each for each in pythons if Path(each).exists()]:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([maker, str(ROOT / ".ci" / "honest_run.py"), folder], check=True, cwd=folder)
            verifiers = [each for each in pythons if Path(each).exists() and python in (each, maker)]
            for home in sorted(Path(folder).iterdir()):
                for verifier in verifiers:
                    good &= verified(verifier, home, maker)
    return good


def verified(python: str, home: Path, maker: str) -> bool:
    """Whether `coalmine verify` makes every check of an audit and all of them hold."""
    record = json.loads((home / "run" / "audit" / "record.json").read_text())
    result = json.loads((home / "run" / "result.json").read_text())
    options = ["--seed-file", home / "seed", "--model", home / "model.npy", "--log-digest", result["log_digest"]]
    options += ["--commitment", record["commitment"]["statement_sha256"]]
    command = [python, "-m", "coalmine", "verify", home / "run", *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=home)
    print(f"{home.name} made by {maker}, verified by {python}: {'holds' if done.returncode == 0 else 'FAILED'}")
    if done.returncode:
        print(done.stdout + done.stderr)
    return done.returncode == 0


def lowest_versions(extras: list[str]) -> list[str]:
    """Each direct dependency at the lowest version that its range allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    names = list(extras)
    for name in names:  # grows: an extra may include others
        wanted += project["optional-dependencies"][name]
        for included in re.findall(r"coalmine\[([^]]*)\]", " ".join(project["optional-dependencies"][name])):
            names += [inner for inner in included.split(",") if inner not in names]
    found = [re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\w.]+)", each) for each in wanted]
    return [f"{each.group(1)}=={each.group(2)}" for each in found if each]


if __name__ == "__main__":
    sys.exit(main())
