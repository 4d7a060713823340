"""Parts of the reference that Sphinx takes from the code, so that they cannot go stale.

A line `<!-- generated: PART ARGUMENTS -->` in a page is replaced by Markdown before the page is read.
"""

import dataclasses
import importlib
import inspect
import io
import json
import pkgutil
import re
import tokenize
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coalmine
from coalmine.cli.run import run
from coalmine.cli.run_settings import Setting
from coalmine.evidence.gauges.gauge import Gauge, all_gauges
from coalmine.report.sentences import GLOSSARY
from coalmine.simulation import config
from coalmine.simulation.config import RunConfig
from coalmine.simulation.config_sources import task_defaults
from coalmine.simulation.tasks import TASKS
from coalmine.verdict.findings import amplified
from coalmine.verdict.findings.finding import all_findings

if typing.TYPE_CHECKING:
    from sphinx.application import Sphinx

MARKER = re.compile(r"^<!-- generated: (\S+)(.*?) -->$", flags=re.MULTILINE)
ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "reference" / "result.schema.json"


def setup(app: "Sphinx") -> dict[str, Any]:
    """Register the replacement of the markers."""
    app.connect("source-read", lambda _, __, source: source.__setitem__(0, with_parts(source[0])))
    return {"parallel_read_safe": True}


def with_parts(page: str) -> str:
    """The page with every marker replaced by the part that it names."""
    return MARKER.sub(lambda found: PARTS[found[1]](*found[2].split()), page)


