"""Try the package with the lowest versions that pyproject.toml allows, or with the newest there are.

    python .ci/versions.py lowest|newest [--python PYTHON] [--extras EXTRAS]

Installs it into an environment of its own, build/lowest or build/newest, and runs the tests of everything that users with
these extras have. Exit code 1 if one fails.
"""

import argparse
import re
import subprocess
import sys
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
    "tests/audit/test_vectors.py",
    "tests/storage/test_state.py",
]


def main() -> int:
    """Make the environment and run the tests in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("lowest", "newest"))
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--extras", default="report", help="extras to install, separated by commas (default: report)")
    given = parser.parse_args()
    home = ROOT / "build" / given.kind
    subprocess.run([given.python, "-m", "venv", "--clear", str(home)], check=True)
    python = str(home / "bin" / "python")
    extras = [name for name in given.extras.split(",") if name]
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if given.kind == "lowest":
        constraints = home / "constraints.txt"
        constraints.write_text("\n".join(lowest_versions(extras)) + "\n")
        install += ["--constraint", str(constraints)]
    named = f"[{','.join(extras)}]" if extras else ""
    subprocess.run([*install, f"{ROOT}{named}", *TOOLS], check=True)
    print(subprocess.run([python, "-m", "pip", "list", "--format", "freeze"], capture_output=True, text=True).stdout)
    return subprocess.run([python, "-m", "pytest", "-q", "-m", "not slow", *TESTS], cwd=ROOT).returncode


def lowest_versions(extras: list[str]) -> list[str]:
    """Each direct dependency at the lowest version that its range allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for name in extras:
        wanted += project["optional-dependencies"][name]
    found = [re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\w.]+)", each) for each in wanted]
    return [f"{each.group(1)}=={each.group(2)}" for each in found if each]


if __name__ == "__main__":
    sys.exit(main())
