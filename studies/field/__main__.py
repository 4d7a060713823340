"""Run the study, and print or write its table."""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from studies.field import NOT_AUDITABLE
from studies.field.project import HOME, Project

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "field.md"
OWN = ("__init__", "__main__", "project", "run")
LONGEST = 900  # seconds for one project
START, END = "<!-- table: python -m studies.field --write-docs -->", "<!-- end of table -->"


def projects() -> list[str]:
    """The names of all projects."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in OWN)


def project_of(name: str) -> Project:
    """What the file of a project states."""
    return importlib.import_module(f"studies.field.{name}").PROJECT


def installed(name: str) -> Path:
    """The folder with a project's packages, installed once."""
    target = HOME / name / "packages"
    done = HOME / name / "installed.txt"
    packages = "\n".join(project_of(name).packages)
    if not done.exists() or done.read_text() != packages:
        target.mkdir(parents=True, exist_ok=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", target]
        if project_of(name).base:
            subprocess.run([*install, *project_of(name).base], check=True)
        subprocess.run([*install, "--no-deps", *project_of(name).packages], check=True)
        done.write_text(packages)
    return target


def found_in(name: str) -> list[dict[str, Any]]:
    """The rows of a project's checks, from an earlier run if there was one."""
    results = HOME / name / "results.json"
    if not results.exists():
        path = os.pathsep.join(map(str, (installed(name), ROOT / "src", ROOT)))
        command = [sys.executable, "-m", "studies.field.run", name]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, cwd=HOME / name, capture_output=True, text=True,
            timeout=LONGEST,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
        results.write_text(done.stdout.strip().splitlines()[-1] + "\n")
    rows: list[dict[str, Any]] = json.loads(results.read_text())
    return rows


def is_right(row: dict[str, Any]) -> bool:
    """Whether the verdict is the expected one, and half the noise does not pass."""
    verdict, expected = row["as_is"]["verdict"], row["expected"]
    agrees = verdict != "PASS" if expected == "not PASS" else verdict == expected
    return agrees and row["half_noise"]["verdict"] != "PASS"


def line(package: str, row: dict[str, Any]) -> str:
    """One row of the table."""
    epsilon = row["as_is"]["epsilon"]
    shown = "–" if epsilon is None else "∞" if math.isinf(epsilon) else f"{epsilon:.3g}"
    cells = [
        package,
        row["check"],
        f"{row['claimed']:.3g}",
        row["as_is"]["verdict"],
        shown,
        row["half_noise"]["verdict"],
        row["why"],
    ]
    return "| " + " | ".join(cells) + " |"


def report_of(name: str) -> str:
    """What has become of a report for the maintainers."""
    return "report written, not sent" if (Path(__file__).parent / "reports" / f"{name}.md").exists() else ""


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """The tables of the page."""
    lines = [
        "| package | what was run | claimed ε | verdict | measured ε | with half the noise | why |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in found.items():
        package = project_of(name).packages[0].replace("==", " ")
        lines += [line(package, row) for row in rows]
    places = ["| package | where the noise is added | the claim | |", "|---|---|---|---|"]
    for name in found:
        project = project_of(name)
        cells = [project.packages[0].replace("==", " "), project.where, project.claim, report_of(name)]
        places.append("| " + " | ".join(cells) + " |")
    others = [
        "| package | why there is no verdict |",
        "|---|---|",
        *(f"| {name} | {why} |" for name, why in NOT_AUDITABLE.items()),
    ]
    return "\n\n".join("\n".join(part) for part in (lines, places, others))


def main() -> int:
    """Run the projects that have no results yet; exit with 1 if a verdict is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[[], *projects()], metavar="NAME", help="Projects to run instead of all."
    )
    parser.add_argument("--write-docs", action="store_true", help="Write the tables into docs/evidence/field.md.")
    given = parser.parse_args()
    found, bad = {}, []
    for name in given.names or projects():
        try:
            found[name] = found_in(name)
        except (RuntimeError, subprocess.SubprocessError) as error:
            bad.append(f"{name}: {error}")
            print(f"{name}: no verdict ({error})", flush=True)
            continue
        for row in found[name]:
            print(f"{name}: {row['check']}: {row['as_is']['verdict']}, expected {row['expected']}; half the noise: "
                  f"{row['half_noise']['verdict']}", flush=True)  # fmt: skip
            bad += [] if is_right(row) else [f"{name}: {row['check']} is not as expected"]
    print(
        f"{len(found)} projects with a verdict, {sum(map(len, found.values()))} checks, {len(NOT_AUDITABLE)} not auditable"
    )
    if given.write_docs:
        before, _, rest = PAGE.read_text().partition(START)
        PAGE.write_text(f"{before}{START}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}")
    print("\n".join(bad) if bad else "every verdict is the expected one")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
