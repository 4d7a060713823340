"""Print the software bill of materials of a release (CycloneDX 1.6, JSON): every package that it can need, and who needs it.

    python .ci/sbom.py > dist/coalmine-0.1.0.cdx.json

Versions are those of constraints.txt, which are tested together. Extras that name other packages than the dependencies are
included, except for those of development.
"""

import importlib.metadata as metadata
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
DEVELOPMENT = ("dev", "docs")
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")
EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def bill() -> dict[str, object]:
    """The bill as values of JSON."""
    lines = (HERE / "constraints.txt").read_text().splitlines()
    pins = {normal(name): version for name, version in (line.split("==") for line in lines if "==" in line)}
    needed: dict[str, list[str]] = {}
    waiting = ["coalmine"]
    while waiting:
        name = waiting.pop()
        needed[name] = sorted(set(required(name)) & pins.keys())
        waiting += [other for other in needed[name] if other not in needed]
    packages = sorted(needed.keys() - {"coalmine"})
    version = metadata.version("coalmine")
    root = {"type": "library", "bom-ref": "coalmine", "name": "coalmine", "version": version}
    root["purl"] = purl("coalmine", version)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": [
            {"type": "library", "bom-ref": name, "name": name, "version": pins[name], "purl": purl(name, pins[name])}
            for name in packages
        ],
        "dependencies": [{"ref": name, "dependsOn": needed[name]} for name in sorted(needed)],
    }


def required(name: str) -> list[str]:
    """The names of the packages that one needs; of coalmine itself also those of its extras."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []  # an extra that is not installed here
    kept = []
    for line in lines:
        extra = EXTRA.search(line)
        if extra and (name != "coalmine" or extra[1] in DEVELOPMENT):
            continue
        found = NAME.match(line)
        assert found is not None
        kept.append(normal(found[0]))
    return [other for other in kept if other != name]


def normal(name: str) -> str:
    """A package's name as indexes have it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def purl(name: str, version: str) -> str:
    """The package URL."""
    return f"pkg:pypi/{name}@{version}"


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=1)
    print()
