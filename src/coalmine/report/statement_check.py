"""Check a privacy statement against its run: generate it again and compare."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coalmine.argument_checks import short_repr
from coalmine.log.commitment import json_equal
from coalmine.log.files import json_ready, parse_json, read_regular
from coalmine.report.statement import PrivacyStatement, read_statement
from coalmine.report.statement_facts import NO_FACTS, Facts, facts_from_dict
from coalmine.report.statement_formats import Format, statement_text
from coalmine.verification import Check
from coalmine.version import __version__

LARGEST_FILE = 1 << 24  # bytes
MOST_NAMED = 5  # differences in one message
SAME_FACTS = "the facts are those of the facts file"
OTHER_FACTS = "the facts are not those of the facts file"
NO_FACTS_USED = "the statement uses no facts file"


def check_statement(directory: Path, file: Path, facts: Facts | None = None) -> list[Check]:
    """Check that a statement follows from the run and the facts, and that its facts are those of the facts file.

    `file` may have any format. A JSON statement contains its facts. A statement in another format needs the facts file,
    unless it was made without facts.
    """
    try:
        text = read_regular(file, most=LARGEST_FILE).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} must be a privacy statement, got bytes that are not UTF-8") from None
    kind = _format(text)
    if kind is None:
        raise ValueError(f"{file} must be a privacy statement as `coalmine statement` writes it")
    if kind == "json":
        return _check_json(directory, _parse_json(file, text), facts)
    return _check_text(directory, text, kind, facts)


def _format(text: str) -> Format | None:
    """The format of a statement, recognised by its first characters; None if there is none."""
    stripped = text.lstrip("\ufeff \r\n")
    starts: dict[Format, str] = {
        "json": "{", "html": "<!DOCTYPE html>", "card": "---", "md": "# Privacy statement", "yaml": "url_slug:",
    }  # fmt: skip
    return next((kind for kind, start in starts.items() if stripped.startswith(start)), None)


def _parse_json(file: Path, text: str) -> dict[str, Any]:
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    if not isinstance(values, dict) or not {"guarantee", "evidence"} & values.keys():
        raise ValueError(f"{file} must be a privacy statement as `coalmine statement --format json` writes it")
    return values


def _check_json(directory: Path, values: dict[str, Any], facts: Facts | None) -> list[Check]:
    try:
        embedded = facts_from_dict(values.get("facts", {}))
    except ValueError as error:
        return [Check("statement", False, f"its facts are not valid: {error}")]
    checks = [_check_facts(embedded, facts)]
    rebuilt = _rebuild(directory, embedded if facts is None else facts)
    if isinstance(rebuilt, Check):
        return [rebuilt, *checks]
    expected = json.loads(json.dumps(json_ready(rebuilt.to_dict())))
    differences = list(_differences(values, expected))
    same_run = _log_digest(rebuilt) in json.dumps(values.get("evidence"))
    version = str(values.get("coalmine_version"))
    return [_statement_check(differences, "json", version, same_run=same_run), *checks]


def _check_text(directory: Path, text: str, kind: Format, facts: Facts | None) -> list[Check]:
    rebuilt = _rebuild(directory, facts or NO_FACTS)
    if isinstance(rebuilt, Check):
        return [rebuilt]
    if facts is None and rebuilt.made_by not in text:
        missing = "it was made with a facts file, or by another version of coalmine: pass the facts file (--facts)"
        return [Check("statement", None, missing), Check("facts", None, missing)]
    same = rebuilt.facts_digest in text
    detail = SAME_FACTS if same else OTHER_FACTS
    checks = [Check("facts", same, NO_FACTS_USED if same and not rebuilt.facts_digest else detail)]
    try:
        expected = _lines(statement_text(rebuilt, kind))
    except ValueError as error:
        return [Check("statement", False, f"no such statement follows from the run and the facts: {error}"), *checks]
    actual = _lines(text)
    differences = [
        f"line {number}: {short_repr(line)}"
        for number, line in enumerate(actual, 1)
        if number > len(expected) or expected[number - 1] != line
    ]
    if len(actual) < len(expected):
        differences.append(f"{len(expected) - len(actual)} lines are missing")
    version = __version__ if f"coalmine {__version__}" in text else "another version"
    same_run = kind == "yaml" or _log_digest(rebuilt) in text  # the registry's record has no field for the digest
    return [_statement_check(differences, kind, version, same_run=same_run), *checks]


def _lines(text: str) -> list[str]:
    """The lines of a text without a byte order mark and trailing spaces, which tools add and remove."""
    return [line.rstrip() for line in text.removeprefix("\ufeff").rstrip().splitlines()]


def _check_facts(embedded: Facts, facts: Facts | None) -> Check:
    """Compare the facts in a statement with those of the facts file."""
    if facts is None:
        if embedded == NO_FACTS:
            return Check("facts", True, NO_FACTS_USED)
        return Check("facts", None, "the facts were read from the statement itself; pass the facts file (--facts)")
    if embedded == facts:
        return Check("facts", True, SAME_FACTS)
    differences = ", ".join(_summarise(list(_differences(embedded.to_dict(), facts.to_dict()))))
    return Check("facts", False, f"{OTHER_FACTS}: {differences}")


def _rebuild(directory: Path, facts: Facts) -> PrivacyStatement | Check:
    """The statement of the run and the facts, or a failed check if there is none."""
    try:
        return read_statement(directory, facts)
    except ValueError as error:
        return Check("statement", False, f"no statement follows from the run and these facts: {error}")


def _log_digest(statement: PrivacyStatement) -> str:
    """The digest of the run's log, which no other run has; empty if there is none."""
    return statement.items["evidence.log_digest"].value or ""


def _statement_check(differences: list[str], kind: str, version: str, *, same_run: bool) -> Check:
    if not differences:
        return Check("statement", True, f"every item follows from the run and the facts ({kind})")
    other_run = "" if same_run else "it does not name this run's log, so it is about another run, or was changed. "
    detail = f"{other_run}It does not follow from the run and the facts: {'; '.join(_summarise(differences))}"
    detail = detail[:1].lower() + detail[1:]
    if version != __version__:
        detail += f". It was made by {short_repr(version)}; this is {__version__}, which may phrase it differently"
    return Check("statement", False, detail)


def _summarise(differences: list[str]) -> list[str]:
    """The first differences, and the number of the others."""
    more = [f"{len(differences) - MOST_NAMED} more"] if len(differences) > MOST_NAMED else []
    return differences[:MOST_NAMED] + more


def _differences(actual: Any, expected: Any, path: str = "") -> Iterator[str]:
    """A sentence for each place in which two JSON values differ."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        for name in [*expected, *(name for name in actual if name not in expected)]:
            inner = f"{path}.{name}" if path else str(name)
            if name not in expected:
                yield f"{short_repr(inner)} does not belong there"
            elif name not in actual:
                yield f"{inner} is missing"
            else:
                yield from _differences(actual[name], expected[name], inner)
    elif isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for number, pair in enumerate(zip(actual, expected, strict=True)):
            yield from _differences(*pair, f"{path}[{number}]")
    elif not json_equal(actual, expected):
        yield f"{path} is {short_repr(actual)} and must be {short_repr(expected)}"