def cards() -> str:
    """A card for each row of the README's tables of pages, with links that lead from the site's first page."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    tables = re.findall(r"^\| (.*?) \| read \|\n\|---\|---\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return "\n\n".join(_cards(title, rows.splitlines()) for title, rows in tables)


def _cards(title: str, rows: list[str]) -> str:
    cells = [re.split(r" \| ", row.strip("| ")) for row in rows]
    boxes = [f":::{{container}} card\n**{who}**\n\n{pages}\n:::" for who, pages in cells]
    return "\n\n".join([f"## {title[0].upper()}{title[1:]}", "::::{container} cards", *boxes, "::::"])


def names_of(*rooms: str) -> str:
    """Every name of `coalmine.__all__` that is defined in these packages."""
    return "\n\n".join(_autodoc("coalmine", name) for name in public_names("coalmine") if _room(name) in rooms)


def modules_of(package: str) -> str:
    """Every module of a package that lists its public names, with these names."""
    return "\n\n".join(f"## {module}\n\n{module_names(module)}" for module in public_modules(package))


def module_names(module: str) -> str:
    """Every public name of one module."""
    return "\n\n".join(_autodoc(module, name) for name in public_names(module))


def public_modules(package: str) -> list[str]:
    """The modules of a package whose source has `__all__`; nothing is imported, as frameworks may be missing."""
    folder = Path(importlib.import_module(package).__path__[0])
    found = []
    for module in pkgutil.iter_modules([str(folder)]):
        file = folder / module.name / "__init__.py" if module.ispkg else folder / f"{module.name}.py"
        if re.search(r"^__all__ = ", file.read_text(), flags=re.MULTILINE):
            found.append(f"{package}.{module.name}")
    return found


def public_names(module: str) -> list[str]:
    """The names in a module's `__all__`, read from its source; without one, the functions and classes defined there."""
    folder = Path(coalmine.__path__[0]).parent / module.replace(".", "/")
    text = (folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")).read_text()
    if found := re.search(r"^__all__ = \[(.*?)\]", text, flags=re.MULTILINE | re.DOTALL):
        return [name for name in re.findall(r'"(\w+)"', found[1]) if not name.startswith("__")]
    return re.findall(r"^(?:def|class) ([A-Za-z]\w*)", text, flags=re.MULTILINE)


def _room(name: str) -> str:
    return getattr(coalmine, name).__module__.split(".")[1]


def _autodoc(module: str, name: str) -> str:
    """The directive that documents a name; a class is written with a capital letter."""
    kind = "autoclass" if name[0].isupper() else "autofunction"
    kind = "autoexception" if name.endswith("Error") else kind
    return f"```{{eval-rst}}\n.. {kind}:: {module}.{name}\n```"


def config_keys() -> str:
    """One table for each section of a run's config: key, type, default, meaning."""
    options = {option.key: option for option in run.params if isinstance(option, Setting)}
    options["claim.epsilon"] = options.pop("claim")
    parts = ["## Top level\n\n" + _table(_rows(RunConfig(), "", options))]
    for section, settings in vars(RunConfig()).items():
        if dataclasses.is_dataclass(settings):
            about = " ".join((inspect.getdoc(type(settings)) or "").split("\n\n")[0].split())
            parts.append(f"## [{section}]\n\n{about}\n\n{_table(_rows(settings, section, options))}")
    return "\n\n".join(parts)


def task_settings() -> str:
    """What each task sets differently from the defaults of the tables."""
    plain = _flat(task_defaults("digits"))
    rows = ["| task | settings |", "|---|---|"]
    for name, level in [*((name, "client") for name in TASKS), ("digits", "example")]:
        other = {key: value for key, value in _flat(task_defaults(name, level)).items() if plain.get(key) != value}
        other = {key: value for key, value in other.items() if key not in ("task.name", "task.level")}
        shown = ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in other.items()) or "those of the tables"
        rows.append(f"| {'any task at level example' if level == 'example' else f'`{name}`'} | {shown} |")
    return "\n".join(rows)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _rows(settings: Any, section: str, options: dict[str, Setting]) -> Iterator[tuple[str, str, str, str]]:
    hints = typing.get_type_hints(type(settings))
    comments = _comments(type(settings))
    for field in dataclasses.fields(settings):
        key = f"{section}.{field.name}" if section else field.name
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            continue
        default = "not set" if value is None else f"`{json.dumps(value)}`"
        option = options.get(key)
        meaning = [] if option is None else [option.help or ""]
        if option is not None and option.choices:
            meaning.append("One of " + ", ".join(f"`{choice}`" for choice in getattr(config, option.choices)) + ".")
        if comment := comments.get(field.name):
            meaning.append(comment[0].upper() + comment[1:] + ".")
        if option is not None:
            meaning.append(f"Option `{option.opts[-1]}`.")
        yield f"`{field.name}`", _type_name(hints[field.name]), default, " ".join(meaning).replace("|", "\\|")


