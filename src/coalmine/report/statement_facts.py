"""Facts that an operator states about a deployment: a TOML file, validated and read into structs."""

import datetime
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from coalmine.argument_checks import short_repr
from coalmine.log.files import read_regular

LARGEST_FILE = 1 << 18  # bytes
LONGEST_TEXT = 4_000  # characters
LARGEST_NUMBER = 1e100

Positive = Annotated[float, Meta(gt=0, le=LARGEST_NUMBER)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Count = Annotated[int, Meta(ge=1, le=10**12)]
Text = Annotated[str, Meta(min_length=1, max_length=LONGEST_TEXT)]
Texts = Annotated[list[Text], Meta(min_length=1, max_length=100)]
Variant = Literal["approximate DP", "pure DP", "zero-concentrated DP", "Rényi DP", "Gaussian DP"]
Unit = Literal["client", "document", "example"]
Adjacency = Literal["add/remove", "replace", "zero-out"]
TrustModel = Literal["central", "local", "distributed"]
Releases = Literal["final model", "all checkpoints"]
Scheme = Literal["none", "poisson", "random_allocation", "shuffled", "fixed_size"]
Sector = Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"]


class FactsPart(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One table of the file. All entries are optional."""


class GuaranteeFacts(FactsPart, frozen=True):
    """The table [guarantee]."""

    variant: Variant | None = None
    epsilon: Positive | None = None
    delta: Share | None = None
    unit: Unit | None = None
    unit_details: Text | None = None
    adjacency: Adjacency | None = None
    trust_model: TrustModel | None = None
    releases: Releases | None = None
    tuning: Text | None = None
    pretraining: Text | None = None
    evaluation: Text | None = None


class AccountingFacts(FactsPart, frozen=True):
    """The table [accounting]: the accountant, and the operator's statements on its assumptions."""

    accountant: Text | None = None
    accountant_version: Text | None = None
    sampling: Scheme | None = None
    participations: Count | None = None
    composition: Text | None = None
    noise_level: Text | None = None
    noise_law: Text | None = None
    clipping: Text | None = None
    weights: Text | None = None
    tensors: Text | None = None


class MechanismFacts(FactsPart, frozen=True):
    """The table [mechanism]."""

    clip_norm: Positive | None = None
    noise_multiplier: Positive | None = None
    noise_scheme: Text | None = None
    library: Text | None = None
    library_version: Text | None = None
    generator: Text | None = None
    precision: Text | None = None
    also_released: Text | None = None


class DeploymentFacts(FactsPart, frozen=True):
    """The table [deployment]: facts about the product for the OpenDP registry."""

    name: Text | None = None
    url_slug: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]*$", max_length=100)] | None = None
    curators: Texts | None = None
    description: Text | None = None
    intended_use: Text | None = None
    region: Text | None = None
    publication_date: datetime.date | None = None
    sector: Sector | None = None
    data_domain: Text | None = None
    actors: Text | None = None
    release_type: Literal["One release", "Many releases"] | None = None
    release_details: Text | None = None
    data_source: Literal["Static", "Dynamic"] | None = None
    access: Literal["Interactive", "Non-interactive"] | None = None
    post_processing: Text | None = None
    justification: Text | None = None
    sources: Text | None = None
    notes: Text | None = None
    authors: Texts | None = None


class Facts(FactsPart, frozen=True):
    """All facts of a facts file."""

    guarantee: GuaranteeFacts = GuaranteeFacts()
    accounting: AccountingFacts = AccountingFacts()
    mechanism: MechanismFacts = MechanismFacts()
    deployment: DeploymentFacts = DeploymentFacts()

    def to_dict(self) -> dict[str, Any]:
        """The facts that are stated, by table, for JSON."""
        tables: dict[str, Any] = msgspec.to_builtins(self)
        return {name: values for name, values in tables.items() if values}


NO_FACTS = Facts()
UNKNOWN = "{} is not a fact; `coalmine statement --template` lists all facts"
LIMITS = {  # of a `Meta`, in words
    "gt": "above {}", "ge": "of at least {}", "lt": "below {}", "le": "at most {}", "pattern": "like {}",
    "min_length": "of a length of at least {}", "max_length": "of a length of at most {}",
}  # fmt: skip


def template() -> str:
    """A facts file with every fact commented out, each with an example or its options."""
    return resources.files("coalmine.report").joinpath("templates", "facts.toml").read_text(encoding="utf-8")


def read_facts(path: Path | str) -> Facts:
    """The facts in a TOML file. Raises ValueError with a one-line message if they are not valid."""
    try:
        text = read_regular(Path(path), most=LARGEST_FILE).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} must be TOML in UTF-8, got other bytes") from None
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        raise ValueError(f"{path} must be TOML: {error}") from None
    try:
        return facts_from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def facts_from_dict(values: Any) -> Facts:
    """The facts in a dict from a facts file or a statement. Raises ValueError if they are not valid."""
    try:
        tables = _normalise(values, "the file")
        if not isinstance(tables, Mapping):
            raise ValueError(f"the file must be a table, got {short_repr(values)}")
        for name, table in tables.items():
            _check_table(name, table)
        return msgspec.convert(tables, Facts)
    except RecursionError:
        raise ValueError("tables are nested too deeply") from None


def _check_table(name: str, table: Any) -> None:
    """Raise ValueError for the first entry that is not a fact, or not of its type."""
    kinds = typing.get_type_hints(Facts)
    if name not in kinds:
        raise ValueError(UNKNOWN.format(short_repr(name)))
    if not isinstance(table, Mapping):
        raise ValueError(f"{name} must be a table, got {short_repr(table)}")
    fields = typing.get_type_hints(kinds[name], include_extras=True)
    for field, value in table.items():
        if field not in fields:
            raise ValueError(UNKNOWN.format(short_repr(field)))
        kind = next(each for each in typing.get_args(fields[field]) if each is not types.NoneType)
        try:
            msgspec.convert(value, kind)
        except (msgspec.ValidationError, OverflowError):
            raise ValueError(f"{name}.{field} must be {requirement(kind)}, got {short_repr(value)}") from None


def requirement(kind: Any) -> str:
    """What a fact of this type must be, in words.

    >>> requirement(Share), requirement(Literal["low", "high"])
    ('a number above 0 and below 1', 'one of "low", "high"')
    """
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(json.dumps(option) for option in typing.get_args(kind))}"
    base, *metas = typing.get_args(kind) if hasattr(kind, "__metadata__") else (kind,)
    words = {float: "a number", int: "a whole number", str: "text", datetime.date: "a date such as 2026-11-16"}
    limits = [
        text.format(value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}")
        for meta in metas
        for name, text in LIMITS.items()
        if (value := getattr(meta, name)) is not None
    ]
    return f"{words.get(base, 'a list of texts')} {' and '.join(limits)}".strip()


def _normalise(value: Any, name: str) -> Any:
    """The value with single spaces as white space. Raises ValueError for hidden characters and infinite numbers."""
    if isinstance(value, Mapping):
        return {key: _normalise(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalise(item, name) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{short_repr(name)} must be a finite number, got {value}")
    if isinstance(value, str):
        text = " ".join(value.split())
        hidden = next((character for character in text if not character.isprintable()), None)
        if hidden is not None:
            raise ValueError(
                f"{short_repr(name)} must be printable text, got the hidden character {short_repr(hidden)}"
            )
        return text
    return value
