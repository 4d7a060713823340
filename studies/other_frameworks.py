"""pfl and NVFlare, each in an environment of its own: does the example there run, and what does its audit say?

    python -m studies.other_frameworks

pfl needs an older dp-accounting than the rest, so neither can be tried beside the tests. Environments are made once, under
studies/out.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "studies" / "out" / "frameworks"
TORCH = "torch==2.13.0"  # as in constraints.txt, whose other versions belong together with another dp-accounting
EXAMPLES = {"pfl": "examples/pfl/train.py", "nvflare": "examples/nvflare/job.py"}


def environment(name: str) -> Path:
    """The interpreter of an environment that holds coalmine and one framework."""
    home = OUT / f"{name}-venv"
    python, done = home / "bin" / "python", home / "installed"
    if not done.exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", TORCH, "--editable", f"{ROOT}[{name}]"], check=True)
        done.touch()
    return python


def try_example(name: str) -> str:
    """Run the example and say what its result holds."""
    directory = OUT / name
    subprocess.run(["rm", "-rf", directory], check=True)
    subprocess.run([environment(name), ROOT / EXAMPLES[name], "--out", directory], check=True, cwd=OUT)
    result = json.loads((directory / "result.json").read_text())
    read = {rung: found["epsilon"] for rung, found in result["adversaries"].items()}
    return f"{name}: {result['rounds']} rounds, verdict {result['verdict']}, {read}"


def main() -> int:
    """Both, one after the other."""
    OUT.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in EXAMPLES:
        try:
            print(try_example(name), flush=True)
        except (subprocess.CalledProcessError, OSError, KeyError) as error:
            print(f"{name}: failed ({error})", flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