def _table(rows: Iterator[tuple[str, str, str, str]]) -> str:
    return "\n".join(
        ["| key | type | default | meaning |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def _type_name(hint: Any) -> str:
    """A type as a reader of TOML knows it."""
    if isinstance(hint, types.UnionType):
        return " or ".join(_type_name(part) for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    return {int: "integer", float: "number", str: "string", bool: "boolean"}[hint]


def _comments(settings: type) -> dict[str, str]:
    """The comment that stands behind each field, by the field's name."""
    found: dict[str, str] = {}
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(settings)).readline):
        if start := re.match(r"    (\w+): ", token.line):
            name = start[1]
        if token.type == tokenize.COMMENT and name in {field.name for field in dataclasses.fields(settings)}:
            found.setdefault(name, token.string.lstrip("# ").replace('"', "`"))
        if re.match(r"    def ", token.line):
            break
    return found


def result_entries() -> str:
    """A table of the entries of result.json, from its schema."""
    schema = json.loads(SCHEMA.read_text())
    parts = ["## Entries\n\n" + _schema_table(schema)]
    for name, part in schema.get("$defs", {}).items():
        if part.get("properties"):
            parts.append(f"## {name}\n\n{part.get('description', '')}\n\n{_schema_table(part)}")
    return "\n\n".join(parts)


def _schema_table(schema: dict[str, Any]) -> str:
    rows = ["| entry | type | always there | meaning |", "|---|---|---|---|"]
    for name, part in schema["properties"].items():
        always = "yes" if name in schema.get("required", []) else "no"
        rows.append(f"| `{name}` | {_schema_type(part)} | {always} | {part.get('description', '')} |")
    return "\n".join(rows)


def _schema_type(part: dict[str, Any]) -> str:
    if "$ref" in part:
        return (
            f"[{part['$ref'].rsplit('/', 1)[1]}](#{part['$ref'].rsplit('/', 1)[1].lower()})"
            if _has_table(part)
            else (part["$ref"].rsplit("/", 1)[1])
        )
    if "enum" in part:
        return " or ".join(f"`{json.dumps(value)}`" for value in part["enum"])
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "anyOf" in part:
        return " or ".join(_schema_type(one) for one in part["anyOf"])
    kinds = part.get("type", "any")
    names = kinds if isinstance(kinds, list) else [kinds]
    if names == ["array"] and "items" in part:
        return f"list of {_schema_type(part['items'])}"
    return " or ".join(names)


def _has_table(part: dict[str, Any]) -> bool:
    return bool(json.loads(SCHEMA.read_text())["$defs"][part["$ref"].rsplit("/", 1)[1]].get("properties"))


def glossary() -> str:
    """The words of the report, as it explains them."""
    entries = "\n".join(
        f"{term}\n  {text}\n" for term, text in sorted(GLOSSARY.items(), key=lambda item: item[0].lower())
    )
    return f"```{{glossary}}\n{entries}```"


def finding_rows(kind: str) -> str:
    """A table of the findings of one outcome; or, for `amplified`, of those about claims amplified by sampling."""
    sampled = [one for one in all_findings() if one.__module__ == amplified.__name__]
    if kind == "amplified":
        lines = [f"| `{one.code}` | {one.outcome} | {one.meaning()} | {one.remedy} |" for one in sampled]
        return "\n".join(["| `code` | outcome | meaning | what to do |", "|---|---|---|---|", *lines])
    others = [one for one in all_findings() if one.outcome == kind and one not in sampled]
    lines = [f"| `{one.code}` | {one.meaning()} | {one.remedy} |" for one in others]
    return "\n".join(["| `code` | meaning | what to do |", "|---|---|---|", *lines])


def gauge_tables() -> str:
    """A section for each gauge: its question, its statistics, what they can do, and the faults that they see."""
    return "\n\n".join(_gauge_section(gauge) for gauge in all_gauges())


def _gauge_section(gauge: type[Gauge]) -> str:
    rows = [
        f"| `{one.name}{' NAME' * one.by_tensor}` | {_cell(one.meaning)} | {_cell(one.law)} "
        f"| {'refute' if one.refutes else 'bar PASS'} |"
        for one in gauge.statistics()
    ]
    advice = list(dict.fromkeys(text for one in gauge.statistics() for text in (one.advice, one.advice_above) if text))
    faults = dict.fromkeys(fault.title for each in gauge.symptoms() for fault in each.always)
    return "\n\n".join(
        [
            f"### {gauge.name[0].upper()}{gauge.name[1:]}",
            inspect.cleandoc(gauge.__doc__ or ""),
            "\n".join(["| statistic | measures | in an honest run | can |", "|---|---|---|---|", *rows]),
            "Outside the limits:\n\n" + "\n".join(f"- {text}" for text in advice),
            *([f"Known faults that always show here: {', '.join(faults)}."] if faults else []),
        ]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PARTS: dict[str, Callable[..., str]] = {
    "cards": cards,
    "names": names_of,
    "modules": modules_of,
    "module": module_names,
    "config": config_keys,
    "tasks": task_settings,
    "result": result_entries,
    "findings": finding_rows,
    "gauges": gauge_tables,
    "glossary": glossary,
}
