"""JUnit reports, which CI services show as a list of tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from coalmine.argument_checks import printable
from coalmine.log.files import write_atomically


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test of a report. It passed unless `problem` is set; `kind` is then its type, and `text` the whole story."""

    classname: str
    name: str
    problem: Literal["failure", "error"] | None = None
    kind: str = ""
    text: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)


def write_junit(path: Path, suite: str, cases: Sequence[Case]) -> None:
    """Write a report with one test for each case, whole or not at all."""
    suites = ElementTree.Element("testsuites")
    counts = {f"{kind}s": str(sum(case.problem == kind for case in cases)) for kind in ("failure", "error")}
    counts = {"tests": str(len(cases)), **counts, "skipped": "0"}
    element = ElementTree.SubElement(suites, "testsuite", {"name": suite, **counts})
    for case in cases:
        _add_case(element, case)
    write_atomically(path, bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)) + b"\n")


def _add_case(suite: ElementTree.Element, case: Case) -> None:
    names = {"classname": printable(case.classname), "name": printable(case.name)}
    element = ElementTree.SubElement(suite, "testcase", names)
    if case.properties:
        listed = ElementTree.SubElement(element, "properties")
        for key, value in case.properties.items():
            ElementTree.SubElement(listed, "property", {"name": f"coalmine.{key}", "value": printable(value)})
    if case.problem is not None:
        lines = [printable(line) for line in case.text.splitlines()] or [""]
        kind = {"type": printable(case.kind)} if case.kind else {}
        ElementTree.SubElement(element, case.problem, {"message": lines[0], **kind}).text = "\n".join(lines)
