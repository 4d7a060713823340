"""Helpers for tests of privacy statements: the required items, and the numbers that may appear."""

import decimal
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import jsonschema

from coalmine.report.statement import read_statement
from coalmine.report.statement_facts import NO_FACTS
from coalmine.report.statement_formats import statement_text

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "statement.schema.json").read_text())
PARTS = ("guarantee", "accounting", "mechanism", "evidence")
EVERY_ITEM = [f"{part}.{name}" for part in PARTS for name in SCHEMA["properties"][part]["required"]]
ASSUMPTIONS = [
    f"accounting.{name}"
    for name in SCHEMA["properties"]["accounting"]["required"]
    if name not in ("accountant", "accountant_version")
]


def complete(directory, facts=NO_FACTS):
    """The statement of a run, after checking that every item is filled in or says "not stated"."""
    statement = read_statement(directory, facts)
    record = json.loads(statement_text(statement, "json"))
    jsonschema.validate(record, SCHEMA)
    assert list(statement.items) == EVERY_ITEM
    missing = [key for key, item in statement.items.items() if item.text == "not stated"]
    assert record["not_stated"] == missing == [key for key, item in statement.items.items() if not item.stated]
    for key in ASSUMPTIONS:
        assert statement.items[key].basis in ("observed", "stated by the operator", "not stated"), key
    text = statement_text(statement, "md")
    assert text.count("| not stated") >= len(missing)
    for item in statement.not_stated:
        assert f"- {item.label}" in text
    return statement


def values(statement, *names):
    return {name: statement.items[name].value for name in names}


SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def numbers_in(text):
    """Every number in a text, except in fingerprints and versions."""
    text = re.sub(r"\b[0-9a-f]{32,}\b", " ", text)
    text = re.sub(r"\b\d+\.\d+\.\d+\S*", " ", text)
    text = re.sub(
        r"(?:(\d[\d.]*) · )?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda m: f"{m[1] or 1}e{m[2].translate(SUPERSCRIPTS)}", text
    )
    tokens = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", text)
    return [float(token.replace(",", "")) for token in tokens]


def leaves(value):
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def numbers_of(record):
    """The numbers in a JSON value, as numbers and within its strings."""
    numbers = set()
    for leaf in leaves(record):
        if isinstance(leaf, str):
            numbers.update(numbers_in(leaf))
        elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
            numbers.add(float(leaf))
    return numbers


def number_forms(value):
    """The forms of a number: in full, rounded to three digits, or rounded down to two or three as a lower bound."""
    yield value
    if math.isfinite(value):
        yield from (float(decimal.Context(digits, decimal.ROUND_FLOOR).create_decimal(value)) for digits in (2, 3))
        yield float(f"{value:.3g}")
        yield float(f"{value:.0f}") if abs(value) >= 1000 else value


def percent_forms(share):
    """A share as it may be written in per cent."""
    yield from (round(100 * share), round(100 * share, 1))
    if share > 0.999:
        yield 99.9
    if share < 0.001:
        yield 0.1


def posterior(prior, epsilon):
    """Bayes' rule with odds, written differently from coalmine's."""
    odds = prior / (1 - prior) * math.exp(min(epsilon, 700))
    return odds / (1 + odds)


class Visible(HTMLParser):
    """The text of a page as a browser without pictures shows it."""

    def __init__(self):
        super().__init__()
        self.hidden, self.words = 0, []

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in ("style", "script", "title")

    def handle_endtag(self, tag):
        self.hidden -= tag in ("style", "script", "title")

    def handle_data(self, data):
        if not self.hidden:
            self.words.append(data)


def visible_text(page):
    parser = Visible()
    parser.feed(page)
    return " ".join(" ".join(parser.words).split())
