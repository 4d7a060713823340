"""Compare the frozen runs with the code as it is, and write the reference again.

python tests/golden/refresh.py                   # print the differences
python tests/golden/refresh.py --write           # and write the results and texts that the stored logs give now
python tests/golden/refresh.py --train [NAME…]   # train new runs; without names, those that are missing
python tests/golden/refresh.py --logs            # train the loops in numpy again, and compare the bytes of their logs
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integrations")]
from frozen import RUNS, changes, names  # noqa: E402
from recipes import INTEGRATIONS, LOOPS, loop  # noqa: E402


def train(name: str) -> None:
    """Train a run anew, in place of the stored one."""
    shutil.rmtree(RUNS / name, ignore_errors=True)
    make(name, RUNS / name)
    for leftover in ("seed.txt", *(f"{name}/{file}" for file in LEFT_OUT)):
        (RUNS / leftover).unlink(missing_ok=True)
    write(name)


LEFT_OUT = (
    ".lock", "report.html", "checkpoint.npz", "checkpoint.previous.npz", "checkpoint.safetensors",
    "checkpoint.previous.safetensors", "model.npy", "initial.npy",
)  # fmt: skip


def make(name: str, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in LOOPS:
            loop(path, **LOOPS[name])
        else:
            INTEGRATIONS[name](path)


def write(name: str) -> None:
    """Write what the stored log of a run gives now."""
    _, found = changes(name)
    path = RUNS / name / "result.json"
    values = json.loads(path.read_text()) | finite(found["result"])
    path.write_text(compact(values))
    _, found = changes(name)  # the texts that the commands print of the new result
    (RUNS / name / "printed.json").write_text(compact(finite(found["printed"])))


def compact(values: object) -> str:
    """JSON with a line for each value, except that numbers of one list share a line."""
    text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    return re.sub(r"\[\s+[-\d][^\[\]{}\"]*\]", lambda numbers: re.sub(r"\s+", "", numbers[0]), text)


def finite(value: object) -> object:
    """A value whose infinite numbers are text, as in result.json."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def changed_logs() -> list[str]:
    """The loops that no longer write the same log, byte for byte."""
    changed = []
    for name in LOOPS:
        with tempfile.TemporaryDirectory() as folder:
            make(name, Path(folder) / name)
            file = Path("audit") / "rounds.log"
            if (Path(folder) / name / file).read_bytes() != (RUNS / name / file).read_bytes():
                changed.append(name)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--logs", action="store_true")
    asked = parser.parse_args()
    if asked.logs:
        changed = changed_logs()
        print(f"logs that changed: {', '.join(changed) or 'none'}")
        return bool(changed)
    if asked.train:
        for name in asked.names or [name for name in (*LOOPS, *INTEGRATIONS) if not (RUNS / name).exists()]:
            try:
                train(name)
            except (ImportError, ValueError) as error:
                print(f"{name}: {error}")
                shutil.rmtree(RUNS / name, ignore_errors=True)
        return 0
    found = {name: changes(name)[0] for name in asked.names or names()}
    print("\n".join(line for lines in found.values() for line in lines) or "no difference")
    changed = [name for name, lines in found.items() if lines]
    if asked.write:
        for name in changed:
            write(name)
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
