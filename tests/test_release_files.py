"""The lock of all versions, and the bill of materials of a release."""

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and line[:1] != "#"
)


def test_every_version_is_locked_with_its_hashes():
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    entries = [line.split() for line in text.splitlines() if line and line[0] != "#"]
    locked = dict(entry[0].split("==") for entry in entries)
    assert locked == {name: version for name, version in PINS.items() if name != "torch"}, "run python .ci/lock.py"
    for entry in entries:
        assert len(entry) > 1, entry
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for digest in entry[1:]), entry[0]
        assert len(set(entry)) == len(entry)


def test_the_bill_of_materials_lists_every_dependency_with_its_version():
    bill = runpy.run_path(str(ROOT / ".ci" / "sbom.py"))["bill"]()
    json.dumps(bill, allow_nan=False)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    listed = {each["name"]: each for each in bill["components"]}
    assert {"numpy", "scipy", "dp-accounting", "click", "torch", "cryptography"} <= listed.keys()
    assert not {"ruff", "pytest", "sphinx"} & listed.keys()
    for name, each in listed.items():
        assert each["purl"] == f"pkg:pypi/{name}@{each['version']}"
    assert listed["numpy"]["version"] == PINS["numpy"]
    refs = {each["ref"] for each in bill["dependencies"]}
    assert refs == {"coalmine", *listed}
    assert all(set(each["dependsOn"]) <= refs for each in bill["dependencies"])
