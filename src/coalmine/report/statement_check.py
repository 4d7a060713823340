"""Check a privacy statement against the run that it speaks of: make it again, and compare."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from coalmine.argument_checks import shown
from coalmine.audit.verification import TOLERANCE, Check
from coalmine.report.statement import PrivacyStatement, read_statement
from coalmine.report.statement_facts import NO_FACTS, Facts, facts_from_dict
from coalmine.report.statement_formats import Format, statement_text
from coalmine.storage.files import json_ready, read_regular

LARGEST_FILE = 1 << 24  # bytes
NAMED = 5  # differences that a detail lists
FINGERPRINT = re.compile(r"a facts file with the fingerprint ([0-9a-f]{64})")
VERSION = re.compile(r"Made by coalmine ([0-9A-Za-z.+!-]+) ")


def check_statement(directory: Path, file: Path, facts: Facts | None = None) -> list[Check]:
    """Whether a statement is what the run and the facts give, and whether its facts are those of the facts file.

    `file` may hold any format. A statement in JSON holds its facts; of the other formats, only those of a statement made
    without facts can be checked without the facts file.
    """
    try:
        text = read_regular(file, most=LARGEST_FILE).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} must be a privacy statement, got bytes that are not UTF-8") from None
    kind = _format(text)
    if kind is None:
        raise ValueError(f"{file} must be a privacy statement as `coalmine statement` writes it")
    if kind == "json":
        return _check_json(directory, file, _parsed(file, text), facts)
    return _check_text(directory, text, kind, facts)


def _format(text: str) -> Format | None:
    """The format of a statement by how it begins."""
    start = text.lstrip("\ufeff \r\n")
    signs: dict[Format, str] = {
        "json": "{", "html": "<!DOCTYPE html>", "card": "---", "md": "# Privacy statement", "yaml": "url_slug:",
    }  # fmt: skip
    return next((kind for kind, sign in signs.items() if start.startswith(sign)), None)


def _parsed(file: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refused, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    if not isinstance(found, dict) or not {"guarantee", "evidence"} & found.keys():
        raise ValueError(f"{file} must be a privacy statement as `coalmine statement --format json` writes it")
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose names must differ: readers do not agree on which of two to believe."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _check_json(directory: Path, file: Path, found: dict[str, Any], facts: Facts | None) -> list[Check]:
    try:
        own = facts_from_dict(found.get("facts", {}))
    except ValueError as error:
        return [Check("statement", False, f"its facts are not facts: {error}")]
    checks = [_facts_check(own, facts)]
    again = _made_again(directory, own if facts is None else facts)
    if isinstance(again, Check):
        return [again, *checks]
    expected = json.loads(json.dumps(json_ready(again.to_dict())))
    different = list(_differences(found, expected))
    same_run = _log_digest(again) in json.dumps(found.get("evidence"))
    return [_outcome(different, "json", str(found.get("coalmine_version")), again, same_run=same_run), *checks]


def _check_text(directory: Path, text: str, kind: Format, facts: Facts | None) -> list[Check]:
    fingerprint = FINGERPRINT.search(text)
    if fingerprint is not None and facts is None:
        missing = "it was made with a facts file: give it (--facts) to have the statement checked"
        return [Check("statement", None, missing), Check("facts", None, missing)]
    again = _made_again(directory, facts or NO_FACTS)
    if isinstance(again, Check):
        return [again]
    stated = fingerprint.group(1) if fingerprint else ""
    same = stated == again.facts_digest
    told = "the facts are those of the facts file" if same else "the facts are not those of the facts file"
    checks = [Check("facts", same, "the statement rests on no facts file" if same and not stated else told)]
    try:
        expected = statement_text(again, kind)
    except ValueError as error:
        return [Check("statement", False, f"no such statement follows from the run and the facts: {error}"), *checks]
    ours, theirs = _lines(expected), _lines(text)
    different = [
        f"line {number}: {shown(line)}"
        for number, line in enumerate(theirs, 1)
        if number > len(ours) or ours[number - 1] != line
    ]
    if len(theirs) < len(ours):
        different.append(f"{len(ours) - len(theirs)} lines are missing")
    version = VERSION.search(text)
    same_run = kind == "yaml" or _log_digest(again) in text  # the registry's record has no place for it
    return [_outcome(different, kind, version.group(1) if version else "", again, same_run=same_run), *checks]


def _lines(text: str) -> list[str]:
    """The lines of a text without a mark at its start and spaces at the ends of lines, which tools add and remove."""
    return [line.rstrip() for line in text.removeprefix("\ufeff").rstrip().splitlines()]


def _facts_check(own: Facts, given: Facts | None) -> Check:
    if given is None:
        if own == NO_FACTS:
            return Check("facts", True, "the statement rests on no facts file")
        return Check(
            "facts", None, "what the operator states was read from the statement itself; give the file (--facts)"
        )
    if own == given:
        return Check("facts", True, "the facts are those of the facts file")
    different = ", ".join(_first(_differences(own.to_dict(), given.to_dict())))
    return Check("facts", False, f"the facts are not those of the facts file: {different}")


def _made_again(directory: Path, facts: Facts) -> PrivacyStatement | Check:
    try:
        return read_statement(directory, facts)
    except ValueError as error:
        return Check("statement", False, f"no statement follows from the run and these facts: {error}")


def _log_digest(statement: PrivacyStatement) -> str:
    """The digest of the run's log, which no other run has; empty where there is none."""
    return statement.items["evidence.log_digest"].value or ""


def _outcome(different: list[str], kind: str, version: str, again: PrivacyStatement, *, same_run: bool) -> Check:
    if not different:
        return Check("statement", True, f"every item follows from the run and the facts ({kind})")
    another = "" if same_run else "it does not name this run's log, so it speaks of another run, or was changed. "
    detail = f"{another}It is not what the run and the facts give: {'; '.join(_first(iter(different)))}"
    detail = detail[:1].lower() + detail[1:]
    ours = again.to_dict()["coalmine_version"]
    if version != ours:
        detail += f". It names coalmine {shown(version)}, and this is {ours}, which may word it otherwise"
    return Check("statement", False, detail)


def _first(different: Iterator[str]) -> list[str]:
    """The first differences, and how many more there are."""
    every = list(different)
    more = [f"{len(every) - NAMED} more"] if len(every) > NAMED else []
    return every[:NAMED] + more


def _same(one: Any, two: Any) -> bool:
    """Whether two values are the same, numbers but for the last digits, in which processors differ."""
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, int | float) and isinstance(two, int | float):
        return one == two or math.isclose(one, two, rel_tol=TOLERANCE)
    return type(one) is type(two) and bool(one == two)


def _differences(one: Any, two: Any, place: str = "") -> Iterator[str]:
    """Where two values of JSON differ."""
    if isinstance(one, dict) and isinstance(two, dict):
        for name in [*two, *(name for name in one if name not in two)]:
            where = f"{place}.{name}" if place else str(name)
            if name not in two:
                yield f"{shown(where)} does not belong there"
            elif name not in one:
                yield f"{where} is missing"
            else:
                yield from _differences(one[name], two[name], where)
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for number, (ours, theirs) in enumerate(zip(one, two, strict=True)):
            yield from _differences(ours, theirs, f"{place}[{number}]")
    elif not _same(one, two):
        yield f"{place} is {shown(one)} and must be {shown(two)}"
